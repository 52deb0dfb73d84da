// Vectors of which only the first numbers are in memory, at the ends of rows.

#pragma once

#include "../lanes.h"

namespace {

template <typename Real>
struct Sixteen {
  Real numbers[LANES];
};

// The first `count` of 16 numbers, and zeros.
template <typename Real>
inline Floats load_some(const Real* from, long count) {
  if (count >= LANES) return load_lanes(from);
  Sixteen<Real> all = {};
  std::memcpy(&all, from, count * sizeof(Real));
  return load_lanes(all.numbers);
}

template <typename Real>
inline void store_some(Real* to, Floats lanes, long count) {
  if (count >= LANES) return store_lanes(to, lanes);
  Sixteen<Real> all;
  store_lanes(all.numbers, lanes);
  std::memcpy(to, &all, count * sizeof(Real));
}

// Lines that others will read later are written past the caches, which would first read what they replace; whoever writes
// so ends with `written`.
inline void pass_some(float* to, Floats lanes, long count) {
#ifdef __AVX512F__
  if (count >= LANES && reinterpret_cast<uintptr_t>(to) % 64 == 0) return _mm512_stream_ps(to, (__m512)lanes);
#endif
  store_some(to, lanes, count);
}

inline void pass_some(uint16_t* to, Floats lanes, long count) {
#ifdef __AVX512BF16__
  if (count >= LANES && reinterpret_cast<uintptr_t>(to) % 32 == 0)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)lanes));
#endif
  store_some(to, lanes, count);
}

inline void written() {
#ifdef __AVX512F__
  _mm_sfence();
#endif
}

}  // namespace
