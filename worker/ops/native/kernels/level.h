// The kernels of one level, compiled where this is included: see level_*.cpp.

// clang-format off: vec.h first
#include "vec.h"
#include "linear.h"
#include "linear_int8.h"
#ifdef STOKER_HAS_AMX
#include "linear_amx.h"
#endif
#include "formats.h"
#include "kv_heads.h"
#include "attention_tiles.h"
#include "attention_plan.h"
#include "attention.h"
#include "elementwise.h"
#include "sampling.h"
// clang-format on

namespace STOKER_LEVEL {

static const stoker::Kernels kTable = {
    STOKER_LEVEL_NAME, packed_bytes, pack_linear, linear_scratch_bytes, linear,    embedding,
    take_rows,         norm,         activation,  rotate,               attention,
    draw,
};

}  // namespace STOKER_LEVEL
