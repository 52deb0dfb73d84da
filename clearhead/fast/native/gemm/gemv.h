// Few rows by vector instructions. Weights stay as stored by the model, [N, K] row by row, so they can lie in a mapped
// file. They are read once for all rows, a few outputs at a time, while in the caches. Threads share the outputs.
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "../team.h"
#include "epilogue.h"
#include "following.h"

namespace {

constexpr int OUTPUTS = 4;  // outputs that are written together
constexpr int LEAST_WIDENED = 4;  // rows of a pass that widens weights once; it pays with more rows than this
constexpr int64_t FOLLOWING = 1 << 12, FETCHED = 1 << 14;  // prefetch distance, in bytes of weights

// Bytes of weights that a step of a register block reads.
template <typename Traits, int SOME_OUTPUTS>
constexpr int64_t STEP_BYTES = SOME_OUTPUTS * Traits::STEP * int64_t(sizeof(typename Traits::W));

// Whether ROWS rows fit into a register block.
template <typename Traits>
constexpr bool is_register_block(int64_t rows) {
  return rows > 2 || (WIDTH == 8 && rows == Traits::ROWS);
}

// Compute the sums of a row of w with one or two rows of x. The weights are read in memory order, and the following
// ones are prefetched.
template <typename Traits, int COUNT>
inline __attribute__((always_inline)) void gemv(
    const typename Traits::W* w, const typename Traits::X* x, int64_t K, SumsOf<Traits>* sums, int64_t stride) {
  constexpr int PARTS = Traits::PARTS;
  alignas(64) SumsOf<Traits> parts[COUNT][PARTS] = {};
  const auto add = [&](int64_t k, int part) {
    const auto weights = Traits::load_w(w + k);
    for (int j = 0; j < COUNT; ++j) Traits::add(parts[j][part], Traits::load_x(x + j * K + k), weights);
  };
  int64_t k = 0;
  for (; k + PARTS * Traits::STEP <= K; k += PARTS * Traits::STEP)
    for (int part = 0; part < PARTS; ++part) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + k + part * Traits::STEP) + FOLLOWING);
      add(k + part * Traits::STEP, part);
    }
  for (; k + Traits::STEP <= K; k += Traits::STEP) add(k, 0);
  for (int j = 0; j < COUNT; ++j)
    if constexpr (PARTS == 1) sums[j * stride] = parts[j][0];
    else sums[j * stride] = (parts[j][0] + parts[j][1]) + (parts[j][2] + parts[j][3]);
}

// Compute the sums of some rows of w with some rows of x in a register block; prefetch the next rows of w side by side.
template <typename Traits, int SOME_OUTPUTS, int SOME_ROWS>
inline __attribute__((always_inline)) void register_block(
    const typename Traits::W* w, const typename Traits::X* x, int64_t K, Following following,
    SumsOf<Traits> (*sums)[SOME_OUTPUTS]) {
  for (int j = 0; j < SOME_ROWS; ++j)
    for (int i = 0; i < SOME_OUTPUTS; ++i) sums[j][i] = SumsOf<Traits>{};
  for (int64_t k = 0; k + Traits::STEP <= K; k += Traits::STEP, following.advance()) {
    decltype(Traits::load_x(x)) loaded[SOME_ROWS];
    for (int j = 0; j < SOME_ROWS; ++j) loaded[j] = Traits::load_x(x + j * K + k);
    for (int i = 0; i < SOME_OUTPUTS; ++i) {
      following.fetch(i * K * int64_t(sizeof *w));
      const auto weights = Traits::load_w(w + i * K + k);
      for (int j = 0; j < SOME_ROWS; ++j) Traits::add(sums[j][i], loaded[j], weights);
    }
  }
}

