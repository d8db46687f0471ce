// Linear layers over int8 weights, with a scale for each output column and kGroup input features.
//
// Weights are symmetric, -127 to 127. Rows of x are quantized as they come, each group of kGroup
// values with a scale of its own, so an outlier costs its neighbours' precision and nobody else's:
// to int16 where the machine multiplies pairs of those (AVX2, as fast as int8 would be there), to
// int8 where it has dot products of four bytes. The sum over a group is an exact integer; groups
// are added in rising order in float32. So the bits of a value depend on its row and column alone.
//
// A weight is packed in panels of kColumns output columns; a panel holds its groups in turn, a
// group its weights and then its scales:
//     int8 [kGroup / kPerLane][kColumns][kPerLane], plus kOffset
//     bfloat16 [kColumns]
// A scale is rounded up to bfloat16 before weights are divided by it: it has float32's range, and
// a step that is at most 1/128 coarser is all it costs.

namespace STOKER_LEVEL {
namespace int8 {

constexpr int64_t kGroup = 32;

#if defined(STOKER_HAS_AVX2) && !defined(STOKER_HAS_AVX512)
typedef int16_t Quantum;
constexpr float kMostQuantum = 32767.0f;  // 32 * 127 * 32767 is far below 2^31
#else
typedef int8_t Quantum;
constexpr float kMostQuantum = 127.0f;
#endif

// How many input features a 32-bit lane multiplies at once.
constexpr int64_t kPerLane = 4 / int64_t(sizeof(Quantum));
constexpr int64_t kSteps = kGroup / kPerLane;
constexpr int64_t kVectors = STOKER_VECTOR_BYTES == 16 ? 4 : 2;
constexpr int64_t kColumns = kVectors * kLanes;
constexpr int64_t kStepBytes = kLanes * kPerLane;  // of one vector's columns
constexpr int64_t kWeightBytes = kGroup * kColumns;
constexpr int64_t kGroupBytes = kWeightBytes + kColumns * 2;

#if defined(STOKER_HAS_AVX512)
// vpdpbusd wants one side unsigned. The products of the offset are taken off a group's sum before
// it begins (OfGroup::start).
constexpr int32_t kOffset = 128;
constexpr int kTileRows = 8;
#else
constexpr int32_t kOffset = 0;
constexpr int kTileRows = 4;
#endif

// Rows that share a panel while it is near; a bound on what a thread reads of x again and again.
constexpr int64_t kBlockRows = 128;

STOKER_INLINE int64_t num_groups(int64_t in_features) { return (in_features + kGroup - 1) / kGroup; }

STOKER_INLINE int64_t num_panels(int64_t out_features) {
    return (out_features + kColumns - 1) / kColumns;
}

STOKER_INLINE int64_t panel_bytes(int64_t in_features) {
    return num_groups(in_features) * kGroupBytes;
}

static int64_t packed_bytes(int64_t out_features, int64_t in_features) {
    return num_panels(out_features) * panel_bytes(in_features);
}

// Where the weight of column `column` of a panel and feature `k` of a group is in that group.
STOKER_INLINE int64_t weight_index(int64_t column, int64_t k) {
    return (k / kPerLane * kColumns + column) * kPerLane + k % kPerLane;
}

STOKER_INLINE int64_t scale_index(int64_t column) {
    return kWeightBytes + place_of(column, stoker::kBFloat16) * 2;
}

// The least bfloat16 that is at least `value`, which is positive and finite.
STOKER_INLINE uint16_t to_bfloat16_above(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return uint16_t((bits + 0xffffu) >> 16);
}

STOKER_INLINE float magnitude(float value) { return __builtin_fabsf(value); }

// One column's weights of one group. Without finite weights, its scale makes all results NaN.
STOKER_INLINE void pack_group(const float* weights, int64_t count, uint8_t* group, int64_t column) {
    float most = 0.0f;
    bool is_finite = true;
    for (int64_t k = 0; k < count; ++k) {
        most = magnitude(weights[k]) > most ? magnitude(weights[k]) : most;
        is_finite = is_finite && magnitude(weights[k]) <= __FLT_MAX__;
    }
    uint16_t scale = most < 1e-30f ? uint16_t(0) : to_bfloat16_above(most * (1.0f / 127.0f));
    const float inverse = scale == 0 ? 0.0f : 1.0f / from_bfloat16(scale);
    if (!is_finite) scale = 0x7fc0;
    for (int64_t k = 0; k < kGroup; ++k) {
        const float value = k < count && is_finite ? weights[k] * inverse : 0.0f;
        const float bounded = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
        group[weight_index(column, k)] = uint8_t(int32_t(__builtin_rintf(bounded)) + kOffset);
    }
    __builtin_memcpy(group + scale_index(column), &scale, sizeof scale);
}

static void pack(const void* weight, int32_t from, void* packed, int64_t out_features,
                 int64_t in_features, const stoker::Share& share) {
    for (stoker::Span panels; share.take_some(num_panels(out_features), kMostPanels, panels);) {
        for (int64_t column = panels.first * kColumns; column < panels.last * kColumns; ++column) {
            uint8_t* group = static_cast<uint8_t*>(packed) +
                             column / kColumns * panel_bytes(in_features);
            for (int64_t k = 0; k < in_features; k += kGroup) {
                const int64_t left = in_features - k < kGroup ? in_features - k : kGroup;
                const int64_t count = column < out_features ? left : 0;
                float weights[kGroup];
                for (int64_t i = 0; i < count; ++i) {
                    weights[i] = value_at(weight, from, column * in_features + k + i);
                }
                pack_group(weights, count, group, column % kColumns);
                group += kGroupBytes;
            }
        }
    }
}

// The weights of one output column, as floats.
STOKER_INLINE void unpack(const void* packed, int64_t in_features, int64_t column, float* out) {
    const uint8_t* panel =
        static_cast<const uint8_t*>(packed) + column / kColumns * panel_bytes(in_features);
    for (int64_t k = 0; k < in_features; ++k) {
        const uint8_t* group = panel + k / kGroup * kGroupBytes;
        uint16_t scale;
        __builtin_memcpy(&scale, group + scale_index(column % kColumns), sizeof scale);
        const uint8_t byte = group[weight_index(column % kColumns, k % kGroup)];
        const int32_t value = kOffset != 0 ? int32_t(byte) - kOffset : int32_t(int8_t(byte));
        out[k] = float(value) * from_bfloat16(scale);
    }
}

// A quantized row of x: its values, zeros past the last, then what is said of each group.
struct OfGroup {
    float scale;
    int32_t start;  // -kOffset * the sum of the group's values: what an exact sum begins with
};

STOKER_INLINE int64_t row_bytes(int64_t in_features) {
    return num_groups(in_features) * (kGroup * int64_t(sizeof(Quantum)) + int64_t(sizeof(OfGroup)));
}

static int64_t scratch_bytes(int64_t rows, int64_t in_features) {
    return rows * row_bytes(in_features);
}

typedef Quantum Quanta __attribute__((vector_size(kLanes * sizeof(Quantum))));

STOKER_INLINE OfGroup quantize_group(const float* x, Quantum* out) {
    const Floats sign = -zeros();
    Floats values[kGroup / kLanes], most = zeros(), poison = zeros();
#pragma GCC unroll 8
    for (int64_t i = 0; i < kGroup / kLanes; ++i) {
        values[i] = load(x + i * kLanes);
        most = max((Floats)((Ints)values[i] & ~(Ints)sign), most);
        poison = poison + values[i] * zeros();  // NaN if one is NaN or infinite
    }
    const float largest = max_lane(most);
    const bool is_zero = !(largest >= 1e-30f);  // also if NaN
    const Floats inverse = splat(is_zero ? 0.0f : kMostQuantum / largest);
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Ints total = {};
#pragma GCC unroll 8
    for (int64_t i = 0; i < kGroup / kLanes; ++i) {
        const Ints rounded = (Ints)multiply_add(values[i], inverse, magic) - (Ints)magic;
        if (kOffset != 0) total += rounded;
        const Quanta quanta = __builtin_convertvector(rounded, Quanta);
        __builtin_memcpy(out + i * kLanes, &quanta, sizeof quanta);
    }
    int32_t start = 0;
    for (int64_t lane = 0; lane < kLanes && kOffset != 0; ++lane) start -= total[lane] * kOffset;
    return {(is_zero ? 0.0f : largest * (1.0f / kMostQuantum)) + sum_lanes(poison), start};
}

static void quantize_row(const float* x, int64_t in_features, char* row) {
    const int64_t groups = num_groups(in_features);
    Quantum* values = reinterpret_cast<Quantum*>(row);
    char* const sums = row + groups * kGroup * int64_t(sizeof(Quantum));
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t left = in_features - group * kGroup;
        float padded[kGroup] = {};
        const float* from = x + group * kGroup;
        if (left < kGroup) {
            __builtin_memcpy(padded, from, size_t(left) * sizeof(float));
            from = padded;
        }
        const OfGroup of_group = quantize_group(from, values + group * kGroup);
        __builtin_memcpy(sums + group * int64_t(sizeof(OfGroup)), &of_group, sizeof of_group);
    }
}

// One vector of columns by kPerLane features, in the form that add_products takes.
STOKER_INLINE Ints load_weights(const uint8_t* from) {
#if defined(STOKER_HAS_AVX2) && !defined(STOKER_HAS_AVX512)
    return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
    Ints weights;
    __builtin_memcpy(&weights, from, sizeof weights);
    return weights;
#endif
}

STOKER_INLINE void load_scales(const uint8_t* from, Floats (&scales)[kVectors]) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; v += 2) {
        Words pairs;
        __builtin_memcpy(&pairs, from + v * kLanes * 2, sizeof pairs);
        scales[v] = (Floats)(pairs << 16);
        scales[v + 1] = (Floats)(pairs & 0xffff0000u);
    }
}

