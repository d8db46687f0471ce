// Linear layers over packed weights of float32, bfloat16 or float16.
//
// A weight is packed in panels of kPanel output columns, zeros past the last column. A panel
// holds for each input feature k in turn its kPanel weights w[column][k] (see `place_of`). Each
// output value is one chain of multiply-adds over k in rising order that starts from the bias,
// whatever the number of rows: where k is cut in two, the chain's sum waits in the output.
//
// The shape of the loops (a tile of sums in registers, a piece of a panel in the first cache, a
// block of rows in the second): Goto and van de Geijn 2008, "Anatomy of high-performance matrix
// multiplication".

namespace STOKER_LEVEL {

#if defined(STOKER_HAS_AVX512) || defined(STOKER_HAS_NEON)
constexpr int kPanelVectors = 4;  // with 6 rows 24 sums, of 32 registers
#else
constexpr int kPanelVectors = 2;  // with 6 rows 12 sums, of 16 registers
#endif
constexpr int64_t kPanel = kPanelVectors * kLanes;
constexpr int kTileRows = 6;
constexpr int kUnroll = 4;                 // features between two looks ahead
constexpr int64_t kAheadBytes = 1536;      // of a panel that is read at memory's speed
constexpr int64_t kPieceBytes = 38 << 10;  // of a panel: stays near while rows pass by
constexpr int64_t kBlockRows = 120;        // whose part of x stays in 512 KiB
constexpr int64_t kMostPanels = 8;         // in a row over the same rows

STOKER_INLINE int64_t num_panels(int64_t out_features) {
    return (out_features + kPanel - 1) / kPanel;
}

// Of a panel's weights of one feature.
constexpr int64_t row_bytes(int32_t format) {
    return kPanel * (format == stoker::kFloat32 ? 4 : 2);
}

// One value of a dense tensor.
STOKER_INLINE float value_at(const void* values, int32_t format, int64_t index) {
    if (format == stoker::kFloat32) return static_cast<const float*>(values)[index];
    const uint16_t half = static_cast<const uint16_t*>(values)[index];
    return format == stoker::kBFloat16 ? from_bfloat16(half) : from_float16(half);
}

// Where a panel's column is among the values of one feature. Columns of bfloat16 are paired with
// those one vector further, so that a shift and a mask make two vectors of floats from one load.
STOKER_INLINE int64_t place_of(int64_t column, int32_t format) {
    if (format != stoker::kBFloat16) return column;
    const int64_t pair = column / (2 * kLanes), in_pair = column % (2 * kLanes);
    return pair * 2 * kLanes + in_pair % kLanes * 2 + in_pair / kLanes;
}

// `kCount` values in registers: GCC 12 puts arrays of vectors into memory, but not these.
template <int kCount, typename T>
struct Several {
    T first;
    Several<kCount - 1, T> rest;
};

template <typename T>
struct Several<1, T> {
    T first;
};

using PanelRow = Several<kPanelVectors, Floats>;

template <int kRows>
using Sums = Several<kRows, PanelRow>;

template <int kCount>
STOKER_INLINE void load_vectors(Several<kCount, Floats>& to, const float* from) {
    to.first = load(from);
    if constexpr (kCount > 1) load_vectors(to.rest, from + kLanes);
}

template <int kCount>
STOKER_INLINE void store_vectors(float* to, const Several<kCount, Floats>& from) {
    store(to, from.first);
    if constexpr (kCount > 1) store_vectors(to + kLanes, from.rest);
}

template <int kRows>
STOKER_INLINE void load_sums(Sums<kRows>& sums, const float* from, int64_t stride) {
    load_vectors(sums.first, from);
    if constexpr (kRows > 1) load_sums<kRows - 1>(sums.rest, from + stride, stride);
}

template <int kRows>
STOKER_INLINE void store_sums(float* to, int64_t stride, const Sums<kRows>& sums) {
    store_vectors(to, sums.first);
    if constexpr (kRows > 1) store_sums<kRows - 1>(to + stride, stride, sums.rest);
}

STOKER_INLINE Floats upper_halves(Words pairs) {
#if defined(STOKER_HAS_AVX2) && STOKER_VECTOR_BYTES == 32
    // All 16 registers are in use, so the mask has to come from memory, but GCC 12 keeps it.
    constexpr uint64_t kTwo = 0xffff0000ffff0000;
    alignas(32) static constexpr uint64_t mask[4] = {kTwo, kTwo, kTwo, kTwo};
    Floats upper;
    asm("vpand %2, %1, %0" : "=x"(upper) : "x"(pairs), "m"(mask));
    return upper;
#else
    return (Floats)(pairs & 0xffff0000u);
#endif
}

// The weights of one feature, as floats.
template <int32_t kFormat, int kCount>
STOKER_INLINE void load_weights(Several<kCount, Floats>& to, const char* from) {
    if constexpr (kFormat == stoker::kBFloat16) {
        Words pairs;
        __builtin_memcpy(&pairs, from, sizeof pairs);
        to.first = (Floats)(pairs << 16);
        to.rest.first = upper_halves(pairs);
        if constexpr (kCount > 2) load_weights<kFormat>(to.rest.rest, from + kVectorBytes);
    } else if constexpr (kFormat == stoker::kFloat16) {
        to.first = load_float16(reinterpret_cast<const uint16_t*>(from));
        if constexpr (kCount > 1) load_weights<kFormat>(to.rest, from + kVectorBytes / 2);
    } else {
        load_vectors(to, reinterpret_cast<const float*>(from));
    }
}

// sum += x * weight. GCC 12 likes to put the sum where x was and then runs out of registers.
STOKER_INLINE void add_to(Floats& sum, Floats x, Floats weight) {
#if defined(STOKER_HAS_AVX2)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
#elif defined(STOKER_HAS_NEON)
    asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(x), "w"(weight));
#else
    sum = multiply_add(x, weight, sum);
#endif
}

