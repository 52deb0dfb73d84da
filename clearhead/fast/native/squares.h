// Squares of 32 x 32 sums, which are products of 32 rows and 32 columns of bfloat16 or of 8 bits: on the processor's
// matrix unit (AMX) where it has one, else in the registers of AVX-512.
//
// The rows lie apart as they do in memory, or are tiles: 16 rows of 64 bytes. The columns are tiles of 16 columns of 64
// bytes: word r of column n, which is two or four numbers, is at [r][n]. A tile has 256 words; tiles of the same rows, or
// of the same columns, lie one after another.

#pragma once

#include "kinds.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define SQUARES 1
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

constexpr long TILE = 16;  // rows and columns of a tile, of 64 bytes each
constexpr long SIDE = 2 * TILE;
constexpr long WORDS = TILE * TILE;

// How the processor multiplies squares.
enum class Means : int64_t { NONE, VECTORS, TILES };

inline Means find_means() {
#ifdef MATRIX_UNIT
  if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) return Means::TILES;  // ARCH_REQ_XCOMP_PERM, tile data
#endif
#ifdef SQUARES
  return Means::VECTORS;
#else
  return Means::NONE;
#endif
}

const Means MEANS = find_means();

inline bool has_tiles() { return MEANS == Means::TILES; }
inline bool has_squares() { return MEANS != Means::NONE; }

#ifdef SQUARES

#ifdef MATRIX_UNIT
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

const TileShapes shapes;  // not local: the compiler does not see that the instruction reads all of it
#endif

struct TileUse {  // of a thread
#ifdef MATRIX_UNIT
  TileUse() {
    if (has_tiles()) _tile_loadconfig(&shapes);
  }
  ~TileUse() {
    if (has_tiles()) _tile_release();
  }
#else
  TileUse() {}
#endif
};

// Exchange rows and columns of 16 x 16 words.
inline __attribute__((always_inline)) void transpose(__m512i rows[16]) {
  __m512i other[16];
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      other[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0x88);
      other[i + j + 4] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
  }
}

// 16 rows of x, of which `count` are there, as tiles of columns; `flips` are the bits to be changed. Those that lie AHEAD
// rows behind them are fetched.
template <long AHEAD = 0>
inline void arrange(const uint32_t* x, long count, long words, uint32_t* tiles, uint32_t flips = 0) {
  for (long step = 0; step < words / TILE; ++step) {
    __m512i rows[TILE];
    for (long m = 0; m < TILE; ++m) {
      const uint32_t* row = x + m * words + step * TILE;
      if (AHEAD) _mm_prefetch(reinterpret_cast<const char*>(row + AHEAD * words), _MM_HINT_T1);
      rows[m] = m < count ? _mm512_loadu_si512(row) : _mm512_setzero_si512();
    }
    transpose(rows);
    for (long r = 0; r < TILE; ++r)
      _mm512_storeu_si512(tiles + (step * TILE + r) * TILE, _mm512_xor_si512(rows[r], _mm512_set1_epi32(int32_t(flips))));
  }
}

// The rows: how far apart they lie, 16 of them, and the next 64 bytes of each, in bytes.
struct Left {
  const uint8_t* data;
  long row, group, step;
};

// Which operand is read once and shall not drive the other one out of the first cache.
enum class Passing { NONE, LEFT, RIGHT };

#ifdef MATRIX_UNIT

// The number of a tile is part of the instruction, so these cannot be functions.
#define LOAD_TILE(is_passing, tile, from, stride)              \
  if constexpr (is_passing) _tile_stream_loadd(tile, from, stride); \
  else _tile_loadd(tile, from, stride)
#define ADD_TILES(sums, left, right)                                                 \
  if constexpr (std::is_same_v<typename Kind::Sum, float>) _tile_dpbf16ps(sums, left, right); \
  else _tile_dpbssd(sums, left, right)