// The same for processors with few registers, since each row's address would need one. Weights are prefetched line by
// line. Float32 products wait for memory, which is faster with rows side by side: the first rows of x prefetch them.
template <typename Traits, int SOME_OUTPUTS, int SOME_ROWS, bool FETCHES_ROWS>
inline __attribute__((always_inline)) void narrow_register_block(
    const typename Traits::W* w, const typename Traits::X* x, int64_t K, Following following,
    SumsOf<Traits> (*sums)[SOME_OUTPUTS]) {
  const auto* next = reinterpret_cast<const typename Traits::W*>(following.place);
  int64_t stride = K, triple = 3 * K;
  for (int j = 0; j < SOME_ROWS; ++j)
    for (int i = 0; i < SOME_OUTPUTS; ++i) sums[j][i] = SumsOf<Traits>{};
  for (int64_t k = K / Traits::STEP; k > 0; --k) {
    asm("" : "+r"(stride), "+r"(triple));  // make the compiler believe that these change
    const auto place = [&](int row) { return row == 3 ? triple : row * stride; };
    for (int64_t bytes = 0; sizeof *w < 4 && bytes < STEP_BYTES<Traits, SOME_OUTPUTS>; bytes += LINE)
      following.fetch(), following.advance();
    decltype(Traits::load_x(x)) loaded[SOME_ROWS];
    for (int j = 0; j < SOME_ROWS; ++j) loaded[j] = Traits::load_x(x + place(j));
    for (int i = 0; i < SOME_OUTPUTS; ++i) {
      if (FETCHES_ROWS) __builtin_prefetch(next + place(i));
      const auto weights = Traits::load_w(w + place(i));
      for (int j = 0; j < SOME_ROWS; ++j) Traits::add(sums[j][i], loaded[j], weights);
    }
    w += Traits::STEP, x += Traits::STEP, next += Traits::STEP;
  }
}

// Compute the sums of a row of w with a row of x for each I; widened weights are widened once for all of them.
template <typename Traits, int... I>
inline __attribute__((always_inline)) void widening_block(
    std::integer_sequence<int, I...>, const typename Traits::W* w, const typename Traits::X* x, int64_t K,
    Following following, SumsOf<Traits>* sums, int64_t stride) {
  const int64_t whole = K / Traits::STEP * Traits::STEP;
  SumsOf<Traits> found[sizeof...(I)] = {};
  const typename Traits::X* ends[] = {(x + I * K + whole)...};
  w += whole;
  for (int64_t k = -whole; k != 0; k += Traits::STEP, following.advance()) {
    (keep(ends[I]), ...);
    following.fetch();
    const auto weights = Traits::load_w(w + k);
    (Traits::add(found[I], Traits::load_x(ends[I] + k), weights), ...);
  }
  ((sums[I * stride] = found[I]), ...);
}

template <typename Traits, int SOME_OUTPUTS, int SOME_ROWS, bool WIDENS = false>
void multiply_few(const GemmArgs<Traits>& args, int64_t n, int64_t m, Following following) {
  alignas(64) SumsOf<Traits> sums[SOME_ROWS][SOME_OUTPUTS];
  const int64_t K = args.K;
  const auto* w = args.w + n * K;
  const auto* x = args.x + m * K;
  if constexpr (WIDENS) {
    for (int i = 0; i < SOME_OUTPUTS; ++i, following.place += K / Traits::STEP * following.stride)
      widening_block<Traits>(
          std::make_integer_sequence<int, SOME_ROWS>{}, w + i * K, x, K, following, &sums[0][i], SOME_OUTPUTS);
  } else if constexpr (is_register_block<Traits>(SOME_ROWS)) {
    if constexpr (WIDTH > 8) register_block<Traits, SOME_OUTPUTS, SOME_ROWS>(w, x, K, following, sums);
    else if (sizeof *w == 4 && m == 0)
      narrow_register_block<Traits, SOME_OUTPUTS, SOME_ROWS, true>(w, x, K, following, sums);
    else narrow_register_block<Traits, SOME_OUTPUTS, SOME_ROWS, false>(w, x, K, following, sums);
  } else
    for (int i = 0; i < SOME_OUTPUTS; ++i) gemv<Traits, SOME_ROWS>(w + i * K, x, K, &sums[0][i], SOME_OUTPUTS);
  for (int j = 0; j < SOME_ROWS; ++j) {
    typename Traits::Sum found[SOME_OUTPUTS];
    reduce_add_all<SOME_OUTPUTS>(sums[j], found);
    for (int i = 0; i < SOME_OUTPUTS; ++i)
      for (int64_t k = K / Traits::STEP * Traits::STEP; k < K; ++k)
        Traits::add_one(found[i], x[j * K + k], w[i * K + k]);
    if constexpr (SOME_OUTPUTS == OUTPUTS) args.write_four(m + j, n, found);
    else args.write(m + j, n, found[0]);
  }
}

