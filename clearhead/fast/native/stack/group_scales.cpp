// Quantization to 4 bits: the scale of each group of 32 weights with the smallest squared error, and the nibbles.
// Each lane of a vector has one group, so sums over a group need no shuffles and have the order of nibbles.py.

#include <cfloat>

#include "../isa.h"
#include "../team.h"
#include "../vec/vec.h"

namespace {

constexpr int GROUP = 32;
constexpr float LOWEST = -8, HIGHEST = 7;
constexpr float TO_INTEGER = 12582912;  // 1.5 * 2^23: a small number plus it, minus it, is the nearest integer

// WIDTH groups, one per lane; groups after the last one are zeros.
struct Groups {
  Vec<float> weights[GROUP];

  Groups(const float* from, int64_t count) {
    alignas(64) float lanes[GROUP][WIDTH] = {};
    for (int64_t lane = 0; lane < count; ++lane)
      for (int e = 0; e < GROUP; ++e) lanes[e][lane] = from[lane * GROUP + e];
    for (int e = 0; e < GROUP; ++e) weights[e] = load(lanes[e]);
  }

  // Integers from -8 to 7; zero if a product is not a number.
  Vec<float> integer(int e, Vec<float> inverse) const {
    const Vec<float> x = weights[e] * inverse;
    return select(x == x, (clamp(x, LOWEST, HIGHEST) + TO_INTEGER) - TO_INTEGER, Vec<float>{});
  }
};

inline Vec<float> invert(Vec<float> scale) {
  const Vec<float> inverse = 1.0f / scale;
  return select(abs(inverse) <= FLT_MAX, inverse, Vec<float>{});
}

// Sum of a term for each weight: add the two halves of a group, then the two halves of the sums, and so on.
template <int FIRST = 0, int STEP = 1, typename Term>
inline __attribute__((always_inline)) Vec<float> add_halves(const Term& term) {
  if constexpr (STEP == GROUP)
    return term(FIRST);
  else
    return add_halves<FIRST, 2 * STEP>(term) + add_halves<FIRST + STEP, 2 * STEP>(term);
}

struct Fit {
  Vec<float> gain, scale;  // reduction of the squared error; the best scale for the same integers
};

Fit fit_scale(const Groups& groups, Vec<float> scale) {
  const Vec<float> inverse = invert(scale);
  Vec<float> squares = {};
  const Vec<float> product = add_halves([&](int e) __attribute__((always_inline)) {
    const Vec<float> integer = groups.integer(e, inverse);
    squares = multiply_add(integer, integer, squares);  // exact in any order
    return groups.weights[e] * integer;
  });
  const Vec<float> fitted = product / select(squares < 1.0f, broadcast(1.0f), squares);
  return {product * fitted, fitted};
}

Vec<float> find_scale(const Groups& groups, const float* divisors, int64_t count, int64_t refinements) {
  Vec<float> largest = {}, best = {}, scale = {};
  for (int e = 0; e < GROUP; ++e) largest = max(abs(groups.weights[e]), largest);
  for (int64_t i = 0; i < count; ++i) {
    const Fit fit = fit_scale(groups, largest / divisors[i]);
    const Vec<int32_t> is_better = fit.gain > best;
    best = select(is_better, fit.gain, best);
    scale = select(is_better, fit.scale, scale);
  }
  for (int64_t i = 0; i < refinements; ++i) {
    const Fit fit = fit_scale(groups, scale);
    const Vec<int32_t> is_better = fit.gain > best;
    best = select(is_better, fit.gain, best);
    scale = select(is_better, fit.scale, scale);
  }
  return scale;
}

}  // namespace

// Scales of groups of finite weights.
KERNEL void find_group_scales(
    const float* weights, const float* divisors, float* scales, int64_t groups, int64_t num_divisors,
    int64_t refinements, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(team_size(threads, groups * GROUP * num_divisors))
  for (int64_t start = 0; start < groups; start += WIDTH) {
    const int64_t count = groups - start < WIDTH ? groups - start : WIDTH;
    const Vec<float> scale = find_scale({weights + start * GROUP, count}, divisors, num_divisors, refinements);
    std::memcpy(scales + start, &scale, count * sizeof(float));
  }
}

// Nibbles of groups: the low ones are the first 16 weights, the high ones the last 16, each with 8 added.
KERNEL void pack_groups(const float* weights, const float* scales, uint8_t* nibbles, int64_t groups, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(team_size(threads, groups * GROUP * 8))
  for (int64_t start = 0; start < groups; start += WIDTH) {
    const int64_t count = groups - start < WIDTH ? groups - start : WIDTH;
    const Groups block(weights + start * GROUP, count);
    alignas(64) float lanes[WIDTH] = {};
    std::memcpy(lanes, scales + start, count * sizeof(float));
    const Vec<float> inverse = invert(load(lanes));
    for (int e = 0; e < GROUP / 2; ++e) {
      const Vec<float> low = block.integer(e, inverse) - LOWEST, high = block.integer(e + GROUP / 2, inverse) - LOWEST;
      const Vec<float> both = low + high * 16.0f;
      for (int64_t lane = 0; lane < count; ++lane) nibbles[(start + lane) * (GROUP / 2) + e] = uint8_t(both[lane]);
    }
  }
}
