"""The layers of a stack in one compiled call: for new tokens beside cached ones, and for texts read as a whole.

Legend: B batch, T tokens, M rows (tokens that are read), D width, H heads, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.attention import Attention, MemoryAttention
from clearhead.core.context import Cache, Context, Sequence
from clearhead.core.feedforward import FeedForward
from clearhead.core.norm import LayerNorm, RMSNorm, Vectors
from clearhead.core.norm import Norm as AnyNorm
from clearhead.core.rare.score_bias import BiasedAttention
from clearhead.core.shapes import Ids, Memory, RealMemory, States
from clearhead.core.stack import Branch as BranchModule
from clearhead.core.stack import Layer, Stack, Step
from clearhead.fast.cache import IndexedCache
from clearhead.fast.int8 import Int8Linear
from clearhead.fast.native.abi import ACTIVATIONS, Branch, Keys, Matrix, Norm, values
from clearhead.fast.native.load import has_gemm
from clearhead.fast.native.stack import RunStack, Weights, stack_runner
from clearhead.fast.rounding import rounded_weight

# In fp32, above so many rows the products of PyTorch are as fast, or faster.
MOST_FP32_ROWS: Final = 16
# Without a GEMM in blocks: scores of longer texts are matrix products, which PyTorch computes faster.
MOST_TOKENS: Final = 128
# That run through all layers before the next ones do, so that what is computed of them stays small.
PIECE_TOKENS: Final = 2048
LONGEST_TEXT: Final = 8192
EVERYWHERE: Final = 2**40
Heads = Num[Tensor, "rows heads keys head_size"]
Rows = Float[Tensor, "rows width"]
Places = Int[Tensor, " rows"]
KEPT: Final = {"float32": torch.float32, "mixed": torch.bfloat16, "int8": torch.int8}
"""What keys and values are kept in, by the weights."""
KEY_KINDS: Final = [getattr(torch, name) for name in values("KeyKind")]
FEED_FORWARD, SELF_ATTENTION, MEMORY_ATTENTION = values("Function").values()
NORM_KINDS: Final = values("NormKind")
Piece = tuple[slice, slice]  # of the rows and of the new tokens of a call


def compiled_layers(stack: Stack, in_bf16: bool) -> Mapping[str, Callable[..., Tensor]]:
    """Return functions that do what methods of a stack do, by their names, up to the order of sums.

    Calls that the compiled layers do not serve take the plain way: several new tokens where scores have a bias or a
    memory is read, masks of the caller, many rows in fp32, long texts where there is no GEMM in blocks.

    Args:
        stack: its weights must not move while the function is in use.
        in_bf16: round fp32 weights and the rows they are multiplied with to bf16.

    Returns:
        No function where the compiled layers do not serve the stack, or there are none.
    """
    try:
        fast = _FastStack(stack, in_bf16)
    except _NotServed:
        return {}
    # What reads no texts extends a cache alone.
    return {"continue_from": fast.continue_from} | ({"forward": fast.forward} if fast.reads else {})


class _NotServed(Exception):
    """The compiled layers do not compute this."""


class _FastStack:
    def __init__(self, stack: Stack, in_bf16: bool) -> None:
        self._plain_forward, self._plain, self._stack = stack.forward, stack.continue_from, stack
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
        used = [entry[0] for entry in self._attentions if entry is not None]
        # In fp32 PyTorch reads several tokens as fast.
        self.reads = self._kind != "float32" and all(type(one) is Attention for one in used)
        self._has_window = any(isinstance(one.spec.mask, spec.Window) for one in used)
        self._has_gemm = has_gemm()

    def forward(
        self,
        sequence: Sequence,
        memory: Memory | None = None,
        memory_mask: RealMemory | None = None,
        cache: Cache | None = None,
    ) -> States:
        # A context with a cache counts the tokens of the call, so it is made only once. The layers overwrite what they
        # start from, which vectors of the caller may be.
        if cache is None and sequence.embeddings is None and not torch.is_grad_enabled():
            context = Context.of(sequence, memory, memory_mask, None)
            if self._serves(context, *sequence.ids.shape):
                return self._read(sequence, context)
        return self._plain_forward(sequence, memory, memory_mask, cache)

    def continue_from(self, depth: int, x_BTD: States, context: Context) -> States:
        cache = context.cache
        if not isinstance(cache, IndexedCache):
            return self._plain(depth, x_BTD, context)
        if depth != 0 or torch.is_grad_enabled() or not self._serves(context, *x_BTD.shape[:2]):
            cache.gather()
            cache.convert(x_BTD.dtype)
            return self._plain(depth, x_BTD, context)
        return self._finished(self._extend(x_BTD, context, cache))

    def _serves(self, context: Context, batch: int, length: int) -> bool:
        masking, cache = context.masking, context.cache
        hides_more = not masking.documents is masking.allowed is masking.prefix is None
        if self._stack.training or hides_more:
            return False
        if cache is not None and length == 1:
            return self._kind != "float32" or batch <= MOST_FP32_ROWS
        # Padding between two tokens is no distance; texts are read without it.
        is_by_place = cache is None or masking.key_mask is None or not self._has_window
        most = MOST_TOKENS if not self._has_gemm else LONGEST_TEXT if cache is None else EVERYWHERE
        return self.reads and is_by_place and length <= most

    def _finished(self, x_D: Vectors) -> Vectors:
        output: Tensor = self._stack.projection_out(self._stack.final_norm(x_D))
        return output

    def _extend(self, x_BTD: States, context: Context, cache: IndexedCache) -> States:
        """Run the layers for the new tokens of each row, beside the cached ones."""
        batch, length, _ = x_BTD.shape
        if length > 1:
            cache.gather()
        cache.is_by_index = True
        cache.extend_origin(batch)
        # Where products are of rounded numbers anyway, keys and values are rounded as well: reading them is what bounds
        # a step of many rows.
        dtype = KEPT[self._kind]
        cache.convert(dtype)
        buffers = list(self._buffers(x_BTD, dtype, context, cache))
        y_BTD = x_BTD.new_empty(x_BTD.shape)
        for piece in _pieces(batch, length):
            x_MD = x_BTD[piece].flatten(0, 1).float().clone(memory_format=torch.contiguous_format)
            used: list[Tensor] = []
            self._run(x_MD, self._cached_keys(piece, buffers, context, cache, used))
            y_BTD[piece] = x_MD.view_as(y_BTD[piece])
        return y_BTD

    def _buffers(
        self, x_BTD: States, dtype: torch.dtype, context: Context, cache: IndexedCache
    ) -> Iterator[tuple[Tensor, ...] | None]:
        """Give the buffer of each attention, with room for new tokens, in 8 bits with scales; or keys of a memory."""
        rows, length, like = cache.buffer_rows(len(x_BTD)), x_BTD.shape[1], x_BTD.new_empty(0, dtype=dtype)
        for entry in self._attentions:
            if entry is None:
                yield None
                continue
            attention, context.depth = entry
            if isinstance(attention, MemoryAttention):
                yield attention.remembered(context)
                continue
            choice, place = attention.spec, (attention, context.depth)
            shape = rows, choice.num_kv_heads, length, choice.head_size
            kept = cache.self_attention[place].extend(shape, like)
            yield (kept, cache.scales[place].extend((*shape[:3], 1), x_BTD)) if dtype == torch.int8 else (kept,)

    def _cached_keys(
        self,
        piece: Piece,
        buffers: list[tuple[Tensor, ...] | None],
        context: Context,
        cache: IndexedCache,
        used: list[Tensor],
    ) -> list[Keys]:
        """Return the keys of each branch for a piece of the new tokens; the tensors that these name go into `used`."""
        rows, tokens = piece
        keys = cache.keys.setdefault(self, [Keys() for _ in self._attentions])
        for one, entry, kept in zip(keys, self._attentions, buffers, strict=True):
            if entry is None or kept is None:
                continue
            attention, context.depth = entry
            if isinstance(attention, MemoryAttention):
                one.count, one.groups = kept[0].shape[2], len(kept[0])
                if cache.memory_origin is not None:
                    one.origin, one.groups = cache.memory_origin.data_ptr(), len(cache.memory_origin)
                one.rows_per_group, one.before, one.after = rows.stop // one.groups, EVERYWHERE, EVERYWHERE
                _set_mask(one, attention.mask(context), 0, used)
                _set_places(one, *kept)
                continue
            one.count = cache.length - context.masking.num_queries + tokens.stop
            one.groups, one.rows_per_group = rows.stop - rows.start, tokens.stop - tokens.start
            one.has_cache = True
            if cache.origin is not None:
                one.origin, one.origin_stride = cache.origin.data_ptr(), cache.origin.stride(0)
            else:
                one.origin = None
            _set_angles(one, _angles(attention, context, piece), used)
            _set_bias(one, attention, rows.stop - rows.start, context, used)
            key_mask = context.masking.key_mask
            if self._has_window and key_mask is not None:
                one.before, one.after = EVERYWHERE, EVERYWHERE
                _set_mask(one, attention.mask(context), 0, used)
            else:
                one.before, one.after = _sight(attention.spec.mask)
                _set_mask(one, None if key_mask is None else key_mask[:, None, None], rows.start, used)
            _set_buffers(one, rows.start, *kept)
        return keys

    def _read(self, sequence: Sequence, context: Context) -> States:
        """Embed whole texts and run the layers over them without their padding, whose states become zeros."""
        mask_BT, (batch, length) = context.masking.key_mask, sequence.ids.shape
        places = None if mask_BT is None else mask_BT.flatten().nonzero()[:, 0]
        lengths = torch.full((batch,), length) if mask_BT is None else mask_BT.sum(1)
        starts = F.pad(lengths.cumsum(0), (1, 0))
        embedded_MD = self._embedded(sequence, context, places)
        x_MD = embedded_MD.float().contiguous()
        keys, used, whole = [], [starts], (slice(0, batch), slice(0, length))
        for entry in self._attentions:
            if entry is None:
                keys.append(Keys())
                continue
            attention, context.depth = entry
            one, size, heads = Keys(), attention.spec.head_size, attention.spec.num_kv_heads
            one.starts, one.groups, one.count = starts.data_ptr(), batch, length
            one.key_stride, one.head_stride = heads * size, size
            one.before, one.after = _sight(attention.spec.mask)
            angles = _angles(attention, context, whole)
            _set_angles(one, [rows if places is None else rows[places] for rows in angles], used)
            keys.append(one)
        self._run(x_MD, keys)
        out_MD = self._finished(x_MD.to(embedded_MD.dtype))
        if mask_BT is None or places is None:
            return out_MD.view(batch, length, -1)
        padding = (~mask_BT).flatten().nonzero()[:, 0]
        padded = out_MD.new_empty(batch * length, out_MD.shape[1]).index_copy_(0, places, out_MD)
        return padded.index_fill_(0, padding, 0.0).view(batch, length, -1)

    def _embedded(self, sequence: Sequence, context: Context, places: Places | None) -> Rows:
        """Return the embeddings of the tokens at some places of a flattened batch; None: of all."""

        def taken(x_BT: Ids | None) -> Ids | None:
            if x_BT is None or places is None:
                return x_BT
            return x_BT.expand(sequence.ids.shape).flatten()[places][None]

        limit = context.masking.num_keys if sequence.positions is None else int(sequence.positions.max()) + 1
        given = taken(sequence.ids), taken(context.query_position), limit, taken(sequence.segments)
        x_BTD: Tensor = self._stack.embedding(*given)
        return x_BTD.flatten(0, 1)

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
            branch.function, branch.activation = FEED_FORWARD, ACTIVATIONS[function.spec.activation]
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
            kind=NORM_KINDS["layer_norm" if isinstance(module, LayerNorm) else "rms_norm"],
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
        if kind == "float32" and weight.stride(0) == 1 and weight.stride(1) >= len(weight) > 1:
            matrix.turned_stride = weight.stride(1)  # GPT-2's files, which are mapped, have them so
        elif not weight.is_contiguous():
            raise _NotServed
        if weight.device.type != "cpu":
            raise _NotServed
        self._kinds.add(kind)
        matrix.weight, (matrix.outputs, matrix.inputs) = weight.data_ptr(), weight.shape
        bias: Tensor | None = linear.bias
        matrix.bias = None if bias is None else self._address(bias.float())
        return matrix

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


def _pieces(batch: int, length: int) -> Iterator[Piece]:
    """Give the pieces that the new tokens of a call are read in: those of a row one after the other."""
    rows = batch if length == 1 else max(1, PIECE_TOKENS // length)
    for row in range(0, batch, rows):
        for token in range(0, length, PIECE_TOKENS):
            yield slice(row, min(batch, row + rows)), slice(token, min(length, token + PIECE_TOKENS))


def _sight(mask: spec.Mask) -> tuple[int, int]:
    """Return how many keys before and behind its own place a row sees."""
    if isinstance(mask, spec.Window):
        return mask.before, mask.after
    return EVERYWHERE, EVERYWHERE if isinstance(mask, spec.Full) else 0


def _set_bias(keys: Keys, attention: Attention, rows: int, context: Context, used: list[Tensor]) -> None:
    """Set the bias on the scores of one new token of each row, which depends on positions alone."""
    choice = attention.spec
    if choice.score_bias is not None:
        key_BKSE = torch.empty(rows, choice.num_kv_heads, keys.count, choice.head_size)
        bias = attention.bias(torch.empty(rows, choice.num_heads, 1, choice.head_size), key_BKSE, context)
        assert bias is not None
        bias_BHS = bias[:, :, 0].float().contiguous()
        used.append(bias_BHS)
        keys.bias, keys.bias_head_stride = bias_BHS.data_ptr(), bias_BHS.stride(1) if bias_BHS.shape[1] > 1 else 0
        keys.bias_row_stride = bias_BHS.stride(0) if len(bias_BHS) > 1 else 0


def _set_buffers(keys: Keys, first: int, buffer: Tensor, scales: Tensor | None = None) -> None:
    """Set where keys and values of the rows from the first one on lie, unless they lay there in the last step."""
    if keys.place is not None and keys.place[0] == first and keys.place[1] is buffer and keys.place[2] is scales:
        return
    keys.place = first, buffer, scales
    key, value = buffer[:, first:]
    _set_places(keys, key, value)
    if scales is not None:
        # As many rows, heads and keys.
        assert [size * key.shape[3] for size in scales.stride()[1:4]] == [*key.stride()[:3]]
        keys.key_scales, keys.value_scales = (one.data_ptr() for one in scales[:, first:])


def _set_places(keys: Keys, key: Heads, value: Heads) -> None:
    assert key.stride() == value.stride() and key.stride(3) == 1
    keys.key, keys.value = key.data_ptr(), value.data_ptr()
    keys.row_stride, keys.head_stride, keys.key_stride, _ = key.stride()
    keys.kind = KEY_KINDS.index(key.dtype)


def _set_mask(keys: Keys, mask: Tensor | None, first: int, used: list[Tensor]) -> None:
    """Set which keys each group of rows may attend to, from the first of its groups on."""
    keys.mask = None
    if mask is not None:
        mask_GS = mask[:, 0, 0].contiguous()
        used.append(mask_GS)
        keys.mask_stride = mask_GS.stride(0) if len(mask_GS) > 1 else 0
        keys.mask = mask_GS.data_ptr() + first * keys.mask_stride


def _angles(attention: Attention, context: Context, piece: Piece) -> list[Float[Tensor, "rows half"]]:
    """Return cosines and sines for the rows of a piece; none where nothing is rotated."""
    rotary, (rows, tokens) = attention.spec.position, piece
    if rotary is None:
        return []

    def of_rows(angle_B1TE: Tensor) -> Tensor:
        angle_BTE = angle_B1TE[rows if len(angle_B1TE) > 1 else slice(1), 0, tokens].float()
        return angle_BTE.expand(rows.stop - rows.start, -1, -1).flatten(0, 1).contiguous()

    key = attention.rotation_key
    whole = context.once(key, lambda: attention.angles(rotary, context))
    found: list[Tensor] = context.once((key, str(piece)), lambda: [of_rows(angle) for angle in whole])
    return found


def _set_angles(keys: Keys, angles: list[Tensor], used: list[Tensor]) -> None:
    if angles:
        cos, sin = angles
        used += [cos, sin]
        keys.cos, keys.sin, keys.half, keys.angle_stride = cos.data_ptr(), sin.data_ptr(), cos.shape[1], cos.stride(0)
