// The highest allowed numbers of each row, and the log of the sum of the exponentials of all numbers, for search on
// logits.

#include <algorithm>

#include "../isa.h"
#include "../team.h"
#include "../vec/vec.h"

namespace {

// Insert a value into a list in descending order; of equal values, the one found first stays in front.
void insert(float* values, int64_t* places, int64_t count, float value, int64_t place) {
  int64_t at = count - 1;
  for (; at > 0 && values[at - 1] < value; --at) {
    values[at] = values[at - 1];
    places[at] = places[at - 1];
  }
  values[at] = value;
  places[at] = place;
}

struct Banned {
  const int64_t* ids;
  int64_t count;

  bool has(int64_t id) const { return std::find(ids, ids + count, id) != ids + count; }
};

// Banned numbers count as -infinity, except in the sum.
template <typename Real>
void top_of_row(
    const Real* row, int64_t size, const Banned& banned, int64_t count, float* values, int64_t* places, float* log_total) {
  std::fill(values, values + count, -INFINITY);
  std::fill(places, places + count, 0);
  float most = -INFINITY;
  int64_t i = 0, found = 0;
  // Numbers of -infinity fill the list too, until higher ones are found.
  for (; i < size && found < count; ++i, ++found) {
    const float value = to_float(row[i]);
    most = std::max(most, value);
    insert(values, places, found + 1, banned.has(i) ? -INFINITY : value, i);
  }
  const auto look = [&](float value, int64_t place) {
    if (!(value > values[count - 1])) return;
    most = std::max(most, value);
    if (!banned.has(place)) insert(values, places, count, value, place);
  };
  for (; i + WIDTH <= size; i += WIDTH) {
    const Vec<float> vec = load(row + i);
    if (!any_set(vec > values[count - 1])) continue;
    for (int lane = 0; lane < WIDTH; ++lane) look(vec[lane], i + lane);
  }
  for (; i < size; ++i) look(to_float(row[i]), i);
  most = most == -INFINITY ? 0.0f : most;
  Vec<float> sums = {};
  for (i = 0; i + WIDTH <= size; i += WIDTH) sums += exp(load(row + i) - most);
  double sum = reduce_add(sums);
  for (; i < size; ++i) sum += std::exp(to_float(row[i]) - most);
  *log_total = float(std::log(sum)) + most;
}

}  // namespace

#define TOP(name, Real)                                                                                      \
  KERNEL void name(                                                                                          \
      const Real* x, const int64_t* banned, float* values, int64_t* places, float* log_totals, int64_t rows, \
      int64_t size, int64_t stride, int64_t num_banned, int64_t count, int64_t threads) {                    \
    _Pragma("omp parallel for schedule(static) num_threads(team_size(threads, rows * size))")                \
    for (int64_t r = 0; r < rows; ++r)                                                                       \
      top_of_row(x + r * stride, size, {banned, num_banned}, count, values + r * count, places + r * count,  \
                 log_totals + r);                                                                            \
  }

TOP(top_float32, float)
TOP(top_bfloat16, uint16_t)
