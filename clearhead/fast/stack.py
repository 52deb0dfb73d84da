"""All layers of a stack in one compiled call: for new tokens after cached ones, and for whole texts.

Legend: B batch, T tokens, M computed rows (tokens), D width, H heads, S keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.attention import Attention, MemoryAttention
from clearhead.core.context import Cache, Context, Sequence
from clearhead.core.feedforward import FeedForward
from clearhead.core.norm import LayerNorm, RMSNorm
from clearhead.core.norm import Norm as AnyNorm
from clearhead.core.rare.score_bias import BiasedAttention
from clearhead.core.shapes import Ids, Memory, RealMemory, States
from clearhead.core.stack import Stack
from clearhead.fast import huge_pages
from clearhead.fast.cache import IndexedCache
from clearhead.fast.kernel_arguments import (
    EVERYWHERE,
    NewTokens,
    PromptChunk,
    new_tokens,
    set_angles,
    set_bias,
    set_bias_by_place,
    set_buffers,
    set_groups,
    set_mask,
    set_memory,
    window_bounds,
)
from clearhead.fast.native.abi import ACTIVATIONS, Branch, Keys, Matrix, Norm, StackCall, UnfitTensor, address, values
from clearhead.fast.native.load import function
from clearhead.fast.nibbles import GROUP
from clearhead.fast.plan import PlannedBranch, list_branches
from clearhead.fast.stored import INT4, INT8, Stored, in_16_bits

Weights = Literal["float32", "mixed", "int8", "int4"]
"""Kind of the weights of a stack; sums are fp32 or exact.