template <typename Kind, Passing passing, typename Beside>
inline __attribute__((always_inline)) void multiply_on_unit(
    const Left& a, long rows, const uint32_t* b, long b_steps, long steps, typename Kind::Sum* c, long c_stride, bool adds,
    const Beside& beside) {
  constexpr bool left = passing == Passing::LEFT, right = passing == Passing::RIGHT;
  const bool is_pair = rows > TILE;
  if (adds) {
    _tile_loadd(0, c, c_stride * 4);
    _tile_loadd(1, c + TILE, c_stride * 4);
    if (is_pair) {
      _tile_loadd(2, c + TILE * c_stride, c_stride * 4);
      _tile_loadd(3, c + TILE * c_stride + TILE, c_stride * 4);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long step = 0; step < steps; ++step) {
    LOAD_TILE(left, 4, a.data + step * a.step, a.row);
    LOAD_TILE(right, 6, b + step * WORDS, 64);
    ADD_TILES(0, 4, 6);
    LOAD_TILE(right, 7, b + (b_steps + step) * WORDS, 64);
    ADD_TILES(1, 4, 7);
    if (is_pair) {
      LOAD_TILE(left, 5, a.data + a.group + step * a.step, a.row);
      ADD_TILES(2, 5, 6);
      ADD_TILES(3, 5, 7);
    }
    beside(step);
  }
  _tile_stored(0, c, c_stride * 4);
  _tile_stored(1, c + TILE, c_stride * 4);
  if (is_pair) {
    _tile_stored(2, c + TILE * c_stride, c_stride * 4);
    _tile_stored(3, c + TILE * c_stride + TILE, c_stride * 4);
  }
}

#endif

constexpr long LINES = 8;  // rows whose sums are in registers together

// The sums of a few rows of a square.
template <typename Kind, int ROWS>
__attribute__((noinline)) void multiply_lines(
    const uint8_t* a, long row, long a_step, const uint32_t* b, long b_steps, long steps, typename Kind::Sum* c,
    long c_stride, bool adds) {
  using Sums = typename Kind::Sums;
  Sums sums[ROWS][2] = {};
  const auto place = [&](int i, int side) { return reinterpret_cast<Sums*>(c + i * c_stride + side * TILE); };
  if (adds)
    for (int i = 0; i < ROWS; ++i)
      for (int side = 0; side < 2; ++side) sums[i][side] = *place(i, side);
  for (long step = 0; step < steps; ++step, a += a_step, b += WORDS)
    for (long r = 0; r < TILE; ++r) {
      const __m512i left = _mm512_load_si512(b + r * TILE), right = _mm512_load_si512(b + b_steps * WORDS + r * TILE);
      for (int i = 0; i < ROWS; ++i) {
        int32_t word;
        std::memcpy(&word, a + i * row + r * 4, 4);
        const __m512i spread = _mm512_set1_epi32(word);
        Kind::add(sums[i][0], spread, left);
        Kind::add(sums[i][1], spread, right);
      }
    }
  for (int i = 0; i < ROWS; ++i)
    for (int side = 0; side < 2; ++side) *place(i, side) = sums[i][side];
}

template <typename Kind, typename... Rest>
void multiply_some_lines(long count, const uint8_t* a, Rest... rest) {
  switch (count) {
    case 1: return multiply_lines<Kind, 1>(a, rest...);
    case 2: return multiply_lines<Kind, 2>(a, rest...);
    case 3: return multiply_lines<Kind, 3>(a, rest...);
    case 4: return multiply_lines<Kind, 4>(a, rest...);
    case 5: return multiply_lines<Kind, 5>(a, rest...);
    case 6: return multiply_lines<Kind, 6>(a, rest...);
    case 7: return multiply_lines<Kind, 7>(a, rest...);
    default: return multiply_lines<Kind, LINES>(a, rest...);
  }
}

// c [rows, 32] = a b, or c + a b, for up to 32 rows; `b_steps` tiles lie between the two groups of columns of b. Tiles
// read rows up to the next multiple of 16, and write them. `beside(step)` is what the processor does meanwhile.
template <typename Kind, Passing passing, typename Beside>
inline __attribute__((always_inline)) void multiply_beside(
    const Left& a, long rows, const uint32_t* b, long b_steps, long steps, typename Kind::Sum* c, long c_stride, bool adds,
    const Beside& beside) {
#ifdef MATRIX_UNIT
  if (has_tiles()) return multiply_on_unit<Kind, passing>(a, rows, b, b_steps, steps, c, c_stride, adds, beside);
#endif
  const long share = (steps * LINES + rows - 1) / rows;  // between two groups of lines, whose sums fill the registers
  long done = 0;
  for (long m = 0; m < rows; m += LINES) {
    multiply_some_lines<Kind>(
        rows - m, a.data + m / TILE * a.group + m % TILE * a.row, a.row, a.step, b, b_steps, steps, c + m * c_stride,
        c_stride, adds);
    for (const long end = m + LINES < rows ? std::min(steps, done + share) : steps; done < end; ++done) beside(done);
  }
}

template <typename Kind>
inline void multiply_square(
    const Left& a, long rows, const uint32_t* b, long b_steps, long steps, typename Kind::Sum* c, long c_stride,
    bool adds) {
  multiply_beside<Kind, Passing::NONE>(a, rows, b, b_steps, steps, c, c_stride, adds, [](long) {});
}

#else

inline void arrange(const uint32_t*, long, long, uint32_t*) {}

#endif

}  // namespace
