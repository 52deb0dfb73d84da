// Sampling from logits: the most probable tokens are found by halving the range of the logits, without a sort.

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "../isa.h"
#include "../team.h"
#include "../vec/vec.h"

namespace {

// Logits this far below the highest one of a row have no weight in fp32.
constexpr float WIDEST = 88.0f;
constexpr int HALVINGS = 7;  // halvings over the whole row; then the remaining numbers are copied
constexpr size_t FEW = 64;    // numbers that are sorted
constexpr int64_t BLOCK = 512;   // numbers that are summed before the index of a draw is searched

typedef float HalfFloats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));

struct Candidate {
  float value, weight;
  int64_t place;
};

// The kept numbers: all above a limit, and numbers equal to the limit from an index on.
struct Cut {
  float value;
  int64_t first;
};

// The fp64 sum of values(i) for the vectors from start to stop, and of value(i) for the remaining numbers.
template <typename Values, typename Value>
double sum_in_fp64(int64_t start, int64_t stop, const Values& values, const Value& value) {
  Doubles sums[4] = {};
  HalfFloats halves[4];
  constexpr int64_t STEP = sizeof halves / sizeof(float);
  for (; start + STEP <= stop; start += STEP) {
    Vec<float> vec[STEP / WIDTH];
    for (int64_t i = 0; i < STEP / WIDTH; ++i) vec[i] = values(start + i * WIDTH);
    std::memcpy(halves, vec, sizeof halves);
    for (int i = 0; i < 4; ++i) sums[i] += __builtin_convertvector(halves[i], Doubles);
  }
  sums[0] += sums[1] + (sums[2] + sums[3]);
  double sum = 0;
  for (int i = 0; i < 8; ++i) sum += sums[0][i];
  for (; start < stop; ++start) sum += value(start);
  return sum;
}

// The sum of the weights of all numbers up to a value; without weights, the number of these numbers.
double sum_up_to(float value, const float* x, const float* weights, int64_t size) {
  if (weights == nullptr) return double(std::count_if(x, x + size, [=](float one) { return one <= value; }));
  const auto values = [=](int64_t i) { return select(load(x + i) <= value, load(weights + i), Vec<float>{}); };
  return sum_in_fp64(0, size, values, [=](int64_t i) { return x[i] <= value ? weights[i] : 0.0f; });
}

// Numbers are in ascending order, ties by index. Return the first number up to which the sum is no longer low, or the
// last number if the sum of all is low.
template <typename IsLow>
Cut first_after(std::vector<Candidate>& left, double below, const IsLow& is_low) {
  const auto by_value = [](const Candidate& a, const Candidate& b) { return a.value < b.value; };
  while (true) {
    const auto [least, most] = std::minmax_element(left.begin(), left.end(), by_value);
    const float low = least->value, high = most->value;
    if (!(low < high)) break;
    if (left.size() <= FEW) {
      std::stable_sort(left.begin(), left.end(), by_value);
      break;
    }
    float middle = low / 2 + high / 2;
    if (!(middle < high)) middle = low;
    double sum = below;
    for (const Candidate& one : left) sum += one.value <= middle ? one.weight : 0.0f;
    const bool goes_on = is_low(sum);
    if (goes_on) below = sum;
    const auto is_done = [&](const Candidate& one) { return (one.value <= middle) == goes_on; };
    left.erase(std::remove_if(left.begin(), left.end(), is_done), left.end());
  }
  for (const Candidate& one : left)
    if (!is_low(below += one.weight)) return {one.value, one.place};
  return {left.back().value, left.back().place};
}

template <typename IsLow>
Cut find_cut(const float* x, const float* weights, int64_t size, float least, float most, const IsLow& is_low) {
  const float under = std::nextafter(least, -INFINITY);
  float low = std::max(under, most - WIDEST), high = most;
  double below = weights == nullptr ? sum_up_to(low, x, weights, size) : 0.0;
  if (!is_low(below)) {
    high = low, low = under;
    below = sum_up_to(low, x, weights, size);
    if (!is_low(below)) return {-INFINITY, 0};
  }
  for (int i = 0; i < HALVINGS; ++i) {
    const float middle = low / 2 + high / 2;
    if (!(low < middle && middle < high)) break;
    const double sum = sum_up_to(middle, x, weights, size);
    if (is_low(sum))
      low = middle, below = sum;
    else
      high = middle;
  }
  std::vector<Candidate> left;
  for (int64_t start = 0; start < size; start += WIDTH) {
    if (start + WIDTH <= size && !any_set((load(x + start) > low) & (load(x + start) <= high))) continue;
    for (int64_t i = start; i < std::min(size, start + WIDTH); ++i)
      if (x[i] > low && x[i] <= high) left.push_back({x[i], weights == nullptr ? 1.0f : weights[i], i});
  }
  return left.empty() ? Cut{most, 0} : first_after(left, below, is_low);
}

