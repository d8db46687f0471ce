// The threads of one rank: they work on the same operation at once, and sleep when there is none.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels.h"

namespace stoker {

class Team {
public:
    // The caller is thread 0; `cpus` has one CPU for each of the others, or is empty.
    Team(int num_threads, const std::vector<int>& cpus);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return num_threads_; }

    using Work = void (*)(void* context, const Share& share);

    // Call `work` on every thread and return when all have returned. For one caller at a time.
    void run(Work work, void* context);

    // For `work`: wait until every thread is here.
    void meet();

    // For one thread of `work` between two meetings, or before `run`: zero the counters of take().
    std::atomic<int64_t>* counters(int64_t turn) { return counters_[turn & 1].next; }

private:
    struct alignas(kLineBytes) Counters {
        std::atomic<int64_t> next[kPhases];
    };

    void serve(int thread, int cpu);
    Share share_of(int thread);

    const int num_threads_;
    std::vector<std::thread> threads_;
    char* scratch_ = nullptr;  // of all threads, one after another
    Work work_ = nullptr;
    void* context_ = nullptr;
    Counters counters_[2] = {};
    alignas(kLineBytes) std::atomic<uint32_t> generation_{0};  // of runs; futex of the sleepers
    alignas(kLineBytes) std::atomic<uint32_t> sleepers_{0};
    alignas(kLineBytes) std::atomic<uint32_t> arrived_{0};
    alignas(kLineBytes) std::atomic<uint32_t> meetings_{0};
    std::atomic<bool> is_ending_{false};
};

}  // namespace stoker
