// The block of the GEMM in the registers of AVX-512: 8 rows by two vectors of sums, enough to cover the latency of the
// instruction.

#pragma once

namespace {

constexpr int64_t PACKED_ROWS = 8;    // with this many rows or more, packing the weights pays
constexpr bool IS_SIGNED = false;     // one 8-bit operand is unsigned
constexpr int64_t REGISTER_ROWS = 8;  // rows of a register block

struct TileUse {  // empty: there are no tiles
  TileUse() {}
};

// Compute the sums of a few rows of a block.
template <typename Traits, int ROWS>
__attribute__((noinline)) void multiply_register_block(
    const uint8_t* a, int64_t row, int64_t a_step, const uint32_t* b, int64_t b_group, int64_t steps,
    typename Traits::Sum* c, int64_t c_stride, bool adds) {
  using Vector = SumsOf<Traits>;
  using Words = decltype(Traits::load_w(nullptr));
  Vector sums[ROWS][2] = {};
  const auto place = [&](int i, int side) { return reinterpret_cast<Vector*>(c + i * c_stride + side * TILE); };
  if (adds)
    for (int i = 0; i < ROWS; ++i)
      for (int side = 0; side < 2; ++side) sums[i][side] = *place(i, side);
  for (int64_t step = 0; step < steps; ++step, a += a_step, b += TILE_WORDS)
    for (int64_t r = 0; r < TILE; ++r) {
      const Words left = (Words)_mm512_load_si512(b + r * TILE), right = (Words)_mm512_load_si512(b + b_group + r * TILE);
      for (int i = 0; i < ROWS; ++i) {
        int32_t word;
        std::memcpy(&word, a + i * row + r * 4, 4);
        const Words words = (Words)_mm512_set1_epi32(word);
        Traits::add(sums[i][0], words, left);
        Traits::add(sums[i][1], words, right);
      }
    }
  for (int i = 0; i < ROWS; ++i)
    for (int side = 0; side < 2; ++side) *place(i, side) = sums[i][side];
}

template <typename Traits, typename... Rest>
void multiply_some_rows(int64_t count, const uint8_t* a, Rest... rest) {
  switch (count) {
    case 1: return multiply_register_block<Traits, 1>(a, rest...);
    case 2: return multiply_register_block<Traits, 2>(a, rest...);
    case 3: return multiply_register_block<Traits, 3>(a, rest...);
    case 4: return multiply_register_block<Traits, 4>(a, rest...);
    case 5: return multiply_register_block<Traits, 5>(a, rest...);
    case 6: return multiply_register_block<Traits, 6>(a, rest...);
    case 7: return multiply_register_block<Traits, 7>(a, rest...);
    default: return multiply_register_block<Traits, REGISTER_ROWS>(a, rest...);
  }
}

// Interleaved work runs between two register blocks.
template <typename Traits, Streamed, typename Interleaved>
inline __attribute__((always_inline)) void multiply_block(
    const PanelA& a, int64_t rows, const PanelB& b, int64_t steps, const BlockC<typename Traits::Sum>& c,
    const Interleaved& interleaved) {
  const int64_t share = (steps * REGISTER_ROWS + rows - 1) / rows;
  int64_t done = 0;
  for (int64_t m = 0; m < rows; m += REGISTER_ROWS) {
    multiply_some_rows<Traits>(
        rows - m, a.data + m / TILE * a.group + m % TILE * a.row, a.row, a.step, b.tiles, b.group, steps,
        c.data + m * c.stride, c.stride, c.adds);
    const int64_t end = m + REGISTER_ROWS < rows ? std::min(steps, done + share) : steps;
    for (; done < end; ++done) interleaved(done);
  }
}

}  // namespace
