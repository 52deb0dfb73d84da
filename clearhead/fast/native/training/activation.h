// An activation and its slope.

#pragma once

#include "tiles.h"

#ifdef SQUARES

namespace {

// Value and slope of an activation.
struct Point {
  Floats value, slope;
};

inline Point of_sigmoid(Floats x, Floats inner, Floats inner_slope) {
  const Floats power = power_of_two(magnitude(inner) * -LOG2_E), near = reciprocal(power + 1.0f);
  const Floats share = where(inner < 0.0f, power * near, near);
  return {x * share, share + x * share * (1.0f - share) * inner_slope};
}

inline Point of_gelu(Floats x) {
  const Floats density = bell(x), share = share_below(x, density);
  return {x * share, share + x * density * 0.39894228f};
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

#endif
