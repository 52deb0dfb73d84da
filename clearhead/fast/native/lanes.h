// Vectors of 16 numbers, in whatever registers the processor has, and bfloat16 as its 16 bits.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(16), aligned(1)));

constexpr long LANES = 16;
constexpr long LEAST_WORK = 1 << 16;  // multiplications; below it, a second thread costs more than it brings

inline float to_float(uint16_t half) {
  uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds to the nearest, ties to even; not-a-number stays so.
inline uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Floats spread(float value) { return Floats{} + value; }

inline Floats load_lanes(const float* from) { return *reinterpret_cast<const Floats*>(from); }

inline Floats load_lanes(const uint16_t* from) {
#ifdef __AVX512F__  // in one instruction, where the compiler would take two halves
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16);
#endif
}

inline Floats load_lanes(const int8_t* from) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Floats);
#endif
}

inline float load_one(const float* from) { return *from; }

inline float load_one(const int8_t* from) { return *from; }

inline float load_one(const uint16_t* from) { return to_float(*from); }

inline void store_one(float* to, float value) { *to = value; }

inline void store_one(uint16_t* to, float value) { *to = to_half(value); }

inline float total(Floats lanes) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)lanes);
#else
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += lanes[i];
  return sum;
#endif
}

inline int32_t total(Ints lanes) {
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += lanes[i];
  return sum;
}

// The totals of some vectors, which are aligned.
template <int COUNT, typename Lanes, typename Number>
void totals(const Lanes* lanes, Number* found) {
#ifdef __AVX512F__
  if constexpr (COUNT == 4) {  // side by side, in a third of the instructions
    const auto joined = [](__m512i a, __m512i b) { return (Lanes)a + (Lanes)b; };
    const __m512i rows[4] = {(__m512i)lanes[0], (__m512i)lanes[1], (__m512i)lanes[2], (__m512i)lanes[3]};
    const __m512i first = (__m512i)joined(_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
    const __m512i second = (__m512i)joined(_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
    const __m512i all = (__m512i)joined(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m512i half = (__m512i)joined(all, _mm512_shuffle_i64x2(all, all, 0x4e));
    const __m512i sums = (__m512i)joined(half, _mm512_shuffle_i64x2(half, half, 0xb1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(found), _mm512_castsi512_si128(sums));
    return;
  }
#endif
  for (int i = 0; i < COUNT; ++i) found[i] = total(lanes[i]);
}

// Whether a comparison holds for one of the lanes.
inline bool any(Ints is_true) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= is_true[i];
  return found != 0;
#endif
}

inline void store_lanes(float* to, Floats lanes) { *reinterpret_cast<Floats*>(to) = lanes; }

inline void store_lanes(uint16_t* to, Floats lanes) {
#ifdef __AVX512BF16__
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)lanes);
  std::memcpy(to, &rounded, sizeof rounded);
#else
  for (int i = 0; i < LANES; ++i) to[i] = to_half(lanes[i]);
#endif
}

// Rounds to the nearest integers, from -127 to 127.
inline void store_lanes(int8_t* to, Floats lanes) {
#ifdef __AVX512F__
  const __m128i rounded = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)lanes));
  std::memcpy(to, &rounded, sizeof rounded);
#else
  for (int i = 0; i < LANES; ++i) to[i] = int8_t(std::nearbyint(lanes[i]));
#endif
}

// Of two numbers or of two vectors lane by lane; not-a-number in the first counts for nothing.
template <typename Number>
Number larger(Number first, Number second) {
  return first > second ? first : second;
}

inline float highest(Floats lanes) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)lanes);
#else
  float most = lanes[0];
  for (int i = 1; i < LANES; ++i) most = larger(lanes[i], most);
  return most;
#endif
}

inline int32_t highest(Ints lanes) {
#ifdef __AVX512F__
  return _mm512_reduce_max_epi32((__m512i)lanes);
#else
  int32_t most = lanes[0];
  for (int i = 1; i < LANES; ++i) most = larger(lanes[i], most);
  return most;
#endif
}

// Join values(vector) of the vectors of x, of which so many numbers are whole, in four registers: none waits for the one
// before it.
template <typename Lanes, typename Values, typename Join>
Lanes joined(const float* x, long whole, Lanes start, const Values& values, const Join& join) {
  Lanes kept[4] = {start, start, start, start};
  long k = 0;
  for (; k + 4 * LANES <= whole; k += 4 * LANES)
    for (int i = 0; i < 4; ++i) kept[i] = join(values(load_lanes(x + k + i * LANES)), kept[i]);
  for (; k < whole; k += LANES) kept[0] = join(values(load_lanes(x + k)), kept[0]);
  return join(join(kept[0], kept[1]), join(kept[2], kept[3]));
}

// The sum of values(number) over all numbers of x; values takes vectors too.
template <typename Values>
float sum_of(const float* x, long K, const Values& values) {
  const long whole = K / LANES * LANES;
  float sum = total(joined(x, whole, Floats{}, values, [](Floats a, Floats b) { return a + b; }));
  for (long k = whole; k < K; ++k) sum += values(x[k]);
  return sum;
}

