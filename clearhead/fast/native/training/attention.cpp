// Attention in bfloat16 and its backward pass, a head of a row at a time: what belongs to one stays in the caches.
//
// Sums, scores and the softmax are float32. The backward pass has the weights turned, [keys, queries]: then they and
// the gradients of the scores are left operands where keys and values get theirs, and right ones where queries do.
// Source: arXiv 2205.14135, algorithm 1 and appendix B.2.
//
// Legend: B batch, H heads, T queries, S keys, E head size; the sizes of what is kept here are multiples of 32.

#include <cmath>

#include "calls.h"
#include "partial.h"
#include "tiles.h"

#ifdef SQUARES

namespace {

constexpr long QUERIES = 512;  // of a block of the backward pass, whose gradients of scores exist at a time

// Rows of a head, side by side and filled up with zeros.
void copy_rows(const uint16_t* from, long token, long rows, long E, long all_rows, long width, uint16_t* to) {
  for (long i = 0; i < all_rows; ++i) {
    uint16_t* row = to + i * width;
    const long count = i < rows ? E : 0;
    if (count) std::memcpy(row, from + i * token, count * 2);
    std::memset(row + count, 0, (width - count) * 2);
  }
}

// Write rows in bfloat16.
void write_rows(const float* from, long stride, long rows, long E, float scale, uint16_t* to, long token) {
  for (long i = 0; i < rows; ++i) {
    const float* row = from + i * stride;
    uint16_t* out = to + i * token;
    long e = 0;
    for (; e + LANES <= E; e += LANES) store_lanes(out + e, load_lanes(row + e) * scale);
    for (; e < E; ++e) out[e] = to_half(row[e] * scale);
  }
}

// Turn x, whose rows became tiles, into its columns [K, N].
void columns_of_tiles(const uint32_t* tiles, long N, long steps, uint16_t* columns) {
  for (long n = 0; n < N; n += TILE)
    for (long k = 0; k < steps * SIDE; k += 2, tiles += TILE) {
      const Bits words = load_bits(tiles);
      *reinterpret_cast<Halves*>(columns + k * N + n) = __builtin_convertvector(words & 0xffffu, Halves);
      *reinterpret_cast<Halves*>(columns + (k + 1) * N + n) = __builtin_convertvector(words >> 16, Halves);
    }
}

// What a row of a mask adds to its scores, filled up with -infinity.
void expand(const uint8_t* mask, long stride, long count, long all, float* hidden) {
  for (long i = 0; i < count; ++i) hidden[i] = mask[i * stride] ? 0.0f : -INFINITY;
  for (long i = count; i < all; ++i) hidden[i] = -INFINITY;
}

// Numbers [count, width], filled up with zeros to `all` rows, turned: [width, all], where rows lie `room` apart.
void turn_rows(const float* from, long stride, long count, long all, long width, float* to, long room) {
  alignas(64) float block[WORDS];
  for (long t = 0; t < all; t += TILE)
    for (long s = 0; s < width; s += TILE) {
      for (long i = 0; i < TILE; ++i)
        store_lanes(block + i * TILE, t + i < count ? load_some(from + (t + i) * stride + s, width - s) : Floats{});
      turn_tile(reinterpret_cast<const uint32_t*>(block), TILE, reinterpret_cast<uint32_t*>(block));
      for (long i = 0; i < std::min(TILE, width - s); ++i)
        store_some(to + (s + i) * room + t, load_lanes(block + i * TILE), all - t);
    }
}

// Add a bias [count] to what a row of a mask adds (null: nothing), for powers of 2.
void add_bias(const float* bias, const float* hidden, long count, float* sums) {
  for (long s = 0; s < count; s += LANES) {
    const Floats lanes = load_some(bias + s, count - s) * LOG2_E;
    store_lanes(sums + s, hidden ? lanes + load_lanes(hidden + s) : lanes);
  }
}

const Floats ORDER = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Turn `all` scores, of which the first `count` may be attended to, into weights times their sum, which is returned.
float weigh(const float* scores, const float* hidden, long count, long all, float scale, uint16_t* weights, float* log_total) {
  const Floats none = spread(-INFINITY);
  const auto score = [&](long s) {
    Floats lanes = load_lanes(scores + s) * (scale * LOG2_E);
    if (hidden) lanes += load_lanes(hidden + s);
    return s + LANES <= count ? lanes : where(ORDER < float(count - s), lanes, none);
  };
  Floats most = none, sums = {};
  for (long s = 0; s < count; s += LANES) {
    const Floats lanes = score(s);
    most = where(lanes > most, lanes, most);
  }
  const float top = _mm512_reduce_max_ps((__m512)most), base = top == -INFINITY ? 0.0f : top;
  const auto power = [&](long s) { return s < count ? power_of_two(score(s) - base) : Floats{}; };
  for (long s = 0; s < all; s += SIDE) {
    const Floats low = power(s), high = power(s + LANES);
    sums += low + high;
    _mm512_storeu_si512(weights + s, rounded_both(low, high));
  }
  const float sum = total(sums);
  *log_total = sum > 0 ? base / LOG2_E + std::log(sum) : sum == 0 ? INFINITY : sum;
  return sum;
}

struct Forward {  // the memory of a thread
  Memory query, key, value, key_tiles, value_tiles, scores, weights, mixed, hidden, added;
};

void attend(const AttentionCall& call, long b, long h, Forward& own) {
  const long T = call.T, S = call.S, E = call.E;
  const long all_keys = whole_blocks(S), all_queries = whole_blocks(T), width = whole_blocks(E);
  uint16_t* query = own.query.numbers<uint16_t>(all_queries * width);
  uint16_t* rows = own.key.numbers<uint16_t>(all_keys * width);
  uint32_t* keys = own.key_tiles.numbers<uint32_t>(all_keys * width / 2);
  uint32_t* values = own.value_tiles.numbers<uint32_t>(all_keys * width / 2);
  float* scores = own.scores.numbers<float>(SIDE * all_keys);
  uint16_t* weights = own.weights.numbers<uint16_t>(SIDE * all_keys);
  float* mixed = own.mixed.numbers<float>(SIDE * width);
  float* hidden = own.hidden.numbers<float>(all_keys);
  float* added = own.added.numbers<float>(all_keys);
  copy_rows(call.query.at(b, h), call.query.token, T, E, all_queries, width, query);
  copy_rows(call.key.at(b, h), call.key.token, S, E, all_keys, width, rows);
  tiles_of_rows(rows, all_keys, width, width, keys);
  copy_rows(call.value.at(b, h), call.value.token, S, E, all_keys, width, rows);
  tiles_of_columns(rows, all_keys, width, width, values);
  const uint8_t* mask = call.mask ? call.mask + b * call.mask_batch + h * call.mask_head : nullptr;
  if (mask && !call.mask_query) expand(mask, call.mask_key, S, all_keys, hidden);
  const float* bias = call.bias ? call.bias + b * call.bias_batch + h * call.bias_head : nullptr;
  float* log_totals = call.log_totals + (b * call.H + h) * T;
  for (long t = 0; t < T; t += SIDE) {
    const long seen = call.is_causal ? std::min(t + SIDE, all_keys) : all_keys;
    multiply_matrices(SIDE, seen, query + t * width, width, keys, width / SIDE, width / SIDE, scores, seen, false);
    float sums[SIDE];
    for (long i = 0; i < SIDE; ++i) {
      if (t + i >= T) {
        std::memset(weights + i * seen, 0, seen * 2);
        continue;
      }
      if (mask && call.mask_query) expand(mask + (t + i) * call.mask_query, call.mask_key, S, all_keys, hidden);
      const long count = call.is_causal ? std::min(t + i + 1, S) : S;
      const float* extra = mask ? hidden : nullptr;
      if (bias) add_bias(bias + (t + i) * call.bias_query, extra, count, added), extra = added;
      sums[i] = weigh(scores + i * seen, extra, count, seen, call.scale, weights + i * seen, log_totals + t + i);
    }
    multiply_matrices(SIDE, width, weights, seen, values, all_keys / SIDE, seen / SIDE, mixed, width, false);
    for (long i = 0; i < std::min(SIDE, T - t); ++i)
      write_rows(mixed + i * width, width, 1, E, sums[i] == 0 ? 0.0f : 1.0f / sums[i],
                 call.mixed.at(b, h) + (t + i) * call.mixed.token, 0);
  }
}

struct Backward {  // the memory of a thread
  Memory query, gradient, key, value, key_tiles, key_columns, by_query, by_gradient, query_tiles, gradient_tiles, scores, products,
      weights, score_gradients, score_tiles, key_sums, value_sums, query_sums, shares, hidden, bias, bias_gradients;
};

// One head; the pointers are to rows of it, and to what is made of them.
class HeadGradient {
 public:
  HeadGradient(const AttentionCall& call, long b, long h, Backward& own)
      : call_(call), b_(b), h_(h), keys_(whole_blocks(call.S)), width_(whole_blocks(call.E)), own_(own),
        most_(std::min(whole_blocks(call.T), QUERIES)) {}