// Each lane's sum plus its kPerLane products, exactly.
STOKER_INLINE Ints add_products(Ints sums, Ints weights, Ints x) {
#if defined(STOKER_HAS_AVX512)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(STOKER_HAS_AVX2)
    return sums + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#elif defined(STOKER_HAS_NEON)
    return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)x);
#else
    typedef int16_t Shorts __attribute__((vector_size(STOKER_VECTOR_BYTES)));
    // Two products of 127 * 127 fit 16 bits.
    const Shorts pairs = ((Shorts)weights << 8 >> 8) * ((Shorts)x << 8 >> 8) +
                         ((Shorts)weights >> 8) * ((Shorts)x >> 8);
    return sums + ((Ints)pairs << 16 >> 16) + ((Ints)pairs >> 16);
#endif
}

STOKER_INLINE Ints splat_word(const void* from) {
    int32_t word;
    __builtin_memcpy(&word, from, sizeof word);
    return word - Ints{};
}

// What a tile of kRows rows and one panel needs of both.
struct Tile {
    const char* x;         // its first quantized row
    int64_t x_bytes;       // from row to row
    const uint8_t* panel;
    int64_t groups;
    const float* bias;     // of the panel's first column, or null
    float* out;            // of the first row and the panel's first column
    int64_t out_width;
    int64_t columns;       // of the panel that exist
};

