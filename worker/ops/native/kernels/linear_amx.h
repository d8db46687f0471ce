// Linear layers over bfloat16 weights with AMX: tiles of rows and features times tiles of features
// and columns.
//
// AMX multiplies bfloat16 only, while activations are float32. So each value of x is split into two
// bfloat16, its upper half and what that leaves, which together keep 16 bits of it: products with
// the weights, which are bfloat16, are then as exact as those of float32 to within 2^-16. Sums are
// float32, of kDepth features at a time in rising order, first of the upper halves, then of the
// lower ones, whatever the number of rows. Values below float32's smallest normal one count as 0, and
// an infinite weight may give what is not a number.
//
// A weight is packed in panels of kColumns output columns; a panel holds its tiles in turn, for
// each kDepth features kTiles of them, zeros past the last feature and column:
//     bfloat16 [kDepth / 2][kTileColumns][2]
// Rows of x are packed likewise, as many to a tile as there are (at most kMostRows), upper halves
// and lower ones after each other:
//     bfloat16 [rows of a tile][kDepth]

namespace STOKER_LEVEL {
namespace amx {

constexpr int64_t kMostRows = 16;
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTiles = 2;  // of a panel: with two tiles of rows four tiles of sums, of 8 tiles
constexpr int64_t kColumns = kTiles * kTileColumns;
constexpr int64_t kDepth = 32;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kStepBytes = kTiles * kTileBytes;  // of a panel, for kDepth features
constexpr int64_t kBlockTiles = 8;     // of rows: they share a panel while it is near
constexpr int64_t kAheadBytes = 4096;  // of a panel that is read at memory's speed

STOKER_INLINE int64_t num_steps(int64_t in_features) { return (in_features + kDepth - 1) / kDepth; }

STOKER_INLINE int64_t num_panels(int64_t out_features) {
    return (out_features + kColumns - 1) / kColumns;
}

static int64_t packed_bytes(int64_t out_features, int64_t in_features) {
    return num_panels(out_features) * num_steps(in_features) * kStepBytes;
}

// Where a weight is among all of them.
STOKER_INLINE int64_t index_of(int64_t column, int64_t k, int64_t in_features) {
    const int64_t panel = column / kColumns, in_panel = column % kColumns;
    const int64_t step = panel * num_steps(in_features) + k / kDepth;
    const int64_t tile = step * kTiles + in_panel / kTileColumns;
    return ((tile * (kDepth / 2) + k % kDepth / 2) * kTileColumns + in_panel % kTileColumns) * 2 +
           k % 2;
}

static void pack(const void* weight, int32_t from, void* packed, int64_t out_features,
                 int64_t in_features, const stoker::Share& share) {
    uint16_t* const to = static_cast<uint16_t*>(packed);
    const int64_t padded = num_steps(in_features) * kDepth;
    for (stoker::Span panels; share.take_some(num_panels(out_features), kMostPanels, panels);) {
        for (int64_t k = 0; k < padded; k += 2) {
            for (int64_t column = panels.first * kColumns; column < panels.last * kColumns;
                 ++column) {
                const int64_t index = index_of(column, k, in_features);
                for (int64_t i = 0; i < 2; ++i) {
                    const bool is_there = column < out_features && k + i < in_features;
                    const int64_t at = column * in_features + k + i;
                    to[index + i] = !is_there ? uint16_t(0)
                                    : from == stoker::kBFloat16
                                        ? static_cast<const uint16_t*>(weight)[at]
                                        : to_bfloat16(value_at(weight, from, at));
                }
            }
        }
    }
}

// The weights of one output column, as floats.
STOKER_INLINE void unpack(const void* packed, int64_t in_features, int64_t column, float* out) {
    const uint16_t* const from = static_cast<const uint16_t*>(packed);
    for (int64_t k = 0; k < in_features; ++k) {
        out[k] = from_bfloat16(from[index_of(column, k, in_features)]);
    }
}

static int64_t scratch_bytes(int64_t rows, int64_t in_features) {
    const int64_t padded = (rows + kMostRows - 1) / kMostRows * kMostRows;
    return padded * num_steps(in_features) * kDepth * 2 * int64_t(sizeof(uint16_t));
}

// How rows are dealt to tiles: as evenly as they can be.
struct RowTiles {
    int64_t count, rows;  // of the last one some may be missing
    int64_t bytes;        // of the packed rows of one tile

