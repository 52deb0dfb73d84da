// Runs every kernel on arrays that end where their last number does, for sizes around those of tiles and blocks.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "calls.h"

template <typename T>
std::vector<T> numbers(long count) {
  std::vector<T> made(count);
  for (long i = 0; i < count; ++i) made[i] = T(i * 7 % 101);
  made.shrink_to_fit();
  return made;
}

void run_linears(long rows, long inputs, long outputs, long count, long activation) {
  auto x = numbers<uint16_t>(rows * inputs), gradient = x, inner = numbers<uint16_t>(rows * outputs), slopes = inner;
  auto weights = numbers<float>(outputs * inputs), bias = numbers<float>(outputs), more_bias = bias;
  auto y = numbers<uint16_t>(rows * outputs * count);
  std::vector<std::vector<float>> found(count, weights);
  LinearCall call{};
  call.x = x.data(), call.count = count, call.M = rows, call.K = inputs, call.x_stride = inputs;
  call.activation = activation, call.result = inner.data(), call.result_stride = outputs;
  std::vector<std::vector<uint16_t>> own(count, slopes);
  for (long i = 0; i < count; ++i) {
    Part& part = call.parts[i];
    part.weight = weights.data(), part.bias = bias.data(), part.N = part.rows = outputs;
    part.y = activation < 0 ? y.data() + i * outputs : nullptr, part.slope = own[i].data();
    part.y_stride = activation < 0 ? outputs * count : outputs;
  }
  linear_forward(&call);
  call.result = gradient.data(), call.result_stride = inputs;
  for (long i = 0; i < count; ++i) {
    call.parts[i].y = y.data() + i * outputs, call.parts[i].y_stride = outputs * count;
    call.parts[i].weight_gradient = found[i].data(), call.parts[i].bias_gradient = more_bias.data();
  }
  auto slope = numbers<uint16_t>(rows * inputs), result = slope;
  call.slopes[0] = slope.data(), call.slope_results[0] = result.data();
  linear_backward(&call);
}

void run_attention(long batch, long heads, long queries, long keys, long size, bool has_mask) {
  const long most = batch * heads * (queries > keys ? queries : keys) * size;
  std::vector<std::vector<uint16_t>> tensors(8, numbers<uint16_t>(most));
  auto log_totals = numbers<float>(batch * heads * queries);
  auto mask = numbers<uint8_t>(batch * heads * queries * keys);
  auto bias = numbers<float>(batch * heads * queries * keys), bias_gradient = bias;
  AttentionCall call{};
  if (size > 7) call.bias = bias.data(), call.bias_gradient = bias_gradient.data();
  call.bias_batch = heads * queries * keys, call.bias_head = queries * keys, call.bias_query = keys;
  Heads* all[] = {&call.query, &call.key, &call.value, &call.mixed,
                  &call.mixed_gradient, &call.query_gradient, &call.key_gradient, &call.value_gradient};
  const bool by_key[] = {false, true, true, false, false, false, true, true};
  for (long i = 0; i < 8; ++i) {
    const long tokens = by_key[i] ? keys : queries;
    tensors[i].resize(batch * heads * tokens * size), tensors[i].shrink_to_fit();
    *all[i] = {tensors[i].data(), tokens * heads * size, size, heads * size};
  }
  call.mask = has_mask ? mask.data() : nullptr, call.log_totals = log_totals.data();
  call.mask_batch = heads * queries * keys, call.mask_head = queries * keys, call.mask_query = keys, call.mask_key = 1;
  call.B = batch, call.H = heads, call.T = queries, call.S = keys, call.E = size;
  call.is_causal = !has_mask && queries == keys, call.scale = 0.1f;
  attention_forward(&call);
  attention_backward(&call);
}

// The loss, and the products that make its gradients, whose weights end within a block.
void run_loss(long rows, long entries, long width, bool is_bounded) {
  const long all = (entries + 31) / 32 * 32;
  auto x = numbers<uint16_t>(rows * width), gradient = x, powers = numbers<uint16_t>(rows * all);
  auto weight = numbers<float>(entries * width), weight_gradient = weight;
  auto losses = numbers<float>(rows), rates = losses;
  std::vector<int64_t> labels(rows, entries - 1);
  LossCall loss{};
  loss.x = x.data(), loss.weight = weight.data(), loss.labels = labels.data(), loss.powers = powers.data();
  loss.losses = losses.data(), loss.rates = rates.data(), loss.N = rows, loss.V = entries, loss.D = loss.x_stride = width;
  loss.is_bounded = is_bounded, loss.share = 0.9f;
  loss_forward(&loss);
  LinearCall call{};
  call.x = x.data(), call.result = gradient.data(), call.count = 1, call.M = rows, call.K = width;
  call.x_stride = call.result_stride = width, call.activation = -1;
  Part& part = call.parts[0];
  part.weight = weight.data(), part.y = powers.data(), part.weight_gradient = weight_gradient.data();
  part.rows = entries, part.adds = is_bounded, part.N = part.y_stride = all;
  linear_backward(&call);
}

