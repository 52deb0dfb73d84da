// Runs every kernel on arrays that end where their last number does, for sizes around those of vectors and tiles.

#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" {
void linear_float32(const float*, const float*, const float*, float*, long, long, long);
void linear_bfloat16(const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, long, long, long);
void linear_mixed(const float*, const uint16_t*, const float*, float*, long, long, long);
void linear_int8(const float*, const int8_t*, const float*, const float*, float*, long, long, long);
void top_float32(const float*, float*, int64_t*, float*, long, long, long, long);
void top_bfloat16(const uint16_t*, float*, int64_t*, float*, long, long, long, long);
}

template <typename T>
std::vector<T> numbers(long count) {
  std::vector<T> made(count);
  for (long i = 0; i < count; ++i) made[i] = T(i * 7 % 101);
  made.shrink_to_fit();
  return made;
}

int main() {
  for (long rows : {1, 2, 5, 16, 17, 33})
    for (long outputs : {1, 3, 16, 32, 35, 64})
      for (long inputs : {1, 15, 32, 64, 65, 128}) {
        auto x = numbers<float>(rows * inputs), w = numbers<float>(outputs * inputs), bias = numbers<float>(outputs);
        auto y = numbers<float>(rows * outputs);
        linear_float32(x.data(), w.data(), bias.data(), y.data(), rows, outputs, inputs);
        auto w8 = numbers<int8_t>(outputs * inputs);
        linear_int8(x.data(), w8.data(), bias.data(), bias.data(), y.data(), rows, outputs, inputs);
        auto x16 = numbers<uint16_t>(rows * inputs), w16 = numbers<uint16_t>(outputs * inputs);
        auto bias16 = numbers<uint16_t>(outputs), y16 = numbers<uint16_t>(rows * outputs);
        linear_bfloat16(x16.data(), w16.data(), bias16.data(), y16.data(), rows, outputs, inputs);
        linear_mixed(x.data(), w16.data(), bias.data(), y.data(), rows, outputs, inputs);
        for (long count = 1; count <= inputs && count < 5; ++count) {
          auto values = numbers<float>(rows * count), totals = numbers<float>(rows);
          auto places = numbers<int64_t>(rows * count);
          top_float32(x.data(), values.data(), places.data(), totals.data(), rows, inputs, inputs, count);
          top_bfloat16(x16.data(), values.data(), places.data(), totals.data(), rows, inputs, inputs, count);
        }
      }
  std::puts("ok");
}
