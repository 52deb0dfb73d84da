// Report the layout that a library was compiled with, which Python compares with its own; included once per library.

#pragma once

#include <omp.h>

#include <cstddef>

#include "abi.h"
#include "isa.h"

KERNEL void describe(
    void (*add)(const char* structure, const char* field, const char* type, int64_t offset, int64_t size)) {
#define STRUCT(name)                        \
  {                                         \
    using Struct = name;                    \
    const char* const structure = #name;    \
    add(structure, "", "", 0, sizeof(Struct));
#define FIELD(type, name) add(structure, #name, #type, offsetof(Struct, name), sizeof(Struct::name));
#define ARRAY(type, name, count) FIELD(type, name)
#define END }
#define ENUM(name) {
#define VALUE(name)
#define END_ENUM }
#include "abi.h"
}

KERNEL const char* isa() {
  return ""
#ifdef __AVX2__
         "avx2 "
#endif
#ifdef __AVXVNNI__
         "avx_vnni "
#endif
#ifdef __AVX512F__
         "avx512 "
#endif
#ifdef __AVX512BF16__
         "avx512_bf16 "
#endif
#ifdef __AVX512VNNI__
         "avx512_vnni "
#endif
#ifdef HAS_AMX
         "amx "
#endif
      ;
}

// The address of the OpenMP library that runs the threads.
KERNEL const void* openmp() { return reinterpret_cast<const void*>(&omp_get_max_threads); }

// Whether products of many rows are computed as GEMM blocks.
KERNEL int64_t has_gemm() {
#ifdef HAS_GEMM
  return 1;
#else
  return 0;
#endif
}
