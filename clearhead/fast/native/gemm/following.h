// Prefetch of the weights after those that are multiplied.

#pragma once

#include <algorithm>
#include <cstdint>

namespace {

// Weights are prefetched in even steps by all passes over the current weights, a few rows at a time. A prefetch by the
// first pass alone would come late, and memory would be idle after it.
struct Following {
  const char* place;
  int64_t stride;

  Following(const void* from, int64_t bytes, int64_t steps)
      : place(static_cast<const char*>(from)), stride(bytes / std::max<int64_t>(1, steps)) {}

  void fetch(int64_t bytes = 0) const { __builtin_prefetch(place + bytes); }
  void advance() { place += stride; }
};

// Make the compiler believe that an address changes. Otherwise it would advance the addresses of all rows, which do not
// fit into registers.
template <typename Number>
inline __attribute__((always_inline)) void keep(const Number*& address) {
  asm("" : "+r"(address));
}

}  // namespace
