// Cross-entropy of a linear layer in bfloat16 in squares: logits become exponentials while they are in the first
// cache, and none is kept in float32.

#include <omp.h>

#include <cmath>

#include "panels.h"

#ifdef SQUARES

namespace {

const Floats ORDER = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// What is known of a row.
struct Row {
  Floats lanes;  // the highest logits, or the sums of exponentials
  float shift, label_logit;
};

// Multiply all rows with all columns, by a team; `use(m, n, logits, count)` gets 16 logits of a row, of which `count` are
// there, from one thread.
template <typename Use>
void pass(const LossCall& call, const uint32_t* b, Work& own, const Use& use) {
  const long steps = call.D / SIDE;
  const auto arrange = [&](long m, long first, long some, uint32_t* tiles) {
    arrange_block(call.x + m * call.x_stride + first * SIDE, call.x_stride, call.N - m, some * SIDE, 0, some, tiles);
  };
  const auto next = [&](long m, long first) {
    return Ahead{call.x + m * call.x_stride + first * SIDE, call.x_stride, call.D};
  };
  for_each_strip(call.N, whole_blocks(call.V), steps, own, arrange, next, [&](Strip& strip) {
    multiply_strip(strip, b, steps, strip.sums, false, [&](long j, long at, const float* c) {
      const long m = strip.m + j, n = strip.n + at;
      if (m >= call.N) return;
      for (long i = 0; i < SIDE; i += LANES) use(m, n + i, load_lanes(c + i), call.V - n - i);
    });
  });
}

// By a team.
void forward_rows(const LossCall& call, const uint32_t* b, Row* rows, Work& own) {
  const long width = whole_blocks(call.V);
  if (!call.is_bounded)
    pass(call, b, own, [&](long m, long, Floats logits, long left) {
      if (left < LANES) logits = where(ORDER < float(left), logits, spread(-INFINITY));
      // Not a number stays so.
      rows[m].lanes = where(logits <= rows[m].lanes, rows[m].lanes, logits);
    });
#pragma omp barrier
#pragma omp for
  for (long m = 0; m < call.N; ++m) {
    rows[m].shift = call.is_bounded ? 0 : highest(rows[m].lanes);
    rows[m].lanes = Floats{};
  }
  pass(call, b, own, [&](long m, long n, Floats logits, long left) {
    const long label = long(call.labels[m]) - n;
    if (label >= 0 && label < LANES) rows[m].label_logit = logits[label];
    Floats powers = exp_lanes(logits - rows[m].shift);
    if (left < LANES) powers = where(ORDER < float(left), powers, Floats{});
    rows[m].lanes += powers;
    store_lanes(call.powers + m * width + n, powers);
  });
#pragma omp barrier
#pragma omp for
  for (long m = 0; m < call.N; ++m) {
    const float sum = total(rows[m].lanes), logit = rows[m].label_logit;
    call.losses[m] = rows[m].shift + std::log(sum) - call.share * logit;
    call.rates[m] = 1.0f / sum;
    call.powers[m * width + call.labels[m]] = to_half(std::exp(logit - rows[m].shift) - call.share * sum);
  }
}

}  // namespace

#endif

extern "C" void loss_forward(const LossCall* of) {
#ifdef SQUARES
  static Memory arranged;
  const LossCall& call = *of;
  LinearCall layer{};
  layer.count = 1, layer.K = call.D;
  layer.parts[0].weight = call.weight, layer.parts[0].N = whole_blocks(call.V), layer.parts[0].rows = call.V;
  const Columns columns(layer);
  uint32_t* b = arranged.numbers<uint32_t>(columns.total * call.D / 2);
  std::vector<Row> rows(call.N, {spread(-INFINITY), 0, 0});
#pragma omp parallel
  {
    static thread_local Work own;
    const TileUse use;
    arrange_rows(columns, b, own);
    forward_rows(call, b, rows.data(), own);
  }
#endif
}
