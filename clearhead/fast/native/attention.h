// Attention of the compiled layers: of one row and one head by vector instructions, or of many rows of a head by
// squares.
//
// Legend: M rows (tokens that are new), H heads, E head size, S keys.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.h"
#include "stack.h"

namespace {

constexpr long FEW_ROWS = 8;       // below it, rounding and arranging keys costs more than it saves

// Where the keys and values of a group lie, for one head.
template <typename Real>
struct Head {
  const Real *keys, *values;
  const int32_t* origin;  // cache row of each key; null: all in one row
  long base, row_stride, key_stride;
  long next;  // from these keys to those of the next head; 0: there is none
  const float *key_scales, *value_scales;  // of numbers in 8 bits, from the base on
  long scale_stride;                       // between cache rows

  long place(long s) const { return base + (origin ? origin[s] * row_stride : 0) + s * key_stride; }
  const Real* key(long s) const { return keys + place(s); }
  const Real* value(long s) const { return values + place(s); }
  float key_scale(long s) const { return scale(key_scales, s); }
  float value_scale(long s) const { return scale(value_scales, s); }

 private:
  float scale(const float* scales, long s) const {
    if constexpr (!std::is_same_v<Real, int8_t>) return 1.0f;
    return scales[(origin ? origin[s] * scale_stride : 0) + s];
  }
};

// Rows with the same keys, and which of these a row sees.
struct Group {
  long number, begin, end, S;
  const Keys& keys;

