// A matrix unit (AMX) for processors without one: its instructions as plain loops, so that its kernels are tested
// everywhere. Included by an option of the compiler, before the sources.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

namespace emulated {

typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Sums __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

struct Unit {
  bool is_configured = false;
  Words tiles[8][16] = {};

  auto& tile(int number) {
    if (!is_configured) std::abort();  // like the processor
    return tiles[number];
  }
};

inline thread_local Unit unit;

inline void load(int number, const void* base, long stride) {
  for (long row = 0; row < 16; ++row)
    std::memcpy(unit.tile(number) + row, static_cast<const char*>(base) + row * stride, 64);
}

inline void store(int number, void* base, long stride) {
  for (long row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(base) + row * stride, unit.tile(number) + row, 64);
}

template <typename Product>
void multiply(int sums, int left, int right, const Product& product) {
  auto &c = unit.tile(sums), &a = unit.tile(left), &b = unit.tile(right);
  for (long m = 0; m < 16; ++m)
    for (long k = 0; k < 16; ++k) c[m] = product(c[m], Words{} + a[m][k], b[k]);
}

inline void multiply_halves(int sums, int left, int right) {
  const Words high = Words{} + 0xffff0000;
  multiply(sums, left, right, [=](Words c, Words a, Words b) {
    return (Words)((Floats)c + ((Floats)(a << 16) * (Floats)(b << 16) + (Floats)(a & high) * (Floats)(b & high)));
  });
}

inline void multiply_bytes(int sums, int left, int right) {
  multiply(sums, left, right, [](Words c, Words a, Words b) {
    Sums sum = (Sums)c;
    for (int shift = 0; shift < 32; shift += 8) sum += ((Sums)(a << shift) >> 24) * ((Sums)(b << shift) >> 24);
    return (Words)sum;
  });
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(shapes) (void(shapes), emulated::unit.is_configured = true)
#define _tile_release() (emulated::unit.is_configured = false)
#define _tile_loadd(tile, base, stride) emulated::load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::store(tile, base, stride)
#define _tile_zero(number) std::memset(static_cast<void*>(emulated::unit.tile(number)), 0, 1024)
#define _tile_dpbf16ps(sums, left, right) emulated::multiply_halves(sums, left, right)
#define _tile_dpbssd(sums, left, right) emulated::multiply_bytes(sums, left, right)
