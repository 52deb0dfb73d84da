// The arguments of the kernels; training/fast_linear.py and training/fast_attention.py have the same structures.

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
  long B, H, T, S, E, is_causal;
  float scale;
};

extern "C" {

// 1 where the processor has a matrix unit that the kernels can use, else 0; the others may be called only there.
void find_matrix_unit(long* found);
void linear_forward(const LinearCall* call);
void linear_backward(const LinearCall* call);
void loss_forward(const LossCall* call);
void attention_forward(const AttentionCall* call);
void attention_backward(const AttentionCall* call);
}
