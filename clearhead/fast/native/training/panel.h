// Panels of the training GEMM: rows stay in the first cache while columns of weights stream from the second cache.

#pragma once

#include "../gemm/gemm.h"

#ifdef HAS_GEMM

namespace {

constexpr int64_t STEPS = 16;        // steps of 32 in a block that stays in the first cache
constexpr int64_t CACHED = 1 << 19;  // numbers of b that stay in the second cache
constexpr int64_t DEEP = 128;        // steps; from this depth on, the sums of all rows are stored and accumulated
constexpr int64_t FEW_STEPS = 40;    // steps at a time

// The outputs of all layers of a call, as columns of one product.
struct Outputs {
  const LinearCall& call;
  int64_t count = 0;

  explicit Outputs(const LinearCall& of) : call(of) {
    for (int64_t i = 0; i < of.count; ++i) count += of.layers[i].N;
  }

  // Return the layer of output n, and make n the output within the layer.
  const LinearArgs& layer(int64_t& n) const {
    int64_t i = 0;
    while (n >= call.layers[i].N) n -= call.layers[i++].N;
    return call.layers[i];
  }
};

// Round row n of the weights of a layer; rows after the last one are zeros.
inline void round_weights(const LinearArgs& layer, int64_t n, int64_t K, uint16_t* to) {
  if (n >= layer.rows) return std::memset(to, 0, K * 2), void();
  round_row(layer.weight + n * K, K, to);
}

// Pack b = w^T, for all layers. By a team, with a barrier.
inline void pack_transposed_weights(const Outputs& outputs, uint32_t* tiles, Arena& arena) {
  const int64_t K = outputs.call.K;
  const Arena::Frame frame(arena);
  auto* rounded = arena.take<uint16_t>(TILE * K);
#pragma omp for schedule(static)
  for (int64_t first = 0; first < outputs.count; first += TILE) {
    int64_t n = first;
    const LinearArgs& layer = outputs.layer(n);
    for (int64_t i = 0; i < TILE; ++i) round_weights(layer, n + i, K, rounded + i * K);
    pack_transposed(rounded, TILE, K, K, tiles + first * K / 2);
  }
}

// Pack a from 32 rows, from step `first` of `steps` on; `count` rows exist, the others are zeros.
inline void pack_rows(
    const uint16_t* x, int64_t stride, int64_t count, int64_t depth, int64_t first, int64_t steps, uint32_t* tiles) {
  for (int64_t m = 0; m < BLOCK; ++m) {
    uint32_t* line = tiles + (m / TILE * steps + first) * TILE_WORDS + m % TILE * TILE;
    for (int64_t k = 0; k < depth; k += BLOCK, line += TILE_WORDS)
      _mm512_store_si512(line, m < count ? _mm512_loadu_si512(x + m * stride + k) : _mm512_setzero_si512());
  }
}

// Rows that are read soon, prefetched into the second cache a few lines at a time: they are too far apart for the
// processor's prediction.
struct Ahead {
  const uint16_t* row = nullptr;
  int64_t stride = 0, width = 0, rows = 0, at = 0;

