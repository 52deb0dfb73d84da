// Linear layers with many rows in bfloat16, forward and backward, on the matrix unit: y = x w^T + bias.
//
// Layers that read the same rows are computed together. Weights are float32, rounded as they are arranged in tiles, and
// so are their gradients, which are never rounded. A feed-forward network keeps the slopes of its activation, and the
// gradient is multiplied by them while it is in the cache.
//
// Legend: M rows, N outputs, K inputs.

#include <omp.h>

#include "activation.h"
#include "panels.h"

#ifdef MATRIX_UNIT

namespace {

constexpr long TASK_COLUMNS = 256;  // of a weight gradient that a thread makes at a time

// b = w, for all parts below one another. By a team, with a barrier.
void arrange_columns(const Columns& columns, uint32_t* tiles, Work& own) {
  const long K = columns.call.K, steps = columns.total / SIDE;
  uint16_t* rounded = own.rounded.numbers<uint16_t>(SIDE * K);
#pragma omp for schedule(static)
  for (long step = 0; step < steps; ++step) {
    long n = step * SIDE;
    const Part& part = columns.part(n);
    for (long i = 0; i < SIDE; ++i) round_row(part, n + i, K, rounded + i * K);
    for (long k = 0; k < K; k += TILE) tile_of_columns(rounded + k, K, SIDE, tiles + (k / TILE * steps + step) * WORDS);
  }
}

inline Floats biased(const float* sums, const float* bias) {
  return bias ? load_lanes(sums) + load_lanes(bias) : load_lanes(sums);
}

// Finish 16 sums of row m and column n of a part; `other` are those of the layer that is gated.
void write_lanes(const LinearCall& call, const Part& part, const float* sums, const float* other, long m, long n) {
  const Floats lanes = biased(sums, part.bias ? part.bias + n : nullptr);
  const long place = m * part.y_stride + n;
  if (call.activation < 0) return store_lanes(part.y + place, lanes);
  Point found = point(lanes, int32_t(call.activation));
  if (other) {
    const Part& up = call.parts[1];
    const Floats inner = biased(other, up.bias ? up.bias + n : nullptr);
    store_lanes(up.slope + place, found.value);
    found.value *= inner;
    found.slope *= inner;
  }
  store_lanes(part.slope + place, found.slope);
  store_lanes(call.result + m * call.result_stride + n, found.value);
}

void forward(const LinearCall& call) {
  static Memory arranged;
  const Columns columns(call);
  const long K = call.K, steps = K / SIDE;
  uint32_t* b = arranged.numbers<uint32_t>(columns.total * K / 2);
  const bool is_gated = call.activation >= 0 && call.count == 2;
  const long end = is_gated ? call.parts[0].N : columns.total;
#pragma omp parallel
  {
    static thread_local Work own;
    const TileUse use;
    arrange_rows(columns, b, own);
    const long panel_size = panel_rows(call.M, K, omp_get_num_threads());
    float* sums = own.sums.numbers<float>(panel_size * SIDE * 2);
    uint16_t* tail = own.tail.numbers<uint16_t>(SIDE * K);
#pragma omp for schedule(static)
    for (long first = 0; first < call.M; first += panel_size) {
      const long count = std::min(panel_size, call.M - first);
      const Panel panel = panel_of(call.x + first * call.x_stride, call.x_stride, count, K, tail);
      for (long at = 0; at < end; at += SIDE) {
        long n = at;
        const Part& part = columns.part(n);
        const auto write = [&](long m, const float* c, const float* other) {
          for (long j = 0; j < std::min(SIDE, count - m); ++j)
            for (long i = 0; i < SIDE; i += LANES)
              write_lanes(call, part, c + j * SIDE + i, other ? other + j * SIDE + i : nullptr, first + m + j, n + i);
        };
        const uint32_t* own_b = b + at / TILE * steps * WORDS;
        if (!is_gated) {
          multiply_panel(panel, count, K, own_b, steps, sums, false, false,
                         [&](long m, float* c) { write(m, c, nullptr); });
          continue;
        }
        float* gates = sums + panel_size * SIDE;
        multiply_panel(panel, count, K, own_b, steps, gates, true, false, [](long, float*) {});
        multiply_panel(panel, count, K, own_b + end / TILE * steps * WORDS, steps, sums, false, false,
                       [&](long m, float* c) { write(m, gates + m * SIDE, c); });
      }
    }
  }
}

// The gradient of x, by a team: rows of the gradients of all parts times w.
void multiply_rows(const LinearCall& call, const uint32_t* b, long b_steps, Work& own) {
  long total = 0;
  for (long i = 0; i < call.count; ++i) total += call.parts[i].N;
  const long panel_size = panel_rows(call.M, total, omp_get_num_threads()), K = call.K;
  float* sums = own.sums.numbers<float>(panel_size * SIDE);
  uint16_t* tails = own.tail.numbers<uint16_t>(SIDE * total);
#pragma omp for schedule(static)
  for (long first = 0; first < call.M; first += panel_size) {
    const long count = std::min(panel_size, call.M - first);
    Panel panels[3];
    uint16_t* tail = tails;
    for (long i = 0; i < call.count; tail += SIDE * call.parts[i++].N)
      panels[i] = panel_of(call.parts[i].y + first * call.parts[i].y_stride, call.parts[i].y_stride, count,
                           call.parts[i].N, tail);
    for (long k = 0; k < K; k += SIDE) {
      const uint32_t* tiles = b + k / TILE * b_steps * WORDS;
      const auto write = [&](long m, const float* c) {
        for (long j = 0; j < std::min(SIDE, count - m); ++j)
          for (long i = 0; i < SIDE; i += LANES) {
            const Floats lanes = load_lanes(c + j * SIDE + i);
            const long place = (first + m + j) * call.result_stride + k + i;
            if (call.result) store_lanes(call.result + place, lanes);
            for (long s = 0; s < 2; ++s)
              if (call.slopes[s]) store_lanes(call.slope_results[s] + place, lanes * load_lanes(call.slopes[s] + place));
          }
      };
      for (long i = 0; i < call.count; tiles += call.parts[i++].N / SIDE * WORDS)
        multiply_panel(panels[i], count, call.parts[i].N, tiles, b_steps, sums, call.count > 1, i > 0,
                       [&](long m, float* c) {
                         if (i + 1 == call.count) write(m, c);
                       });
    }
  }
}

// Tiles of b from the rows of x, with rows of zeros at the end. By a team, with a barrier.
void arrange_inputs(const LinearCall& call, uint32_t* tiles, long steps) {
#pragma omp for schedule(static)
  for (long step = 0; step < steps; ++step) {
    const uint16_t* x = call.x + step * SIDE * call.x_stride;
    const long count = std::min(SIDE, call.M - step * SIDE);
    for (long k = 0; k < call.K; k += TILE) {
      uint32_t* to = tiles + (k / TILE * steps + step) * WORDS;
      if (count == SIDE) tile_of_columns(x + k, call.x_stride, SIDE, to);
      else tile_of_columns(x + k, call.x_stride, count, to);
    }
  }
}

// Tiles of a from 16 columns of rows of g, which are rows of a; their sums are added up.
void turn_columns(const uint16_t* g, long stride, long M, long steps, uint32_t* tiles, float* column_sums) {
  Floats sums = load_lanes(column_sums);
  uint32_t tile[WORDS];
  for (long step = 0; step < steps; ++step) {
    const long count = std::min(SIDE, M - step * SIDE);
    const uint16_t* from = g + step * SIDE * stride;
    if (count == SIDE) tile_of_columns(from, stride, SIDE, tile);
    else tile_of_columns(from, stride, count, tile);
    for (long i = 0; i < TILE; ++i) {
      const Bits pair = load_bits(tile + i * TILE);
      sums += low_half(pair) + high_half(pair);
    }
    turn_tile(tile, TILE, tiles + step * WORDS);
  }
  store_lanes(column_sums, sums);
}

// Write the gradients of the weights of 32 outputs and 32 inputs, or add them.
void write_weights(const Part& part, long n, long k, long K, const float* sums) {
  for (long i = 0; i < std::min(SIDE, part.rows - n); ++i)
    for (long j = 0; j < SIDE; j += LANES) {
      float* to = part.weight_gradient + (n + i) * K + k + j;
      const Floats lanes = load_lanes(sums + i * SIDE + j);
      store_lanes(to, part.adds ? load_lanes(to) + lanes : lanes);
    }
}

// The gradients of weights and biases, by a team: columns of the gradients of all parts times x.
void multiply_columns(const LinearCall& call, const Columns& columns, const uint32_t* b, long steps, Work& own) {
  const long threads = omp_get_num_threads(), K = call.K;
  const long least = (columns.total + TASK_COLUMNS - 1) / TASK_COLUMNS, tasks = (least + threads - 1) / threads * threads;
  const long width = whole_blocks((columns.total + tasks - 1) / tasks);
  float* sums = own.sums.numbers<float>(width * K);
  uint32_t* tiles = own.tiles.numbers<uint32_t>(width * STEPS * TILE);
  float bias_sums[2 * TASK_COLUMNS];
#pragma omp for schedule(static)
  for (long first = 0; first < columns.total; first += width) {
    const long count = std::min(width, columns.total - first);
    std::fill(bias_sums, bias_sums + count, 0.0f);
    for (long step = 0; step < steps; step += STEPS) {
      const long here = std::min(STEPS, steps - step);
      for (long at = 0; at < count; at += TILE) {
        long n = first + at;
        const Part& part = columns.part(n);
        turn_columns(part.y + step * SIDE * part.y_stride + n, part.y_stride, call.M - step * SIDE, here,
                     tiles + at * STEPS * TILE, bias_sums + at);
      }
      for (long k = 0; k < K; k += SIDE)
        for (long at = 0; at < count; at += SIDE) {
          float* c = sums + at * K + k * SIDE;
          multiply(tiles_of(tiles + at * STEPS * TILE, STEPS), b + (k / TILE * steps + step) * WORDS, steps, here, c, SIDE,
                   step > 0);
          if (step + here < steps) continue;
          long n = first + at;
          const Part& part = columns.part(n);
          write_weights(part, n, k, K, c);
        }
    }
    for (long at = 0; at < count; at += TILE) {
      long n = first + at;
      const Part& part = columns.part(n);
      if (part.bias_gradient) store_lanes(part.bias_gradient + n, load_lanes(bias_sums + at));
    }
  }
}

void backward(const LinearCall& call) {
  static Memory arranged;
  const Columns columns(call);
  const long weight_steps = columns.total / SIDE, steps = whole_blocks(call.M) / SIDE;
  const bool wants_x = call.result || call.slopes[0], wants_weight = call.parts[0].weight_gradient;
  uint32_t* b = arranged.numbers<uint32_t>(std::max(columns.total, whole_blocks(call.M)) * call.K / 2);
#pragma omp parallel
  {
    static thread_local Work own;
    const TileUse use;
    if (wants_x) {
      arrange_columns(columns, b, own);
      multiply_rows(call, b, weight_steps, own);
    }
    if (wants_weight) {
      arrange_inputs(call, b, steps);
      multiply_columns(call, columns, b, steps, own);
    }
  }
}

}  // namespace

#endif

extern "C" {

void find_matrix_unit(long* found) { *found = permit_tiles(); }

void linear_forward(const LinearCall* call) {
#ifdef MATRIX_UNIT
  forward(*call);
#endif
}

void linear_backward(const LinearCall* call) {
#ifdef MATRIX_UNIT
  backward(*call);
#endif
}
}