  void run() {
    key_ = own_.key.numbers<uint16_t>(keys_ * width_);
    value_ = own_.value.numbers<uint16_t>(keys_ * width_);
    key_columns_ = own_.key_columns.numbers<uint16_t>(keys_ * width_);
    key_sums_ = own_.key_sums.numbers<float>(keys_ * width_);
    value_sums_ = own_.value_sums.numbers<float>(keys_ * width_);
    copy_rows(call_.key.at(b_, h_), call_.key.token, call_.S, call_.E, keys_, width_, key_);
    copy_rows(call_.value.at(b_, h_), call_.value.token, call_.S, call_.E, keys_, width_, value_);
    uint32_t* tiles = own_.key_tiles.numbers<uint32_t>(keys_ * width_ / 2);
    tiles_of_rows(key_, keys_, width_, width_, tiles);
    columns_of_tiles(tiles, keys_, width_ / SIDE, key_columns_);
    std::memset(key_sums_, 0, keys_ * width_ * 4);
    std::memset(value_sums_, 0, keys_ * width_ * 4);
    for (long first = 0; first < call_.T; first += QUERIES) add_queries(first, std::min(QUERIES, call_.T - first));
    write_rows(key_sums_, width_, call_.S, call_.E, call_.scale, call_.key_gradient.at(b_, h_), call_.key_gradient.token);
    write_rows(value_sums_, width_, call_.S, call_.E, 1, call_.value_gradient.at(b_, h_), call_.value_gradient.token);
  }

