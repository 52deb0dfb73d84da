// Vectors of which only the first numbers are in memory, at the ends of rows.

#pragma once

#include "../lanes.h"

namespace {

template <typename Real>
struct Sixteen {
  Real numbers[LANES];
};

// The first `count` of 16 numbers, and zeros.
template <typename Real>
inline Floats load_some(const Real* from, long count) {
  if (count >= LANES) return load_lanes(from);
  Sixteen<Real> all = {};
  std::memcpy(&all, from, count * sizeof(Real));
  return load_lanes(all.numbers);
}

template <typename Real>
inline void store_some(Real* to, Floats lanes, long count) {
  if (count >= LANES) return store_lanes(to, lanes);
  Sixteen<Real> all;
  store_lanes(all.numbers, lanes);
  std::memcpy(to, &all, count * sizeof(Real));
}

}  // namespace
