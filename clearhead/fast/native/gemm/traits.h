// What is multiplied: the types of rows, weights and outputs, how STEP products are added, and what becomes of a sum.

#pragma once

#include "../isa.h"
#include "../vec/activation.h"

namespace {

struct Float32 {
  using X = float;
  using W = float;
  using Y = float;
  using Sums = Vec<float>;
  using Sum = float;
  static constexpr int64_t STEP = WIDTH;
  static Vec<float> load_x(const float* from) { return load(from); }
  static Vec<float> load_w(const float* from) { return load(from); }
  static void add(Vec<float>& sums, Vec<float> x, Vec<float> w) { sums += x * w; }
  static float product(float x, float w) { return x * w; }
};

struct BFloat16 : DotBFloat16 {
  using X = uint16_t;
  using W = uint16_t;
  using Y = uint16_t;
  using Sums = Vec<float>;
  using Sum = float;
  static constexpr int32_t ZERO_POINT = 0;
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
  using Sums = Vec<int32_t>;
  using Sum = int32_t;
  static int32_t product(int8_t x, int8_t w) { return int32_t(x) * (int32_t(w) + ZERO_POINT); }
};

}  // namespace