// Write x / divisor with -infinity for banned ids; return the lowest finite and the highest number.
template <typename Real>
std::pair<float, float> divided(
    const Real* row, int64_t size, float divisor, const int64_t* banned, int64_t num_banned, float* x) {
  const int64_t whole = size / WIDTH * WIDTH;
  for (int64_t i = 0; i < whole; i += WIDTH) store(x + i, load(row + i) / divisor);
  for (int64_t i = whole; i < size; ++i) x[i] = to_float(row[i]) / divisor;
  for (int64_t i = 0; i < num_banned; ++i)
    if (banned[i] >= 0 && banned[i] < size) x[banned[i]] = -INFINITY;
  const float most = max(x, size, -INFINITY);
  const auto finite_or_highest = [=](Vec<float> vec) { return -select(vec == -INFINITY, broadcast(most), vec); };
  float least = -reduce_max(reduce(x, whole, broadcast(-most), finite_or_highest, max<Vec<float>>));
  for (int64_t i = whole; i < size; ++i) least = x[i] == -INFINITY ? least : std::min(least, x[i]);
  return {least, most};
}

// Set the weights of cut numbers to zero.
void apply_cut(const Cut& cut, const float* x, int64_t size, float* weights) {
#pragma omp simd
  for (int64_t i = 0; i < cut.first; ++i) weights[i] = x[i] > cut.value ? weights[i] : 0.0f;
#pragma omp simd
  for (int64_t i = cut.first; i < size; ++i) weights[i] = x[i] >= cut.value ? weights[i] : 0.0f;
}

// The first index up to which the sum of the weights above `least` exceeds a share of their total.
int64_t place_of_share(double share, const float* weights, int64_t size, float least) {
  std::vector<double> sums;
  double total = 0;
  for (int64_t start = 0; start < size; start += BLOCK) {
    const int64_t stop = std::min(size, start + BLOCK);
    const auto values = [=](int64_t i) {
      const Vec<float> vec = load(weights + i);
      return select(vec >= least, vec, Vec<float>{});
    };
    sums.push_back(sum_in_fp64(start, stop, values, [=](int64_t i) { return weights[i] >= least ? weights[i] : 0.0f; }));
    total += sums.back();
  }
  const double target = std::min(share * total, std::nextafter(total, 0.0));
  double running = 0;
  int64_t last = 0;
  for (size_t block = 0; block < sums.size(); ++block) {
    if (running + sums[block] <= target) {
      running += sums[block];
      continue;
    }
    const int64_t start = int64_t(block) * BLOCK;
    for (int64_t i = start; i < std::min(size, start + BLOCK); ++i) {
      if (!(weights[i] >= least && weights[i] > 0)) continue;
      running += weights[i];
      last = i;
      if (running > target) return i;
    }
  }
  return last;
}

struct Settings {
  double divisor, top_p, min_p;
};

// Draw a token, or -1 if every number is -infinity.
template <typename Real>
int64_t drawn(const Real* row, int64_t size, const int64_t* banned, int64_t num_banned, int64_t top_k, const Settings& settings,
              double uniform, float* x, float* weights) {
  const auto [least, most] = divided(row, size, float(settings.divisor), banned, num_banned, x);
  if (most == -INFINITY) return -1;
  const int64_t whole = size / WIDTH * WIDTH;
  for (int64_t i = 0; i < whole; i += WIDTH) store(weights + i, exp(load(x + i) - most));
  for (int64_t i = whole; i < size; ++i) weights[i] = std::exp(x[i] - most);
  if (top_k > 0 && top_k < size) {
    const double out = double(size - top_k);
    const Cut cut = find_cut(x, nullptr, size, least, most, [=](double count) { return count <= out; });
    apply_cut({cut.value, 0}, x, size, weights);
  }
  if (settings.top_p < 1) {
    const double total = sum_up_to(most, x, weights, size);
    const float out = float(1.0 - settings.top_p);  // both sides in fp32, where sums of ten tenths are exact
    const auto is_low = [=](double sum) { return float(sum / total) <= out; };
    apply_cut(find_cut(x, weights, size, least, most, is_low), x, size, weights);
  }
  return place_of_share(uniform, weights, size, float(settings.min_p));
}

template <typename Real>
void sample(const Real* logits, const int64_t* banned, const double* uniform, const Settings* settings, int64_t* tokens,
            int64_t rows, int64_t size, int64_t stride, int64_t num_banned, int64_t top_k, int64_t threads) {
#pragma omp parallel num_threads(rows > 1 ? team_size(threads, rows * size) : 1)
  {
    const std::unique_ptr<float[]> workspace(new float[2 * size]);
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < rows; ++r)
      tokens[r] = drawn(logits + r * stride, size, banned, num_banned, top_k, *settings, uniform[r], workspace.get(),
                        workspace.get() + size);
  }
}

}  // namespace

#define SAMPLE(name, Real)                                                                                     \
  KERNEL void name(                                                                                            \
      const Real* logits, const int64_t* banned, const double* uniform, const Settings* settings,             \
      int64_t* tokens, int64_t rows, int64_t size, int64_t stride, int64_t num_banned, int64_t top_k,         \
      int64_t threads) {                                                                                       \
    sample(logits, banned, uniform, settings, tokens, rows, size, stride, num_banned, top_k, threads);        \
  }

SAMPLE(sample_float32, float)
SAMPLE(sample_bfloat16, uint16_t)