template <int kRows>
static void multiply_tile(const Tile& tile) {
    constexpr int64_t kBytes = kGroup * int64_t(sizeof(Quantum));
    Floats sums[kRows][kVectors] = {};
    const uint8_t* weights = tile.panel;
    const char* x = tile.x;
    const char* of_groups = tile.x + tile.groups * kBytes;
    for (int64_t group = 0; group < tile.groups; ++group) {
        Ints totals[kRows][kVectors];
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                totals[row][v] = kOffset == 0 ? Ints{} : splat_word(of_groups + row * tile.x_bytes + 4);
            }
        }
#pragma GCC unroll 2
        for (int64_t step = 0; step < kSteps; ++step) {
            Ints w[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                w[v] = load_weights(weights + (step * kVectors + v) * kStepBytes);
            }
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                const Ints values = splat_word(x + row * tile.x_bytes + step * 4);
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) {
                    totals[row][v] = add_products(totals[row][v], w[v], values);
                }
            }
        }
        Floats scales[kVectors];
        load_scales(weights + kWeightBytes, scales);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const Floats of_x = (Floats)splat_word(of_groups + row * tile.x_bytes);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                sums[row][v] = multiply_add(__builtin_convertvector(totals[row][v], Floats),
                                     scales[v] * of_x, sums[row][v]);
            }
        }
        weights += kGroupBytes;
        x += kBytes;
        of_groups += sizeof(OfGroup);
    }
    for (int row = 0; row < kRows; ++row) {
        float* out = tile.out + row * tile.out_width;
        for (int v = 0; v < kVectors; ++v) {
            const int64_t left = tile.columns - v * kLanes;
            if (left <= 0) break;
            const int64_t count = left < kLanes ? left : kLanes;
            if (tile.bias != nullptr) {
                sums[row][v] += count < kLanes ? load_some(tile.bias + v * kLanes, count)
                                               : load(tile.bias + v * kLanes);
            }
            if (count < kLanes) {
                store_some(out + v * kLanes, sums[row][v], count);
            } else {
                store(out + v * kLanes, sums[row][v]);
            }
        }
    }
}

