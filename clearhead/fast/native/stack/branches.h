// The branches of a stack, one after the other, computed by a team whose threads share the rows.
//
//     x <- out( x + sum_b scale_b * post_b( f_b( pre_b( shared(x) ) ) ) )
//
// A branch is five to seven phases, shared by the threads; each ends with a barrier. First the output of the last
// branch is added, normed and rounded for the products (`begin_branch`). Products follow; for attention, rotations and
// scores too. Activations are float32 throughout; keys and values have the dtype of the cache.
//
// Legend: M new rows (tokens), D width, H heads, K key/value heads, E head size, S keys.

#pragma once

#include "rows.h"

namespace {

constexpr int64_t ROWS_OF_HEAD = 256;  // rows of one head whose attention is one thread's work

// The rows of a team, and the state that lasts from one branch to another. Mixed values overwrite the queries.
struct Rows {
  float *x, *shared, *queries;
  int64_t M, D;
};

template <typename Work>
void by_kind(int64_t kind, const Work& work) {
  switch (kind) {
    case KeyKind::FLOAT32: return work(float());
    case KeyKind::BFLOAT16: return work(uint16_t());
    case KeyKind::INT8: return work(int8_t());
  }
}

template <typename Traits>
class Team {
 public:
  // Call from one thread; memory is taken for the branch that needs most of it, and reused by all.
  Team(const Rows& rows, const Branch* branches, const Keys* keys, int64_t count, Arena& arena)
      : rows_(rows), branches_(branches), keys_(keys), count_(count), widest_(rows.D),
        input_(arena, rows.M, widest(), count > 0 && branches->first.ldb > 0) {
    int64_t first = rows.D, second = 0, third = 0;
    for (int64_t b = 0; b < count; ++b) {
      const Branch& branch = branches[b];
      if (branch.function == Function::FEED_FORWARD) first = std::max(first, branch.first.outputs);
      second = std::max(second, branch.second.outputs);
      third = std::max(third, branch.third.outputs);
      most_keys_ = std::max(most_keys_, keys[b].count);
    }
    first_ = arena.take<float>(rows.M * first);
    second_ = arena.take<float>(rows.M * second);
    third_ = arena.take<float>(rows.M * third);
  }

  // Call from all threads: run from after the keys of branch `from` are stored to after those of branch `to` are.
  void run(int64_t from, int64_t to, Arena& arena) {
    const Arena::Frame frame(arena);
    Own own{arena, arena.take<float>(widest_), arena.take<float>(rows_.D), arena.take<float>(TOGETHER * (most_keys_ + 3 * WIDTH))};
    if (from >= 0) finish_branch(from, own);
    for (int64_t b = from + 1; b <= std::min(to, count_ - 1); ++b) {
      begin_branch(b, own);
      multiply_inputs(b, own);
      if (b < to) finish_branch(b, own);
    }
    if (to < count_) return;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < rows_.M; ++m) add_result(count_, m, own.other);
  }

 private:
  struct Own {  // state of one thread
    Arena& arena;
    float *row, *other, *scores;
  };

  // The number of inputs of the widest product.
  int64_t widest() {
    for (int64_t b = 0; b < count_; ++b) widest_ = std::max(widest_, branches_[b].last.inputs);
    return widest_;
  }

  // y = act(rows matrix^T + bias) * factor
  struct Product {
    const Matrix& matrix;
    float* y;
    int64_t activation = Activation::NONE;
    const float* factor = nullptr;
  };

  // Call `use` with the arguments of a product; their type depends on the weights.
  template <typename Use>
  auto with_args(const Product& product, const Use& use) const {
    using Wide = std::conditional_t<std::is_same_v<Traits, Int4>, Int8, Traits>;
    const Matrix& matrix = product.matrix;
    const auto complete = [&](auto made) {
      made.ldb = matrix.ldb, made.activation = product.activation, made.factor = product.factor;
      return use(made);
    };
    if constexpr (std::is_same_v<Traits, Int4>)
      if (matrix.group_scales)
        return complete(input_.nibble_args(
            rows_.M, matrix.outputs, matrix.inputs, static_cast<const uint8_t*>(matrix.weight), matrix.bias,
            matrix.group_scales, product.y));
    if constexpr (std::is_same_v<Traits, Mixed>)
      if (matrix.is_float16)
        return complete(input_.template args<MixedFloat16>(
            rows_.M, matrix.outputs, matrix.inputs, static_cast<const Float16*>(matrix.weight), matrix.bias,
            nullptr, product.y));
    return complete(input_.args(
        rows_.M, matrix.outputs, matrix.inputs, static_cast<const typename Wide::W*>(matrix.weight), matrix.bias,
        matrix.scales, product.y));
  }

