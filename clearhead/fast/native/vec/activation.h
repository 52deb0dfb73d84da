// Activations and their derivatives.

#pragma once

#include "../abi.h"
#include "vec.h"

namespace {

constexpr float LOG2_E = 1.44269504f;

// 1 / (1 + e^-x)
inline Vec<float> sigmoid(Vec<float> x) {
  const Vec<float> small = exp2(abs(x) * -LOG2_E);
  return select(x < 0.0f, small, broadcast(1.0f)) * reciprocal(small + 1.0f);
}

inline Vec<float> tanh(Vec<float> x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// The unscaled density of the normal distribution: e^(-x^2 / 2).
inline Vec<float> normal_density(Vec<float> x) { return exp2(x * x * (-0.5f * LOG2_E)); }

// The CDF of the normal distribution from that density, accurate to 1e-7. Source: Abramowitz and Stegun, Handbook of
// Mathematical Functions, formula 7.1.26.
inline Vec<float> normal_cdf(Vec<float> x, Vec<float> density) {
  const Vec<float> far = abs(x), bounded = select(far < 1e9f, far, broadcast(1e9f));
  const Vec<float> t = reciprocal(multiply_add(bounded, broadcast(0.23164189f), broadcast(1.0f)));
  const Vec<float> series = polynomial(t, 0.5307027145f, -0.7265760135f, 0.7107068705f, -0.142248368f, 0.127414796f);
  const Vec<float> beyond = series * t * density;
  return select(x < 0.0f, beyond, 1.0f - beyond);
}

struct Activated {
  Vec<float> value, derivative;
};

// x times the sigmoid of an inner function; the derivative of the inner function is an argument.
inline Activated activated_by_sigmoid(Vec<float> x, Vec<float> inner, Vec<float> inner_derivative) {
  const Vec<float> gate = sigmoid(inner);
  return {x * gate, gate + x * gate * (1.0f - gate) * inner_derivative};
}

inline __attribute__((always_inline)) Activated activate_with_derivative(Vec<float> x, int64_t activation) {
  const Vec<float> zero = {}, one = zero + 1.0f, positive = select(x < 0.0f, zero, x);
  switch (activation) {
    case Activation::RELU: return {positive, select(x > 0.0f, one, zero)};
    case Activation::RELU2: return {positive * positive, 2.0f * positive};
    case Activation::GELU: {
      const Vec<float> density = normal_density(x), cdf = normal_cdf(x, density);
      return {x * cdf, cdf + x * density * 0.39894228f};
    }
    case Activation::GELU_TANH: {
      const Vec<float> inner = 1.5957691216f * (x + 0.044715f * x * x * x);
      return activated_by_sigmoid(x, inner, 1.5957691216f * (1.0f + 0.134145f * x * x));
    }
    case Activation::SILU: return activated_by_sigmoid(x, x, one);
    case Activation::QUICK_GELU: return activated_by_sigmoid(x, 1.702f * x, zero + 1.702f);
    default: {
      const Vec<float> value = tanh(x);
      return {value, 1.0f - value * value};
    }
  }
}

inline Vec<float> activate(Vec<float> x, int64_t activation) { return activate_with_derivative(x, activation).value; }

}  // namespace
