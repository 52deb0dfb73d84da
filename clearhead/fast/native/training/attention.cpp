// Attention in bfloat16 and its backward pass, one head of a row at a time, so that its data stay in the caches.
//
// Sums, scores and the softmax are float32. The backward pass stores the weights transposed, [keys, queries]. So
// weights and gradients of scores are left operands for the gradients of keys and values, and right ones for those of
// queries. Source: arXiv 2205.14135, algorithm 1 and appendix B.2.
//
// Legend: B batch, H heads, T queries, S keys, E head size; sizes of buffers are multiples of 32.

#include "../gemm/gemm.h"
#include "../vec/random.h"

#ifdef HAS_GEMM

namespace {

// queries of a block in the backward pass; the gradients of scores exist for one block at a time
constexpr int64_t QUERIES = 512;

// Copy the rows of a head to adjacent rows, padded with zeros.
void copy_rows(const uint16_t* from, int64_t token, int64_t rows, int64_t E, int64_t all_rows, int64_t width, uint16_t* to) {
  for (int64_t i = 0; i < all_rows; ++i)
    for (int64_t e = 0; e < width; e += BLOCK) {
      const auto there = __mmask32((uint64_t(1) << (i < rows ? std::min(BLOCK, E - e) : 0)) - 1);
      _mm512_store_si512(to + i * width + e, _mm512_maskz_loadu_epi16(there, from + i * token + e));
    }
}

// Write rows in bfloat16.
void write_rows(const float* from, int64_t stride, int64_t rows, int64_t E, float scale, uint16_t* to, int64_t token) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = from + i * stride;
    uint16_t* out = to + i * token;
    int64_t e = 0;
    for (; e + WIDTH <= E; e += WIDTH) store(out + e, load(row + e) * scale);
    for (; e < E; ++e) out[e] = to_bfloat16(row[e] * scale);
  }
}

// Turn x, whose rows are tiles, into its columns [K, N].
void columns_of_tiles(const uint32_t* tiles, int64_t N, int64_t steps, uint16_t* columns) {
  for (int64_t n = 0; n < N; n += TILE)
    for (int64_t k = 0; k < steps * BLOCK; k += 2, tiles += TILE) {
      const auto words = *reinterpret_cast<const Vec<uint32_t>*>(tiles);
      *reinterpret_cast<Vec<uint16_t>*>(columns + k * N + n) = __builtin_convertvector(words & 0xffffu, Vec<uint16_t>);
      *reinterpret_cast<Vec<uint16_t>*>(columns + (k + 1) * N + n) = __builtin_convertvector(words >> 16, Vec<uint16_t>);
    }
}

// Expand a row of a mask to the addends of its scores, padded with -infinity.
void expand(const uint8_t* mask, int64_t stride, int64_t count, int64_t all, float* hidden) {
  for (int64_t i = 0; i < count; ++i) hidden[i] = mask[i * stride] ? 0.0f : -INFINITY;
  for (int64_t i = count; i < all; ++i) hidden[i] = -INFINITY;
}

// Transpose numbers [count, width], padded with zeros to `all` rows, into [width, all]; the new rows are `room` apart.
void transpose_rows(const float* from, int64_t stride, int64_t count, int64_t all, int64_t width, float* to, int64_t room) {
  alignas(64) float block[TILE_WORDS];
  for (int64_t t = 0; t < all; t += TILE)
    for (int64_t s = 0; s < width; s += TILE) {
      for (int64_t i = 0; i < TILE; ++i)
        store(block + i * TILE, t + i < count ? load(from + (t + i) * stride + s, width - s) : Vec<float>{});
      transpose_tile(reinterpret_cast<const uint32_t*>(block), TILE, reinterpret_cast<uint32_t*>(block));
      for (int64_t i = 0; i < std::min(TILE, width - s); ++i)
        store(to + (s + i) * room + t, load(block + i * TILE), all - t);
    }
}

// Add a bias [count] to the addends from a row of a mask (null: none), in units for powers of 2.
void add_bias(const float* bias, const float* hidden, int64_t count, float* sums) {
  for (int64_t s = 0; s < count; s += WIDTH) {
    const Vec<float> vec = load(bias + s, count - s) * LOG2_E;
    store(sums + s, hidden ? vec + load(hidden + s) : vec);
  }
}

// Dropout of the weights of one head, decided from a weight's query and key and from a seed.
struct Dropout {
  const uint32_t dropped, keys;
  const float kept_scale;
  uint32_t seed[2];

