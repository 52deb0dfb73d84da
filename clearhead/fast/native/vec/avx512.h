// Vectors in the registers of AVX-512.

#pragma once

#include <immintrin.h>

namespace {

inline Vec<float> load(const uint16_t* from) {  // one instruction, where the compiler would use two halves
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

inline Vec<float> load(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

inline Vec<float> widen(Vec<uint16_t> halves) { return (Vec<float>)_mm512_cvtph_ps((__m256i)halves); }

inline void store(uint16_t* to, Vec<float> x) {
#ifdef __AVX512BF16__
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &rounded, sizeof rounded);
#else
  const Vec<uint32_t> bits = (Vec<uint32_t>)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const __m256i halves = _mm512_cvtepi32_epi16((__m512i)(x == x ? rounded : Vec<uint32_t>{} + 0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
#endif
}

// Round to the nearest integers, from -127 to 127.
inline void store(int8_t* to, Vec<float> x) {
  const __m128i rounded = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)x));
  std::memcpy(to, &rounded, sizeof rounded);
}

inline void store(int16_t* to, Vec<float> x) {
  const __m256i rounded = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)x));
  std::memcpy(to, &rounded, sizeof rounded);
}

// Numbers below or above the bounds become the nearer bound; NaN becomes `lowest`.
inline Vec<float> clamp(Vec<float> x, float lowest, float highest) {
  return (Vec<float>)_mm512_min_ps(_mm512_max_ps((__m512)x, _mm512_set1_ps(lowest)), _mm512_set1_ps(highest));
}

inline Vec<float> multiply_add(Vec<float> x, Vec<float> y, Vec<float> z) {
  return (Vec<float>)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
}

// Write past the caches; return false if the address does not allow it.
inline bool stream(float* to, Vec<float> x) {
  if (reinterpret_cast<uintptr_t>(to) % 64 != 0) return false;
  _mm512_stream_ps(to, (__m512)x);
  return true;
}

inline bool stream(uint16_t* to, Vec<float> x) {
#ifdef __AVX512BF16__
  if (reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
    return true;
  }
#endif
  return false;
}

inline void stream_fence() { _mm_sfence(); }

inline float reduce_add(Vec<float> x) { return _mm512_reduce_add_ps((__m512)x); }

// Order of the lanes in the sum of four vectors: adjacent lanes are added, then adjacent sums.
constexpr int LANE_ORDER[WIDTH] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};

// Return the sums of COUNT aligned vectors.
template <int COUNT, typename Vector, typename Number>
void reduce_add_all(const Vector* x, Number* found) {
  if constexpr (COUNT == 4) {  // all four together, with a third of the instructions
    const auto joined = [](__m512i a, __m512i b) { return (Vector)a + (Vector)b; };
    const __m512i rows[4] = {(__m512i)x[0], (__m512i)x[1], (__m512i)x[2], (__m512i)x[3]};
    const __m512i first = (__m512i)joined(_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
    const __m512i second = (__m512i)joined(_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
    const __m512i all = (__m512i)joined(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m512i half = (__m512i)joined(all, _mm512_shuffle_i64x2(all, all, 0x4e));
    const __m512i sums = (__m512i)joined(half, _mm512_shuffle_i64x2(half, half, 0xb1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(found), _mm512_castsi512_si128(sums));
  } else
    for (int i = 0; i < COUNT; ++i) found[i] = reduce_add(x[i]);
}

inline float reduce_max(Vec<float> x) { return _mm512_reduce_max_ps((__m512)x); }

inline int32_t reduce_max(Vec<int32_t> x) { return _mm512_reduce_max_epi32((__m512i)x); }

// Whether a comparison holds for any of the numbers.
inline bool any_set(Vec<int32_t> is_true) {
  return _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true) != 0;
}

// e^x for x <= 88, to 2 units in the last place: 2^n * e^r with |r| <= ln(2) / 2. Below -87 it is 0; NaN stays NaN.
inline Vec<float> exp(Vec<float> x) {
  const __mmask16 is_large = _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(-87.0f), _CMP_NLT_UQ);
  const Vec<float> whole = (Vec<float>)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);  // round to nearest
  const Vec<float> r =
      multiply_add(whole, broadcast(2.12194440e-4f), multiply_add(whole, broadcast(-0.693359375f), x));
  return (Vec<float>)_mm512_maskz_scalef_ps(is_large, (__m512)exp_series(r), (__m512)whole);
}

// 2^t for t <= 127, with a relative error of 1e-7. Below 2^-126 it is 0; NaN stays NaN.
inline Vec<float> exp2(Vec<float> t) {
  const __mmask16 is_large = _mm512_cmp_ps_mask((__m512)t, (__m512)broadcast(-126.0f), _CMP_NLT_UQ);
  const Vec<float> part = (Vec<float>)_mm512_sub_ps((__m512)t, _mm512_roundscale_ps((__m512)t, _MM_FROUND_TO_NEG_INF));
  const Vec<float> series =
      polynomial(part, 1.87758e-3f, 8.98934e-3f, 5.582632e-2f, 2.4015362e-1f, 6.9315307e-1f, 9.9999993e-1f);
  return (Vec<float>)_mm512_maskz_scalef_ps(is_large, (__m512)series, (__m512)t);
}

// 1 / x, in a few instructions where a division takes many; not for infinite numbers.
inline Vec<float> reciprocal(Vec<float> x) {
  const Vec<float> near = (Vec<float>)_mm512_rcp14_ps((__m512)x);
  return near * multiply_add(-x, near, broadcast(2.0f));
}

}  // namespace
