// Causal attention over paged K/V, of decodes and prefill chunks alike.
//
// K and V of a tile of keys are unpacked once, into floats in panels, for all rows of an item
// (attention_plan.h), which share them: the query heads of a K/V head, and in a prefill many
// tokens. What is computed with them is in attention_tiles.h.
//
// Source: softmax over tiles, Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3, and Dao
// et al. 2022 (arXiv:2205.14135), section 3.1; contexts in parts, Dao et al. 2023, Flash-Decoding.

namespace STOKER_LEVEL {

constexpr size_t kSlotBytes = stoker::kScratchBytes / 2;  // of each thread's scratch: for slots

// One attention call on one thread.
struct AttentionCall {
    const stoker::Batch& batch;
    const stoker::AttentionArgs& args;
    const stoker::Share& share;
    int64_t group, columns;
    int64_t cell_bytes, values_at;
    AttentionPlan plan;
    // In this thread's scratch:
    float* keys;        // [head_dim, kTile] in panels
    float* values;      // [kTile, value_stride]
    float* q;           // [blocks, head_dim, kBlock]
    Span* sees;         // [rows] in the context
    Span* sees_of_tile; // [rows]
    KeySums whole, part;
};

// One item: rows [first_row, first_row + rows) of a slice and of each of some K/V heads. Its blocks
// are those of the first head, then those of the next.
struct AttentionItem {
    SliceRows slice;
    int64_t kv_head, heads;
    int64_t first_row, rows;
    Span chunks;

