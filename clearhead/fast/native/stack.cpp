// The layers of a stack in one call, for new tokens beside cached ones and for whole texts: a branch at a time, all
// threads side by side.
//
//     x <- out( x + sum_b scale_b * post_b( f_b( pre_b( shared(x) ) ) ) )
//
// A branch is five to seven phases, each shared by the threads and ended by a barrier: what the last branch left to be
// added and the norms, rounded for the products (`begin_branch`); products; and for attention the rotations and the
// scores. Activations are float32 throughout, and keys and values are what the cache has. Of many rows each thread takes
// parts through these phases by itself, up to where rows see the keys of other parts.
//
// Legend: M rows (tokens that are new), D width, H heads, K key/value heads, E head size, S keys.

#include <omp.h>

#include <cmath>
#include <vector>

#include "attention.h"

namespace {


constexpr long PART_ROWS = 256;     // that a thread computes by itself: what it computes stays in its own cache
constexpr long ROWS_OF_HEAD = 256;  // whose attention by one head is one thread's work

// --- rows ---

void apply_norm(const Norm& norm, const float* x, long D, float* y) {
  if (norm.kind == NO_NORM) {
    if (x != y) std::copy(x, x + D, y);
    return;
  }
  const float mean = norm.kind == LAYER_NORM ? sum_of(x, D, [](auto one) { return one; }) / float(D) : 0.0f;
  const float squares = sum_of(x, D, [=](auto one) { return (one - mean) * (one - mean); });
  const float inverse = 1.0f / std::sqrt(squares / float(D) + norm.eps);
  const long whole = D / LANES * LANES;
  for (long d = 0; d < whole; d += LANES) {
    Floats lanes = (load_lanes(x + d) - mean) * inverse;
    if (norm.weight) lanes *= load_lanes(norm.weight + d);
    if (norm.bias) lanes += load_lanes(norm.bias + d);
    store_lanes(y + d, lanes);
  }
  for (long d = whole; d < D; ++d)
    y[d] = (x[d] - mean) * inverse * (norm.weight ? norm.weight[d] : 1.0f) + (norm.bias ? norm.bias[d] : 0.0f);
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

// What one phase leaves to the next: hidden numbers, then the result of a branch; gates or keys; values. It grows and is
// kept.
struct Buffers {
  std::vector<float> first, second, third;
};

// The rows of a team, and what lasts of them from one branch to another. Mixed values take the places of the queries.
struct Rows {
  float *x, *shared, *queries;
  long M, D;
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

template <typename Real>
void keep_head(const float* head, long E, Real* kept) {
  long e = 0;
  for (; e + LANES <= E; e += LANES) store_lanes(kept + e, load_lanes(head + e));
  for (; e < E; ++e) store_one(kept + e, head[e]);
}

// Write the new key and value of a row into the cache: rows are the last keys of their group.
template <typename Real>
void keep(const Branch& branch, const Keys& keys, long m, const Buffers& buffers) {
  const long E = branch.head_size, T = keys.rows_per_group;
  for (long h = 0; h < branch.kv_heads; ++h) {
    const long at = m / T * keys.row_stride + h * keys.head_stride + (keys.count - T + m % T) * keys.key_stride;
    const float *key = buffers.second.data() + (m * branch.kv_heads + h) * E,
                *value = buffers.third.data() + (m * branch.kv_heads + h) * E;
    auto *kept_key = static_cast<Real*>(keys.key) + at, *kept_value = static_cast<Real*>(keys.value) + at;
    if constexpr (std::is_same_v<Real, int8_t>) {
      keys.key_scales[at / E] = quantize(key, E, kept_key);
      keys.value_scales[at / E] = quantize(value, E, kept_value);
    } else {
      keep_head(key, E, kept_key);
      keep_head(value, E, kept_value);
    }
  }
}

template <typename Real>
void attend_by_team(
    const Branch& branch, const Keys& keys, bool may_round, float* all_queries, Buffers& buffers, Own& own) {
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
    const long row_base = keys.starts ? start * keys.key_stride : origin ? 0 : row * keys.row_stride;
    const long base = row_base + head / shared * keys.head_stride;
    const bool has_next = (head + 1) % shared == 0 && head + 1 < H;
    const Head<Real> rows{
        key, value, origin, base, long(keys.row_stride), long(keys.key_stride), has_next ? long(keys.head_stride) : 0,
        keys.key_scales + base / E, keys.value_scales + base / E, long(keys.row_stride) / E};
    float* queries = all_queries + head * E;
    if (may_round && attends_by_squares(E, end - begin)) {
      attend_by_squares(branch, group, rows, begin, end, queries, head, H * E, own.scratch);
      continue;
    }
    for (long m = begin; m < end; ++m)
      attend_row(branch, group, rows, queries + m * H * E, m, head, own.scores.data());
  }
}

template <typename Work>
void by_kind(int64_t kind, const Work& work) {
  switch (kind) {
    case FLOAT_KEYS: return work(float());
    case HALF_KEYS: return work(uint16_t());
    case BYTE_KEYS: return work(int8_t());
  }
}

// Norm and rotate queries and keys, and keep what is new.
void keep_by_team(const Branch& branch, const Keys& keys, const Rows& rows, Buffers& buffers) {
#pragma omp for schedule(static)
  for (long m = 0; m < rows.M; ++m) {
    prepare(branch.query_norm, branch, keys, m, branch.heads, rows.queries);
    if (branch.function != SELF_ATTENTION) continue;
    prepare(branch.key_norm, branch, keys, m, branch.kv_heads, buffers.second.data());
    if (keys.has_cache) by_kind(keys.kind, [&](auto number) { keep<decltype(number)>(branch, keys, m, buffers); });
  }
}

template <typename Kind>
class Team {
 public:
  Team(const Rows& rows, const Branch* branches, const Keys* keys, long count, Input<Kind>& input, Buffers& buffers)
      : rows_(rows), branches_(branches), keys_(keys), count_(count), input_(input), buffers_(buffers) {}

  // Called by all threads: from where the keys of branch `from` are kept to where those of branch `to` are.
  void run(long from, long to, Own& own) {
    if (from >= 0) finish_branch(from, own);
    for (long b = from + 1; b <= std::min(to, count_ - 1); ++b) {
      begin_branch(b, own);
      multiply_inputs(b);
      if (b < to) finish_branch(b, own);
    }
    if (to < count_) return;
#pragma omp for schedule(static)
    for (long m = 0; m < rows_.M; ++m) add_result(count_, m, own.other.data());
  }

 private:
  Layer<Kind> layer(const Matrix& matrix, float* y) {
    auto made = input_.layer(
        rows_.M, matrix.outputs, matrix.inputs, static_cast<const typename Kind::W*>(matrix.weight), matrix.bias,
        matrix.scales, y);
    made.turned_stride = matrix.turned_stride;
    return made;
  }

  // Add what the branch before b left, and norm the sum where its step ends.
  void add_result(long b, long m, float* row) {
    if (b == 0) return;
    const Branch& last = branches_[b - 1];
    const long D = rows_.D;
    float* x = rows_.x + m * D;
    const float* added = buffers_.first.data() + m * D;
    if (last.post.kind != NO_NORM) {
      apply_norm(last.post, added, D, row);
      added = row;
    }
    for (long d = 0; d < D; ++d) x[d] += last.scale * added[d];
    if (last.is_last) apply_norm(last.out, x, D, x);
  }

  void begin_branch(long b, Own& own) {
    const Branch& branch = branches_[b];
    const bool is_alone = branch.is_first && branch.is_last;
    const long D = rows_.D;
    input_.fill_by_team(rows_.M, D, own.row.data(), [&](long m, float* row) -> const float* {
      add_result(b, m, own.other.data());
      const float* x = rows_.x + m * D;
      if (!is_alone) {
        float* shared = rows_.shared + m * D;
        if (branch.is_first) apply_norm(branch.shared, x, D, shared);
        x = shared;
      } else if (branch.shared.kind != NO_NORM) {
        apply_norm(branch.shared, x, D, row);
        x = row;
      }
      if (branch.pre.kind == NO_NORM) return x;
      apply_norm(branch.pre, x, D, row);
      return row;
    });
  }

  // Queries, and keys and values, which are kept; or the hidden numbers of a feed-forward network.
  void multiply_inputs(long b) {
    const Branch& branch = branches_[b];
    if (branch.function == FEED_FORWARD) {
      if (branch.second.weight) multiply_by_team(layer(branch.first, buffers_.first.data()));
      multiply_by_team(hidden(branch));
#pragma omp barrier
      return;
    }
    multiply_by_team(layer(branch.first, rows_.queries));
    if (branch.second.weight) multiply_by_team(layer(branch.second, buffers_.second.data()));
    if (branch.third.weight) multiply_by_team(layer(branch.third, buffers_.third.data()));
#pragma omp barrier
    keep_by_team(branch, keys_[b], rows_, buffers_);
  }

  // The last product before the activation, which it applies if it can.
  Layer<Kind> hidden(const Branch& branch) {
    const bool has_gate = branch.second.weight;
    Layer<Kind> made = has_gate ? layer(branch.second, buffers_.second.data()) : layer(branch.first, buffers_.first.data());
    if (made.activates()) {
      made.activation = branch.activation;
      if (has_gate) made.factor = buffers_.first.data();
    }
    return made;
  }

  void finish_branch(long b, Own& own) {
    const Branch& branch = branches_[b];
    const bool is_attention = branch.function != FEED_FORWARD;
    if (is_attention)
      by_kind(keys_[b].kind, [&](auto number) {
        attend_by_team<decltype(number)>(
            branch, keys_[b], !std::is_same_v<Kind, Float32>, rows_.queries, buffers_, own);
      });
    const long K = branch.last.inputs, size = branch.first.outputs;
    const float *up = buffers_.first.data(), *gate = branch.second.weight ? buffers_.second.data() : nullptr;
    const float* whole = rows_.queries;
    if (!is_attention) {
      const Layer<Kind> last = hidden(branch);
      whole = last.activation == NONE ? nullptr : last.y;
    }
    input_.fill_by_team(rows_.M, K, own.row.data(), [&](long m, float* row) -> const float* {
      if (whole) return whole + m * K;
      apply_activation(up + m * size, gate ? gate + m * size : nullptr, size, branch.activation, row);
      return row;
    });
    multiply_by_team(layer(branch.last, buffers_.first.data()));
#pragma omp barrier
  }

  const Rows rows_;
  const Branch* branches_;
  const Keys* keys_;
  const long count_;
  Input<Kind>& input_;
  Buffers& buffers_;
};

void grow(std::vector<float>& buffer, long size) {
  if (long(buffer.size()) < size + LANES) buffer.resize(size + LANES);
}

// Run rows from branch to branch, as `Team::run` does, by so many threads.
template <typename Kind>
void run_by_team(
    const Rows& rows, const Branch* branches, const Keys* keys, long count, long from, long to, int threads) {
  static thread_local Input<Kind> own_input;
  static thread_local Buffers own_buffers;
  Input<Kind>& input = own_input;  // not the variables: every thread has one of its own
  Buffers& buffers = own_buffers;
  const long M = rows.M;
  long widest = rows.D, most_keys = 1;
  for (long b = 0; b < count; ++b) {
    const Branch& branch = branches[b];
    if (branch.function == FEED_FORWARD) grow(buffers.first, M * branch.first.outputs);
    grow(buffers.second, M * branch.second.outputs);
    grow(buffers.third, M * branch.third.outputs);
    widest = std::max(widest, long(branch.last.inputs));
    most_keys = std::max(most_keys, long(keys[b].count));
  }
  grow(buffers.first, M * rows.D);
  input.reserve(M, widest);
  Team<Kind> team(rows, branches, keys, count, input, buffers);
#pragma omp parallel num_threads(threads)
  {
    static thread_local Own own;
    grow(own.row, widest);
    grow(own.other, rows.D);
    grow(own.scores, most_keys);
    team.run(from, to, own);
  }
}

// --- parts of the rows, each by one thread: what it computes stays in its caches ---

struct Part {
  long first, last;             // rows
  std::vector<int64_t> starts;  // of its texts
  std::vector<Keys> keys;
};

// Of a part, of so many rows in all: as many parts for each thread.
long most_rows(long M) {
  const long threads = omp_get_max_threads(), turns = (M + threads * PART_ROWS - 1) / (threads * PART_ROWS);
  return (M + threads * turns - 1) / (threads * turns);
}

// Whole texts, which need no other's rows.
std::vector<Part> parts_of_texts(const Keys* keys, long count, const Keys& texts) {
  const long most = most_rows(texts.starts[texts.groups]);
  std::vector<Part> parts;
  for (long begin = 0, end = 1; end <= texts.groups; ++end) {
    const long first = texts.starts[begin], last = texts.starts[end];
    if (last - first < most && end < texts.groups) continue;
    Part part{first, last, {texts.starts + begin, texts.starts + end + 1}, {keys, keys + count}};
    for (int64_t& start : part.starts) start -= first;
    for (Keys& one : part.keys) one.groups = end - begin;
    parts.push_back(std::move(part));
    begin = end;
  }
  for (Part& part : parts)
    for (Keys& one : part.keys) one.starts = part.starts.data();
  return parts;
}

// Rows beside a cache: groups side by side, or the rows of a long one in pieces, which see the keys before them.
std::vector<Part> parts_of_groups(const Keys* keys, long count, const Keys& cached) {
  const long T = cached.rows_per_group, most = most_rows(cached.groups * T), together = std::max(1L, most / T);
  const long pieces = (T + most - 1) / most, piece = ((T + pieces - 1) / pieces + SIDE - 1) / SIDE * SIDE;
  std::vector<Part> parts;
  for (long group = 0; group < cached.groups; group += together)
    for (long begin = 0; begin < T; begin += piece) {
      const long end = std::min(T, begin + piece), groups = std::min(together, cached.groups - group);
      Part part{group * T + begin, group * T + begin + groups * (end - begin), {}, {keys, keys + count}};
      for (Keys& one : part.keys) {
        const long numbers = one.kind == FLOAT_KEYS ? 4 : one.kind == HALF_KEYS ? 2 : 1;
        one.key = static_cast<char*>(one.key) + group * one.row_stride * numbers;
        one.value = static_cast<char*>(one.value) + group * one.row_stride * numbers;
        if (one.key_scales) one.key_scales += group * one.row_stride / one.key_stride;
        if (one.value_scales) one.value_scales += group * one.row_stride / one.key_stride;
        if (one.mask) one.mask += group * one.mask_stride;
        one.groups = groups, one.rows_per_group = end - begin, one.count -= T - end;
      }
      parts.push_back(std::move(part));
    }
  return parts;
}

// The rows of a call in parts; none where a row sees what is none of its own part's, nor before it.
std::vector<Part> parts_of(const Branch* branches, const Keys* keys, long count, long M) {
  if (M < 128) return {};
  const Keys* first = nullptr;
  for (long b = 0; b < count; ++b) {
    if (branches[b].function == FEED_FORWARD) continue;
    if (branches[b].function == MEMORY_ATTENTION || keys[b].origin || keys[b].bias) return {};
    if (keys[b].has_cache && (keys[b].after > 0 || keys[b].rows_per_group == 1)) return {};
    if (!first) first = keys + b;
  }
  if (!first) return {};
  std::vector<Part> parts = first->starts ? parts_of_texts(keys, count, *first) : parts_of_groups(keys, count, *first);
  for (Part& part : parts)
    for (Keys& one : part.keys) {
      if (one.cos) one.cos += part.first * one.angle_stride;
      if (one.sin) one.sin += part.first * one.angle_stride;
    }
  return parts;
}

template <typename Kind>
void run_stack(float* x, const Branch* branches, const Keys* keys, long count, long M, long D) {
  static thread_local std::vector<float> shared, queries;
  long widest = 1;
  for (long b = 0; b < count; ++b)
    if (branches[b].function != FEED_FORWARD) widest = std::max(widest, long(branches[b].first.outputs));
  grow(shared, M * D);
  grow(queries, M * widest);
  const Rows rows{x, shared.data(), queries.data(), M, D};
  const std::vector<Part> parts = parts_of(branches, keys, count, M);
  if (long(parts.size()) < omp_get_max_threads())
    return run_by_team<Kind>(rows, branches, keys, count, -1, count, omp_get_max_threads());
  // Rows see keys of other parts: all parts keep theirs before one attends.
  long from = -1;
  for (long to = 0; to <= count; ++to) {
    if (to < count && !keys[to].has_cache) continue;
#pragma omp parallel for schedule(dynamic)
    for (long number = 0; number < long(parts.size()); ++number) {
      const Part& part = parts[number];
      const Rows own{x + part.first * D, rows.shared + part.first * D, rows.queries + part.first * widest,
                     part.last - part.first, D};
      run_by_team<Kind>(own, branches, part.keys.data(), count, from, to, 1);
    }
    from = to;
  }
}

}  // namespace

extern "C" {

void find_squares(int64_t* are_there) { *are_there = has_squares(); }

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
