// Packed panels of float32 weights stored row by row. With few rows (gemv.h), a sum is accumulated in WIDTH lanes: each
// lane has the products whose k has one remainder modulo WIDTH, and the lanes are added at the end. Here a lane is an
// output, and x and the weights are packed by remainders. The sums of the remainders are added in the order of the
// lanes, so every sum has the same bits either way.
//
// Legend: M rows of x, N outputs, K inputs, C = K / WIDTH numbers of a remainder; the rest of K follows them.

#pragma once

#include "../team.h"
#include "epilogue.h"
#include "microkernel_float.h"

namespace {

constexpr int64_t LEAST_FLOAT_ROWS = 48;  // with fewer rows, packing weights costs more than it saves

#ifdef __AVX2__

constexpr int64_t CACHED_SUM_ROWS = 48;  // rows whose sums stay in the cache
constexpr int SUM_LEVELS = WIDTH == 8 ? 4 : 5;  // levels of sums of 1, 2, 4 ... lanes

// Pack a row of x by remainders, in the order in which these are added.
inline void pack_remainders(const float* x, int64_t K, float* packed) {
  const int64_t C = K / WIDTH;
  int64_t c = 0;
  for (; c + WIDTH <= C; c += WIDTH) {
    Words words[WIDTH];
    for (int64_t i = 0; i < WIDTH; ++i) words[i] = (Words)load(x + (c + i) * WIDTH);
    transpose(words);
    for (int64_t r = 0; r < WIDTH; ++r) store(packed + r * C + c, (Vec<float>)words[LANE_ORDER[r]]);
  }
  for (; c < C; ++c)
    for (int64_t r = 0; r < WIDTH; ++r) packed[r * C + c] = x[c * WIDTH + LANE_ORDER[r]];
  std::copy(x + C * WIDTH, x + K, packed + C * WIDTH);
}

// Pack the weights of 32 outputs by remainders, as tiles of 16 columns, and prefetch those of the next outputs.
inline void pack_float_panel(const float* w, int64_t K, float* packed) {
  const int64_t C = K / WIDTH;
  for (int64_t i = 0; i < BLOCK; i += WIDTH, w += WIDTH * K) {
    float* to = packed + i / TILE * K * TILE + i % TILE;
    for (int64_t c = 0; c < C; ++c) {
      Words words[WIDTH];
      for (int64_t n = 0; n < WIDTH; ++n) {
        const float* from = w + n * K + c * WIDTH;
        __builtin_prefetch(from + WIDTH * K);
        words[n] = (Words)load(from);
      }
      transpose(words);
      for (int64_t r = 0; r < WIDTH; ++r) store(to + (r * C + c) * TILE, (Vec<float>)words[LANE_ORDER[r]]);
    }
    for (int64_t k = C * WIDTH; k < K; ++k)
      for (int64_t n = 0; n < WIDTH; ++n) to[k * TILE + n] = w[n * K + k];
  }
}

// Multiply packed rows of x, from row m on, with a panel of the outputs from n on; sums [SUM_LEVELS, rows, 32].
inline void multiply_float_panel(
    const GemmArgs<Float32>& args, const float* x, int64_t m, int64_t rows, const float* packed, int64_t n, float* sums) {
  const int64_t K = args.K, C = K / WIDTH, level = rows * BLOCK, group = K * TILE;
  for (int64_t r = 0; r < WIDTH; ++r) {
    const int64_t joined = __builtin_ctzll(~r);  // number of levels: the pairs that this remainder completes
    multiply_float_tiles<FLOAT_ROWS>(
        x + r * C, K, rows, C, packed + r * C * TILE, group, {sums + joined * level, BLOCK, false, joined, level});
  }
  const float* found = sums + (SUM_LEVELS - 1) * level;
  for (int64_t i = 0; i < BLOCK; i += WIDTH) {
    const Epilogue<Float32> epilogue(args, n + i);
    const float* column = packed + i / TILE * group + i % TILE;
    for (int64_t j = 0; j < rows; ++j) {
      Vec<float> sum = load(found + j * BLOCK + i);
      for (int64_t k = C * WIDTH; k < K; ++k) sum = multiply_add(broadcast(x[j * K + k]), load(column + k * TILE), sum);
      epilogue.write(sum, m + j);
    }
  }
}

#else
inline void pack_remainders(const float*, int64_t, float*) {}
#endif

// Multiply all outputs that fill panels, if rows of x are packed; return their number.
inline __attribute__((noinline)) int64_t multiply_float_panels_by_team(const GemmArgs<Float32>& args, Arena& arena) {
#ifdef __AVX2__
  if (!args.packed_x) return 0;
  const auto* x = reinterpret_cast<const float*>(args.packed_x);
  const Arena::Frame frame(arena);
  auto* packed = arena.take<float>(args.K * BLOCK);
  auto* sums = arena.take<float>(SUM_LEVELS * CACHED_SUM_ROWS * BLOCK);
#pragma omp for schedule(static) nowait
  for (int64_t panel = 0; panel < args.N / BLOCK; ++panel) {
    pack_float_panel(args.w + panel * BLOCK * args.K, args.K, packed);
    for (int64_t m = 0; m < args.M; m += CACHED_SUM_ROWS)
      multiply_float_panel(
          args, x + m * args.K, m, std::min(CACHED_SUM_ROWS, args.M - m), packed, panel * BLOCK, sums);
  }
  return args.N / BLOCK * BLOCK;
#else
  return 0;
#endif
}

}  // namespace