 private:
  // What `count` queries from the first one on add to the gradients of keys and values, and their own gradients.
  void add_queries(long first, long count) {
    const long all = whole_blocks(count), steps = width_ / SIDE;
    const Heads &from = call_.query, &gradient_from = call_.mixed_gradient;
    uint16_t* query = own_.query.numbers<uint16_t>(most_ * width_);
    uint16_t* gradient = own_.gradient.numbers<uint16_t>(most_ * width_);
    uint32_t* by_query = own_.by_query.numbers<uint32_t>(most_ * width_ / 2);
    uint32_t* by_gradient = own_.by_gradient.numbers<uint32_t>(most_ * width_ / 2);
    uint32_t* queries = own_.query_tiles.numbers<uint32_t>(most_ * width_ / 2);
    uint32_t* gradients = own_.gradient_tiles.numbers<uint32_t>(most_ * width_ / 2);
    float* scores = own_.scores.numbers<float>(SIDE * most_);
    float* products = own_.products.numbers<float>(SIDE * most_);
    weights_ = own_.weights.numbers<uint16_t>(SIDE * most_);
    score_gradients_ = own_.score_gradients.numbers<uint16_t>(SIDE * most_);
    score_tiles_ = own_.score_tiles.numbers<uint32_t>(most_ * keys_ / 2);
    hidden_ = own_.hidden.numbers<float>(2 * most_);
    copy_rows(from.at(b_, h_) + first * from.token, from.token, count, call_.E, all, width_, query);
    copy_rows(gradient_from.at(b_, h_) + first * gradient_from.token, gradient_from.token, count, call_.E, all, width_,
              gradient);
    tiles_of_rows(query, all, width_, width_, by_query);
    tiles_of_rows(gradient, all, width_, width_, by_gradient);
    tiles_of_columns(query, all, width_, width_, queries);
    tiles_of_columns(gradient, all, width_, width_, gradients);
    find_shares(first, count, all);
    turn_bias(first, count);
    const long seen = call_.is_causal ? std::min(first + all, keys_) : keys_;
    for (long s = 0; s < seen; s += SIDE) {
      const long begin = call_.is_causal ? std::max(0L, s - first) : 0, size = all - begin, skipped = begin / SIDE;
      const long tiles = begin / TILE * steps * WORDS;
      multiply_matrices(SIDE, size, key_ + s * width_, width_, by_query + tiles, steps, steps, scores, size, false);
      multiply_matrices(SIDE, size, value_ + s * width_, width_, by_gradient + tiles, steps, steps, products, size, false);
      for (long i = 0; i < SIDE; i += 2) differentiate(first, begin, size, s + i, i, scores, products);
      multiply_matrices(SIDE, width_, weights_, size, gradients + skipped * WORDS, all / SIDE, size / SIDE,
                        value_sums_ + s * width_, width_, true);
      multiply_matrices(SIDE, width_, score_gradients_, size, queries + skipped * WORDS, all / SIDE, size / SIDE,
                        key_sums_ + s * width_, width_, true);
    }
    write_query_gradients(first, count, all);
    if (call_.bias_gradient) {
      float* to = call_.bias_gradient + ((b_ * call_.H + h_) * call_.T + first) * call_.S;
      turn_rows(bias_gradients_, most_, call_.S, call_.S, count, to, call_.S);
    }
  }

