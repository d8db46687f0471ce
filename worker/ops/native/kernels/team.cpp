#include "team.h"

#include <cstdlib>
#include <new>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace stoker {

namespace {

// Between two steps a rank answers and reads its next plan, some hundred microseconds. Waking a
// sleeper costs about 50 µs, and spinning costs others a core: so spin as long as a wake-up takes.
constexpr int kSpinsBeforeSleep = 2000;
// Threads of one operation finish together unless the machine took one's core away.
constexpr int kSpinsBeforeYield = 4000;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr,
            nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr,
            nullptr, 0);
}

}  // namespace

Team::Team(int num_threads, const std::vector<int>& cpus) : num_threads_(num_threads) {
    scratch_ = static_cast<char*>(std::aligned_alloc(4096, size_t(num_threads) * kScratchBytes));
    if (scratch_ == nullptr) throw std::bad_alloc();
    for (int thread = 1; thread < num_threads; ++thread) {
        const int cpu = cpus.empty() ? -1 : cpus[size_t(thread - 1)];
        threads_.emplace_back([this, thread, cpu] { serve(thread, cpu); });
    }
}

Team::~Team() {
    is_ending_.store(true);
    generation_.fetch_add(1);
    wake_all(generation_);
    for (auto& thread : threads_) thread.join();
    std::free(scratch_);
}

Share Team::share_of(int thread) {
    return {thread,
            num_threads_,
            nullptr,
            scratch_ + size_t(thread) * kScratchBytes,
            kScratchBytes,
            [](void* team) { static_cast<Team*>(team)->meet(); },
            this};
}

void Team::run(Work work, void* context) {
    work_ = work;
    context_ = context;
    if (num_threads_ > 1) {
        generation_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_all(generation_);
    }
    work(context, share_of(0));
    meet();
}

void Team::meet() {
    if (num_threads_ == 1) return;
    const uint32_t meeting = meetings_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(num_threads_)) {
        arrived_.store(0, std::memory_order_relaxed);
        meetings_.store(meeting + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; meetings_.load(std::memory_order_acquire) == meeting; ++spins) {
        if (spins < kSpinsBeforeYield) {
            relax();
        } else {
            sched_yield();
        }
    }
}

void Team::serve(int thread, int cpu) {
    pthread_setname_np(pthread_self(), "stoker-compute");
    if (cpu >= 0) {
        cpu_set_t only;
        CPU_ZERO(&only);
        CPU_SET(cpu, &only);
        pthread_setaffinity_np(pthread_self(), sizeof only, &only);  // or stay where it may be
    }
    const Share share = share_of(thread);
    uint32_t seen = 0;
    for (;;) {
        for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; ++spins) {
            if (spins < kSpinsBeforeSleep) {
                relax();
                continue;
            }
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            sleep_while(generation_, seen);
            sleepers_.fetch_sub(1, std::memory_order_relaxed);
        }
        ++seen;
        if (is_ending_.load()) return;
        work_(context_, share);
        meet();
    }
}

}  // namespace stoker