  // The place of a row among the keys: rows are the last of them.
  long place(long m) const { return S - end + m; }
  long first(long m) const { return std::max(0L, place(m) - long(keys.before)); }
  long last(long m) const { return std::min(S, place(m) + long(keys.after) + 1); }
};

// What a thread keeps; it grows.
struct Scratch {
  std::vector<float> scores, mixed;
  std::vector<uint16_t> queries, weights;
  std::vector<uint32_t> keys, values;
};

// Fetch a row of a head that is read soon: rows of a cache come from memory, in pieces too short to be foreseen.
template <typename Real>
void prefetch(const Real* row, long E) {
  for (long e = 0; e < E; e += 64 / long(sizeof(Real))) __builtin_prefetch(row + e);
}

template <typename Real>
float dot(const float* query, const Real* key, long E) {
  Floats sums = {};
  long e = 0;
  for (; e + LANES <= E; e += LANES) sums += load_lanes(query + e) * load_lanes(key + e);
  float sum = e ? total(sums) : 0.0f;
  for (; e < E; ++e) sum += query[e] * load_one(key + e);
  return sum;
}

// Sum so many vectors of values by their weights, in registers.
template <typename Real, int VECTORS>
void weigh(const float* weights, const Head<Real>& rows, long first, long last, long e, float* mixed) {
  Floats sums[VECTORS] = {};
  for (long s = first; s < last; ++s) {
    const Real* row = rows.value(s) + e;
    if (rows.next) prefetch(rows.key(s) + rows.next + e, VECTORS * LANES);
    for (int i = 0; i < VECTORS; ++i) sums[i] += weights[s] * load_lanes(row + i * LANES);
  }
  for (int i = 0; i < VECTORS; ++i) store_lanes(mixed + e + i * LANES, sums[i]);
}

// Turn scores [S] into weights that are still to be multiplied by the number that is returned; with no key that may be
// attended to they are zeros.
float softmax(float* scores, long S, const float* sink) {
  const float most = largest_of(scores, S, sink ? *sink : -INFINITY);
  if (most == -INFINITY && std::none_of(scores, scores + S, [](float x) { return x != x; })) {
    std::fill(scores, scores + S, 0.0f);
    return 0.0f;
  }
  Floats sums[2] = {};
  long s = 0;
  for (; s + LANES <= S; s += LANES) {
    const Floats lanes = exp_lanes(load_lanes(scores + s) - most);
    store_lanes(scores + s, lanes);
    sums[s / LANES % 2] += lanes;
  }
  float sum = total(sums[0] + sums[1]) + (sink ? std::exp(*sink - most) : 0.0f);
  for (; s < S; ++s) {
    scores[s] = exp_lanes(spread(scores[s] - most))[0];
    sum += scores[s];
  }
  return 1.0f / sum;
}

// Turn the products of a row's query and the keys it sees, scaled, into scores.
void to_scores(const Branch& branch, const Group& group, long m, long head, float* scores) {
  const Keys& keys = group.keys;
  const long first = group.first(m), last = group.last(m);
  if (branch.soft_cap > 0) {
    long s = first;
    for (; s + LANES <= last; s += LANES)
      store_lanes(scores + s, branch.soft_cap * tanh_lanes(load_lanes(scores + s) / branch.soft_cap));
    for (; s < last; ++s) scores[s] = branch.soft_cap * tanh_lanes(spread(scores[s] / branch.soft_cap))[0];
  }
  if (keys.bias) {
    const float* bias = keys.bias + m * keys.bias_row_stride + head * keys.bias_head_stride;
    for (long s = first; s < last; ++s) scores[s] += bias[s];
  }
  if (keys.mask) {
    const uint8_t* mask = keys.mask + group.number * keys.mask_stride;
    for (long s = first; s < last; ++s) scores[s] = mask[s] ? scores[s] : -INFINITY;
  }
}

// Attend from a row, by one head; what it mixes takes the place of the query.
template <typename Real>
void attend_row(
    const Branch& branch, const Group& group, const Head<Real>& rows, float* query, long m, long head,
    float* scores) {
  const long E = branch.head_size, first = group.first(m), last = group.last(m);
  for (long s = first; s < last; ++s) {
    prefetch(rows.value(s), E);
    scores[s] = branch.score_scale * rows.key_scale(s) * dot(query, rows.key(s), E);
  }
  to_scores(branch, group, m, head, scores);
  const float share = softmax(scores + first, last - first, branch.sink ? branch.sink + head : nullptr);
  for (long s = first; s < last; ++s) scores[s] *= share * rows.value_scale(s);
  long e = 0;
  for (; e + 4 * LANES <= E; e += 4 * LANES) weigh<Real, 4>(scores, rows, first, last, e, query);
  for (; e + 2 * LANES <= E; e += 2 * LANES) weigh<Real, 2>(scores, rows, first, last, e, query);
  for (; e + LANES <= E; e += LANES) weigh<Real, 1>(scores, rows, first, last, e, query);
  for (; e < E; ++e) {
    float sum = 0;
    for (long s = first; s < last; ++s) sum += scores[s] * load_one(rows.value(s) + e);
    query[e] = sum;
  }
}

// --- squares: queries, keys, weights and values rounded to bfloat16, sums in float32 ---

#ifdef SQUARES

bool attends_by_squares(long E, long rows) { return rows >= FEW_ROWS && E % LANES == 0 && has_squares(); }

template <typename Number>
Number* room(std::vector<Number>& memory, long size) {
  const long line = 64 / long(sizeof(Number));
  if (long(memory.size()) < size + line) memory.resize(size + line);
  return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

// Round a row of a head times its scale; `padded` numbers are written, zeros behind the last.
template <typename Real>
void round_head(const Real* row, float scale, long E, long padded, uint16_t* rounded) {
  for (long e = 0; e < padded; e += LANES) store_lanes(rounded + e, e < E ? scale * load_lanes(row + e) : Floats{});
}

// Keys [from, to) as the right side of query key^T: tiles of 16 keys by 32 numbers of a head, zeros beyond the last key.
template <typename Real>
void arrange_keys(
    const Head<Real>& rows, long from, long to, long S, long E, long padded, uint16_t* rounded, uint32_t* arranged) {
  for (long s = from; s < to; s += TILE, arranged += TILE * padded / 2) {
    const long count = std::max(0L, std::min(TILE, S - s));
    for (long i = 0; i < count; ++i) round_head(rows.key(s + i), rows.key_scale(s + i), E, padded, rounded + i * padded);
    arrange(reinterpret_cast<const uint32_t*>(rounded), count, padded / 2, arranged);
  }
}

// Values [from, to) as the right side of weights value: for every 16 numbers of a head, words with those of two keys.
template <typename Real>
void arrange_values(const Head<Real>& rows, long from, long to, long S, long E, long padded, uint32_t* arranged) {
  const auto word = [&](long s, long e) {
    const Floats lanes = s < S && e < E ? rows.value_scale(s) * load_lanes(rows.value(s) + e) : Floats{};
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)lanes));
  };
  for (long s = from; s < to; s += 2)
    for (long e = 0; e < padded; e += LANES)
      _mm512_storeu_si512(
          arranged + e * (to - from) / 2 + (s - from) / 2 * LANES,
          _mm512_or_si512(word(s, e), _mm512_slli_epi32(word(s + 1, e), 16)));
}