    RowTiles(int64_t num_rows, int64_t in_features)
        : count((num_rows + kMostRows - 1) / kMostRows), rows((num_rows + count - 1) / count),
          bytes(num_steps(in_features) * rows * kDepth * 2 * int64_t(sizeof(uint16_t))) {}
};

STOKER_INLINE Floats rest_of(Floats x, const uint16_t* upper) {
    const Floats rest = x - load_bfloat16(upper);
    return rest == rest ? rest : zeros();
}

// kDepth values into `upper` and `lower`. What is infinite or no number has no lower half.
STOKER_INLINE void split(const float* x, uint16_t* upper, uint16_t* lower) {
    const Floats first = load(x), last = load(x + kLanes);
    const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)last, (__m512)first);
    __builtin_memcpy(upper, &halves, sizeof halves);
    const __m512bh rest = _mm512_cvtne2ps_pbh((__m512)rest_of(last, upper + kLanes),
                                              (__m512)rest_of(first, upper));
    __builtin_memcpy(lower, &rest, sizeof rest);
}

static void split_row(const float* x, int64_t in_features, const RowTiles& tiles, int64_t row,
                      char* packed) {
    const int64_t half = tiles.rows * kDepth;  // of a tile's values
    uint16_t* to = reinterpret_cast<uint16_t*>(packed + row / tiles.rows * tiles.bytes) +
                   row % tiles.rows * kDepth;
    for (int64_t k = 0; k < in_features; k += kDepth, to += 2 * half) {
        const int64_t left = in_features - k;
        if (left >= kDepth) {
            split(x + k, to, to + half);
        } else {
            float padded[kDepth] = {};
            __builtin_memcpy(padded, x + k, size_t(left) * sizeof(float));
            split(padded, to, to + half);
        }
    }
}

// The shapes of the eight tile registers, as ldtilecfg wants them.
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t unused[15] = {};
    uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};

    // Registers 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights.
    explicit TileConfig(int64_t rows_of_x) {
        for (int i = 0; i < 6; ++i) rows[i] = uint8_t(rows_of_x);
        rows[6] = rows[7] = uint8_t(kDepth / 2);
    }
};

// A panel times one or two tiles of rows: `out` is [2 * rows of a tile][kColumns] of `stride`.
struct Tile {
    const char* x;  // packed; the second tile's `x_bytes` further
    int64_t x_bytes;
    int64_t half_bytes;  // of a step's rows: its upper or its lower halves
    const char* weights;
    int64_t steps;
    const float* start;  // of each row
    int64_t ahead;       // bytes of the panel that are fetched before their turn; 0: none
};

STOKER_INLINE void start_sums(const Tile& tile) {
    _tile_loadd(0, tile.start, 0);
    _tile_loadd(1, tile.start + kTileColumns, 0);
}

STOKER_INLINE void fetch_ahead(const Tile& tile, const char* weights) {
    if (tile.ahead == 0) return;
#pragma GCC unroll 32
    for (int64_t line = 0; line < kStepBytes; line += 64) {
        __builtin_prefetch(weights + tile.ahead + line, 0, 2);
    }
}

static void multiply_one(const Tile& tile) {
    start_sums(tile);
    const char *x = tile.x, *weights = tile.weights;
    for (int64_t step = 0; step < tile.steps; ++step) {
        fetch_ahead(tile, weights);
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + kTileBytes, 64);
        _tile_loadd(4, x, 64);
        _tile_loadd(5, x + tile.half_bytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        x += 2 * tile.half_bytes;
        weights += kStepBytes;
    }
}