template <int kCount>
STOKER_INLINE void add_product(Several<kCount, Floats>& sums, Floats x,
                               const Several<kCount, Floats>& weights) {
    add_to(sums.first, x, weights.first);
    if constexpr (kCount > 1) add_product(sums.rest, x, weights.rest);
}

template <int kRows>
STOKER_INLINE void add_products(Sums<kRows>& sums, const float* x, int64_t stride,
                                const PanelRow& weights) {
    add_product(sums.first, splat(*x), weights);
    if constexpr (kRows > 1) add_products<kRows - 1>(sums.rest, x + stride, stride, weights);
}

// A few rows times a piece of one panel.
struct Tile {
    const float* x;
    int64_t x_stride;
    const char* weights;   // of `depth` features
    int64_t depth;
    const float* start;    // what the sums are so far
    int64_t start_stride;  // 0: the same for each row
    float* out;
    int64_t out_stride;
    const char* ahead;     // what will be read next, fetched in steps of `num_ahead` lines
    int64_t num_ahead;
};

template <int32_t kFormat, int kRows>
static __attribute__((noinline)) void multiply(const Tile& tile) {
    constexpr int64_t step = row_bytes(kFormat);
    const float* x = tile.x;
    const int64_t stride = tile.x_stride;
    const char* weights = tile.weights;
    const char* ahead = tile.ahead;
    const int64_t ahead_bytes = tile.num_ahead * 64;
    Sums<kRows> sums;
    load_sums<kRows>(sums, tile.start, tile.start_stride);
    PanelRow row;
    for (int64_t left = tile.depth / kUnroll; left > 0; --left) {
        for (const char* end = ahead + ahead_bytes; ahead < end; ahead += 64) {
            __builtin_prefetch(ahead, 0, 2);
        }
#pragma GCC unroll 4
        for (int k = 0; k < kUnroll; ++k) {
            load_weights<kFormat>(row, weights + k * step);
            add_products<kRows>(sums, x + k, stride, row);
            asm volatile("" ::: "memory");  // loads drawn forward would need more registers
        }
        x += kUnroll;
        weights += kUnroll * step;
    }
    for (int64_t left = tile.depth % kUnroll; left > 0; --left) {
        load_weights<kFormat>(row, weights);
        add_products<kRows>(sums, x, stride, row);
        ++x;
        weights += step;
    }
    store_sums<kRows>(tile.out, tile.out_stride, sums);
}

using Multiply = void (*)(const Tile&);

// Of so many rows, less one.
template <int32_t kFormat>
constexpr Multiply kMultiply[kTileRows] = {multiply<kFormat, 1>, multiply<kFormat, 2>,
                                           multiply<kFormat, 3>, multiply<kFormat, 4>,
                                           multiply<kFormat, 5>, multiply<kFormat, 6>};