// y [rows, 32 columns] = x [rows, K] times the arranged [K, 32]; 16 columns of K numbers have `size` words.
void multiply_heads(const uint16_t* x, long rows, long K, const uint32_t* arranged, long size, float* y, long width) {
  const Left left{reinterpret_cast<const uint8_t*>(x), 2 * K, 2 * TILE * K, 64};
  multiply_square<BFloat16>(left, rows, arranged, size / WORDS, K / SIDE, y, width, false);
}

// Attend from the rows [begin, end) of a group, by one head. queries: of row 0, rows `stride` apart; what they mix takes
// their places.
template <typename Real>
void attend_by_squares(
    const Branch& branch, const Group& group, const Head<Real>& rows, long begin, long end, float* queries, long head,
    long stride, Scratch& scratch) {
  const long E = branch.head_size, padded = (E + SIDE - 1) / SIDE * SIDE;
  const long low = group.first(begin) / SIDE * SIDE;  // of the first row; the last row sees the last key
  const long high = (group.last(end - 1) + SIDE - 1) / SIDE * SIDE;
  uint32_t* keys = room(scratch.keys, (high - low) * padded / 2);
  uint32_t* values = room(scratch.values, (high - low) * padded / 2);
  uint16_t* query = room(scratch.queries, SIDE * padded);
  uint16_t* weights = room(scratch.weights, SIDE * (high - low));
  float* scores = room(scratch.scores, SIDE * (high - low));
  float* sums = room(scratch.mixed, SIDE * padded);
  arrange_keys(rows, low, high, group.S, E, padded, query, keys);
  arrange_values(rows, low, high, group.S, E, padded, values);
  const TileUse use;
  for (long top = begin; top < end; top += SIDE) {
    const long M = std::min(SIDE, end - top), from = group.first(top) / SIDE * SIDE;
    const long width = (group.last(top + M - 1) + SIDE - 1) / SIDE * SIDE - from;
    for (long i = 0; i < M; ++i) round_head(queries + (top + i) * stride, branch.score_scale, E, padded, query + i * padded);
    for (long s = 0; s < width; s += SIDE)
      multiply_heads(
          query, M, padded, keys + (from - low + s) * padded / 2, TILE * padded / 2, scores + s, width);
    for (long i = 0; i < M; ++i) {
      float* row = scores + i * width;
      const long first = group.first(top + i) - from, last = group.last(top + i) - from;
      const long seen = (last + LANES - 1) / LANES * LANES;  // whole vectors
      to_scores(branch, group, top + i, head, row - from);
      std::fill(row, row + first, -INFINITY);
      std::fill(row + last, row + seen, -INFINITY);
      const float share = softmax(row, seen, branch.sink ? branch.sink + head : nullptr);
      for (long s = 0; s < width; s += LANES)
        store_lanes(weights + i * width + s, s < seen ? share * load_lanes(row + s) : Floats{});
    }
    const long size = (high - low) / 2 * TILE;
    for (long e = 0; e < padded; e += SIDE)
      multiply_heads(
          weights, M, width, values + e / TILE * size + (from - low) / 2 * TILE, size, sums + e, padded);
    for (long i = 0; i < M; ++i) std::copy(sums + i * padded, sums + i * padded + E, queries + (top + i) * stride);
  }
}

#else

bool attends_by_squares(long, long) { return false; }

template <typename Real>
void attend_by_squares(
    const Branch&, const Group&, const Head<Real>&, long, long, float*, long, long, Scratch&) {}

#endif

}  // namespace
