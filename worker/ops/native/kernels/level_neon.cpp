// For 64-bit ARM with the dot product instructions (ARMv8.2 and later: Graviton 2, Apple M1).

#include <cstring>

#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC optimize("O3")
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#define STOKER_LEVEL stoker_neon
#define STOKER_LEVEL_NAME "neon"
#define STOKER_VECTOR_BYTES 16
#define STOKER_HAS_NEON
#include "level.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace stoker {
const Kernels* const kNeon = &stoker_neon::kTable;
}
#else
namespace stoker {
const Kernels* const kNeon = nullptr;
}
#endif
