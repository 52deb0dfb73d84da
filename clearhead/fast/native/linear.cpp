// Linear layers for few rows, one at a time; see linear.h.

#include "linear.h"

namespace {

// For rows that need no rounding.
template <typename Kind>
void multiply(
    const typename Kind::X* x, long M, long N, long K, const typename Kind::W* w, const typename Kind::Y* bias,
    typename Kind::Y* y) {
  static thread_local Input<Kind> own;
  Input<Kind>& input = own;  // not the variable: every thread has one of its own
  uint32_t* tiles = nullptr;
  if (has_tiles() && has_squares_of<Kind>(K)) {
    input.reserve(M, K);
    tiles = input.all_tiles();  // not the rows as they are: tiles would read beyond the last one
  }
#pragma omp parallel if (M * N * K > LEAST_WORK)
  {
#pragma omp for schedule(static)
    for (long m = 0; m < (tiles ? M : 0); m += TILE) input.arrange_group(x, m, M, K);
    const bool arranges_weights = !tiles && has_squares_of<Kind>(K) && M >= many_rows();
    multiply_by_team(Layer<Kind>{M, N, K, x, tiles, arranges_weights, w, bias, nullptr, nullptr, nullptr, y});
  }
}

template <typename Kind>
void round_and_multiply(
    const float* x, long M, long N, long K, const typename Kind::W* w, const float* bias, const float* output_scales,
    float* y) {
  static thread_local Input<Kind> own;
  Input<Kind>& input = own;
  input.reserve(M, K);
#pragma omp parallel if (M * N * K > LEAST_WORK)
  {
    input.fill_by_team(M, K, nullptr, [&](long m, float*) { return x + m * K; });
    multiply_by_team(input.layer(M, N, K, w, bias, output_scales, y));
  }
}

}  // namespace

extern "C" {

void linear_float32(const float* x, const float* w, const float* bias, float* y, long M, long N, long K) {
  multiply<Float32>(x, M, N, K, w, bias, y);
}

void linear_bfloat16(
    const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, long M, long N, long K) {
  multiply<BFloat16>(x, M, N, K, w, bias, y);
}

void linear_mixed(
    const float* x, const uint16_t* w, const float* bias, float* y, long M, long N, long K) {
  round_and_multiply<Mixed>(x, M, N, K, w, bias, nullptr, y);
}

void linear_int8(
    const float* x, const int8_t* w, const float* scales, const float* bias, float* y, long M, long N, long K) {
  round_and_multiply<Int8>(x, M, N, K, w, bias, scales, y);
}
}
