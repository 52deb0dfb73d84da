// Functions on one row of a stack's layers: norms, activations, rotations.

#pragma once

#include "../attention/blocks.h"

namespace {

void apply_norm(const Norm& norm, const float* x, int64_t D, float* y) {
  if (norm.kind == NormKind::NONE) {
    if (x != y) std::copy(x, x + D, y);
    return;
  }
  const float mean = norm.kind == NormKind::LAYER_NORM ? sum(x, D, [](auto one) { return one; }) / float(D) : 0.0f;
  const float squares = sum(x, D, [=](auto one) { return (one - mean) * (one - mean); });
  const float inverse = 1.0f / std::sqrt(squares / float(D) + norm.eps);
  const int64_t whole = D / WIDTH * WIDTH;
  for (int64_t d = 0; d < whole; d += WIDTH) {
    Vec<float> value = (load(x + d) - mean) * inverse;
    if (norm.weight) value *= load(norm.weight + d);
    if (norm.bias) value += load(norm.bias + d);
    store(y + d, value);
  }
  for (int64_t d = whole; d < D; ++d)
    y[d] = (x[d] - mean) * inverse * (norm.weight ? norm.weight[d] : 1.0f) + (norm.bias ? norm.bias[d] : 0.0f);
}

// y = act(gate) * up, or act(up) without a gate.
void apply_activation(const float* up, const float* gate, int64_t F, int64_t activation, float* y) {
  int64_t f = 0;
  for (; f + WIDTH <= F; f += WIDTH) {
    const Vec<float> value = load(up + f);
    store(y + f, gate ? activate(load(gate + f), activation) * value : activate(value, activation));
  }
  for (; f < F; ++f) {
    const float active = activate(broadcast(gate ? gate[f] : up[f]), activation)[0];
    y[f] = gate ? active * up[f] : active;
  }
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// Norm and rotate the heads of row m.
void prepare(const Norm& norm, const Branch& branch, const Keys& keys, int64_t m, int64_t heads, float* rows) {
  for (int64_t h = 0; h < heads; ++h) {
    float* head = rows + (m * heads + h) * branch.head_size;
    if (!branch.norms_after_rotation) apply_norm(norm, head, branch.head_size, head);
    if (keys.cos && branch.function == Function::SELF_ATTENTION)
      rotate(head, keys.cos + m * keys.angle_stride, keys.sin + m * keys.angle_stride, keys.half);
    if (branch.norms_after_rotation) apply_norm(norm, head, branch.head_size, head);
  }
}

}  // namespace
