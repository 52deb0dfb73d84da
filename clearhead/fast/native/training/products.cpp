// Linear layers with many rows in bfloat16, forward and backward, in squares: y = x w^T + bias.
//
// Layers that read the same rows are computed together. Weights are float32, rounded as they are arranged in tiles, and
// so are their gradients, which are never rounded. A feed-forward network keeps the slopes of its activation, and the
// gradient is multiplied by them while it is in the cache.
//
// Legend: M rows, N outputs, K inputs.

#include <omp.h>

#include "activation.h"
#include "panels.h"

#ifdef SQUARES

namespace {

constexpr long CORNER = 384;  // outputs and inputs of a weight gradient that a thread makes at a time

// b = w, for all parts below one another. By a team, with a barrier.
void arrange_columns(const Columns& columns, uint32_t* tiles, Work& own) {
  const long K = columns.call.K, steps = columns.total / SIDE;
  uint16_t* rounded = own.rounded.numbers<uint16_t>(SIDE * K);
#pragma omp for schedule(static)
  for (long step = 0; step < steps; ++step) {
    long n = step * SIDE;
    const Part& part = columns.part(n);
    for (long i = 0; i < SIDE; ++i) round_row(part, n + i, K, rounded + i * K);
    for (long k = 0; k < K; k += SIDE) {
      uint32_t* to = tiles + (k / TILE * steps + step) * WORDS;
      tiles_of_block(rounded + k, K, SIDE, to, to + steps * WORDS);
    }
  }
}

// 16 sums with what a bias adds to them.
inline Floats biased(const float* sums, const float* bias, long n) {
  return bias ? load_lanes(sums) + load_lanes(bias + n) : load_lanes(sums);
}

// Finish 32 sums of row m from column n of a part on; `other` are those of the layer that is gated.
inline void write_row(const LinearCall& call, const Part& part, const float* sums, const float* other, long m, long n) {
  const long place = m * part.y_stride + n;
  Floats lanes[2] = {biased(sums, part.bias, n), biased(sums + LANES, part.bias, n + LANES)};
  if (call.activation < 0) return store_both(part.y + place, lanes[0], lanes[1]);
  Point found[2] = {point(lanes[0], int32_t(call.activation)), point(lanes[1], int32_t(call.activation))};
  if (other) {
    const Part& up = call.parts[1];
    store_both(up.slope + place, found[0].value, found[1].value);
    for (long i = 0; i < 2; ++i) {
      const Floats inner = biased(other + i * LANES, up.bias, n + i * LANES);
      found[i].value *= inner;
      found[i].slope *= inner;
    }
  }
  store_both(part.slope + place, found[0].slope, found[1].slope);
  store_both(call.result + m * call.result_stride + n, found[0].value, found[1].value);
}

void forward(const LinearCall& call) {
  static Memory arranged;
  const Columns columns(call);
  const long K = call.K, steps = K / SIDE;
  uint32_t* b = arranged.numbers<uint32_t>(columns.total * K / 2);
  const bool is_gated = call.activation >= 0 && call.count == 2;
  const long all = is_gated ? call.parts[0].N : columns.total;
#pragma omp parallel
  {
    static thread_local Work own;
    const TileUse use;
    arrange_rows(columns, b, own);
    const auto arrange = [&](long m, long first, long some, uint32_t* tiles) {
      arrange_block(call.x + m * call.x_stride + first * SIDE, call.x_stride, call.M - m, some * SIDE, 0, some, tiles);
    };
    const auto next = [&](long m, long first) {
      return Ahead{call.x + m * call.x_stride + first * SIDE, call.x_stride, K};
    };
    for_each_strip(call.M, all, steps, own, arrange, next, [&](Strip& strip) {
      float* gates = strip.sums + std::max(strip.width, 2 * SIDE) * SIDE;
      if (is_gated) multiply_strip(strip, b, steps, gates, true, [](long, long, const float*) {});
      const uint32_t* own_b = is_gated ? b + all / TILE * steps * WORDS : b;
      multiply_strip(strip, own_b, steps, strip.sums, false, [&](long j, long at, const float* c) {
        if (strip.m + j >= call.M) return;
        long n = strip.n + at;
        const Part& part = columns.part(n);
        const float* gate = gates + (at + j) * SIDE;
        write_row(call, part, is_gated ? gate : c, is_gated ? c : nullptr, strip.m + j, n);
      });
    });
    _mm_sfence();
  }
}

// 32 numbers of the gradient of x, or those times the slopes.
inline void write_gradients(const LinearCall& call, const float* c, long m, long k) {
  const Floats low = load_lanes(c), high = load_lanes(c + LANES);
  const long place = m * call.result_stride + k;
  if (call.result) store_both(call.result + place, low, high);
  for (long s = 0; s < 2; ++s) {
    if (!call.slopes[s]) continue;
    const uint16_t* slope = call.slopes[s] + place;
    _mm_prefetch(reinterpret_cast<const char*>(slope + 2 * SIDE), _MM_HINT_T0);
    store_both(call.slope_results[s] + place, low * load_lanes(slope), high * load_lanes(slope + LANES));
  }
}

// The gradient of x, by a team: rows of the gradients of all parts times w.
void multiply_rows(const LinearCall& call, const Columns& columns, const uint32_t* b, Work& own) {
  const long steps = columns.total / SIDE;
  const auto arrange = [&](long m, long first, long some, uint32_t* tiles) {
    for (long i = 0, n = 0; i < call.count; n += call.parts[i++].N / SIDE) {
      const Part& part = call.parts[i];
      const long begin = std::max(first, n), end = std::min(first + some, n + part.N / SIDE);
      const uint16_t* rows = part.y + m * part.y_stride + (begin - n) * SIDE;
      if (begin < end)
        arrange_block(rows, part.y_stride, call.M - m, (end - begin) * SIDE, begin - first, some, tiles);
    }
  };
  const auto next = [&](long m, long first) {  // of the first part, beside which the others usually lie
    const Part& part = call.parts[0];
    return Ahead{part.y + m * part.y_stride + first * SIDE, part.y_stride, std::min(part.y_stride, columns.total)};
  };
  for_each_strip(call.M, call.K, steps, own, arrange, next, [&](Strip& strip) {
    multiply_strip(strip, b, steps, strip.sums, false, [&](long j, long at, const float* c) {
      if (strip.m + j < call.M) write_gradients(call, c, strip.m + j, strip.n + at);
    });
  });
  _mm_sfence();
#pragma omp barrier
}

// Tiles of a, whose columns are rows of g, from 32 of these: `width` columns, whose sums are added up if they are wanted.
inline void turn_rows(const uint16_t* g, long stride, long count, long width, uint32_t* tiles, float* column_sums) {
  alignas(64) uint32_t pair[2 * WORDS];
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (long n = 0; n < width; n += SIDE) {
    if (count >= SIDE) tiles_of_block(g + n, stride, SIDE, pair, pair + WORDS);
    else tiles_of_block(g + n, stride, count, pair, pair + WORDS);
    for (long side = 0; side < 2; ++side, tiles += STEPS * WORDS) {
      const uint32_t* tile = pair + side * WORDS;
      turn_tile(tile, TILE, tiles);
      if (!column_sums) continue;
      __m512 sums = _mm512_loadu_ps(column_sums + n + side * TILE);
      for (long i = 0; i < TILE; ++i) sums = _mm512_dpbf16_ps(sums, (__m512bh)_mm512_load_si512(tile + i * TILE), ones);
      _mm512_storeu_ps(column_sums + n + side * TILE, sums);
    }
  }
}

// Write the gradients of the weights of 32 outputs and 32 inputs, or add them.
inline void write_weights(const Part& part, long n, long k, long K, const float* sums) {
  for (long i = 0; i < std::min(SIDE, part.rows - n); ++i)
    for (long j = 0; j < SIDE; j += LANES) {
      float* to = part.weight_gradient + (n + i) * K + k + j;
      const Floats lanes = load_lanes(sums + i * SIDE + j);
      store_lanes(to, part.adds ? load_lanes(to) + lanes : lanes);
    }
}

// The gradients of the weights of some outputs and some inputs: columns of the gradient of y times columns of x, a few
// rows of both at a time. Those of the outputs' biases come with the first inputs.
struct Corner {
  long n, height, k, width;

