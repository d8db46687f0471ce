// For x86 with AVX-512 (F, BW, DQ, VL) and VNNI: Intel servers since 2019, AMD since 2022.

#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                      \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), \
    apply_to = function)
#else
#pragma GCC optimize("O3")
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif

#define STOKER_LEVEL stoker_avx512
#define STOKER_LEVEL_NAME "avx512"
#define STOKER_VECTOR_BYTES 64
#define STOKER_HAS_F16C
#define STOKER_HAS_AVX2
#define STOKER_HAS_AVX512
#include "level.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace stoker {
const Kernels* const kAvx512 = &stoker_avx512::kTable;
}
#else
namespace stoker {
const Kernels* const kAvx512 = nullptr;
}
#endif
