// How the attention of a step is cut into items of work, the longest first.
//
// An item is some rows of one slice and one K/V head, or all, over its whole context. Where there are too few
// of them for the threads, the context is cut too, into pieces of whole chunks: each chunk's sums
// then lie in a slot until all are there. How the work is cut does not change a bit of the result:
// sums of a chunk are its own, and chunks are merged in rising order in any case.

namespace STOKER_LEVEL {

constexpr int64_t kChunk = 2 * kTile;       // keys; chunks begin at its multiples
constexpr int64_t kMostRows = 16 * kBlock;  // of an item. More: K and V are unpacked less often
constexpr int64_t kLeastRows = 4 * kBlock;
constexpr int64_t kItemsPerThread = 4;      // wanted, so that threads end together
constexpr int64_t kKeyRows = 16;            // unpacking a key costs as much as so many rows
constexpr int64_t kPlanned = 2048;          // slices that are planned at once
constexpr int64_t kBuckets = 256;

// KeySums of an item's rows over some keys, block by block.
struct KeySums {
    float* most;    // [blocks, kBlockLanes] highest score
    float* totals;  // [blocks, kBlock, kLanes] sums of weights
    float* values;  // [blocks, kBlock, columns] weighted sums of V

    static int64_t floats(int64_t blocks, int64_t columns) {
        return blocks * (kBlockLanes + kBlock * kLanes + kBlock * columns);
    }
    static KeySums in(float* memory, int64_t blocks) {
        float* const totals = memory + blocks * kBlockLanes;
        return {memory, totals, totals + blocks * kBlock * kLanes};
    }
};

// The rows of one slice: query heads of one K/V head, token after token.
struct SliceRows {
    int64_t slice, first_token, tokens, context;
    int64_t rows;

    SliceRows(const stoker::Batch& batch, int64_t index, int64_t group)
        : slice(index),
          first_token(batch.slice_offsets[index]),
          tokens(batch.slice_offsets[index + 1] - first_token),
          context(batch.context_lens[index]),
          rows(tokens * group) {}

    // What the slice's `token`th token sees; empty in a padding slice.
    Span seen(int64_t token, int64_t window) const {
        const int64_t last = greatest(0, context - (tokens - 1 - token));
        return {window != 0 && last > window ? last - window : 0, last};
    }

    // Chunks that tokens [first, last) see.
    Span chunks(int64_t first, int64_t last, int64_t window) const {
        return {seen(first, window).first / kChunk, divided_up(seen(last - 1, window).last, kChunk)};
    }
};

struct Planned {            // one slice
    int32_t slice;
    int32_t heads;          // K/V heads of an item
    int32_t head_groups;
    int32_t row_tiles;      // items per group of heads and piece
    int32_t pieces;         // 1: not cut
    int32_t piece_chunks;
    int64_t first_slot;
    int64_t bucket;

