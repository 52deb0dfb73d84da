// Products of rows on a CPU: y[m][n] = sum over k of x[m][k] * w[n][k], + bias[n].
//
// The weights stay as the model has them, [N, K] row by row, so that they can lie in a mapped file and are read once
// for all rows. A block of rows of w is multiplied with all rows of x while it is in the caches; threads share the
// blocks. Where there are many rows the block is arranged as tiles, and the products are squares. Of few rows they are
// tiles of the processor's matrix unit (AMX) where it has one, even of a single one, and vector instructions elsewhere.
//
// Functions that end in _by_team are called by all threads of a parallel region, which share the work; a barrier ends
// them unless they say otherwise. Legend: M rows of x, N outputs, K inputs.

#pragma once

#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "squares.h"

namespace {

constexpr int BLOCK = 4;    // outputs that are written together
constexpr int COLUMNS = 4;  // rows of x whose sums are in registers together
constexpr int PARTS = 4;    // of a sum
constexpr long CACHED_ROWS = 512;
constexpr long FOLLOWING = 1 << 12, FETCHED = 1 << 14;  // bytes of weights, ahead of those that are multiplied

// From how many rows on it pays to arrange the weights.
inline long many_rows() { return has_tiles() ? 64 : 8; }

template <typename Kind>
struct Layer {
  long M, N, K;
  const typename Kind::X* x;
  const uint32_t* tiles;       // x as `arrange` makes it; null: not on the matrix unit, or with arranged weights
  bool arranges_weights;       // for squares, with x as it is
  const typename Kind::W* w;
  const typename Kind::Y* bias;
  const float* row_scales;     // of x in 8 bits [M]
  const int32_t* row_offsets;  // what sums of vector instructions are too large by in 8 bits [M]
  const float* output_scales;  // of w in 8 bits [N]
  typename Kind::Y* y;
  long turned_stride = 0;      // above 0: fp32 weights [K, N] whose rows lie so many numbers apart
  int32_t activation = NONE;   // of what is written, where whole squares compute it
  const float* factor = nullptr;  // what it is multiplied with after that [M, N]; null: nothing

  bool activates() const { return arranges_weights && N % SIDE == 0; }

  // A sum of vector instructions as what it stands for.
  float scaled(long m, long n, typename Kind::Sum sum) const {
    if constexpr (std::is_same_v<Kind, Int8>) return float(sum - row_offsets[m]) * (row_scales[m] * output_scales[n]);
    else return sum;
  }

  void write(long m, long n, typename Kind::Sum sum) const {
    y[m * N + n] = Kind::round(scaled(m, n, sum) + Kind::bias(bias, n));
  }
};

// --- vector instructions ---

// The sums of a row of w with one or two rows of x. The weights pass by in the order in which they lie, and those that
// follow are fetched.
template <typename Kind, int ROWS>
inline __attribute__((always_inline)) void add_in_order(
    const typename Kind::W* w, const typename Kind::X* x, long K, typename Kind::Sums* sums, long stride) {
  alignas(64) typename Kind::Sums parts[ROWS][PARTS] = {};
  const auto add = [&](long k, int part) {
    const auto weights = Kind::load_weights(w + k);
    for (int j = 0; j < ROWS; ++j) Kind::add(parts[j][part], Kind::load(x + j * K + k), weights);
  };
  long k = 0;
  for (; k + PARTS * Kind::STEP <= K; k += PARTS * Kind::STEP)
    for (int part = 0; part < PARTS; ++part) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + k + part * Kind::STEP) + FOLLOWING);
      add(k + part * Kind::STEP, part);
    }
  for (; k + Kind::STEP <= K; k += Kind::STEP) add(k, 0);
  for (int j = 0; j < ROWS; ++j) sums[j * stride] = (parts[j][0] + parts[j][1]) + (parts[j][2] + parts[j][3]);
}

