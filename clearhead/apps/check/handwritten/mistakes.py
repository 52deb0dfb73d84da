"""Known mistakes in hand-written Transformers: part of the computation, correct formula, symptom and fix of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Mistake(NamedTuple):
    """A known mistake: the part of the computation, its correct formula, the symptom and the fix."""

    where: str
    math: str
    says: str
    fix: str


def _table(where: str, math: str, **mistakes: tuple[str, str]) -> dict[str, Mistake]:
    return {cause: Mistake(where, math, *texts) for cause, texts in mistakes.items()}


_SCALE = _table(
    "the scores, before the softmax",
    "softmax(q kᵀ / √d_head) v, where d_head = width / heads",
    no_scaling=("the scores are not divided by √d_head", "scores = q @ k.transpose(-2, -1) / math.sqrt(head_size)"),
    scaled_by_width=("the scores are divided by √width", "divide by math.sqrt(width // heads): the size of one head"),
    scaled_by_heads=("the scores are divided by √heads", "divide by math.sqrt(width // heads): the size of one head"),
    scaled_by_length=("the scores are divided by the root of the number of tokens", "divide by math.sqrt(head_size)"),
    scaled_without_root=("the scores are divided by d_head, without the root", "divide by math.sqrt(head_size)"),
    scaled_twice=("the scores are divided by √d_head twice", "scale once: the queries, or the scores"),
    scale_multiplied=("the scores are multiplied by √d_head", "divide by math.sqrt(head_size), or multiply by ** -0.5"),
    scores_transposed=("the scores are k qᵀ: each row belongs to a key", "scores = q @ k.transpose(-2, -1)"),
)
_SOFTMAX = _table(
    "the softmax",
    "the weights of one query over all keys sum to one: softmax over the last axis of [batch, heads, queries, keys]",
    softmax_over_queries=("the softmax is taken over the queries", "scores.softmax(dim=-1)"),
    softmax_over_heads=("the softmax is taken over the heads", "scores.softmax(dim=-1), not dim=1"),
    softmax_over_batch=("the softmax is taken over the batch", "scores.softmax(dim=-1), not dim=0"),
)
_HEADS = _table(
    "splitting into heads, or merging them",
    "head i reads features i·d_head to (i+1)·d_head of q, k and v; results are concatenated: [batch, tokens, width]",
    heads_without_transpose=(
        "the heads are split without the transpose, so that tokens are mixed with features",
        "q.view(batch, tokens, heads, head_size).transpose(1, 2)",
    ),
    heads_merged_without_transpose=(
        "the heads are merged without the transpose",
        "mixed.transpose(1, 2).reshape(batch, tokens, width)",
    ),
    batch_mixed_into_heads=(
        "items of the batch are mixed with heads: one sentence reads another",
        "keep the batch first: [batch, heads, tokens, head_size], and undo the reshapes in reverse order",
    ),
    split_by_number_of_heads=(
        "the features are split into pieces of `heads` features, not into `heads` pieces",
        "x.chunk(heads, dim=-1), or x.split(head_size, dim=-1)",
    ),
    time_sliced_for_features=(
        "the slice cuts the tokens, not the features",
        "x[..., i * head_size : (i + 1) * head_size]: slice the last axis",
    ),
    heads_mismatched=(
        "queries, keys, values or the merged result have their heads in different orders",
        "split queries, keys and values alike, and merge in the same order",
    ),
)
_WEIGHTS = _table(
    "the projections",
    "q = x W_q + b_q, k = memory W_k + b_k, v = memory W_v + b_v; out = concat(heads) W_o + b_o",
    output_projection_missing=("the output projection is not applied", "return self.out(merged)"),
    bias_missing=("a bias is not added", "add the bias: x @ weight.T + bias, or call the nn.Linear itself"),
    weights_transposed=("a weight is used transposed", "nn.Linear stores [out, in]: x @ weight.T"),
    query_and_key_swapped=(
        "queries and keys are swapped",
        "queries come from the attending sequence (the decoder), keys and values from the memory",
    ),
    key_and_value_swapped=(
        "keys and values are swapped",
        "keys are compared with the queries; values are averaged",
    ),
)
_MASK = _table(
    "the mask",
    "weights = softmax(scores, with -inf where a query may not attend)",
    mask_ignored=("the mask has no effect", "scores = scores.masked_fill(~mask, float('-inf')) before the softmax"),
    mask_polarity=(
        "the mask is inverted: it hides the tokens that may be attended to",
        "True = may attend: masked_fill(~mask, ...); if True means hidden, check it with mask='block'",
    ),
    mask_added_where_boolean=(
        "the mask is added to the scores as numbers, although it is boolean: True adds 1",
        "scores.masked_fill(~mask, float('-inf')); if you pass 0 and -inf, check it with mask='additive'",
    ),
    mask_multiplied_before_softmax=(
        "the scores are multiplied by the mask: a score of 0 still has a weight",
        "scores.masked_fill(~mask, float('-inf'))",
    ),
    mask_after_softmax=(
        "the mask is applied after the softmax: the weights no longer sum to one",
        "mask the scores, before the softmax",
    ),
    masked_rows_uniform=(
        "a query that may attend to nothing attends to everything alike, also to padding and the future",
        "zero the weights of such a row: weights.masked_fill(~mask.any(-1, keepdim=True), 0)",
    ),
    masked_rows_nan=(
        "a query that may attend to nothing gets NaN, which spreads to everything in the next layer",
        "zero the weights of such a row: weights.masked_fill(~mask.any(-1, keepdim=True), 0)",
    ),
    masks_combined_by_max=(
        "two masks are combined so that a position sees the wrong tokens (such as the future alone)",
        "with True = may attend, both masks must allow it: causal & padding",
    ),
    mask_value_too_small=(
        "hidden scores are set to a number that the softmax does not make zero",
        "float('-inf'), or torch.finfo(scores.dtype).min",
    ),
    mask_transposed=("queries and keys of the mask are swapped", "mask[query, key]: rows are queries"),
    mask_changed_in_place=("the caller's mask is changed", "make a new tensor: mask = ~mask, not mask.logical_not_()"),
    causal_future_visible=("tokens of the future are visible", "torch.ones(t, t, dtype=torch.bool).tril()"),
    causal_diagonal_blocked=(
        "a token may not attend to itself",
        "tril(), not tril(-1); triu(1), not triu(0), to block",
    ),
)
_MODE = _table(
    "the mode of the module",
    "in evaluation, the same input gives the same output",
    dropout_in_evaluation=(
        "dropout is active in evaluation",
        "F.dropout(x, p, training=self.training), or an nn.Dropout made in __init__",
    ),
    randomness_in_evaluation=(
        "two runs on the same input differ in evaluation",
        "draw random numbers only if self.training",
    ),
    weights_changed=("a run in evaluation changes the weights or buffers", "change weights in the optimizer alone"),
    fp16_promoted=(
        "half precision becomes float32 inside",
        "scale by a Python number, math.sqrt(head_size), not by a float32 tensor",
    ),
)
_CALL = _table("forward", "", raises=("it raised an error", ""))
_POSITIONS = _table(
    "the table of positions",
    "PE[pos, 2i] = sin(pos / 10000^(2i/width)), PE[pos, 2i+1] = cos(pos / 10000^(2i/width))",
    double_step=("the index i is already 2i and is doubled again", "torch.arange(0, width, 2) / width, not times 2"),
    half_step=("the exponent is i/width in place of 2i/width", "torch.arange(0, width, 2) / width"),
    sin_cos_halves=(
        "sines are in the first half and cosines in the second",
        "table[:, 0::2] = sin, table[:, 1::2] = cos",
    ),
    position_off_by_one=("positions begin at 1, not at 0", "torch.arange(length)"),
    wrong_base=("the base is not 10000", "10000.0 ** (-torch.arange(0, width, 2) / width)"),
    log_of_wrong_sign=(
        "the exponent has the wrong sign: frequencies grow",
        "torch.exp(-math.log(10000.0) * i / width)",
    ),
    sin_cos_swapped=("sine and cosine are swapped", "even features are sines, odd ones cosines"),
    cosine_exponent_of_odd_column=(
        "the cosines use another exponent: (2i + 1)/width",
        "sine and cosine of a pair share one frequency: 10000^(2i/width)",
    ),
    length_ignored=("the table has another length than requested, or is repeated", "return table[:length]"),
)
_NORM = _table(
    "the norm",
    "(x - mean(x)) / √(var(x) + eps) · weight + bias, over the features; var divides by n, not by n - 1",
    unbiased_variance=("the variance divides by n - 1", "x.var(-1, keepdim=True, unbiased=False)"),
    eps_outside_root=("eps is added outside the root", "torch.sqrt(var + eps), not torch.sqrt(var) + eps"),
    eps_missing=("eps is not added", "torch.sqrt(var + eps)"),
    wrong_axis=("mean and variance are taken over the wrong axis", "over the features alone: dim=-1, keepdim=True"),
    root_missing=("it divides by the variance, not by its root", "(x - mean) / torch.sqrt(var + eps)"),
    mean_not_subtracted=("the mean is not subtracted", "(x - mean) / torch.sqrt(var + eps)"),
    weight_missing=("the weight is not applied", "weight * normed + bias"),
)
_RMS = _table(
    "the RMS norm",
    "x / √(mean(x²) + eps) · weight, over the features",
    mean_subtracted=("the mean is subtracted", "an RMS norm keeps the mean: x * torch.rsqrt(x.pow(2).mean(-1) + eps)"),
    sum_for_mean=("a sum is taken in place of the mean", ".mean(), not .sum()"),
)
_LOSS = _table(
    "the loss",
    "mean over real tokens t of -log softmax(logits[:, t])[ids[:, t + 1]]",
    targets_not_shifted=("each position predicts its own token", "cross_entropy(logits[:, :-1], ids[:, 1:])"),
    shifted_twice=("each position predicts the token after the next", "shift once: logits[:, :-1] and ids[:, 1:]"),
    shifted_backwards=("each position predicts the token before it", "logits[:, :-1] and ids[:, 1:]"),
    padding_counted=("padding counts in the loss", "F.cross_entropy(..., ignore_index=pad)"),
    double_softmax=("softmax is taken before a loss that takes it again", "pass logits to cross_entropy"),
    axes_reshaped=(
        "axes are swapped by reshaping",
        "logits.reshape(-1, vocab), or logits.transpose(1, 2): [B, vocab, T]",
    ),
    mean_of_rows=("the loss averages the means of the sentences", "one mean over all real tokens"),
)
_HANDED_LOSS = _table(
    "the loss",
    "mean over real tokens t of -log softmax(logits[:, t])[targets[:, t]]",
    targets_shifted=("already shifted targets are shifted again", "cross_entropy(logits, targets), without a shift"),
)
_ROPE = _table(
    "the rotation of queries and keys",
    "pair i at position t turns by t · θ^(-2i/d): (x cos - y sin, x sin + y cos)",
    interleaved_or_halves=(
        "pairs are (i, i + d/2), not neighbours (2i, 2i + 1)",
        "x[..., 0::2] and x[..., 1::2]; if halves are meant, as in many checkpoints, check it with pairs='halves'",
    ),
    angles_and_pairs_mismatched=(
        "the angles are laid out for one pairing and the features are paired by the other",
        "neighbours: angles.repeat_interleave(2, -1); halves: torch.cat([angles, angles], -1)",
    ),
    wrong_sign=("it rotates in the other direction", "(x cos - y sin, x sin + y cos)"),
    wrong_theta=("θ has another value", "theta = 10000.0, or that of the checkpoint"),
    position_of_wrong_axis=(
        "positions are counted along the heads, not along the tokens",
        "[batch, heads, tokens, head_size]: positions are axis 2; if tokens come first, check it with token_axis=1",
    ),
    not_rotated=("nothing is rotated", "rotate queries and keys"),
)
_LAYER = _table(
    "the layer",
    "x = norm1(x + attention(x)); x = norm2(x + feedforward(x)): every sub-layer has its residual and its norm",
    norm_before=(
        "the norm is applied before the sub-layer",
        "norm(x + sublayer(x)); if pre-norm is meant, check it with norm_place='pre'",
    ),
    norm_after=(
        "the norm is applied after the sub-layer",
        "x + sublayer(norm(x)); if post-norm is meant, check it with norm_place='post'",
    ),
    residual_missing=("a residual is not added", "x + dropout(sublayer(x))"),
    norm_used_twice=("one norm serves two sub-layers", "give each sub-layer its own norm"),
    norm_missing=("a norm is not applied", "norm(x + sublayer(x))"),
    gate_swapped=("the activation is on the wrong one of the two gated weights", "w2(silu(w1(x)) * w3(x))"),
    gate_missing=("the gate is not multiplied", "w2(silu(w1(x)) * w3(x))"),
    activation_missing=("the feed-forward has no activation", "fc2(relu(fc1(x)))"),
    wrong_activation=("the feed-forward has another activation", "relu, as in the paper"),
    padding_attended=("padding is attended to", "pass the padding mask to the attention"),
    no_causal_mask_in_decoder=("a target token sees later target tokens", "pass the causal mask to the self-attention"),
    query_from_encoder=(
        "the queries of the cross-attention come from the memory",
        "cross(query=decoder_state, key=memory, value=memory)",
    ),
    source_padding_attended=("padding of the source is attended to", "pass the source's mask to the cross-attention"),
)
_FLOW = _table(
    "the flow of information from inputs to outputs",
    "the output at position t depends on inputs up to t of the same row, and on nothing else",
    future_by_one=("the output at t reads the input at t + 1", "the mask is one too wide: tril(), or triu(1) to block"),
    no_causal_mask=("every output reads the whole text, also later tokens", "a causal mask in every self-attention"),
    future_read=("outputs read inputs of the future", "a causal mask in every self-attention"),
    batch_mates_read=("one row of the batch reads another", "no operation may cross the batch axis"),
    padding_read=("outputs at real tokens read padding", "hide padding from every attention, and from pools and norms"),
    padding_side=("left padding and right padding give different outputs", "count positions over real tokens alone"),
    nothing_read=("the output does not depend on the input", "use the ids"),
    mask_one_short=(
        "the mask has another length than the input",
        "make the mask from the ids that the model reads, after the shift",
    ),
)
_WIRING = _table(
    "the wiring of the layers",
    "x = embedding + positions; each layer reads the output of the layer before; logits = head(x)",
    positions_missing=(
        "the same tokens in another order give the same outputs: positions are missing",
        "x = embedding(ids) + positions[:length]",
    ),
    source_not_read=(
        "an output does not depend on a token of the source",
        "cross(query=decoder_state, key=memory, value=memory), where memory is the output of the last encoder layer",
    ),
    layer_unread=(
        "the output does not depend on the weights of this layer",
        "for layer in self.layers: x = layer(x): each layer reads the output of the layer before",
    ),
    weights_unread=("the output does not depend on these weights", "use these weights, or delete them"),
    layers_shared=(
        "several layers are the same module, with one set of weights",
        "nn.ModuleList(Layer() for _ in range(n)), or copy.deepcopy: [layer] * n repeats one layer",
    ),
)
MISTAKES: Final[Mapping[str, Mistake]] = {
    **_SCALE, **_SOFTMAX, **_HEADS, **_WEIGHTS, **_MASK, **_MODE, **_CALL, **_POSITIONS, **_NORM, **_RMS, **_LOSS,
    **_HANDED_LOSS, **_ROPE, **_LAYER, **_FLOW, **_WIRING,
}  # fmt: skip