// Part `index` of `count` parts of [0, total), as equal as they can be.
STOKER_INLINE int64_t part_start(int64_t total, int64_t count, int64_t index) {
    return total / count * index + (index < total % count ? index : total % count);
}

STOKER_INLINE int64_t parts_of_at_most(int64_t total, int64_t most) {
    return total <= most ? 1 : (total + most - 1) / most;
}

// A piece of one panel, and the rows it is to be multiplied with.
struct Piece {
    int64_t first_row, last_row;
    int64_t panel;
    int64_t first, last;  // features
};

// The pieces of a layer that this thread takes, in the order in which they are multiplied: for a
// run of panels first all their first pieces, so that the rows' part of x is used many times.
class Walk {
public:
    Walk(int64_t num_rows, const stoker::LinearArgs& args, const stoker::Share& share)
        : share_(share), rows_(num_rows), features_(args.in_features),
          panels_(num_panels(args.out_features)), blocks_(parts_of_at_most(num_rows, kBlockRows)),
          pieces_(num_rows <= kTileRows
                      ? 1
                      : parts_of_at_most(features_, kPieceBytes / row_bytes(args.format))),
          most_(num_rows <= kTileRows ? panels_ : kMostPanels), piece_(pieces_) {}

    bool next(Piece& found) {
        if (panel_ == end_) {
            panel_ = start_;
            if (++piece_ >= pieces_ && !begin_run()) return false;
        }
        found.first_row = part_start(rows_, blocks_, block_);
        found.last_row = part_start(rows_, blocks_, block_ + 1);
        found.panel = panel_++;
        found.first = part_start(features_, pieces_, piece_);
        found.last = part_start(features_, pieces_, piece_ + 1);
        return true;
    }

private:
    // Panels [start_, end_) of one block of rows.
    bool begin_run() {
        if (units_.first >= units_.last && !share_.take_some(blocks_ * panels_, most_, units_)) {
            return false;
        }
        block_ = units_.first / panels_;
        panel_ = start_ = units_.first % panels_;
        const int64_t end = panel_ + units_.last - units_.first;
        end_ = end < panels_ ? end : panels_;
        units_.first += end_ - start_;
        piece_ = 0;
        return true;
    }

    const stoker::Share& share_;
    const int64_t rows_, features_, panels_, blocks_, pieces_, most_;
    stoker::Span units_{0, 0};  // of blocks_ * panels_, that are taken and not begun
    int64_t block_ = 0, start_ = 0, panel_ = 0, end_ = 0, piece_;
};

template <int32_t kFormat>
STOKER_INLINE const char* weights_of(const stoker::LinearArgs& args, const Piece& piece) {
    return static_cast<const char*>(args.weight) +
           (piece.panel * args.in_features + piece.first) * row_bytes(kFormat);
}

// `spare` has room for a bias and for a panel's part of the output.
template <int32_t kFormat>
static void multiply_piece(const stoker::LinearArgs& args, const Piece& piece, const char* ahead,
                           float* spare) {
    const int64_t column = piece.panel * kPanel;
    const int64_t rows = piece.last_row - piece.first_row;
    const int64_t columns_left = args.out_features - column;
    const bool is_whole = columns_left >= kPanel;
    float* const out = is_whole ? args.out + piece.first_row * args.out_features + column
                                : spare + kPanel;
    Tile tile;
    tile.x_stride = args.in_features;
    tile.weights = weights_of<kFormat>(args, piece);
    tile.depth = piece.last - piece.first;
    tile.out_stride = is_whole ? args.out_features : kPanel;
    tile.start_stride = tile.out_stride;
    const float* start = out;
    if (piece.first == 0) {
        for (int64_t c = 0; c < kPanel; ++c) {
            spare[c] = args.bias != nullptr && c < columns_left ? args.bias[column + c] : 0.0f;
        }
        start = spare;
        tile.start_stride = 0;
    }
    const int64_t num_tiles = parts_of_at_most(rows, kTileRows);
    const int64_t lines = kUnroll * row_bytes(kFormat) / 64;
    tile.ahead = ahead;
    tile.num_ahead = ahead == nullptr ? 0 : parts_of_at_most(lines, num_tiles);
    if (num_tiles == 1) {  // as fast as memory is: look ahead in the same piece
        tile.ahead = tile.weights + kAheadBytes;
        tile.num_ahead = lines;
    }
    for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t row = part_start(rows, num_tiles, t);
        tile.x = args.x + (piece.first_row + row) * args.in_features + piece.first;
        tile.start = start + row * tile.start_stride;
        tile.out = out + row * tile.out_stride;
        if (t == lines) tile.num_ahead = 0;
        kMultiply<kFormat>[part_start(rows, num_tiles, t + 1) - row - 1](tile);
        tile.ahead += tile.depth / kUnroll * tile.num_ahead * 64;
    }
    if (is_whole || piece.last != args.in_features) return;
    for (int64_t row = 0; row < rows; ++row) {
        __builtin_memcpy(args.out + (piece.first_row + row) * args.out_features + column,
                         out + row * kPanel, size_t(columns_left) * sizeof(float));
    }
}

