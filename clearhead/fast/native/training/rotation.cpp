// Rotation of queries and keys in bfloat16, and of their gradients back: dimension p is paired with p + P.
// Source: arXiv 2104.09864, section 3.2.2.
//
// Legend: B batch, H heads, T tokens, E head size, P pairs of dimensions.

#include "../abi.h"
#include "../isa.h"
#include "../team.h"
#include "../vec/vec.h"

namespace {

void rotate_token(const RotationCall& call, int64_t b, int64_t t) {
  const int64_t P = call.P, angle = b * call.angle_batch + t * P;
  for (int64_t h = 0; h < call.H; ++h) {
    const uint16_t* x = at(call.x, b, h) + t * call.x.token;
    uint16_t* y = at(call.y, b, h) + t * call.y.token;
    for (int64_t p = 0; p < P; p += WIDTH) {
      const Vec<float> first = load(x + p, P - p), second = load(x + P + p, P - p);
      const Vec<float> cos = load(call.cos + angle + p, P - p), angle_sin = load(call.sin + angle + p, P - p);
      const Vec<float> sin = call.is_back ? -angle_sin : angle_sin;
      store(y + p, first * cos - second * sin, P - p);
      store(y + P + p, second * cos + first * sin, P - p);
    }
    std::memcpy(y + 2 * P, x + 2 * P, (call.E - 2 * P) * 2);
  }
}

}  // namespace

KERNEL void rotation(const RotationCall* call, int64_t threads) {
  const int64_t T = call->T, rows = call->B * T;
#pragma omp parallel for schedule(static) num_threads(team_size(threads, rows * call->H * call->E))
  for (int64_t row = 0; row < rows; ++row) rotate_token(*call, row / T, row % T);
}
