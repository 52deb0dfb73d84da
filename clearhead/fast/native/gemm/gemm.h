// Products of rows on a CPU. With many rows, the weights of 32 outputs are packed and multiplied in blocks. Few rows,
// even a single one, are packed for the processor's matrix unit (AMX) if it has one. Otherwise few rows are multiplied
// by vector instructions.
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "float_panel.h"
#include "gemv.h"
#include "nibbles.h"
#include "panel.h"
#include "transposed.h"
#ifdef HAS_AMX
#include "gemv_amx.h"
#endif

namespace {

constexpr int64_t CACHED_ROWS = 512;

// Whether blocks multiply rows of K numbers, or packed panels do.
template <typename Traits>
constexpr bool has_blocks(int64_t K) {
#if defined(HAS_GEMM)
  return !std::is_same_v<Traits, Float32> && K * int64_t(sizeof(typename Traits::W)) % LINE == 0;
#elif defined(HAS_PANELS)
  return std::is_same_v<Traits, Int8> && K % (4 * WIDTH) == 0;
#else
  return false;
#endif
}

template <typename Traits>
bool packs_weights(int64_t M, int64_t K) {
#if defined(HAS_GEMM)
  return has_blocks<Traits>(K) && M >= PACKED_ROWS;
#elif defined(HAS_PANELS)
  return has_blocks<Traits>(K) && M >= Int8::LEAST_PACKED;
#else
  return false;
#endif
}

#ifdef HAS_GEMM

// Multiply all rows with the 32 outputs from n on; packs the weights of these outputs into `packed`.
template <typename Traits>
void multiply_outputs(
    const GemmArgs<Traits>& args, int64_t n, InterleavedEpilogue<Traits>& epilogue, uint32_t* packed) {
  const int64_t bytes = args.K * int64_t(sizeof(typename Traits::W)), words = bytes / 4, steps = bytes / LINE;
  const auto* w = reinterpret_cast<const uint32_t*>(args.w) + n * words;
    // The weights of the next outputs are prefetched meanwhile; each row block takes a share of them. Without a matrix
    // unit, it pays to begin while the current weights are packed.
  for (int64_t i = 0; i < BLOCK; i += TILE)
    pack_transposed<IS_SIGNED ? 0 : BLOCK, IS_SIGNED ? 0 : Traits::ZERO_POINT, std::is_same_v<Traits, MixedFloat16>>(
        w + i * words, words, TILE, words, packed + i * words);
  const auto* ahead = reinterpret_cast<const uint8_t*>(w + BLOCK * words);
  const int64_t blocks = (args.M + BLOCK - 1) / BLOCK, lines = (BLOCK + blocks - 1) / blocks;
  const int64_t few = (BLOCK + steps - 1) / steps;  // rows to be written with each step
  for (int64_t m = 0; m < args.M; m += BLOCK, ahead += steps * lines * LINE) {
    const int64_t rows = std::min(BLOCK, args.M - m);
    const PanelA x{reinterpret_cast<const uint8_t*>(args.x) + m * bytes, bytes, TILE * bytes, LINE};
    multiply_block<Traits, Streamed::NONE>(
        x, rows, {packed, steps * TILE_WORDS}, steps, {epilogue.next, BLOCK, false}, [&](int64_t step) {
          epilogue.write(args, few);
          for (int64_t line = 0; line < lines; ++line) _mm_prefetch(ahead + (step * lines + line) * LINE, _MM_HINT_T1);
        });
    epilogue.take(n, m, rows);
  }
}

// Multiply all outputs that fill blocks; return their number.
template <typename Traits>
int64_t multiply_blocks_by_team(const GemmArgs<Traits>& args, Arena& arena) {
  if constexpr (std::is_same_v<Traits, Float32>) return multiply_float_panels_by_team(args, arena);
  else {
    const int64_t blocks = args.N / BLOCK;
    if (!(args.packed_x || args.packs_weights) || blocks == 0) return 0;
    const Arena::Frame frame(arena);
    constexpr bool IS_FLOAT16 = std::is_same_v<Traits, MixedFloat16>;
    const int64_t words = BLOCK * args.K * int64_t(sizeof(typename Traits::W)) / 4;
    uint32_t* packed = arena.take<uint32_t>(args.packs_weights || IS_FLOAT16 ? words : 0);
    InterleavedEpilogue<Traits> epilogue;
    const TileUse use;
#pragma omp for schedule(static) nowait
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t n = block * BLOCK;
      if (args.packs_weights) multiply_outputs(args, n, epilogue, packed);
      else if constexpr (IS_SIGNED) {
        const auto* next = args.w + (n + BLOCK) * args.K;
        if constexpr (IS_FLOAT16)
          multiply_packed_rows(round_weights(args, n, BLOCK, reinterpret_cast<uint16_t*>(packed)), 0, next);
        else multiply_packed_rows(args, n, next);
      }
    }
    epilogue.write(args);
    return blocks * BLOCK;
  }
}

