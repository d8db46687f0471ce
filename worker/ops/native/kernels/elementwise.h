// What is done to each row or head by itself: embedding, norms, rotation, activation.
//
// A row's sums are added up in an order that its width alone decides.

namespace STOKER_LEVEL {

// Call `work(row)` for this thread's part of [0, rows).
template <typename Work>
STOKER_INLINE void for_rows(int64_t rows, const stoker::Share& share, Work work) {
    for (stoker::Span span; share.take_some(rows, 16, span);) {
        for (int64_t row = span.first; row < span.last; ++row) work(row);
    }
}

// kLanes values of a dense tensor from `index` on.
STOKER_INLINE Floats load_values(const void* values, int32_t format, int64_t index) {
    if (format == stoker::kFloat32) return load(static_cast<const float*>(values) + index);
    const uint16_t* halves = static_cast<const uint16_t*>(values) + index;
    return format == stoker::kBFloat16 ? load_bfloat16(halves) : load_float16(halves);
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
            const int64_t first = id * args.width;
            int64_t i = 0;
            for (; i + kLanes <= args.width; i += kLanes) {
                store(out + i, load_values(args.table, args.format, first + i));
            }
            for (; i < args.width; ++i) out[i] = value_at(args.table, args.format, first + i);
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

// One over the root of the mean of squares of x; what `added` holds (or null) is added to x first.
STOKER_INLINE float inverse_rms(float* x, const float* added, int64_t width, float eps) {
    constexpr int64_t kChains = 4;
    Floats sums[kChains] = {};
    int64_t i = 0;
    const auto add_up = [&](Floats& sum, int64_t at) {
        Floats values = load(x + at);
        if (added != nullptr) {
            values += load(added + at);
            store(x + at, values);
        }
        sum += values * values;
    };
    for (; i + kChains * kLanes <= width; i += kChains * kLanes) {
        for (int64_t chain = 0; chain < kChains; ++chain) add_up(sums[chain], i + chain * kLanes);
    }
    for (; i + kLanes <= width; i += kLanes) add_up(sums[0], i);
    if (i < width) {
        Floats values = load_some(x + i, width - i);
        if (added != nullptr) {
            values += load_some(added + i, width - i);
            store_some(x + i, values, width - i);
        }
        sums[1] += values * values;
    }
    const float squares = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return 1.0f / __builtin_sqrtf(squares / float(width) + eps);
}

// out = x * factor * weight; out may be x.
STOKER_INLINE void scale_row(const float* x, float factor, const float* weight, float* out,
                             int64_t width) {
    const Floats factors = splat(factor);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        store(out + i, load(x + i) * factors * load(weight + i));
    }
    for (; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

static void norm(const stoker::Batch& batch, const stoker::NormArgs& args,
                 const stoker::Share& share) {
    for_rows(batch.rows(args.rows), share, [&](int64_t row) {
        const int64_t start = row * args.width;
        const float* x = args.x == nullptr ? nullptr : args.x + start;
        const float factor = inverse_rms(args.residual + start, x, args.width, args.eps);
        scale_row(args.residual + start, factor, args.weight, args.out + start, args.width);
    });
}

STOKER_INLINE Floats silu(Floats gate) {
    // Where e^-gate would leave float32 the result is 0 to within 1e-36 anyway.
    const Floats lowest = splat(-88.0f);
    gate = gate < lowest ? lowest : gate;
    return gate / (splat(1.0f) + exp(-gate));
}

static void activation(const stoker::Batch& batch, const stoker::ActivationArgs& args,
                       const stoker::Share& share) {
    for_rows(batch.rows(args.rows), share, [&](int64_t row) {
        const float* gate = args.gate_up + row * 2 * args.columns;
        const float* up = gate + args.columns;
        float* out = args.out + row * args.columns;
        int64_t i = 0;
        for (; i + kLanes <= args.columns; i += kLanes) {
            store(out + i, silu(load(gate + i)) * load(up + i));
        }
        if (const int64_t left = args.columns - i; left > 0) {
            store_some(out + i, silu(load_some(gate + i, left)) * load_some(up + i, left), left);
        }
    });
}

// Each dimension of the first half with its partner of the second, by that pair's angle.
STOKER_INLINE void rotate_head(float* head, const float* cos_sin, int64_t width) {
    const int64_t half = width / 2;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats first = load(head + i), second = load(head + half + i);
        const Floats cosine = load(cosines + i), sine = load(sines + i);
        store(head + i, first * cosine - second * sine);
        store(head + half + i, second * cosine + first * sine);
    }
    for (; i < half; ++i) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] - second * sines[i];
        head[half + i] = second * cosines[i] + first * sines[i];
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
            if (weight != nullptr) {
                const float factor = inverse_rms(head, nullptr, head_dim, args.eps);
                scale_row(head, factor, weight, head, head_dim);
            }
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
