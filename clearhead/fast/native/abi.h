// The interface between Python and the kernels: every structure and enumeration, declared once. abi.py reads this file.
// Each library also reports the layout that it was compiled with (describe.h), so the file is included in several ways.

#ifndef STRUCT
#ifndef CLEARHEAD_ABI
#define CLEARHEAD_ABI

#include <cstdint>

#define STRUCT(name) struct name {
#define FIELD(type, name) type name;
#define ARRAY(type, name, count) type name[count];
#define END };
#define ENUM(name) struct name { enum : int64_t {
#define VALUE(name) name,
#define END_ENUM }; };

#include "abi.h"

inline uint16_t* at(const Heads& heads, int64_t b, int64_t h) { return heads.data + b * heads.batch + h * heads.head; }

#endif
#else

ENUM(Activation) VALUE(NONE) VALUE(RELU) VALUE(GELU) VALUE(GELU_TANH) VALUE(SILU) VALUE(RELU2) VALUE(QUICK_GELU)
VALUE(TANH) END_ENUM

ENUM(NormKind) VALUE(NONE) VALUE(LAYER_NORM) VALUE(RMS_NORM) END_ENUM

// The operands of a product. Mixed: bfloat16 or float16 weights, both multiplied in bfloat16, with rounded rows and
// float32 outputs. INT4: some matrices may be INT8.
ENUM(WeightKind) VALUE(FLOAT32) VALUE(MIXED) VALUE(INT8) VALUE(INT4) END_ENUM

ENUM(KeyKind) VALUE(FLOAT32) VALUE(BFLOAT16) VALUE(INT8) END_ENUM

ENUM(Function) VALUE(FEED_FORWARD) VALUE(SELF_ATTENTION) VALUE(MEMORY_ATTENTION) END_ENUM

// --- inference: the layers of a stack ---

STRUCT(Norm)
FIELD(const float*, weight)  // null: ones
FIELD(const float*, bias)    // null: zeros
FIELD(float, eps) FIELD(int64_t, kind) END

STRUCT(Matrix)
FIELD(const void*, weight)  // [N, K]; null: the branch has no such matrix
FIELD(const float*, bias)   // [N] or null
FIELD(const float*, scales) // scales of 8-bit weights [N]
FIELD(int64_t, outputs) FIELD(int64_t, inputs)
FIELD(int64_t, ldb)  // above 0: float32 weights are transposed, [K, N], with this stride between rows
FIELD(const uint16_t*, group_scales) // fp16 scales of 4-bit weights [N, K / 32]; null: other weights
FIELD(int64_t, is_float16)  // whether the weights of a mixed product are float16
END

// A branch of a residual step. Matrices: query, key, value, out for attention; up, gate, none, down for feed-forward.
STRUCT(Branch) FIELD(Norm, shared) FIELD(Norm, pre) FIELD(Norm, post) FIELD(Norm, out) FIELD(Matrix, first)
FIELD(Matrix, second) FIELD(Matrix, third) FIELD(Matrix, last)
FIELD(Norm, query_norm) FIELD(Norm, key_norm)  // norms over each head
FIELD(const float*, sink)  // [H] or null
FIELD(float, scale) FIELD(float, score_scale) FIELD(float, soft_cap)  // 0: none
FIELD(int64_t, function) FIELD(int64_t, activation)
FIELD(int64_t, heads) FIELD(int64_t, kv_heads) FIELD(int64_t, head_size)
FIELD(int64_t, is_first) FIELD(int64_t, is_last)  // within its step
FIELD(int64_t, norms_after_rotation) END

