// Few rows on the matrix unit (AMX): the weights, stored as in the model, are the left operand, packed rows the right
// one.

#pragma once

namespace {

// Write the tile of sums [16 outputs, 16 rows] of the outputs from n on and the rows from m on.
template <typename Traits>
void write_tile(const GemmArgs<Traits>& args, const uint32_t* sums, int64_t n, int64_t m) {
  using Vector = SumsOf<Traits>;
  const Epilogue<Traits> epilogue(args, n);
  const int64_t count = std::min(TILE, args.M - m);
  if (count <= 4) {
    for (int64_t j = 0; j < count; ++j)
      epilogue.write((Vector)_mm512_i32gather_epi32((__m512i)(INDEX * 16), sums + j, 4), m + j);
    return;
  }
  __m512i rows[TILE];
  for (int64_t i = 0; i < TILE; ++i) rows[i] = _mm512_loadu_si512(sums + i * TILE);
  transpose(rows);
  for (int64_t j = 0; j < count; ++j) epilogue.write((Vector)rows[j], m + j);
}

// Multiply 32 outputs, the left operand, with one or two groups of 16 packed rows; prefetch the weights at `next`.
template <typename Traits, bool IS_PAIR>
void multiply_tiles(const GemmArgs<Traits>& args, int64_t n, int64_t group, const void* next) {
  const int64_t bytes = args.K * int64_t(sizeof(typename Traits::W)), steps = bytes / LINE;
  const uint8_t* w = reinterpret_cast<const uint8_t*>(args.w) + n * bytes;
  const uint32_t *first = args.packed_x + group * steps * TILE_WORDS, *second = first + steps * TILE_WORDS;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    if (group == 0)  // prefetch the next outputs: the rows of a tile are too far apart for the processor's prediction
      for (int64_t line = 0; line < BLOCK; ++line)
        _mm_prefetch(static_cast<const uint8_t*>(next) + (BLOCK * step + line) * LINE, _MM_HINT_T1);
    _tile_loadd(4, w + step * LINE, bytes);
    _tile_loadd(6, first + step * TILE_WORDS, LINE);
    ADD_TILES(0, 4, 6);
    _tile_loadd(5, w + TILE * bytes + step * LINE, bytes);
    ADD_TILES(2, 5, 6);
    if (IS_PAIR) {
      _tile_loadd(7, second + step * TILE_WORDS, LINE);
      ADD_TILES(1, 4, 7);
      ADD_TILES(3, 5, 7);
    }
  }
  alignas(64) uint32_t sums[4][TILE_WORDS];
  _tile_stored(0, sums[0], LINE);
  _tile_stored(2, sums[2], LINE);
  write_tile(args, sums[0], n, group * TILE);
  write_tile(args, sums[2], n + TILE, group * TILE);
  if (IS_PAIR) {
    _tile_stored(1, sums[1], LINE);
    _tile_stored(3, sums[3], LINE);
    write_tile(args, sums[1], n, (group + 1) * TILE);
    write_tile(args, sums[3], n + TILE, (group + 1) * TILE);
  }
}

template <typename Traits>
void multiply_packed_rows(const GemmArgs<Traits>& args, int64_t n, const void* next) {
  const int64_t groups = (args.M + TILE - 1) / TILE;
  int64_t group = 0;
  for (; group + 2 <= groups; group += 2) multiply_tiles<Traits, true>(args, n, group, next);
  if (group < groups) multiply_tiles<Traits, false>(args, n, group, next);
}

}  // namespace
