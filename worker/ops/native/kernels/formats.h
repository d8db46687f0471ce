// Which linear layer belongs to which format of weights.

namespace STOKER_LEVEL {

static int64_t packed_bytes(int64_t out_features, int64_t in_features, int32_t format) {
#ifdef STOKER_HAS_AMX
    if (format == stoker::kBFloat16) return amx::packed_bytes(out_features, in_features);
#endif
    return format == stoker::kInt8 ? int8::packed_bytes(out_features, in_features)
                                   : packed_bytes_floats(out_features, in_features, format);
}

static void pack_linear(const void* weight, int32_t from, void* packed, int32_t to,
                        int64_t out_features, int64_t in_features, const stoker::Share& share) {
#ifdef STOKER_HAS_AMX
    if (to == stoker::kBFloat16) {
        return amx::pack(weight, from, packed, out_features, in_features, share);
    }
#endif
    if (to == stoker::kInt8) {
        int8::pack(weight, from, packed, out_features, in_features, share);
    } else {
        pack_floats(weight, from, packed, to, out_features, in_features, share);
    }
}

static int64_t linear_scratch_bytes(int64_t rows, int64_t in_features, int32_t format) {
#ifdef STOKER_HAS_AMX
    if (format == stoker::kBFloat16) return amx::scratch_bytes(rows, in_features);
#endif
    return format == stoker::kInt8 ? int8::scratch_bytes(rows, in_features) : 0;
}

static void linear(const stoker::Batch& batch, const stoker::LinearArgs& args,
                   const stoker::Share& share) {
#ifdef STOKER_HAS_AMX
    if (args.format == stoker::kBFloat16) return amx::linear(batch, args, share);
#endif
    if (args.format == stoker::kInt8) {
        int8::linear(batch, args, share);
    } else {
        linear_floats(batch, args, share);
    }
}

// The weights of one output column, as floats.
STOKER_INLINE void unpack_column(const void* packed, int32_t format, int64_t in_features,
                                 int64_t column, float* out) {
#ifdef STOKER_HAS_AMX
    if (format == stoker::kBFloat16) return amx::unpack(packed, in_features, column, out);
#endif
    if (format == stoker::kInt8) {
        int8::unpack(packed, in_features, column, out);
    } else {
        unpack_floats(packed, format, in_features, column, out);
    }
}

}  // namespace STOKER_LEVEL
