// The instruction sets that a library is compiled for; Python's probe of the processor chooses the library.

#pragma once

#define KERNEL extern "C" __attribute__((visibility("default")))

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define HAS_AVX2 1  // AVX2 is the widest set
#endif
#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define HAS_GEMM 1  // blocks of 32 x 32 sums, in bfloat16 and in 8 bits
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX 1
#endif
#endif
#if (defined(__AVX512BW__) || defined(HAS_AVX2)) && defined(__F16C__)
#define HAS_NIBBLES 1  // 4-bit weights with 16-bit scales
#endif
#if defined(__AVX2__) && !defined(HAS_GEMM)
#define HAS_PANELS 1  // packed 8-bit weights, in the available registers
#endif
