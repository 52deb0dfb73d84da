// Few rows by vector instructions: weights stay as the model has them, [N, K] row by row, so that they can lie in a
// mapped file, and are read once for all rows: those of a few outputs while they are in the caches. Threads share them.
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "../team.h"
#include "epilogue.h"

namespace {

constexpr int OUTPUTS = 4;  // that are written together
constexpr int64_t FOLLOWING = 1 << 12, FETCHED = 1 << 14;  // bytes of weights, ahead of those that are multiplied

// The sums of a row of w with one or two rows of x. The weights are read in the order in which they lie, and those that
// follow are fetched.
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

// The sums of some rows of w with some rows of x, a register block; the rows of w that follow are fetched.
template <typename Traits, int SOME_OUTPUTS, int SOME_ROWS>
inline __attribute__((always_inline)) void register_block(
    const typename Traits::W* w, const typename Traits::X* x, int64_t K, bool is_first,
    SumsOf<Traits> (*sums)[SOME_OUTPUTS]) {
  const int64_t ahead = std::max<int64_t>(1, FETCHED / (SOME_OUTPUTS * K * int64_t(sizeof *w))) * SOME_OUTPUTS;
  for (int j = 0; j < SOME_ROWS; ++j)
    for (int i = 0; i < SOME_OUTPUTS; ++i) sums[j][i] = SumsOf<Traits>{};
  for (int64_t k = 0; k + Traits::STEP <= K; k += Traits::STEP) {
    decltype(Traits::load_x(x)) loaded[SOME_ROWS];
    for (int j = 0; j < SOME_ROWS; ++j) loaded[j] = Traits::load_x(x + j * K + k);
    for (int i = 0; i < SOME_OUTPUTS; ++i) {
      if (is_first) __builtin_prefetch(w + (i + ahead) * K + k);
      const auto weights = Traits::load_w(w + i * K + k);
      for (int j = 0; j < SOME_ROWS; ++j) Traits::add(sums[j][i], loaded[j], weights);
    }
  }
}

// The same for processors with few registers, of which each row's address would take one.
template <typename Traits, int SOME_OUTPUTS, int SOME_ROWS, bool IS_FIRST>
inline __attribute__((always_inline)) void narrow_register_block(
    const typename Traits::W* w, const typename Traits::X* x, int64_t K, SumsOf<Traits> (*sums)[SOME_OUTPUTS]) {
  const int64_t ahead = std::max<int64_t>(1, FETCHED / (SOME_OUTPUTS * K * int64_t(sizeof *w))) * SOME_OUTPUTS;
  const auto* following = w + ahead * K;
  int64_t stride = K, triple = 3 * K;
  for (int j = 0; j < SOME_ROWS; ++j)
    for (int i = 0; i < SOME_OUTPUTS; ++i) sums[j][i] = SumsOf<Traits>{};
  for (int64_t k = K / Traits::STEP; k > 0; --k) {
    asm("" : "+r"(stride), "+r"(triple));  // the compiler takes them for changed
    const auto place = [&](int row) { return row == 3 ? triple : row * stride; };
    decltype(Traits::load_x(x)) loaded[SOME_ROWS];
    for (int j = 0; j < SOME_ROWS; ++j) loaded[j] = Traits::load_x(x + place(j));
    for (int i = 0; i < SOME_OUTPUTS; ++i) {
      if (IS_FIRST) __builtin_prefetch(following + place(i));
      const auto weights = Traits::load_w(w + place(i));
      for (int j = 0; j < SOME_ROWS; ++j) Traits::add(sums[j][i], loaded[j], weights);
    }
    w += Traits::STEP, x += Traits::STEP, following += Traits::STEP;
  }
}

template <typename Traits, int SOME_OUTPUTS, int SOME_ROWS>
void multiply_few(const GemmArgs<Traits>& args, int64_t n, int64_t m) {
  alignas(64) SumsOf<Traits> sums[SOME_ROWS][SOME_OUTPUTS];
  const int64_t K = args.K;
  const auto* w = args.w + n * K;
  const auto* x = args.x + m * K;
  if constexpr (WIDTH == 8 && (SOME_ROWS > 2 || SOME_ROWS == Traits::ROWS)) {
    if (m == 0) narrow_register_block<Traits, SOME_OUTPUTS, SOME_ROWS, true>(w, x, K, sums);
    else narrow_register_block<Traits, SOME_OUTPUTS, SOME_ROWS, false>(w, x, K, sums);
  } else if constexpr (SOME_ROWS > 2)
    register_block<Traits, SOME_OUTPUTS, SOME_ROWS>(w, x, K, m == 0, sums);
  else
    for (int i = 0; i < SOME_OUTPUTS; ++i) gemv<Traits, SOME_ROWS>(w + i * K, x, K, &sums[0][i], SOME_OUTPUTS);
  for (int j = 0; j < SOME_ROWS; ++j) {
    typename Traits::Sum found[SOME_OUTPUTS];
    reduce_add_all<SOME_OUTPUTS>(sums[j], found);
    for (int i = 0; i < SOME_OUTPUTS; ++i) {
      for (int64_t k = K / Traits::STEP * Traits::STEP; k < K; ++k)
        Traits::add_one(found[i], x[j * K + k], w[i * K + k]);
      args.write(m + j, n + i, found[i]);
    }
  }
}

template <typename Traits, int SOME_OUTPUTS>
void multiply_rows(const GemmArgs<Traits>& args, int64_t n) {
  constexpr int ROWS = Traits::ROWS;
  int64_t m = 0;
  for (; m + ROWS <= args.M; m += ROWS) multiply_few<Traits, SOME_OUTPUTS, ROWS>(args, n, m);
  if (m == args.M) return;
  if (m + 1 == args.M) return multiply_few<Traits, SOME_OUTPUTS, 1>(args, n, m);
  if constexpr (ROWS > 2) {
    if (m + 2 == args.M) return multiply_few<Traits, SOME_OUTPUTS, 2>(args, n, m);
    if constexpr (ROWS > 3) multiply_few<Traits, SOME_OUTPUTS, 3>(args, n, m);
  }
}

template <typename Traits>
void gemv_by_team(const GemmArgs<Traits>& args, int64_t begin) {
  const int64_t groups = (args.N - begin + OUTPUTS - 1) / OUTPUTS;
#pragma omp for schedule(static) nowait
  for (int64_t group = 0; group < groups; ++group) {
    int64_t n = begin + group * OUTPUTS;
    if (n + OUTPUTS <= args.N) multiply_rows<Traits, OUTPUTS>(args, n);
    else
      for (; n < args.N; ++n) multiply_rows<Traits, 1>(args, n);
  }
}

}  // namespace
