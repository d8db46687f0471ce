// Attention of some rows to one tile of keys: K and V brought into panels, scores, softmax, sums.
//
// A row is one query head of one token. What it adds up depends on the position of its token
// alone: each score is one chain of multiply-adds over the head's dimensions, each sum over keys
// one chain in rising order through tiles that begin at multiples of kTile. A key that a row does
// not see has weight 0 there, and adds exactly that.

namespace STOKER_LEVEL {

constexpr int64_t kTile = 64;                // keys; a multiple of every level's panel
constexpr int64_t kColumns = 2 * kLanes;     // of a panel: two vectors
constexpr int64_t kBlock = 6;                // rows that go through the kernel together
constexpr int64_t kBlockLanes = (kBlock + kLanes - 1) / kLanes * kLanes;

STOKER_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
STOKER_INLINE int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
STOKER_INLINE int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
STOKER_INLINE int64_t in_panels(int64_t columns) { return divided_up(columns, kColumns) * kColumns; }

// Transpose kStrip strips in place.
STOKER_INLINE void transpose(Strip* rows) {
#if defined(STOKER_HAS_AVX2)
    __m256 pairs[8], quads[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        rows[i] = (Strip)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
        rows[i + 4] = (Strip)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
#else
    const Strip a = rows[0], b = rows[1], c = rows[2], d = rows[3];
#if defined(__clang__)
#define STOKER_SHUFFLE(x, y, i, j, k, l) __builtin_shufflevector(x, y, i, j, k, l)
#else
#define STOKER_SHUFFLE(x, y, i, j, k, l) __builtin_shuffle(x, y, StripInts{i, j, k, l})
#endif
    const Strip ab_low = STOKER_SHUFFLE(a, b, 0, 4, 1, 5), ab_high = STOKER_SHUFFLE(a, b, 2, 6, 3, 7);
    const Strip cd_low = STOKER_SHUFFLE(c, d, 0, 4, 1, 5), cd_high = STOKER_SHUFFLE(c, d, 2, 6, 3, 7);
    rows[0] = STOKER_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
    rows[1] = STOKER_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
    rows[2] = STOKER_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
    rows[3] = STOKER_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
#undef STOKER_SHUFFLE
#endif
}

// Where a K head of a tile's keys [first, last) is; more heads follow, and V heads are `values_at` bytes further on.
struct TileHeads {
    int64_t first = 0, last = 0;
    const char* of_key[kTile];
};

STOKER_INLINE void prefetch(const char* from, int64_t num_bytes) {
    const char* line = from - reinterpret_cast<uintptr_t>(from) % 64;
    for (; line < from + num_bytes; line += 64) __builtin_prefetch(line, 0, 2);
}

// The next tile's heads, whose lines are to be on their way when it is due. They are asked for
// a few at a time, between pieces of the present tile's work: a core waits when it asks for more
// lines at once than it can keep in mind.
struct Ahead {
    const TileHeads& heads;
    int64_t values_at, key_bytes;
    int64_t at_once;  // keys
    int64_t next;     // key

    // Ask for `count` keys more.
    void ask(int64_t count) {
        const int64_t end = least(heads.last, next + count);
        for (; next < end; ++next) {
            const char* const head = heads.of_key[next];
            prefetch(head, key_bytes);
            prefetch(head + values_at, key_bytes);
        }
    }
};

constexpr int64_t kAskedAtOnce = 3;  // keys

// Strip [d, d + kStrip) of kStrip keys, transposed to `to`.
template <int32_t kFormat, bool kIsTail>
STOKER_INLINE void fill_strips(const char* const* from, const float* scales, int64_t d,
                               int64_t width, float* to) {
    Strip rows[kStrip];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kStrip; ++i) {
        rows[i] = read_strip<kFormat, kIsTail>(from[i], d, width, scales[i]);
    }
    transpose(rows);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kStrip; ++i) {
        if (kIsTail && d + i >= width) break;
        __builtin_memcpy(to + (d + i) * kColumns, &rows[i], sizeof rows[i]);
    }
}

// Panels of K are apart by a little more than they hold, or all would meet in the same few sets of
// the first cache.
STOKER_INLINE int64_t panel_stride(int64_t width) { return (width + 1) * kColumns; }

