// The operations between two branches of a stack, in one pass over its rows, and the backward pass in another:
//
//     sum = x + scale * dropout(y)        normed = norm(sum)
//
// x, sum and their gradients are float32; y and the inputs of branches are bfloat16. Dropout stores no mask: an
// element's position and a seed decide whether it is kept, in both directions.
//
// Legend: N rows, D width.

#include "../abi.h"
#include "../isa.h"
#include "../team.h"
#include "../vec/random.h"
#include "../vec/vec.h"
#include "../workspace.h"

namespace {

// Drop or scale 16 elements of row n from d on.
inline Vec<float> drop(const StreamCall& call, Vec<float> vec, int64_t n, int64_t d) {
  vec *= call.kept_scale;
  if (!call.dropped) return vec;
  const Vec<uint32_t> places = (Vec<uint32_t>)INDEX + uint32_t(n * call.D + d);
  const Vec<uint32_t> bits = random_bits(places, uint32_t(call.seed[0]), uint32_t(call.seed[1]));
  return select(bits < uint32_t(call.dropped), Vec<float>{}, vec);
}

// `row` has room for the sums.
void forward_row(const StreamCall& call, int64_t n, float* row) {
  const int64_t D = call.D;
  const float* x = call.x + n * D;
  const uint16_t* y = call.y ? call.y + n * D : nullptr;
  float* sum = call.sum ? call.sum + n * D : nullptr;
  Vec<float> totals = {}, squares = {};
  for (int64_t d = 0; d < D; d += WIDTH) {
    Vec<float> vec = load(x + d, D - d);
    if (y) {
      vec += drop(call, load(y + d, D - d), n, d);
      stream(sum + d, vec, D - d);
    }
    store(row + d, vec);
    totals += vec;
  }
  const float mean = call.is_centered ? reduce_add(totals) / float(D) : 0.0f;
  for (int64_t d = 0; d < D; d += WIDTH) {
    const Vec<float> vec = load(row + d) - mean;
    squares += D - d >= WIDTH ? vec * vec : select(INDEX < int32_t(D - d), vec * vec, Vec<float>{});
  }
  const float rate = 1.0f / std::sqrt(reduce_add(squares) / float(D) + call.eps);
  call.statistics[2 * n] = mean;
  call.statistics[2 * n + 1] = rate;
  for (int64_t d = 0; d < D; d += WIDTH) {
    Vec<float> vec = (load(row + d) - mean) * rate;
    if (call.weight) vec *= load(call.weight + d, D - d);
    if (call.bias) vec += load(call.bias + d, D - d);
    if (call.normed) stream(call.normed + n * D + d, vec, D - d);
    if (call.rounded) stream(call.rounded + n * D + d, vec, D - d);
  }
}

// The gradient of 16 normed elements.
Vec<float> normed_gradient(const StreamCall& call, int64_t at, int64_t count) {
  Vec<float> vec = {};
  if (call.normed_gradient) vec += load(call.normed_gradient + at, count);
  if (call.rounded_gradient) vec += load(call.rounded_gradient + at, count);
  return vec;
}

// Compute the gradients of a row; those of weight and bias are added to the sums of a thread.
void backward_row(const StreamCall& call, int64_t n, float* weight_sums, float* bias_sums) {
  const int64_t D = call.D, first = n * D;
  const float* sum = call.sum ? call.sum + first : call.x + first;
  const float mean = call.statistics[2 * n], rate = call.statistics[2 * n + 1];
  Vec<float> shares = {}, products = {};
  for (int64_t d = 0; d < D; d += WIDTH) {
    const Vec<float> gradient = normed_gradient(call, first + d, D - d);
    const Vec<float> unit = (load(sum + d, D - d) - mean) * rate;
    const Vec<float> scaled = call.weight ? gradient * load(call.weight + d, D - d) : gradient;
    shares += scaled;
    products += scaled * unit;  // beyond the end the gradient is 0
    store(weight_sums + d, load(weight_sums + d) + gradient * unit);
    store(bias_sums + d, load(bias_sums + d) + gradient);
  }
  const float share = call.is_centered ? reduce_add(shares) / float(D) : 0.0f, product = reduce_add(products) / float(D);
  for (int64_t d = 0; d < D; d += WIDTH) {
    const Vec<float> gradient = normed_gradient(call, first + d, D - d);
    const Vec<float> unit = (load(sum + d, D - d) - mean) * rate;
    const Vec<float> scaled = call.weight ? gradient * load(call.weight + d, D - d) : gradient;
    Vec<float> found = (scaled - share - unit * product) * rate;
    if (call.sum_gradient) found += load(call.sum_gradient + first + d, D - d);
    stream(call.x_gradient + first + d, found, D - d);
    if (call.y_gradient) stream(call.y_gradient + first + d, drop(call, found, n, d), D - d);
  }
}

}  // namespace

KERNEL void stream_forward(const StreamCall* of, int64_t threads) {
  const StreamCall& call = *of;
  const int team = team_size(threads, call.N * call.D);
  const Workspace workspace(team);
#pragma omp parallel num_threads(team)
  {
    auto* row = workspace[omp_get_thread_num()].take<float>(round_up(call.D, WIDTH));
#pragma omp for schedule(static)
    for (int64_t n = 0; n < call.N; ++n) forward_row(call, n, row);
    stream_fence();
  }
}

// sum = scale * dropout(x); the backward pass is the same operation.
KERNEL void dropout(const StreamCall* of, int64_t threads) {
  const StreamCall& call = *of;
#pragma omp parallel num_threads(team_size(threads, call.N * call.D))
  {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < call.N; ++n)
      for (int64_t at = n * call.D, d = 0; d < call.D; d += WIDTH)
        stream(call.sum + at + d, drop(call, load(call.x + at + d, call.D - d), n, d), call.D - d);
    stream_fence();
  }
}

KERNEL void stream_backward(const StreamCall* of, int64_t threads) {
  const StreamCall& call = *of;
  const int team = team_size(threads, call.N * call.D);
  const Workspace workspace(team);
  const int64_t width = round_up(call.D, WIDTH);
  auto* sums = workspace[0].take<float>(team * 2 * width);
  std::fill(sums, sums + team * 2 * width, 0.0f);
#pragma omp parallel num_threads(team)
  {
    float* own = sums + omp_get_thread_num() * 2 * width;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < call.N; ++n) backward_row(call, n, own, own + width);
    stream_fence();
  }
  for (int64_t d = 0; d < call.D; ++d)
    for (int64_t thread = 0; thread < team; ++thread) {
      const float* own = sums + thread * 2 * width;
      if (call.weight_gradient) call.weight_gradient[d] = (thread ? call.weight_gradient[d] : 0.0f) + own[d];
      if (call.bias_gradient) call.bias_gradient[d] = (thread ? call.bias_gradient[d] : 0.0f) + own[width + d];
    }
}
