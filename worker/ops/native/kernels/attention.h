// Causal attention over paged K/V.

namespace STOKER_LEVEL {

static void attention(const stoker::Batch& batch, const stoker::AttentionArgs& args,
                      const stoker::Share& share) {
    const auto& shape = args.shape;
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    const int64_t cell_bytes = shape.num_kv_heads * shape.head_bytes;
    const char* const k_cells = static_cast<const char*>(args.kv);
    const char* const v_cells = k_cells + shape.num_blocks * batch.block_size * cell_bytes;
    for (int64_t item; (item = share.take()) < batch.num_slices * shape.num_heads;) {
        const int64_t slice = item / shape.num_heads, head = item % shape.num_heads;
        const int64_t first = batch.slice_offsets[slice], last = batch.slice_offsets[slice + 1];
        for (int64_t token = first; token < last; ++token) {
            float* out = args.out + (token * shape.num_heads + head) * shape.head_dim;
            const float* q = args.q + token * args.q_stride + head * shape.head_dim;
            for (int64_t d = 0; d < shape.head_dim; ++d) out[d] = 0.0f;
            const int64_t seen = batch.context_lens[slice] - (last - 1 - token);
            const int64_t start = args.window && seen > args.window ? seen - args.window : 0;
            float most = -__builtin_inff(), total = 0.0f;
            for (int64_t key = start; key < seen; ++key) {
                const int64_t block =
                    batch.block_tables[slice * batch.table_width + key / batch.block_size];
                const int64_t cell = block * batch.block_size + key % batch.block_size;
                const int64_t at = cell * cell_bytes + head / group * shape.head_bytes;
                float score = 0.0f;
                for (int64_t d = 0; d < shape.head_dim; ++d) {
                    score += q[d] * value_at(k_cells + at, shape.kv_format, d);
                }
                score *= shape.scale;
                const float higher = score > most ? score : most;
                const float keep = __builtin_expf(most - higher), weight = __builtin_expf(score - higher);
                most = higher;
                total = total * keep + weight;
                for (int64_t d = 0; d < shape.head_dim; ++d) {
                    out[d] = out[d] * keep + weight * value_at(v_cells + at, shape.kv_format, d);
                }
            }
            for (int64_t d = 0; d < shape.head_dim; ++d) out[d] = total > 0 ? out[d] / total : 0.0f;
        }
    }
}

}  // namespace STOKER_LEVEL