// Compute the sums for `count` rows, from LEAST_WIDENED to MOST.
template <typename Traits, int SOME_OUTPUTS, int MOST, typename... Rest>
void multiply_some_widened(int64_t count, const Rest&... rest) {
  if constexpr (MOST > LEAST_WIDENED)
    if (count < MOST) return multiply_some_widened<Traits, SOME_OUTPUTS, MOST - 1>(count, rest...);
  multiply_few<Traits, SOME_OUTPUTS, MOST, true>(rest...);
}

// Compute all rows in passes of almost equal size.
template <typename Traits, int SOME_OUTPUTS>
void multiply_widened_rows(const GemmArgs<Traits>& args, int64_t n, const char* next) {
  const int64_t steps = args.K / Traits::STEP * SOME_OUTPUTS;
  int64_t passes = (args.M + Traits::WIDENED_ROWS - 1) / Traits::WIDENED_ROWS;
  Following following(next, SOME_OUTPUTS * args.K * int64_t(sizeof *args.w), steps * passes);
  for (int64_t m = 0, count; m < args.M; m += count, --passes, following.place += steps * following.stride) {
    count = (args.M - m + passes - 1) / passes;
    multiply_some_widened<Traits, SOME_OUTPUTS, Traits::WIDENED_ROWS>(count, args, n, m, following);
  }
}

// Compute all rows; `stored` is the address of the weights of output n in the model. Those after them are prefetched.
template <typename Traits, int SOME_OUTPUTS>
void multiply_rows(const GemmArgs<Traits>& args, int64_t n, const void* stored) {
  constexpr int ROWS = Traits::ROWS;
  // Wide registers: prefetch one row for each output, side by side. Narrow registers: line by line.
  constexpr int64_t LINES = WIDTH > 8 ? 1 : round_up(STEP_BYTES<Traits, SOME_OUTPUTS>, LINE) / LINE;
  const int64_t row = args.K * int64_t(sizeof *args.w), group = SOME_OUTPUTS * row, steps = args.K / Traits::STEP * LINES;
  const int64_t passes = args.M / ROWS + is_register_block<Traits>(args.M % ROWS);
  const char* next = static_cast<const char*>(stored) + std::max<int64_t>(1, FETCHED / group) * group;
  if constexpr (Traits::WIDENED_ROWS > 0)
    if (args.M > LEAST_WIDENED) return multiply_widened_rows<Traits, SOME_OUTPUTS>(args, n, next);
  Following following(next, WIDTH > 8 ? row : group, steps * passes);
  int64_t m = 0;
  for (; m + ROWS <= args.M; m += ROWS, following.place += following.stride * steps)
    multiply_few<Traits, SOME_OUTPUTS, ROWS>(args, n, m, following);
  if (m == args.M) return;
  if (m + 1 == args.M) return multiply_few<Traits, SOME_OUTPUTS, 1>(args, n, m, following);
  if constexpr (ROWS > 2) {
    if (m + 2 == args.M) return multiply_few<Traits, SOME_OUTPUTS, 2>(args, n, m, following);
    if constexpr (ROWS > 3) multiply_few<Traits, SOME_OUTPUTS, 3>(args, n, m, following);
  }
}

// Multiply all rows with up to OUTPUTS outputs from n on; `stored` is the address of their weights in the model.
template <typename Traits, typename W>
void multiply_group(const GemmArgs<Traits>& args, int64_t n, int64_t count, const W* stored) {
  if (count == OUTPUTS) return multiply_rows<Traits, OUTPUTS>(args, n, stored);
  for (int64_t i = 0; i < count; ++i) multiply_rows<Traits, 1>(args, n + i, stored + i * args.K);
}

template <typename Traits>
void gemv_by_team(const GemmArgs<Traits>& args, int64_t begin, Arena& arena) {
  constexpr bool IS_FLOAT16 = std::is_same_v<Traits, MixedFloat16>;
  const Arena::Frame frame(arena);
  const bool is_rounded_once = IS_FLOAT16 && args.M > Traits::ROWS;
  auto* rounded = arena.take<uint16_t>(is_rounded_once ? OUTPUTS * args.K : 0);
  const int64_t groups = (args.N - begin + OUTPUTS - 1) / OUTPUTS;
#pragma omp for schedule(static) nowait
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t n = begin + group * OUTPUTS, count = std::min<int64_t>(OUTPUTS, args.N - n);
    if constexpr (IS_FLOAT16)
      if (is_rounded_once) {
        multiply_group(round_weights(args, n, count, rounded), 0, count, args.w + n * args.K);
        continue;
      }
    multiply_group(args, n, count, args.w + n * args.K);
  }
}

}  // namespace
