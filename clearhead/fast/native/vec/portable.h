// Vectors by compiler extensions alone, for processors without AVX2 or other than x86.

#pragma once

namespace {

inline Vec<float> load(const uint16_t* from) {
  return (Vec<float>)(__builtin_convertvector(*reinterpret_cast<const Vec<uint16_t>*>(from), Vec<uint32_t>) << 16);
}

inline Vec<float> load(const int8_t* from) {
  return __builtin_convertvector(*reinterpret_cast<const Vec<int8_t>*>(from), Vec<float>);
}

inline Vec<float> widen(Vec<uint16_t> halves) { return widen_each(halves); }

inline void store(uint16_t* to, Vec<float> x) {
  for (int i = 0; i < WIDTH; ++i) to[i] = to_bfloat16(x[i]);
}

// Round to the nearest integers, from -127 to 127.
inline void store(int8_t* to, Vec<float> x) {
  for (int i = 0; i < WIDTH; ++i) to[i] = int8_t(std::nearbyint(x[i]));
}

inline void store(int16_t* to, Vec<float> x) {
  for (int i = 0; i < WIDTH; ++i) to[i] = int16_t(std::nearbyint(x[i]));
}

// Numbers below or above the bounds become the nearer bound; NaN becomes `lowest`.
inline Vec<float> clamp(Vec<float> x, float lowest, float highest) {
  const Vec<float> above = select(x > lowest, x, broadcast(lowest));
  return select(above < highest, above, broadcast(highest));
}

inline Vec<float> multiply_add(Vec<float> x, Vec<float> y, Vec<float> z) { return x * y + z; }

template <typename Number>
inline bool stream(Number*, Vec<float>) {
  return false;
}

inline void stream_fence() {}

inline float reduce_add(Vec<float> x) {
  float sum = 0;
  for (int i = 0; i < WIDTH; ++i) sum += x[i];
  return sum;
}

template <int COUNT, typename Vector, typename Number>
void reduce_add_all(const Vector* x, Number* found) {
  for (int i = 0; i < COUNT; ++i) found[i] = reduce_add(x[i]);
}

inline float reduce_max(Vec<float> x) {
  float most = x[0];
  for (int i = 1; i < WIDTH; ++i) most = max(x[i], most);
  return most;
}

inline int32_t reduce_max(Vec<int32_t> x) {
  int32_t most = x[0];
  for (int i = 1; i < WIDTH; ++i) most = max(x[i], most);
  return most;
}

// Whether a comparison holds for any of the numbers.
inline bool any_set(Vec<int32_t> is_true) {
  int32_t found = 0;
  for (int i = 0; i < WIDTH; ++i) found |= is_true[i];
  return found != 0;
}

}  // namespace
