// Linear layers with many rows in bfloat16, forward and backward: y = x w^T + bias.
//
// Layers that read the same rows are computed together. Weights are float32 and rounded during packing. Their gradients
// are float32 and never rounded. A feed-forward network stores the derivatives of its activation; the gradient is
// multiplied by them while it is in the cache.
//
// Legend: M rows, N outputs, K inputs.

#include "../describe.h"
#include "panel.h"

#ifdef HAS_GEMM

namespace {

constexpr int64_t GRADIENT_BLOCK = 384;  // outputs and inputs of a weight gradient that a thread computes at a time

// Pack b = w, for all layers one below the other. By a team, with a barrier.
void pack_weights(const Outputs& outputs, uint32_t* tiles, Arena& arena) {
  const int64_t K = outputs.call.K, steps = outputs.count / BLOCK;
  const Arena::Frame frame(arena);
  auto* rounded = arena.take<uint16_t>(BLOCK * K);
#pragma omp for schedule(static)
  for (int64_t step = 0; step < steps; ++step) {
    int64_t n = step * BLOCK;
    const LinearArgs& layer = outputs.layer(n);
    for (int64_t i = 0; i < BLOCK; ++i) round_weights(layer, n + i, K, rounded + i * K);
    for (int64_t k = 0; k < K; k += BLOCK) {
      uint32_t* to = tiles + (k / TILE * steps + step) * TILE_WORDS;
      pack_block(rounded + k, K, BLOCK, to, to + steps * TILE_WORDS);
    }
  }
}

// 16 sums plus their biases.
inline Vec<float> biased(const float* sums, const float* bias, int64_t n) {
  return bias ? load(sums) + load(bias + n) : load(sums);
}

// Finish 32 sums of row m from column n of a layer on; `other` has the sums of the layer multiplied by the gate.
inline void write_row(
    const LinearCall& call, const LinearArgs& layer, const float* sums, const float* other, int64_t m, int64_t n) {
  const int64_t place = m * layer.y_stride + n;
  Vec<float> vec[2] = {biased(sums, layer.bias, n), biased(sums + WIDTH, layer.bias, n + WIDTH)};
  if (call.activation == Activation::NONE) return stream_pair(layer.y + place, vec[0], vec[1]);
  Activated found[2] = {
      activate_with_derivative(vec[0], call.activation), activate_with_derivative(vec[1], call.activation)};
  if (other) {
    const LinearArgs& up = call.layers[1];
    stream_pair(up.derivative + place, found[0].value, found[1].value);
    for (int64_t i = 0; i < 2; ++i) {
      const Vec<float> inner = biased(other + i * WIDTH, up.bias, n + i * WIDTH);
      found[i].value *= inner;
      found[i].derivative *= inner;
    }
  }
  stream_pair(layer.derivative + place, found[0].derivative, found[1].derivative);
  stream_pair(call.result + m * call.result_stride + n, found[0].value, found[1].value);
}

}  // namespace

KERNEL void linear_forward(const LinearCall* of, int64_t threads) {
  const LinearCall& call = *of;
  const Workspace workspace(threads);
  const Outputs outputs(call);
  const int64_t K = call.K, steps = K / BLOCK;
  auto* b = workspace[0].take<uint32_t>(outputs.count * K / 2);
  const bool is_gated = call.activation != Activation::NONE && call.count == 2;
  const int64_t all = is_gated ? call.layers[0].N : outputs.count;
#pragma omp parallel num_threads(int(threads))
  {
    Arena& arena = workspace[omp_get_thread_num()];
    const TileUse use;
    pack_transposed_weights(outputs, b, arena);
    const auto pack = [&](int64_t m, int64_t first, int64_t some, uint32_t* tiles) {
      pack_rows(call.x + m * call.x_stride + first * BLOCK, call.x_stride, call.M - m, some * BLOCK, 0, some, tiles);
    };
    const auto next = [&](int64_t m, int64_t first) {
      return Ahead{call.x + m * call.x_stride + first * BLOCK, call.x_stride, K};
    };
    for_each_panel(call.M, all, steps, arena, pack, next, [&](Panel& panel) {
      float* gates = panel.sums + std::max(panel.width, 2 * BLOCK) * BLOCK;
      if (is_gated) multiply_panel(panel, b, steps, gates, true, [](int64_t, int64_t, const float*) {});
      const uint32_t* own_b = is_gated ? b + all / TILE * steps * TILE_WORDS : b;
      multiply_panel(panel, own_b, steps, panel.sums, false, [&](int64_t j, int64_t at, const float* c) {
        if (panel.m + j >= call.M) return;
        int64_t n = panel.n + at;
        const LinearArgs& layer = outputs.layer(n);
        const float* gate = gates + (at + j) * BLOCK;
        write_row(call, layer, is_gated ? gate : c, is_gated ? c : nullptr, panel.m + j, n);
      });
    });
    stream_fence();
  }
}

