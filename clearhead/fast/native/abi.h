// What Python and the kernels share: every structure and every list of names, once. abi.py reads this file, and a
// library lists from it what it was compiled with (describe.h), so it is included in more than one way.

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

// What is multiplied. Mixed: weights and rounded rows in bfloat16, outputs in float32. In 4 bits some matrices may have 8.
ENUM(WeightKind) VALUE(FLOAT32) VALUE(MIXED) VALUE(INT8) VALUE(INT4) END_ENUM

ENUM(KeyKind) VALUE(FLOAT32) VALUE(BFLOAT16) VALUE(INT8) END_ENUM

ENUM(Function) VALUE(FEED_FORWARD) VALUE(SELF_ATTENTION) VALUE(MEMORY_ATTENTION) END_ENUM

// --- inference: the layers of a stack ---

STRUCT(Norm)
FIELD(const float*, weight)  // null: ones
FIELD(const float*, bias)    // null: zeros
FIELD(float, eps) FIELD(int64_t, kind) END

STRUCT(Matrix)
FIELD(const void*, weight)  // [N, K]; null: the branch has none
FIELD(const float*, bias)   // [N] or null
FIELD(const float*, scales) // of weights in 8 bits [N]
FIELD(int64_t, outputs) FIELD(int64_t, inputs)
FIELD(int64_t, ldb)  // above 0: float32 weights [K, N] whose rows lie so many numbers apart
FIELD(const uint16_t*, group_scales) // fp16, of weights in 4 bits [N, K / 32]; null: they have another kind
END

// A branch of a residual step. Matrices: query, key, value, out; or up, gate, none, down.
STRUCT(Branch) FIELD(Norm, shared) FIELD(Norm, pre) FIELD(Norm, post) FIELD(Norm, out) FIELD(Matrix, first)
FIELD(Matrix, second) FIELD(Matrix, third) FIELD(Matrix, last)
FIELD(Norm, query_norm) FIELD(Norm, key_norm)  // over each head
FIELD(const float*, sink)  // [H] or null
FIELD(float, scale) FIELD(float, score_scale) FIELD(float, soft_cap)  // 0: none
FIELD(int64_t, function) FIELD(int64_t, activation)
FIELD(int64_t, heads) FIELD(int64_t, kv_heads) FIELD(int64_t, head_size)
FIELD(int64_t, is_first) FIELD(int64_t, is_last)  // of its step
FIELD(int64_t, norms_after_rotation) END

// The keys and values of one attention in one call. Groups are rows with the same keys; strides are in numbers.
STRUCT(Keys) FIELD(void*, key) FIELD(void*, value)
FIELD(int64_t, row_stride) FIELD(int64_t, head_stride) FIELD(int64_t, key_stride)
FIELD(int64_t, count)          // keys of each group, with those that are new; of the longest text
FIELD(const int64_t*, cu_seqlens)  // first row of each group [groups + 1], or null; without `key` its keys are its rows
FIELD(const int64_t*, first_keys)  // of each group [groups], behind its padding, from where on all counts; null: 0
FIELD(int64_t, groups) FIELD(int64_t, rows_per_group)
FIELD(int64_t, window_before) FIELD(int64_t, window_after)  // keys around its own that a row sees; rows are the last ones
FIELD(const int32_t*, row_index)   // cache row of each key of a group [groups, S]; null: the number of the group
FIELD(int64_t, row_index_stride)  // 0: one for all keys of a group [groups]
FIELD(const uint8_t*, mask)     // of each group [groups, S], 1 = may attend; null: all may
FIELD(int64_t, mask_stride)
FIELD(const float*, bias)       // on the scores [M, H, S], or of all texts, by place [H, S, S]; null: none
FIELD(int64_t, bias_row_stride) FIELD(int64_t, bias_head_stride) FIELD(int64_t, is_bias_by_place)
FIELD(const float*, cos) FIELD(const float*, sin)  // of the rotation [M, half]; null: none
FIELD(int64_t, angle_stride) FIELD(int64_t, half) FIELD(int64_t, kind)
FIELD(float*, key_scales) FIELD(float*, value_scales)  // in 8 bits, one for each; strides: those of keys / the head size
FIELD(int64_t, appends) END  // new keys and values to a cache

// x [M, D] is changed in place; there are keys for each branch, those of feed-forward networks unused.
STRUCT(StackCall) FIELD(float*, x) FIELD(const Branch*, branches) FIELD(const Keys*, keys) FIELD(int64_t, count)
FIELD(int64_t, M) FIELD(int64_t, D) FIELD(int64_t, weight_kind)
FIELD(int64_t, most_threads) END  // rows are divided among so many, however many run: results depend on how

// --- training ---

// One of the linear layers that read the same rows. Legend: M rows, N outputs, K inputs.
STRUCT(LinearArgs)
FIELD(const float*, weight)     // [N, K]
FIELD(const float*, bias)       // [N] or null
FIELD(uint16_t*, y)             // [M, N]; in the backward pass its gradient
FIELD(float*, weight_gradient)  // [N, K]; null: not wanted
FIELD(float*, bias_gradient)    // [N]; null: not wanted
FIELD(uint16_t*, derivative)    // with an activation: what the gradient of its result is multiplied by [M, N]
FIELD(int64_t, rows)            // of the weight; N is the next multiple of 32, and behind the last row y is zeros
FIELD(int64_t, adds)            // to the gradient of the weight that is there
FIELD(int64_t, N) FIELD(int64_t, y_stride) END

