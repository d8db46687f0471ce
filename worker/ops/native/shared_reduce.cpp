// Sums, gathers and broadcasts between the ranks of one host through shared memory.
//
// Plain C interface, loaded by worker/shared_memory.py, which also makes the segment, hands it
// to the ranks and watches over them. Nothing here allocates names, reads the environment or
// knows about torch.
//
// How it works. Every collective is a sequence of rounds, numbered from 1 and the same on every
// rank; a round moves at most one piece per rank. Each rank has one cache line that only it
// writes and two pieces of memory ("slots"), used in turn: round r uses slot r % 2. The line's
// `progress` says how far the rank is:
//     2r      what the rank contributes to round r is in its slot
//     2r + 1  the rank needs nothing of round r any more
// A rank enters round r only when all others have reached 2(r - 2) + 1, so nobody overwrites
// what somebody still reads. `progress` only grows, and is written with release and read with
// acquire order, so the slot's bytes are visible to whoever sees the number.
//
// Sums are made by every rank for itself, in rank order, in float32, rounded once: the same bits
// everywhere and in every run.
//
// Waiting spins, then yields, then sleeps on a futex. Now and then a waiter returns
// kStillWaiting, so that its owner can look for signals and for dead peers; the owner then calls
// again with the same arguments, and the collective goes on where it was.

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <new>

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // the loops below are worth vectorizing whatever the build asks for
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && (!defined(__clang__) || __clang_major__ >= 14)
#define STOKER_FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define STOKER_FOR_EACH_CPU
#endif
#define STOKER_INLINE inline __attribute__((always_inline))

namespace {

constexpr int32_t kVersion = 1;  // of this interface and of the segment's layout
constexpr int32_t kMaxRanks = 64;
constexpr uint64_t kSmallBytes = 48 * 1024;  // up to here one round is faster than two
constexpr size_t kLineBytes = 128;  // two cache lines: prefetchers fetch them in pairs

constexpr int kSpins = 256;                  // some 5 µs
constexpr int64_t kYieldNs = 200'000;        // then sleep
constexpr int64_t kFirstSleepNs = 500'000;   // doubles up to kLongestSleepNs
constexpr int64_t kLongestSleepNs = 8'000'000;
constexpr int64_t kReturnAfterNs = 50'000'000;

enum Outcome : int32_t {
    kDone = 0,
    kStillWaiting = 1,  // call again
    kTimedOut = 2,      // `peer` did not come in time
    kPeerDied = 3,      // `peer` ended without leaving
    kPeerLeft = 4,      // `peer` closed its side
    kOutOfStep = 5,     // `peer` is in another collective than we are
    kGaveUp = 6,        // `peer` stopped waiting because its owner said so
    kNotSupported = 7,  // an unknown dtype or rank; nothing was sent
};

enum Operation : uint64_t { kAllReduce = 1, kBroadcast = 2, kGather = 3 };

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct alignas(kLineBytes) RankLine {
    std::atomic<uint64_t> progress;
    std::atomic<uint64_t> signature[2];  // which collective rounds of this parity belong to
    std::atomic<int64_t> step;           // for messages only
    std::atomic<uint32_t> has_left;
};

struct alignas(kLineBytes) Header {
    std::atomic<uint64_t> verdict;  // 0, or why the group is broken: see Verdict
    alignas(kLineBytes) std::atomic<uint32_t> sleepers;
    alignas(kLineBytes) std::atomic<uint32_t> bell;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "progress must be shared by processes");
static_assert(sizeof(RankLine) == kLineBytes, "one line per rank");

// What broke the group, in one word, so that the first rank to know tells all.
struct Verdict {
    int32_t outcome, peer, finder;

    uint64_t packed() const {
        return uint64_t(outcome) << 32 | uint64_t(uint16_t(peer)) << 16 | uint16_t(finder + 1);
    }
    static Verdict unpack(uint64_t word) {
        return {int32_t(word >> 32), int32_t(word >> 16 & 0xffff), int32_t(word & 0xffff) - 1};
    }
};

}  // namespace