  Dropout(const AttentionCall& call, int64_t b, int64_t h)
      : dropped(uint32_t(call.dropped)), keys(uint32_t(call.S)), kept_scale(call.dropped ? call.kept_scale : 1.0f) {
    const auto head = uint32_t(b * call.H + h);
    for (uint32_t i = 0; i < 2; ++i)
      seed[i] = random_bits(2 * head + i, uint32_t(call.seed[0]), uint32_t(call.seed[1]));
  }

  // Zero the dropped weights of one query and 16 keys.
  Vec<float> drop_keys(Vec<float> weights, int64_t t, int64_t s) const {
    return drop(weights, (Vec<uint32_t>)INDEX + uint32_t(t * keys + s));
  }

  // Zero the dropped weights of 16 queries and one key.
  Vec<float> drop_queries(Vec<float> weights, int64_t t, int64_t s) const {
    return drop(weights, (Vec<uint32_t>)INDEX * keys + uint32_t(t * keys + s));
  }

 private:
  Vec<float> drop(Vec<float> weights, Vec<uint32_t> places) const {
    return select(random_bits(places, seed[0], seed[1]) < dropped, Vec<float>{}, weights);
  }
};

// Turn `all` scores, of which the first `count` may be attended to, into unnormalized weights; return their sum.
// Weights of query t that `dropout` drops become 0, but count in the sum.
float weigh(const float* scores, const float* hidden, int64_t count, int64_t all, float scale, const Dropout& dropout, int64_t t,
            uint16_t* weights, float* log_total) {
  const Vec<float> none = broadcast(-INFINITY);
  const auto score = [&](int64_t s) {
    Vec<float> vec = load(scores + s) * (scale * LOG2_E);
    if (hidden) vec += load(hidden + s);
    return s + WIDTH <= count ? vec : select(INDEX < int32_t(count - s), vec, none);
  };
  Vec<float> most = none, sums = {};
  for (int64_t s = 0; s < count; s += WIDTH) {
    const Vec<float> vec = score(s);
    most = select(vec > most, vec, most);
  }
  const float top = reduce_max(most), base = top == -INFINITY ? 0.0f : top;
  const auto power = [&](int64_t s) { return s < count ? exp2(score(s) - base) : Vec<float>{}; };
  for (int64_t s = 0; s < all; s += BLOCK) {
    Vec<float> low = power(s), high = power(s + WIDTH);
    sums += low + high;
    if (dropout.dropped) low = dropout.drop_keys(low, t, s), high = dropout.drop_keys(high, t, s + WIDTH);
    _mm512_storeu_si512(weights + s, round_pair(low, high));
  }
  const float sum = reduce_add(sums);
  *log_total = sum > 0 ? base / LOG2_E + std::log(sum) : sum == 0 ? INFINITY : sum;
  return sum;
}

void attend(const AttentionCall& call, int64_t b, int64_t h, Arena& arena) {
  const int64_t T = call.T, S = call.S, E = call.E;
  const int64_t all_keys = round_up(S, BLOCK), all_queries = round_up(T, BLOCK), width = round_up(E, BLOCK);
  auto* query = arena.take<uint16_t>(all_queries * width);
  auto* rows = arena.take<uint16_t>(all_keys * width);
  auto* keys = arena.take<uint32_t>(all_keys * width / 2);
  auto* values = arena.take<uint32_t>(all_keys * width / 2);
  auto* scores = arena.take<float>(BLOCK * all_keys);
  auto* weights = arena.take<uint16_t>(BLOCK * all_keys);
  auto* mixed = arena.take<float>(BLOCK * width);
  auto* hidden = arena.take<float>(all_keys);
  auto* added = arena.take<float>(all_keys);
  // products read rows after T, but do not use them
  copy_rows(at(call.query, b, h), call.query.token, T, E, T, width, query);
  copy_rows(at(call.key, b, h), call.key.token, S, E, all_keys, width, rows);
  pack_transposed(rows, all_keys, width, width, keys);
  copy_rows(at(call.value, b, h), call.value.token, S, E, all_keys, width, rows);
  pack(rows, all_keys, width, width, values);
  const uint8_t* mask = call.mask ? call.mask + b * call.mask_batch + h * call.mask_head : nullptr;
  if (mask && !call.mask_query) expand(mask, call.mask_key, S, all_keys, hidden);
  const float* bias = call.bias ? call.bias + b * call.bias_batch + h * call.bias_head : nullptr;
  float* log_totals = call.log_totals + (b * call.H + h) * T;
  const Dropout dropout(call, b, h);
  for (int64_t t = 0; t < T; t += BLOCK) {
    const int64_t seen = call.is_causal ? std::min(t + BLOCK, all_keys) : all_keys, here = std::min(BLOCK, T - t);
    gemm(here, seen, query + t * width, width, keys, width / BLOCK, width / BLOCK, scores, seen, false);
    float sums[BLOCK];
    for (int64_t i = 0; i < here; ++i) {
      if (mask && call.mask_query) expand(mask + (t + i) * call.mask_query, call.mask_key, S, all_keys, hidden);
      const int64_t count = call.is_causal ? std::min(t + i + 1, S) : S;
      const float* extra = mask ? hidden : nullptr;
      if (bias) add_bias(bias + (t + i) * call.bias_query, extra, count, added), extra = added;
      sums[i] = weigh(scores + i * seen, extra, count, seen, call.scale, dropout, t + i, weights + i * seen, log_totals + t + i);
    }
    gemm(here, width, weights, seen, values, all_keys / BLOCK, seen / BLOCK, mixed, width, false);
    for (int64_t i = 0; i < here; ++i)
      write_rows(mixed + i * width, width, 1, E, sums[i] == 0 ? 0.0f : dropout.kept_scale / sums[i],
                 at(call.mixed, b, h) + (t + i) * call.mixed.token, 0);
  }
}

