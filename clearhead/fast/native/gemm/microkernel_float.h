// Float32 blocks by vector instructions: c [rows, two vectors] = a b, or c + a b. b has tiles of 16 columns, row by
// row. Each sum is in the order of K, for any number of rows.

#pragma once

#include "pack.h"

namespace {

constexpr int FLOAT_ROWS = WIDTH == 8 ? 6 : 8;  // rows of a whose sums are in registers together

// Destination of sums, in rows that are `stride` numbers apart. Sums begin with the stored values if `adds`. `joined`
// other sums, `level` numbers apart before this address, are added to the result in their order.
struct FloatC {
  float* data;
  int64_t stride;
  bool adds;
  int64_t joined = 0, level = 0;
};

// Rows of a that are `a_stride` numbers apart, ROWS at a time; the columns of b are those of `left`, then `right`.
template <int ROWS>
void multiply_float_block(
    const float* a, int64_t a_stride, int64_t rows, int64_t K, const float* left, const float* right, FloatC c) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * a_stride, c.data += ROWS * c.stride) {
    Vec<float> sums[ROWS][2] = {};
    for (int j = 0; c.adds && j < ROWS; ++j)
      for (int side = 0; side < 2; ++side) sums[j][side] = load(c.data + j * c.stride + side * WIDTH);
    constexpr int TOGETHER = 3;  // rows that are addressed from one address
    const float* rows_of_a[(ROWS + TOGETHER - 1) / TOGETHER];
    for (int j = 0; j < ROWS; j += TOGETHER) rows_of_a[j / TOGETHER] = a + j * a_stride;
    int64_t stride = a_stride;
    for (int64_t k = 0; k < K; ++k) {
      // make the compiler believe that it changes: addresses of all rows would not fit into registers
      asm("" : "+r"(stride));
      const Vec<float> first = load(left + k * TILE), second = load(right + k * TILE);
      for (int j = 0; j < ROWS; ++j) {
        const Vec<float> number = broadcast(rows_of_a[j / TOGETHER][j % TOGETHER * stride + k]);
        sums[j][0] = multiply_add(number, first, sums[j][0]);
        sums[j][1] = multiply_add(number, second, sums[j][1]);
      }
    }
    for (int j = 0; j < ROWS; ++j)
      for (int side = 0; side < 2; ++side) {
        float* place = c.data + j * c.stride + side * WIDTH;
        for (int64_t i = c.joined; i > 0; --i) sums[j][side] += load(place - i * c.level);
        store(place, sums[j][side]);
      }
  }
  if constexpr (ROWS > 1)
    if (rows > 0) multiply_float_block<ROWS / 2>(a, a_stride, rows, K, left, right, c);
}

// The same for all 32 columns of two tiles.
template <int ROWS>
void multiply_float_tiles(
    const float* a, int64_t a_stride, int64_t rows, int64_t K, const float* b, int64_t group, FloatC c) {
  for (int64_t side = 0; side < BLOCK; side += 2 * WIDTH, c.data += 2 * WIDTH) {
    const float* left = b + side / TILE * group;
    multiply_float_block<ROWS>(a, a_stride, rows, K, left, WIDTH == TILE ? left + group : left + WIDTH, c);
  }
}

}  // namespace
