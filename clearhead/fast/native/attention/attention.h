// Attention of the compiled layers for one row or a few rows of one head; blocks.h computes many rows.
//
// Legend: M new rows (tokens), H heads, E head size, S keys.

#pragma once

#include "../gemm/gemm.h"

namespace {

constexpr int64_t KEYS = 4;                             // keys whose scores are computed together
// rows, and vectors of a value, that are in registers together
constexpr int TOGETHER = WIDTH == 8 ? 2 : 4, VALUES = 4;

// Addresses of the keys and values of a group, for one head.
template <typename Real>
struct Head {
  const Real *keys, *values;
  const int32_t* row_index;  // cache row of each key; null: all keys in one row
  int64_t base, row_stride, key_stride;
  int64_t next;  // distance to the keys of the next head; 0: there is no next head
  const float *key_scales, *value_scales;  // scales of 8-bit numbers, from the base on
  int64_t scale_stride;  // stride between cache rows

  int64_t place(int64_t s) const { return base + (row_index ? row_index[s] * row_stride : 0) + s * key_stride; }
  const Real* key(int64_t s) const { return keys + place(s); }
  const Real* value(int64_t s) const { return values + place(s); }
  float key_scale(int64_t s) const { return scale(key_scales, s); }
  float value_scale(int64_t s) const { return scale(value_scales, s); }

 private:
  float scale(const float* scales, int64_t s) const {
    if constexpr (!std::is_same_v<Real, int8_t>) return 1.0f;
    return scales[(row_index ? row_index[s] * scale_stride : 0) + s];
  }
};

// Rows with the same keys, and the keys that each row sees. Keys count from the first one after the padding of a group.
// So the result of a row does not depend on the lengths of other texts.
struct Group {
  int64_t number, begin, end, S, first_key;
  const Keys& keys;

  Group(int64_t number, const Keys& keys)
      : number(number), begin(keys.cu_seqlens ? keys.cu_seqlens[number] : number * keys.rows_per_group),
        end(keys.cu_seqlens ? keys.cu_seqlens[number + 1] : begin + keys.rows_per_group),
        S(keys.key ? keys.count : end - begin), first_key(keys.first_keys ? keys.first_keys[number] : 0), keys(keys) {
    S -= first_key;
  }

  // The group of a row of this call.
  static Group of(int64_t m, const Keys& keys) {
    if (!keys.cu_seqlens) return Group(m / keys.rows_per_group, keys);
    return Group(std::upper_bound(keys.cu_seqlens, keys.cu_seqlens + keys.groups, m) - keys.cu_seqlens - 1, keys);
  }

