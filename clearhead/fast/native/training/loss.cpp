// Cross-entropy of a linear layer in bfloat16. Logits become exponentials while they are in the first cache; none is
// stored in float32.

#include "panel.h"

#ifdef HAS_GEMM

namespace {

// State of a row.
struct Row {
  Vec<float> state;  // the highest logits, or the sums of exponentials
  float shift, label_logit;
};

// Multiply all rows with all columns, by a team. One thread at a time calls `use(m, n, logits, count)` with 16 logits
// of a row; `count` of them exist.
template <typename Use>
void pass(const LossCall& call, const uint32_t* b, Arena& arena, const Use& use) {
  const int64_t steps = call.D / BLOCK;
  const auto pack = [&](int64_t m, int64_t first, int64_t some, uint32_t* tiles) {
    pack_rows(call.x + m * call.x_stride + first * BLOCK, call.x_stride, call.N - m, some * BLOCK, 0, some, tiles);
  };
  const auto next = [&](int64_t m, int64_t first) {
    return Ahead{call.x + m * call.x_stride + first * BLOCK, call.x_stride, call.D};
  };
  for_each_panel(call.N, round_up(call.V, BLOCK), steps, arena, pack, next, [&](Panel& panel) {
    multiply_panel(panel, b, steps, panel.sums, false, [&](int64_t j, int64_t at, const float* c) {
      const int64_t m = panel.m + j, n = panel.n + at;
      if (m >= call.N) return;
      for (int64_t i = 0; i < BLOCK; i += WIDTH) use(m, n + i, load(c + i), call.V - n - i);
    });
  });
}

// Compute the losses of all rows, by a team.
void forward_rows(const LossCall& call, const uint32_t* b, Row* rows, Arena& arena) {
  const int64_t width = round_up(call.V, BLOCK);
  if (!call.is_bounded)
    pass(call, b, arena, [&](int64_t m, int64_t, Vec<float> logits, int64_t left) {
      if (left < WIDTH) logits = select(INDEX < int32_t(left), logits, broadcast(-INFINITY));
      // NaN stays NaN.
      rows[m].state = select(logits <= rows[m].state, rows[m].state, logits);
    });
#pragma omp barrier
#pragma omp for
  for (int64_t m = 0; m < call.N; ++m) {
    rows[m].shift = call.is_bounded ? 0 : reduce_max(rows[m].state);
    rows[m].state = Vec<float>{};
  }
  pass(call, b, arena, [&](int64_t m, int64_t n, Vec<float> logits, int64_t left) {
    const int64_t label = int64_t(call.labels[m]) - n;
    if (label >= 0 && label < WIDTH) rows[m].label_logit = logits[label];
    Vec<float> powers = exp(logits - rows[m].shift);
    if (left < WIDTH) powers = select(INDEX < int32_t(left), powers, Vec<float>{});
    rows[m].state += powers;
    store(call.powers + m * width + n, powers);
  });
#pragma omp barrier
#pragma omp for
  for (int64_t m = 0; m < call.N; ++m) {
    const float sum = reduce_add(rows[m].state), logit = rows[m].label_logit;
    call.losses[m] = rows[m].shift + std::log(sum) - call.share * logit;
    call.rates[m] = 1.0f / sum;
    call.powers[m * width + call.labels[m]] = to_bfloat16(std::exp(logit - rows[m].shift) - call.share * sum);
  }
}

}  // namespace

KERNEL void loss_forward(const LossCall* of, int64_t threads) {
  const LossCall& call = *of;
  const Workspace workspace(threads);
  LinearCall layer{};
  layer.count = 1, layer.K = call.D;
  layer.layers[0].weight = call.weight, layer.layers[0].N = round_up(call.V, BLOCK), layer.layers[0].rows = call.V;
  const Outputs outputs(layer);
  auto* b = workspace[0].take<uint32_t>(outputs.count * call.D / 2);
  auto* rows = workspace[0].take<Row>(call.N);
  std::fill(rows, rows + call.N, Row{broadcast(-INFINITY), 0, 0});
#pragma omp parallel num_threads(int(threads))
  {
    Arena& arena = workspace[omp_get_thread_num()];
    const TileUse use;
    pack_transposed_weights(outputs, b, arena);
    forward_rows(call, b, rows, arena);
  }
}

#endif
