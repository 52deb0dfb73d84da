// Runs every kernel on arrays that end at their last number, for sizes around those of tiles and blocks.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "abi.h"

extern "C" {
int64_t has_gemm();
void linear_forward(const LinearCall*, int64_t);
void linear_backward(const LinearCall*, int64_t);
void muon(const MuonCall*, int64_t);
void rotation(const RotationCall*, int64_t);
void stream_forward(const StreamCall*, int64_t);
void stream_backward(const StreamCall*, int64_t);
void loss_forward(const LossCall*, int64_t);
void attention_forward(const AttentionCall*, int64_t);
void attention_backward(const AttentionCall*, int64_t);
}

constexpr int64_t THREADS = 2;

template <typename T>
std::vector<T> numbers(int64_t count) {
  std::vector<T> made(count);
  for (int64_t i = 0; i < count; ++i) made[i] = T(i * 7 % 101);
  made.shrink_to_fit();
  return made;
}

void run_linears(int64_t rows, int64_t inputs, int64_t outputs, int64_t count, int64_t activation) {
  auto x = numbers<uint16_t>(rows * inputs), gradient = x, inner = numbers<uint16_t>(rows * outputs), derivatives = inner;
  auto weights = numbers<float>(outputs * inputs), bias = numbers<float>(outputs), more_bias = bias;
  auto y = numbers<uint16_t>(rows * outputs * count);
  std::vector<std::vector<float>> found(count, weights);
  LinearCall call{};
  call.x = x.data(), call.count = count, call.M = rows, call.K = inputs, call.x_stride = inputs;
  call.activation = activation, call.result = inner.data(), call.result_stride = outputs;
  std::vector<std::vector<uint16_t>> own(count, derivatives);
  for (int64_t i = 0; i < count; ++i) {
    LinearArgs& layer = call.layers[i];
    layer.weight = weights.data(), layer.bias = bias.data(), layer.N = layer.rows = outputs;
    layer.y = activation == Activation::NONE ? y.data() + i * outputs : nullptr, layer.derivative = own[i].data();
    layer.y_stride = activation == Activation::NONE ? outputs * count : outputs;
  }
  linear_forward(&call, THREADS);
  call.result = gradient.data(), call.result_stride = inputs;
  for (int64_t i = 0; i < count; ++i) {
    call.layers[i].y = y.data() + i * outputs, call.layers[i].y_stride = outputs * count;
    call.layers[i].weight_gradient = found[i].data(), call.layers[i].bias_gradient = more_bias.data();
  }
  auto derivative = numbers<uint16_t>(rows * inputs), result = derivative;
  call.derivatives[0] = derivative.data(), call.inner_gradients[0] = result.data();
  linear_backward(&call, THREADS);
}

void run_attention(int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t size, bool has_mask) {
  const int64_t most = batch * heads * (queries > keys ? queries : keys) * size;
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
  for (int64_t i = 0; i < 8; ++i) {
    const int64_t tokens = by_key[i] ? keys : queries;
    tensors[i].resize(batch * heads * tokens * size), tensors[i].shrink_to_fit();
    *all[i] = {tensors[i].data(), tokens * heads * size, size, heads * size};
  }
  call.mask = has_mask ? mask.data() : nullptr, call.log_totals = log_totals.data();
  call.mask_batch = heads * queries * keys, call.mask_head = queries * keys, call.mask_query = keys, call.mask_key = 1;
  call.B = batch, call.H = heads, call.T = queries, call.S = keys, call.E = size;
  call.is_causal = !has_mask && queries == keys, call.scale = 0.1f;
  call.dropped = size == 16 ? int64_t(1) << 30 : 0, call.kept_scale = 4.0f / 3.0f;
  attention_forward(&call, THREADS);
  attention_backward(&call, THREADS);
}

