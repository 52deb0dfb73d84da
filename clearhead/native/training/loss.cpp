// Cross-entropy of a linear layer in bfloat16 on the matrix unit: logits become exponentials while they are in the first
// cache, and none is kept in float32.

#include <omp.h>

#include <cmath>

#include "panels.h"

#ifdef MATRIX_UNIT

namespace {

const Floats ORDER = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// What is known of the rows of a panel.
struct Rows {
  float shift[PANEL_ROWS], label_logit[PANEL_ROWS];
  Floats lanes[PANEL_ROWS];  // the highest logits, or the sums of exponentials
};

float highest(Floats lanes) {
  float top = lanes[0];
  for (int i = 1; i < LANES; ++i) top = std::max(top, lanes[i]);
  return top;
}

// Multiply a panel with all columns; `use(m, n, logits, count)` gets 16 logits of a row, of which `count` are there.
template <typename Use>
void pass(const LossCall& call, const Panel& panel, long rows, const uint32_t* b, float* sums, const Use& use) {
  const long steps = call.D / SIDE;
  for (long n = 0; n < call.V; n += SIDE)
    multiply_panel(panel, rows, call.D, b + n / TILE * steps * WORDS, steps, sums, false, false, [&](long m, float* c) {
      for (long j = 0; j < std::min(SIDE, rows - m); ++j)
        for (long i = 0; i < SIDE; i += LANES) use(m + j, n + i, load_lanes(c + j * SIDE + i), call.V - n - i);
    });
}

void forward_panel(const LossCall& call, long first, long count, const uint32_t* b, Rows& rows, Work& own) {
  const Panel panel =
      panel_of(call.x + first * call.x_stride, call.x_stride, count, call.D, own.tail.numbers<uint16_t>(SIDE * call.D));
  float* sums = own.sums.numbers<float>(PANEL_ROWS * SIDE);
  const long width = whole_blocks(call.V);
  for (long m = 0; m < count; ++m) rows.lanes[m] = spread(-INFINITY), rows.shift[m] = 0;
  if (!call.is_bounded) {
    pass(call, panel, count, b, sums, [&](long m, long, Floats logits, long left) {
      if (left < LANES) logits = where(ORDER < float(left), logits, spread(-INFINITY));
      // Not a number stays so.
      rows.lanes[m] = where(logits <= rows.lanes[m], rows.lanes[m], logits);
    });
    for (long m = 0; m < count; ++m) rows.shift[m] = highest(rows.lanes[m]);
  }
  for (long m = 0; m < count; ++m) rows.lanes[m] = Floats{};
  pass(call, panel, count, b, sums, [&](long m, long n, Floats logits, long left) {
    const long label = long(call.labels[first + m]) - n;
    if (label >= 0 && label < LANES) rows.label_logit[m] = logits[label];
    Floats powers = exp_lanes(logits - rows.shift[m]);
    if (left < LANES) powers = where(ORDER < float(left), powers, Floats{});
    rows.lanes[m] += powers;
    store_lanes(call.powers + (first + m) * width + n, powers);
  });
  for (long m = 0; m < count; ++m) {
    const float sum = total(rows.lanes[m]), logit = rows.label_logit[m];
    call.losses[first + m] = rows.shift[m] + std::log(sum) - call.share * logit;
    call.rates[first + m] = 1.0f / sum;
    call.powers[(first + m) * width + call.labels[first + m]] = to_half(std::exp(logit - rows.shift[m]) - call.share * sum);
  }
}

}  // namespace

#endif

extern "C" void loss_forward(const LossCall* of) {
#ifdef MATRIX_UNIT
  static Memory arranged;
  const LossCall& call = *of;
  LinearCall layer{};
  layer.count = 1, layer.K = call.D;
  layer.parts[0].weight = call.weight, layer.parts[0].N = whole_blocks(call.V), layer.parts[0].rows = call.V;
  const Columns columns(layer);
  uint32_t* b = arranged.numbers<uint32_t>(columns.total * call.D / 2);
#pragma omp parallel
  {
    static thread_local Work own;
    static thread_local Rows rows;
    const TileUse use;
    arrange_rows(columns, b, own);
    const long panel_size = panel_rows(call.N, call.D, omp_get_num_threads());
#pragma omp for schedule(static)
    for (long first = 0; first < call.N; first += panel_size)
      forward_panel(call, first, std::min(panel_size, call.N - first), b, rows, own);
  }
#endif
}
