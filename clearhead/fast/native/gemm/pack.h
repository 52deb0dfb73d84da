// Packed panels of the GEMM: operands of blocks of 32 x 32 sums, in the order in which they are read.
//
// c [M, N] = a [M, K] b [K, N], in words of 4 bytes: two bfloat16 numbers or four 8-bit numbers. b is packed as tiles
// of 16 columns and 64 bytes: word r of column n is at [r][n]. Rows of a keep their distance in memory, or are packed
// as tiles of 16 rows of 64 bytes. A tile has 256 words; tiles of the same columns, or rows, are contiguous.

#pragma once

#include <algorithm>

#include "../workspace.h"
#include "traits.h"

namespace {

constexpr int64_t TILE = 16;  // rows and columns of a tile, of 64 bytes each
constexpr int64_t BLOCK = 2 * TILE;
constexpr int64_t TILE_WORDS = TILE * TILE;

#ifdef __AVX512F__

using Words = __m512i;

// Transpose 16 x 16 words.
inline __attribute__((always_inline)) void transpose(__m512i rows[16]) {
  __m512i other[16];
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      other[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0x88);
      other[i + j + 4] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
  }
}

#elif defined(HAS_AVX2)

using Words = __m256i;

// Transpose 8 x 8 words.
inline __attribute__((always_inline)) void transpose(__m256i rows[8]) {
  __m256i other[8];
  for (int i = 0; i < 8; i += 2) {
    other[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    other[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm256_unpacklo_epi64(other[i + j], other[i + j + 2]);
      rows[i + 2 * j + 1] = _mm256_unpackhi_epi64(other[i + j], other[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    const __m256i low = rows[i], high = rows[i + 4];
    rows[i] = _mm256_permute2x128_si256(low, high, 0x20);
    rows[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
  }
}

#else

using Words = Vec<int32_t>;

inline void transpose(Words rows[WIDTH]) {
  for (int64_t i = 0; i < WIDTH; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const int32_t word = rows[i][j];
      rows[i][j] = rows[j][i], rows[j][i] = word;
    }
}

#endif

#ifdef HAS_GEMM

constexpr int64_t PANEL = BLOCK;  // outputs that are packed together

inline void transpose_tile(const uint32_t* from, int64_t stride, uint32_t* to) {
  __m512i rows[TILE];
  for (int64_t i = 0; i < TILE; ++i) rows[i] = _mm512_loadu_si512(from + i * stride);
  transpose(rows);
  for (int64_t i = 0; i < TILE; ++i) _mm512_storeu_si512(to + i * TILE, rows[i]);
}

// Pack tiles of 16 columns of b from rows of x [16, words]; `count` rows exist, the others are zeros. A zero point is
// added to bytes. Rows of x that are AHEAD rows further on are prefetched. Float16 numbers are rounded to bfloat16.
template <int64_t AHEAD = 0, int32_t ZERO_POINT = 0, bool IS_FLOAT16 = false>
inline void pack_transposed(const uint32_t* x, int64_t stride, int64_t count, int64_t words, uint32_t* tiles) {
  for (int64_t word = 0; word < words / TILE * TILE; word += TILE, tiles += TILE_WORDS) {
    __m512i rows[TILE];
    for (int64_t m = 0; m < TILE; ++m) {
      const uint32_t* row = x + m * stride + word;
      if (AHEAD) _mm_prefetch(reinterpret_cast<const char*>(row + AHEAD * stride), _MM_HINT_T1);
      if (m >= count) rows[m] = _mm512_setzero_si512();
      else if constexpr (IS_FLOAT16) rows[m] = MixedFloat16::load_w(reinterpret_cast<const Float16*>(row));
      else rows[m] = _mm512_loadu_si512(row);
    }
    transpose(rows);
    for (int64_t r = 0; r < TILE; ++r)
      _mm512_storeu_si512(tiles + r * TILE, _mm512_xor_si512(rows[r], _mm512_set1_epi8(int8_t(ZERO_POINT))));
  }
}

// Pack b = the transposed x [N, K].
inline void pack_transposed(const uint16_t* x, int64_t N, int64_t K, int64_t stride, uint32_t* tiles) {
  for (int64_t n = 0; n < N; n += TILE, tiles += TILE * K / 2)
    pack_transposed(reinterpret_cast<const uint32_t*>(x + n * stride), stride / 2, TILE, K / 2, tiles);
}

// Pack a line of two tiles of b from two rows of 32 columns.
inline void interleave(__m512i upper, __m512i lower, uint32_t* left, uint32_t* right) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);  // afterwards groups of 4 columns are in order
  const __m512i above = _mm512_permutexvar_epi64(order, upper), below = _mm512_permutexvar_epi64(order, lower);
  _mm512_store_si512(left, _mm512_unpacklo_epi16(above, below));
  _mm512_store_si512(right, _mm512_unpackhi_epi16(above, below));
}

// Pack two tiles of b from 32 rows of 32 columns; `count` rows exist, the others are zeros.
inline __attribute__((always_inline)) void pack_block(
    const uint16_t* x, int64_t stride, int64_t count, uint32_t* left, uint32_t* right) {
  const auto row = [&](int64_t i) { return i < count ? _mm512_loadu_si512(x + i * stride) : _mm512_setzero_si512(); };
  for (int64_t i = 0; i < TILE; ++i) interleave(row(2 * i), row(2 * i + 1), left + i * TILE, right + i * TILE);
}

// Pack b = x [K, N].
inline void pack(const uint16_t* x, int64_t K, int64_t N, int64_t stride, uint32_t* tiles) {
  const int64_t group = K / BLOCK * TILE_WORDS;
  for (int64_t n = 0; n < N; n += BLOCK, tiles += group)
    for (int64_t k = 0; k < K; k += BLOCK, tiles += TILE_WORDS)
      pack_block(x + k * stride + n, stride, BLOCK, tiles, tiles + group);
}

// Round 32 numbers to bfloat16.
inline __m512i round_pair(Vec<float> low, Vec<float> high) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Write 32 rounded numbers, a whole line past the caches; callers must end with stream_fence.
inline void stream_pair(uint16_t* to, Vec<float> low, Vec<float> high) {
  const __m512i rounded = round_pair(low, high);
  if (reinterpret_cast<uintptr_t>(to) % LINE == 0) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), rounded);
  else _mm512_storeu_si512(to, rounded);
}

#else
constexpr bool IS_SIGNED = false;
constexpr int64_t PANEL = 2 * WIDTH;
#endif

}  // namespace