#else

template <typename Traits>
int64_t multiply_blocks_by_team(const GemmArgs<Traits>& args, Arena& arena) {
  if constexpr (std::is_same_v<Traits, Float32>) return multiply_float_panels_by_team(args, arena);
#ifdef HAS_PANELS
  if constexpr (std::is_same_v<Traits, Int8>)
    if (args.packs_weights) return multiply_panels_by_team(args, arena);
#endif
  return 0;
}

#endif

template <typename Traits>
void multiply_cached_rows_by_team(const GemmArgs<Traits>& args, Arena& arena) {
  if constexpr (std::is_same_v<Traits, Float32>)
    if (args.ldb) return gemm_transposed_by_team(args, arena);
#ifdef HAS_NIBBLES
  if constexpr (std::is_same_v<Traits, Int4>)
    multiply_nibbles_by_team(args, args.packs_weights ? multiply_nibble_panels_by_team(args, arena) : 0);
  else
#endif
    gemv_by_team(args, multiply_blocks_by_team(args, arena), arena);
}

// Multiply only as many rows at a time as stay in the cache while all weights are read. No barrier.
template <typename Traits>
void gemm_by_team(const GemmArgs<Traits>& args, Arena& arena) {
  for (int64_t m = 0; m < args.M; m += CACHED_ROWS) {
    GemmArgs<Traits> some = args;
    some.M = std::min(CACHED_ROWS, args.M - m);
    some.x += m * args.K;
    if (args.packed_x) some.packed_x += m * args.K * int64_t(sizeof(typename Traits::X)) / 4;
    some.y += m * args.N;
    if (args.factor) some.factor += m * args.N;
    if (args.row_scales) some.row_scales += m, some.compensation += m * (std::is_same_v<Traits, Int4> ? args.K / GROUP : 1);
    multiply_cached_rows_by_team(some, arena);
  }
}

// Round a row of x to 8 bits; its scale is the largest magnitude / 127, or NaN if a value is NaN or infinite.
template <typename Number>
inline float quantize(const float* row, int64_t K, Number* rounded) {
  const float most = max_abs(row, K), fault = most * 0.0f;  // 0, or NaN
  const float inverse = most > 0 && fault == 0 ? 127.0f / most : 0.0f;
  const int64_t whole = K / WIDTH * WIDTH;
  for (int64_t k = 0; k < whole; k += WIDTH) store(rounded + k, load(row + k) * inverse);
  for (int64_t k = whole; k < K; ++k) rounded[k] = Number(std::nearbyint(row[k] * inverse));
  return most / 127.0f + fault;
}

// The error that the zero point of the weights adds to the sums of an 8-bit row.
template <typename Traits>
int32_t compensation(const typename Traits::X* row, int64_t K) {
  if constexpr (Traits::ZERO_POINT == 0) return 0;
  else {
    Vec<int32_t> sums = {};
    int64_t k = 0;
    for (; k + Traits::STEP <= K; k += Traits::STEP) Traits::add(sums, Traits::load_x(row + k), Traits::ones());
    int32_t sum = reduce_add(sums);
    for (; k < K; ++k) sum += row[k];
    return Traits::ZERO_POINT * sum;
  }
}

// Rows of x in the form that the products read, with scales and compensations of 8-bit rows.
template <typename Kind>
class GemmInput {
  // For 4-bit weights, rows for 8-bit weights exist too: some matrices of a stack have 8 bits.
  static constexpr bool HAS_NARROW = std::is_same_v<Kind, Int4>;
  using Traits = std::conditional_t<HAS_NARROW, Int8, Kind>;

