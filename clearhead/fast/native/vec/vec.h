// Vectors of WIDTH numbers in the processor's registers; bfloat16 and float16 as their 16 bits.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../isa.h"

namespace {

#ifdef HAS_AVX2
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 16;
#endif

template <typename Number>
struct VecOf {
  typedef Number Type __attribute__((vector_size(WIDTH * sizeof(Number)), aligned(alignof(Number))));
};

template <typename Number>
using Vec = typename VecOf<Number>::Type;

#ifdef HAS_AVX2
const Vec<int32_t> INDEX = {0, 1, 2, 3, 4, 5, 6, 7};
#else
const Vec<int32_t> INDEX = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

// A number in float16; uint16_t is bfloat16.
struct Float16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(int8_t value) { return value; }

inline float to_float(uint16_t half) {
  uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Exact. Subnormal numbers become normal ones, so the processor's mode for subnormal numbers has no effect.
inline float to_float(Float16 half) {
  const uint32_t rest = half.bits & 0x7fffu;
  float value = float(rest) * 0x1p-24f;  // subnormal
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (rest >= 0x400) bits = (rest << 13) + (112u << 23);
  if (rest >= 0x7c00) bits = rest << 13 | 0x7f800000u;  // infinite, or NaN
  bits |= (half.bits & 0x8000u) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void store_one(float* to, float value) { *to = value; }

inline void store_one(uint16_t* to, float value) { *to = to_bfloat16(value); }

// In one instruction: the compiler cannot omit an addition to zeros, because it turns -0 into 0.
inline Vec<float> broadcast(float x) {
#ifdef HAS_AVX2
  return Vec<float>{x, x, x, x, x, x, x, x};
#else
  return Vec<float>{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#endif
}

inline Vec<float> load(const float* from) { return *reinterpret_cast<const Vec<float>*>(from); }

inline void store(float* to, Vec<float> x) { *reinterpret_cast<Vec<float>*>(to) = x; }

// Widen the bits of float16 numbers one by one, without an instruction for it.
inline Vec<float> widen_each(Vec<uint16_t> halves) {
  Vec<float> wide;
  for (int i = 0; i < WIDTH; ++i) wide[i] = to_float(Float16{halves[i]});
  return wide;
}

// Round to the nearest numbers in bfloat16, ties to even; NaN stays NaN.
inline Vec<float> round_to_bfloat16(Vec<float> x) {
  const Vec<uint32_t> bits = (Vec<uint32_t>)x;
  return x == x ? (Vec<float>)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000) : x;
}

inline Vec<float> select(Vec<int32_t> is_first, Vec<float> first, Vec<float> second) {
  return is_first ? first : second;
}

inline Vec<float> abs(Vec<float> x) { return (Vec<float>)((Vec<int32_t>)x & 0x7fffffff); }

// The larger of two numbers or vectors; NaN in the first argument is ignored.
template <typename Number>
Number max(Number first, Number second) {
  return first > second ? first : second;
}

inline int32_t reduce_add(Vec<int32_t> x) {
  int32_t sum = 0;
  for (int i = 0; i < WIDTH; ++i) sum += x[i];
  return sum;
}

// x * y + z, rounded once if the processor can; the compiler fuses no product and sum by itself (options.py).
#ifdef __FMA__
inline float multiply_add(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
#else
inline float multiply_add(float x, float y, float z) { return x * y + z; }
#endif

inline Vec<float> multiply_add(Vec<float> x, Vec<float> y, Vec<float> z);

// A polynomial in x, from its highest coefficient on.
template <typename... Coefficients>
inline Vec<float> polynomial(Vec<float> x, float highest, Coefficients... coefficients) {
  Vec<float> found = broadcast(highest);
  ((found = multiply_add(found, x, broadcast(coefficients))), ...);
  return found;
}

// The series of e^r up to r^7, for |r| <= ln(2) / 2.
inline Vec<float> exp_series(Vec<float> r) {
  return polynomial(r, 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f);
}

// Each instruction set adds: load and store of uint16_t, store of int8_t and int16_t, load of int8_t, widen, clamp,
// multiply_add, stream, reduce_add, reduce_add_all, reduce_max, any_set, exp, exp2, reciprocal.

}  // namespace

#ifdef __AVX512F__
#include "avx512.h"
#else
#ifdef HAS_AVX2
#include "avx2.h"
#else
#include "portable.h"
#endif
#include "exp.h"
#endif

namespace {

inline Vec<float> load(const Float16* from) {
  Vec<uint16_t> halves;
  std::memcpy(&halves, from, sizeof halves);
  return widen(halves);
}

// Convert a row of numbers; bfloat16 is rounded to nearest, ties to even.
template <typename From, typename Number>
void round_row(const From* row, int64_t K, Number* to) {
  int64_t k = 0;
  for (; k + WIDTH <= K; k += WIDTH) store(to + k, load(row + k));
  for (; k < K; ++k) store_one(to + k, to_float(row[k]));
}

// Load and store vectors at the ends of rows, with only the first `count` numbers in memory.
template <typename Number>
struct Partial {
  Number numbers[WIDTH];
};

// Load the first `count` numbers, followed by zeros.
template <typename Number>
inline Vec<float> load(const Number* from, int64_t count) {
  if (count >= WIDTH) return load(from);
  Partial<Number> all = {};
  std::memcpy(&all, from, count * sizeof(Number));
  return load(all.numbers);
}

template <typename Number>
inline void store(Number* to, Vec<float> x, int64_t count) {
  if (count >= WIDTH) return store(to, x);
  Partial<Number> all;
  store(all.numbers, x);
  std::memcpy(to, &all, count * sizeof(Number));
}

// Write lines that others read later past the caches, which would first read the replaced data. Callers must end with
// stream_fence.
template <typename Number>
inline void stream(Number* to, Vec<float> x, int64_t count) {
  if (count < WIDTH || !stream(to, x)) store(to, x, count);
}

// Reduce values(vector) over the whole vectors of x, which are `whole` numbers, in four registers, so that no operation
// waits for the one before it.
template <typename Result, typename Values, typename Join>
Result reduce(const float* x, int64_t whole, Result start, const Values& values, const Join& join) {
  Result kept[4] = {start, start, start, start};
  int64_t k = 0;
  for (; k + 4 * WIDTH <= whole; k += 4 * WIDTH)
    for (int i = 0; i < 4; ++i) kept[i] = join(values(load(x + k + i * WIDTH)), kept[i]);
  for (; k < whole; k += WIDTH) kept[0] = join(values(load(x + k)), kept[0]);
  return join(join(kept[0], kept[1]), join(kept[2], kept[3]));
}

// The sum of values(number) over all numbers of x; `values` takes vectors too.
template <typename Values>
float sum(const float* x, int64_t K, const Values& values) {
  const int64_t whole = K / WIDTH * WIDTH;
  const auto add = [](Vec<float> a, Vec<float> b) { return a + b; };
  float total = reduce_add(reduce(x, whole, Vec<float>{}, values, add));
  for (int64_t k = whole; k < K; ++k) total += values(x[k]);
  return total;
}

// The maximum of x and a start; NaN is ignored.
inline float max(const float* x, int64_t K, float start) {
  const int64_t whole = K / WIDTH * WIDTH;
  const auto same = [](Vec<float> one) { return one; };
  float most = reduce_max(reduce(x, whole, broadcast(start), same, max<Vec<float>>));
  for (int64_t k = whole; k < K; ++k) most = max(x[k], most);
  return most;
}

// The maximum of |x|; infinite or NaN if a number is.
inline float max_abs(const float* x, int64_t K) {
  const int64_t whole = K / WIDTH * WIDTH;
  const auto bits = [](Vec<float> one) { return (Vec<int32_t>)abs(one); };  // bits have the order of magnitudes
  int32_t most = reduce_max(reduce(x, whole, Vec<int32_t>{}, bits, max<Vec<int32_t>>));
  for (int64_t k = whole; k < K; ++k) {
    int32_t one;
    std::memcpy(&one, x + k, 4);
    most = max(one & 0x7fffffff, most);
  }
  float found;
  std::memcpy(&found, &most, 4);
  return found;
}

}  // namespace