template <int32_t kFormat>
static void multiply_all(int64_t rows, const stoker::LinearArgs& args, const stoker::Share& share) {
    alignas(64) float spare[(kBlockRows + 1) * kPanel];
    Walk walk(rows, args, share);
    Piece now{}, then{};
    for (bool is_more = walk.next(now); is_more; now = then) {
        is_more = walk.next(then);
        const char* ahead = is_more ? weights_of<kFormat>(args, then) : nullptr;
        multiply_piece<kFormat>(args, now, ahead, spare);
    }
}

static void linear_floats(const stoker::Batch& batch, const stoker::LinearArgs& args,
                          const stoker::Share& share) {
    const int64_t rows = batch.rows(args.rows);
    if (rows == 0) return;
    switch (args.format) {
        case stoker::kFloat32: return multiply_all<stoker::kFloat32>(rows, args, share);
        case stoker::kBFloat16: return multiply_all<stoker::kBFloat16>(rows, args, share);
        default: return multiply_all<stoker::kFloat16>(rows, args, share);
    }
}

static int64_t packed_bytes_floats(int64_t out_features, int64_t in_features, int32_t format) {
    return num_panels(out_features) * in_features * row_bytes(format);
}

// Lay rows of bits into panels, where nothing has to be converted.
template <typename Bits>
static void pack_bits(const Bits* weight, Bits* packed, int32_t format, int64_t out_features,
                      int64_t in_features, const stoker::Share& share) {
    for (stoker::Span panels; share.take_some(num_panels(out_features), kMostPanels, panels);) {
        for (int64_t panel = panels.first; panel < panels.last; ++panel) {
            Bits* const to = packed + panel * kPanel * in_features;
            const Bits* from[kPanel];
            int64_t stride[kPanel];
            static const Bits nothing = 0;
            for (int64_t c = 0; c < kPanel; ++c) {
                const int64_t column = panel * kPanel + c;
                const bool is_there = column < out_features;
                from[place_of(c, format)] = is_there ? weight + column * in_features : &nothing;
                stride[place_of(c, format)] = is_there;
            }
            for (int64_t k = 0; k < in_features; ++k) {
                for (int64_t c = 0; c < kPanel; ++c) to[k * kPanel + c] = from[c][k * stride[c]];
            }
        }
    }
}

static void pack_floats(const void* weight, int32_t from, void* packed, int32_t to,
                        int64_t out_features, int64_t in_features, const stoker::Share& share) {
    if (from == to && to == stoker::kFloat32) {
        return pack_bits(static_cast<const uint32_t*>(weight), static_cast<uint32_t*>(packed), to,
                         out_features, in_features, share);
    }
    if (from == to) {
        return pack_bits(static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(packed), to,
                         out_features, in_features, share);
    }
    for (stoker::Span panels; share.take_some(num_panels(out_features), kMostPanels, panels);) {
        for (int64_t column = panels.first * kPanel; column < panels.last * kPanel; ++column) {
            const int64_t start =
                column / kPanel * in_features * kPanel + place_of(column % kPanel, to);
            for (int64_t k = 0; k < in_features; ++k) {
                const float value = column < out_features
                                        ? value_at(weight, from, column * in_features + k)
                                        : 0.0f;
                const int64_t index = start + k * kPanel;
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

// The weights of one output column, as floats.
STOKER_INLINE void unpack_floats(const void* packed, int32_t format, int64_t in_features,
                                 int64_t column, float* out) {
    const int64_t start =
        column / kPanel * in_features * kPanel + place_of(column % kPanel, format);
    for (int64_t k = 0; k < in_features; ++k) out[k] = value_at(packed, format, start + k * kPanel);
}

}  // namespace STOKER_LEVEL