template <int kRows>
STOKER_INLINE void multiply_rest(const Tile& tile, int64_t rows) {
    if (rows == kRows) {
        multiply_tile<kRows>(tile);
    } else if constexpr (kRows > 1) {
        multiply_rest<kRows - 1>(tile, rows);
    }
}

static void multiply_panel(Tile tile, int64_t rows) {
    for (; rows >= kTileRows; rows -= kTileRows) {
        multiply_tile<kTileRows>(tile);
        tile.x += kTileRows * tile.x_bytes;
        tile.out += kTileRows * tile.out_width;
    }
    if (rows > 0) multiply_rest<kTileRows - 1>(tile, rows);
}

// This thread's part of the rows of x, in quantized form.
static void quantize_rows(const float* x, int64_t rows, int64_t in_features, char* quantized,
                          const stoker::Share& share) {
    for (int64_t row; (row = share.take(0)) < rows;) {
        quantize_row(x + row * in_features, in_features, quantized + row * row_bytes(in_features));
    }
}

static void linear(const stoker::Batch& batch, const stoker::LinearArgs& args,
                   const stoker::Share& share) {
    const int64_t rows = batch.rows(args.rows), x_bytes = row_bytes(args.in_features);
    char* const quantized = static_cast<char*>(args.scratch);
    quantize_rows(args.x, rows, args.in_features, quantized, share);
    share.meet();
    const int64_t panels = num_panels(args.out_features);
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    stoker::Span pieces;
    while (share.take_some(panels * blocks, kMostPanels, pieces, 1)) {
        for (int64_t piece = pieces.first; piece < pieces.last; ++piece) {
            const int64_t first_row = piece / panels * kBlockRows, panel = piece % panels;
            const int64_t column = panel * kColumns, left = args.out_features - column;
            const Tile tile{
                quantized + first_row * x_bytes,
                x_bytes,
                static_cast<const uint8_t*>(args.weight) + panel * panel_bytes(args.in_features),
                num_groups(args.in_features),
                args.bias == nullptr ? nullptr : args.bias + column,
                args.out + first_row * args.out_features + column,
                args.out_features,
                left < kColumns ? left : kColumns,
            };
            const int64_t rows_left = rows - first_row;
            multiply_panel(tile, rows_left < kBlockRows ? rows_left : kBlockRows);
        }
    }
}

}  // namespace int8
}  // namespace STOKER_LEVEL
