// Attention of many rows of a head: blocks of 32 queries by 32 keys, and of 32 weights by 32 numbers of values. Blocks
// are float32. They are rounded to bfloat16 if the processor multiplies bfloat16 blocks and the layers round their
// products. Sums are float32, each in the order of its numbers, whichever rows are computed together.
//
// Legend: M new rows (tokens), E head size, S keys.

#pragma once

#include "attention.h"

namespace {

constexpr int64_t FEW_ROWS = 8;  // with fewer rows, packing keys costs more than it saves

// Write a row of a head times its scale, rounded: `padded` numbers, with zeros after the last one.
template <typename Real, typename Number>
void round_head(const Real* row, float scale, int64_t E, int64_t padded, Number* rounded) {
  for (int64_t e = 0; e < padded; e += WIDTH) store(rounded + e, e < E ? scale * load(row + e, E - e) : Vec<float>{});
}

// Keys and values are packed like b of the GEMM (pack.h): tiles of 16 columns, words of 4 bytes.
struct FloatBlocks {
  using Number = float;
  static constexpr int64_t PER_WORD = 1;
  struct Use {
    Use() {}
  };

  // Pack the keys from s on as tiles of 16 columns, with zeros after the last key.
  template <typename Real>
  static void pack_keys(const Head<Real>& rows, int64_t s, int64_t S, int64_t E, int64_t padded, Number*, uint32_t* packed) {
    for (int64_t side = 0; side < TILE; side += WIDTH)
      for (int64_t e = 0; e < padded; e += WIDTH) {
        Words words[WIDTH];
        for (int64_t i = 0; i < WIDTH; ++i) {
          const int64_t key = s + side + i;
          words[i] = (Words)(key < S && e < E ? rows.key_scale(key) * load(rows.key(key) + e, E - e) : Vec<float>{});
        }
        transpose(words);
        for (int64_t r = 0; r < WIDTH; ++r) std::memcpy(packed + (e + r) * TILE + side, &words[r], sizeof words[r]);
      }
  }

  // Pack the numbers of value s from e on.
  template <typename Value>
  static void pack_value(const Value& value, int64_t s, int64_t e, uint32_t* packed) {
    const Vec<float> numbers = value(s, e);
    std::memcpy(packed, &numbers, sizeof numbers);
  }

  // y [rows, 32 columns] = x [rows, K] b; `group` is the number of words from 16 columns to the next 16.
  static void multiply(const float* x, int64_t rows, int64_t K, const uint32_t* b, int64_t group, float* y, int64_t y_stride) {
    multiply_float_tiles<WIDTH == 8 ? 4 : 8>(x, K, rows, K, reinterpret_cast<const float*>(b), group, {y, y_stride, false});
  }
};

#ifdef HAS_GEMM

struct BFloat16Blocks {
  using Number = uint16_t;
  using Use = TileUse;
  static constexpr int64_t PER_WORD = 2;

  template <typename Real>
  static void pack_keys(
      const Head<Real>& rows, int64_t s, int64_t S, int64_t E, int64_t padded, Number* rounded, uint32_t* packed) {
    const int64_t count = std::max(int64_t(0), std::min(TILE, S - s));
    for (int64_t i = 0; i < count; ++i) round_head(rows.key(s + i), rows.key_scale(s + i), E, padded, rounded + i * padded);
    pack_transposed(reinterpret_cast<const uint32_t*>(rounded), padded / 2, count, padded / 2, packed);
  }

  // Words with the numbers of two values.
  template <typename Value>
  static void pack_value(const Value& value, int64_t s, int64_t e, uint32_t* packed) {
    const auto word = [&](int64_t one) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)value(one, e))); };
    _mm512_storeu_si512(packed, _mm512_or_si512(word(s), _mm512_slli_epi32(word(s + 1), 16)));
  }

  static void multiply(const Number* x, int64_t rows, int64_t K, const uint32_t* b, int64_t group, float* y, int64_t y_stride) {
    multiply_block<BFloat16, Streamed::NONE>(
        rows_of(x, K), rows, {b, group}, K / BLOCK, {y, y_stride, false}, [](int64_t) {});
  }
};

template <typename Traits>
using BlocksOf = std::conditional_t<std::is_same_v<Traits, Float32>, FloatBlocks, BFloat16Blocks>;

#else

template <typename Traits>
using BlocksOf = FloatBlocks;