  void fetch(int64_t lines) {
    for (; lines > 0 && rows > 0; --lines) {
      _mm_prefetch(reinterpret_cast<const char*>(row + at), _MM_HINT_T1);
      if ((at += BLOCK) < width) continue;
      at = 0, row += stride, --rows;
    }
  }
};

// A panel: some columns of b and some steps, which stay in the second cache for all rows of a thread, and 32 packed
// rows.
struct Panel {
  int64_t m, n, width, first, steps;
  bool is_last;  // whether these are the last steps
  const uint32_t* a;
  float* sums;  // sums of two blocks
  Ahead ahead;  // the rows of the next panel
};

// Compute the sums of a panel. The epilogue `finish(j, n, sums)` of 32 sums of a row is interleaved with the next
// block. All sums are stored on request or for a large depth; otherwise only those of two blocks.
template <typename Finish>
void multiply_panel(
    Panel& panel, const uint32_t* b, int64_t b_steps, float* sums, bool is_kept, const Finish& finish) {
  const int64_t steps = panel.steps, parts = (steps + STEPS - 1) / STEPS, size = (steps + parts - 1) / parts;
  const int64_t lines = (BLOCK * BLOCK + panel.width - 1) / panel.width;
  const bool keeps = is_kept || parts > 1 || panel.steps < b_steps;
  int64_t ready = -BLOCK;  // the block whose sums are finished next
  const auto place = [&](int64_t n) { return sums + (keeps ? n : n % (2 * BLOCK)) * BLOCK; };
  const auto finish_rows = [&](int64_t from, int64_t end) {
    for (int64_t j = from; j < std::min(end, BLOCK); ++j) finish(j, ready, place(ready) + j * BLOCK);
  };
  for (int64_t step = 0; step < steps; step += size) {
    const int64_t here = std::min(size, steps - step), share = (BLOCK + here - 1) / here;
    for (int64_t n = 0; n < panel.width; n += BLOCK) {
      const uint32_t* own_b = b + ((panel.n + n) / TILE * b_steps + panel.first + step) * TILE_WORDS;
      multiply_block<BFloat16, Streamed::B>(
          packed_rows(panel.a + step * TILE_WORDS, steps), BLOCK, {own_b, b_steps * TILE_WORDS}, here,
          {place(n), BLOCK, panel.first + step > 0}, [&](int64_t at) {
            panel.ahead.fetch(lines);
            if (ready >= 0) finish_rows(at * share, at * share + share);
          });
      if (panel.is_last && step + size >= steps) ready = n;
    }
  }
  if (ready >= 0) finish_rows(0, BLOCK);
}

// Run all panels by a team, whose threads share the rows. `pack(m, first, steps, tiles)` packs some steps of 32 rows,
// `next(m, first)` returns their address, and `use(panel)` multiplies them.
template <typename Pack, typename Next, typename Use>
void for_each_panel(
    int64_t rows, int64_t columns, int64_t steps, Arena& arena, const Pack& pack, const Next& next, const Use& use) {
  const int64_t few = steps > DEEP ? FEW_STEPS : steps, most = std::max(BLOCK, CACHED / (few * BLOCK) / BLOCK * BLOCK);
  const int64_t pieces = (columns + most - 1) / most, width = round_up((columns + pieces - 1) / pieces, BLOCK);
  const int64_t blocks = round_up(rows, BLOCK) / BLOCK, threads = omp_get_num_threads(), thread = omp_get_thread_num();
  const int64_t begin = blocks * thread / threads * BLOCK, end = blocks * (thread + 1) / threads * BLOCK;
  const int64_t row_sums = std::max(width, 2 * BLOCK) * 2;
  const Arena::Frame frame(arena);
  auto* tiles = arena.take<uint32_t>(few * BLOCK * TILE);
  auto* sums = arena.take<float>((few < steps ? std::max(BLOCK, end - begin) : BLOCK) * row_sums);
  for (int64_t n = 0; n < columns; n += width)
    for (int64_t first = 0; first < steps; first += few)
      for (int64_t m = begin; m < end; m += BLOCK) {
        const int64_t here = std::min(few, steps - first);
        pack(m, first, here, tiles);
        Panel panel{m, n, std::min(width, columns - n), first, here, first + here == steps, tiles, sums, {}};
        if (few < steps) panel.sums += (m - begin) * row_sums;
        if (m + BLOCK < end) {
          panel.ahead = next(m + BLOCK, first);
          panel.ahead.rows = std::min(BLOCK, rows - m - BLOCK);
          panel.ahead.width = std::min(panel.ahead.width, here * BLOCK);
        }
        use(panel);
      }
}

}  // namespace

#endif