  // The index of a row among the keys: rows are the last keys.
  int64_t place(int64_t m) const { return S - end + m; }
  int64_t first(int64_t m) const { return std::max(int64_t(0), place(m) - keys.window_before); }
  int64_t last(int64_t m) const { return std::min(S, place(m) + keys.window_after + 1); }
};

// Prefetch a row of a head that is read soon: cache rows lie in pieces too short for the processor's prediction.
template <typename Real>
void prefetch(const Real* row, int64_t E) {
  for (int64_t e = 0; e < E; e += LINE / int64_t(sizeof(Real))) __builtin_prefetch(row + e);
}

// Compute the scores of ROWS rows, `stride` apart, with the keys [first, last), four keys at a time. Each key is read
// once for all rows.
template <typename Real, int ROWS>
void score(
    const float* query, int64_t stride, const Head<Real>& rows, int64_t E, int64_t first, int64_t last, float scale,
    float* scores, int64_t scores_stride) {
  for (int64_t s = first; s < last; s += KEYS) {
    const Real* key[KEYS];
    for (int i = 0; i < KEYS; ++i) key[i] = rows.key(std::min(s + i, last - 1));
    for (int i = 0; i < KEYS; ++i) prefetch(rows.value(std::min(s + i, last - 1)), E);
    alignas(64) Vec<float> sums[ROWS][KEYS] = {};
    int64_t e = 0;
    for (; e + WIDTH <= E; e += WIDTH)
      for (int i = 0; i < KEYS; ++i) {
        const Vec<float> vec = load(key[i] + e);
        for (int j = 0; j < ROWS; ++j) sums[j][i] = multiply_add(load(query + j * stride + e), vec, sums[j][i]);
      }
    for (int j = 0; j < ROWS; ++j) {
      float found[KEYS];
      reduce_add_all<KEYS>(sums[j], found);
      for (int i = 0; i < std::min(KEYS, last - s); ++i) {
        for (int64_t rest = e; rest < E; ++rest)
          found[i] = multiply_add(query[j * stride + rest], to_float(key[i][rest]), found[i]);
        scores[j * scores_stride + s + i] = scale * rows.key_scale(s + i) * found[i];
      }
    }
  }
}

// Sum VECTORS vectors of values with the weights of each row, in registers.
template <typename Real, int ROWS, int VECTORS>
void weigh(
    const float* weights, int64_t weights_stride, const Head<Real>& rows, int64_t first, int64_t last, int64_t e,
    float* mixed, int64_t stride) {
  Vec<float> sums[ROWS][VECTORS] = {};
  for (int64_t s = first; s < last; ++s) {
    const Real* row = rows.value(s) + e;
    if (rows.next) prefetch(rows.key(s) + rows.next + e, VECTORS * WIDTH);
    for (int i = 0; i < VECTORS; ++i) {
      const Vec<float> vec = load(row + i * WIDTH);
      for (int j = 0; j < ROWS; ++j)
        sums[j][i] = multiply_add(broadcast(weights[j * weights_stride + s]), vec, sums[j][i]);
    }
  }
  for (int j = 0; j < ROWS; ++j)
    for (int i = 0; i < VECTORS; ++i) store(mixed + j * stride + e + i * WIDTH, sums[j][i]);
}

// Turn scores [S], which fill whole vectors, into weights that must still be multiplied by the returned number. Without
// a visible key, the weights are zeros.
float softmax(float* scores, int64_t S, const float* sink) {
  const float most = max(scores, S, sink ? *sink : -INFINITY);
  if (most == -INFINITY && std::none_of(scores, scores + S, [](float x) { return x != x; })) {
    std::fill(scores, scores + S, 0.0f);
    return 0.0f;
  }
  Vec<float> sums[2] = {};
  for (int64_t s = 0; s < S; s += WIDTH) {
    const Vec<float> vec = exp(load(scores + s) - most);
    store(scores + s, vec);
    sums[s / WIDTH % 2] += vec;
  }
  return 1.0f / (reduce_add(sums[0] + sums[1]) + (sink ? std::exp(*sink - most) : 0.0f));
}

// Turn the scaled products of a row's query and its visible keys into scores.
void to_scores(const Branch& branch, const Group& group, int64_t m, int64_t head, float* scores) {
  const Keys& keys = group.keys;
  const int64_t first = group.first(m), last = group.last(m);
  if (branch.soft_cap > 0) {
    int64_t s = first;
    for (; s + WIDTH <= last; s += WIDTH)
      store(scores + s, branch.soft_cap * tanh(load(scores + s) / branch.soft_cap));
    for (; s < last; ++s) scores[s] = branch.soft_cap * tanh(broadcast(scores[s] / branch.soft_cap))[0];
  }
  if (keys.bias) {
    const int64_t row = keys.is_bias_by_place ? group.place(m) : m;
    const float* bias = keys.bias + row * keys.bias_row_stride + head * keys.bias_head_stride;
    if (!keys.is_bias_by_place) bias += group.first_key;
    for (int64_t s = first; s < last; ++s) scores[s] += bias[s];
  }
  if (keys.mask) {
    const uint8_t* mask = keys.mask + group.number * keys.mask_stride + group.first_key;
    for (int64_t s = first; s < last; ++s) scores[s] = mask[s] ? scores[s] : -INFINITY;
  }
}

// Attend with ROWS rows from row m on, for one head; mixed values overwrite the queries, which are `stride` apart.
// Vectors of scores begin at even multiples of a vector: sums do not depend on the rows that are computed together.
template <typename Real, int ROWS>
void attend_rows(
    const Branch& branch, const Group& group, const Head<Real>& rows, float* query, int64_t stride, int64_t m,
    int64_t head, float* scores) {
  const int64_t E = branch.head_size, first = group.first(m), last = group.last(m + ROWS - 1);
  const int64_t from = first / (2 * WIDTH) * (2 * WIDTH), seen = round_up(last, WIDTH), width = seen - from;
  score<Real, ROWS>(query, stride, rows, E, first, last, branch.score_scale, scores - from, width);
  for (int j = 0; j < ROWS; ++j) {
    float* row = scores + j * width - from;
    to_scores(branch, group, m + j, head, row);
    std::fill(row + from, row + group.first(m + j), -INFINITY);
    std::fill(row + group.last(m + j), row + seen, -INFINITY);
    const float share = softmax(row + from, width, branch.sink ? branch.sink + head : nullptr);
    for (int64_t s = first; s < last; ++s) row[s] *= share * rows.value_scale(s);
  }
  const float* weights = scores - from;
  int64_t e = 0;
  for (; e + VALUES * WIDTH <= E; e += VALUES * WIDTH)
    weigh<Real, ROWS, VALUES>(weights, width, rows, first, last, e, query, stride);
  for (; e + WIDTH <= E; e += WIDTH) weigh<Real, ROWS, 1>(weights, width, rows, first, last, e, query, stride);
  for (; e < E; ++e)
    for (int j = 0; j < ROWS; ++j) {
      float sum = 0;
      for (int64_t s = first; s < last; ++s) sum = multiply_add(weights[j * width + s], to_float(rows.value(s)[e]), sum);
      query[j * stride + e] = sum;
    }
}

}  // namespace