#endif

// Whether blocks compute the rows [begin, end) of a group. All rows of a text in a cache take the same path, whichever
// part of it this call or chunk has. Float32 blocks take whole texts only, whose length is fixed.
template <typename Traits>
bool attends_by_blocks(const Group& group, int64_t begin, int64_t end) {
  const bool is_text = group.keys.cu_seqlens;
  if (std::is_same_v<BlocksOf<Traits>, FloatBlocks> && !is_text) return false;
  return group.keys.appends && is_text ? group.S >= FEW_ROWS : end - begin >= FEW_ROWS;
}

// Attend with the rows [begin, end) of a group, for one head. queries: address for row 0; rows are `stride` apart, and
// mixed values overwrite them.
template <typename Blocks, typename Real>
void attend_by_blocks(
    const Branch& branch, const Group& group, const Head<Real>& rows, int64_t begin, int64_t end, float* queries,
    int64_t head, int64_t stride, Arena& arena) {
  using Number = typename Blocks::Number;
  constexpr int64_t PER_WORD = Blocks::PER_WORD;
  const int64_t E = branch.head_size, padded = round_up(E, BLOCK);
  const int64_t low = group.first(begin) / BLOCK * BLOCK;  // first key of the first row; the last row sees the last key
  const int64_t high = round_up(group.last(end - 1), BLOCK);
  const Arena::Frame frame(arena);
  auto* keys = arena.take<uint32_t>((high - low) * padded / PER_WORD);
  auto* values = arena.take<uint32_t>((high - low) * padded / PER_WORD);
  auto* query = arena.take<Number>(BLOCK * padded);
  auto* scores = arena.take<float>(BLOCK * (high - low));
  auto* weights = arena.take<Number>(BLOCK * (high - low));
  auto* sums = arena.take<float>(BLOCK * padded);
  // words of 16 columns
  const int64_t key_words = TILE * padded / PER_WORD, value_words = TILE * (high - low) / PER_WORD;
  for (int64_t s = low; s < high; s += TILE)
    Blocks::pack_keys(rows, s, group.S, E, padded, query, keys + (s - low) / TILE * key_words);
  const auto value = [&](int64_t s, int64_t e) {
    return s < group.S && e < E ? rows.value_scale(s) * load(rows.value(s) + e, E - e) : Vec<float>{};
  };
  for (int64_t s = low; s < high; s += PER_WORD)
    for (int64_t e = 0; e < padded; e += WIDTH)
      Blocks::pack_value(value, s, e, values + e / TILE * value_words + (s - low) / PER_WORD * TILE + e % TILE);
  const typename Blocks::Use use;
  for (int64_t top = begin; top < end; top += BLOCK) {
    const int64_t M = std::min(BLOCK, end - top), from = group.first(top) / BLOCK * BLOCK;
    const int64_t width = round_up(group.last(top + M - 1), BLOCK) - from;
    for (int64_t i = 0; i < M; ++i)
      round_head(queries + (top + i) * stride, branch.score_scale, E, padded, query + i * padded);
    for (int64_t s = 0; s < width; s += BLOCK)
      Blocks::multiply(query, M, padded, keys + (from - low + s) / TILE * key_words, key_words, scores + s, width);
    for (int64_t i = 0; i < M; ++i) {
      float* row = scores + i * width;
      const int64_t first = group.first(top + i) - from, last = group.last(top + i) - from;
      const int64_t seen = round_up(last, WIDTH);  // rounded up to whole vectors
      to_scores(branch, group, top + i, head, row - from);
      std::fill(row, row + first, -INFINITY);
      std::fill(row + last, row + seen, -INFINITY);
      const float share = softmax(row, seen, branch.sink ? branch.sink + head : nullptr);
      for (int64_t s = 0; s < width; s += WIDTH)
        store(weights + i * width + s, s < seen ? share * load(row + s) : Vec<float>{});
    }
    const uint32_t* seen_values = values + (from - low) / PER_WORD * TILE;
    for (int64_t e = 0; e < padded; e += BLOCK)
      Blocks::multiply(weights, M, width, seen_values + e / TILE * value_words, value_words, sums + e, padded);
    for (int64_t i = 0; i < M; ++i) std::copy(sums + i * padded, sums + i * padded + E, queries + (top + i) * stride);
  }
}

}  // namespace