extern "C" {

struct StokerFailure {
    int32_t outcome;
    int32_t peer;              // the rank that is missing, dead or out of step
    int32_t finder;            // the rank that noticed
    uint64_t round;            // in which this rank was
    uint64_t peer_round;       // the last round that `peer` has taken part in
    int64_t peer_step;         // the step it last spoke of
    uint64_t own_signature;    // what this rank was doing
    uint64_t peer_signature;   // what `peer` was doing, if out of step
};

struct StokerGroup {
    char* base;
    uint64_t total_bytes;
    uint64_t piece_bytes;
    int32_t rank;
    int32_t ranks;
    int64_t timeout_ns;
    uint64_t round;
    // Of the current collective:
    bool is_busy;         // it has begun and not ended
    int32_t stage;        // how far its current round is, see Stage
    bool is_summed;       // of a large all-reduce: this piece's first round of two is over
    uint64_t done;        // bytes of this rank's contribution that are through
    uint64_t signature;
    int64_t deadline_ns;  // 0 until the first long wait
    StokerFailure failure;
};

}  // extern "C"

namespace {

enum Stage : int32_t { kOutside = 0, kEntering = 1, kInside = 2, kPublished = 3 };

Header& header(const StokerGroup& group) { return *reinterpret_cast<Header*>(group.base); }

RankLine& line(const StokerGroup& group, int32_t rank) {
    return reinterpret_cast<RankLine*>(group.base + sizeof(Header))[rank];
}

char* slot(const StokerGroup& group, int32_t rank, uint64_t round) {
    const uint64_t start = sizeof(Header) + sizeof(RankLine) * uint64_t(group.ranks);
    return group.base + start + (uint64_t(rank) * 2 + round % 2) * group.piece_bytes;
}

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // a longer pause than `yield` on the usual cores
#endif
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout,
                   nullptr, 0);
}

void ring(StokerGroup& group) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (header(group).sleepers.load(std::memory_order_relaxed) != 0) {
        header(group).bell.fetch_add(1);
        futex(header(group).bell, FUTEX_WAKE, INT_MAX, nullptr);
    }
}

// Say what broke the group. The first verdict counts, on every rank: a later one is often its
// consequence.
int32_t report(StokerGroup& group) {
    const Verdict verdict = Verdict::unpack(header(group).verdict.load());
    StokerFailure& failure = group.failure;
    group.is_busy = false;
    failure = StokerFailure{};
    failure.outcome = verdict.outcome;
    failure.peer = verdict.peer;
    failure.finder = verdict.finder;
    failure.round = group.round;
    failure.own_signature = group.signature;
    const RankLine& theirs = line(group, verdict.peer);
    failure.peer_round = theirs.progress.load() / 2;
    failure.peer_step = theirs.step.load();
    failure.peer_signature = theirs.signature[group.round % 2].load();
    return failure.outcome;
}

int32_t fail(StokerGroup& group, Outcome outcome, int32_t peer) {
    uint64_t none = 0;
    const Verdict verdict{outcome, peer, group.rank};
    header(group).verdict.compare_exchange_strong(none, verdict.packed());
    ring(group);
    return report(group);
}

bool is_broken(const StokerGroup& group) {
    return header(group).verdict.load(std::memory_order_relaxed) != 0;
}

