// Teams of threads. Functions that end in _by_team are called by all threads of a parallel region, which share the
// work; a barrier ends them unless they say otherwise.

#pragma once

#include <omp.h>

#include <cstdint>

namespace {

constexpr int64_t LEAST_WORK = 1 << 16;  // multiplications; below it, a second thread costs more than it brings

inline int team_size(int64_t threads, int64_t work) { return work > LEAST_WORK ? int(threads) : 1; }

}  // namespace
