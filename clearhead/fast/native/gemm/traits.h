// What is multiplied: the types of rows, weights, outputs and sums, and how STEP products are added in vectors.

#pragma once

#include <type_traits>

#include "../isa.h"
#include "../vec/activation.h"

namespace {

// Without an instruction for it.
template <typename Number, typename Sum>
struct PlainDot {
  static constexpr int32_t ZERO_POINT = 0;
  static constexpr int64_t STEP = WIDTH;
  static Vec<Sum> load_x(const Number* from) {
    if constexpr (std::is_same_v<Sum, float>) return load(from);
    else return __builtin_convertvector(*reinterpret_cast<const Vec<Number>*>(from), Vec<Sum>);
  }
  static Vec<Sum> load_w(const Number* from) { return load_x(from); }
  static void add(Vec<Sum>& sums, Vec<Sum> x, Vec<Sum> w) { sums += x * w; }
  static Vec<Sum> ones() { return Vec<Sum>{} + 1; }
};

#include "dot_avx512.h"
#ifndef __AVX512BF16__
using DotBFloat16 = PlainDot<uint16_t, float>;
#endif
#ifndef __AVX512VNNI__
using DotInt8 = PlainDot<int8_t, int32_t>;
#endif

struct Float32 : PlainDot<float, float> {
  using X = float;
  using W = float;
  using Y = float;
  using Sum = float;
  static float product(float x, float w) { return x * w; }
};

struct BFloat16 : DotBFloat16 {
  using X = uint16_t;
  using W = uint16_t;
  using Y = uint16_t;
  using Sum = float;
  static float product(uint16_t x, uint16_t w) { return to_float(x) * to_float(w); }
};

// Weights and products in bfloat16, rows and outputs in float32.
struct Mixed : BFloat16 {
  using Y = float;
};

// Both sides in 8 bits: a row of x has a scale of its own, and so has every output.
struct Int8 : DotInt8 {
  using X = int8_t;
  using W = int8_t;
  using Y = float;
  using Sum = int32_t;
  static int32_t product(int8_t x, int8_t w) { return int32_t(x) * (int32_t(w) + ZERO_POINT); }
};

template <typename Traits>
using SumsOf = Vec<typename Traits::Sum>;

}  // namespace
