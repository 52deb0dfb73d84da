// Products of bfloat16 matrices in squares, for kernels that keep what they multiply in their caches.
//
// c [M, N] = a [M, K] b [K, N]. The rows of a lie apart as they do in its tensor, or a is arranged as tiles of 16 rows
// and 32 columns. b is arranged as tiles of 16 columns and 32 rows, each with two rows side by side on a line (word n of
// line r has rows 2r and 2r + 1 of column n). M, N and K are multiples of 32.

#pragma once

#include "../linear.h"

#ifdef SQUARES

namespace {

inline long whole_blocks(long number) { return (number + SIDE - 1) / SIDE * SIDE; }

// Memory of one kind that a thread keeps.
struct Memory {
  std::vector<uint8_t> bytes;

  template <typename Number>
  Number* numbers(long count) {
    const long needed = count * long(sizeof(Number)) + 64;
    if (long(bytes.size()) < needed) bytes.resize(needed);
    return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
  }
};

inline Bits load_bits(const uint32_t* from) { return *reinterpret_cast<const Bits*>(from); }

// 32 numbers, rounded.
inline __m512i rounded_both(Floats low, Floats high) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Write them. A whole line goes past the caches, which would first read what it replaces; whoever writes so ends with a
// fence.
inline void store_both(uint16_t* to, Floats low, Floats high) {
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), rounded_both(low, high));
  else _mm512_storeu_si512(to, rounded_both(low, high));
}

// Exchange lines and words of a tile.
inline void turn_tile(const uint32_t* from, long stride, uint32_t* to) {
  __m512i lines[TILE];
  for (long i = 0; i < TILE; ++i) lines[i] = _mm512_loadu_si512(from + i * stride);
  transpose(lines);
  for (long i = 0; i < TILE; ++i) _mm512_storeu_si512(to + i * TILE, lines[i]);
}

// Tiles of b whose columns are rows of x [N, K].
inline void tiles_of_rows(const uint16_t* x, long N, long K, long stride, uint32_t* tiles) {
  for (long n = 0; n < N; n += TILE)
    for (long k = 0; k < K; k += SIDE, tiles += WORDS)
      turn_tile(reinterpret_cast<const uint32_t*>(x + n * stride + k), stride / 2, tiles);
}

// A line of two tiles of b from two rows of 32 columns.
inline void interleave(__m512i upper, __m512i lower, uint32_t* left, uint32_t* right) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);  // then lanes of 4 columns come out in their order
  const __m512i above = _mm512_permutexvar_epi64(order, upper), below = _mm512_permutexvar_epi64(order, lower);
  _mm512_store_si512(left, _mm512_unpacklo_epi16(above, below));
  _mm512_store_si512(right, _mm512_unpackhi_epi16(above, below));
}

// Two tiles of b from 32 rows of 32 columns of x, of which `count` rows are there and the others zeros.
inline __attribute__((always_inline)) void tiles_of_block(
    const uint16_t* x, long stride, long count, uint32_t* left, uint32_t* right) {
  const auto row = [&](long i) { return i < count ? _mm512_loadu_si512(x + i * stride) : _mm512_setzero_si512(); };
  for (long i = 0; i < TILE; ++i) interleave(row(2 * i), row(2 * i + 1), left + i * TILE, right + i * TILE);
}

// Tiles of b from x [K, N], which is b itself.
inline void tiles_of_columns(const uint16_t* x, long K, long N, long stride, uint32_t* tiles) {
  const long group = K / SIDE * WORDS;
  for (long n = 0; n < N; n += SIDE, tiles += group)
    for (long k = 0; k < K; k += SIDE, tiles += WORDS) tiles_of_block(x + k * stride + n, stride, SIDE, tiles, tiles + group);
}

// Rows that lie so many numbers apart.
inline Left rows_of(const uint16_t* data, long stride) {
  return {reinterpret_cast<const uint8_t*>(data), 2 * stride, 2 * TILE * stride, 64};
}

// Tiles of rows, so many for each.
inline Left tiles_of(const uint32_t* tiles, long steps) {
  return {reinterpret_cast<const uint8_t*>(tiles), 64, steps * WORDS * 4, WORDS * 4};
}

// Rows that will be read soon, fetched into the second cache a few lines at a time: they lie too far apart for the
// processor to foresee them.
struct Ahead {
  const uint16_t* row = nullptr;
  long stride = 0, width = 0, rows = 0, at = 0;

  void fetch(long lines) {
    for (; lines > 0 && rows > 0; --lines) {
      _mm_prefetch(reinterpret_cast<const char*>(row + at), _MM_HINT_T1);
      if ((at += SIDE) < width) continue;
      at = 0, row += stride, --rows;
    }
  }
};

// c = a b, or c + a b, for rows of a side by side; b has `b_steps` tiles in the direction of K.
inline void multiply_matrices(
    long M, long N, const uint16_t* a, long stride, const uint32_t* b, long b_steps, long steps, float* c,
    long c_stride, bool adds) {
  for (long n = 0; n < N; n += SIDE)
    for (long m = 0; m < M; m += SIDE)
      multiply_square<BFloat16>(
          rows_of(a + m * stride, stride), SIDE, b + n / TILE * b_steps * WORDS, b_steps, steps, c + m * c_stride + n,
          c_stride, adds);
}

}  // namespace

#endif
