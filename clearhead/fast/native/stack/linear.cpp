// Linear layers for few rows, one layer at a time; see gemm.h.

#include "../gemm/gemm.h"

namespace {

template <typename Traits, typename X>
void multiply(
    const X* x, const typename Traits::W* w, const float* output_scales, const typename Traits::Y* bias,
    typename Traits::Y* y, int64_t M, int64_t N, int64_t K, int64_t threads) {
  const int team = team_size(threads, M * N * K);
  const Workspace workspace(team);
  GemmInput<Traits> input(workspace[0], M, K);
#pragma omp parallel num_threads(team)
  {
    GemmArgs<Traits> args = input.args(M, N, K, w, bias, output_scales, y);
    if constexpr (std::is_same_v<X, typename Traits::X>) input.take_by_team(x, args);
    else input.fill_by_team(M, K, nullptr, [&](int64_t m, float*) { return x + m * K; });
    gemm_by_team(args, workspace[omp_get_thread_num()]);
  }
}

}  // namespace

KERNEL void linear_float32(
    const float* x, const float* w, const float* bias, float* y, int64_t M, int64_t N, int64_t K, int64_t threads) {
  multiply<Float32>(x, w, nullptr, bias, y, M, N, K, threads);
}

KERNEL void linear_bfloat16(
    const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, int64_t M, int64_t N, int64_t K,
    int64_t threads) {
  multiply<BFloat16>(x, w, nullptr, bias, y, M, N, K, threads);
}

KERNEL void linear_mixed(
    const float* x, const uint16_t* w, const float* bias, float* y, int64_t M, int64_t N, int64_t K, int64_t threads) {
  multiply<Mixed>(x, w, nullptr, bias, y, M, N, K, threads);
}

KERNEL void linear_mixed_float16(
    const float* x, const Float16* w, const float* bias, float* y, int64_t M, int64_t N, int64_t K, int64_t threads) {
  multiply<MixedFloat16>(x, w, nullptr, bias, y, M, N, K, threads);
}

#ifdef HAS_NIBBLES
KERNEL void linear_int4(
    const float* x, const uint8_t* w, const uint16_t* group_scales, const float* bias, float* y, int64_t M, int64_t N,
    int64_t K, int64_t threads) {
  const int team = team_size(threads, M * N * K);
  const Workspace workspace(team);
  GemmInput<Int4> input(workspace[0], M, K);
#pragma omp parallel num_threads(team)
  {
    input.fill_by_team(M, K, nullptr, [&](int64_t m, float*) { return x + m * K; });
    gemm_by_team(input.nibble_args(M, N, K, w, bias, group_scales, y), workspace[omp_get_thread_num()]);
  }
}
#endif

#if defined(HAS_GEMM) || defined(HAS_PANELS)  // without these, fp32 is faster
KERNEL void linear_int8(
    const float* x, const int8_t* w, const float* scales, const float* bias, float* y, int64_t M, int64_t N, int64_t K,
    int64_t threads) {
  multiply<Int8>(x, w, scales, bias, y, M, N, K, threads);
}
#endif