  void multiply_by_team(const Product& product, Arena& arena) const {
    with_args(product, [&](const auto& args) { gemm_by_team(args, arena); });
  }

  // Add the output of the branch before b, and norm the sum at the end of its step.
  void add_result(int64_t b, int64_t m, float* row) {
    if (b == 0) return;
    const Branch& last = branches_[b - 1];
    const int64_t D = rows_.D;
    float* x = rows_.x + m * D;
    const float* added = first_ + m * D;
    if (last.post.kind != NormKind::NONE) {
      apply_norm(last.post, added, D, row);
      added = row;
    }
    for (int64_t d = 0; d < D; ++d) x[d] += last.scale * added[d];
    if (last.is_last) apply_norm(last.out, x, D, x);
  }

  void begin_branch(int64_t b, const Own& own) {
    const Branch& branch = branches_[b];
    const bool is_alone = branch.is_first && branch.is_last;
    const int64_t D = rows_.D;
    input_.fill_by_team(rows_.M, D, own.row, [&](int64_t m, float* row) -> const float* {
      add_result(b, m, own.other);
      const float* x = rows_.x + m * D;
      if (!is_alone) {
        float* shared = rows_.shared + m * D;
        if (branch.is_first) apply_norm(branch.shared, x, D, shared);
        x = shared;
      } else if (branch.shared.kind != NormKind::NONE) {
        apply_norm(branch.shared, x, D, row);
        x = row;
      }
      if (branch.pre.kind == NormKind::NONE) return x;
      apply_norm(branch.pre, x, D, row);
      return row;
    });
  }

  // Compute queries, and keys and values, which are stored; or the hidden numbers of a feed-forward network.
  void multiply_inputs(int64_t b, const Own& own) {
    const Branch& branch = branches_[b];
    if (branch.function == Function::FEED_FORWARD) {
      if (branch.second.weight) multiply_by_team({branch.first, first_}, own.arena);
      multiply_by_team(hidden(branch), own.arena);
#pragma omp barrier
      return;
    }
    multiply_by_team({branch.first, rows_.queries}, own.arena);
    if (branch.second.weight) multiply_by_team({branch.second, second_}, own.arena);
    if (branch.third.weight) multiply_by_team({branch.third, third_}, own.arena);
#pragma omp barrier
    prepare_by_team(branch, keys_[b]);
  }

  // The last product before the activation; it applies the activation if it can.
  Product hidden(const Branch& branch) const {
    const bool has_gate = branch.second.weight;
    const Product alone{has_gate ? branch.second : branch.first, has_gate ? second_ : first_};
    if (!with_args(alone, [](const auto& args) { return args.activates(); })) return alone;
    return {alone.matrix, alone.y, branch.activation, has_gate ? first_ : nullptr};
  }