// K of a tile, into panels of kColumns keys: panel p holds, for each dimension in turn, that of
// keys p * kColumns and on.
template <int32_t kFormat>
static void fill_keys(const TileHeads& heads, int64_t head_at, int64_t width, float* panels,
                      Ahead& ahead) {
    for (int64_t key = heads.first / kStrip * kStrip; key < heads.last; key += kStrip) {
        const char* from[kStrip];
        float scales[kStrip];
        for (int64_t i = 0; i < kStrip; ++i) {
            // What lies beyond is copied from a neighbour: it will be masked.
            from[i] = heads.of_key[greatest(heads.first, least(key + i, heads.last - 1))] + head_at;
            scales[i] = head_scale<kFormat>(from[i], width);
        }
        float* to = panels + key / kColumns * panel_stride(width) + key % kColumns;
        int64_t d = 0;
        for (; d + kStrip <= width; d += kStrip) {
            fill_strips<kFormat, false>(from, scales, d, width, to);
        }
        if (d < width) fill_strips<kFormat, true>(from, scales, d, width, to);
        ahead.ask(ahead.at_once);
    }
}

// Rows of V are apart by a line more than they hold, for the same reason.
STOKER_INLINE int64_t value_stride(int64_t width) { return in_panels(width) + 16; }

// V of a tile, a row for each key, with zeros past the last dimension.
template <int32_t kFormat>
static void fill_values(const TileHeads& heads, int64_t values_at, int64_t width, float* rows,
                        Ahead& ahead) {
    for (int64_t key = heads.first; key < heads.last; ++key) {
        const char* from = heads.of_key[key] + values_at;
        const float scale = head_scale<kFormat>(from, width);
        float* to = rows + key * value_stride(width);
        int64_t d = 0;
        for (; d + kStrip <= width; d += kStrip) {
            const Strip values = read_strip<kFormat, false>(from, d, width, scale);
            __builtin_memcpy(to + d, &values, sizeof values);
        }
        if (d < width) {
            const Strip values = read_strip<kFormat, true>(from, d, width, scale);
            __builtin_memcpy(to + d, &values, sizeof values);
            d += kStrip;
        }
        for (; d < in_panels(width); ++d) to[d] = 0.0f;
        if (key % 8 == 0) ahead.ask(ahead.at_once);
    }
}

