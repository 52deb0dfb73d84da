// Kinds of products: types of rows, weights, outputs and sums, and the addition of STEP products in vectors.

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
  static constexpr int ROWS = WIDTH == 8 ? 3 : 4;
  static Vec<Sum> load_x(const Number* from) {
    if constexpr (std::is_same_v<Sum, float>) return load(from);
    else return __builtin_convertvector(*reinterpret_cast<const Vec<Number>*>(from), Vec<Sum>);
  }
  static Vec<Sum> load_w(const Number* from) { return load_x(from); }
  static void add(Vec<Sum>& sums, Vec<Sum> x, Vec<Sum> w) {
    if constexpr (std::is_same_v<Sum, float>) sums = multiply_add(x, w, sums);
    else sums += x * w;
  }
  static Vec<Sum> ones() { return Vec<Sum>{} + 1; }
};

#include "dot.h"

// ROWS: rows of x whose sums are in registers together with those of a few outputs. PARTS: sums of a single row; if it
// is 1, a single row has the same additions as a row among others.
struct Float32 : PlainDot<float, float> {
  static constexpr int WIDENED_ROWS = 0;
  static constexpr int PARTS = 1;
  using X = float;
  using W = float;
  using Y = float;
  using Sum = float;
  static void add_one(float& sum, float x, float w) { sum = multiply_add(x, w, sum); }
};

struct BFloat16 : DotBFloat16 {
  static constexpr int WIDENED_ROWS = 0;
  static constexpr int32_t ZERO_POINT = 0;
  static constexpr int PARTS = 4;
  using X = uint16_t;
  using W = uint16_t;
  using Y = uint16_t;
  using Sum = float;
  static void add_one(float& sum, uint16_t x, uint16_t w) { sum = multiply_add(to_float(x), to_float(w), sum); }
};

// Bfloat16 weights and products, float32 rows and outputs.
struct Mixed : BFloat16 {
  using Y = float;
};

// The same with float16 weights, which are rounded to bfloat16 when they are read: sums have the bits of Mixed.
struct MixedFloat16 : Mixed {
  using W = Float16;
  static auto load_w(const Float16* from) { return load_w16(from); }
  static void add_one(float& sum, uint16_t x, Float16 w) { Mixed::add_one(sum, x, to_bfloat16(to_float(w))); }
};

// Both operands in 8 bits: each row of x and each output has its own scale.
struct Int8 : DotInt8 {
  static constexpr int PARTS = 4;
  using X = Number;
  using W = int8_t;
  using Y = float;
  using Sum = int32_t;
  static void add_one(int32_t& sum, X x, W w) { sum += int32_t(x) * (int32_t(w) + ZERO_POINT); }
};

// 4-bit weights (nibbles.h), rows as for 8-bit weights; sums of groups are exact, and scaled before they are added.
struct Int4 {
  using X = int8_t;
  using W = uint8_t;
  using Y = float;
  using Sum = float;
};

template <typename Traits>
using SumsOf = Vec<typename Traits::Sum>;

}  // namespace