// Keys and values of one attention in one call. A group is a set of rows with the same keys. Strides count numbers.
STRUCT(Keys) FIELD(void*, key) FIELD(void*, value)
FIELD(int64_t, row_stride) FIELD(int64_t, head_stride) FIELD(int64_t, key_stride)
FIELD(int64_t, count)          // number of keys of each group, including new keys; for texts, of the longest one
// first row of each group [groups + 1], or null; without `key`, a group's keys are its rows
FIELD(const int64_t*, cu_seqlens)
// first key of each group after its padding [groups]; keys are counted from it; null: 0
FIELD(const int64_t*, first_keys)
FIELD(int64_t, groups) FIELD(int64_t, rows_per_group)
// visible keys before and after a row's own key; rows are the last keys
FIELD(int64_t, window_before) FIELD(int64_t, window_after)
FIELD(const int32_t*, row_index)   // cache row of each key of a group [groups, S]; null: the number of the group
FIELD(int64_t, row_index_stride)  // 0: all keys of a group share one cache row [groups]
FIELD(const uint8_t*, mask)     // mask of each group [groups, S], 1 = may attend; null: no mask
FIELD(int64_t, mask_stride)
// bias on the scores [M, H, S], or shared by all texts, by position [H, S, S]; null: none
FIELD(const float*, bias)
FIELD(int64_t, bias_row_stride) FIELD(int64_t, bias_head_stride) FIELD(int64_t, is_bias_by_place)
FIELD(const float*, cos) FIELD(const float*, sin)  // of the rotation [M, half]; null: no rotation
FIELD(int64_t, angle_stride) FIELD(int64_t, half) FIELD(int64_t, kind)
// 8 bits: a scale for each vector; strides: those of keys / head size
FIELD(float*, key_scales) FIELD(float*, value_scales)
FIELD(int64_t, appends) END  // whether to append new keys and values to a cache

// x [M, D] is changed in place. There are keys for each branch; those of feed-forward networks are unused.
STRUCT(StackCall) FIELD(float*, x) FIELD(const Branch*, branches) FIELD(const Keys*, keys) FIELD(int64_t, count)
FIELD(int64_t, M) FIELD(int64_t, D) FIELD(int64_t, weight_kind)
// number of shares of the rows, independent of the number of running threads: results depend on it
FIELD(int64_t, most_threads) END

// --- training ---

// One of several linear layers that read the same rows. Legend: M rows, N outputs, K inputs.
STRUCT(LinearArgs)
FIELD(const float*, weight)     // [N, K]
FIELD(const float*, bias)       // [N] or null
FIELD(uint16_t*, y)             // [M, N]; in the backward pass, its gradient
FIELD(float*, weight_gradient)  // [N, K]; null: not needed
FIELD(float*, bias_gradient)    // [N]; null: not needed
FIELD(uint16_t*, derivative)    // with an activation: factor of the gradient of its result [M, N]
FIELD(int64_t, rows)            // rows of the weight; N is the next multiple of 32, and y is zero after the last row
FIELD(int64_t, adds)            // whether to add to the existing gradient of the weight
FIELD(int64_t, N) FIELD(int64_t, y_stride) END

STRUCT(LinearCall)
FIELD(const uint16_t*, x)       // [M, K]
FIELD(uint16_t*, result)        // forward: act(y), or act(gate) * up [M, N]; backward: the gradient of x, or null
ARRAY(LinearArgs, layers, 3)    // with a gate: the gate, then the layer that it multiplies
ARRAY(const uint16_t*, derivatives, 2)  // backward: factors of the gradient of x [M, K]; null: none
ARRAY(uint16_t*, inner_gradients, 2)    // the products of the gradient of x and these factors
FIELD(int64_t, count) FIELD(int64_t, M) FIELD(int64_t, K) FIELD(int64_t, x_stride) FIELD(int64_t, result_stride)
FIELD(int64_t, activation) END

// The cross-entropy of a linear layer without a bias, and the operands of its gradients. Legend: N rows of x, V
// outputs, D inputs.
STRUCT(LossCall)
FIELD(const uint16_t*, x)      // [N, D]
FIELD(const float*, weight)    // [V, D]
FIELD(const int64_t*, labels)  // [N]
// e^(logit - shift), minus `share` of their sum at the label [N, V rounded up to a multiple of 32]
FIELD(uint16_t*, powers)
FIELD(float*, losses)          // [N]
FIELD(float*, rates)           // 1 / sum of the powers [N]
FIELD(int64_t, N) FIELD(int64_t, V) FIELD(int64_t, D) FIELD(int64_t, x_stride)
FIELD(int64_t, is_bounded)     // whether all logits are within 60, so that no shift is needed
FIELD(float, share) END        // share of the target at the label

// A tensor by head; the numbers of a head are contiguous. The fields are strides.
STRUCT(Heads) FIELD(uint16_t*, data) FIELD(int64_t, batch) FIELD(int64_t, head) FIELD(int64_t, token) END

