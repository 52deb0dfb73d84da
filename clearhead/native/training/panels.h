// Panels of rows that stay in the second cache while all columns of weights pass by.

#pragma once

#include "calls.h"
#include "tiles.h"

#ifdef MATRIX_UNIT

namespace {

constexpr long STEPS = 16;         // of 32, of a block of b that stays in the first cache
constexpr long PANEL = 1 << 19;    // numbers of a that stay in the second cache
constexpr long PANEL_ROWS = 512;   // at most

struct Work {  // the memory of a thread
  Memory rounded, sums, tail, tiles;
};

// Columns of all parts side by side.
struct Columns {
  const LinearCall& call;
  long total = 0;

  explicit Columns(const LinearCall& of) : call(of) {
    for (long i = 0; i < of.count; ++i) total += of.parts[i].N;
  }

  // The part of a column, which becomes the column of the part.
  const Part& part(long& n) const {
    long i = 0;
    while (n >= call.parts[i].N) n -= call.parts[i++].N;
    return call.parts[i];
  }
};

// Row n of the weights of a part, rounded; behind the last one there are zeros.
inline void round_row(const Part& part, long n, long K, uint16_t* to) {
  if (n >= part.rows) return std::memset(to, 0, K * 2), void();
  for (long k = 0; k < K; k += LANES) store_lanes(to + k, load_lanes(part.weight + n * K + k));
}

// b = w^T, for all parts. By a team, with a barrier.
inline void arrange_rows(const Columns& columns, uint32_t* tiles, Work& own) {
  const long K = columns.call.K;
  uint16_t* rounded = own.rounded.numbers<uint16_t>(TILE * K);
#pragma omp for schedule(static)
  for (long first = 0; first < columns.total; first += TILE) {
    long n = first;
    const Part& part = columns.part(n);
    for (long i = 0; i < TILE; ++i) round_row(part, n + i, K, rounded + i * K);
    tiles_of_rows(rounded, TILE, K, K, tiles + first * K / 2);
  }
}

// Rows of a panel, whose last block is filled up with zeros where the rows end within it.
struct Panel {
  const uint16_t* data;
  const uint16_t* tail;
  long stride, tail_stride, whole;

  Left block(long m, long k) const {
    return m < whole ? rows_of(data + m * stride + k, stride) : rows_of(tail + k, tail_stride);
  }
};

inline Panel panel_of(const uint16_t* x, long stride, long count, long K, uint16_t* tail) {
  const long whole = count / SIDE * SIDE;
  if (whole < count) {
    std::memset(tail, 0, SIDE * K * 2);
    for (long m = whole; m < count; ++m) std::memcpy(tail + (m - whole) * K, x + m * stride, K * 2);
  }
  return {x, tail, stride, K, whole};
}

inline long panel_rows(long M, long depth, long threads) {
  const long most = std::min(PANEL_ROWS, std::max(SIDE, PANEL / depth));
  return whole_blocks(std::min(most, (M + threads - 1) / threads));
}

// Sums [rows, 32] of a panel and 32 columns of b, of which the last block alone is kept unless it is said otherwise or
// the depth is large; `finish(m, sums)` is called for each block of rows while it is in the first cache.
template <typename Finish>
void multiply_panel(
    const Panel& panel, long rows, long depth, const uint32_t* b, long b_steps, float* sums, bool is_kept, bool adds,
    const Finish& finish) {
  const long steps = depth / SIDE, parts = (steps + STEPS - 1) / STEPS, size = (steps + parts - 1) / parts;
  for (long step = 0; step < steps; step += size)
    for (long m = 0; m < rows; m += SIDE) {
      float* c = sums + (is_kept || steps > size ? m * SIDE : 0);
      multiply(panel.block(m, step * SIDE), b + step * WORDS, b_steps, std::min(size, steps - step), c, SIDE,
               adds || step > 0);
      if (step + size >= steps) finish(m, c);
    }
}

}  // namespace

#endif
