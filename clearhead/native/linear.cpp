// Linear layers for few rows on a CPU: y[m][n] = sum over k of x[m][k] * w[n][k], + bias[n].
//
// The weights stay as the model has them, [N, K] row by row, so that they can lie in a mapped file and are read once
// for all rows. A block of rows of w is multiplied with all rows of x while it is in the caches; threads share the
// blocks. The products are tiles of the processor's matrix unit (AMX) where it has one, even for a single row, and vector
// instructions elsewhere. Legend: M rows of x, N outputs, K inputs.

#include <algorithm>
#include <vector>

#include "lanes.h"

#if defined(__AVX512F__) || defined(__AMX_TILE__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__AVX512BF16__)
#define MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int BLOCK = 4;              // outputs whose sums are in registers together
constexpr int COLUMNS = 4;            // rows of x whose sums are
constexpr long CACHED_ROWS = 512;
constexpr long TILE = 16;             // rows and columns of a tile of the matrix unit, of 64 bytes each

int32_t total(Ints sums) {
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += sums[i];
  return sum;
}

// --- the three kinds of weights: how STEP products are added to a sum, and what becomes of the sum ---

struct Float32 {
  using X = float;
  using W = float;
  using Y = float;
  using Sums = Floats;
  using Sum = float;
  static constexpr long STEP = LANES;
  static Floats load(const float* from) { return load_lanes(from); }
  static void add(Floats& sums, Floats x, Floats w) { sums += x * w; }
  static float product(float x, float w) { return x * w; }
  static float finish(float sum, float) { return sum; }
  static float bias(const float* from, long n) { return from ? from[n] : 0.0f; }
  static float round(float value) { return value; }
};

struct BFloat16 {
  using X = uint16_t;
  using W = uint16_t;
  using Y = uint16_t;
  using Sums = Floats;
  using Sum = float;
#ifdef __AVX512BF16__
  static constexpr long STEP = 2 * LANES;
  static __m512i load(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static void add(Floats& sums, __m512i x, __m512i w) {
    sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
  }
#else
  static constexpr long STEP = LANES;
  static Floats load(const uint16_t* from) { return load_lanes(from); }
  static void add(Floats& sums, Floats x, Floats w) { sums += x * w; }
#endif
  static float product(uint16_t x, uint16_t w) { return to_float(x) * to_float(w); }
  static float finish(float sum, float) { return sum; }
  static float bias(const uint16_t* from, long n) { return from ? to_float(from[n]) : 0.0f; }
  static uint16_t round(float value) { return to_half(value); }
};

// Weights and products in bfloat16, rows and outputs in float32.
struct Mixed : BFloat16 {
  using Y = float;
  static float bias(const float* from, long n) { return from ? from[n] : 0.0f; }
  static float round(float value) { return value; }
};

// Both sides in 8 bits: a row of x has a scale of its own, and so has every output.
struct Int8 {
  using X = int8_t;
  using W = int8_t;
  using Y = float;
  using Sums = Ints;
  using Sum = int32_t;
#ifdef __AVX512VNNI__
  static constexpr long STEP = 4 * LANES;
  static __m512i load(const int8_t* from) { return _mm512_loadu_si512(from); }
  // The instruction wants one side without a sign: |x| * (w with the sign of x) is the same product.
  static void add(Ints& sums, __m512i x, __m512i w) {
    const __mmask64 is_negative = _mm512_movepi8_mask(x);
    const __m512i signed_w = _mm512_mask_sub_epi8(w, is_negative, _mm512_setzero_si512(), w);
    sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_abs_epi8(x), signed_w);
  }
#else
  static constexpr long STEP = LANES;
  static Ints load(const int8_t* from) {
    return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints);
  }
  static void add(Ints& sums, Ints x, Ints w) { sums += x * w; }
#endif
  static int32_t product(int8_t x, int8_t w) { return int32_t(x) * int32_t(w); }
  static float finish(int32_t sum, float scale) { return float(sum) * scale; }
  static float bias(const float* from, long n) { return from ? from[n] : 0.0f; }
  static float round(float value) { return value; }
};

