// For x86 with AMX for bfloat16, and AVX-512 with VNNI and BF16: Intel servers since 2023.

#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__) && STOKER_CAN_COMPILE_AMX
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                      \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC optimize("O3")
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")
#endif

#define STOKER_LEVEL stoker_amx
#define STOKER_LEVEL_NAME "amx"
#define STOKER_VECTOR_BYTES 64
#define STOKER_HAS_F16C
#define STOKER_HAS_AVX2
#define STOKER_HAS_AVX512
#define STOKER_HAS_AMX
#include "level.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace stoker {
const Kernels* const kAmx = &stoker_amx::kTable;
}
#else
namespace stoker {
const Kernels* const kAmx = nullptr;
}
#endif