    int64_t blocks_per_head() const { return divided_up(rows, kBlock); }
    int64_t blocks() const { return heads * blocks_per_head(); }
};

STOKER_INLINE float* slot(const AttentionCall& call, int64_t index) {
    const int64_t floats = call.plan.slot_floats;
    const int64_t per_thread = int64_t(kSlotBytes / sizeof(float)) / floats;
    auto* scratch = static_cast<char*>(call.share.scratch_of(int(index / per_thread)));
    return reinterpret_cast<float*>(scratch + (stoker::kScratchBytes - kSlotBytes)) +
           index % per_thread * floats;
}

// KeySums of nothing.
STOKER_INLINE void clear(const KeySums& sums, int64_t blocks, int64_t columns) {
    for (int64_t i = 0; i < blocks * kBlockLanes; ++i) sums.most[i] = -__builtin_inff();
    __builtin_memset(sums.totals, 0, size_t(blocks * kBlock * kLanes) * sizeof(float));
    __builtin_memset(sums.values, 0, size_t(blocks * kBlock * columns) * sizeof(float));
}

// into = into and `more`, which is of later keys. KeySums of nothing change nothing.
static __attribute__((noinline)) void merge(const KeySums& into, const KeySums& more, int64_t blocks,
                                            int64_t columns) {
    const Floats hidden = splat(-__builtin_inff());
    for (int64_t block = 0; block < blocks; ++block) {
        float keep[kBlockLanes], take[kBlockLanes];
        for (int64_t i = 0; i < kBlockLanes; i += kLanes) {
            float* most = into.most + block * kBlockLanes + i;
            const Floats before = load(most), later = load(more.most + block * kBlockLanes + i);
            const Floats now = max(before, later);
            const Floats from = now == hidden ? zeros() : now;
            store(most, now);
            store(keep + i, exp(before - from));
            store(take + i, exp(later - from));
        }
        for (int64_t r = 0; r < kBlock; ++r) {
            const Floats kept = splat(keep[r]), taken = splat(take[r]);
            const int64_t row = block * kBlock + r;
            float* to = into.totals + row * kLanes;
            store(to, multiply_add(load(to), kept, load(more.totals + row * kLanes) * taken));
            for (int64_t d = 0; d < columns; d += kLanes) {
                to = into.values + row * columns + d;
                const Floats added = load(more.values + row * columns + d) * taken;
                store(to, multiply_add(load(to), kept, added));
            }
        }
    }
}

// Call `work(r, kv_head, at)` for row r of each head; `at` is its place among the blocks' rows.
template <typename Work>
STOKER_INLINE void for_rows(const AttentionItem& item, Work work) {
    const int64_t stride = item.blocks_per_head() * kBlock;
    for (int64_t head = 0; head < item.heads; ++head) {
        for (int64_t r = 0; r < item.rows; ++r) work(r, item.kv_head + head, head * stride + r);
    }
}

// KeySums become the rows' results; rows that saw nothing become zeros.
STOKER_INLINE void finish(const AttentionCall& call, const AttentionItem& item, const KeySums& sums) {
    const auto& shape = call.args.shape;
    for_rows(item, [&](int64_t r, int64_t kv_head, int64_t at) {
        const int64_t row = item.first_row + r;
        const int64_t token = item.slice.first_token + row / call.group;
        const int64_t head = kv_head * call.group + row % call.group;
        const float total = sum_lanes(load(sums.totals + at * kLanes));
        const Floats factor = splat(total > 0.0f ? 1.0f / total : 0.0f);
        float* out = call.args.out + (token * shape.num_heads + head) * shape.head_dim;
        const float* from = sums.values + at * call.columns;
        int64_t d = 0;
        for (; d + kLanes <= shape.head_dim; d += kLanes) store(out + d, load(from + d) * factor);
        if (d < shape.head_dim) store_some(out + d, load(from + d) * factor, shape.head_dim - d);
    });
}

STOKER_INLINE void find_rows(const AttentionCall& call, const AttentionItem& item) {
    const auto& shape = call.args.shape;
    for_rows(item, [&](int64_t r, int64_t kv_head, int64_t at) {
        const int64_t row = item.first_row + r, token = row / call.group;
        call.sees[r] = item.slice.seen(token, call.args.window);
        const float* from = call.args.q + (item.slice.first_token + token) * call.args.q_stride +
                            (kv_head * call.group + row % call.group) * shape.head_dim;
        float* to = call.q + at / kBlock * shape.head_dim * kBlock + at % kBlock;
        for (int64_t d = 0; d < shape.head_dim; ++d) to[d * kBlock] = from[d] * shape.scale;
    });
}

// Where the item's first K head of the context's keys [seen.first, seen.last) is, if in `tile`.
STOKER_INLINE void find_heads(const AttentionCall& call, const AttentionItem& item, Span seen,
                              int64_t tile, TileHeads& heads) {
    const auto& batch = call.batch;
    const int32_t* table = batch.block_tables + item.slice.slice * batch.table_width;
    const char* const pool = static_cast<const char*>(call.args.kv) +
                             item.kv_head * call.args.shape.head_bytes;
    int64_t key = greatest(seen.first, tile * kTile);
    const int64_t last = least(seen.last, (tile + 1) * kTile);
    heads.first = key - tile * kTile;
    heads.last = last - tile * kTile;
    while (key < last) {
        const int64_t offset = key % batch.block_size;
        const int64_t end = least(last, key - offset + batch.block_size);
        const char* at = pool + (table[key / batch.block_size] * batch.block_size + offset) *
                                    call.cell_bytes;
        for (; key < end; ++key, at += call.cell_bytes) heads.of_key[key % kTile] = at;
    }
}

// `head` is counted from that of the tile's heads.
template <int32_t kFormat>
static void unpack_tile(const AttentionCall& call, const TileHeads& heads, int64_t head,
                        Ahead& ahead) {
    const int64_t width = call.args.shape.head_dim, at = head * call.args.shape.head_bytes;
    fill_keys<kFormat>(heads, at, width, call.keys, ahead);
    fill_values<kFormat>(heads, call.values_at + at, width, call.values, ahead);
}

STOKER_INLINE void unpack_tile(const AttentionCall& call, const TileHeads& heads, int64_t head,
                               Ahead& ahead) {
    switch (call.args.shape.kv_format) {
        case stoker::kFloat32: return unpack_tile<stoker::kFloat32>(call, heads, head, ahead);
        case stoker::kBFloat16: return unpack_tile<stoker::kBFloat16>(call, heads, head, ahead);
        case stoker::kFloat16: return unpack_tile<stoker::kFloat16>(call, heads, head, ahead);
        default: return unpack_tile<stoker::kInt8>(call, heads, head, ahead);
    }
}

// Add what the item's rows see of one tile to the sums.
static void attend_tile(const AttentionCall& call, const AttentionItem& item, int64_t tile,
                        const TileHeads& heads, const KeySums& sums, Ahead& ahead) {
    const int64_t width = call.args.shape.head_dim, per_head = item.blocks_per_head();
    for (int64_t r = 0; r < item.rows; ++r) {
        const int64_t first = call.sees[r].first - tile * kTile;
        const int64_t last = call.sees[r].last - tile * kTile;
        call.sees_of_tile[r] = {least(kTile, greatest(0, first)), least(kTile, greatest(0, last))};
    }
    for (int64_t block = 0; block < item.blocks(); ++block) {
        const int64_t first_row = block % per_head * kBlock;
        if (first_row == 0) unpack_tile(call, heads, block / per_head, ahead);
        const RowBlock rows{least(kBlock, item.rows - first_row),
                            call.q + block * width * kBlock,
                            call.sees_of_tile + first_row,
                            sums.most + block * kBlockLanes,
                            sums.totals + block * kBlock * kLanes,
                            sums.values + block * kBlock * call.columns};
        attend_tile(rows, call.keys, call.values, width, ahead);
    }
}

// All rows of an item over its chunks. The sums of each chunk go to a slot of its own, counted from
// `first_slot`, or, where that is negative, are merged at once.
static void attend(const AttentionCall& call, const AttentionItem& item, int64_t first_slot) {
    const int64_t blocks = item.blocks(), key_bytes = item.heads * call.args.shape.head_bytes;
    find_rows(call, item);
    // What any row sees: the first row looks furthest back, the last furthest ahead.
    const Span seen{call.sees[0].first, call.sees[item.rows - 1].last};
    KeySums sums = call.whole;
    clear(sums, blocks, call.columns);
    TileHeads heads[2];
    const int64_t last_tile = least(item.chunks.last * (kChunk / kTile), divided_up(seen.last, kTile));
    int64_t tile = greatest(item.chunks.first * (kChunk / kTile), seen.first / kTile);
    if (tile < last_tile) find_heads(call, item, seen, tile, heads[tile % 2]);
    for (int64_t chunk = item.chunks.first; chunk < item.chunks.last; ++chunk) {
        const bool is_first = chunk == item.chunks.first;
        if (first_slot >= 0) {
            sums = KeySums::in(slot(call, first_slot + chunk - item.chunks.first), blocks);
        } else if (!is_first) {
            sums = call.part;
        }
        if (first_slot >= 0 || !is_first) clear(sums, blocks, call.columns);
        for (; tile < least(last_tile, (chunk + 1) * (kChunk / kTile)); ++tile) {
            TileHeads& next = heads[(tile + 1) % 2];
            next.first = next.last = 0;
            if (tile + 1 < last_tile) find_heads(call, item, seen, tile + 1, next);
            Ahead ahead{next, call.values_at, key_bytes, divided_up(kAskedAtOnce, item.heads), next.first};
            attend_tile(call, item, tile, heads[tile % 2], sums, ahead);
            ahead.ask(kTile);
        }
        if (first_slot < 0 && !is_first) merge(call.whole, call.part, blocks, call.columns);
    }
    if (first_slot < 0) finish(call, item, call.whole);
}

// Item `index` of a planned slice. The last rows come first: they see the most.
STOKER_INLINE AttentionItem item_at(const AttentionCall& call, const Planned& planned,
                                    int64_t index) {
    const SliceRows slice(call.batch, planned.slice, call.group);
    const int64_t kv_head = index % planned.head_groups * planned.heads;
    const int64_t tile = planned.row_tiles - 1 - index / planned.head_groups % planned.row_tiles;
    const int64_t first = tile * call.plan.tile_rows;
    const int64_t last = least(slice.rows, first + call.plan.tile_rows);
    const Span chunks = slice.chunks(first / call.group, (last - 1) / call.group + 1, call.args.window);
    return {slice, kv_head, planned.heads, first, last - first, chunks};
}

// The slot of the first chunk that an item sees, of all its pieces.
STOKER_INLINE int64_t first_slot_of(const AttentionCall& call, const Planned& planned,
                                    const AttentionItem& item) {
    const Span of_slice = item.slice.chunks(0, item.slice.tokens, call.args.window);
    const int64_t tile = item.first_row / call.plan.tile_rows;
    return planned.first_slot + (tile * planned.head_groups + item.kv_head / planned.heads) *
                                    (of_slice.last - of_slice.first);
}

STOKER_INLINE void attend_item(const AttentionCall& call, const Planned& planned, int64_t index) {
    AttentionItem item = item_at(call, planned, index);
    if (planned.pieces == 1) return attend(call, item, -1);
    const Span all = item.chunks;
    const int64_t piece = index / (planned.head_groups * planned.row_tiles);
    item.chunks.first = all.first + piece * planned.piece_chunks;
    item.chunks.last = least(all.last, item.chunks.first + planned.piece_chunks);
    const int64_t slot = first_slot_of(call, planned, item) + item.chunks.first - all.first;
    if (item.chunks.first < item.chunks.last) attend(call, item, slot);
}

// Merge the chunks of an item that was cut into pieces.
STOKER_INLINE void merge_item(const AttentionCall& call, const Planned& planned, int64_t index) {
    const AttentionItem item = item_at(call, planned, index);
    const int64_t first_slot = first_slot_of(call, planned, item);
    const KeySums whole = KeySums::in(slot(call, first_slot), item.blocks());
    for (int64_t i = 1; i < item.chunks.last - item.chunks.first; ++i) {
        merge(whole, KeySums::in(slot(call, first_slot + i), item.blocks()), item.blocks(), call.columns);
    }
    finish(call, item, whole);
}

// Give this thread's scratch to what the call needs; the rows that are left room for.
STOKER_INLINE int64_t lay_out(AttentionCall& call) {
    const int64_t width = call.args.shape.head_dim;
    char* at = static_cast<char*>(call.share.scratch);
    const char* const end = at + (stoker::kScratchBytes - kSlotBytes);
    const auto take = [&](int64_t num_bytes) {
        char* const taken = at;
        at += divided_up(num_bytes, 64) * 64;
        return taken;
    };
    call.plan.slices = reinterpret_cast<Planned*>(take(kPlanned * int64_t(sizeof(Planned))));
    call.plan.unsorted = reinterpret_cast<Planned*>(take(kPlanned * int64_t(sizeof(Planned))));
    call.plan.counts = reinterpret_cast<int64_t*>(take(kBuckets * 8));
    call.keys = reinterpret_cast<float*>(take(kTile / kColumns * panel_stride(width) * 4));
    call.values = reinterpret_cast<float*>(take(kTile * value_stride(width) * 4));
    const int64_t block_bytes = width * kBlock * 4 + 2 * kBlock * int64_t(sizeof(Span)) +
                                2 * KeySums::floats(1, call.columns) * 4;
    const int64_t room = (end - at - 8 * 64) / block_bytes;
    const int64_t blocks = greatest(1, least(kMostRows / kBlock, room));
    call.q = reinterpret_cast<float*>(take(blocks * width * kBlock * 4));
    call.sees = reinterpret_cast<Span*>(take(blocks * kBlock * int64_t(sizeof(Span))));
    call.sees_of_tile = reinterpret_cast<Span*>(take(blocks * kBlock * int64_t(sizeof(Span))));
    const int64_t sum_bytes = KeySums::floats(blocks, call.columns) * 4;
    call.whole = KeySums::in(reinterpret_cast<float*>(take(sum_bytes)), blocks);
    call.part = KeySums::in(reinterpret_cast<float*>(take(sum_bytes)), blocks);
    return blocks * kBlock;
}

static void attention(const stoker::Batch& batch, const stoker::AttentionArgs& args,
                      const stoker::Share& share) {
    const auto& shape = args.shape;
    const int64_t cell_bytes = shape.num_kv_heads * shape.head_bytes;
    AttentionCall call{batch, args, share, shape.num_heads / shape.num_kv_heads,
                       in_panels(shape.head_dim), cell_bytes,
                       shape.num_blocks * batch.block_size * cell_bytes, {}, {}, {}, {}, {}, {}, {},
                       {}};
    const int64_t max_rows = lay_out(call);
    int64_t item = share.take(), before = 0;
    for (int64_t first = 0; first < batch.num_slices; first += kPlanned) {
        plan_items(batch, args, share.num_threads, first, least(batch.num_slices, first + kPlanned),
                   max_rows, int64_t(kSlotBytes / sizeof(float)), call.plan);
        const Planned* planned = call.plan.slices;
        int64_t start = before;  // of the planned slice's items
        for (before += call.plan.num_items; item < before; item = share.take()) {
            while (item >= start + planned->items()) start += (planned++)->items();
            attend_item(call, *planned, item - start);
        }
    }
    if (call.plan.num_slots == 0) return;
    share.meet();
    item = share.take(1);
    int64_t start = 0;
    for (int64_t i = 0; i < call.plan.num_slices; ++i) {
        const Planned& planned = call.plan.slices[i];
        if (planned.pieces == 1) continue;
        const int64_t items = planned.row_tiles * planned.head_groups;
        for (; item < start + items; item = share.take(1)) merge_item(call, planned, item - start);
        start += items;
    }
}

}  // namespace STOKER_LEVEL