// Sleep until somebody rings or `ns` have passed, unless `peer` has got there meanwhile.
void sleep_until_rung(StokerGroup& group, int32_t peer, uint64_t at_least, int64_t ns) {
    Header& shared = header(group);
    shared.sleepers.fetch_add(1);
    const uint32_t heard = shared.bell.load();
    if (line(group, peer).progress.load() < at_least && shared.verdict.load() == 0) {
        const timespec timeout{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
        futex(shared.bell, FUTEX_WAIT, heard, &timeout);
    }
    shared.sleepers.fetch_sub(1);
}

int32_t wait_long(StokerGroup& group, int32_t peer, uint64_t at_least) {
    RankLine& theirs = line(group, peer);
    const int64_t start = now_ns();
    if (group.deadline_ns == 0) group.deadline_ns = start + group.timeout_ns;
    int64_t nap = kFirstSleepNs;
    while (theirs.progress.load(std::memory_order_acquire) < at_least) {
        if (is_broken(group)) return report(group);
        if (theirs.has_left.load(std::memory_order_acquire) != 0 &&
            theirs.progress.load(std::memory_order_acquire) < at_least)
            return fail(group, kPeerLeft, peer);
        const int64_t now = now_ns();
        if (now >= group.deadline_ns) return fail(group, kTimedOut, peer);
        if (now < start + kYieldNs) {
            sched_yield();
            continue;
        }
        if (now >= start + kReturnAfterNs) return kStillWaiting;
        const int64_t left = group.deadline_ns - now;
        sleep_until_rung(group, peer, at_least, nap < left ? nap : left);
        if (nap < kLongestSleepNs) nap *= 2;
    }
    return kDone;
}

int32_t wait_for(StokerGroup& group, int32_t peer, uint64_t at_least) {
    const RankLine& theirs = line(group, peer);
    for (int spin = 0; spin < kSpins; ++spin) {
        if (theirs.progress.load(std::memory_order_acquire) >= at_least) return kDone;
        relax();
    }
    return wait_long(group, peer, at_least);
}

void reach(StokerGroup& group, uint64_t progress) {
    line(group, group.rank).progress.store(progress, std::memory_order_release);
    ring(group);
}

// Start a collective, or go on with it if it has begun.
void begin(StokerGroup& group, Operation operation, int32_t detail, uint64_t bytes) {
    if (group.is_busy) return;
    group.is_busy = true;
    group.stage = kOutside;
    group.done = 0;
    group.is_summed = false;
    group.signature = uint64_t(operation) << 60 | uint64_t(detail & 0xff) << 52 | bytes;
    group.deadline_ns = 0;
}

int32_t end(StokerGroup& group) {
    group.is_busy = false;
    return kDone;
}

// The slot of this round is ours to write once nobody reads what we left there two rounds ago.
int32_t enter_round(StokerGroup& group) {
    if (group.stage >= kInside) return kDone;
    if (is_broken(group)) return report(group);
    if (group.stage == kOutside) {
        ++group.round;
        group.stage = kEntering;
    }
    const uint64_t round = group.round;
    if (round > 2) {
        for (int32_t peer = 0; peer < group.ranks; ++peer) {
            if (peer == group.rank) continue;
            if (int32_t outcome = wait_for(group, peer, 2 * (round - 2) + 1)) return outcome;
        }
    }
    line(group, group.rank).signature[round % 2].store(group.signature, std::memory_order_relaxed);
    group.stage = kInside;
    return kDone;
}

// Put this rank's contribution to the round where the others find it.
void publish(StokerGroup& group, const char* piece, uint64_t bytes) {
    if (group.stage == kPublished) return;
    if (bytes > 0) std::memcpy(slot(group, group.rank, group.round), piece, bytes);
    reach(group, 2 * group.round);
    group.stage = kPublished;
}

void leave_round(StokerGroup& group, uint64_t bytes) {
    group.done += bytes;
    group.stage = kOutside;
}

// Wait for what `peer` contributes to this round, and make sure that it means the same round.
int32_t receive(StokerGroup& group, int32_t peer) {
    if (int32_t outcome = wait_for(group, peer, 2 * group.round)) return outcome;
    const auto theirs =
        line(group, peer).signature[group.round % 2].load(std::memory_order_relaxed);
    if (theirs != group.signature) return fail(group, kOutOfStep, peer);
    return kDone;
}

int32_t receive_all(StokerGroup& group) {
    for (int32_t peer = 0; peer < group.ranks; ++peer) {
        if (peer == group.rank) continue;
        if (int32_t outcome = receive(group, peer)) return outcome;
    }
    return kDone;
}

STOKER_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

STOKER_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Float32 {
    using Stored = float;
    static STOKER_INLINE float widen(float value) { return value; }
    static STOKER_INLINE float narrow(float value) { return value; }
};

struct BFloat16 {  // the upper half of a float32, rounded to nearest even
    using Stored = uint16_t;
    static STOKER_INLINE float widen(uint16_t half) { return float_of(uint32_t(half) << 16); }
    static STOKER_INLINE uint16_t narrow(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(0x7fc0) : uint16_t(rounded);
    }
};

struct Float16 {  // IEEE 754 binary16, rounded to nearest even; no branches, so it vectorizes
    using Stored = uint16_t;
    static STOKER_INLINE float widen(uint16_t half) {
        // Same fields, but exponents are biased by 15 here and by 127 there: scale by 2^112.
        const uint32_t magnitude = uint32_t(half & 0x7fff) << 13;
        const uint32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);
        const uint32_t sign = uint32_t(half & 0x8000) << 16;
        return float_of(sign | scaled | (mask(magnitude >= 0x0f800000) & 0x7f800000));
    }
    static STOKER_INLINE uint16_t narrow(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t magnitude = bits & 0x7fffffff;
        // Below 2^-14 the unit is 2^-24, which is also the unit of float32 just above 0.5.
        const uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
        const uint32_t usual = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
        const uint32_t is_tiny = mask(magnitude < (113u << 23));
        const uint32_t is_huge = mask(magnitude >= 0x477ff000);  // from 65520 on: infinity
        const uint32_t is_nan = mask(magnitude > 0x7f800000);
        const uint32_t finite = (tiny & is_tiny) | (usual & ~is_tiny);
        const uint32_t half = (finite & ~is_huge) | (0x7c00 & is_huge) | (0x0200 & is_nan);
        return uint16_t((bits >> 16 & 0x8000) | half);
    }
    static STOKER_INLINE uint32_t mask(bool condition) { return 0u - uint32_t(condition); }
};

