// Exponentials without the special instructions of AVX-512.

#pragma once

namespace {

// e^x for x <= 88, as in avx512.h.
inline Vec<float> exp(Vec<float> x) {
  const Vec<int32_t> is_small = x < -87.0f;
  const Vec<float> bounded = is_small ? Vec<float>{} : x;
  // 1.5 * 2^23: adding it rounds away the fraction.
  const Vec<float> shifted = multiply_add(bounded, broadcast(1.44269504f), broadcast(12582912.0f));
  const Vec<float> whole = shifted - 12582912.0f;
  const Vec<float> r = multiply_add(
      whole, broadcast(2.12194440e-4f), multiply_add(whole, broadcast(-0.693359375f), bounded));
  const Vec<float> power = (Vec<float>)(((Vec<int32_t>)shifted + 127) << 23);  // n is in the lowest bits of `shifted`
  const Vec<float> found = exp_series(r) * power;
  return is_small ? Vec<float>{} : (x == x ? found : x);
}

inline Vec<float> exp2(Vec<float> t) { return exp(t * 0.693147181f); }

inline Vec<float> reciprocal(Vec<float> x) { return 1.0f / x; }

}  // namespace