- float32: fp32
- mixed: bf16, or fp16 that the kernels round to bf16 while they read it; rows are rounded to bf16
- int8: 8 bits, with rows rounded to 8 bits
- int4: 4 bits for most matrices, the rest as in int8
"""
RunStack = Callable[[Float[Tensor, "rows width"], list[Keys]], None]
LONGEST_TEXT: Final = 8192
Rows = Float[Tensor, "rows width"]
TokenIndices = Int[Tensor, " rows"]
CACHE_DTYPES: Final = {"float32": torch.float32, "mixed": torch.bfloat16, "int8": torch.int8, "int4": torch.int8}
"""Dtype of cached keys and values, by the kind of weights."""
FEED_FORWARD, SELF_ATTENTION, MEMORY_ATTENTION = values("Function").values()
NORM_KINDS: Final = values("NormKind")
_DTYPES: Final = {"int8": torch.int8, "int4": torch.uint8}


class NotServed(Exception):
    """The kernels do not compute a stack; the message is the reason, in words that follow "plain:"."""


class StackPlan:
    """One kernel call for all layers of a stack; the results equal those of the layers up to the order of sums.

    The plan does not change, so threads share it. It holds the tensors whose addresses it names.

    Args:
        stack: the stack of the replica that uses the plan; its attention modules are the keys of a cache's entries.
        in_bf16: True rounds fp32 weights, and the rows they are multiplied with, to bf16.

    Raises:
        NotServed: the kernels do not compute these layers, or there are no kernels.
    """

    def __init__(self, stack: Stack, *, in_bf16: bool) -> None:
        self._tensors: list[Tensor] = []  # tensors to keep alive, since the kernels hold only their addresses
        self._in_bf16 = in_bf16
        self._kinds: set[Weights] = set()
        self._attentions: list[tuple[Attention, int] | None] = []
        self._stored: dict[tuple[int, str], Stored] = {}  # matrices that are widened for each call
        self._width = _input_width(stack)
        try:
            branches = [self._branch(planned) for planned in list_branches(stack)]
        except UnfitTensor as error:
            raise NotServed(str(error)) from None
        if "int4" in self._kinds:
            self._kinds.discard("int8")
        if len(self._kinds) != 1:
            raise NotServed("the weights have several dtypes")
        self.kind = self._kinds.pop()
        run = stack_runner(self.kind, branches, self._width)
        if run is None:
            raise NotServed("no kernels")
        self._branches = branches
        self._run: RunStack = self._run_widened if self._stored else run
        attentions = [entry[0] for entry in self._attentions if entry is not None]
        self.has_bias: bool = any(attention.spec.score_bias is not None for attention in attentions)
        self._has_window = any(isinstance(attention.spec.mask, spec.Window) for attention in attentions)

    def serves(self, context: Context, batch: int, length: int) -> bool:
        """Return whether the kernels compute a call with this batch size and length, without gradients.

        They do not support masks of the caller, nor texts above `LONGEST_TEXT` tokens without a cache. With a
        cache, several tokens per row in layers with a window or bias need all padding on the left.
        """
        masking, cache = context.masking, context.cache
        hides_more = not masking.documents is masking.allowed is None
        if torch.is_grad_enabled() or hides_more:
            return False
        if cache is None:  # whole texts are computed without padding
            return length <= LONGEST_TEXT
        by_distance = self._has_window or self.has_bias
        return length == 1 or not by_distance or new_tokens(context, batch).mask is None

    def extend(self, x_BTD: States, context: Context, cache: IndexedCache) -> States:
        """Run the layers for the new tokens of each row, after the cached ones."""
        batch, length, _ = x_BTD.shape
        if length > 1:
            cache.gather()
        cache.is_by_index = True
        cache.extend_row_index(batch)
        # If products are rounded anyway, keys and values are rounded too: reading them limits the speed of a step with
        # many rows.
        dtype = CACHE_DTYPES[self.kind]
        cache.convert(dtype)
        buffers = list(self._buffers(x_BTD, dtype, cache))
        new, x_MD = new_tokens(context, batch), x_BTD.flatten(0, 1)
        y_MD = torch.zeros_like(x_MD)
        for chunk in new.chunks(cache.length):
            chunk_MD = x_MD[chunk.token_indices].float().clone(memory_format=torch.contiguous_format)
            self._run(chunk_MD, self._fill_keys(chunk, new, buffers, context, cache))
            if len(chunk_MD) == len(x_MD):  # the only chunk, without padding
                return chunk_MD.to(x_BTD.dtype).view(x_BTD.shape)
            y_MD[chunk.token_indices] = chunk_MD.to(y_MD.dtype)
        return y_MD.view(x_BTD.shape)

    def _buffers(self, x_BTD: States, dtype: torch.dtype, cache: IndexedCache) -> Iterator[tuple[Tensor, ...] | None]:
        """Yield, for each self-attention, its KV buffer with room for new tokens (in int8 also scales); else None."""
        rows, length, like = cache.buffer_rows(len(x_BTD)), x_BTD.shape[1], x_BTD.new_empty(0, dtype=dtype)
        for entry in self._attentions:
            if entry is None or isinstance(entry[0], MemoryAttention):
                yield None
                continue
            choice, layer = entry[0].spec, entry
            shape = rows, choice.num_kv_heads, length, choice.head_size
            buffer = cache.self_attention[layer].extend(shape, like)
            yield (buffer, cache.scales[layer].extend((*shape[:3], 1), x_BTD)) if dtype == torch.int8 else (buffer,)

    def _fill_keys(
        self,
        chunk: PromptChunk,
        new: NewTokens,
        buffers: list[tuple[Tensor, ...] | None],
        context: Context,
        cache: IndexedCache,
    ) -> list[Keys]:
        """Return the kernel arguments for the keys of each branch, updated for a chunk of the new tokens."""
        if self not in cache.keys:
            cache.keys[self] = [Keys() for _ in self._attentions]
        keys = cache.keys[self]
        for branch_keys, entry, buffer in zip(keys, self._attentions, buffers, strict=True):
            if entry is None:
                continue
            attention, context.depth = entry
            if isinstance(attention, MemoryAttention):
                set_memory(branch_keys, chunk, new.batch, cache.memory_row_index, attention, context)
                continue
            assert buffer is not None
            branch_keys.tensors, branch_keys.row_index = [], None
            branch_keys.count, branch_keys.appends = cache.length - chunk.remaining, True
            set_groups(branch_keys, chunk, new.first_keys)
            if cache.row_index is not None:
                branch_keys.row_index = address(cache.row_index, torch.int32, new.batch, cache.length, by_row=True)
                branch_keys.row_index_stride = cache.row_index.stride(0)
            set_angles(branch_keys, attention, chunk, new.batch, context)
            if chunk.cu_seqlens is None:
                set_bias(branch_keys, attention, new.batch, context)
            else:
                set_bias_by_place(branch_keys, attention, context)
            branch_keys.window_before, branch_keys.window_after = window_bounds(attention.spec.mask)
            mask_BS = new.mask
            if self._has_window and mask_BS is not None and (mask := attention.mask(context)) is not None:
                branch_keys.window_before = branch_keys.window_after = EVERYWHERE
                mask_BS = mask[:, 0, 0]
            set_mask(branch_keys, None if mask_BS is None else mask_BS[chunk.rows])
            set_buffers(branch_keys, attention.spec, chunk.rows.start, *buffer)
        return keys

    def read(self, stack: Stack, sequence: Sequence, context: Context) -> States:
        """Embed whole texts and run the layers over them without padding; the states of padding are zeros."""
        mask_BT, (batch, length) = context.masking.key_mask, sequence.ids.shape
        token_indices = None if mask_BT is None else mask_BT.flatten().nonzero()[:, 0]
        lengths = torch.full((batch,), length) if mask_BT is None else mask_BT.sum(1)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        embedded_MD = _embed_tokens(stack, sequence, context, token_indices)
        x_MD = embedded_MD.float().contiguous()
        keys = []
        chunk = PromptChunk(slice(0, batch), slice(None) if token_indices is None else token_indices, cu_seqlens)
        for entry in self._attentions:
            keys.append(branch_keys := Keys())
            if entry is None:
                continue
            attention, context.depth = entry
            if isinstance(attention, MemoryAttention):
                set_memory(branch_keys, chunk, batch, None, attention, context)
                continue
            size, heads = attention.spec.head_size, attention.spec.num_kv_heads
            set_groups(branch_keys, chunk, None)
            branch_keys.count, branch_keys.key_stride, branch_keys.head_stride = length, heads * size, size
            branch_keys.window_before, branch_keys.window_after = window_bounds(attention.spec.mask)
            set_angles(branch_keys, attention, chunk, batch, context)
            set_bias_by_place(branch_keys, attention, context)
        self._run(x_MD, keys)
        out_MD: Tensor = stack.final_norm(x_MD.to(embedded_MD.dtype))
        if mask_BT is None or token_indices is None:
            return out_MD.view(batch, length, -1)
        padding = (~mask_BT).flatten().nonzero()[:, 0]
        padded = out_MD.new_empty(batch * length, out_MD.shape[1]).index_copy_(0, token_indices, out_MD)
        return padded.index_fill_(0, padding, 0.0).view(batch, length, -1)

    # --- the structures of the kernels, from the modules ---

    def _branch(self, planned: PlannedBranch) -> Branch:
        module, function = planned.branch, planned.branch.function
        pre, post = (self._norm(norm, self._width) for norm in (module.pre, module.post))
        branch = Branch(pre=pre, post=post, scale=module.scale)
        branch.is_first, branch.is_last = planned.is_first, planned.is_last
        branch.shared, branch.out = (self._norm(norm, self._width) for norm in (planned.step.pre, planned.step.out))
        self._attentions.append((function, planned.depth) if isinstance(function, Attention) else None)
        if type(function) is FeedForward and function.spec.activation in ACTIVATIONS:
            branch.function, branch.activation = FEED_FORWARD, ACTIVATIONS[function.spec.activation]
            size, width = function.spec.size, self._width
            self._set_matrix(branch, "first", function.up, size, width)
            self._set_matrix(branch, "last", function.down, width, size)
            if function.gate is not None:
                self._set_matrix(branch, "second", function.gate, size, width)
        elif type(function) in (Attention, BiasedAttention, MemoryAttention):
            self._attention(branch, function)
        else:
            raise NotServed(f"the kernels do not support {type(function).__name__}")
        return branch

    def _attention(self, branch: Branch, attention: Any) -> None:
        choice: spec.Attention = attention.spec
        norms = choice.query_key_norm
        if choice.clip is not None or (norms is not None and (norms.over != "head" or norms.per_head)):
            raise NotServed(
                "the kernels support neither clipped projections nor norms of queries and keys over all heads"
            )
        if choice.score_step is not None or choice.weight_step is not None:
            raise NotServed("the kernels do not support custom steps on scores or weights")
        is_memory = isinstance(attention, MemoryAttention)
        branch.function = MEMORY_ATTENTION if is_memory else SELF_ATTENTION
        width, size = self._width, choice.head_size
        of_query, of_key = choice.num_heads * size, choice.num_kv_heads * size
        self._set_matrix(branch, "first", attention.query, of_query, width)
        self._set_matrix(branch, "last", attention.out, width, of_query)
        if not is_memory:
            self._set_matrix(branch, "second", attention.key, of_key, width)
            self._set_matrix(branch, "third", attention.value, of_key, width)
        branch.query_norm, branch.key_norm = (
            self._norm(norm, size) for norm in (attention.query_norm, attention.key_norm)
        )
        branch.norms_after_rotation = norms is not None and norms.after_rotation
        branch.score_scale, branch.soft_cap = attention.scale, choice.soft_cap or 0.0
        branch.heads, branch.kv_heads, branch.head_size = choice.num_heads, choice.num_kv_heads, choice.head_size
        branch.sink = None if attention.sink is None else self._address(attention.sink, choice.num_heads)

    def _norm(self, module: nn.Module, size: int) -> Norm:
        if isinstance(module, nn.Identity):
            return Norm()
        if type(module) not in (LayerNorm, RMSNorm) or is_altered(module):
            raise NotServed(f"the kernels do not support {type(module).__name__}")
        assert isinstance(module, AnyNorm)
        weight, bias = module.weight, module.bias
        return Norm(
            weight=None if weight is None else self._address(weight.float() + float(module.has_unit_offset), size),
            bias=None if bias is None else self._address(bias, size),
            eps=module.eps,
            kind=NORM_KINDS["layer_norm" if isinstance(module, LayerNorm) else "rms_norm"],
        )

    def _set_matrix(self, branch: Branch, name: str, linear: Any, outputs: int, inputs: int) -> None:
        """Set one matrix of a branch; the branch is the last one in `_attentions`."""
        matrix = Matrix()
        if isinstance(linear, Stored) and linear.format == INT8:
            kind: Weights = "int8"
            weight, scales = linear.entries()
            matrix.scales = self._address(scales, outputs)
        elif isinstance(linear, Stored) and linear.format == INT4:
            kind = "int4"
            weight, scales = linear.entries()
            matrix.group_scales = address(scales, torch.float16, outputs, inputs // GROUP)
            self._tensors.append(scales)
        elif isinstance(linear, Stored) and linear.format.is_exact and self._in_bf16:
            kind, weight = "mixed", in_16_bits(linear.entries()[0].detach())
            matrix.is_float16 = weight.dtype == torch.float16
        elif isinstance(linear, Stored) and linear.format.is_exact:
            kind, weight = "float32", linear.entries()[0].detach()
            self._stored[len(self._attentions) - 1, name] = linear
        elif type(linear) is nn.Linear and linear.weight.dtype in (torch.float32, torch.bfloat16):
            weight, kind = linear.weight.detach(), "float32"
            if weight.dtype == torch.bfloat16:
                kind = "mixed"
            elif self._in_bf16:
                kind, weight = "mixed", huge_pages.convert(weight, torch.bfloat16)
        else:
            raise NotServed(f"the kernels do not support {type(linear).__name__}")
        is_transposed = kind == "float32" and weight.stride(0) == 1 and weight.stride(1) >= len(weight) > 1
        if weight.device.type != "cpu" or is_altered(linear) or not (is_transposed or weight.is_contiguous()):
            raise NotServed("weights are on another device, sharded over processes, or not stored row by row")
        if is_transposed:
            matrix.ldb = weight.stride(1)  # GPT-2's mapped files store matrices transposed
            matrix.weight = address(weight.T, torch.float32, inputs, outputs, by_row=True)
        elif (len(self._attentions) - 1, name) not in self._stored:
            stored_inputs = inputs // 2 if kind == "int4" else inputs
            matrix.weight = address(weight, _DTYPES.get(kind, weight.dtype), outputs, stored_inputs)
        self._kinds.add(kind)
        self._tensors.append(weight)
        matrix.outputs, matrix.inputs = outputs, inputs
        bias: Tensor | None = linear.bias
        matrix.bias = None if bias is None else self._address(bias, outputs)
        setattr(branch, name, matrix)

    def _run_widened(self, x_MD: Rows, keys: list[Keys]) -> None:
        """Run the branches one residual step at a time, with the matrices of that step widened to fp32."""
        firsts = [number for number, branch in enumerate(self._branches) if branch.is_first]
        for first, last in pairwise([*firsts, len(self._branches)]):
            branches = [Branch.from_buffer_copy(branch) for branch in self._branches[first:last]]
            weights = {key: stored.weight for key, stored in self._stored.items() if first <= key[0] < last}
            for (number, name), weight in weights.items():
                matrix: Matrix = getattr(branches[number - first], name)
                matrix.weight = address(weight, torch.float32, matrix.outputs, matrix.inputs)
            run = stack_runner(self.kind, branches, self._width)
            assert run is not None, "a plan with kernels runs only while the kernels are on"
            run(x_MD, keys[first:last])

    def _address(self, tensor: Tensor, size: int) -> int:
        self._tensors.append(tensor.detach().float().contiguous())
        return address(self._tensors[-1], torch.float32, size)


def stack_runner(weights: Weights, branches: list[Branch], width: int) -> RunStack | None:
    """Return a function that runs branches one after the other.

    Args:
        weights: kind of all matrices of the branches.
        branches: arguments of the branches. Their addresses must stay valid while the function is in use.
        width: width of the rows.

    Returns:
        A function that changes contiguous fp32 activations in place, given the keys of each branch. None without
        compiled kernels for such weights.
    """
    kernel = function("stack", pointers=1)
    needed = {"int8": ("int8",), "int4": ("int8", "int4")}.get(weights, ())
    if kernel is None or any(function(f"linear_{kind}", pointers=5, numbers=3) is None for kind in needed):
        return None
    count, kind = len(branches), values("WeightKind")[weights]
    branch_array = (Branch * count)(*branches)

    def run(x_MD: Tensor, keys: list[Keys]) -> None:
        key_array = (Keys * count)(*keys)
        x = address(x_MD, torch.float32, len(x_MD), width)
        call = StackCall(x, ctypes.addressof(branch_array), ctypes.addressof(key_array), count)
        call.M, call.D, call.weight_kind, call.most_threads = len(x_MD), width, kind, torch.get_num_threads()
        kernel(ctypes.addressof(call))

    return run


class PlannedStack(Stack):
    """A stack of a replica that runs one kernel call if its plan supports the call."""

    plan: StackPlan

    def forward(
        self,
        sequence: Sequence,
        memory: Memory | None = None,
        memory_mask: RealMemory | None = None,
        cache: Cache | None = None,
    ) -> States:
        """Run the stack; the results equal those of the plain stack up to the order of sums."""
        # A context with a cache counts the tokens of the call, so it must be made only once. The layers overwrite their
        # input, which may be the caller's vectors.
        if cache is None and sequence.embeddings is None and not torch.is_grad_enabled():
            context = Context.of(sequence, memory, memory_mask, None)
            is_by_place = sequence.positions is None or not self.plan.has_bias
            if is_by_place and self.plan.serves(context, *sequence.ids.shape):
                return self.plan.read(self, sequence, context)
        return super().forward(sequence, memory, memory_mask, cache)

    def continue_from(self, depth: int, x_BTD: States, context: Context) -> States:
        """Run the layers from a depth on; the results equal those of the plain stack up to the order of sums."""
        cache = context.cache
        if not isinstance(cache, IndexedCache):
            return super().continue_from(depth, x_BTD, context)
        if depth == 0 and self.plan.serves(context, *x_BTD.shape[:2]):
            extended_BTD: Tensor = self.final_norm(self.plan.extend(x_BTD, context, cache))
            return extended_BTD
        cache.gather()
        cache.convert(x_BTD.dtype)
        return super().continue_from(depth, x_BTD, context)


def is_altered(module: nn.Module) -> bool:
    """Return whether a module has another forward method than its class, or weights that are gathered at each call."""
    return "forward" in vars(module) or any(hasattr(weight, "placements") for weight in module._parameters.values())


def _input_width(stack: Stack) -> int:
    """Return the input width of the first matrix of a stack."""
    for module in stack.layers.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
    raise NotServed("no matrices")


def _embed_tokens(stack: Stack, sequence: Sequence, context: Context, token_indices: TokenIndices | None) -> Rows:
    """Return the embeddings of the tokens at some indices of a flattened batch; None means all tokens."""

    def take(x_BT: Ids) -> Ids:
        return x_BT.expand(sequence.ids.shape).flatten()[token_indices][None]

    if token_indices is not None:
        inputs = {"ids": sequence.ids, "segments": sequence.segments, "positions": sequence.positions}
        selected = {name: take(x_BT) for name, x_BT in inputs.items() if x_BT is not None}
        position = take(context.query_position)
        sequence = replace(sequence, mask=None, **selected)
        context = replace(context, query_position=position, key_position=position)
    x_BTD: Tensor = stack.embed(sequence, context)
    return x_BTD.flatten(0, 1)
