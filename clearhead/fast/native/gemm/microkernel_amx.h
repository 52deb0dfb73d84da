// The block of the GEMM on the matrix unit (AMX): four tiles of sums.

#pragma once

namespace {

constexpr int64_t PACKED_ROWS = 64;  // with this many rows or more, packing the weights pays
constexpr bool IS_SIGNED = true;     // signed 8-bit operands on both sides

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

const TileShapes SHAPES;  // not local: the compiler does not see that the instruction reads all of it

struct TileUse {  // per thread
  TileUse() { _tile_loadconfig(&SHAPES); }
  ~TileUse() { _tile_release(); }
};

// The number of a tile is part of the instruction, so these must be macros instead of functions.
#define LOAD_TILE(is_streamed, tile, from, stride)                   \
  if constexpr (is_streamed) _tile_stream_loadd(tile, from, stride); \
  else _tile_loadd(tile, from, stride)
#define ADD_TILES(sums, left, right)                                                            \
  if constexpr (std::is_same_v<typename Traits::Sum, float>) _tile_dpbf16ps(sums, left, right); \
  else _tile_dpbssd(sums, left, right)

// Tiles read rows of a up to the next multiple of 16, and write as many.
template <typename Traits, Streamed streamed, typename Interleaved>
inline __attribute__((always_inline)) void multiply_block(
    const PanelA& a, int64_t rows, const PanelB& b, int64_t steps, const BlockC<typename Traits::Sum>& c,
    const Interleaved& interleaved) {
  constexpr bool is_a = streamed == Streamed::A, is_b = streamed == Streamed::B;
  const bool is_pair = rows > TILE;
  typename Traits::Sum *upper = c.data, *lower = c.data + TILE * c.stride;
  if (c.adds) {
    _tile_loadd(0, upper, c.stride * 4);
    _tile_loadd(1, upper + TILE, c.stride * 4);
    if (is_pair) {
      _tile_loadd(2, lower, c.stride * 4);
      _tile_loadd(3, lower + TILE, c.stride * 4);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step) {
    LOAD_TILE(is_a, 4, a.data + step * a.step, a.row);
    LOAD_TILE(is_b, 6, b.tiles + step * TILE_WORDS, LINE);
    ADD_TILES(0, 4, 6);
    LOAD_TILE(is_b, 7, b.tiles + b.group + step * TILE_WORDS, LINE);
    ADD_TILES(1, 4, 7);
    if (is_pair) {
      LOAD_TILE(is_a, 5, a.data + a.group + step * a.step, a.row);
      ADD_TILES(2, 5, 6);
      ADD_TILES(3, 5, 7);
    }
    interleaved(step);
  }
  _tile_stored(0, upper, c.stride * 4);
  _tile_stored(1, upper + TILE, c.stride * 4);
  if (is_pair) {
    _tile_stored(2, lower, c.stride * 4);
    _tile_stored(3, lower + TILE, c.stride * 4);
  }
}

}  // namespace
