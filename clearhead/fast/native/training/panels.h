// Rows in the first cache, which columns of weights in the second cache pass by.

#pragma once

#include <omp.h>

#include "calls.h"
#include "tiles.h"

#ifdef SQUARES

namespace {

constexpr long STEPS = 16;         // of 32, of a block that stays in the first cache
constexpr long CACHED = 1 << 19;   // numbers of b that stay in the second cache
constexpr long DEEP = 128;         // steps; with more of them the sums of all rows are kept, and added to
constexpr long FEW_STEPS = 40;     // at a time

struct Work {  // the memory of a thread
  Memory rounded, sums, tiles;
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

// Tiles of 32 rows, of which `count` are there and the others zeros, from step `first` of `steps` on.
inline void arrange_block(
    const uint16_t* x, long stride, long count, long depth, long first, long steps, uint32_t* tiles) {
  for (long m = 0; m < SIDE; ++m) {
    uint32_t* line = tiles + (m / TILE * steps + first) * WORDS + m % TILE * TILE;
    for (long k = 0; k < depth; k += SIDE, line += WORDS)
      _mm512_store_si512(line, m < count ? _mm512_loadu_si512(x + m * stride + k) : _mm512_setzero_si512());
  }
}

// Some of the columns of b and of the steps, which stay in the second cache for all rows of a thread, and 32 of these as
// tiles.
struct Strip {
  long m, n, width, first, steps;
  bool is_last;  // of the steps
  const uint32_t* a;
  float* sums;  // of two layers
  Ahead ahead;  // the rows of the next one
};

// Sums of a strip; `finish(j, n, sums)` is called for the 32 sums of a row while those of the next block are multiplied.
// All sums are kept if it is said, or the depth is large; else those of two blocks.
template <typename Finish>
void multiply_strip(
    Strip& strip, const uint32_t* b, long b_steps, float* sums, bool is_kept, const Finish& finish) {
  const long steps = strip.steps, parts = (steps + STEPS - 1) / STEPS, size = (steps + parts - 1) / parts;
  const long lines = (SIDE * SIDE + strip.width - 1) / strip.width;
  const bool keeps = is_kept || parts > 1 || strip.steps < b_steps;
  long ready = -SIDE;  // the block whose sums are to be finished
  const auto place = [&](long n) { return sums + (keeps ? n : n % (2 * SIDE)) * SIDE; };
  const auto finish_rows = [&](long from, long end) {
    for (long j = from; j < std::min(end, SIDE); ++j) finish(j, ready, place(ready) + j * SIDE);
  };
  for (long step = 0; step < steps; step += size) {
    const long here = std::min(size, steps - step), share = (SIDE + here - 1) / here;
    for (long n = 0; n < strip.width; n += SIDE) {
      const uint32_t* own_b = b + ((strip.n + n) / TILE * b_steps + strip.first + step) * WORDS;
      multiply_beside<BFloat16, Passing::RIGHT>(
          tiles_of(strip.a + step * WORDS, steps), SIDE, own_b, b_steps, here, place(n), SIDE, strip.first + step > 0,
          [&](long at) {
            strip.ahead.fetch(lines);
            if (ready >= 0) finish_rows(at * share, at * share + share);
          });
      if (strip.is_last && step + size >= steps) ready = n;
    }
  }
  if (ready >= 0) finish_rows(0, SIDE);
}

// By a team, whose threads share the rows: `arrange(m, first, steps, tiles)` makes tiles of some steps of 32 rows,
// `next(m, first)` is where they lie, and `use(strip)` multiplies them.
template <typename Arrange, typename Next, typename Use>
void for_each_strip(
    long rows, long columns, long steps, Work& own, const Arrange& arrange, const Next& next, const Use& use) {
  const long few = steps > DEEP ? FEW_STEPS : steps, most = std::max(SIDE, CACHED / (few * SIDE) / SIDE * SIDE);
  const long pieces = (columns + most - 1) / most, width = whole_blocks((columns + pieces - 1) / pieces);
  const long blocks = whole_blocks(rows) / SIDE, threads = omp_get_num_threads(), thread = omp_get_thread_num();
  const long begin = blocks * thread / threads * SIDE, end = blocks * (thread + 1) / threads * SIDE;
  const long room = std::max(width, 2 * SIDE) * 2;  // for the sums of a row
  uint32_t* tiles = own.tiles.numbers<uint32_t>(few * SIDE * TILE);
  float* sums = own.sums.numbers<float>((few < steps ? std::max(SIDE, end - begin) : SIDE) * room);
  for (long n = 0; n < columns; n += width)
    for (long first = 0; first < steps; first += few)
      for (long m = begin; m < end; m += SIDE) {
        const long here = std::min(few, steps - first);
        arrange(m, first, here, tiles);
        Strip strip{m, n, std::min(width, columns - n), first, here, first + here == steps, tiles, sums, {}};
        if (few < steps) strip.sums += (m - begin) * room;
        if (m + SIDE < end) {
          strip.ahead = next(m + SIDE, first);
          strip.ahead.rows = std::min(SIDE, rows - m - SIDE);
          strip.ahead.width = std::min(strip.ahead.width, here * SIDE);
        }
        use(strip);
      }
}

}  // namespace

#endif
