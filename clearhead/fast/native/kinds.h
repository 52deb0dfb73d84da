// The kinds of weights: how STEP products are added to a sum, and what becomes of the sum.

#pragma once

#include "lanes.h"

namespace {

struct Float32 {
  using X = float;
  using W = float;
  using Y = float;
  using Sums = Floats;
  using Sum = float;
  static constexpr long STEP = LANES;
  static Floats load(const float* from) { return load_lanes(from); }
  static Floats load_weights(const float* from) { return load(from); }
  static void add(Floats& sums, Floats x, Floats w) { sums += x * w; }
  static float product(float x, float w) { return x * w; }
  static float bias(const float* from, long n) { return from ? from[n] : 0.0f; }
  static float round(float value) { return value; }
};

struct BFloat16 {
  using X = uint16_t;
  using W = uint16_t;
  using Y = uint16_t;
  using Sums = Floats;
  using Sum = float;
#ifdef __AVX512BF16__
  static constexpr long STEP = 2 * LANES;
  static __m512i load(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static void add(Floats& sums, __m512i x, __m512i w) {
    sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
  }
#else
  static constexpr long STEP = LANES;
  static Floats load(const uint16_t* from) { return load_lanes(from); }
  static void add(Floats& sums, Floats x, Floats w) { sums += x * w; }
#endif
  static auto load_weights(const uint16_t* from) { return load(from); }
  static constexpr uint32_t FLIPS = 0;
  static float product(uint16_t x, uint16_t w) { return to_float(x) * to_float(w); }
  static float bias(const uint16_t* from, long n) { return from ? to_float(from[n]) : 0.0f; }
  static uint16_t round(float value) { return to_half(value); }
};

// Weights and products in bfloat16, rows and outputs in float32.
struct Mixed : BFloat16 {
  using Y = float;
  static float bias(const float* from, long n) { return from ? from[n] : 0.0f; }
  static float round(float value) { return value; }
};

// Both sides in 8 bits: a row of x has a scale of its own, and so has every output.
struct Int8 {
  using X = int8_t;
  using W = int8_t;
  using Y = float;
  using Sums = Ints;
  using Sum = int32_t;
#ifdef __AVX512VNNI__
  // The instruction wants one side without a sign: weights are made larger by 128, and sums by as much times those of x.
  static constexpr int32_t OFFSET = 128;
  static constexpr uint32_t FLIPS = 0x80808080;  // of four weights
  static constexpr long STEP = 4 * LANES;
  static __m512i load(const int8_t* from) { return _mm512_loadu_si512(from); }
  static __m512i load_weights(const int8_t* from) {
    return _mm512_xor_si512(load(from), _mm512_set1_epi32(int32_t(FLIPS)));
  }
  static void add(Ints& sums, __m512i x, __m512i w) { sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, w, x); }
#else
  static constexpr int32_t OFFSET = 0;
  static constexpr long STEP = LANES;
  static Ints load(const int8_t* from) {
    return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints);
  }
  static Ints load_weights(const int8_t* from) { return load(from); }
  static void add(Ints& sums, Ints x, Ints w) { sums += x * w; }
#endif
  static int32_t product(int8_t x, int8_t w) { return int32_t(x) * (int32_t(w) + OFFSET); }
  static float bias(const float* from, long n) { return from ? from[n] : 0.0f; }
  static float round(float value) { return value; }
};

}  // namespace
