// Products with transposed float32 weights, [K, N], as in GPT-2's files. Every sum is in the order of K, for any number
// of rows. The sums of a few rows are accumulated in the cache; for more rows the weights are packed.
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "../team.h"
#include "epilogue.h"
#include "microkernel_float.h"

namespace {

constexpr int64_t FEW_TRANSPOSED = 16, TRANSPOSED_SUMS = 4096;
constexpr int64_t FETCHED_FIRST = 4 * TILE;  // numbers of a row of weights
constexpr int64_t PACKED_DEPTH = 512;  // rows of weights whose tiles stay in the cache

// Multiply at most FEW_TRANSPOSED rows with outputs from begin to end, (end - begin) * M <= TRANSPOSED_SUMS.
inline void multiply_transposed(const GemmArgs<Float32>& args, int64_t begin, int64_t end) {
  constexpr int STEP = 8;
  alignas(64) float sums[TRANSPOSED_SUMS] = {};
  const int64_t columns = end - begin, whole = columns / WIDTH * WIDTH, ldb = args.ldb;
  for (int64_t k = 0; k < args.K; k += STEP) {
    const float* w = args.w + k * ldb + begin;
    const int64_t rows = std::min<int64_t>(STEP, args.K - k);
    // The processor does not predict the start of the next rows; after it, it prefetches by itself.
    for (int i = 0; i < STEP; ++i)
      for (int64_t n = 0; n < FETCHED_FIRST; n += TILE) __builtin_prefetch(w + (i + STEP) * ldb + n);
    for (int64_t m = 0; m < args.M; ++m) {
      const float* x = args.x + m * args.K + k;
      float* sum = sums + m * columns;
      int64_t n = 0;
      if (rows == STEP)
        for (; n < whole; n += WIDTH) {
          Vec<float> added = load(sum + n);
          for (int i = 0; i < STEP; ++i) added = multiply_add(broadcast(x[i]), load(w + i * ldb + n), added);
          store(sum + n, added);
        }
      for (; n < columns; ++n)
        for (int64_t i = 0; i < rows; ++i) sum[n] = multiply_add(x[i], w[i * ldb + n], sum[n]);
    }
  }
  for (int64_t m = 0; m < args.M; ++m)
    for (int64_t n = 0; n < columns; ++n) args.write(m, begin + n, sums[m * columns + n]);
}

// Multiply all rows with the outputs [n, n + 32), or fewer at the end; sums [M, 32].
inline void multiply_packed_outputs(const GemmArgs<Float32>& args, int64_t n, float* packed, float* sums) {
  const int64_t count = std::min(BLOCK, args.N - n), group = PACKED_DEPTH * TILE;
  for (int64_t from = 0; from < args.K; from += PACKED_DEPTH) {
    const int64_t depth = std::min(PACKED_DEPTH, args.K - from);
    for (int64_t k = 0; k < depth; ++k) {
      const float* row = args.w + (from + k) * args.ldb + n;
      __builtin_prefetch(row + 8 * args.ldb);
      __builtin_prefetch(row + 8 * args.ldb + TILE);
      for (int64_t i = 0; i < BLOCK; i += WIDTH)
        store(packed + i / TILE * group + k * TILE + i % TILE, i < count ? load(row + i, count - i) : Vec<float>{});
    }
    multiply_float_tiles<FLOAT_ROWS>(args.x + from, args.K, args.M, depth, packed, group, {sums, BLOCK, from > 0});
  }
  for (int64_t i = 0; i < count; i += WIDTH) {
    if (i + WIDTH <= count) {
      const Epilogue<Float32> epilogue(args, n + i);
      for (int64_t m = 0; m < args.M; ++m) epilogue.write(load(sums + m * BLOCK + i), m);
    } else
      for (int64_t m = 0; m < args.M; ++m)
        for (int64_t j = i; j < count; ++j) args.write(m, n + j, sums[m * BLOCK + j]);
  }
}

inline __attribute__((noinline)) void gemm_transposed_by_team(const GemmArgs<Float32>& args, Arena& arena) {
  if (args.M <= FEW_TRANSPOSED) {
    const int64_t most = TRANSPOSED_SUMS / args.M / WIDTH * WIDTH, team = omp_get_num_threads();
    const int64_t step = std::min(most, round_up((args.N + team - 1) / team, WIDTH));
#pragma omp for schedule(static) nowait
    for (int64_t begin = 0; begin < args.N; begin += step)
      multiply_transposed(args, begin, std::min(begin + step, args.N));
    return;
  }
  const Arena::Frame frame(arena);
  auto* packed = arena.take<float>(PACKED_DEPTH * BLOCK);
  auto* sums = arena.take<float>(args.M * BLOCK);
#pragma omp for schedule(static) nowait
  for (int64_t n = 0; n < args.N; n += BLOCK) multiply_packed_outputs(args, n, packed, sums);
}

}  // namespace