// The backward pass of one head; the pointers are to its rows, and to data computed from them.
class HeadGradient {
 public:
  HeadGradient(const AttentionCall& call, int64_t b, int64_t h, Arena& arena)
      : call_(call), b_(b), h_(h), keys_(round_up(call.S, BLOCK)), width_(round_up(call.E, BLOCK)), arena_(arena),
        most_(std::min(round_up(call.T, BLOCK), QUERIES)), adds_(call.T > QUERIES), dropout_(call, b, h) {}

  void run() {
    key_ = arena_.take<uint16_t>(keys_ * width_);
    value_ = arena_.take<uint16_t>(keys_ * width_);
    key_columns_ = arena_.take<uint16_t>(keys_ * width_);
    key_sums_ = arena_.take<float>(keys_ * width_);
    value_sums_ = arena_.take<float>(keys_ * width_);
    copy_rows(at(call_.key, b_, h_), call_.key.token, call_.S, call_.E, keys_, width_, key_);
    copy_rows(at(call_.value, b_, h_), call_.value.token, call_.S, call_.E, keys_, width_, value_);
    auto* tiles = arena_.take<uint32_t>(keys_ * width_ / 2);
    pack_transposed(key_, keys_, width_, width_, tiles);
    columns_of_tiles(tiles, keys_, width_ / BLOCK, key_columns_);
    if (adds_) std::memset(key_sums_, 0, keys_ * width_ * 4);
    if (adds_) std::memset(value_sums_, 0, keys_ * width_ * 4);
    for (int64_t first = 0; first < call_.T; first += QUERIES) add_queries(first, std::min(QUERIES, call_.T - first));
    write_rows(key_sums_, width_, call_.S, call_.E, call_.scale, at(call_.key_gradient, b_, h_), call_.key_gradient.token);
    write_rows(value_sums_, width_, call_.S, call_.E, dropout_.kept_scale, at(call_.value_gradient, b_, h_), call_.value_gradient.token);
  }

