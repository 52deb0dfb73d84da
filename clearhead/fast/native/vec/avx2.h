// Vectors in the registers of AVX2.

#pragma once

#include <immintrin.h>

namespace {

inline Vec<float> load(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}

inline Vec<float> load(const int8_t* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

inline Vec<float> widen(Vec<uint16_t> halves) {
#ifdef __F16C__
  return (Vec<float>)_mm256_cvtph_ps((__m128i)halves);
#else
  return widen_each(halves);
#endif
}

inline void store(uint16_t* to, Vec<float> x) {  // round to nearest, ties to even
  const Vec<uint32_t> bits = (Vec<uint32_t>)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const __m256i halves = (__m256i)(x == x ? rounded : Vec<uint32_t>{} + 0x7fc0);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}

inline __m128i round_to_int16(Vec<float> x) {
  const __m256i rounded = _mm256_cvtps_epi32((__m256)x);
  return _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

// Round to the nearest integers, from -127 to 127.
inline void store(int8_t* to, Vec<float> x) {
  const __m128i rounded = round_to_int16(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(rounded, rounded));
}

inline void store(int16_t* to, Vec<float> x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), round_to_int16(x)); }

// Numbers below or above the bounds become the nearer bound; NaN becomes `lowest`.
inline Vec<float> clamp(Vec<float> x, float lowest, float highest) {
  return (Vec<float>)_mm256_min_ps(_mm256_max_ps((__m256)x, _mm256_set1_ps(lowest)), _mm256_set1_ps(highest));
}

inline Vec<float> multiply_add(Vec<float> x, Vec<float> y, Vec<float> z) {
  return (Vec<float>)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
}

// Write past the caches; return false if the address does not allow it.
inline bool stream(float* to, Vec<float> x) {
  if (reinterpret_cast<uintptr_t>(to) % 32 != 0) return false;
  _mm256_stream_ps(to, (__m256)x);
  return true;
}

inline bool stream(uint16_t*, Vec<float>) { return false; }

inline void stream_fence() { _mm_sfence(); }

inline float reduce_add(Vec<float> x) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// Order of the lanes in the sum of four vectors: adjacent lanes are added, then adjacent sums.
constexpr int LANE_ORDER[WIDTH] = {0, 1, 2, 3, 4, 5, 6, 7};

// Return the sums of COUNT vectors.
template <int COUNT, typename Vector, typename Number>
void reduce_add_all(const Vector* x, Number* found) {
  if constexpr (COUNT == 4) {  // all four together
    const auto halves = [](__m256i a, __m256i b) {
      if constexpr (std::is_same_v<Number, float>) return (__m256i)_mm256_hadd_ps((__m256)a, (__m256)b);
      else return _mm256_hadd_epi32(a, b);
    };
    const __m256i all = halves(halves((__m256i)x[0], (__m256i)x[1]), halves((__m256i)x[2], (__m256i)x[3]));
    typedef Number Four __attribute__((vector_size(16)));
    const Four sums = (Four)_mm256_castsi256_si128(all) + (Four)_mm256_extracti128_si256(all, 1);
    std::memcpy(found, &sums, sizeof sums);
  } else
    for (int i = 0; i < COUNT; ++i) found[i] = reduce_add(x[i]);
}

inline float reduce_max(Vec<float> x) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

inline int32_t reduce_max(Vec<int32_t> x) {
  const __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  const __m128i pair = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(pair, _mm_shuffle_epi32(pair, 0xb1)));
}

// Whether a comparison holds for any of the numbers.
inline bool any_set(Vec<int32_t> is_true) { return !_mm256_testz_si256((__m256i)is_true, (__m256i)is_true); }

}  // namespace