namespace {

// Write 32 numbers of the gradient of x, or these times the derivatives.
inline void write_gradients(const LinearCall& call, const float* c, int64_t m, int64_t k) {
  const Vec<float> low = load(c), high = load(c + WIDTH);
  const int64_t place = m * call.result_stride + k;
  if (call.result) stream_pair(call.result + place, low, high);
  for (int64_t s = 0; s < 2; ++s) {
    if (!call.derivatives[s]) continue;
    const uint16_t* derivative = call.derivatives[s] + place;
    _mm_prefetch(reinterpret_cast<const char*>(derivative + 2 * BLOCK), _MM_HINT_T0);
    stream_pair(call.inner_gradients[s] + place, low * load(derivative), high * load(derivative + WIDTH));
  }
}

// Compute the gradient of x: rows of the gradients of all layers times w.
void x_gradient_by_team(const LinearCall& call, const Outputs& outputs, const uint32_t* b, Arena& arena) {
  const int64_t steps = outputs.count / BLOCK;
  const auto pack = [&](int64_t m, int64_t first, int64_t some, uint32_t* tiles) {
    for (int64_t i = 0, n = 0; i < call.count; n += call.layers[i++].N / BLOCK) {
      const LinearArgs& layer = call.layers[i];
      const int64_t begin = std::max(first, n), end = std::min(first + some, n + layer.N / BLOCK);
      const uint16_t* rows = layer.y + m * layer.y_stride + (begin - n) * BLOCK;
      if (begin < end)
        pack_rows(rows, layer.y_stride, call.M - m, (end - begin) * BLOCK, begin - first, some, tiles);
    }
  };
  const auto next = [&](int64_t m, int64_t first) {  // prefetch the first layer; the other layers are usually adjacent
    const LinearArgs& layer = call.layers[0];
    return Ahead{layer.y + m * layer.y_stride + first * BLOCK, layer.y_stride, std::min(layer.y_stride, outputs.count)};
  };
  for_each_panel(call.M, call.K, steps, arena, pack, next, [&](Panel& panel) {
    multiply_panel(panel, b, steps, panel.sums, false, [&](int64_t j, int64_t at, const float* c) {
      if (panel.m + j < call.M) write_gradients(call, c, panel.m + j, panel.n + at);
    });
  });
  stream_fence();
#pragma omp barrier
}

// Pack a, whose columns are 32 rows of g: `width` columns of g, whose sums are computed if needed.
inline void pack_transposed_rows(
    const uint16_t* g, int64_t stride, int64_t count, int64_t width, uint32_t* tiles, float* column_sums) {
  alignas(64) uint32_t pair[2 * TILE_WORDS];
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int64_t n = 0; n < width; n += BLOCK) {
    if (count >= BLOCK) pack_block(g + n, stride, BLOCK, pair, pair + TILE_WORDS);
    else pack_block(g + n, stride, count, pair, pair + TILE_WORDS);
    for (int64_t side = 0; side < 2; ++side, tiles += STEPS * TILE_WORDS) {
      const uint32_t* tile = pair + side * TILE_WORDS;
      transpose_tile(tile, TILE, tiles);
      if (!column_sums) continue;
      __m512 sums = _mm512_loadu_ps(column_sums + n + side * TILE);
      for (int64_t i = 0; i < TILE; ++i) sums = _mm512_dpbf16_ps(sums, (__m512bh)_mm512_load_si512(tile + i * TILE), ones);
      _mm512_storeu_ps(column_sums + n + side * TILE, sums);
    }
  }
}

// Write the gradients of the weights of 32 outputs and 32 inputs, or add them.
inline void write_weights(const LinearArgs& layer, int64_t n, int64_t k, int64_t K, const float* sums) {
  for (int64_t i = 0; i < std::min(BLOCK, layer.rows - n); ++i)
    for (int64_t j = 0; j < BLOCK; j += WIDTH) {
      float* to = layer.weight_gradient + (n + i) * K + k + j;
      const Vec<float> vec = load(sums + i * BLOCK + j);
      store(to, layer.adds ? load(to) + vec : vec);
    }
}

// Gradients of the weights of some outputs and inputs: columns of the gradient of y times columns of x, a few rows of
// both at a time. The first inputs also compute the gradients of the outputs' biases.
struct GradientBlock {
  int64_t n, height, k, width;