 private:
  // Add the contributions of `count` queries to the gradients of keys and values, and compute the queries' gradients.
  void add_queries(int64_t first, int64_t count) {
    const Arena::Frame frame(arena_);
    const int64_t all = round_up(count, BLOCK), steps = width_ / BLOCK;
    const Heads &from = call_.query, &gradient_from = call_.mixed_gradient;
    auto* query = arena_.take<uint16_t>(most_ * width_);
    auto* gradient = arena_.take<uint16_t>(most_ * width_);
    auto* by_query = arena_.take<uint32_t>(most_ * width_ / 2);
    auto* by_gradient = arena_.take<uint32_t>(most_ * width_ / 2);
    auto* queries = arena_.take<uint32_t>(most_ * width_ / 2);
    auto* gradients = arena_.take<uint32_t>(most_ * width_ / 2);
    auto* scores = arena_.take<float>(BLOCK * most_);
    auto* products = arena_.take<float>(BLOCK * most_);
    weights_ = arena_.take<uint16_t>(BLOCK * most_);
    score_gradients_ = arena_.take<uint16_t>(BLOCK * most_);
    score_tiles_ = arena_.take<uint32_t>(most_ * keys_ / 2);
    hidden_ = arena_.take<float>(2 * most_);
    copy_rows(at(from, b_, h_) + first * from.token, from.token, count, call_.E, all, width_, query);
    copy_rows(at(gradient_from, b_, h_) + first * gradient_from.token, gradient_from.token, count, call_.E, all, width_,
              gradient);
    pack_transposed(query, all, width_, width_, by_query);
    pack_transposed(gradient, all, width_, width_, by_gradient);
    pack(query, all, width_, width_, queries);
    pack(gradient, all, width_, width_, gradients);
    find_shares(first, count, all);
    turn_bias(first, count);
    const int64_t seen = call_.is_causal ? std::min(first + all, keys_) : keys_;
    for (int64_t s = 0; s < seen; s += BLOCK) {
      const int64_t begin = call_.is_causal ? std::max(int64_t(0), s - first) : 0, size = all - begin, skipped = begin / BLOCK;
      const int64_t tiles = begin / TILE * steps * TILE_WORDS, here = std::min(BLOCK, call_.S - s);
      gemm(here, size, key_ + s * width_, width_, by_query + tiles, steps, steps, scores, size, false);
      gemm(here, size, value_ + s * width_, width_, by_gradient + tiles, steps, steps, products, size, false);
      for (int64_t i = 0; i < BLOCK; i += 2) differentiate(first, begin, size, s + i, i, scores, products);
      gemm(here, width_, weights_, size, gradients + skipped * TILE_WORDS, all / BLOCK, size / BLOCK,
           value_sums_ + s * width_, width_, adds_);
      gemm(here, width_, score_gradients_, size, queries + skipped * TILE_WORDS, all / BLOCK, size / BLOCK,
           key_sums_ + s * width_, width_, adds_);
    }
    write_query_gradients(first, count, all);
    if (call_.bias_gradient) {
      float* to = call_.bias_gradient + ((b_ * call_.H + h_) * call_.T + first) * call_.S;
      transpose_rows(bias_gradients_, most_, call_.S, call_.S, count, to, call_.S);
    }
  }

  // Transpose the bias, so that a row belongs to a key, and make room for its gradient.
  void turn_bias(int64_t first, int64_t count) {
    if (!call_.bias) return;
    bias_ = arena_.take<float>(keys_ * most_);
    const float* from = call_.bias + b_ * call_.bias_batch + h_ * call_.bias_head + first * call_.bias_query;
    transpose_rows(from, call_.bias_query, count, round_up(count, BLOCK), call_.S, bias_, most_);
    if (!call_.bias_gradient) return;
    bias_gradients_ = arena_.take<float>(keys_ * most_);
    std::memset(bias_gradients_, 0, keys_ * most_ * 4);
  }

  // Compute the product of each query's output and its gradient, and the log2 of its sum; padding makes weights 0.
  void find_shares(int64_t first, int64_t count, int64_t all) {
    shares_ = arena_.take<float>(2 * most_);
    log_totals_ = shares_ + most_;
    const float* totals = call_.log_totals + (b_ * call_.H + h_) * call_.T + first;
    for (int64_t t = 0; t < all; ++t) {
      shares_[t] = 0;
      log_totals_[t] = t < count ? totals[t] * LOG2_E : INFINITY;
      if (t >= count) continue;
      const uint16_t* mixed = at(call_.mixed, b_, h_) + (first + t) * call_.mixed.token;
      const uint16_t* gradient = at(call_.mixed_gradient, b_, h_) + (first + t) * call_.mixed_gradient.token;
      Vec<float> sums = {};
      int64_t e = 0;
      for (; e + WIDTH <= call_.E; e += WIDTH) sums += load(mixed + e) * load(gradient + e);
      float sum = reduce_add(sums);
      for (; e < call_.E; ++e) sum += to_float(mixed[e]) * to_float(gradient[e]);
      shares_[t] = sum;
    }
  }

