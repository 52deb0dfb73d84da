// The layers of a stack in one call, for new tokens beside cached ones and for whole texts: a branch at a time, all
// threads side by side.
//
//     x <- out( x + sum_b scale_b * post_b( f_b( pre_b( shared(x) ) ) ) )
//
// A branch is five to seven phases, each shared by the threads and ended by a barrier: what the last branch left to be
// added and the norms, rounded for the products (`begin_branch`); products; and for attention the rotations and the
// scores. Activations are float32 throughout, and keys and values are what the cache has.
//
// Legend: M rows (tokens that are new), D width, H heads, K key/value heads, E head size, S keys.

#include <omp.h>

#include <cmath>
#include <vector>

#include "attention.h"

namespace {

constexpr long PART_ROWS = 256;     // that a thread runs through all layers: what it computes stays in its own cache
constexpr long ROWS_OF_HEAD = 256;  // whose attention by one head is one thread's work

// --- rows ---

void apply_norm(const Norm& norm, const float* x, long D, float* y) {
  if (norm.kind == NO_NORM) {
    if (x != y) std::copy(x, x + D, y);
    return;
  }
  float sum = 0, squares = 0;
  if (norm.kind == LAYER_NORM) {
#pragma omp simd reduction(+ : sum)
    for (long d = 0; d < D; ++d) sum += x[d];
  }
  const float mean = sum / float(D);
#pragma omp simd reduction(+ : squares)
  for (long d = 0; d < D; ++d) squares += (x[d] - mean) * (x[d] - mean);
  const float inverse = 1.0f / std::sqrt(squares / float(D) + norm.eps);
  for (long d = 0; d < D; ++d) y[d] = (x[d] - mean) * inverse;
  if (norm.weight)
    for (long d = 0; d < D; ++d) y[d] *= norm.weight[d];
  if (norm.bias)
    for (long d = 0; d < D; ++d) y[d] += norm.bias[d];
}

// y = act(gate) * up, or act(up) without a gate; in whole vectors, the last of which may end beyond F.
void apply_activation(const float* up, const float* gate, long F, int32_t form, float* y) {
  long f = 0;
  for (; f + LANES <= F; f += LANES) {
    const Floats lanes = load_lanes(up + f);
    store_lanes(y + f, gate ? activate(load_lanes(gate + f), form) * lanes : activate(lanes, form));
  }
  for (; f < F; ++f) {
    const float active = activate(spread(gate ? gate[f] : up[f]), form)[0];
    y[f] = gate ? active * up[f] : active;
  }
}

void rotate(float* head, const float* cos, const float* sin, long half) {
  for (long i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// --- the team ---

// What the threads share; it grows and is kept.
struct Buffers {
  std::vector<float> shared, first, second, third, mixed, result;
};

struct Own {  // of one thread
  std::vector<float> row, other, scores;
  Scratch scratch;
};

// Norm and rotate the heads of a row.
void prepare(const Norm& norm, const Branch& branch, const Keys& keys, long m, long heads, float* rows) {
  for (long h = 0; h < heads; ++h) {
    float* head = rows + (m * heads + h) * branch.head_size;
    if (!branch.norms_after_rotation) apply_norm(norm, head, branch.head_size, head);
    if (keys.cos && branch.function == SELF_ATTENTION)
      rotate(head, keys.cos + m * keys.angle_stride, keys.sin + m * keys.angle_stride, keys.half);
    if (branch.norms_after_rotation) apply_norm(norm, head, branch.head_size, head);
  }
}

// Write the new key and value of a row into the cache: rows are the last keys of their group.
template <typename Real>
void keep(const Branch& branch, const Keys& keys, long m, const Buffers& buffers) {
  const long E = branch.head_size, T = keys.rows_per_group;
  for (long h = 0; h < branch.kv_heads; ++h) {
    const long at = m / T * keys.row_stride + h * keys.head_stride + (keys.count - T + m % T) * keys.key_stride;
    for (long e = 0; e < E; ++e) {
      store_one(static_cast<Real*>(keys.key) + at + e, buffers.second[(m * branch.kv_heads + h) * E + e]);
      store_one(static_cast<Real*>(keys.value) + at + e, buffers.third[(m * branch.kv_heads + h) * E + e]);
    }
  }
}

template <typename Real>
void attend_by_team(const Branch& branch, const Keys& keys, bool may_round, Buffers& buffers, Own& own) {
  const long H = branch.heads, E = branch.head_size, shared = H / branch.kv_heads;
  const auto* key = static_cast<const Real*>(keys.key);
  const auto* value = static_cast<const Real*>(keys.value);
  if (keys.starts) {
    key = reinterpret_cast<const Real*>(buffers.second.data());
    value = reinterpret_cast<const Real*>(buffers.third.data());
  }
  // A long group is work for several threads, however few heads there are.
  const long parts = ((keys.starts ? keys.count : keys.rows_per_group) + ROWS_OF_HEAD - 1) / ROWS_OF_HEAD;
#pragma omp for schedule(static)
  for (long task = 0; task < keys.groups * H * parts; ++task) {
    const long number = task / parts / H, head = task / parts % H, part = task % parts;
    const long start = keys.starts ? keys.starts[number] : number * keys.rows_per_group;
    const long stop = keys.starts ? keys.starts[number + 1] : start + keys.rows_per_group;
    const Group group{number, start, stop, keys.starts ? stop - start : long(keys.count), keys};
    const long begin = start + part * ROWS_OF_HEAD, end = std::min(stop, begin + ROWS_OF_HEAD);
    const int32_t* origin = keys.origin && keys.origin_stride ? keys.origin + number * keys.origin_stride : nullptr;
    const long row = keys.origin && !keys.origin_stride ? keys.origin[number] : number;
    const long base = keys.starts ? start * keys.key_stride : origin ? 0 : row * keys.row_stride;
    const bool has_next = (head + 1) % shared == 0 && head + 1 < H;
    const Head<Real> rows{
        key, value, origin, base + head / shared * keys.head_stride, long(keys.row_stride), long(keys.key_stride),
        has_next ? long(keys.head_stride) : 0};
    const float* queries = buffers.first.data() + head * E;
    float* mixed = buffers.mixed.data() + head * E;
    if (may_round && attends_on_tiles(E, end - begin)) {
      attend_on_tiles(branch, group, rows, begin, end, queries, head, H * E, own.scratch, mixed);
      continue;
    }
    for (long m = begin; m < end; ++m)
      attend_row(branch, group, rows, queries + m * H * E, m, head, own.scores.data(), mixed + m * H * E);
  }
}

// Norm and rotate queries and keys, keep what is new, and mix the values.
void mix_by_team(const Branch& branch, const Keys& keys, bool may_round, long M, Buffers& buffers, Own& own) {
#pragma omp for schedule(static)
  for (long m = 0; m < M; ++m) {
    prepare(branch.query_norm, branch, keys, m, branch.heads, buffers.first.data());
    if (branch.function != SELF_ATTENTION) continue;
    prepare(branch.key_norm, branch, keys, m, branch.kv_heads, buffers.second.data());
    if (!keys.has_cache) continue;
    if (keys.is_half) keep<uint16_t>(branch, keys, m, buffers);
    else keep<float>(branch, keys, m, buffers);
  }
  if (keys.is_half) attend_by_team<uint16_t>(branch, keys, may_round, buffers, own);
  else attend_by_team<float>(branch, keys, may_round, buffers, own);
}

template <typename Kind>
class Team {
 public:
  Team(float* x, const Branch* branches, const Keys* keys, long count, long M, long D, Input<Kind>& input,
       Buffers& buffers)
      : x_(x), branches_(branches), keys_(keys), count_(count), M_(M), D_(D), input_(input), buffers_(buffers) {}

  // Called by all threads.
  void run(Own& own) {
    for (long b = 0; b < count_; ++b) {
      begin_branch(b, own);
      const Branch& branch = branches_[b];
      if (branch.function == FEED_FORWARD) feed_forward(branch);
      else attention(branch, keys_[b], own);
      const float* result = branch.function == FEED_FORWARD ? nullptr : buffers_.mixed.data();
      const long K = branch.last.inputs, size = branch.first.outputs;
      const float *up = buffers_.first.data(), *gate = branch.second.weight ? buffers_.second.data() : nullptr;
      input_.fill_by_team(M_, K, own.row.data(), [&](long m, float* row) -> const float* {
        if (result) return result + m * K;
        apply_activation(up + m * size, gate ? gate + m * size : nullptr, size, branch.activation, row);
        return row;
      });
      multiply(branch.last, buffers_.result.data());
#pragma omp barrier
    }
#pragma omp for schedule(static)
    for (long m = 0; m < M_; ++m) add_result(count_, m, own.other.data());
  }

 private:
  // No barrier.
  void multiply(const Matrix& matrix, float* y) {
    auto layer = input_.layer(
        M_, matrix.outputs, matrix.inputs, static_cast<const typename Kind::W*>(matrix.weight), matrix.bias,
        matrix.scales, y);
    layer.turned_stride = matrix.turned_stride;
    multiply_by_team(layer);
  }

  // Add what the branch before b left, and norm the sum where its step ends.
  void add_result(long b, long m, float* row) {
    if (b == 0) return;
    const Branch& last = branches_[b - 1];
    float* x = x_ + m * D_;
    apply_norm(last.post, buffers_.result.data() + m * D_, D_, row);
    for (long d = 0; d < D_; ++d) x[d] += last.scale * row[d];
    if (last.is_last) apply_norm(last.out, x, D_, x);
  }

  void begin_branch(long b, Own& own) {
    const Branch& branch = branches_[b];
    const bool is_alone = branch.is_first && branch.is_last;
    input_.fill_by_team(M_, D_, own.row.data(), [&](long m, float* row) -> const float* {
      add_result(b, m, own.other.data());
      const float* x = x_ + m * D_;
      if (is_alone) {
        apply_norm(branch.shared, x, D_, row);
      } else {
        float* shared = buffers_.shared.data() + m * D_;
        if (branch.is_first) apply_norm(branch.shared, x, D_, shared);
        std::copy(shared, shared + D_, row);
      }
      apply_norm(branch.pre, row, D_, row);
      return row;
    });
  }

  void feed_forward(const Branch& branch) {
    multiply(branch.first, buffers_.first.data());
    if (branch.second.weight) multiply(branch.second, buffers_.second.data());
#pragma omp barrier
  }

  void attention(const Branch& branch, const Keys& keys, Own& own) {
    multiply(branch.first, buffers_.first.data());
    if (branch.function == SELF_ATTENTION) {
      multiply(branch.second, buffers_.second.data());
      multiply(branch.third, buffers_.third.data());
    }
#pragma omp barrier
    mix_by_team(branch, keys, !std::is_same_v<Kind, Float32>, M_, buffers_, own);
  }

  float* x_;
  const Branch* branches_;
  const Keys* keys_;
  const long count_, M_, D_;
  Input<Kind>& input_;
  Buffers& buffers_;
};

void grow(std::vector<float>& buffer, long size) {
  if (long(buffer.size()) < size + LANES) buffer.resize(size + LANES);
}

template <typename Kind>
void run_by_team(
    float* x, const Branch* branches, const Keys* keys, long count, long M, long D, int threads) {
  static thread_local Input<Kind> own_input;
  static thread_local Buffers own_buffers;
  Input<Kind>& input = own_input;  // not the variables: every thread has one of its own
  Buffers& buffers = own_buffers;
  long widest = D, most_keys = 1;
  for (long b = 0; b < count; ++b) {
    const Branch& branch = branches[b];
    grow(buffers.first, M * branch.first.outputs);
    grow(buffers.second, M * branch.second.outputs);
    grow(buffers.third, M * branch.third.outputs);
    if (branch.function != FEED_FORWARD) grow(buffers.mixed, M * branch.last.inputs);
    widest = std::max(widest, long(branch.last.inputs));
    most_keys = std::max(most_keys, long(keys[b].count));
  }
  grow(buffers.shared, M * D);
  grow(buffers.result, M * D);
  input.reserve(M, widest);
  Team<Kind> team(x, branches, keys, count, M, D, input, buffers);
#pragma omp parallel num_threads(threads)
  {
    static thread_local Own own;
    grow(own.row, widest);
    grow(own.other, D);
    grow(own.scores, most_keys);
    team.run(own);
  }
}

// Whole texts need no other's rows: each thread runs some of them through all layers, and what it computes stays in its
// caches. Returns whether there are parts for all threads; else nothing has been done.
template <typename Kind>
bool run_texts(float* x, const Branch* branches, const Keys* keys, long count, long D, const Keys& texts) {
  const long rows = texts.starts[texts.groups], share = (rows + omp_get_max_threads() - 1) / omp_get_max_threads();
  std::vector<long> bounds{0};
  for (long group = 1; group <= texts.groups; ++group) {
    const bool is_full = texts.starts[group] - texts.starts[bounds.back()] >= std::min(PART_ROWS, share);
    if (is_full || group == texts.groups) bounds.push_back(group);
  }
  if (long(bounds.size()) - 1 < omp_get_max_threads()) return false;
#pragma omp parallel for schedule(dynamic)
  for (long part = 0; part < long(bounds.size()) - 1; ++part) {
    const long first = texts.starts[bounds[part]], last = texts.starts[bounds[part + 1]];
    std::vector<int64_t> starts(texts.starts + bounds[part], texts.starts + bounds[part + 1] + 1);
    for (int64_t& start : starts) start -= first;
    std::vector<Keys> own(keys, keys + count);
    for (Keys& one : own) {
      one.starts = starts.data();
      one.groups = long(starts.size()) - 1;
      if (one.cos) one.cos += first * one.angle_stride;
      if (one.sin) one.sin += first * one.angle_stride;
    }
    run_by_team<Kind>(x + first * D, branches, own.data(), count, last - first, D, 1);
  }
  return true;
}

template <typename Kind>
void run_stack(float* x, const Branch* branches, const Keys* keys, long count, long M, long D) {
  const Keys* texts = std::find_if(keys, keys + count, [](const Keys& one) { return one.starts; });
  const bool has_many = texts != keys + count && M >= 2 * MANY_ROWS;
  if (has_many && run_texts<Kind>(x, branches, keys, count, D, *texts)) return;
  run_by_team<Kind>(x, branches, keys, count, M, D, omp_get_max_threads());
}

}  // namespace

extern "C" {

void find_matrix_unit(int64_t* is_there) { *is_there = permit_tiles(); }

void stack_float32(float* x, const Branch* branches, const Keys* keys, long count, long M, long D) {
  run_stack<Float32>(x, branches, keys, count, M, D);
}

void stack_mixed(float* x, const Branch* branches, const Keys* keys, long count, long M, long D) {
  run_stack<Mixed>(x, branches, keys, count, M, D);
}

void stack_int8(float* x, const Branch* branches, const Keys* keys, long count, long M, long D) {
  run_stack<Int8>(x, branches, keys, count, M, D);
}
}