STRUCT(LinearCall)
FIELD(const uint16_t*, x)       // [M, K]
FIELD(uint16_t*, result)        // forward: act(y), or act(gate) * up [M, N]; backward: the gradient of x, or null
ARRAY(LinearArgs, layers, 3)    // with a gate: the gate and what it multiplies
ARRAY(const uint16_t*, derivatives, 2)  // backward: the gradient of x is multiplied by these, [M, K] each; null: none
ARRAY(uint16_t*, inner_gradients, 2)    // the products
FIELD(int64_t, count) FIELD(int64_t, M) FIELD(int64_t, K) FIELD(int64_t, x_stride) FIELD(int64_t, result_stride)
FIELD(int64_t, activation) END

// The cross-entropy of a linear layer without a bias, and what its gradients are products of. Legend: N rows of x,
// V outputs, D inputs.
STRUCT(LossCall)
FIELD(const uint16_t*, x)      // [N, D]
FIELD(const float*, weight)    // [V, D]
FIELD(const int64_t*, labels)  // [N]
FIELD(uint16_t*, powers)       // e^(logit - shift), less `share` of their sum at the label [N, V to a multiple of 32]
FIELD(float*, losses)          // [N]
FIELD(float*, rates)           // 1 / the sum of the powers [N]
FIELD(int64_t, N) FIELD(int64_t, V) FIELD(int64_t, D) FIELD(int64_t, x_stride)
FIELD(int64_t, is_bounded)     // no logit is beyond 60, and no shift is needed
FIELD(float, share) END        // of the target that the label has

// A tensor by head, whose numbers of a head are contiguous; strides.
STRUCT(Heads) FIELD(uint16_t*, data) FIELD(int64_t, batch) FIELD(int64_t, head) FIELD(int64_t, token) END

// Those that are named after an axis are strides. Legend: B batch, H heads, T queries, S keys, E head size.
STRUCT(AttentionCall) FIELD(Heads, query) FIELD(Heads, key) FIELD(Heads, value) FIELD(Heads, mixed)
FIELD(Heads, mixed_gradient) FIELD(Heads, query_gradient) FIELD(Heads, key_gradient) FIELD(Heads, value_gradient)
FIELD(const uint8_t*, mask)   // 1 = may attend; null: none
FIELD(float*, log_totals)     // log of the sum of the exponentials of the scores [B, H, T]; infinity: no key
FIELD(int64_t, mask_batch) FIELD(int64_t, mask_head) FIELD(int64_t, mask_query) FIELD(int64_t, mask_key)
FIELD(const float*, bias)     // added to the scores, those of a query contiguous; null: nothing
FIELD(float*, bias_gradient)  // [B, H, T, S]; null: not wanted
FIELD(int64_t, bias_batch) FIELD(int64_t, bias_head) FIELD(int64_t, bias_query)
FIELD(int64_t, B) FIELD(int64_t, H) FIELD(int64_t, T) FIELD(int64_t, S) FIELD(int64_t, E) FIELD(int64_t, is_causal)
ARRAY(int64_t, seed, 2) FIELD(int64_t, dropped)  // weights, of 2^32 parts
FIELD(float, kept_scale)      // of the other weights
FIELD(float, scale) END

// Queries or keys, rotated by their positions. Legend: as above, P pairs of dimensions.
STRUCT(RotationCall) FIELD(Heads, x) FIELD(Heads, y)
FIELD(const float*, cos) FIELD(const float*, sin)  // of the angles [B, T, P]
FIELD(int64_t, angle_batch)  // stride; 0: every row has the same positions
FIELD(int64_t, B) FIELD(int64_t, H) FIELD(int64_t, T) FIELD(int64_t, E) FIELD(int64_t, P) FIELD(int64_t, is_back) END

// A sum on the residual stream and its norm. Legend: N rows, D width; tensors are [N, D] unless it says otherwise.
STRUCT(StreamCall) FIELD(const float*, x)
FIELD(const uint16_t*, y)     // null: nothing is added
FIELD(const float*, weight)   // of the norm [D]; null: 1
FIELD(const float*, bias)     // [D]; null: 0
FIELD(float*, sum)            // null where y is
FIELD(float*, normed) FIELD(uint16_t*, rounded)  // null: not wanted
FIELD(float*, statistics)     // of a row: mean and 1 / deviation [N, 2]
// Backward: gradients that came in, each of which may be null, and those to be found.
FIELD(const float*, sum_gradient) FIELD(const float*, normed_gradient) FIELD(const uint16_t*, rounded_gradient)
FIELD(float*, x_gradient) FIELD(uint16_t*, y_gradient)  // null where y is
FIELD(float*, weight_gradient) FIELD(float*, bias_gradient)  // [D]; null: not wanted
FIELD(int64_t, N) FIELD(int64_t, D)
FIELD(int64_t, is_centered)   // LayerNorm, else RMSNorm
ARRAY(int64_t, seed, 2) FIELD(int64_t, dropped)  // of 2^32 parts
FIELD(float, kept_scale)      // of what is kept, with the scale of the branch
FIELD(float, eps) END

// A matrix that Muon updates, and what it is updated by; all are [rows, columns].
STRUCT(MuonMatrix) FIELD(float*, parameter) FIELD(float*, momentum) FIELD(const float*, gradient)
FIELD(int64_t, rows) FIELD(int64_t, columns)
FIELD(float, rate) END  // times the orthogonal update

STRUCT(MuonCall) FIELD(const MuonMatrix*, matrices) FIELD(int64_t, count) FIELD(int64_t, steps)
ARRAY(float, factors, 3)  // of the polynomial
FIELD(float, share)       // of the gradient in the momentum, and in Nesterov's
FIELD(float, kept) END    // of the parameter

#undef STRUCT
#undef FIELD
#undef ARRAY
#undef END
#undef ENUM
#undef VALUE
#undef END_ENUM

#endif