// kRows rows: c[r] = c[r] * keep[r] + sum over k of a[r * kRowStep + k * kStep] * b[k], where c and
// b have kColumns columns. Without `keep`, the sum alone.
template <int kRows, int64_t kRowStep, int64_t kStep>
STOKER_INLINE void multiply(const float* a, const float* b, int64_t b_stride, int64_t depth,
                            const float* keep, float* c, int64_t c_stride) {
    Floats left[kRows], right[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
        left[r] = keep ? load(c + r * c_stride) * splat(keep[r]) : zeros();
        right[r] = keep ? load(c + r * c_stride + kLanes) * splat(keep[r]) : zeros();
    }
    for (int64_t k = 0; k < depth; ++k) {
        const Floats b_left = load(b + k * b_stride), b_right = load(b + k * b_stride + kLanes);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
            const Floats factor = splat(a[r * kRowStep + k * kStep]);
            left[r] = multiply_add(factor, b_left, left[r]);
            right[r] = multiply_add(factor, b_right, right[r]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
        store(c + r * c_stride, left[r]);
        store(c + r * c_stride + kLanes, right[r]);
    }
}

template <int64_t kRowStep, int64_t kStep>
STOKER_INLINE void multiply(int64_t rows, const float* a, const float* b, int64_t b_stride,
                            int64_t depth, const float* keep, float* c, int64_t c_stride) {
    switch (rows) {
        case 1: return multiply<1, kRowStep, kStep>(a, b, b_stride, depth, keep, c, c_stride);
        case 2: return multiply<2, kRowStep, kStep>(a, b, b_stride, depth, keep, c, c_stride);
        case 3: return multiply<3, kRowStep, kStep>(a, b, b_stride, depth, keep, c, c_stride);
        case 4: return multiply<4, kRowStep, kStep>(a, b, b_stride, depth, keep, c, c_stride);
        case 5: return multiply<5, kRowStep, kStep>(a, b, b_stride, depth, keep, c, c_stride);
        default: return multiply<6, kRowStep, kStep>(a, b, b_stride, depth, keep, c, c_stride);
    }
}

using stoker::Span;  // of keys, in a tile or in a context

// kBlock rows (the last block has fewer): what they ask, and their sums so far.
struct RowBlock {
    int64_t rows;
    const float* q;     // [head_dim, kBlock], scaled
    const Span* sees;   // [rows], in the tile, never empty outside of [0, kTile]
    float* most;        // [kBlockLanes] highest score so far, -inf at first
    float* totals;      // [kBlock, kLanes] sums of weights; zeros at first
    float* values;      // [kBlock, in_panels(head_dim)] weighted sums of V; zeros at first
};

// What all rows of a block together see of the tile; empty if nothing.
STOKER_INLINE Span seen_of(const RowBlock& block) {
    Span all{kTile, 0};
    for (int64_t r = 0; r < block.rows; ++r) {
        if (block.sees[r].first >= block.sees[r].last) continue;
        all.first = least(all.first, block.sees[r].first);
        all.last = greatest(all.last, block.sees[r].last);
    }
    return all;
}

// Scores of vectors [first, last) of a row's tile become -inf where the row does not see.
STOKER_INLINE void mask(float* scores, Span seen, int64_t first, int64_t last) {
    Ints lanes;
    for (int32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    const Floats hidden = splat(-__builtin_inff());
    for (int64_t v = first; v < last; ++v) {
        const Ints key = lanes + int32_t(v * kLanes);
        const auto is_seen = (key >= int32_t(seen.first)) & (key < int32_t(seen.last));
        store(scores + v * kLanes, is_seen ? load(scores + v * kLanes) : hidden);
    }
}

// Turn the scores of vectors [first, last) into weights. `keep` becomes what the sums so far are to
// be multiplied with.
STOKER_INLINE void soften(const RowBlock& block, float* scores, int64_t first, int64_t last,
                          float* keep) {
    const Floats hidden = splat(-__builtin_inff());
    float highest[kBlockLanes];
    for (int64_t i = 0; i < kBlockLanes; ++i) highest[i] = -__builtin_inff();
    for (int64_t r = 0; r < block.rows; ++r) {
        float* row = scores + r * kTile;
        const Span seen = block.sees[r];
        if (seen.first > first * kLanes || seen.last < last * kLanes) mask(row, seen, first, last);
        Floats most = hidden;
        for (int64_t v = first; v < last; ++v) most = max(load(row + v * kLanes), most);
        highest[r] = max_lane(most);
    }
    float base[kBlockLanes];
    for (int64_t i = 0; i < kBlockLanes; i += kLanes) {
        const Floats before = load(block.most + i);
        const Floats now = max(before, load(highest + i));
        // A row that has seen nothing yet: -inf minus -inf would be NaN.
        const Floats from = now == hidden ? zeros() : now;
        store(block.most + i, now);
        store(base + i, from);
        store(keep + i, exp(before - from));
    }
    for (int64_t r = 0; r < block.rows; ++r) {
        float* row = scores + r * kTile;
        const Floats from = splat(base[r]);
        Floats total = zeros();
        for (int64_t v = first; v < last; ++v) {
            const Floats weight = exp(load(row + v * kLanes) - from);
            total += weight;
            store(row + v * kLanes, weight);
        }
        float* totals = block.totals + r * kLanes;
        store(totals, multiply_add(load(totals), splat(keep[r]), total));
    }
}

// Add what a block's rows see of one tile to their sums.
STOKER_INLINE void attend_tile(const RowBlock& block, const float* keys, const float* values,
                               int64_t width, Ahead& ahead) {
    const Span seen = seen_of(block);
    if (seen.first >= seen.last) return;
    alignas(64) float scores[kBlock * kTile];
    const int64_t first_panel = seen.first / kColumns, last_panel = divided_up(seen.last, kColumns);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        multiply<1, kBlock>(block.rows, block.q, keys + panel * panel_stride(width), kColumns, width,
                            nullptr, scores + panel * kColumns, kTile);
        ahead.ask(ahead.at_once);
    }
    alignas(64) float keep[kBlockLanes];
    soften(block, scores, first_panel * 2, last_panel * 2, keep);
    const int64_t stride = value_stride(width);
    for (int64_t column = 0; column < in_panels(width); column += kColumns) {
        multiply<kTile, 1>(block.rows, scores + seen.first, values + seen.first * stride + column,
                           stride, seen.last - seen.first, keep, block.values + column,
                           in_panels(width));
        ahead.ask(ahead.at_once);
    }
}

}  // namespace STOKER_LEVEL
