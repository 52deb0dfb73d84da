// Tensors by head.

#pragma once

#include <algorithm>

#include "../abi.h"
#include "../isa.h"
#include "../team.h"
#include "../vec/vec.h"

namespace {

inline uint16_t* at(const Heads& heads, int64_t b, int64_t h) { return heads.data + b * heads.batch + h * heads.head; }

}  // namespace
