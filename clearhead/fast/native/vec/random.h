// Random bits from a seed and the position of an element, so that the backward pass needs no stored mask.

#pragma once

#include "vec.h"

namespace {

// Source: C. Wellons, "Prospecting for hash functions" (lowbias32), with a word of the seed before each of two steps.
template <typename Word>
inline Word random_bits(Word place, uint32_t first_seed, uint32_t second_seed) {
  Word x = place + first_seed;
  x = (x ^ (x >> 16)) * 0x7feb352du + second_seed;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

}  // namespace