  // Norm and rotate queries and keys, and append new keys and values to the cache.
  void prepare_by_team(const Branch& branch, const Keys& keys) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < rows_.M; ++m) {
      prepare(branch.query_norm, branch, keys, m, branch.heads, rows_.queries);
      if (branch.function != Function::SELF_ATTENTION) continue;
      prepare(branch.key_norm, branch, keys, m, branch.kv_heads, second_);
      if (keys.appends) by_kind(keys.kind, [&](auto number) { append<decltype(number)>(branch, keys, m); });
    }
  }

  // Append the new key and value of a row to the cache: rows are the last keys of their group.
  template <typename Real>
  void append(const Branch& branch, const Keys& keys, int64_t m) const {
    const Group group = Group::of(m, keys);
    const int64_t E = branch.head_size, place = group.first_key + group.place(m);
    for (int64_t h = 0; h < branch.kv_heads; ++h) {
      const int64_t at = group.number * keys.row_stride + h * keys.head_stride + place * keys.key_stride;
      const int64_t from = (m * branch.kv_heads + h) * E;
      auto *key = static_cast<Real*>(keys.key) + at, *value = static_cast<Real*>(keys.value) + at;
      if constexpr (std::is_same_v<Real, int8_t>) {
        keys.key_scales[at / E] = quantize(second_ + from, E, key);
        keys.value_scales[at / E] = quantize(third_ + from, E, value);
      } else {
        round_row(second_ + from, E, key);
        round_row(third_ + from, E, value);
      }
    }
  }

  template <typename Real>
  void attend_by_team(const Branch& branch, const Keys& keys, const Own& own) {
    const int64_t H = branch.heads, E = branch.head_size, shared = H / branch.kv_heads;
    const auto* key = static_cast<const Real*>(keys.key);
    const auto* value = static_cast<const Real*>(keys.value);
    if (!key) key = reinterpret_cast<const Real*>(second_), value = reinterpret_cast<const Real*>(third_);
    // Several threads share a long group, even with few heads.
    int64_t longest = keys.rows_per_group;
    for (int64_t g = 0; keys.cu_seqlens && g < keys.groups; ++g)
      longest = std::max(longest, keys.cu_seqlens[g + 1] - keys.cu_seqlens[g]);
    const int64_t parts = (longest + ROWS_OF_HEAD - 1) / ROWS_OF_HEAD;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < keys.groups * H * parts; ++task) {
      const int64_t number = task / parts / H, head = task / parts % H, part = task % parts;
      const Group group(number, keys);
      const int64_t begin = group.begin + part * ROWS_OF_HEAD, end = std::min(group.end, begin + ROWS_OF_HEAD);
      if (begin >= end) continue;
      const int32_t* row_index = nullptr;
      if (keys.row_index && keys.row_index_stride)
        row_index = keys.row_index + number * keys.row_index_stride + group.first_key;
      const int64_t row = keys.row_index && !keys.row_index_stride ? keys.row_index[number] : number;
      const int64_t first = keys.key ? group.first_key : group.begin, row_base = row_index || !keys.key ? 0 : row * keys.row_stride;
      const int64_t base = row_base + first * keys.key_stride + head / shared * keys.head_stride;
      const bool has_next = (head + 1) % shared == 0 && head + 1 < H;
      const Head<Real> rows{
          key, value, row_index, base, keys.row_stride, keys.key_stride, has_next ? keys.head_stride : 0,
          keys.key_scales + base / E, keys.value_scales + base / E, keys.row_stride / E};
      float* queries = rows_.queries + head * E;
      if (attends_by_blocks<Traits>(group, begin, end)) {
        attend_by_blocks<BlocksOf<Traits>>(branch, group, rows, begin, end, queries, head, H * E, own.arena);
        continue;
      }
      int64_t m = begin;
      for (; m + TOGETHER <= end; m += TOGETHER)
        attend_rows<Real, TOGETHER>(branch, group, rows, queries + m * H * E, H * E, m, head, own.scores);
      for (; m < end; ++m) attend_rows<Real, 1>(branch, group, rows, queries + m * H * E, H * E, m, head, own.scores);
    }
  }

  void finish_branch(int64_t b, const Own& own) {
    const Branch& branch = branches_[b];
    const bool is_attention = branch.function != Function::FEED_FORWARD;
    if (is_attention)
      by_kind(keys_[b].kind, [&](auto number) { attend_by_team<decltype(number)>(branch, keys_[b], own); });
    const int64_t K = branch.last.inputs, size = branch.first.outputs;
    const float* gate = branch.second.weight ? second_ : nullptr;
    const float* whole = rows_.queries;
    if (!is_attention) {
      const Product last = hidden(branch);
      whole = last.activation == Activation::NONE ? nullptr : last.y;
    }
    input_.fill_by_team(rows_.M, K, own.row, [&](int64_t m, float* row) -> const float* {
      if (whole) return whole + m * K;
      apply_activation(first_ + m * size, gate ? gate + m * size : nullptr, size, branch.activation, row);
      return row;
    });
    multiply_by_team({branch.last, first_}, own.arena);
#pragma omp barrier
  }

  const Rows rows_;
  const Branch* branches_;
  const Keys* keys_;
  const int64_t count_;
  int64_t widest_, most_keys_ = 1;
  GemmInput<Traits> input_;
  // Buffers from one phase to the next: hidden numbers, then the output of a branch; gates or keys; values.
  float *first_, *second_, *third_;
};

}  // namespace