constexpr uint64_t kBlock = 1024;  // floats summed at a time; stays in the first-level cache

template <class Format>
STOKER_INLINE void sum_block(typename Format::Stored* out, const char* const* parts, int32_t ranks,
               uint64_t offset, uint64_t count) {
    using Stored = typename Format::Stored;
    float total[kBlock];
    const auto* first = reinterpret_cast<const Stored*>(parts[0]) + offset;
    const auto* second = reinterpret_cast<const Stored*>(parts[1]) + offset;
    for (uint64_t i = 0; i < count; ++i)
        total[i] = Format::widen(first[i]) + Format::widen(second[i]);
    for (int32_t rank = 2; rank < ranks; ++rank) {
        const auto* next = reinterpret_cast<const Stored*>(parts[rank]) + offset;
        for (uint64_t i = 0; i < count; ++i) total[i] += Format::widen(next[i]);
    }
    for (uint64_t i = 0; i < count; ++i) out[offset + i] = Format::narrow(total[i]);
}

// out = parts[0] + parts[1] + ..., in that order; `out` may be one of the parts.
template <class Format>
STOKER_INLINE void sum_parts_of(char* out, const char* const* parts, int32_t ranks, uint64_t count) {
    auto* typed = reinterpret_cast<typename Format::Stored*>(out);
    for (uint64_t offset = 0; offset < count; offset += kBlock) {
        const uint64_t rest = count - offset;
        sum_block<Format>(typed, parts, ranks, offset, rest < kBlock ? rest : kBlock);
    }
}

STOKER_FOR_EACH_CPU
void sum_parts(char* out, const char* const* parts, int32_t ranks, uint64_t count, int32_t dtype) {
    if (dtype == kFloat32) sum_parts_of<Float32>(out, parts, ranks, count);
    if (dtype == kBFloat16) sum_parts_of<BFloat16>(out, parts, ranks, count);
    if (dtype == kFloat16) sum_parts_of<Float16>(out, parts, ranks, count);
}

// Copy bytes [start, start + count) of a dense [rows, width] matrix to where they belong in a
// matrix whose rows are `stride` bytes apart.
void scatter_rows(char* out, uint64_t stride, const char* dense, uint64_t width, uint64_t start,
                  uint64_t count) {
    uint64_t row = start / width, column = start % width;
    while (count > 0) {
        const uint64_t here = width - column < count ? width - column : count;
        std::memcpy(out + row * stride + column, dense, here);
        dense += here;
        count -= here;
        ++row;
        column = 0;
    }
}

