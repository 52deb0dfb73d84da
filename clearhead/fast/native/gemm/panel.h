// Packed panels of weights in 8 bits, where the processor has no blocks for them (block.h): of PANEL outputs, in the
// order in which they are read. The sums of a few rows and of all outputs of a panel stay in registers.
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "../team.h"
#include "epilogue.h"

#ifdef HAS_PANELS

namespace {

// Pack the weights of PANEL outputs; those of the next panel are fetched.
template <typename Traits>
void pack_panel(const typename Traits::W* w, int64_t K, uint32_t* packed) {
  constexpr int64_t WORDS = WIDTH * Traits::PACKED_WORDS;  // of an output, from as many bytes as a vector has
  for (int64_t side = 0; side < PANEL; side += WIDTH)
    for (int64_t k = 0; k < K; k += 4 * WIDTH) {
      Words rows[WIDTH];
      for (int64_t i = 0; i < WIDTH; ++i) {
        const auto* row = w + (side + i) * K + k;
        __builtin_prefetch(row + PANEL * K);
        std::memcpy(&rows[i], row, sizeof rows[i]);
      }
      transpose(rows);
      uint32_t* to = packed + k / (4 * WIDTH) * WORDS * PANEL + side;
      for (int64_t r = 0; r < WIDTH; ++r) Traits::pack((Vec<int32_t>)rows[r], to + r * Traits::PACKED_WORDS * PANEL, PANEL);
    }
}

// The sums of ROWS rows of x.
template <typename Traits, int ROWS>
__attribute__((noinline)) void multiply_panel_rows(
    const typename Traits::X* x, int64_t K, const uint32_t* packed, SumsOf<Traits>* found) {
  SumsOf<Traits> sums[ROWS][2] = {};
  constexpr int64_t NUMBERS = 4 / sizeof *x;  // of a word
  constexpr int TOGETHER = 2;  // rows that are reached from one address
  const typename Traits::X* rows[(ROWS + TOGETHER - 1) / TOGETHER];
  for (int i = 0; i < ROWS; i += TOGETHER) rows[i / TOGETHER] = x + i * K;
  int64_t stride = K;
  for (int64_t k = 0; k < K; k += NUMBERS, packed += PANEL) {
    asm("" : "+r"(stride));  // the compiler takes it for changed: addresses of all rows would not fit into registers
    Vec<int32_t> left, right;
    std::memcpy(&left, packed, sizeof left);
    std::memcpy(&right, packed + WIDTH, sizeof right);
    for (int i = 0; i < ROWS; ++i) {
      int32_t word;
      std::memcpy(&word, rows[i / TOGETHER] + i % TOGETHER * stride + k, 4);
      const Vec<int32_t> words = Vec<int32_t>{} + word;
      Traits::add(sums[i][0], words, left);
      Traits::add(sums[i][1], words, right);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int side = 0; side < 2; ++side) found[2 * i + side] = sums[i][side];
}

// Those of `count` rows, at most MOST.
template <typename Traits, int MOST, typename... Rest>
void multiply_some_panel_rows(int64_t count, Rest... rest) {
  if constexpr (MOST > 1)
    if (count < MOST) return multiply_some_panel_rows<Traits, MOST - 1>(count, rest...);
  multiply_panel_rows<Traits, MOST>(rest...);
}

// Multiply all outputs that fill panels; return how many they are.
template <typename Traits>
int64_t multiply_panels_by_team(const GemmArgs<Traits>& args, Arena& arena) {
  constexpr int ROWS = Traits::PANEL_ROWS;
  const Arena::Frame frame(arena);
  auto* packed = arena.take<uint32_t>(PANEL * args.K * int64_t(sizeof(typename Traits::X)) / 4);
#pragma omp for schedule(static) nowait
  for (int64_t panel = 0; panel < args.N / PANEL; ++panel) {
    const int64_t n = panel * PANEL;
    pack_panel<Traits>(args.w + n * args.K, args.K, packed);
    const Epilogue<Traits> left(args, n), right(args, n + WIDTH);
    for (int64_t m = 0; m < args.M; m += ROWS) {
      const int64_t count = std::min<int64_t>(ROWS, args.M - m);
      alignas(64) SumsOf<Traits> sums[2 * ROWS];
      multiply_some_panel_rows<Traits, ROWS>(count, args.x + m * args.K, args.K, packed, &sums[0]);
      for (int64_t i = 0; i < count; ++i) left.write(sums[2 * i], m + i), right.write(sums[2 * i + 1], m + i);
    }
  }
  return args.N / PANEL * PANEL;
}

}  // namespace

#endif
