// Linear layers over packed weights of float32, bfloat16 or float16.
//
// A weight is packed in panels of kPanel output columns: panel p holds, for each input feature k
// in turn, the kPanel weights w[p * kPanel + c][k], zeros past the last column. Each output value
// is one chain of multiply-adds over k in rising order, whatever the number of rows.

namespace STOKER_LEVEL {

constexpr int64_t kPanel = 16;

STOKER_INLINE int64_t num_panels(int64_t out_features) { return (out_features + kPanel - 1) / kPanel; }

STOKER_INLINE int64_t value_bytes(int32_t format) { return format == stoker::kFloat32 ? 4 : 2; }

// One value of a dense tensor.
STOKER_INLINE float value_at(const void* values, int32_t format, int64_t index) {
    if (format == stoker::kFloat32) return static_cast<const float*>(values)[index];
    const uint16_t half = static_cast<const uint16_t*>(values)[index];
    return format == stoker::kBFloat16 ? from_bfloat16(half) : from_float16(half);
}

static int64_t packed_bytes_floats(int64_t out_features, int64_t in_features, int32_t format) {
    return num_panels(out_features) * kPanel * in_features * value_bytes(format);
}

static void pack_floats(const void* weight, int32_t from, void* packed, int32_t to,
                        int64_t out_features, int64_t in_features) {
    for (int64_t panel = 0; panel < num_panels(out_features); ++panel) {
        for (int64_t k = 0; k < in_features; ++k) {
            for (int64_t c = 0; c < kPanel; ++c) {
                const int64_t column = panel * kPanel + c;
                const float value = column < out_features
                                        ? value_at(weight, from, column * in_features + k)
                                        : 0.0f;
                const int64_t index = (panel * in_features + k) * kPanel + c;
                if (to == stoker::kFloat32) {
                    static_cast<float*>(packed)[index] = value;
                } else {
                    static_cast<uint16_t*>(packed)[index] =
                        to == stoker::kBFloat16 ? to_bfloat16(value) : to_float16(value);
                }
            }
        }
    }
}

static void linear_floats(const stoker::Batch& batch, const stoker::LinearArgs& args,
                          const stoker::Share& share) {
    const int64_t rows = batch.rows(args.rows);
    for (int64_t panel; (panel = share.take()) < num_panels(args.out_features);) {
        const int64_t first = panel * kPanel;
        const int64_t columns = args.out_features - first < kPanel ? args.out_features - first : kPanel;
        for (int64_t row = 0; row < rows; ++row) {
            float sums[kPanel] = {};
            for (int64_t k = 0; k < args.in_features; ++k) {
                const float x = args.x[row * args.in_features + k];
                for (int64_t c = 0; c < kPanel; ++c) {
                    sums[c] += x * value_at(args.weight, args.format,
                                            (panel * args.in_features + k) * kPanel + c);
                }
            }
            for (int64_t c = 0; c < columns; ++c) {
                args.out[row * args.out_features + first + c] =
                    sums[c] + (args.bias != nullptr ? args.bias[first + c] : 0.0f);
            }
        }
    }
}

// The weights of one output column, as floats.
STOKER_INLINE void unpack_floats(const void* packed, int32_t format, int64_t in_features,
                                 int64_t column, float* out) {
    const int64_t start = column / kPanel * in_features * kPanel + column % kPanel;
    for (int64_t k = 0; k < in_features; ++k) out[k] = value_at(packed, format, start + k * kPanel);
}

}  // namespace STOKER_LEVEL