void run_stream(long rows, long width, bool has_sum, bool is_centered) {
  auto x = numbers<float>(rows * width), sum = x, normed = x, gradient = x, found = x;
  auto weight = numbers<float>(width), bias = weight, weight_gradient = weight, bias_gradient = weight;
  auto y = numbers<uint16_t>(rows * width), rounded = y, y_gradient = y;
  auto statistics = numbers<float>(2 * rows);
  StreamCall call{};
  call.x = x.data(), call.weight = weight.data(), call.bias = bias.data(), call.statistics = statistics.data();
  call.normed = normed.data(), call.rounded = rounded.data();
  if (has_sum) call.y = y.data(), call.sum = sum.data(), call.y_gradient = y_gradient.data();
  call.N = rows, call.D = width, call.is_centered = is_centered;
  call.dropped = 1u << 31, call.kept_scale = 2, call.eps = 1e-5f;
  stream_forward(&call);
  call.sum_gradient = call.normed_gradient = gradient.data(), call.rounded_gradient = rounded.data();
  call.x_gradient = found.data(), call.weight_gradient = weight_gradient.data(), call.bias_gradient = bias_gradient.data();
  stream_backward(&call);
}

void run_rotation(long batch, long heads, long tokens, long size, long pairs, bool has_angles) {
  auto x = numbers<uint16_t>(batch * heads * tokens * size), y = x;
  auto cos = numbers<float>((has_angles ? batch : 1) * tokens * pairs), sin = cos;
  RotationCall call{};
  call.x = call.y = {x.data(), tokens * heads * size, size, heads * size};
  call.y.data = y.data(), call.cos = cos.data(), call.sin = sin.data();
  call.angle_batch = has_angles ? tokens * pairs : 0;
  call.B = batch, call.H = heads, call.T = tokens, call.E = size, call.P = pairs;
  for (call.is_back = 0; call.is_back < 2; ++call.is_back) rotation(&call);
}

void run_muon() {
  const long sizes[][2] = {{32, 32}, {32, 96}, {160, 64}};
  std::vector<std::vector<float>> numbers_of;
  std::vector<MuonMatrix> matrices;
  for (const auto& size : sizes) {
    for (int i = 0; i < 3; ++i) numbers_of.push_back(numbers<float>(size[0] * size[1]));
    auto* last = &numbers_of.back();
    matrices.push_back({last[0].data(), last[-1].data(), last[-2].data(), size[0], size[1], 0.1f});
  }
  const MuonCall call{matrices.data(), long(matrices.size()), 5, {3.4f, -4.8f, 2.0f}, 0.05f, 0.9f};
  muon(&call);
}

int main() {
  for (long pairs : {1, 16, 21})
    for (bool has_angles : {false, true}) run_rotation(3, 2, 40, 43, pairs, has_angles);
  for (long rows : {1, 7, 1000})
    for (long width : {1, 16, 37, 128})
      for (bool has_sum : {false, true}) run_stream(rows, width, has_sum, width > 16);
  long are_there = 0;
  find_squares(&are_there);
  if (!are_there) return 0;
  run_muon();
  for (long rows : {1, 31, 32, 70, 1030})
    for (long inputs : {32, 96, 1056})
      for (long outputs : {32, 288})
        for (long count : {1, 2, 3}) run_linears(rows, inputs, outputs, count, -1);
  run_linears(70, 4128, 64, 1, -1), run_linears(70, 64, 4128, 2, -1), run_linears(33, 4128, 64, 2, 1);
  for (long activation = 0; activation < 7; ++activation)
    for (long count : {1, 2}) run_linears(70, 32, 64, count, activation);
  for (long tokens : {1, 5, 32, 77, 530})
    for (long size : {7, 16, 64}) {
      run_attention(2, 3, tokens, tokens, size, false);
      run_attention(1, 2, tokens, 41, size, true);
    }
  for (long rows : {1, 33, 70})
    for (long entries : {5, 32, 65})
      for (bool is_bounded : {false, true}) run_loss(rows, entries, 64, is_bounded);
  std::puts("ok");
}
