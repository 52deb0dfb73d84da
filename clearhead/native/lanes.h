// Vectors of 16 numbers, in whatever registers the processor has, and bfloat16 as its 16 bits.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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
  return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16);
}

inline float load_one(const float* from) { return *from; }

inline float load_one(const uint16_t* from) { return to_float(*from); }

inline void store_one(float* to, float value) { *to = value; }

inline void store_one(uint16_t* to, float value) { *to = to_half(value); }

inline float total(Floats lanes) {
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += lanes[i];
  return sum;
}

// e^x for x <= 0, to 2 units in the last place: 2^n * e^r with |r| <= ln(2) / 2, and e^r by its series up to r^7.
// Below -87 it is 0; not-a-number stays so.
inline Floats exp_lanes(Floats x) {
  const Ints is_small = x < -87.0f;
  const Floats bounded = is_small ? Floats{} : x;
  const Floats scaled = bounded * 1.44269504f - 0.5f;
  const Ints n = __builtin_convertvector(scaled, Ints);  // toward zero, which for x <= 0 is to the nearest
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats series = r * (1.0f / 5040) + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const Floats power = (Floats)((n + 127) << 23);
  const Floats found = series * power;
  return is_small ? Floats{} : (x == x ? found : x);
}

}  // namespace
