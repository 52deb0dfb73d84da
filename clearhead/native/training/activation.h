// An activation and its slope.

#pragma once

#include "../lanes.h"

namespace {

// Value and slope of an activation.
struct Point {
  Floats value, slope;
};

inline Point of_sigmoid(Floats x, Floats inner, Floats inner_slope) {
  const Floats share = sigmoid(inner);
  return {x * share, share + x * share * (1.0f - share) * inner_slope};
}

inline Point of_gelu(Floats x) {
  // The exponential of erf is that of the density.
  const Floats size = magnitude(x) * 0.70710678f, t = 1.0f / (size * 0.3275911f + 1.0f), power = exp_lanes(-size * size);
  Floats series = t * 1.061405429f - 1.453152027f;
  series = series * t + 1.421413741f;
  series = series * t - 0.284496736f;
  series = series * t + 0.254829592f;
  const Floats beyond = 0.5f * series * t * power;  // the share of the normal distribution beyond |x|
  const Floats share = where(x < 0.0f, beyond, 1.0f - beyond);
  return {x * share, share + x * power * 0.39894228f};
}

inline Point point(Floats x, int32_t form) {
  const Floats zero = {}, one = zero + 1.0f, positive = where(x < 0.0f, zero, x);
  switch (form) {
    case RELU: return {positive, where(x > 0.0f, one, zero)};
    case RELU2: return {positive * positive, 2.0f * positive};
    case GELU: return of_gelu(x);
    case GELU_TANH:
      return of_sigmoid(
          x, 1.5957691216f * (x + 0.044715f * x * x * x), 1.5957691216f * (1.0f + 0.134145f * x * x));
    case SILU: return of_sigmoid(x, x, one);
    case QUICK_GELU: return of_sigmoid(x, 1.702f * x, zero + 1.702f);
    default: {
      const Floats value = tanh_lanes(x);
      return {value, 1.0f - value * value};
    }
  }
}

}  // namespace