  void run(const LinearCall& call, const Columns& columns, Work& own) const {
    const long steps = whole_blocks(call.M) / SIDE;
    float* sums = own.sums.numbers<float>(height * (width + 1));
    float* bias_sums = sums + height * width;
    uint32_t* a = own.tiles.numbers<uint32_t>((height + SIDE) * STEPS * TILE);
    uint32_t* b = a + height * STEPS * TILE;
    std::fill(bias_sums, bias_sums + height, 0.0f);
    for (long first = 0; first < steps; first += STEPS) {
      const long here = std::min(STEPS, steps - first);
      for (long step = 0; step < here; ++step) turn(call, columns, first + step, a + step * WORDS, bias_sums);
      Ahead ahead[2] = {next_gradients(call, columns, first + here), next_inputs(call, first + here)};
      for (long at = 0; at < width; at += SIDE) {
        for (long step = 0; step < here; ++step) arrange(call, first + step, k + at, b + step * WORDS);
        for (long row = 0; row < height; row += SIDE) {
          float* c = sums + row * width + at * SIDE;
          const Left left = tiles_of(a + row * STEPS * TILE, STEPS);
          multiply_beside<BFloat16, Passing::LEFT>(left, SIDE, b, STEPS, here, c, SIDE, first > 0, [&](long) {
            ahead[0].fetch((SIDE * SIDE + width - 1) / width);
            ahead[1].fetch((SIDE * SIDE + height - 1) / height);
          });
          if (first + here < steps) continue;
          long place = n + row;
          const Part& part = columns.part(place);
          write_weights(part, place, k + at, call.K, c);
        }
      }
    }
    for (long row = 0; row < height && k == 0; row += TILE) {
      long place = n + row;
      const Part& part = columns.part(place);
      if (part.bias_gradient) store_lanes(part.bias_gradient + place, load_lanes(bias_sums + row));
    }
  }

