// The processor's matrix unit (AMX): whether it is there, and how rows are arranged for its tiles.

#pragma once

#include "lanes.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__AVX512BF16__)
#define MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr long TILE = 16;  // rows and columns of a tile, of 64 bytes each

#ifdef MATRIX_UNIT

bool permit_tiles() {
  static const bool is_permitted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, tile data
  return is_permitted;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

const TileShapes shapes;  // not local: the compiler does not see that the instruction reads all of it

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

// 16 rows of x, of which `count` are there, as tiles: word r of row m of every 64 bytes of K is at [r][m].
inline void arrange(const uint32_t* x, long count, long words, uint32_t* tiles) {
  for (long step = 0; step < words / TILE; ++step) {
    __m512i rows[TILE];
    for (long m = 0; m < TILE; ++m)
      rows[m] = m < count ? _mm512_loadu_si512(x + m * words + step * TILE) : _mm512_setzero_si512();
    transpose(rows);
    for (long r = 0; r < TILE; ++r) _mm512_storeu_si512(tiles + (step * TILE + r) * TILE, rows[r]);
  }
}

#else

bool permit_tiles() { return false; }

void arrange(const uint32_t*, long, long, uint32_t*) {}

#endif

}  // namespace