int32_t element_bytes(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// One round: every rank reads every other's piece and sums all of it.
int32_t reduce_small(StokerGroup& group, char* own, uint64_t count, int32_t dtype) {
    if (int32_t outcome = enter_round(group)) return outcome;
    publish(group, own, count * element_bytes(dtype));
    if (int32_t outcome = receive_all(group)) return outcome;
    const char* parts[kMaxRanks];
    for (int32_t rank = 0; rank < group.ranks; ++rank)
        parts[rank] = rank == group.rank ? own : slot(group, rank, group.round);
    sum_parts(own, parts, group.ranks, count, dtype);
    leave_round(group, 0);
    return kDone;
}

// Two rounds: every rank sums one share of the piece, then takes the other shares' sums.
int32_t reduce_large(StokerGroup& group, char* own, uint64_t count, int32_t dtype) {
    const uint64_t element = element_bytes(dtype);
    const auto start_of = [&](int32_t rank) {
        return count * uint64_t(rank) / uint64_t(group.ranks) * element;
    };
    const uint64_t first = start_of(group.rank), last = start_of(group.rank + 1);
    if (!group.is_summed) {
        if (int32_t outcome = enter_round(group)) return outcome;
        if (group.stage != kPublished) {
            char* mine = slot(group, group.rank, group.round);
            std::memcpy(mine, own, first);
            std::memcpy(mine + last, own + last, count * element - last);
        }
        publish(group, nullptr, 0);
        if (int32_t outcome = receive_all(group)) return outcome;
        const char* parts[kMaxRanks];
        for (int32_t rank = 0; rank < group.ranks; ++rank)
            parts[rank] = (rank == group.rank ? own : slot(group, rank, group.round)) + first;
        sum_parts(own + first, parts, group.ranks, (last - first) / element, dtype);
        leave_round(group, 0);
        group.is_summed = true;
    }
    if (int32_t outcome = enter_round(group)) return outcome;
    publish(group, own + first, last - first);
    if (int32_t outcome = receive_all(group)) return outcome;
    for (int32_t rank = 0; rank < group.ranks; ++rank)
        if (rank != group.rank)
            std::memcpy(own + start_of(rank), slot(group, rank, group.round),
                        start_of(rank + 1) - start_of(rank));
    leave_round(group, 0);
    group.is_summed = false;
    return kDone;
}

// The part of rank `rank`'s [rows, width] columns that goes through in the current round.
uint64_t gathered_bytes(const StokerGroup& group, uint64_t rows, uint64_t width) {
    const uint64_t bytes = rows * width;
    if (group.done >= bytes) return 0;
    return bytes - group.done < group.piece_bytes ? bytes - group.done : group.piece_bytes;
}

int32_t take_columns(StokerGroup& group, char* output, uint64_t rows, const uint64_t* widths) {
    uint64_t stride = 0, column = 0;
    for (int32_t rank = 0; rank < group.ranks; ++rank) stride += widths[rank];
    for (int32_t rank = 0; rank < group.ranks; column += widths[rank++]) {
        if (rank == group.rank) continue;
        if (int32_t outcome = receive(group, rank)) return outcome;
        if (const uint64_t bytes = gathered_bytes(group, rows, widths[rank]))
            scatter_rows(output + column, stride, slot(group, rank, group.round), widths[rank],
                         group.done, bytes);
    }
    reach(group, 2 * group.round + 1);
    return kDone;
}

}  // namespace

extern "C" {

int32_t stoker_shared_version() { return kVersion; }

int32_t stoker_shared_max_ranks() { return kMaxRanks; }

uint64_t stoker_shared_bytes(int32_t ranks, uint64_t piece_bytes) {
    return sizeof(Header) + uint64_t(ranks) * (sizeof(RankLine) + 2 * piece_bytes);
}

// Map the segment behind `fd`, which holds zeros at first. Null, with errno, if that fails.
StokerGroup* stoker_shared_open(int32_t fd, int32_t rank, int32_t ranks, uint64_t piece_bytes,
                                int64_t timeout_ns) {
    const uint64_t bytes = stoker_shared_bytes(ranks, piece_bytes);
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED) return nullptr;
    auto* group = new (std::nothrow) StokerGroup{};
    if (group == nullptr) {
        munmap(base, bytes);
        errno = ENOMEM;
        return nullptr;
    }
    group->base = static_cast<char*>(base);
    group->total_bytes = bytes;
    group->piece_bytes = piece_bytes;
    group->rank = rank;
    group->ranks = ranks;
    group->timeout_ns = timeout_ns;
    return group;
}

void stoker_shared_start_step(StokerGroup* group, int64_t step) {
    line(*group, group->rank).step.store(step, std::memory_order_relaxed);
}

