// Weights that follow those which are multiplied, fetched meanwhile.

#pragma once

#include <algorithm>
#include <cstdint>

namespace {

// Fetched in so many even steps. All passes over what is multiplied, of a few rows each, take part: fetched by the first
// alone they would come late, and memory would rest after it.
struct Following {
  const char* place;
  int64_t stride;

  Following(const void* from, int64_t bytes, int64_t steps)
      : place(static_cast<const char*>(from)), stride(bytes / std::max<int64_t>(1, steps)) {}

  void fetch(int64_t bytes = 0) const { __builtin_prefetch(place + bytes); }
  void advance() { place += stride; }
};

// The compiler takes an address for changed: it would advance those of all rows, and they would not fit into registers.
template <typename Number>
inline __attribute__((always_inline)) void keep(const Number*& address) {
  asm("" : "+r"(address));
}

}  // namespace