  // Turn scores and products of two keys, rows i and i + 1 of a strip, into weights and gradients of scores.
  void differentiate(int64_t first, int64_t begin, int64_t size, int64_t key, int64_t i, const float* scores, const float* products) {
    const float* hidden[2] = {};
    for (int64_t row = 0; row < 2; ++row)
      if (call_.mask && key + row < call_.S) hidden[row] = hidden_queries(first + begin, size, key + row, row);
    const auto differentiated = [&](int64_t row, int64_t t, Vec<float>& weights) {
      const int64_t at = (i + row) * size + t, query = begin + t, place = (key + row) * most_ + query;
      Vec<float> scaled = load(scores + at) * (call_.scale * LOG2_E) - load(log_totals_ + query);
      if (hidden[row]) scaled += load(hidden[row] + t);
      if (call_.bias) scaled += load(bias_ + place) * LOG2_E;
      weights = exp2(scaled);
      if (call_.is_causal && first + query < key + row)
        weights = select(INDEX < int32_t(key + row - first - query), Vec<float>{}, weights);
      Vec<float> product = load(products + at);
      if (dropout_.dropped) product = dropout_.kept_scale * dropout_.drop_queries(product, first + query, key + row);
      const Vec<float> gradients = weights * (product - load(shares_ + query));
      if (dropout_.dropped) weights = dropout_.drop_queries(weights, first + query, key + row);
      if (call_.bias_gradient) store(bias_gradients_ + place, gradients);
      return gradients;
    };
    for (int64_t t = 0; t < size; t += BLOCK) {
      __m512i rounded[2] = {};
      for (int64_t row = 0; row < 2; ++row) {
        Vec<float> weights[2] = {}, gradients[2] = {};
        // Only existing queries and keys.
        for (int64_t side = 0; side < 2 && key + row < call_.S && first + begin + t + side * WIDTH < call_.T; ++side)
          gradients[side] = differentiated(row, t + side * WIDTH, weights[side]);
        rounded[row] = round_pair(gradients[0], gradients[1]);
        _mm512_storeu_si512(weights_ + (i + row) * size + t, round_pair(weights[0], weights[1]));
        _mm512_storeu_si512(score_gradients_ + (i + row) * size + t, rounded[row]);
      }
      const int64_t steps = keys_ / BLOCK;
      uint32_t* line = score_tiles_ + ((begin + t) / TILE * steps + (key - i) / BLOCK) * TILE_WORDS + i / 2 * TILE;
      interleave(rounded[0], rounded[1], line, line + steps * TILE_WORDS);
    }
  }

  // The addends of the mask for the scores of a key; null: none.
  const float* hidden_queries(int64_t first, int64_t size, int64_t key, int64_t row) {
    const uint8_t* mask = call_.mask + b_ * call_.mask_batch + h_ * call_.mask_head + key * call_.mask_key;
    if (!call_.mask_query && *mask) return nullptr;
    float* hidden = hidden_ + row * most_;
    expand(mask + first * call_.mask_query, call_.mask_query, std::min(size, call_.T - first), size, hidden);
    return hidden;
  }

  void write_query_gradients(int64_t first, int64_t count, int64_t all) {
    auto* sums = arena_.take<float>(width_ * BLOCK);
    uint32_t turned[TILE_WORDS];
    for (int64_t t = 0; t < all; t += BLOCK) {
      const int64_t seen = call_.is_causal ? std::min(first + t + BLOCK, keys_) : keys_;
      gemm(width_, BLOCK, key_columns_, keys_, score_tiles_ + t / TILE * (keys_ / BLOCK) * TILE_WORDS, keys_ / BLOCK,
                        seen / BLOCK, sums, BLOCK, false);
      for (int64_t n = t; n < std::min(count, t + BLOCK); n += TILE)
        for (int64_t e = 0; e < call_.E; e += TILE) {
          transpose_tile(reinterpret_cast<const uint32_t*>(sums + e * BLOCK + n - t), BLOCK, turned);
          uint16_t* to = at(call_.query_gradient, b_, h_) + (first + n) * call_.query_gradient.token + e;
          write_rows(reinterpret_cast<const float*>(turned), TILE, std::min(TILE, count - n), std::min(TILE, call_.E - e), call_.scale, to,
                     call_.query_gradient.token);
        }
    }
  }

  const AttentionCall& call_;
  const int64_t b_, h_, keys_, width_;
  Arena& arena_;
  const int64_t most_;
  const bool adds_;  // whether to add to the gradients of keys and values; false for the first queries
  const Dropout dropout_;
  uint16_t *key_, *value_, *key_columns_, *weights_, *score_gradients_;
  uint32_t* score_tiles_;
  float *key_sums_, *value_sums_, *shares_, *log_totals_, *hidden_, *bias_, *bias_gradients_;
};

template <typename Work>
void for_each_head(const AttentionCall& call, int64_t threads, const Work& work) {
  const Workspace workspace(threads);
#pragma omp parallel num_threads(int(threads))
  {
    Arena& arena = workspace[omp_get_thread_num()];
    const TileUse use;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < call.B * call.H; ++task) {
      const Arena::Frame frame(arena);
      work(task / call.H, task % call.H, arena);
    }
  }
}

}  // namespace

KERNEL void attention_forward(const AttentionCall* call, int64_t threads) {
  for_each_head(*call, threads, [&](int64_t b, int64_t h, Arena& arena) { attend(*call, b, h, arena); });
}

KERNEL void attention_backward(const AttentionCall* call, int64_t threads) {
  for_each_head(*call, threads, [&](int64_t b, int64_t h, Arena& arena) { HeadGradient(*call, b, h, arena).run(); });
}

#endif
