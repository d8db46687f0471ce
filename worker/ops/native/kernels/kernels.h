// What a native operation is given, and what every level of instruction sets must bring.
//
// An operation runs on all threads of a team at once. What it computes for one row, head or
// column depends on that row, head or column alone and is added up in one fixed order, so the
// bits are the same in any batch and for any number of threads.
//
// Activations are always float32, [rows, columns] and dense; weights and K/V have formats.
// The structs are mirrored by worker/ops/native_structs.py; a test compares their sizes.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#ifndef STOKER_INLINE
#define STOKER_INLINE static inline __attribute__((always_inline))
#endif

#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define STOKER_CAN_COMPILE_AMX 1
#else
#define STOKER_CAN_COMPILE_AMX 0
#endif

namespace stoker {

constexpr size_t kLineBytes = 128;  // two cache lines: prefetchers fetch them in pairs

enum Format : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// How many rows an operation has: all tokens of the step, or those whose results are wanted.
enum Rows : int32_t { kTokens = 0, kWanted = 1 };

// One step, as worker/ops/table.py's BatchInputs says.
struct Batch {
    int64_t num_tokens, num_slices, num_wanted;
    int64_t block_size;
    int64_t table_width;           // columns of block_tables
    const int64_t* token_ids;      // [num_tokens]
    const int64_t* positions;      // [num_tokens]
    const int64_t* cells;          // [num_tokens], -1 for padding
    const int32_t* slice_offsets;  // [num_slices + 1]
    const int32_t* block_tables;   // [num_slices, table_width]
    const int32_t* context_lens;   // [num_slices]
    const int64_t* wanted;         // [num_wanted] rows

    int64_t rows(int32_t which) const { return which == kTokens ? num_tokens : num_wanted; }
};

struct LinearArgs {          // out = x @ weight.T + bias
    const float* x;          // [rows, in_features]
    const void* weight;      // packed by pack_linear
    const float* bias;       // [out_features], or null
    float* out;              // [rows, out_features]
    int64_t in_features, out_features;
    int32_t format;
    int32_t rows;
    void* scratch;           // of linear_scratch_bytes: the quantized rows of x; null if 0
};

struct EmbeddingArgs {       // zeros for ids that other shards hold
    const void* table;       // [out_features, in_features], plain rows or packed by pack_linear
    float* out;              // [num_tokens, width]
    int64_t first_id, num_ids, width;
    int32_t format;
    int32_t is_packed;
};

struct TakeRowsArgs {        // out[i] = x[wanted[i]]
    const float* x;          // [num_tokens, width]
    float* out;              // [num_wanted, width]
    int64_t width;
};

struct NormArgs {            // residual += x (if x), then out = residual / rms * weight
    const float* x;          // [rows, width], or null
    float* residual;         // [rows, width]
    const float* weight;     // [width]
    float* out;              // [rows, width]
    int64_t width;
    float eps;
    int32_t rows;
};

struct ActivationArgs {      // out = silu(gate) * up
    const float* gate_up;    // [rows, 2 * columns]
    float* out;              // [rows, columns]
    int64_t columns;
    int32_t rows;
};

// K/V of a layer: [2, num_blocks, block_size, num_kv_heads, head_bytes], where a head is head_dim
// values, and in int8 also the float32 they are to be multiplied with, behind them.
struct HeadsShape {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t head_bytes;
    int64_t num_blocks;
    int32_t kv_format;
    float scale;
};

struct RotateArgs {
    float* qkv;              // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; the query
                             // heads are normed and rotated in place, K and V go to kv
    void* kv;
    const float* cos_sin;    // [positions, head_dim]
    const float* q_norm;     // [head_dim], or null
    const float* k_norm;
    float eps;
    HeadsShape shape;
};

struct AttentionArgs {
    const float* q;          // [num_tokens, q_stride], of which num_heads * head_dim are used
    const void* kv;
    float* out;              // [num_tokens, num_heads * head_dim]
    int64_t q_stride;
    int64_t window;          // 0: none
    HeadsShape shape;
};

// One token for each row of logits, as worker/sampler.py's Draw says.
struct DrawArgs {
    const float* logits;       // [num_rows, vocab_size]
    int64_t num_rows, vocab_size;
    int64_t stride;            // between rows
    const float* temperature;  // [num_rows] as all the following; 0: the most probable id
    const int64_t* top_k;      // at least 1; vocab_size or more keeps all
    const double* top_p;
    const double* min_p;
    const int64_t* seed;
    const int64_t* position;   // of the token to be drawn
    int64_t* token;            // [num_rows], written
    float* best;               // the largest logit; NaN if the row holds one
};

struct Span {
    int64_t first, last;  // without `last`
};

// One thread's part in an operation.
struct Share {
    int thread, num_threads;
    std::atomic<int64_t>* next;      // [kPhases], zeroed before the operation
    void* scratch;                   // this thread's own, 64-byte aligned
    size_t scratch_bytes;
    void (*meet_all)(void*);
    void* team;

    // The next piece of work that nobody has taken; pieces are counted from 0 by the caller.
    int64_t take(int phase = 0) const {
        return next[phase].fetch_add(1, std::memory_order_relaxed);
    }
    // A run of the pieces [0, total) that nobody has taken, at most `most`, and the shorter the
    // less is left: threads then end together. False when all are taken.
    bool take_some(int64_t total, int64_t most, Span& span, int phase = 0) const {
        const int64_t left = total - next[phase].load(std::memory_order_relaxed);
        if (left <= 0) return false;
        int64_t count = left / (2 * num_threads);
        count = count < 1 ? 1 : count > most ? most : count;
        span.first = next[phase].fetch_add(count, std::memory_order_relaxed);
        span.last = span.first + count < total ? span.first + count : total;
        return span.first < total;
    }
    // Another thread's scratch: that of all threads lies in one piece of memory.
    void* scratch_of(int other) const {
        return static_cast<char*>(scratch) + (other - thread) * ptrdiff_t(scratch_bytes);
    }
    // Wait until all threads are here. What they wrote before is then visible.
    void meet() const { meet_all(team); }
};

constexpr int kPhases = 4;
constexpr size_t kScratchBytes = 1 << 20;  // of each thread

struct Kernels {
    const char* name;
    int64_t (*packed_bytes)(int64_t out_features, int64_t in_features, int32_t format);
    // The weight [out_features, in_features], dense, of `from`, into `to` as `format`.
    void (*pack_linear)(const void* weight, int32_t from, void* packed, int32_t to,
                        int64_t out_features, int64_t in_features, const Share& share);
    int64_t (*linear_scratch_bytes)(int64_t rows, int64_t in_features, int32_t format);
    void (*linear)(const Batch&, const LinearArgs&, const Share&);
    void (*embedding)(const Batch&, const EmbeddingArgs&, const Share&);
    void (*take_rows)(const Batch&, const TakeRowsArgs&, const Share&);
    void (*norm)(const Batch&, const NormArgs&, const Share&);
    void (*activation)(const Batch&, const ActivationArgs&, const Share&);
    void (*rotate)(const Batch&, const RotateArgs&, const Share&);
    void (*attention)(const Batch&, const AttentionArgs&, const Share&);
    void (*draw)(const DrawArgs&, const Share&);
};

// Null where the library was compiled for another kind of machine.
extern const Kernels* const kPortable;
extern const Kernels* const kAvx2;
extern const Kernels* const kAvx512;
extern const Kernels* const kAmx;
extern const Kernels* const kNeon;

}  // namespace stoker