// The largest number of x and a start; not-a-number counts for nothing.
inline float largest_of(const float* x, long K, float start) {
  const long whole = K / LANES * LANES;
  float most = highest(joined(x, whole, spread(start), [](Floats lanes) { return lanes; }, larger<Floats>));
  for (long k = whole; k < K; ++k) most = larger(x[k], most);
  return most;
}

// The largest magnitude of x; infinite or not-a-number where one number is.
inline float largest_magnitude(const float* x, long K) {
  const long whole = K / LANES * LANES;
  const auto bits = [](Floats lanes) { return (Ints)lanes & 0x7fffffff; };  // they are in the order of magnitudes
  int32_t most = highest(joined(x, whole, Ints{}, bits, larger<Ints>));
  for (long k = whole; k < K; ++k) {
    int32_t one;
    std::memcpy(&one, x + k, 4);
    most = larger(one & 0x7fffffff, most);
  }
  float found;
  std::memcpy(&found, &most, 4);
  return found;
}

// e^x for x <= 88, to 2 units in the last place: 2^n * e^r with |r| <= ln(2) / 2, and e^r by its series up to r^7.
// Below -87 it is 0; not-a-number stays so.
inline Floats exp_lanes(Floats x) {
#ifdef __AVX512F__
  const __mmask16 is_large = _mm512_cmp_ps_mask((__m512)x, (__m512)spread(-87.0f), _CMP_NLT_UQ);
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);  // to the nearest
  const Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
#else
  const Ints is_small = x < -87.0f;
  const Floats bounded = is_small ? Floats{} : x;
  const Floats shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: what follows the point is rounded away
  const Floats whole = shifted - 12582912.0f;
  const Floats r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
#endif
  Floats series = r * (1.0f / 5040) + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
#ifdef __AVX512F__
  return (Floats)_mm512_maskz_scalef_ps(is_large, (__m512)series, (__m512)whole);
#else
  const Floats power = (Floats)(((Ints)shifted + 127) << 23);  // n in the lowest bits of shifted
  const Floats found = series * power;
  return is_small ? Floats{} : (x == x ? found : x);
#endif
}

// 1 / x, in a few instructions where a division takes many; not for infinite numbers.
inline Floats reciprocal(Floats x) {
#ifdef __AVX512F__
  const Floats near = (Floats)_mm512_rcp14_ps((__m512)x);
  return near * (2.0f - x * near);
#else
  return 1.0f / x;
#endif
}

inline Floats where(Ints is_first, Floats first, Floats second) { return is_first ? first : second; }

inline Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

constexpr float LOG2_E = 1.44269504f;

// 2^t for t <= 127, to 1e-7 of it; below 2^-126 it is 0, and not-a-number stays so.
inline Floats power_of_two(Floats t) {
#ifdef __AVX512F__
  const __mmask16 is_large = _mm512_cmp_ps_mask((__m512)t, (__m512)spread(-126.0f), _CMP_NLT_UQ);
  const Floats part = (Floats)_mm512_sub_ps((__m512)t, _mm512_roundscale_ps((__m512)t, _MM_FROUND_TO_NEG_INF));
  Floats series = part * 1.87758e-3f + 8.98934e-3f;
  series = series * part + 5.582632e-2f;
  series = series * part + 2.4015362e-1f;
  series = series * part + 6.9315307e-1f;
  series = series * part + 9.9999993e-1f;
  return (Floats)_mm512_maskz_scalef_ps(is_large, (__m512)series, (__m512)t);
#else
  return exp_lanes(t * 0.693147181f);
#endif
}

// 1 / (1 + e^-x)
inline Floats sigmoid(Floats x) {
  const Floats small = power_of_two(magnitude(x) * -LOG2_E);
  return where(x < 0.0f, small, spread(1.0f)) * reciprocal(small + 1.0f);
}

inline Floats tanh_lanes(Floats x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// e^(-x^2 / 2)
inline Floats bell(Floats x) { return power_of_two(x * x * (-0.5f * LOG2_E)); }

// The share of the normal distribution below x, from that bell, to 1e-7. Source: Abramowitz and Stegun, Handbook of
// Mathematical Functions, formula 7.1.26.
inline Floats share_below(Floats x, Floats bell_of_x) {
  const Floats far = magnitude(x), t = reciprocal(where(far < 1e9f, far, spread(1e9f)) * 0.23164189f + 1.0f);
  Floats series = t * 0.5307027145f - 0.7265760135f;
  series = series * t + 0.7107068705f;
  series = series * t - 0.142248368f;
  series = series * t + 0.127414796f;
  const Floats beyond = series * t * bell_of_x;
  return where(x < 0.0f, beyond, 1.0f - beyond);
}

enum Activation : int32_t { NONE = -1, RELU, GELU, GELU_TANH, SILU, RELU2, QUICK_GELU, TANH };

inline Floats activate(Floats x, int32_t form) {
  const Floats positive = where(x < 0.0f, Floats{}, x);
  switch (form) {
    case RELU: return positive;
    case RELU2: return positive * positive;
    case GELU: return x * share_below(x, bell(x));
    case GELU_TANH: return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    case SILU: return x * sigmoid(x);
    case QUICK_GELU: return x * sigmoid(1.702f * x);
    default: return tanh_lanes(x);
  }
}

}  // namespace
