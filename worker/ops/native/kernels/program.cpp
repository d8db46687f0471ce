// Runs lists of operations on a team of threads. Plain C interface, loaded by
// worker/ops/native.py.
//
// A forward pass is one such list, written down once and run for every step: only the batch
// differs. So a step costs Python one call, and the threads pass from one operation to the next
// without going to sleep or coming back here.

#include <algorithm>
#include <cstring>
#include <new>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "team.h"

namespace stoker {

namespace {

constexpr int32_t kVersion = 1;

enum Code : int32_t {
    kLinear = 0,
    kEmbedding = 1,
    kTakeRows = 2,
    kNorm = 3,
    kActivation = 4,
    kRotate = 5,
    kAttention = 6,
    kAllReduce = 7,
};

struct AllReduceArgs {
    // Of the shared memory's library: 0 when the sum is there. Null: the caller does it.
    int32_t (*reduce)(void* group, void* data, uint64_t count, int32_t dtype);
    void* group;
    void* data;     // [rows, width] float32
    int64_t width;
    int32_t rows;
};

struct Operation {
    int32_t code;
    union {
        LinearArgs linear;
        EmbeddingArgs embedding;
        TakeRowsArgs take_rows;
        NormArgs norm;
        ActivationArgs activation;
        RotateArgs rotate;
        AttentionArgs attention;
        AllReduceArgs all_reduce;
    };
};

struct Run {
    const Kernels* kernels;
    Team* team;
    const Batch* batch;
    const Operation* first;
    const Operation* last;
};

void perform(const Kernels& kernels, const Operation& op, const Batch& batch, const Share& share) {
    switch (op.code) {
        case kLinear: kernels.linear(batch, op.linear, share); break;
        case kEmbedding: kernels.embedding(batch, op.embedding, share); break;
        case kTakeRows: kernels.take_rows(batch, op.take_rows, share); break;
        case kNorm: kernels.norm(batch, op.norm, share); break;
        case kActivation: kernels.activation(batch, op.activation, share); break;
        case kRotate: kernels.rotate(batch, op.rotate, share); break;
        case kAttention: kernels.attention(batch, op.attention, share); break;
        default: break;
    }
}

void zero(std::atomic<int64_t>* counters) {
    for (int phase = 0; phase < kPhases; ++phase) {
        counters[phase].store(0, std::memory_order_relaxed);
    }
}

// On every thread: all operations in order, with a meeting between any two. Counters are used in
// turn; thread 0 zeroes those of the next operation, which nobody uses any more since the last
// meeting and nobody will before the next.
void work(void* context, const Share& whole) {
    const Run& run = *static_cast<const Run*>(context);
    Share share = whole;
    for (const Operation* op = run.first; op != run.last; ++op) {
        const int64_t turn = op - run.first;
        share.next = run.team->counters(turn);
        if (share.thread == 0) zero(run.team->counters(turn + 1));
        perform(*run.kernels, *op, *run.batch, share);
        if (op + 1 != run.last) share.meet();
    }
}

struct Pack {
    const Kernels* kernels;
    const void* weight;
    void* packed;
    int64_t out_features, in_features;
    int32_t from, to;
    std::atomic<int64_t>* next;
};

void pack_part(void* context, const Share& whole) {
    const Pack& pack = *static_cast<const Pack*>(context);
    Share share = whole;
    share.next = pack.next;
    pack.kernels->pack_linear(pack.weight, pack.from, pack.packed, pack.to, pack.out_features,
                              pack.in_features, share);
}

struct Draw {
    const Kernels* kernels;
    const DrawArgs* args;
    std::atomic<int64_t>* next;
};

void draw_part(void* context, const Share& whole) {
    const Draw& draw = *static_cast<const Draw*>(context);
    Share share = whole;
    share.next = draw.next;
    draw.kernels->draw(*draw.args, share);
}

const Kernels* const kLevels[] = {kAmx, kAvx512, kAvx2, kNeon, kPortable};  // the best first
constexpr int32_t kNumLevels = sizeof(kLevels) / sizeof(kLevels[0]);

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

// The CPU has it, and the kernel lets this process use its registers (arch_prctl(2)).
bool has_amx() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    uint32_t eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    const bool has_tiles = (edx >> 22 & 1) != 0 && (edx >> 24 & 1) != 0;  // AMX-BF16, AMX-TILE
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return false;
    const bool has_bfloat16 = (eax >> 5 & 1) != 0;  // AVX512_BF16
    return has_avx512() && has_tiles && has_bfloat16 &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

bool is_supported(const Kernels* kernels) {
    if (kernels == nullptr) return false;
    if (kernels == kPortable) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (kernels == kAvx2) return has_avx2();
    if (kernels == kAvx512) return has_avx512();
    return kernels == kAmx && has_amx();
#else
    return true;
#endif
}

}  // namespace

struct Engine {
    const Kernels* kernels;
    Team team;
};

}  // namespace stoker