    int64_t items() const { return int64_t(head_groups) * row_tiles * pieces; }
};

struct AttentionPlan {
    int64_t tile_rows;
    int64_t slot_floats;        // a slot holds the sums of an item's rows
    int64_t num_slices, num_items, num_slots;
    Planned* slices;            // [kPlanned] longest items first
    int64_t* counts;            // [kBuckets]
    Planned* unsorted;          // [kPlanned]
};

// A quarter of an octave per bucket, the highest cost in bucket 0.
STOKER_INLINE int64_t bucket_of(int64_t cost) {
    const int64_t at_least_4 = cost < 4 ? 4 : cost;
    const int64_t octave = 63 - __builtin_clzll(uint64_t(at_least_4));
    return kBuckets - 1 - (octave * 4 + (at_least_4 >> (octave - 2) & 3));
}

// Plan slices [first, last). Every thread comes to the same.
static void plan_items(const stoker::Batch& batch, const stoker::AttentionArgs& args,
                       int64_t num_threads, int64_t first, int64_t last, int64_t max_rows,
                       int64_t scratch_floats, AttentionPlan& plan) {
    const int64_t group = args.shape.num_heads / args.shape.num_kv_heads;
    const int64_t columns = in_panels(args.shape.head_dim);
    const int64_t kv_heads = args.shape.num_kv_heads, max_blocks = max_rows / kBlock;
    plan.num_slices = last - first;
    const int64_t wanted = kItemsPerThread * num_threads;
    int64_t items = 0;
    for (plan.tile_rows = max_rows;; plan.tile_rows /= 2) {
        items = 0;
        for (int64_t s = first; s < last; ++s) {
            items += divided_up(SliceRows(batch, s, group).rows, plan.tile_rows);
        }
        items *= kv_heads;
        if (items >= wanted || plan.tile_rows < 2 * kLeastRows) break;
    }
    // Heads whose rows are few are taken together: those of one key lie side by side.
    const auto heads_of = [&](const SliceRows& rows) {
        return divided_up(rows.rows, kBlock) * kv_heads <= max_blocks ? kv_heads : 1;
    };
    int64_t most_blocks = 1, total = 0;
    items = 0;
    for (int64_t s = first; s < last; ++s) {
        const SliceRows rows(batch, s, group);
        const int64_t tiles = divided_up(rows.rows, plan.tile_rows);
        const int64_t blocks = divided_up(least(rows.rows, plan.tile_rows), kBlock);
        most_blocks = greatest(most_blocks, blocks * heads_of(rows));
        items += tiles * kv_heads / heads_of(rows);
        const Span seen{rows.seen(0, args.window).first, rows.context};
        total += (seen.last - seen.first) * (rows.rows + tiles * kKeyRows) * kv_heads;
    }
    plan.slot_floats = KeySums::floats(most_blocks, columns);
    const int64_t capacity = scratch_floats / plan.slot_floats * num_threads;
    const bool may_cut = items < wanted * 4 && plan.num_slices == batch.num_slices;
    plan.num_items = plan.num_slots = 0;
    for (int64_t bucket = 0; bucket < kBuckets; ++bucket) plan.counts[bucket] = 0;
    for (int64_t s = first; s < last; ++s) {
        const SliceRows rows(batch, s, group);
        const int64_t heads = heads_of(rows);
        Planned planned{int32_t(s), int32_t(heads), int32_t(kv_heads / heads),
                        int32_t(divided_up(rows.rows, plan.tile_rows)), 1, 0, 0, 0};
        const Span chunks = rows.chunks(0, rows.tokens, args.window);
        const int64_t num_chunks = greatest(0, chunks.last - chunks.first);
        int64_t cost = num_chunks * kChunk * (least(rows.rows, plan.tile_rows) + kKeyRows) * heads;
        const int64_t limit = greatest(1, total / wanted);
        const int64_t slots = num_chunks * planned.row_tiles * planned.head_groups;
        if (may_cut && num_chunks > 1 && cost > limit && plan.num_slots + slots <= capacity) {
            planned.piece_chunks = int32_t(greatest(1, num_chunks * limit / cost));
            planned.pieces = int32_t(divided_up(num_chunks, planned.piece_chunks));
            planned.first_slot = plan.num_slots;
            plan.num_slots += slots;
            cost = cost * planned.piece_chunks / num_chunks;
        }
        if (planned.pieces == 1) planned.piece_chunks = int32_t(num_chunks);
        planned.bucket = bucket_of(cost);
        plan.counts[planned.bucket] += 1;
        plan.num_items += planned.items();
        plan.unsorted[s - first] = planned;
    }
    int64_t before = 0;
    for (int64_t bucket = 0; bucket < kBuckets; ++bucket) {
        const int64_t count = plan.counts[bucket];
        plan.counts[bucket] = before;
        before += count;
    }
    for (int64_t i = 0; i < plan.num_slices; ++i) {
        plan.slices[plan.counts[plan.unsorted[i].bucket]++] = plan.unsorted[i];
    }
}

}  // namespace STOKER_LEVEL