template <typename Kind>
struct Layer {
  long M, N, K;
  const typename Kind::X* x;
  const typename Kind::W* w;
  const typename Kind::Y* bias;
  const float* row_scales;     // of x [M]; null: 1
  const float* output_scales;  // of w [N]; null: 1
  typename Kind::Y* y;

  void write(long m, long n, typename Kind::Sum sum) const {
    const float scale = row_scales ? row_scales[m] * output_scales[n] : 1.0f;
    y[m * N + n] = Kind::round(Kind::finish(sum, scale) + Kind::bias(bias, n));
  }
};

// --- vector instructions ---

template <typename Kind, int OUTPUTS, int ROWS>
void multiply_block(const Layer<Kind>& layer, long n, long m) {
  typename Kind::Sums sums[OUTPUTS][ROWS] = {};
  const auto* w = layer.w + n * layer.K;
  const auto* x = layer.x + m * layer.K;
  const long whole = layer.K / Kind::STEP * Kind::STEP;
  for (long k = 0; k < whole; k += Kind::STEP) {
    decltype(Kind::load(x)) loaded[ROWS];
    for (int j = 0; j < ROWS; ++j) loaded[j] = Kind::load(x + j * layer.K + k);
    for (int i = 0; i < OUTPUTS; ++i) {
      const auto row = Kind::load(w + i * layer.K + k);
      for (int j = 0; j < ROWS; ++j) Kind::add(sums[i][j], loaded[j], row);
    }
  }
  for (int i = 0; i < OUTPUTS; ++i)
    for (int j = 0; j < ROWS; ++j) {
      auto sum = total(sums[i][j]);
      for (long k = whole; k < layer.K; ++k) sum += Kind::product(x[j * layer.K + k], w[i * layer.K + k]);
      layer.write(m + j, n + i, sum);
    }
}

template <typename Kind, int OUTPUTS>
void multiply_rows(const Layer<Kind>& layer, long n) {
  long m = 0;
  for (; m + COLUMNS <= layer.M; m += COLUMNS) multiply_block<Kind, OUTPUTS, COLUMNS>(layer, n, m);
  switch (layer.M - m) {
    case 1: multiply_block<Kind, OUTPUTS, 1>(layer, n, m); break;
    case 2: multiply_block<Kind, OUTPUTS, 2>(layer, n, m); break;
    case 3: multiply_block<Kind, OUTPUTS, 3>(layer, n, m); break;
  }
}

template <typename Kind>
void multiply_outputs(const Layer<Kind>& layer, long begin, long end) {
  long n = begin;
  for (; n + BLOCK <= end; n += BLOCK) multiply_rows<Kind, BLOCK>(layer, n);
  for (; n < end; ++n) multiply_rows<Kind, 1>(layer, n);
}

template <typename Kind>
void multiply(const Layer<Kind>& layer, long begin) {
  const long blocks = (layer.N - begin + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (layer.M * layer.N * layer.K > LEAST_WORK)
  for (long block = 0; block < blocks; ++block) {
    const long n = begin + block * BLOCK;
    multiply_outputs(layer, n, std::min(n + BLOCK, layer.N));
  }
}

// --- the matrix unit: a tile of w [16 outputs, 64 bytes of K] times one of x [64 bytes of K, 16 rows] ---

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

// x as tiles: for every 16 of its rows and every 64 bytes of K, 16 lines of 16 words; word r of row m is at [r][m].
void arrange(const uint32_t* x, long M, long words, uint32_t* tiles) {
  const long steps = words / TILE, groups = (M + TILE - 1) / TILE;
#pragma omp parallel for schedule(static) if (M * words > LEAST_WORK)
  for (long group = 0; group < groups; ++group)
    for (long step = 0; step < steps; ++step) {
      uint32_t* tile = tiles + (group * steps + step) * TILE * TILE;
      for (long column = 0; column < TILE; ++column) {
        const long m = group * TILE + column;
        const uint32_t* from = x + m * words + step * TILE;
        for (long r = 0; r < TILE; ++r) tile[r * TILE + column] = m < M ? from[r] : 0;
      }
    }
}

void add_tiles(BFloat16, int pair) {
  switch (pair) {
    case 0: _tile_dpbf16ps(0, 4, 6); break;
    case 1: _tile_dpbf16ps(1, 4, 7); break;
    case 2: _tile_dpbf16ps(2, 5, 6); break;
    case 3: _tile_dpbf16ps(3, 5, 7); break;
  }
}

void add_tiles(Int8, int pair) {
  switch (pair) {
    case 0: _tile_dpbssd(0, 4, 6); break;
    case 1: _tile_dpbssd(1, 4, 7); break;
    case 2: _tile_dpbssd(2, 5, 6); break;
    case 3: _tile_dpbssd(3, 5, 7); break;
  }
}

// Write the tile of sums [16 outputs, 16 rows] of the outputs from n and the rows from m on.
void write_tile(const Layer<BFloat16>& layer, const void* sums, long n, long m) {
  const Ints places = {0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240};
  const float* from = static_cast<const float*>(sums);
  const Floats bias = layer.bias ? load_lanes(layer.bias + n) : Floats{};
  for (long j = 0; j < std::min(TILE, layer.M - m); ++j) {
    const Floats column = (Floats)_mm512_i32gather_ps((__m512i)places, from + j, 4);
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)(column + bias));
    std::memcpy(layer.y + (m + j) * layer.N + n, &rounded, sizeof rounded);
  }
}

