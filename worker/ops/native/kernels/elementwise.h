// What is done to each row or head by itself: embedding, norms, rotation, activation.

namespace STOKER_LEVEL {

// Rows that a thread takes at a time.
constexpr int64_t kRowsAtOnce = 4;

// Call `work(row)` for this thread's part of [0, rows).
template <typename Work>
STOKER_INLINE void for_rows(int64_t rows, const stoker::Share& share, Work work) {
    for (int64_t piece; (piece = share.take()) * kRowsAtOnce < rows;) {
        const int64_t first = piece * kRowsAtOnce;
        const int64_t last = first + kRowsAtOnce < rows ? first + kRowsAtOnce : rows;
        for (int64_t row = first; row < last; ++row) work(row);
    }
}

static void embedding(const stoker::Batch& batch, const stoker::EmbeddingArgs& args,
                      const stoker::Share& share) {
    for_rows(batch.num_tokens, share, [&](int64_t row) {
        float* out = args.out + row * args.width;
        const int64_t id = batch.token_ids[row] - args.first_id;
        if (id < 0 || id >= args.num_ids) {
            __builtin_memset(out, 0, size_t(args.width) * sizeof(float));
        } else if (args.is_packed) {
            unpack_column(args.table, args.format, args.width, id, out);
        } else {
            for (int64_t k = 0; k < args.width; ++k) {
                out[k] = value_at(args.table, args.format, id * args.width + k);
            }
        }
    });
}

static void take_rows(const stoker::Batch& batch, const stoker::TakeRowsArgs& args,
                      const stoker::Share& share) {
    for_rows(batch.num_wanted, share, [&](int64_t row) {
        __builtin_memcpy(args.out + row * args.width, args.x + batch.wanted[row] * args.width,
                         size_t(args.width) * sizeof(float));
    });
}

static void norm(const stoker::Batch& batch, const stoker::NormArgs& args,
                 const stoker::Share& share) {
    for_rows(batch.rows(args.rows), share, [&](int64_t row) {
        float* residual = args.residual + row * args.width;
        const float* x = args.x == nullptr ? nullptr : args.x + row * args.width;
        float* out = args.out + row * args.width;
        float squares = 0.0f;
        for (int64_t i = 0; i < args.width; ++i) {
            if (x != nullptr) residual[i] += x[i];
            squares += residual[i] * residual[i];
        }
        const float factor = 1.0f / __builtin_sqrtf(squares / float(args.width) + args.eps);
        for (int64_t i = 0; i < args.width; ++i) out[i] = residual[i] * factor * args.weight[i];
    });
}

static void activation(const stoker::Batch& batch, const stoker::ActivationArgs& args,
                       const stoker::Share& share) {
    for_rows(batch.rows(args.rows), share, [&](int64_t row) {
        const float* gate = args.gate_up + row * 2 * args.columns;
        const float* up = gate + args.columns;
        float* out = args.out + row * args.columns;
        for (int64_t i = 0; i < args.columns; ++i) {
            out[i] = gate[i] / (1.0f + __builtin_expf(-gate[i])) * up[i];
        }
    });
}

STOKER_INLINE void norm_head(float* head, const float* weight, int64_t width, float eps) {
    float squares = 0.0f;
    for (int64_t i = 0; i < width; ++i) squares += head[i] * head[i];
    const float factor = 1.0f / __builtin_sqrtf(squares / float(width) + eps);
    for (int64_t i = 0; i < width; ++i) head[i] *= factor * weight[i];
}

STOKER_INLINE void rotate_head(float* head, const float* cos_sin, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cos_sin[i] - second * cos_sin[half + i];
        head[i + half] = second * cos_sin[i] + first * cos_sin[half + i];
    }
}

static void rotate(const stoker::Batch& batch, const stoker::RotateArgs& args,
                   const stoker::Share& share) {
    const auto& shape = args.shape;
    const int64_t head_dim = shape.head_dim;
    const int64_t width = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim;
    const int64_t cell_bytes = shape.num_kv_heads * shape.head_bytes;
    char* const k_cells = static_cast<char*>(args.kv);
    char* const v_cells = k_cells + shape.num_blocks * batch.block_size * cell_bytes;
    for_rows(batch.num_tokens, share, [&](int64_t row) {
        float* heads = args.qkv + row * width;
        const float* cos_sin = args.cos_sin + batch.positions[row] * head_dim;
        for (int64_t h = 0; h < shape.num_heads + shape.num_kv_heads; ++h) {
            float* head = heads + h * head_dim;
            const float* weight = h < shape.num_heads ? args.q_norm : args.k_norm;
            if (weight != nullptr) norm_head(head, weight, head_dim, args.eps);
            rotate_head(head, cos_sin, head_dim);
        }
        const int64_t cell = batch.cells[row];
        if (cell < 0) return;
        const float* k = heads + shape.num_heads * head_dim;
        const float* v = k + shape.num_kv_heads * head_dim;
        for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
            const int64_t at = cell * cell_bytes + h * shape.head_bytes;
            write_head(k + h * head_dim, k_cells + at, head_dim, shape.kv_format);
            write_head(v + h * head_dim, v_cells + at, head_dim, shape.kv_format);
        }
    });
}

}  // namespace STOKER_LEVEL
