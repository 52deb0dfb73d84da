// The epilogue of blocks: sums become outputs by scales, bias, activation and factor.

#pragma once

#include "args.h"

namespace {

// Of 16 outputs from n on.
template <typename Traits>
class Epilogue {
 public:
  Epilogue(const GemmArgs<Traits>& args, int64_t n) : args_(args), n_(n), scales_{}, bias_{} {
    if constexpr (std::is_same_v<Traits, Int8>) scales_ = load(args.output_scales + n);
    if (args.bias) bias_ = load(args.bias + n);
  }

  // Write those of row m.
  void write(typename Traits::Sums sums, int64_t m) const {
    Vec<float> y = scaled(sums, m) + bias_;
    if (args_.activation != Activation::NONE) {
      y = activate(y, args_.activation);
      if (args_.factor) y *= load(args_.factor + m * args_.N + n_);
    }
    store(args_.y + m * args_.N + n_, y);
  }

 private:
  Vec<float> scaled(typename Traits::Sums sums, int64_t m) const {
    if constexpr (std::is_same_v<Traits, Int8>) {
#ifdef HAS_AMX  // both sides have signs
      const int32_t compensation = 0;
#else
      const int32_t compensation = args_.compensation[m];
#endif
      return __builtin_convertvector(sums - compensation, Vec<float>) * (scales_ * args_.row_scales[m]);
    } else return sums;
  }

  const GemmArgs<Traits>& args_;
  const int64_t n_;
  Vec<float> scales_, bias_;
};

#ifdef HAS_GEMM

// The sums of 32 outputs for up to 32 rows. They are written while the next ones are computed.
template <typename Traits>
class InterleavedEpilogue {
 public:
  typename Traits::Sum* next = memory_[0];  // sums that are computed

  // Those in `next` are there.
  void take(int64_t n, int64_t m, int64_t rows) {
    sums_ = next, next = memory_[next == memory_[0]];
    n_ = n, m_ = m, rows_ = rows, written_ = 0;
  }

  void write(const GemmArgs<Traits>& args, int64_t most = BLOCK) {
    const int64_t end = std::min(rows_, written_ + most);
    if (written_ == end) return;
    const Epilogue<Traits> left(args, n_), right(args, n_ + TILE);
    for (; written_ < end; ++written_) {
      const auto* row = reinterpret_cast<const typename Traits::Sums*>(sums_ + written_ * BLOCK);
      left.write(row[0], m_ + written_);
      right.write(row[1], m_ + written_);
    }
  }

 private:
  alignas(64) typename Traits::Sum memory_[2][BLOCK * BLOCK];
  typename Traits::Sum* sums_ = memory_[1];
  int64_t n_ = 0, m_ = 0, rows_ = 0, written_ = 0;  // rows that there are, and that are written
};

#endif

}  // namespace