void write_tile(const Layer<Mixed>& layer, const void* sums, long n, long m) {
  const Ints places = {0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240};
  const float* from = static_cast<const float*>(sums);
  const Floats bias = layer.bias ? load_lanes(layer.bias + n) : Floats{};
  for (long j = 0; j < std::min(TILE, layer.M - m); ++j) {
    const Floats value = (Floats)_mm512_i32gather_ps((__m512i)places, from + j, 4) + bias;
    std::memcpy(layer.y + (m + j) * layer.N + n, &value, sizeof value);
  }
}

void write_tile(const Layer<Int8>& layer, const void* sums, long n, long m) {
  const Ints places = {0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240};
  const int32_t* from = static_cast<const int32_t*>(sums);
  const Floats bias = layer.bias ? load_lanes(layer.bias + n) : Floats{};
  const Floats scales = load_lanes(layer.output_scales + n);
  for (long j = 0; j < std::min(TILE, layer.M - m); ++j) {
    const Ints column = (Ints)_mm512_i32gather_epi32((__m512i)places, from + j, 4);
    const Floats value = __builtin_convertvector(column, Floats) * (scales * layer.row_scales[m + j]) + bias;
    std::memcpy(layer.y + (m + j) * layer.N + n, &value, sizeof value);
  }
}

// Multiply 32 outputs with one or two groups of 16 rows.
template <typename Kind, bool IS_PAIR>
void multiply_tiles(const Layer<Kind>& layer, const uint8_t* tiles, long n, long group) {
  const long bytes = layer.K * long(sizeof(typename Kind::W)), steps = bytes / 64;
  const uint8_t* w = reinterpret_cast<const uint8_t*>(layer.w) + n * bytes;
  const uint8_t* first = tiles + group * steps * 1024;
  const uint8_t* second = first + steps * 1024;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long step = 0; step < steps; ++step) {
    _tile_loadd(4, w + step * 64, bytes);
    _tile_loadd(6, first + step * 1024, 64);
    add_tiles(Kind(), 0);
    _tile_loadd(5, w + TILE * bytes + step * 64, bytes);
    add_tiles(Kind(), 2);
    if (IS_PAIR) {
      _tile_loadd(7, second + step * 1024, 64);
      add_tiles(Kind(), 1);
      add_tiles(Kind(), 3);
    }
  }
  alignas(64) uint8_t sums[4][1024];
  _tile_stored(0, sums[0], 64);
  _tile_stored(2, sums[2], 64);
  write_tile(layer, sums[0], n, group * TILE);
  write_tile(layer, sums[2], n + TILE, group * TILE);
  if (IS_PAIR) {
    _tile_stored(1, sums[1], 64);
    _tile_stored(3, sums[3], 64);
    write_tile(layer, sums[1], n, (group + 1) * TILE);
    write_tile(layer, sums[3], n + TILE, (group + 1) * TILE);
  }
}

