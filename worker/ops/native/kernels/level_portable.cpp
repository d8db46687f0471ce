// For any machine: vectors of 16 bytes, which every 64-bit x86 and ARM has, and plain C++.

#include <cstring>

#include "kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

#define STOKER_LEVEL stoker_portable
#define STOKER_LEVEL_NAME "portable"
#define STOKER_VECTOR_BYTES 16
#include "level.h"

namespace stoker {
const Kernels* const kPortable = &stoker_portable::kTable;
}
