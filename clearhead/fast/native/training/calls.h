// The arguments of the kernels; fast/training/ has the same structures.

#pragma once

#include <cstdint>

// One of the linear layers that read the same rows. Legend: M rows, N outputs, K inputs.
struct Part {
  const float* weight;     // [N, K]
  const float* bias;       // [N] or null
  uint16_t* y;             // [M, N]; in the backward pass its gradient
  float* weight_gradient;  // [N, K]; null: not wanted
  float* bias_gradient;    // [N]; null: not wanted
  uint16_t* slope;         // with an activation: what the gradient of its result is multiplied by [M, N]
  long rows;  // of the weight; N is the next multiple of 32, and behind the last row y is zeros
  long adds;  // to the gradient of the weight that is there
  long N, y_stride;
};

// The cross-entropy of a linear layer without a bias, and what its gradients are products of. Legend: N rows of x,
// V outputs, D inputs.
struct LossCall {
  const uint16_t* x;      // [N, D]
  const float* weight;    // [V, D]
  const int64_t* labels;  // [N]
  uint16_t* powers;       // e^(logit - shift), less `share` of their sum at the label [N, the next multiple of 32 of V]
  float* losses;          // [N]
  float* rates;           // 1 / the sum of the powers [N]
  long N, V, D, x_stride;
  long is_bounded;        // no logit is beyond 60, and no shift is needed
  float share;            // of the target that the label has
};

struct LinearCall {
  const uint16_t* x;          // [M, K]
  uint16_t* result;           // forward: act(y), or act(gate) * up [M, N]; backward: the gradient of x; null: not wanted
  Part parts[3];              // with a gate: the gate and what it multiplies
  const uint16_t* slopes[2];  // backward: the gradient of x is multiplied by these, [M, K] each; null: none
  uint16_t* slope_results[2];
  long count, M, K, x_stride, result_stride, activation;  // -1: none
};

// A tensor by head, whose numbers of a head lie side by side.
struct Heads {
  uint16_t* data;
  long batch, head, token;  // strides

  uint16_t* at(long b, long h) const { return data + b * batch + h * head; }
};

// Legend: B batch, H heads, T queries, S keys, E head size.
struct AttentionCall {
  Heads query, key, value, mixed;
  Heads mixed_gradient, query_gradient, key_gradient, value_gradient;
  const uint8_t* mask;  // true = may attend; null: none
  float* log_totals;    // log of the sum of the exponentials of the scores [B, H, T]; infinity: no key
  long mask_batch, mask_head, mask_query, mask_key;  // strides
  const float* bias;     // added to the scores, those of a query side by side; null: nothing
  float* bias_gradient;  // [B, H, T, S]; null: not wanted
  long bias_batch, bias_head, bias_query;  // strides
  long B, H, T, S, E, is_causal;
  float scale;
};

// Queries or keys, rotated by their positions. Legend: as above, P pairs of dimensions.
struct RotationCall {
  Heads x, y;
  const float *cos, *sin;  // of the angles [B, T, P]
  long angle_batch;        // stride; 0: every row has the same positions
  long B, H, T, E, P, is_back;
};

// A sum on the stream and its norm. Legend: N rows, D width; all tensors are [N, D] unless it is said otherwise.
struct StreamCall {
  const float* x;
  const uint16_t* y;    // null: nothing is added
  const float* weight;  // of the norm [D]; null: 1
  const float* bias;    // [D]; null: 0
  float* sum;           // null where y is
  float* normed;        // null: not wanted, as is the rounded one
  uint16_t* rounded;
  float* statistics;    // of a row: mean and 1 / deviation [N, 2]
  // Of the backward pass: gradients that came in, each of which may be null, and those to be found.
  const float* sum_gradient;
  const float* normed_gradient;
  const uint16_t* rounded_gradient;
  float* x_gradient;
  uint16_t* y_gradient;    // null where y is
  float* weight_gradient;  // [D]; null: not wanted, as is that of the bias
  float* bias_gradient;
  long N, D, is_centered;  // centered: LayerNorm, else RMSNorm
  uint32_t seed[2];
  uint32_t dropped;  // of 2^32 parts
  float kept_scale;  // of what is kept, with the scale of the branch
  float eps;
};

// A matrix that Muon updates, and what it is updated by; all are [rows, columns].
struct MuonMatrix {
  float* parameter;
  float* momentum;
  const float* gradient;
  long rows, columns;
  float rate;  // times the orthogonal update
};

struct MuonCall {
  const MuonMatrix* matrices;
  long count, steps;
  float factors[3];  // of the polynomial
  float share;       // of the gradient in the momentum, and in Nesterov's
  float kept;        // of the parameter
};

extern "C" {

// 1 where the processor multiplies bfloat16 in squares, else 0; the stream and rotations need none.
void find_squares(long* found);
void linear_forward(const LinearCall* call);
void linear_backward(const LinearCall* call);
void muon(const MuonCall* call);
void rotation(const RotationCall* call);
void stream_forward(const StreamCall* call);
void stream_backward(const StreamCall* call);
void loss_forward(const LossCall* call);
void attention_forward(const AttentionCall* call);
void attention_backward(const AttentionCall* call);
}
