// Teams of threads. All threads of a parallel region call functions that end in _by_team, and share the work. Such a
// function ends with a barrier unless its comment says otherwise.

#pragma once

#include <omp.h>

#include <cstdint>

namespace {

constexpr int64_t LEAST_WORK = 1 << 16;  // multiplications; with less work, a second thread costs more than it saves

inline int team_size(int64_t threads, int64_t work) { return work > LEAST_WORK ? int(threads) : 1; }

}  // namespace