extern "C" {

using namespace stoker;

int32_t stoker_kernels_version() { return kVersion; }

// Sizes of the structs, for the mirror in Python to compare with.
int64_t stoker_kernels_size_of(int32_t what) {
    const int64_t sizes[] = {sizeof(Operation), sizeof(Batch), offsetof(Operation, linear),
                             sizeof(DrawArgs)};
    return what >= 0 && what < 4 ? sizes[what] : -1;
}

// The name of level `index` if this machine can run it, "" if not, null past the last; from the
// best to the plainest.
const char* stoker_kernels_level(int32_t index) {
    if (index < 0 || index >= kNumLevels) return nullptr;
    return is_supported(kLevels[index]) ? kLevels[index]->name : "";
}

// Threads and a level; null if this machine cannot run the level, or has no memory. `cpus` has
// num_threads - 1 CPUs to pin the helping threads to, or is null.
Engine* stoker_kernels_open(const char* level, int32_t num_threads, const int32_t* cpus) {
    for (const Kernels* kernels : kLevels) {
        if (!is_supported(kernels) || std::strcmp(kernels->name, level) != 0) continue;
        try {
            std::vector<int> pins;
            if (cpus != nullptr) pins.assign(cpus, cpus + num_threads - 1);
            return new Engine{kernels, {num_threads, pins}};
        } catch (const std::exception&) {
            return nullptr;
        }
    }
    return nullptr;
}

void stoker_kernels_close(Engine* engine) { delete engine; }

int64_t stoker_packed_bytes(const Engine* engine, int64_t out_features, int64_t in_features,
                            int32_t format) {
    return engine->kernels->packed_bytes(out_features, in_features, format);
}

void stoker_pack_linear(Engine* engine, const void* weight, int32_t from, void* packed,
                        int32_t to, int64_t out_features, int64_t in_features) {
    Pack pack{engine->kernels, weight, packed, out_features, in_features, from, to,
              engine->team.counters(0)};
    zero(pack.next);
    engine->team.run(pack_part, &pack);
}

int64_t stoker_linear_scratch_bytes(const Engine* engine, int64_t rows, int64_t in_features,
                                    int32_t format) {
    return engine->kernels->linear_scratch_bytes(rows, in_features, format);
}

// Run operations [start, count) of a list. Returns `count`, or the index of an all-reduce that
// the caller must complete before it goes on with the operation after it.
int64_t stoker_run(Engine* engine, const Operation* operations, int64_t start, int64_t count,
                   const Batch* batch) {
    int64_t at = start;
    while (at < count) {
        const Operation& op = operations[at];
        if (op.code == kAllReduce) {
            const auto& args = op.all_reduce;
            const uint64_t values = uint64_t(batch->rows(args.rows) * args.width);
            if (args.reduce == nullptr) return at;
            if (values != 0 && args.reduce(args.group, args.data, values, kFloat32) != 0) return at;
            ++at;
            continue;
        }
        const Operation* const last =
            std::find_if(operations + at, operations + count,
                         [](const Operation& each) { return each.code == kAllReduce; });
        Run run{engine->kernels, &engine->team, batch, operations + at, last};
        zero(engine->team.counters(0));
        engine->team.run(work, &run);
        at = last - operations;
    }
    return count;
}

// Choose a token for each row of logits.
void stoker_draw(Engine* engine, const DrawArgs* args) {
    Draw draw{engine->kernels, args, engine->team.counters(0)};
    zero(draw.next);
    engine->team.run(draw_part, &draw);
}

}  // extern "C"
