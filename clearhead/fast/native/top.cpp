// The highest numbers of each row, and the log of the sum of their exponentials: all that search needs of the logits.

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace {

// Put a value into a list that is sorted downward; of equal values the first one found stays in front.
void insert(float* values, int64_t* places, long count, float value, long place) {
  long at = count - 1;
  for (; at > 0 && values[at - 1] < value; --at) {
    values[at] = values[at - 1];
    places[at] = places[at - 1];
  }
  values[at] = value;
  places[at] = place;
}

template <typename Real>
void top_of_row(const Real* row, long size, long count, float* values, int64_t* places, float* log_total) {
  std::fill(values, values + count, -INFINITY);
  std::fill(places, places + count, 0);
  long i = 0, found = 0;
  // Numbers of -infinity fill the list as well, until there are others.
  for (; i < size && found < count; ++i, ++found) insert(values, places, found + 1, load_one(row + i), i);
  for (; i + LANES <= size; i += LANES) {
    const Floats lanes = load_lanes(row + i);
    if (!any(lanes > values[count - 1])) continue;
    for (int lane = 0; lane < LANES; ++lane)
      if (lanes[lane] > values[count - 1]) insert(values, places, count, lanes[lane], i + lane);
  }
  for (; i < size; ++i) {
    const float value = load_one(row + i);
    if (value > values[count - 1]) insert(values, places, count, value, i);
  }
  const float most = values[0] == -INFINITY ? 0.0f : values[0];
  Floats sums = {};
  for (i = 0; i + LANES <= size; i += LANES) sums += exp_lanes(load_lanes(row + i) - most);
  double sum = total(sums);
  for (; i < size; ++i) sum += std::exp(load_one(row + i) - most);
  *log_total = float(std::log(sum)) + most;
}

template <typename Real>
void top(
    const Real* x, long rows, long size, long stride, long count, float* values, int64_t* places, float* log_totals) {
#pragma omp parallel for schedule(static) if (rows * size > LEAST_WORK)
  for (long r = 0; r < rows; ++r)
    top_of_row(x + r * stride, size, count, values + r * count, places + r * count, log_totals + r);
}

}  // namespace

extern "C" {

void top_float32(
    const float* x, float* values, int64_t* places, float* log_totals, long rows, long size, long stride, long count) {
  top(x, rows, size, stride, count, values, places, log_totals);
}

void top_bfloat16(
    const uint16_t* x, float* values, int64_t* places, float* log_totals, long rows, long size, long stride,
    long count) {
  top(x, rows, size, stride, count, values, places, log_totals);
}
}
