// Packed panels of 8-bit weights, for processors without blocks for them (block.h): PANEL outputs, in the order in
// which they are read. The sums of a few rows and of all outputs of a panel stay in registers.
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "../team.h"
#include "epilogue.h"
#include "following.h"

#ifdef HAS_PANELS

namespace {

// Pack the weights of PANEL outputs.
template <typename Traits>
void pack_panel(const typename Traits::W* w, int64_t K, uint32_t* packed) {
  constexpr int64_t WORDS = WIDTH * Traits::PACKED_WORDS;  // words of an output, from as many bytes as a vector has
  for (int64_t side = 0; side < PANEL; side += WIDTH)
    for (int64_t k = 0; k < K; k += 4 * WIDTH) {
      Words rows[WIDTH];
      for (int64_t i = 0; i < WIDTH; ++i) {
        std::memcpy(&rows[i], w + (side + i) * K + k, sizeof rows[i]);
      }
      transpose(rows);
      uint32_t* to = packed + k / (4 * WIDTH) * WORDS * PANEL + side;
      for (int64_t r = 0; r < WIDTH; ++r) Traits::pack((Vec<int32_t>)rows[r], to + r * Traits::PACKED_WORDS * PANEL, PANEL);
    }
}

// Compute the sums of a row of x for each I; the weights of the next panel are prefetched meanwhile.
template <typename Traits, int... I>
__attribute__((noinline)) void multiply_panel_rows(
    std::integer_sequence<int, I...>, const typename Traits::X* x, int64_t K, const uint32_t* packed,
    Following following, SumsOf<Traits>* found) {
  constexpr int64_t NUMBERS = 4 / sizeof *x;  // numbers of a word
  SumsOf<Traits> sums[sizeof...(I)][2] = {};
  const typename Traits::X* ends[] = {(x + (I + 1) * K)...};
  for (int64_t k = -K; k != 0; k += NUMBERS, packed += PANEL) {
    (keep(ends[I]), ...);
    following.fetch(), following.advance();
    Vec<int32_t> left, right;
    std::memcpy(&left, packed, sizeof left);
    std::memcpy(&right, packed + WIDTH, sizeof right);
    const auto add = [&](const typename Traits::X* end, SumsOf<Traits>(&row)[2]) {
      int32_t word;
      std::memcpy(&word, end + k, 4);
      const Vec<int32_t> words = Vec<int32_t>{} + word;
      Traits::add(row[0], words, left);
      Traits::add(row[1], words, right);
    };
    (add(ends[I], sums[I]), ...);
  }
  (std::memcpy(found + 2 * I, sums[I], sizeof sums[I]), ...);
}

// Compute the sums for `count` rows, at most MOST.
template <typename Traits, int MOST, typename... Rest>
void multiply_some_panel_rows(int64_t count, Rest... rest) {
  if constexpr (MOST > 1)
    if (count < MOST) return multiply_some_panel_rows<Traits, MOST - 1>(count, rest...);
  multiply_panel_rows<Traits>(std::make_integer_sequence<int, MOST>{}, rest...);
}

// Multiply all outputs that fill panels; return their number.
template <typename Traits>
int64_t multiply_panels_by_team(const GemmArgs<Traits>& args, Arena& arena) {
  constexpr int ROWS = Traits::PANEL_ROWS;
  const Arena::Frame frame(arena);
  auto* packed = arena.take<uint32_t>(PANEL * args.K * int64_t(sizeof(typename Traits::X)) / 4);
  const int64_t steps = args.K * int64_t(sizeof *args.x) / 4, passes = (args.M + ROWS - 1) / ROWS;
#pragma omp for schedule(static) nowait
  for (int64_t panel = 0; panel < args.N / PANEL; ++panel) {
    const int64_t n = panel * PANEL;
    pack_panel<Traits>(args.w + n * args.K, args.K, packed);
    const Epilogue<Traits> left(args, n), right(args, n + WIDTH);
    Following following(args.w + (n + PANEL) * args.K, PANEL * args.K, steps * passes);
    const int64_t fetched = following.stride * steps;
    for (int64_t m = 0; m < args.M; m += ROWS) {
      const int64_t count = std::min<int64_t>(ROWS, args.M - m);
      alignas(64) SumsOf<Traits> sums[2 * ROWS];
      multiply_some_panel_rows<Traits, ROWS>(count, args.x + m * args.K, args.K, packed, following, &sums[0]);
      following.place += fetched;
      for (int64_t i = 0; i < count; ++i) left.write(sums[2 * i], m + i), right.write(sums[2 * i + 1], m + i);
    }
  }
  return args.N / PANEL * PANEL;
}

}  // namespace

#endif
