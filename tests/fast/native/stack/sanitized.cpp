// Runs every kernel on arrays that end at their last number, for sizes around those of vectors and tiles.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "abi.h"

extern "C" {
void linear_float32(const float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void linear_bfloat16(const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t, int64_t);
void linear_mixed(const float*, const uint16_t*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void linear_mixed_float16(const float*, const uint16_t*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void linear_int8(
    const float*, const int8_t*, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void linear_int4(
    const float*, const uint8_t*, const uint16_t*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void top_float32(
    const float*, const int64_t*, float*, int64_t*, float*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
void top_bfloat16(
    const uint16_t*, const int64_t*, float*, int64_t*, float*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
void sample_float32(
    const float*, const int64_t*, const double*, const void*, int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t,
    int64_t);
void sample_bfloat16(
    const uint16_t*, const int64_t*, const double*, const void*, int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t,
    int64_t);
void stack(const StackCall*, int64_t);
}

constexpr int64_t THREADS = 2;

template <typename T>
std::vector<T> numbers(int64_t count) {
  std::vector<T> made(count);
  for (int64_t i = 0; i < count; ++i) made[i] = T(i * 7 % 101);
  made.shrink_to_fit();
  return made;
}

Matrix matrix(const std::vector<float>& weights, const std::vector<float>& bias, int64_t outputs, int64_t inputs) {
  return {weights.data(), bias.data(), bias.data(), outputs, inputs, 0, nullptr};
}

void stack_of(StackCall call) {
  call.most_threads = THREADS;
  stack(&call, THREADS);
}

// A layer of self-attention, a layer of cross-attention, and a feed-forward network with a gate.
void run_stack(
    int64_t rows, int64_t rows_per_group, int64_t heads, int64_t kv_heads, int64_t head_size, int64_t width, int64_t size, int64_t keys_kept,
    bool is_text) {
  auto weights = numbers<float>(std::max(heads * head_size, size) * std::max({width, heads * head_size, size}));
  auto ones = numbers<float>(std::max({heads * head_size, size, width}));
  const Norm norm{ones.data(), ones.data(), 1e-5f, NormKind::LAYER_NORM}, over_head{ones.data(), nullptr, 1e-5f, NormKind::RMS_NORM};
  const int64_t inner = heads * head_size, kv_inner = kv_heads * head_size;
  Branch self{};
  self.pre = self.out = norm;
  self.query_norm = self.key_norm = over_head;
  self.first = matrix(weights, ones, inner, width);
  self.second = self.third = matrix(weights, ones, kv_inner, width);
  self.last = matrix(weights, ones, width, inner);
  self.sink = ones.data();
  self.scale = self.score_scale = self.soft_cap = 1;
  self.function = Function::SELF_ATTENTION;
  self.heads = heads, self.kv_heads = kv_heads, self.head_size = head_size;
  self.is_first = true;
  Branch memory = self, feed_forward = self;
  memory.function = Function::MEMORY_ATTENTION;
  feed_forward.function = Function::FEED_FORWARD;
  feed_forward.first = feed_forward.second = matrix(weights, ones, size, width);
  feed_forward.last = matrix(weights, ones, width, size);
  feed_forward.is_last = true;
  Branch branches[] = {self, is_text ? self : memory, feed_forward};
  auto cache = numbers<float>(rows * kv_heads * keys_kept * head_size), values = cache;
  auto angles = numbers<float>(rows * (head_size / 2)), bias = numbers<float>(rows * heads * keys_kept);
  std::vector<int32_t> row_index(rows * keys_kept, 0);
  std::vector<int64_t> starts{0, rows / 2, rows};
  std::vector<uint8_t> mask(rows * keys_kept, 1);
  Keys keys{};
  keys.key = cache.data(), keys.value = values.data(), keys.count = is_text ? rows : keys_kept;
  keys.cos = keys.sin = angles.data(), keys.angle_stride = keys.half = head_size / 2;
  keys.window_before = 9, keys.window_after = is_text;
  Keys of_memory = keys;
  if (is_text) {
    keys.cu_seqlens = starts.data(), keys.groups = 2, keys.key_stride = kv_inner, keys.head_stride = head_size;
    of_memory = keys;
  } else {
    keys.row_stride = kv_heads * keys_kept * head_size, keys.head_stride = keys_kept * head_size;
    keys.key_stride = head_size, keys.groups = rows / rows_per_group, keys.rows_per_group = rows_per_group, keys.appends = 1;
    keys.row_index = row_index.data(), keys.row_index_stride = keys_kept;
    keys.mask = mask.data(), keys.mask_stride = keys_kept;
    keys.bias = bias.data(), keys.bias_row_stride = heads * keys_kept, keys.bias_head_stride = keys_kept;
    of_memory = keys;
    of_memory.window_before = of_memory.window_after = 1000, of_memory.groups = 1, of_memory.rows_per_group = rows, of_memory.appends = 0, of_memory.row_index_stride = 0;
  }
  const Keys all[] = {keys, of_memory, Keys{}};
  auto x = numbers<float>(rows * width);
  stack_of({x.data(), branches, all, 3, rows, width, WeightKind::FLOAT32});
  for (Branch& branch : branches)
    for (Matrix* one : {&branch.first, &branch.second, &branch.third, &branch.last}) one->ldb = one->outputs;
  stack_of({x.data(), branches, all, 3, rows, width, WeightKind::FLOAT32});
  stack_of({x.data(), branches, all, 3, rows, width, WeightKind::MIXED});
  for (Branch& branch : branches) branch.first.is_float16 = branch.last.is_float16 = 1;
  stack_of({x.data(), branches, all, 3, rows, width, WeightKind::MIXED});
  stack_of({x.data(), branches, all, 3, rows, width, WeightKind::INT8});
  if (is_text) return;
  auto key_bytes = numbers<int8_t>(cache.size()), value_bytes = key_bytes;
  auto key_scales = numbers<float>(cache.size() / head_size), value_scales = key_scales;
  keys.key = key_bytes.data(), keys.value = value_bytes.data(), keys.kind = KeyKind::INT8;
  keys.key_scales = key_scales.data(), keys.value_scales = value_scales.data();
  const Keys in_bytes[] = {keys, of_memory, Keys{}};
  for (Branch& branch : branches)
    for (Matrix* one : {&branch.first, &branch.second, &branch.third, &branch.last}) one->ldb = 0;
  stack_of({x.data(), branches, in_bytes, 3, rows, width, WeightKind::INT8});
  stack_of({x.data(), branches, in_bytes, 3, rows, width, WeightKind::FLOAT32});
  auto scales = numbers<uint16_t>(weights.size());
  for (Branch& branch : branches)
    for (Matrix* one : {&branch.first, &branch.second, &branch.third, &branch.last})
      if (one->inputs % 32 == 0) one->group_scales = scales.data();  // together with 8-bit matrices
  stack_of({x.data(), branches, in_bytes, 3, rows, width, WeightKind::INT4});
  keys.row_index = nullptr, keys.bias = nullptr;  // like prompts: many rows in chunks
  const Branch without_memory[] = {branches[0], branches[2]};
  const Keys in_parts[] = {keys, Keys{}};
  stack_of({x.data(), without_memory, in_parts, 2, rows, width, WeightKind::INT8});
  stack_of({x.data(), without_memory, in_parts, 2, rows, width, WeightKind::MIXED});
}

int main() {
  for (int64_t rows : {1, 2, 5, 16, 17, 33, 70})
    for (int64_t outputs : {1, 3, 16, 32, 35, 64})
      for (int64_t inputs : {1, 15, 32, 64, 65, 160}) {
        auto x = numbers<float>(rows * inputs), w = numbers<float>(outputs * inputs), bias = numbers<float>(outputs);
        auto y = numbers<float>(rows * outputs);
        linear_float32(x.data(), w.data(), bias.data(), y.data(), rows, outputs, inputs, THREADS);
        auto w8 = numbers<int8_t>(outputs * inputs);
        linear_int8(x.data(), w8.data(), bias.data(), bias.data(), y.data(), rows, outputs, inputs, THREADS);
        if (inputs % 32 == 0) {
          auto nibbles = numbers<uint8_t>(outputs * inputs / 2);
          auto scales = numbers<uint16_t>(outputs * inputs / 32);
          linear_int4(
              x.data(), nibbles.data(), scales.data(), bias.data(), y.data(), rows, outputs, inputs, THREADS);
        }
        auto x16 = numbers<uint16_t>(rows * inputs), w16 = numbers<uint16_t>(outputs * inputs);
        auto bias16 = numbers<uint16_t>(outputs), y16 = numbers<uint16_t>(rows * outputs);
        linear_bfloat16(x16.data(), w16.data(), bias16.data(), y16.data(), rows, outputs, inputs, THREADS);
        linear_mixed(x.data(), w16.data(), bias.data(), y.data(), rows, outputs, inputs, THREADS);
        linear_mixed_float16(x.data(), w16.data(), bias.data(), y.data(), rows, outputs, inputs, THREADS);
        for (int64_t count = 1; count <= inputs && count < 5; ++count) {
          auto values = numbers<float>(rows * count), totals = numbers<float>(rows);
          auto places = numbers<int64_t>(rows * count);
          auto *best = values.data(), *sums = totals.data();
          top_float32(x.data(), &inputs, best, places.data(), sums, rows, inputs, inputs, 1, count, THREADS);
          top_bfloat16(x16.data(), &count, best, places.data(), sums, rows, inputs, inputs, 1, count, THREADS);
        }
        const std::vector<double> uniform(rows, 0.7), settings = {0.8, 0.9, 0.01};
        const int64_t banned = inputs - 1;
        auto tokens = numbers<int64_t>(rows);
        for (int64_t top_k : {int64_t(0), int64_t(1), inputs}) {
          sample_float32(
              x.data(), &banned, uniform.data(), settings.data(), tokens.data(), rows, inputs, inputs, 1, top_k, THREADS);
          sample_bfloat16(
              x16.data(), &banned, uniform.data(), settings.data(), tokens.data(), rows, inputs, inputs, 1, top_k, THREADS);
        }
      }
  for (bool is_text : {false, true})
    for (int64_t rows : {1, 3, 17, 130}) {
      run_stack(rows, 1, 4, 2, 16, 64, 128, 20, is_text);
      run_stack(rows, 1, 3, 1, 6, 20, 33, 5, is_text);
      run_stack(rows, 1, 2, 2, 80, 96, 40, 17, is_text);
    }
  for (int64_t new_tokens : {2, 8, 33, 300}) {
    run_stack(2 * new_tokens, new_tokens, 4, 2, 16, 64, 128, new_tokens + 3, false);
    run_stack(2 * new_tokens, new_tokens, 2, 1, 80, 96, 40, new_tokens, false);
    run_stack(2 * new_tokens, new_tokens, 3, 1, 6, 20, 33, new_tokens, false);
  }
  std::puts("ok");
}