  // The bias by key, and room for its gradient.
  void turn_bias(long first, long count) {
    if (!call_.bias) return;
    bias_ = own_.bias.numbers<float>(keys_ * most_);
    const float* from = call_.bias + b_ * call_.bias_batch + h_ * call_.bias_head + first * call_.bias_query;
    turn_rows(from, call_.bias_query, count, whole_blocks(count), call_.S, bias_, most_);
    if (!call_.bias_gradient) return;
    bias_gradients_ = own_.bias_gradients.numbers<float>(keys_ * most_);
    std::memset(bias_gradients_, 0, keys_ * most_ * 4);
  }

  // The product of each query's output and its gradient, and the log2 of its sum, filled up so that weights are 0.
  void find_shares(long first, long count, long all) {
    shares_ = own_.shares.numbers<float>(2 * most_);
    log_totals_ = shares_ + most_;
    const float* totals = call_.log_totals + (b_ * call_.H + h_) * call_.T + first;
    for (long t = 0; t < all; ++t) {
      shares_[t] = 0;
      log_totals_[t] = t < count ? totals[t] * LOG2_E : INFINITY;
      if (t >= count) continue;
      const uint16_t* mixed = call_.mixed.at(b_, h_) + (first + t) * call_.mixed.token;
      const uint16_t* gradient = call_.mixed_gradient.at(b_, h_) + (first + t) * call_.mixed_gradient.token;
      Floats sums = {};
      long e = 0;
      for (; e + LANES <= call_.E; e += LANES) sums += load_lanes(mixed + e) * load_lanes(gradient + e);
      float sum = total(sums);
      for (; e < call_.E; ++e) sum += to_float(mixed[e]) * to_float(gradient[e]);
      shares_[t] = sum;
    }
  }