static void multiply_two(const Tile& tile) {
    start_sums(tile);
    _tile_loadd(2, tile.start, 0);
    _tile_loadd(3, tile.start + kTileColumns, 0);
    const char *x = tile.x, *weights = tile.weights;
    for (int64_t step = 0; step < tile.steps; ++step) {
        fetch_ahead(tile, weights);
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + kTileBytes, 64);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + tile.half_bytes, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(4, x + tile.x_bytes, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
        _tile_loadd(5, x + tile.x_bytes + tile.half_bytes, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        x += 2 * tile.half_bytes;
        weights += kStepBytes;
    }
}

// The first or the second tile of rows; registers have no other names than literals.
template <bool kIsSecond>
STOKER_INLINE void store_tiles(float* out, int64_t stride) {
    if constexpr (kIsSecond) {
        _tile_stored(2, out, stride * 4);
        _tile_stored(3, out + kTileColumns, stride * 4);
    } else {
        _tile_stored(0, out, stride * 4);
        _tile_stored(1, out + kTileColumns, stride * 4);
    }
}

// The sums of `rows` rows and `columns` columns, of those in the tiles.
template <bool kIsSecond>
STOKER_INLINE void store_sums(float* out, int64_t stride, int64_t rows, int64_t tile_rows,
                              int64_t columns) {
    if (rows == tile_rows && columns == kColumns) return store_tiles<kIsSecond>(out, stride);
    alignas(64) float spare[kMostRows * kColumns];
    store_tiles<kIsSecond>(spare, kColumns);
    for (int64_t row = 0; row < rows; ++row) {
        __builtin_memcpy(out + row * stride, spare + row * kColumns, size_t(columns) * 4);
    }
}

// Row tiles [first, last) times one panel.
static void multiply_panel(const stoker::LinearArgs& args, const char* packed, int64_t num_rows,
                           const RowTiles& tiles, int64_t first, int64_t last, int64_t panel) {
    const int64_t column = panel * kColumns, columns_left = args.out_features - column;
    const int64_t columns = columns_left < kColumns ? columns_left : kColumns;
    alignas(64) float start[kColumns] = {};
    if (args.bias != nullptr) {
        __builtin_memcpy(start, args.bias + column, size_t(columns) * sizeof(float));
    }
    const int64_t steps = num_steps(args.in_features);
    Tile tile{packed + first * tiles.bytes,
              tiles.bytes,
              tiles.rows * kDepth * int64_t(sizeof(uint16_t)),
              static_cast<const char*>(args.weight) + panel * steps * kStepBytes,
              steps,
              start,
              tiles.count <= 2 ? kAheadBytes : 0};
    float* out = args.out + first * tiles.rows * args.out_features + column;
    int64_t rows_left = num_rows - first * tiles.rows;
    const auto rows_of_next = [&] { return rows_left < tiles.rows ? rows_left : tiles.rows; };
    for (int64_t at = first; at < last; at += 2) {
        const bool are_two = at + 1 < last;
        are_two ? multiply_two(tile) : multiply_one(tile);
        store_sums<false>(out, args.out_features, rows_of_next(), tiles.rows, columns);
        out += tiles.rows * args.out_features;
        rows_left -= tiles.rows;
        if (!are_two) break;
        store_sums<true>(out, args.out_features, rows_of_next(), tiles.rows, columns);
        out += tiles.rows * args.out_features;
        rows_left -= tiles.rows;
        tile.x += 2 * tiles.bytes;
    }
}

static void linear(const stoker::Batch& batch, const stoker::LinearArgs& args,
                   const stoker::Share& share) {
    const int64_t rows = batch.rows(args.rows);
    if (rows == 0) return;
    const RowTiles tiles(rows, args.in_features);
    char* const packed = static_cast<char*>(args.scratch);
    for (int64_t row; (row = share.take(0)) < rows;) {
        split_row(args.x + row * args.in_features, args.in_features, tiles, row, packed);
    }
    share.meet();
    const TileConfig config(tiles.rows);
    _tile_loadconfig(&config);
    const int64_t panels = num_panels(args.out_features);
    const int64_t blocks = (tiles.count + kBlockTiles - 1) / kBlockTiles;
    stoker::Span pieces;
    while (share.take_some(panels * blocks, kMostPanels, pieces, 1)) {
        for (int64_t piece = pieces.first; piece < pieces.last; ++piece) {
            const int64_t first = piece / panels * kBlockTiles, end = first + kBlockTiles;
            multiply_panel(args, packed, rows, tiles, first,
                           end < tiles.count ? end : tiles.count, piece % panels);
        }
    }
    _tile_release();
}

}  // namespace amx
}  // namespace STOKER_LEVEL
