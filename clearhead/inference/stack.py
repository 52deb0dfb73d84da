"""The layers of a stack in one compiled call: for one new token of each row, and for short texts read as a whole.

Legend: B batch, T tokens, M rows (tokens that are read), D width, H heads, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.core.attention import Attention, MemoryAttention
from clearhead.core.context import Context
from clearhead.core.feedforward import FeedForward
from clearhead.core.norm import LayerNorm, RMSNorm
from clearhead.core.norm import Norm as AnyNorm
from clearhead.core.rare.score_bias import BiasedAttention
from clearhead.core.shapes import States
from clearhead.core.stack import Branch as BranchModule
from clearhead.core.stack import Layer, Stack, Step
from clearhead.inference.cache import IndexedCache
from clearhead.inference.int8 import Int8Linear
from clearhead.inference.rounding import rounded_weight
from clearhead.native.stack import Branch, Keys, Matrix, Norm, RunStack, Weights, stack_runner

# In fp32, above so many rows the products of PyTorch are as fast, or faster.
MOST_FP32_ROWS: Final = 16
# Scores of longer texts are matrix products, which PyTorch computes faster.
MOST_TOKENS: Final = 128
Heads = Float[Tensor, "rows heads keys head_size"]
ACTIVATIONS: Final = ("relu", "gelu", "gelu_tanh", "silu", "relu2", "quick_gelu", "tanh")
FEED_FORWARD, SELF_ATTENTION, MEMORY_ATTENTION = range(3)
Continue = Callable[[int, States, Context], States]


def compiled_layers(stack: Stack, in_bf16: bool) -> Continue | None:
    """Return a function that runs the layers of a stack as its `continue_from` does, up to the order of sums.

    Calls that the compiled layers do not serve take the plain way: several new tokens beside cached ones, long texts,
    masks of the caller, many rows in fp32.

    Args:
        stack: its weights must not move while the function is in use.
        in_bf16: round fp32 weights and the rows they are multiplied with to bf16.

    Returns:
        None where the compiled layers do not serve the stack, or there are none.
    """
    try:
        return _FastStack(stack, in_bf16).continue_from
    except _NotServed:
        return None


class _NotServed(Exception):
    """The compiled layers do not compute this."""


class _FastStack:
    def __init__(self, stack: Stack, in_bf16: bool) -> None:
        self._plain, self._stack = stack.continue_from, stack
        self._kept: list[Tensor] = []  # what only addresses name
        self._in_bf16 = in_bf16
        self._kinds: set[Weights] = set()
        self._attentions: list[tuple[Attention, int] | None] = []
        branches = list(self._branches())
        if len(self._kinds) != 1:
            raise _NotServed
        self._kind = self._kinds.pop()
        run = stack_runner(self._kind, branches)
        if run is None:
            raise _NotServed
        self._run: RunStack = run
        used = [entry[0].spec for entry in self._attentions if entry is not None]
        # In fp32 PyTorch reads texts as fast.
        is_fit = all(isinstance(one.mask, spec.Full) and one.score_bias is None for one in used)
        self._reads_texts = self._kind != "float32" and is_fit

    def continue_from(self, depth: int, x_BTD: States, context: Context) -> States:
        cache = context.cache
        has_few_rows = self._kind != "float32" or len(x_BTD) * x_BTD.shape[1] <= MOST_FP32_ROWS
        is_step = isinstance(cache, IndexedCache) and x_BTD.shape[1] == 1
        is_text = cache is None and self._reads_texts and x_BTD.shape[1] <= MOST_TOKENS
        is_served = (is_step or is_text) and depth == 0 and has_few_rows
        if not is_served or torch.is_grad_enabled() or self._stack.training or _hides_more(context):
            if isinstance(cache, IndexedCache):
                cache.gather()
            return self._plain(depth, x_BTD, context)
        x_BTD = self._step(x_BTD, context, cache) if isinstance(cache, IndexedCache) else self._read(x_BTD, context)
        output: Tensor = self._stack.projection_out(self._stack.final_norm(x_BTD))
        return output

    def _step(self, x_B1D: States, context: Context, cache: IndexedCache) -> States:
        """Run the layers for one new token of each row."""
        cache.is_by_index = True
        batch, origin_BS, used = len(x_B1D), cache.extend_origin(len(x_B1D)), list[Tensor]()
        buffer_rows = cache.buffer_rows(batch)
        if self not in cache.keys:
            cache.keys[self] = [Keys() for _ in self._attentions]
        keys = cache.keys[self]
        for one, entry in zip(keys, self._attentions, strict=True):
            if entry is None:
                continue
            attention, context.depth = entry
            if isinstance(attention, MemoryAttention):
                key, value = attention.remembered(context)
                one.count, one.groups = key.shape[2], len(key)
                if cache.memory_origin is not None:
                    one.origin, one.groups = cache.memory_origin.data_ptr(), len(cache.memory_origin)
                one.rows_per_group = batch // one.groups
            else:
                heads, size = attention.spec.num_kv_heads, attention.spec.head_size
                kept = cache.self_attention[attention, context.depth]
                key, value = kept.extend((buffer_rows, heads, 1, size), x_B1D).unbind(0)
                one.count, one.groups, one.rows_per_group, one.has_cache = kept.length, batch, 1, True
                if origin_BS is not None:
                    one.origin, one.origin_stride = origin_BS.data_ptr(), origin_BS.stride(0)
                else:
                    one.origin = None
                _set_angles(one, [angle[:, 0, 0] for angle in _angles(attention, context) or ()], used)
                _set_bias(one, attention, key[:batch, :, : kept.length], context, used)
            used += [key, value]
            _set_buffers(one, key, value)
            _set_mask(one, attention.mask(context), used)
        x_BD = x_B1D[:, 0].float().clone(memory_format=torch.contiguous_format)
        self._run(x_BD, keys)
        return x_BD[:, None].to(x_B1D.dtype)

    def _read(self, x_BTD: States, context: Context) -> States:
        """Run the layers over whole texts without their padding, whose states become zeros."""
        batch, length, _ = x_BTD.shape
        mask_BT = context.masking.key_mask
        flat = x_BTD.flatten(0, 1)
        if mask_BT is None:
            places, starts = None, torch.arange(0, batch * length + 1, length)
        else:
            places = mask_BT.flatten().nonzero()[:, 0]
            starts = torch.cat([places.new_zeros(1), mask_BT.sum(1).cumsum(0)])
        x_MD = (flat if places is None else flat[places]).float().clone(memory_format=torch.contiguous_format)
        keys, used = [], [starts]
        for entry in self._attentions:
            if entry is None:
                keys.append(Keys())
                continue
            attention, context.depth = entry
            one, size, heads = Keys(), attention.spec.head_size, attention.spec.num_kv_heads
            one.starts, one.groups, one.count = starts.data_ptr(), batch, length
            one.key_stride, one.head_stride = heads * size, size
            rows = [angle[:, 0].expand(batch, length, -1).flatten(0, 1) for angle in _angles(attention, context) or ()]
            _set_angles(one, [row if places is None else row[places] for row in rows], used)
            keys.append(one)
        self._run(x_MD, keys)
        if places is None:
            return x_MD.view_as(x_BTD).to(x_BTD.dtype)
        return torch.zeros_like(flat).index_copy_(0, places, x_MD.to(flat.dtype)).view_as(x_BTD)

    # --- the structures of the compiled layers, from the modules ---

    def _branches(self) -> Iterator[Branch]:
        for depth, index in enumerate(self._stack.order):
            layer = self._stack.layers[index]
            assert isinstance(layer, Layer)
            for step in layer.steps:
                assert isinstance(step, Step)
                last = len(step.branches) - 1
                for number, module in enumerate(step.branches):
                    branch = self._branch(module)
                    branch.is_first, branch.is_last = number == 0, number == last
                    branch.shared, branch.out = self._norm(step.pre), self._norm(step.out)
                    function = module.function
                    self._attentions.append((function, depth) if isinstance(function, Attention) else None)
                    yield branch

    def _branch(self, module: nn.Module) -> Branch:
        assert isinstance(module, BranchModule)
        function = module.function
        branch = Branch(pre=self._norm(module.pre), post=self._norm(module.post), scale=module.scale)
        if type(function) is FeedForward and function.spec.activation in ACTIVATIONS:
            branch.function, branch.activation = FEED_FORWARD, ACTIVATIONS.index(function.spec.activation)
            branch.first, branch.last = self._matrix(function.up), self._matrix(function.down)
            branch.second = Matrix() if function.gate is None else self._matrix(function.gate)
        elif type(function) in (Attention, BiasedAttention, MemoryAttention):
            self._attention(branch, function)
        else:
            raise _NotServed
        return branch

    def _attention(self, branch: Branch, attention: Any) -> None:
        choice: spec.Attention = attention.spec
        norms = choice.query_key_norm
        if choice.clip is not None or (norms is not None and (norms.over != "head" or norms.per_head)):
            raise _NotServed
        is_memory = isinstance(attention, MemoryAttention)
        branch.function = MEMORY_ATTENTION if is_memory else SELF_ATTENTION
        branch.first, branch.last = self._matrix(attention.query), self._matrix(attention.out)
        if not is_memory:
            branch.second, branch.third = self._matrix(attention.key), self._matrix(attention.value)
        branch.query_norm, branch.key_norm = self._norm(attention.query_norm), self._norm(attention.key_norm)
        branch.norms_after_rotation = norms is not None and norms.after_rotation
        branch.score_scale, branch.soft_cap = attention.scale, choice.soft_cap or 0.0
        branch.heads, branch.kv_heads, branch.head_size = choice.num_heads, choice.num_kv_heads, choice.head_size
        branch.sink = None if attention.sink is None else self._address(attention.sink.float())

    def _norm(self, module: nn.Module) -> Norm:
        if isinstance(module, nn.Identity):
            return Norm()
        if type(module) not in (LayerNorm, RMSNorm):
            raise _NotServed
        assert isinstance(module, AnyNorm)
        weight, bias = module.weight, module.bias
        return Norm(
            weight=None if weight is None else self._address(weight.float() + float(module.has_unit_offset)),
            bias=None if bias is None else self._address(bias.float()),
            eps=module.eps,
            kind=1 if isinstance(module, LayerNorm) else 2,
        )

    def _matrix(self, linear: nn.Module) -> Matrix:
        matrix = Matrix()
        if isinstance(linear, Int8Linear):
            kind: Weights = "int8"
            weight, matrix.scales = linear.weight_int8, self._address(linear.weight_scale)
        elif type(linear) is nn.Linear and linear.weight.dtype in (torch.float32, torch.bfloat16):
            # Weights that are spread over processes are gathered for each call, into other memory.
            if hasattr(linear.weight, "placements") or "forward" in vars(linear):
                raise _NotServed
            weight, kind = linear.weight, "float32"
            if weight.dtype == torch.bfloat16:
                kind = "mixed"
            elif self._in_bf16:
                kind, weight = "mixed", rounded_weight(linear, weight)
        else:
            raise _NotServed
        if weight.device.type != "cpu" or not weight.is_contiguous():
            raise _NotServed
        self._kinds.add(kind)
        matrix.weight, (matrix.outputs, matrix.inputs) = weight.data_ptr(), weight.shape
        bias: Tensor | None = linear.bias
        matrix.bias = None if bias is None else self._address(bias.float())
        return matrix

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


def _hides_more(context: Context) -> bool:
    """Return whether a call masks more than padding and what the spec of each attention hides."""
    return context.masking.documents is not None or context.masking.allowed is not None


def _set_bias(keys: Keys, attention: Attention, key_BKSE: Heads, context: Context, used: list[Tensor]) -> None:
    """Set the bias on the scores of one new token, which depends on positions alone."""
    choice = attention.spec
    if choice.score_bias is not None:
        query_BH1E = key_BKSE.new_empty(len(key_BKSE), choice.num_heads, 1, choice.head_size)
        bias = attention.bias(query_BH1E, key_BKSE, context)
        assert bias is not None
        bias_BHS = bias[:, :, 0].float().contiguous()
        used.append(bias_BHS)
        keys.bias, keys.bias_head_stride = bias_BHS.data_ptr(), bias_BHS.stride(1) if bias_BHS.shape[1] > 1 else 0
        keys.bias_row_stride = bias_BHS.stride(0) if len(bias_BHS) > 1 else 0


def _set_buffers(keys: Keys, key: Heads, value: Heads) -> None:
    assert key.stride() == value.stride() and key.stride(3) == 1
    keys.key, keys.value = key.data_ptr(), value.data_ptr()
    keys.row_stride, keys.head_stride, keys.key_stride, _ = key.stride()
    keys.is_half = key.dtype == torch.bfloat16


def _set_mask(keys: Keys, mask: Tensor | None, used: list[Tensor]) -> None:
    keys.mask = None
    if mask is not None:
        mask_GS = mask[:, 0, 0].contiguous()
        used.append(mask_GS)
        keys.mask, keys.mask_stride = mask_GS.data_ptr(), mask_GS.stride(0) if len(mask_GS) > 1 else 0


def _angles(attention: Attention, context: Context) -> tuple[Tensor, Tensor] | None:
    rotary = attention.spec.position
    if rotary is None or isinstance(attention, MemoryAttention):
        return None
    found: tuple[Tensor, Tensor] = context.once(attention.rotation_key, lambda: attention.angles(rotary, context))
    return found


def _set_angles(keys: Keys, angles: list[Tensor], used: list[Tensor]) -> None:
    if angles:
        cos, sin = (angle.float().contiguous() for angle in angles)
        used += [cos, sin]
        keys.cos, keys.sin, keys.half = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        keys.angle_stride = cos.stride(0) if len(cos) > 1 else 0
