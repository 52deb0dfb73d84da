// Arguments of one product, y[m][n] = sum over k of x[m][k] * w[n][k], + bias[n]; and the epilogues, which turn sums
// into outputs by scales, bias, activation and factor.
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "block.h"

namespace {

template <typename Traits>
struct GemmArgs {
  int64_t M, N, K;
  const typename Traits::X* x;
  const uint32_t* packed_x;     // x from `pack_transposed`; null: without a matrix unit, or with packed weights
  bool packs_weights;           // pack weights into blocks, and read x unpacked
  const typename Traits::W* w;
  const typename Traits::Y* bias;
  const float* row_scales;      // scales of 8-bit x [M]
  // correction for the zero point, for each 8-bit row of x [M]; for 4-bit weights, initial sums of groups [M, K / 32]
  const int32_t* compensation;
  const float* output_scales;   // scales of 8-bit w [N]
  typename Traits::Y* y;
  int64_t ldb = 0;  // above 0: float32 weights are transposed, [K, N], with this stride between rows
  int64_t activation = Activation::NONE;  // activation of the outputs, if whole blocks compute it
  const float* factor = nullptr;  // factor of the outputs after the activation [M, N]; null: none
  const uint16_t* group_scales = nullptr;  // fp16 scales of 4-bit w [N, K / 32]

  bool activates() const { return (packs_weights || packed_x) && N % PANEL == 0; }

  // Write one output from a vector of sums.
  void write(int64_t m, int64_t n, typename Traits::Sum sum) const {
    const float value = scaled(m, n, sum);
    store_one(y + m * N + n, value + (bias ? to_float(bias[n]) : 0.0f));
  }

  // Write four outputs from n on.
  void write_four(int64_t m, int64_t n, const typename Traits::Sum* sums) const {
    if constexpr (std::is_same_v<typename Traits::Y, float>) {
      typedef float Four __attribute__((vector_size(16), aligned(4)));
      typedef typename Traits::Sum FourSums __attribute__((vector_size(16), aligned(4)));
      const auto& sum = *reinterpret_cast<const FourSums*>(sums);
      Four value;
      if constexpr (std::is_same_v<Traits, Int8>)
        value = __builtin_convertvector(sum - compensation[m], Four) *
            (row_scales[m] * *reinterpret_cast<const Four*>(output_scales + n));
      else if constexpr (std::is_same_v<Traits, Int4>) value = sum * row_scales[m];
      else value = sum;
      *reinterpret_cast<Four*>(y + m * N + n) = value + (bias ? *reinterpret_cast<const Four*>(bias + n) : Four{});
    } else
      for (int64_t i = 0; i < 4; ++i) write(m, n + i, sums[i]);
  }

 private:
  float scaled(int64_t m, int64_t n, typename Traits::Sum sum) const {
    if constexpr (std::is_same_v<Traits, Int8>) return float(sum - compensation[m]) * (row_scales[m] * output_scales[n]);
    else if constexpr (std::is_same_v<Traits, Int4>) return sum * row_scales[m];
    else return sum;
  }
};

// Return the arguments for the outputs from n on. Their weights, `count` outputs, are rounded into `rounded`.
inline GemmArgs<Mixed> round_weights(
    const GemmArgs<MixedFloat16>& args, int64_t n, int64_t count, uint16_t* rounded) {
  round_row(args.w + n * args.K, count * args.K, rounded);
  return {args.M, args.N, args.K, args.x, args.packed_x, args.packs_weights, rounded, args.bias ? args.bias + n : nullptr,
          nullptr, nullptr, nullptr, args.y + n, 0, args.activation, args.factor ? args.factor + n : nullptr};
}

// The epilogue of WIDTH outputs from n on.
template <typename Traits>
class Epilogue {
 public:
  Epilogue(const GemmArgs<Traits>& args, int64_t n) : args_(args), n_(n), scales_{}, bias_{} {
    if constexpr (std::is_same_v<Traits, Int8>) scales_ = load(args.output_scales + n);
    if (args.bias) bias_ = load(args.bias + n);
  }

  // Write the outputs of row m.
  void write(SumsOf<Traits> sums, int64_t m) const {
    Vec<float> y = scaled(sums, m) + bias_;
    if (args_.activation != Activation::NONE) {
      y = activate(y, args_.activation);
      if (args_.factor) y *= load(args_.factor + m * args_.N + n_);
    }
    store(args_.y + m * args_.N + n_, y);
  }

 private:
  Vec<float> scaled(SumsOf<Traits> sums, int64_t m) const {
    if constexpr (std::is_same_v<Traits, Int8>) {
      const int32_t compensation = IS_SIGNED ? 0 : args_.compensation[m];
      return __builtin_convertvector(sums - compensation, Vec<float>) * (scales_ * args_.row_scales[m]);
    } else if constexpr (std::is_same_v<Traits, Int4>) return sums * args_.row_scales[m];
    else return sums;
  }

  const GemmArgs<Traits>& args_;
  const int64_t n_;
  Vec<float> scales_, bias_;
};

#ifdef HAS_GEMM

// The sums of 32 outputs for up to 32 rows. They are written while the next sums are computed.
template <typename Traits>
class InterleavedEpilogue {
 public:
  typename Traits::Sum* next = memory_[0];  // sums that are computed now

  // Take the complete sums in `next`.
  void take(int64_t n, int64_t m, int64_t rows) {
    sums_ = next, next = memory_[next == memory_[0]];
    n_ = n, m_ = m, rows_ = rows, written_ = 0;
  }

  void write(const GemmArgs<Traits>& args, int64_t most = BLOCK) {
    const int64_t end = std::min(rows_, written_ + most);
    if (written_ == end) return;
    const Epilogue<Traits> left(args, n_), right(args, n_ + TILE);
    for (; written_ < end; ++written_) {
      const auto* row = reinterpret_cast<const SumsOf<Traits>*>(sums_ + written_ * BLOCK);
      left.write(row[0], m_ + written_);
      right.write(row[1], m_ + written_);
    }
  }

 private:
  alignas(64) typename Traits::Sum memory_[2][BLOCK * BLOCK];
  typename Traits::Sum* sums_ = memory_[1];
  int64_t n_ = 0, m_ = 0, rows_ = 0, written_ = 0;  // number of rows, and number of rows already written
};

#endif

}  // namespace
