// Rotation of queries and keys in bfloat16, and of their gradients back: dimension p is paired with p + P.
// Source: arXiv 2104.09864, section 3.2.2.
//
// Legend: B batch, H heads, T tokens, E head size, P pairs of dimensions.

#include "calls.h"
#include "partial.h"

namespace {

void rotate_token(const RotationCall& call, long b, long t) {
  const long P = call.P, at = b * call.angle_batch + t * P;
  for (long h = 0; h < call.H; ++h) {
    const uint16_t* x = call.x.at(b, h) + t * call.x.token;
    uint16_t* y = call.y.at(b, h) + t * call.y.token;
    for (long p = 0; p < P; p += LANES) {
      const Floats first = load_some(x + p, P - p), second = load_some(x + P + p, P - p);
      const Floats cos = load_some(call.cos + at + p, P - p), angle_sin = load_some(call.sin + at + p, P - p);
      const Floats sin = call.is_back ? -angle_sin : angle_sin;
      store_some(y + p, first * cos - second * sin, P - p);
      store_some(y + P + p, second * cos + first * sin, P - p);
    }
    std::memcpy(y + 2 * P, x + 2 * P, (call.E - 2 * P) * 2);
  }
}

}  // namespace

extern "C" {

void rotation(const RotationCall* call) {
  const long T = call->T, rows = call->B * T;
#pragma omp parallel for schedule(static) if (rows * call->H * call->E > LEAST_WORK)
  for (long row = 0; row < rows; ++row) rotate_token(*call, row / T, row % T);
}
}
