// Linear layers over int8 weights.

namespace STOKER_LEVEL {

static int64_t packed_bytes_int8(int64_t, int64_t) { return 0; }

static void pack_int8(const void*, int32_t, void*, int64_t, int64_t) {}

static int64_t scratch_bytes_int8(int64_t, int64_t) { return 0; }

static void linear_int8(const stoker::Batch&, const stoker::LinearArgs&, const stoker::Share&) {}

STOKER_INLINE void unpack_int8(const void*, int64_t, int64_t, float*) {}

}  // namespace STOKER_LEVEL
