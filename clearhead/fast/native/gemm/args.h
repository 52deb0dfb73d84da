// What one product is called with: y[m][n] = sum over k of x[m][k] * w[n][k], + bias[n].
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "block.h"

namespace {

template <typename Traits>
struct GemmArgs {
  int64_t M, N, K;
  const typename Traits::X* x;
  const uint32_t* packed_x;     // x as `pack_transposed` makes it; null: not on the matrix unit, or with packed weights
  bool packs_weights;           // in blocks, with x as it is
  const typename Traits::W* w;
  const typename Traits::Y* bias;
  const float* row_scales;      // of x in 8 bits [M]
  const int32_t* compensation;  // of the zero point, for each row of x in 8 bits [M]
  const float* output_scales;   // of w in 8 bits [N]
  typename Traits::Y* y;
  int64_t ldb = 0;  // above 0: float32 weights are transposed, [K, N], and their rows lie so many numbers apart
  int64_t activation = Activation::NONE;  // of what is written, where whole blocks compute it
  const float* factor = nullptr;  // what it is multiplied with after that [M, N]; null: nothing

  bool activates() const { return packs_weights && N % BLOCK == 0; }

  // Write a sum of vector instructions.
  void write(int64_t m, int64_t n, typename Traits::Sum sum) const {
    const float value = scaled(m, n, sum);
    store_one(y + m * N + n, value + (bias ? to_float(bias[n]) : 0.0f));
  }

 private:
  float scaled(int64_t m, int64_t n, typename Traits::Sum sum) const {
    if constexpr (std::is_same_v<Traits, Int8>) return float(sum - compensation[m]) * (row_scales[m] * output_scales[n]);
    else return sum;
  }
};

}  // namespace