// Fields named after an axis are strides. Legend: B batch, H heads, T queries, S keys, E head size.
STRUCT(AttentionCall) FIELD(Heads, query) FIELD(Heads, key) FIELD(Heads, value) FIELD(Heads, mixed)
FIELD(Heads, mixed_gradient) FIELD(Heads, query_gradient) FIELD(Heads, key_gradient) FIELD(Heads, value_gradient)
FIELD(const uint8_t*, mask)   // 1 = may attend; null: no mask
FIELD(float*, log_totals)     // log of the sum of the exponentials of the scores [B, H, T]; infinity: no visible key
FIELD(int64_t, mask_batch) FIELD(int64_t, mask_head) FIELD(int64_t, mask_query) FIELD(int64_t, mask_key)
FIELD(const float*, bias)     // bias on the scores; the biases of a query are contiguous; null: none
FIELD(float*, bias_gradient)  // [B, H, T, S]; null: not needed
FIELD(int64_t, bias_batch) FIELD(int64_t, bias_head) FIELD(int64_t, bias_query)
FIELD(int64_t, B) FIELD(int64_t, H) FIELD(int64_t, T) FIELD(int64_t, S) FIELD(int64_t, E) FIELD(int64_t, is_causal)
ARRAY(int64_t, seed, 2) FIELD(int64_t, dropped)  // share of dropped weights, in units of 2^-32
FIELD(float, kept_scale)      // factor of the other weights
FIELD(float, scale) END

// Queries or keys, rotated by their positions. Legend: as above, P pairs of dimensions.
STRUCT(RotationCall) FIELD(Heads, x) FIELD(Heads, y)
FIELD(const float*, cos) FIELD(const float*, sin)  // of the angles [B, T, P]
FIELD(int64_t, angle_batch)  // stride; 0: all rows have the same positions
FIELD(int64_t, B) FIELD(int64_t, H) FIELD(int64_t, T) FIELD(int64_t, E) FIELD(int64_t, P) FIELD(int64_t, is_back) END

// A sum on the residual stream and its norm. Legend: N rows, D width; tensors are [N, D] unless noted.
STRUCT(StreamCall) FIELD(const float*, x)
FIELD(const uint16_t*, y)     // null: no addend
FIELD(const float*, weight)   // weight of the norm [D]; null: 1
FIELD(const float*, bias)     // [D]; null: 0
FIELD(float*, sum)            // null if y is null
FIELD(float*, normed) FIELD(uint16_t*, rounded)  // null: not needed
FIELD(float*, statistics)     // mean and 1 / deviation of each row [N, 2]
// Backward: incoming gradients (each may be null), then gradients to compute.
FIELD(const float*, sum_gradient) FIELD(const float*, normed_gradient) FIELD(const uint16_t*, rounded_gradient)
FIELD(float*, x_gradient) FIELD(uint16_t*, y_gradient)  // null if y is null
FIELD(float*, weight_gradient) FIELD(float*, bias_gradient)  // [D]; null: not needed
FIELD(int64_t, N) FIELD(int64_t, D)
FIELD(int64_t, is_centered)   // 1: LayerNorm, 0: RMSNorm
ARRAY(int64_t, seed, 2) FIELD(int64_t, dropped)  // share of dropped elements, in units of 2^-32
FIELD(float, kept_scale)      // factor of the kept elements, including the scale of the branch
FIELD(float, eps) END

// A matrix that Muon updates, with its momentum and gradient; all are [rows, columns].
STRUCT(MuonMatrix) FIELD(float*, parameter) FIELD(float*, momentum) FIELD(const float*, gradient)
FIELD(int64_t, rows) FIELD(int64_t, columns)
FIELD(float, rate) END  // factor of the orthogonal update

STRUCT(MuonCall) FIELD(const MuonMatrix*, matrices) FIELD(int64_t, count) FIELD(int64_t, steps)
ARRAY(float, factors, 3)  // factors of the polynomial
FIELD(float, share)       // share of the gradient in the momentum, and in Nesterov's momentum
FIELD(float, kept) END    // factor of the old parameter

#undef STRUCT
#undef FIELD
#undef ARRAY
#undef END
#undef ENUM
#undef VALUE
#undef END_ENUM

#endif