  // Turn scores and products of two keys, rows i and i + 1 of a strip, into weights and gradients of scores.
  void differentiate(long first, long begin, long size, long key, long i, const float* scores, const float* products) {
    const float* hidden[2] = {};
    for (long row = 0; row < 2; ++row)
      if (call_.mask && key + row < call_.S) hidden[row] = hidden_queries(first + begin, size, key + row, row);
    const auto differentiated = [&](long row, long t, Floats& weights) {
      const long at = (i + row) * size + t, query = begin + t, place = (key + row) * most_ + query;
      Floats scaled = load_lanes(scores + at) * (call_.scale * LOG2_E) - load_lanes(log_totals_ + query);
      if (hidden[row]) scaled += load_lanes(hidden[row] + t);
      if (call_.bias) scaled += load_lanes(bias_ + place) * LOG2_E;
      weights = power_of_two(scaled);
      if (call_.is_causal && first + query < key + row)
        weights = where(ORDER + float(first + query) < float(key + row), Floats{}, weights);
      const Floats gradients = weights * (load_lanes(products + at) - load_lanes(shares_ + query));
      if (call_.bias_gradient) store_lanes(bias_gradients_ + place, gradients);
      return gradients;
    };
    for (long t = 0; t < size; t += SIDE) {
      __m512i rounded[2] = {};
      for (long row = 0; row < 2; ++row) {
        Floats weights[2] = {}, gradients[2] = {};
        for (long side = 0; side < 2 && key + row < call_.S; ++side)
          gradients[side] = differentiated(row, t + side * LANES, weights[side]);
        rounded[row] = rounded_both(gradients[0], gradients[1]);
        _mm512_storeu_si512(weights_ + (i + row) * size + t, rounded_both(weights[0], weights[1]));
        _mm512_storeu_si512(score_gradients_ + (i + row) * size + t, rounded[row]);
      }
      const long steps = keys_ / SIDE;
      uint32_t* line = score_tiles_ + ((begin + t) / TILE * steps + (key - i) / SIDE) * WORDS + i / 2 * TILE;
      interleave(rounded[0], rounded[1], line, line + steps * WORDS);
    }
  }

  // What the mask adds to the scores of a key; null: nothing.
  const float* hidden_queries(long first, long size, long key, long row) {
    const uint8_t* mask = call_.mask + b_ * call_.mask_batch + h_ * call_.mask_head + key * call_.mask_key;
    if (!call_.mask_query && *mask) return nullptr;
    float* hidden = hidden_ + row * most_;
    expand(mask + first * call_.mask_query, call_.mask_query, std::min(size, call_.T - first), size, hidden);
    return hidden;
  }

  void write_query_gradients(long first, long count, long all) {
    float* sums = own_.query_sums.numbers<float>(width_ * SIDE);
    uint32_t turned[WORDS];
    for (long t = 0; t < all; t += SIDE) {
      const long seen = call_.is_causal ? std::min(first + t + SIDE, keys_) : keys_;
      multiply_matrices(width_, SIDE, key_columns_, keys_, score_tiles_ + t / TILE * (keys_ / SIDE) * WORDS, keys_ / SIDE,
                        seen / SIDE, sums, SIDE, false);
      for (long n = t; n < std::min(count, t + SIDE); n += TILE)
        for (long e = 0; e < call_.E; e += TILE) {
          turn_tile(reinterpret_cast<const uint32_t*>(sums + e * SIDE + n - t), SIDE, turned);
          uint16_t* to = call_.query_gradient.at(b_, h_) + (first + n) * call_.query_gradient.token + e;
          write_rows(reinterpret_cast<const float*>(turned), TILE, std::min(TILE, count - n), std::min(TILE, call_.E - e), call_.scale, to,
                     call_.query_gradient.token);
        }
    }
  }

  const AttentionCall& call_;
  const long b_, h_, keys_, width_;
  Backward& own_;
  const long most_;
  uint16_t *key_, *value_, *key_columns_, *weights_, *score_gradients_;
  uint32_t* score_tiles_;
  float *key_sums_, *value_sums_, *shares_, *log_totals_, *hidden_, *bias_, *bias_gradients_;
};

template <typename Own, typename Work>
void for_each_head(const AttentionCall& call, const Work& work) {
#pragma omp parallel
  {
    static thread_local Own own;
    const TileUse use;
#pragma omp for schedule(static)
    for (long task = 0; task < call.B * call.H; ++task) work(task / call.H, task % call.H, own);
  }
}

}  // namespace

#endif

extern "C" {

void attention_forward(const AttentionCall* call) {
#ifdef SQUARES
  for_each_head<Forward>(*call, [&](long b, long h, Forward& own) { attend(*call, b, h, own); });
#endif
}

void attention_backward(const AttentionCall* call) {
#ifdef SQUARES
  for_each_head<Backward>(*call, [&](long b, long h, Backward& own) { HeadGradient(*call, b, h, own).run(); });
#endif
}
}
