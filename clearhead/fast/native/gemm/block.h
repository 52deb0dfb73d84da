// A block of the GEMM: c [rows, 32] = a b, or c + a b, for up to 32 rows. The microkernel of the instruction set
// computes it. Other work (the epilogue of the block before, prefetches) is interleaved with its steps.

#pragma once

#include "pack.h"

#ifdef HAS_GEMM

namespace {

// The rows of a. Strides in bytes: between rows, between groups of 16 rows, and between steps of 64 bytes.
struct PanelA {
  const uint8_t* data;
  int64_t row, group, step;
};

// Rows that are `stride` numbers apart.
inline PanelA rows_of(const uint16_t* data, int64_t stride) {
  return {reinterpret_cast<const uint8_t*>(data), 2 * stride, 2 * TILE * stride, LINE};
}

// Packed rows, with `steps` tiles each.
inline PanelA packed_rows(const uint32_t* tiles, int64_t steps) {
  return {reinterpret_cast<const uint8_t*>(tiles), LINE, steps * TILE_WORDS * 4, TILE_WORDS * 4};
}

// Packed columns: `group` words from 16 columns to the next 16.
struct PanelB {
  const uint32_t* tiles;
  int64_t group;
};

template <typename Sum>
struct BlockC {
  Sum* data;
  int64_t stride;
  bool adds;
};

// The operand that is read only once, and should not evict the other one from the first cache.
enum class Streamed { NONE, A, B };

}  // namespace

#ifdef HAS_AMX
#include "microkernel_amx.h"
#else
#include "microkernel_avx512.h"
#endif

namespace {

// c = a b, or c + a b, for rows of a that are `stride` numbers apart; b has `b_steps` tiles in the direction of K.
inline void gemm(
    int64_t M, int64_t N, const uint16_t* a, int64_t stride, const uint32_t* b, int64_t b_steps, int64_t steps,
    float* c, int64_t c_stride, bool adds) {
  for (int64_t n = 0; n < N; n += BLOCK)
    for (int64_t m = 0; m < M; m += BLOCK)
      multiply_block<BFloat16, Streamed::NONE>(
          rows_of(a + m * stride, stride), std::min(BLOCK, M - m), {b + n / TILE * b_steps * TILE_WORDS, b_steps * TILE_WORDS}, steps, {c + m * c_stride + n, c_stride, adds}, [](int64_t) {});
}

}  // namespace

#endif