 public:
    // Call from one thread, before a team fills the rows, with the largest size of a row. Transposed weights read rows
    // unpacked.
  GemmInput(Arena& arena, int64_t M, int64_t most, bool is_transposed = false) {
    const int64_t all = round_up(M, BLOCK) * most;
    rounded_ = arena.take<typename Traits::X>(all);
    scales_ = arena.take<float>(M), compensation_ = arena.take<int32_t>(M);
    if (HAS_NARROW) {
      if constexpr (std::is_same_v<typename Traits::X, int8_t>) narrow_ = rounded_;
      else narrow_ = arena.take<int8_t>(M * most);
      group_starts_ = arena.take<int32_t>(M * (most / GROUP));
    }
    if (PACKS_ROWS && !is_transposed) packed_ = arena.take<uint32_t>(all * int64_t(sizeof(typename Traits::X)) / 4);
  }

  // Take rounded rows; `read(m, buffer)` returns the address of one row. With a barrier.
  template <typename Read>
  void fill_by_team(int64_t M, int64_t K, float* buffer, const Read& read) {
    const int64_t step = packs(M, K) ? TILE : 1;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m += step) {
      for (int64_t i = m; i < std::min(m + step, M); ++i) round(i, read(i, buffer), K);
      if (step == TILE) pack_group(rounded_, m, M, K);
    }
  }

  // Take rows of x that need no rounding. For a matrix unit all rows are packed: unpacked tiles would be read beyond
  // the last row.
  void take_by_team(const typename Traits::X* x, GemmArgs<Traits>& args) {
    args.x = x;
    if (!packed_ || !(IS_FLOAT ? packs(args.M, args.K) : has_blocks<Traits>(args.K))) return;
    args.packed_x = packed_, args.packs_weights = false;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < args.M; m += TILE) pack_group(x, m, args.M, args.K);
  }

  // Arguments of a product; float16 weights are multiplied with the rows of bfloat16 weights.
  template <typename Product = Traits>
  GemmArgs<Product> args(int64_t M, int64_t N, int64_t K, const typename Product::W* w, const typename Traits::Y* bias,
                         const float* output_scales, typename Traits::Y* y) const {
    return {M, N, K, rounded_, packs(M, K) ? packed_ : nullptr, packs_weights<Traits>(M, K), w, bias, scales_,
            compensation_, output_scales, y};
  }

  // Arguments of a product with 4-bit weights; K is a multiple of their group size.
  GemmArgs<Int4> nibble_args(int64_t M, int64_t N, int64_t K, const uint8_t* w, const float* bias,
                             const uint16_t* group_scales, float* y) const {
    GemmArgs<Int4> made{M, N, K, narrow_, nullptr, M >= LEAST_NIBBLE_PACKED, w, bias, scales_, group_starts_, nullptr, y};
    made.group_scales = group_scales;
    return made;
  }

 private:
  static constexpr bool IS_FLOAT = std::is_same_v<Traits, Float32>;
#ifdef HAS_AMX
  static constexpr bool PACKS_ROWS = true;
#else
  static constexpr bool PACKS_ROWS = IS_FLOAT;
#endif

  // Whether to pack rows: few rows for the matrix unit, many float32 rows for panels.
  bool packs(int64_t M, int64_t K) const {
    if (IS_FLOAT) return packed_ && M >= LEAST_FLOAT_ROWS;
    return packed_ && has_blocks<Traits>(K) && !packs_weights<Traits>(M, K);
  }

  void round(int64_t m, const float* row, int64_t K) {
    auto* to = rounded_ + m * K;
    if constexpr (std::is_same_v<Traits, Int8>) {
      scales_[m] = quantize(row, K, to);
      compensation_[m] = compensation<Traits>(to, K);
      if constexpr (HAS_NARROW)
        if (K % GROUP == 0) narrow_row(to, K, narrow_ + m * K, group_starts_ + m * (K / GROUP));
    } else round_row(row, K, to);
  }

  // Pack the group of 16 rows that begins with row m.
  void pack_group(const typename Traits::X* x, int64_t m, int64_t M, int64_t K) {
    if constexpr (IS_FLOAT) {
      auto* packed = reinterpret_cast<float*>(packed_);
      for (int64_t i = m; i < std::min(m + TILE, M); ++i) pack_remainders(x + i * K, K, packed + i * K);
    } else {
#ifdef HAS_AMX
      const int64_t words = K * int64_t(sizeof(typename Traits::X)) / 4;
      const auto* from = reinterpret_cast<const uint32_t*>(x + m * K);
      pack_transposed(from, words, std::min(TILE, M - m), words, packed_ + m * words);
#endif
    }
  }

  typename Traits::X* rounded_;
  uint32_t* packed_ = nullptr;
  float* scales_;
  int32_t* compensation_;
  int8_t* narrow_ = nullptr;
  int32_t* group_starts_ = nullptr;
};

}  // namespace