// data[count] of every rank becomes the sum over all ranks.
int32_t stoker_shared_all_reduce(StokerGroup* group, void* data, uint64_t count, int32_t dtype) {
    if (dtype < kFloat32 || dtype > kFloat16) return kNotSupported;
    const uint64_t element = dtype == kFloat32 ? 4 : 2;
    const uint64_t bytes = count * element;
    const auto reduce_piece = bytes < kSmallBytes ? reduce_small : reduce_large;
    begin(*group, kAllReduce, dtype, bytes);
    while (group->done < bytes) {
        const uint64_t rest = bytes - group->done;
        const uint64_t piece = rest < group->piece_bytes ? rest : group->piece_bytes;
        char* own = static_cast<char*>(data) + group->done;
        if (int32_t outcome = reduce_piece(*group, own, piece / element, dtype)) return outcome;
        group->done += piece;
    }
    return end(*group);
}

// data[bytes] of every rank becomes that of rank `source`.
int32_t stoker_shared_broadcast(StokerGroup* group, void* data, uint64_t bytes, int32_t source) {
    if (source < 0 || source >= group->ranks) return kNotSupported;
    begin(*group, kBroadcast, source, bytes);
    while (group->done < bytes) {
        const uint64_t rest = bytes - group->done;
        const uint64_t piece = rest < group->piece_bytes ? rest : group->piece_bytes;
        char* own = static_cast<char*>(data) + group->done;
        if (int32_t outcome = enter_round(*group)) return outcome;
        if (group->rank == source) {
            publish(*group, own, piece);
        } else {
            if (int32_t outcome = receive(*group, source)) return outcome;
            std::memcpy(own, slot(*group, source, group->round), piece);
            reach(*group, 2 * group->round + 1);
        }
        leave_round(*group, piece);
    }
    return end(*group);
}

// input[rows, widths[rank]] of every rank, side by side, becomes output of rank `root`.
// Widths are in bytes and the same list on every rank; `output` is written on `root` only.
int32_t stoker_shared_gather(StokerGroup* group, const void* input, void* output, uint64_t rows,
                             const uint64_t* widths, int32_t root) {
    if (root < 0 || root >= group->ranks) return kNotSupported;
    const bool is_root = group->rank == root;
    uint64_t total = 0, longest = 0, column = 0;
    for (int32_t rank = 0; rank < group->ranks; ++rank) {
        if (rank < root) column += widths[rank];
        if (rank != root && rows * widths[rank] > longest) longest = rows * widths[rank];
        total += widths[rank];
    }
    const char* own = static_cast<const char*>(input);
    char* out = static_cast<char*>(output);
    begin(*group, kGather, root, rows * total);
    while (group->done < longest) {
        if (int32_t outcome = enter_round(*group)) return outcome;
        if (is_root) {
            if (int32_t outcome = take_columns(*group, out, rows, widths)) return outcome;
        } else {
            publish(*group, own + group->done,
                    gathered_bytes(*group, rows, widths[group->rank]));
        }
        leave_round(*group, group->piece_bytes);
    }
    if (is_root && widths[root] > 0)
        scatter_rows(out + column, total, own, widths[root], 0, rows * widths[root]);
    return end(*group);
}

// Tell a group that waits which other processes have ended: bit r of `gone` for rank r. Gone
// after leaving is in order, and matters only to who still waits for that rank.
void stoker_shared_note_gone(StokerGroup* group, uint64_t gone) {
    for (int32_t rank = 0; rank < group->ranks; ++rank)
        if ((gone >> rank & 1) && line(*group, rank).has_left.load() == 0)
            fail(*group, kPeerDied, rank);
}

// Break off the collective that returned kStillWaiting, if there is one, for all ranks.
void stoker_shared_give_up(StokerGroup* group) {
    if (group->is_busy) fail(*group, kGaveUp, group->rank);
}

// Why the last collective failed.
void stoker_shared_failure(const StokerGroup* group, StokerFailure* failure) {
    *failure = group->failure;
}

// Tell the others that no more collectives come from here, and unmap.
void stoker_shared_close(StokerGroup* group) {
    line(*group, group->rank).has_left.store(1);
    ring(*group);
    munmap(group->base, group->total_bytes);
    delete group;
}

}  // extern "C"
