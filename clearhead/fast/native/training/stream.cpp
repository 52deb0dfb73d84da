// What stands between two branches of a stack, in one pass over its rows, and the backward pass in another:
//
//     sum = x + scale * dropout(y)        normed = norm(sum)
//
// x, sum and their gradients are float32; y and what branches read are bfloat16. Dropout draws no mask: whether an element
// is kept follows from its place and a seed, in both directions.
//
// Legend: N rows, D width.

#include <omp.h>

#include <cmath>
#include <vector>

#include "calls.h"
#include "partial.h"

namespace {

const Bits PLACES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Random bits of 16 elements from a place on. Source: C. Wellons, "Prospecting for hash functions" (lowbias32).
inline Bits random_bits(uint32_t place, const uint32_t seed[2]) {
  Bits x = PLACES + place + seed[0];
  x = (x ^ (x >> 16)) * 0x7feb352du + seed[1];
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// What is kept of 16 elements of row n from d on, scaled.
inline Floats keep(const StreamCall& call, Floats lanes, long n, long d) {
  lanes *= call.kept_scale;
  if (!call.dropped) return lanes;
  return where(random_bits(uint32_t(n * call.D + d), call.seed) < call.dropped, Floats{}, lanes);
}

// `row` has room for the sums.
void forward_row(const StreamCall& call, long n, float* row) {
  const long D = call.D;
  const float* x = call.x + n * D;
  const uint16_t* y = call.y ? call.y + n * D : nullptr;
  float* sum = call.sum ? call.sum + n * D : nullptr;
  Floats totals = {}, squares = {};
  for (long d = 0; d < D; d += LANES) {
    Floats lanes = load_some(x + d, D - d);
    if (y) {
      lanes += keep(call, load_some(y + d, D - d), n, d);
      pass_some(sum + d, lanes, D - d);
    }
    store_lanes(row + d, lanes);
    totals += lanes;
  }
  const float mean = call.is_centered ? total(totals) / float(D) : 0.0f;
  for (long d = 0; d < D; d += LANES) {
    const Floats lanes = load_lanes(row + d) - mean;
    squares += D - d >= LANES ? lanes * lanes : where(PLACES < uint32_t(D - d), lanes * lanes, Floats{});
  }
  const float rate = 1.0f / std::sqrt(total(squares) / float(D) + call.eps);
  call.statistics[2 * n] = mean;
  call.statistics[2 * n + 1] = rate;
  for (long d = 0; d < D; d += LANES) {
    Floats lanes = (load_lanes(row + d) - mean) * rate;
    if (call.weight) lanes *= load_some(call.weight + d, D - d);
    if (call.bias) lanes += load_some(call.bias + d, D - d);
    if (call.normed) pass_some(call.normed + n * D + d, lanes, D - d);
    if (call.rounded) pass_some(call.rounded + n * D + d, lanes, D - d);
  }
}

// The gradient of 16 normed elements.
Floats normed_gradient(const StreamCall& call, long at, long count) {
  Floats lanes = {};
  if (call.normed_gradient) lanes += load_some(call.normed_gradient + at, count);
  if (call.rounded_gradient) lanes += load_some(call.rounded_gradient + at, count);
  return lanes;
}

// The gradients of a row; those of weight and bias are added to the sums of a thread.
void backward_row(const StreamCall& call, long n, float* weight_sums, float* bias_sums) {
  const long D = call.D, first = n * D;
  const float* sum = call.sum ? call.sum + first : call.x + first;
  const float mean = call.statistics[2 * n], rate = call.statistics[2 * n + 1];
  Floats shares = {}, products = {};
  for (long d = 0; d < D; d += LANES) {
    const Floats gradient = normed_gradient(call, first + d, D - d);
    const Floats unit = (load_some(sum + d, D - d) - mean) * rate;
    const Floats scaled = call.weight ? gradient * load_some(call.weight + d, D - d) : gradient;
    shares += scaled;
    products += scaled * unit;  // beyond the end the gradient is 0
    store_lanes(weight_sums + d, load_lanes(weight_sums + d) + gradient * unit);
    store_lanes(bias_sums + d, load_lanes(bias_sums + d) + gradient);
  }
  const float share = call.is_centered ? total(shares) / float(D) : 0.0f, product = total(products) / float(D);
  for (long d = 0; d < D; d += LANES) {
    const Floats gradient = normed_gradient(call, first + d, D - d);
    const Floats unit = (load_some(sum + d, D - d) - mean) * rate;
    const Floats scaled = call.weight ? gradient * load_some(call.weight + d, D - d) : gradient;
    Floats found = (scaled - share - unit * product) * rate;
    if (call.sum_gradient) found += load_some(call.sum_gradient + first + d, D - d);
    pass_some(call.x_gradient + first + d, found, D - d);
    if (call.y_gradient) pass_some(call.y_gradient + first + d, keep(call, found, n, d), D - d);
  }
}

void forward(const StreamCall& call) {
#pragma omp parallel if (call.N * call.D > LEAST_WORK)
  {
    std::vector<float> row(call.D + LANES);
#pragma omp for schedule(static)
    for (long n = 0; n < call.N; ++n) forward_row(call, n, row.data());
    written();
  }
}

void backward(const StreamCall& call) {
  const long width = (call.D + LANES - 1) / LANES * LANES, most = omp_get_max_threads();
  std::vector<float> sums(most * 2 * width, 0.0f);
#pragma omp parallel if (call.N * call.D > LEAST_WORK)
  {
    float* own = sums.data() + omp_get_thread_num() * 2 * width;
#pragma omp for schedule(static)
    for (long n = 0; n < call.N; ++n) backward_row(call, n, own, own + width);
    written();
  }
  for (long d = 0; d < call.D; ++d)
    for (long thread = 0; thread < most; ++thread) {
      const float* own = sums.data() + thread * 2 * width;
      if (call.weight_gradient) call.weight_gradient[d] = (thread ? call.weight_gradient[d] : 0.0f) + own[d];
      if (call.bias_gradient) call.bias_gradient[d] = (thread ? call.bias_gradient[d] : 0.0f) + own[width + d];
    }
}

}  // namespace

extern "C" {

void stream_forward(const StreamCall* call) { forward(*call); }
void stream_backward(const StreamCall* call) { backward(*call); }
}
