// For x86 with AVX2, FMA and F16C: Intel since 2013, AMD since 2015.

#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC optimize("O3")
#pragma GCC target("avx2,fma,f16c")
#endif

#define STOKER_LEVEL stoker_avx2
#define STOKER_LEVEL_NAME "avx2"
#define STOKER_VECTOR_BYTES 32
#define STOKER_HAS_F16C
#define STOKER_HAS_AVX2
#include "level.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace stoker {
const Kernels* const kAvx2 = &stoker_avx2::kTable;
}
#else
namespace stoker {
const Kernels* const kAvx2 = nullptr;
}
#endif