 private:
  // What the rows of the next steps are.
  Ahead next_gradients(const LinearCall& call, const Columns& columns, long step) const {
    long place = n;
    const Part& part = columns.part(place);
    const uint16_t* row = part.y + step * SIDE * part.y_stride + place;
    return {row, part.y_stride, std::min(height, part.N - place), rows_left(call, step)};
  }

  Ahead next_inputs(const LinearCall& call, long step) const {
    return {call.x + step * SIDE * call.x_stride + k, call.x_stride, width, rows_left(call, step)};
  }

  static long rows_left(const LinearCall& call, long step) {
    return std::max(0L, std::min(STEPS * SIDE, call.M - step * SIDE));
  }

  void turn(const LinearCall& call, const Columns& columns, long step, uint32_t* tiles, float* bias_sums) const {
    for (long row = 0, count; row < height; row += count) {
      long place = n + row;
      const Part& part = columns.part(place);
      count = std::min(height - row, part.N - place);
      float* own_sums = part.bias_gradient && k == 0 ? bias_sums + row : nullptr;
      turn_rows(part.y + step * SIDE * part.y_stride + place, part.y_stride, call.M - step * SIDE, count,
                tiles + row * STEPS * TILE, own_sums);
    }
  }

  // Tiles of b from 32 rows of x, with rows of zeros at the end.
  static void arrange(const LinearCall& call, long step, long column, uint32_t* tiles) {
    const uint16_t* x = call.x + step * SIDE * call.x_stride + column;
    const long count = call.M - step * SIDE;
    if (count >= SIDE) tiles_of_block(x, call.x_stride, SIDE, tiles, tiles + STEPS * WORDS);
    else tiles_of_block(x, call.x_stride, count, tiles, tiles + STEPS * WORDS);
  }
};

// The gradients of weights and biases, by a team.
void multiply_columns(const LinearCall& call, const Columns& columns, Work& own) {
  const long threads = omp_get_num_threads(), total = columns.total;
  const auto pieces_of = [](long size) { return (size + CORNER - 1) / CORNER; };
  long pieces = pieces_of(total);
  const long across = pieces_of(call.K), width = whole_blocks((call.K + across - 1) / across);
  while (pieces * across % threads && pieces * SIDE < total) ++pieces;
  const long height = whole_blocks((total + pieces - 1) / pieces);
#pragma omp for schedule(static)
  for (long task = 0; task < pieces * across; ++task) {
    const long n = task / across * height, k = task % across * width;
    if (n >= total || k >= call.K) continue;
    Corner{n, std::min(height, total - n), k, std::min(width, call.K - k)}.run(call, columns, own);
  }
}

void backward(const LinearCall& call) {
  static Memory arranged;
  const Columns columns(call);
  const bool wants_x = call.result || call.slopes[0], wants_weight = call.parts[0].weight_gradient;
  uint32_t* b = arranged.numbers<uint32_t>(columns.total * call.K / 2);
#pragma omp parallel
  {
    static thread_local Work own;
    const TileUse use;
    if (wants_x) {
      arrange_columns(columns, b, own);
      multiply_rows(call, columns, b, own);
    }
    if (wants_weight) multiply_columns(call, columns, own);
  }
}

}  // namespace

#endif

extern "C" {

void find_squares(long* found) { *found = has_squares(); }

void linear_forward(const LinearCall* call) {
#ifdef SQUARES
  forward(*call);
#endif
}

void linear_backward(const LinearCall* call) {
#ifdef SQUARES
  backward(*call);
#endif
}
}