// The sums of some rows of w with some rows of x, all of which are in registers; the rows of w that follow are fetched.
template <typename Kind, int OUTPUTS, int ROWS>
inline __attribute__((always_inline)) void add_side_by_side(
    const typename Kind::W* w, const typename Kind::X* x, long K, bool is_first, typename Kind::Sums (*sums)[OUTPUTS]) {
  const long ahead = std::max<long>(1, FETCHED / (OUTPUTS * K * long(sizeof *w))) * OUTPUTS;
  for (int j = 0; j < ROWS; ++j)
    for (int i = 0; i < OUTPUTS; ++i) sums[j][i] = typename Kind::Sums{};
  for (long k = 0; k + Kind::STEP <= K; k += Kind::STEP) {
    decltype(Kind::load(x)) loaded[ROWS];
    for (int j = 0; j < ROWS; ++j) loaded[j] = Kind::load(x + j * K + k);
    for (int i = 0; i < OUTPUTS; ++i) {
      if (is_first) __builtin_prefetch(w + (i + ahead) * K + k);
      const auto weights = Kind::load_weights(w + i * K + k);
      for (int j = 0; j < ROWS; ++j) Kind::add(sums[j][i], loaded[j], weights);
    }
  }
}

template <typename Kind, int OUTPUTS, int ROWS>
void multiply_block(const Layer<Kind>& layer, long n, long m) {
  alignas(64) typename Kind::Sums sums[ROWS][OUTPUTS];
  const long K = layer.K;
  const auto* w = layer.w + n * K;
  const auto* x = layer.x + m * K;
  if constexpr (ROWS > 2) add_side_by_side<Kind, OUTPUTS, ROWS>(w, x, K, m == 0, sums);
  else
    for (int i = 0; i < OUTPUTS; ++i) add_in_order<Kind, ROWS>(w + i * K, x, K, &sums[0][i], OUTPUTS);
  for (int j = 0; j < ROWS; ++j) {
    typename Kind::Sum found[OUTPUTS];
    totals<OUTPUTS>(sums[j], found);
    for (int i = 0; i < OUTPUTS; ++i) {
      for (long k = K / Kind::STEP * Kind::STEP; k < K; ++k) found[i] += Kind::product(x[j * K + k], w[i * K + k]);
      layer.write(m + j, n + i, found[i]);
    }
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
void multiply_vectors_by_team(const Layer<Kind>& layer, long begin) {
  const long blocks = (layer.N - begin + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static) nowait
  for (long block = 0; block < blocks; ++block) {
    const long n = begin + block * BLOCK;
    multiply_outputs(layer, n, std::min(n + BLOCK, layer.N));
  }
}

// --- fp32 weights that lie the other way round, [K, N]: their rows, times numbers of x, are added up in the cache ---

constexpr long TURNED_ROWS = 16, TURNED_SUMS = 4096;

// Multiply at most TURNED_ROWS rows with the outputs from begin to end, (end - begin) * M <= TURNED_SUMS.
inline void multiply_turned(const Layer<Float32>& layer, long begin, long end) {
  constexpr int STEP = 8;
  alignas(64) float sums[TURNED_SUMS] = {};
  const long columns = end - begin, whole = columns / LANES * LANES, stride = layer.turned_stride;
  for (long k = 0; k < layer.K; k += STEP) {
    const float* w = layer.w + k * stride + begin;
    const long rows = std::min<long>(STEP, layer.K - k);
    for (long m = 0; m < layer.M; ++m) {
      const float* x = layer.x + m * layer.K + k;
      float* sum = sums + m * columns;
      long n = 0;
      if (rows == STEP)
        for (; n < whole; n += LANES) {
          Floats added = load_lanes(sum + n);
          for (int i = 0; i < STEP; ++i) {
            // The next rows, which the processor does not foresee.
            if (m == 0) __builtin_prefetch(w + (i + STEP) * stride + n);
            added += x[i] * load_lanes(w + i * stride + n);
          }
          store_lanes(sum + n, added);
        }
      for (; n < columns; ++n)
        for (long i = 0; i < rows; ++i) sum[n] += x[i] * w[i * stride + n];
    }
  }
  for (long m = 0; m < layer.M; ++m)
    for (long n = 0; n < columns; ++n) layer.write(m, begin + n, sums[m * columns + n]);
}

inline void multiply_turned_by_team(const Layer<Float32>& layer) {
  const long most = TURNED_SUMS / layer.M / LANES * LANES, team = omp_get_num_threads();
  const long share = ((layer.N + team - 1) / team + LANES - 1) / LANES * LANES, block = std::min(most, share);
#pragma omp for schedule(static) nowait
  for (long begin = 0; begin < layer.N; begin += block)
    multiply_turned(layer, begin, std::min(begin + block, layer.N));
}

// --- squares, and a few rows on the matrix unit ---

// Whether squares multiply rows of so many numbers.
template <typename Kind>
bool has_squares_of(long K) {
  return !std::is_same_v<Kind, Float32> && K * long(sizeof(typename Kind::W)) % 64 == 0 && has_squares();
}

#ifdef SQUARES

// What all sums of 16 outputs from n on have in common.
template <typename Kind>
struct Outputs {
  const Layer<Kind>& layer;
  long n;
  Floats scales, bias;

  Outputs(const Layer<Kind>& of, long first) : layer(of), n(first), scales{}, bias{} {
    if constexpr (std::is_same_v<Kind, Int8>) scales = load_lanes(of.output_scales + n);
    if (of.bias) bias = load_lanes(of.bias + n);
  }

  // Write those of row m.
  void write(typename Kind::Sums sums, long m) const {
    Floats found = scaled(sums, m) + bias;
    if (layer.activation != NONE) {
      found = activate(found, layer.activation);
      if (layer.factor) found *= load_lanes(layer.factor + m * layer.N + n);
    }
    store_lanes(layer.y + m * layer.N + n, found);
  }

 private:
  Floats scaled(typename Kind::Sums sums, long m) const {
    if constexpr (std::is_same_v<Kind, Int8>) {
      const int32_t offset = has_tiles() ? 0 : layer.row_offsets[m];
      return __builtin_convertvector(sums - offset, Floats) * (scales * layer.row_scales[m]);
    } else return sums;
  }
};

#ifdef MATRIX_UNIT

// Write the tile of sums [16 outputs, 16 rows] of the outputs from n and the rows from m on.
template <typename Kind>
void write_tile(const Layer<Kind>& layer, const void* sums, long n, long m) {
  using Sums = typename Kind::Sums;
  const Outputs<Kind> outputs(layer, n);
  const long count = std::min(TILE, layer.M - m);
  if (count <= 4) {
    const Ints places = {0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240};
    for (long j = 0; j < count; ++j) {
      const __m512i lanes = _mm512_i32gather_epi32((__m512i)places, static_cast<const int32_t*>(sums) + j, 4);
      outputs.write((Sums)lanes, m + j);
    }
    return;
  }
  __m512i rows[TILE];
  for (long i = 0; i < TILE; ++i) rows[i] = _mm512_loadu_si512(static_cast<const int32_t*>(sums) + i * TILE);
  transpose(rows);
  for (long j = 0; j < count; ++j) outputs.write((Sums)rows[j], m + j);
}

// Multiply 32 outputs, which are the left side, with one or two groups of 16 rows.
template <typename Kind, bool IS_PAIR>
void multiply_tiles(const Layer<Kind>& layer, long n, long group) {
  const long bytes = layer.K * long(sizeof(typename Kind::W)), steps = bytes / 64;
  const uint8_t* w = reinterpret_cast<const uint8_t*>(layer.w) + n * bytes;
  const uint8_t* first = reinterpret_cast<const uint8_t*>(layer.tiles) + group * steps * 1024;
  const uint8_t* second = first + steps * 1024;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long step = 0; step < steps; ++step) {
    if (group == 0)  // the weights of the next outputs: rows of a tile lie apart, which the processor does not foresee
      for (long line = 0; line < SIDE; ++line) _mm_prefetch(w + SIDE * (bytes + step * 64) + line * 64, _MM_HINT_T1);
    _tile_loadd(4, w + step * 64, bytes);
    _tile_loadd(6, first + step * 1024, 64);
    ADD_TILES(0, 4, 6);
    _tile_loadd(5, w + TILE * bytes + step * 64, bytes);
    ADD_TILES(2, 5, 6);
    if (IS_PAIR) {
      _tile_loadd(7, second + step * 1024, 64);
      ADD_TILES(1, 4, 7);
      ADD_TILES(3, 5, 7);
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

template <typename Kind>
void multiply_groups(const Layer<Kind>& layer, long n) {
  const long groups = (layer.M + TILE - 1) / TILE;
  long group = 0;
  for (; group + 2 <= groups; group += 2) multiply_tiles<Kind, true>(layer, n, group);
  if (group < groups) multiply_tiles<Kind, false>(layer, n, group);
}

#else

template <typename Kind>
void multiply_groups(const Layer<Kind>&, long) {}

#endif

// The sums of 32 outputs for up to 32 rows. They are written while the next ones are computed.
template <typename Kind>
struct Square {
  using Sum = typename Kind::Sum;
  alignas(64) Sum memory[2][SIDE * SIDE];
  Sum *sums = memory[0], *next = memory[1];
  long n = 0, m = 0, count = 0, written = 0;  // rows that there are, and that are written

  // Those in `next` are there.
  void take(long first_output, long first_row, long rows) {
    std::swap(sums, next);
    n = first_output, m = first_row, count = rows, written = 0;
  }

  void write(const Layer<Kind>& layer, long most) {
    using Sums = typename Kind::Sums;
    const long end = std::min(count, written + most);
    if (written == end) return;
    const Outputs<Kind> left(layer, n), right(layer, n + TILE);
    for (; written < end; ++written) {
      const auto* row = reinterpret_cast<const Sums*>(sums + written * SIDE);
      left.write(row[0], m + written);
      right.write(row[1], m + written);
    }
  }
};

// Multiply all rows with the 32 outputs from n on, whose weights it arranges.
template <typename Kind>
void multiply_squares(const Layer<Kind>& layer, long n, Square<Kind>& square) {
  const long bytes = layer.K * long(sizeof(typename Kind::W)), words = bytes / 4, steps = bytes / 64;
  static thread_local std::vector<uint32_t> memory;
  if (long(memory.size()) < SIDE * words + TILE) memory.resize(SIDE * words + TILE);
  auto* arranged = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  const auto* w = reinterpret_cast<const uint32_t*>(layer.w) + n * words;
  // The weights of the next outputs are fetched meanwhile, each row block takes a share of them; without a matrix unit it
  // pays to begin while these are arranged.
  for (long i = 0; i < SIDE; i += TILE) {
    if (has_tiles()) arrange(w + i * words, TILE, words, arranged + i * words);
    else arrange<SIDE>(w + i * words, TILE, words, arranged + i * words, Kind::FLIPS);
  }
  const auto* ahead = reinterpret_cast<const uint8_t*>(w + SIDE * words);
  const long blocks = (layer.M + SIDE - 1) / SIDE, lines = (SIDE + blocks - 1) / blocks;
  const long few = (SIDE + steps - 1) / steps;  // rows to be written beside each step
  for (long m = 0; m < layer.M; m += SIDE, ahead += steps * lines * 64) {
    const long rows = std::min(SIDE, layer.M - m);
    const Left x{reinterpret_cast<const uint8_t*>(layer.x) + m * bytes, bytes, TILE * bytes, 64};
    multiply_beside<Kind, Passing::NONE>(x, rows, arranged, steps, steps, square.next, SIDE, false, [&](long step) {
      square.write(layer, few);
      for (long line = 0; line < lines; ++line) _mm_prefetch(ahead + (step * lines + line) * 64, _MM_HINT_T1);
    });
    square.take(n, m, rows);
  }
}

// Multiply all outputs that fill squares; return how many they are.
template <typename Kind>
long multiply_squares_by_team(const Layer<Kind>& layer) {
  const long blocks = layer.N / SIDE;
  if (!(layer.tiles || layer.arranges_weights) || blocks == 0) return 0;
  if constexpr (!std::is_same_v<Kind, Float32>) {
    Square<Kind> square;
    const TileUse use;
#pragma omp for schedule(static) nowait
    for (long block = 0; block < blocks; ++block) {
      if (layer.arranges_weights) multiply_squares(layer, block * SIDE, square);
      else multiply_groups(layer, block * SIDE);
    }
    square.write(layer, square.count);
  }
  return blocks * SIDE;
}

#else

template <typename Kind>
long multiply_squares_by_team(const Layer<Kind>&) {
  return 0;
}

#endif

// Multiply so many rows at a time that they stay in the cache while all weights pass by. No barrier.
template <typename Kind>
void multiply_by_team(const Layer<Kind>& layer) {
  const long step = layer.turned_stride ? TURNED_ROWS : CACHED_ROWS;
  for (long m = 0; m < layer.M; m += step) {
    Layer<Kind> part = layer;
    part.M = std::min(step, layer.M - m);
    part.x += m * layer.K;
    if (layer.tiles) part.tiles += m * layer.K * long(sizeof(typename Kind::X)) / 4;
    part.y += m * layer.N;
    if (layer.factor) part.factor += m * layer.N;
    if (layer.row_scales) part.row_scales += m, part.row_offsets += m;
    if constexpr (std::is_same_v<Kind, Float32>)
      if (layer.turned_stride) {
        multiply_turned_by_team(part);
        continue;
      }
    multiply_vectors_by_team(part, multiply_squares_by_team(part));
  }
}

// Round a row of x to 8 bits; its scale is the largest magnitude / 127, and not-a-number where one value is.
inline float quantize(const float* row, long K, int8_t* rounded) {
  const float most = largest_magnitude(row, K), fault = most * 0.0f;  // 0, or not a number
  const float inverse = most > 0 && fault == 0 ? 127.0f / most : 0.0f;
  const long whole = K / LANES * LANES;
  for (long k = 0; k < whole; k += LANES) store_lanes(rounded + k, load_lanes(row + k) * inverse);
  for (long k = whole; k < K; ++k) rounded[k] = int8_t(std::nearbyint(row[k] * inverse));
  return most / 127.0f + fault;
}

// What the sums of a row in 8 bits are too large by.
inline int32_t offset_of(const int8_t* row, long K) {
  if constexpr (Int8::OFFSET == 0) return 0;
  Ints sums = {};
  long k = 0;
#ifdef __AVX512VNNI__
  for (; k + Int8::STEP <= K; k += Int8::STEP) Int8::add(sums, Int8::load(row + k), _mm512_set1_epi8(1));
#endif
  int32_t sum = total(sums);
  for (; k < K; ++k) sum += row[k];
  return Int8::OFFSET * sum;
}

// Rows of x as the products of a kind read them. The memory grows and is kept; scales and offsets of whole rows are for
// 8 bits.
template <typename Kind>
struct Input {
  std::vector<typename Kind::X> rounded;
  std::vector<uint32_t> tile_memory;
  std::vector<float> scales;
  std::vector<int32_t> offsets;

  // Called by one thread, before a team fills it, with the most numbers that a row will have.
  void reserve(long M, long most) {
    const long all = (M + 2 * TILE - 1) / (2 * TILE) * (2 * TILE) * most;
    if (long(rounded.size()) < all) rounded.resize(all);
    if (long(scales.size()) < M) scales.resize(M), offsets.resize(M);
    const long words = all * long(sizeof(typename Kind::X)) / 4 + 16;
    if (has_tiles() && long(tile_memory.size()) < words) tile_memory.resize(words);
  }

  // Null where there is no matrix unit that multiplies rows of K numbers, or it multiplies them as they are.
  uint32_t* tiles(long M, long K) {
    if (!has_tiles() || !has_squares_of<Kind>(K) || M >= many_rows()) return nullptr;
    return all_tiles();
  }

  uint32_t* all_tiles() {
    return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(tile_memory.data()) + 63) / 64 * 64);
  }

  void round_row(long m, const float* row, long K) {
    auto* to = rounded.data() + m * K;
    if constexpr (std::is_same_v<Kind, Int8>) {
      scales[m] = quantize(row, K, to);
      offsets[m] = offset_of(to, K);
    }
    else if constexpr (std::is_same_v<Kind, Float32>) std::copy(row, row + K, to);
    else {
      long k = 0;
      for (; k + LANES <= K; k += LANES) store_lanes(to + k, load_lanes(row + k));
      for (; k < K; ++k) to[k] = to_half(row[k]);
    }
  }

  // Arrange the rows of a group of 16 that begins with row m of x.
  void arrange_group(const typename Kind::X* x, long m, long M, long K) {
    const long words = K * long(sizeof(typename Kind::X)) / 4;
    arrange(reinterpret_cast<const uint32_t*>(x + m * K), std::min(TILE, M - m), words, all_tiles() + m * words);
  }

  // Rounded rows, of which `read(m, buffer)` returns the address of one. With a barrier.
  template <typename Read>
  void fill_by_team(long M, long K, float* buffer, const Read& read) {
    const long step = tiles(M, K) ? TILE : 1;
#pragma omp for schedule(static)
    for (long m = 0; m < M; m += step) {
      for (long i = m; i < std::min(m + step, M); ++i) round_row(i, read(i, buffer), K);
      if (step == TILE) arrange_group(rounded.data(), m, M, K);
    }
  }

  Layer<Kind> layer(long M, long N, long K, const typename Kind::W* w, const typename Kind::Y* bias,
                    const float* output_scales, typename Kind::Y* y) {
    const bool arranges_weights = has_squares_of<Kind>(K) && M >= many_rows();
    return {M, N, K, rounded.data(), tiles(M, K), arranges_weights, w, bias, scales.data(), offsets.data(),
            output_scales, y};
  }
};

}  // namespace