  void run(const LinearCall& call, const Outputs& outputs, Arena& arena) const {
    const int64_t steps = round_up(call.M, BLOCK) / BLOCK;
    const Arena::Frame frame(arena);
    auto* sums = arena.take<float>(height * width);
    auto* bias_sums = arena.take<float>(height);
    auto* a = arena.take<uint32_t>(height * STEPS * TILE);
    auto* b = arena.take<uint32_t>(BLOCK * STEPS * TILE);
    std::fill(bias_sums, bias_sums + height, 0.0f);
    for (int64_t first = 0; first < steps; first += STEPS) {
      const int64_t here = std::min(STEPS, steps - first);
      for (int64_t step = 0; step < here; ++step) pack_gradients(call, outputs, first + step, a + step * TILE_WORDS, bias_sums);
      Ahead ahead[2] = {next_gradients(call, outputs, first + here), next_inputs(call, first + here)};
      for (int64_t at = 0; at < width; at += BLOCK) {
        for (int64_t step = 0; step < here; ++step) pack_inputs(call, first + step, k + at, b + step * TILE_WORDS);
        for (int64_t row = 0; row < height; row += BLOCK) {
          float* c = sums + row * width + at * BLOCK;
          const PanelA left = packed_rows(a + row * STEPS * TILE, STEPS);
          multiply_block<BFloat16, Streamed::A>(
              left, BLOCK, {b, STEPS * TILE_WORDS}, here, {c, BLOCK, first > 0}, [&](int64_t) {
                ahead[0].fetch((BLOCK * BLOCK + width - 1) / width);
                ahead[1].fetch((BLOCK * BLOCK + height - 1) / height);
              });
          if (first + here < steps) continue;
          int64_t place = n + row;
          const LinearArgs& layer = outputs.layer(place);
          write_weights(layer, place, k + at, call.K, c);
        }
      }
    }
    for (int64_t row = 0; row < height && k == 0; row += TILE) {
      int64_t place = n + row;
      const LinearArgs& layer = outputs.layer(place);
      if (layer.bias_gradient) store(layer.bias_gradient + place, load(bias_sums + row));
    }
  }

 private:
  // Prefetch the rows of the next steps.
  Ahead next_gradients(const LinearCall& call, const Outputs& outputs, int64_t step) const {
    int64_t place = n;
    const LinearArgs& layer = outputs.layer(place);
    const uint16_t* row = layer.y + step * BLOCK * layer.y_stride + place;
    return {row, layer.y_stride, std::min(height, layer.N - place), rows_left(call, step)};
  }

  Ahead next_inputs(const LinearCall& call, int64_t step) const {
    return {call.x + step * BLOCK * call.x_stride + k, call.x_stride, width, rows_left(call, step)};
  }

  static int64_t rows_left(const LinearCall& call, int64_t step) {
    return std::max(int64_t(0), std::min(STEPS * BLOCK, call.M - step * BLOCK));
  }

  void pack_gradients(
      const LinearCall& call, const Outputs& outputs, int64_t step, uint32_t* tiles, float* bias_sums) const {
    for (int64_t row = 0, count; row < height; row += count) {
      int64_t place = n + row;
      const LinearArgs& layer = outputs.layer(place);
      count = std::min(height - row, layer.N - place);
      float* own_sums = layer.bias_gradient && k == 0 ? bias_sums + row : nullptr;
      pack_transposed_rows(
          layer.y + step * BLOCK * layer.y_stride + place, layer.y_stride, call.M - step * BLOCK, count,
          tiles + row * STEPS * TILE, own_sums);
    }
  }

  // Pack b from 32 rows of x, padded with rows of zeros.
  static void pack_inputs(const LinearCall& call, int64_t step, int64_t column, uint32_t* tiles) {
    const uint16_t* x = call.x + step * BLOCK * call.x_stride + column;
    const int64_t count = call.M - step * BLOCK;
    if (count >= BLOCK) pack_block(x, call.x_stride, BLOCK, tiles, tiles + STEPS * TILE_WORDS);
    else pack_block(x, call.x_stride, count, tiles, tiles + STEPS * TILE_WORDS);
  }
};

// Compute the gradients of weights and biases.
void weight_gradients_by_team(const LinearCall& call, const Outputs& outputs, Arena& arena) {
  const int64_t threads = omp_get_num_threads(), total = outputs.count;
  const auto pieces_of = [](int64_t size) { return (size + GRADIENT_BLOCK - 1) / GRADIENT_BLOCK; };
  int64_t pieces = pieces_of(total);
  const int64_t across = pieces_of(call.K), width = round_up((call.K + across - 1) / across, BLOCK);
  while (pieces * across % threads && pieces * BLOCK < total) ++pieces;
  const int64_t height = round_up((total + pieces - 1) / pieces, BLOCK);
#pragma omp for schedule(static)
  for (int64_t task = 0; task < pieces * across; ++task) {
    const int64_t n = task / across * height, k = task % across * width;
    if (n >= total || k >= call.K) continue;
    GradientBlock{n, std::min(height, total - n), k, std::min(width, call.K - k)}.run(call, outputs, arena);
  }
}

}  // namespace

KERNEL void linear_backward(const LinearCall* of, int64_t threads) {
  const LinearCall& call = *of;
  const Workspace workspace(threads);
  const Outputs outputs(call);
  const bool wants_x = call.result || call.derivatives[0], wants_weight = call.layers[0].weight_gradient;
  auto* b = workspace[0].take<uint32_t>(outputs.count * call.K / 2);
#pragma omp parallel num_threads(int(threads))
  {
    Arena& arena = workspace[omp_get_thread_num()];
    const TileUse use;
    if (wants_x) {
      pack_weights(outputs, b, arena);
      x_gradient_by_team(call, outputs, b, arena);
    }
    if (wants_weight) weight_gradients_by_team(call, outputs, arena);
  }
}

#endif