// The loss, and the products for its gradients, with weights that end within a block.
void run_loss(int64_t rows, int64_t entries, int64_t width, bool is_bounded) {
  const int64_t all = (entries + 31) / 32 * 32;
  auto x = numbers<uint16_t>(rows * width), gradient = x, powers = numbers<uint16_t>(rows * all);
  auto weight = numbers<float>(entries * width), weight_gradient = weight;
  auto losses = numbers<float>(rows), rates = losses;
  std::vector<int64_t> labels(rows, entries - 1);
  LossCall loss{};
  loss.x = x.data(), loss.weight = weight.data(), loss.labels = labels.data(), loss.powers = powers.data();
  loss.losses = losses.data(), loss.rates = rates.data(), loss.N = rows, loss.V = entries, loss.D = loss.x_stride = width;
  loss.is_bounded = is_bounded, loss.share = 0.9f;
  loss_forward(&loss, THREADS);
  LinearCall call{};
  call.x = x.data(), call.result = gradient.data(), call.count = 1, call.M = rows, call.K = width;
  call.x_stride = call.result_stride = width, call.activation = Activation::NONE;
  LinearArgs& layer = call.layers[0];
  layer.weight = weight.data(), layer.y = powers.data(), layer.weight_gradient = weight_gradient.data();
  layer.rows = entries, layer.adds = is_bounded, layer.N = layer.y_stride = all;
  linear_backward(&call, THREADS);
}

void run_stream(int64_t rows, int64_t width, bool has_sum, bool is_centered) {
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
  stream_forward(&call, THREADS);
  call.sum_gradient = call.normed_gradient = gradient.data(), call.rounded_gradient = rounded.data();
  call.x_gradient = found.data(), call.weight_gradient = weight_gradient.data(), call.bias_gradient = bias_gradient.data();
  stream_backward(&call, THREADS);
}

void run_rotation(int64_t batch, int64_t heads, int64_t tokens, int64_t size, int64_t pairs, bool has_angles) {
  auto x = numbers<uint16_t>(batch * heads * tokens * size), y = x;
  auto cos = numbers<float>((has_angles ? batch : 1) * tokens * pairs), sin = cos;
  RotationCall call{};
  call.x = call.y = {x.data(), tokens * heads * size, size, heads * size};
  call.y.data = y.data(), call.cos = cos.data(), call.sin = sin.data();
  call.angle_batch = has_angles ? tokens * pairs : 0;
  call.B = batch, call.H = heads, call.T = tokens, call.E = size, call.P = pairs;
  for (call.is_back = 0; call.is_back < 2; ++call.is_back) rotation(&call, THREADS);
}

void run_muon() {
  const int64_t sizes[][2] = {{32, 32}, {32, 96}, {160, 64}};
  std::vector<std::vector<float>> numbers_of;
  std::vector<MuonMatrix> matrices;
  for (const auto& size : sizes) {
    for (int i = 0; i < 3; ++i) numbers_of.push_back(numbers<float>(size[0] * size[1]));
    auto* last = &numbers_of.back();
    matrices.push_back({last[0].data(), last[-1].data(), last[-2].data(), size[0], size[1], 0.1f});
  }
  const MuonCall call{matrices.data(), int64_t(matrices.size()), 5, {3.4f, -4.8f, 2.0f}, 0.05f, 0.9f};
  muon(&call, THREADS);
}

int main() {
  for (int64_t pairs : {1, 16, 21})
    for (bool has_angles : {false, true}) run_rotation(3, 2, 40, 43, pairs, has_angles);
  for (int64_t rows : {1, 7, 1000})
    for (int64_t width : {1, 16, 37, 128})
      for (bool has_sum : {false, true}) run_stream(rows, width, has_sum, width > 16);
  if (!has_gemm()) return 0;
  run_muon();
  for (int64_t rows : {1, 31, 32, 70, 1030})
    for (int64_t inputs : {32, 96, 1056})
      for (int64_t outputs : {32, 288})
        for (int64_t count : {1, 2, 3}) run_linears(rows, inputs, outputs, count, Activation::NONE);
  run_linears(70, 4128, 64, 1, Activation::NONE), run_linears(70, 64, 4128, 2, Activation::NONE), run_linears(33, 4128, 64, 2, Activation::GELU);
  for (int64_t activation = Activation::RELU; activation <= Activation::TANH; ++activation)
    for (int64_t count : {1, 2}) run_linears(70, 32, 64, count, activation);
  for (int64_t tokens : {1, 5, 32, 77, 530})
    for (int64_t size : {7, 16, 64}) {
      run_attention(2, 3, tokens, tokens, size, false);
      run_attention(1, 2, tokens, 41, size, true);
    }
  for (int64_t rows : {1, 33, 70})
    for (int64_t entries : {5, 32, 65})
      for (bool is_bounded : {false, true}) run_loss(rows, entries, 64, is_bounded);
  std::puts("ok");
}