// Multiply all outputs that fill tiles; return how many they are.
template <typename Kind>
long multiply_on_matrix_unit(const Layer<Kind>& layer) {
  const long bytes = layer.K * long(sizeof(typename Kind::W));
  if (bytes % 64 || layer.N < 2 * TILE || !permit_tiles()) return 0;
  const long groups = (layer.M + TILE - 1) / TILE, blocks = layer.N / (2 * TILE);
  static thread_local std::vector<uint8_t> arranged;
  arranged.resize(groups * TILE * bytes + 64);
  auto* tiles = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(arranged.data()) + 63) / 64 * 64);
  arrange(reinterpret_cast<const uint32_t*>(layer.x), layer.M, bytes / 4, reinterpret_cast<uint32_t*>(tiles));
#pragma omp parallel
  {
    _tile_loadconfig(&shapes);
#pragma omp for schedule(static)
    for (long block = 0; block < blocks; ++block) {
      const long n = block * 2 * TILE;
      long group = 0;
      for (; group + 2 <= groups; group += 2) multiply_tiles<Kind, true>(layer, tiles, n, group);
      if (group < groups) multiply_tiles<Kind, false>(layer, tiles, n, group);
    }
    _tile_release();
  }
  return blocks * 2 * TILE;
}

long multiply_on_matrix_unit(const Layer<Float32>&) { return 0; }

#else

template <typename Kind>
long multiply_on_matrix_unit(const Layer<Kind>&) {
  return 0;
}

#endif

// Multiply so many rows at a time that they stay in the cache while all weights pass by.
template <typename Kind>
void multiply_all(const Layer<Kind>& layer) {
  for (long m = 0; m < layer.M; m += CACHED_ROWS) {
    Layer<Kind> part = layer;
    part.M = std::min(CACHED_ROWS, layer.M - m);
    part.x += m * layer.K;
    part.y += m * layer.N;
    if (layer.row_scales) part.row_scales += m;
    multiply(part, multiply_on_matrix_unit(part));
  }
}

// Round each row of x to 8 bits; its scale is the largest magnitude / 127, and not-a-number where one value is.
void quantize(const float* x, long M, long K, int8_t* rounded, float* scales) {
#pragma omp parallel for schedule(static) if (M * K > LEAST_WORK)
  for (long m = 0; m < M; ++m) {
    const float* row = x + m * K;
    float most = 0, fault = 0;  // fault: 0, or not a number
#pragma omp simd reduction(max : most) reduction(+ : fault)
    for (long k = 0; k < K; ++k) {
      most = std::max(most, std::fabs(row[k]));
      fault += row[k] * 0.0f;
    }
    const float inverse = most > 0 && fault == 0 ? 127.0f / most : 0.0f;
    scales[m] = most / 127.0f + fault;
    for (long k = 0; k < K; ++k) rounded[m * K + k] = int8_t(std::nearbyint(row[k] * inverse));
  }
}

}  // namespace

extern "C" {

void linear_float32(const float* x, const float* w, const float* bias, float* y, long M, long N, long K) {
  multiply_all(Layer<Float32>{M, N, K, x, w, bias, nullptr, nullptr, y});
}

void linear_bfloat16(
    const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, long M, long N, long K) {
  multiply_all(Layer<BFloat16>{M, N, K, x, w, bias, nullptr, nullptr, y});
}

void linear_mixed(
    const float* x, const uint16_t* w, const float* bias, float* y, long M, long N, long K) {
  static thread_local std::vector<uint16_t> rounded;
  rounded.resize(M * K);
  uint16_t* halves = rounded.data();  // not the vector: every thread has one of its own
#pragma omp parallel for schedule(static) if (M * K > LEAST_WORK)
  for (long i = 0; i < M * K; ++i) halves[i] = to_half(x[i]);
  multiply_all(Layer<Mixed>{M, N, K, halves, w, bias, nullptr, nullptr, y});
}

void linear_int8(
    const float* x, const int8_t* w, const float* scales, const float* bias, float* y, long M, long N, long K) {
  static thread_local std::vector<int8_t> rounded;
  static thread_local std::vector<float> row_scales;
  rounded.resize(M * K);
  row_scales.resize(M);
  quantize(x, M, K, rounded.data(), row_scales.data());
  multiply_all(Layer<Int8>{M, N, K, rounded.data(), w, bias, row_scales.data(), scales, y});
}
}
