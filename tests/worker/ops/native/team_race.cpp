// Runs a team of threads through many operations with meetings, for ThreadSanitizer to watch:
// every thread writes plain memory that another reads after the next meeting.
// Exits with 1 if a sum is wrong. See scripts/sanitize.py.

#include <cstdio>
#include <vector>

#include "team.h"

namespace {

constexpr int kThreads = 3;
constexpr int64_t kPieces = 40;

struct Sums {
    stoker::Team* team;
    std::vector<int64_t> pieces = std::vector<int64_t>(kPieces);
    std::vector<int64_t> totals = std::vector<int64_t>(kThreads);
};

void add_up(void* context, const stoker::Share& whole) {
    auto& sums = *static_cast<Sums*>(context);
    stoker::Share share = whole;
    share.next = sums.team->counters(0);
    for (int64_t piece; (piece = share.take()) < kPieces;) sums.pieces[size_t(piece)] += piece;
    share.meet();
    int64_t total = 0;
    for (int64_t piece : sums.pieces) total += piece;
    sums.totals[size_t(share.thread)] = total;
    share.meet();
    if (share.thread == 0) {
        for (int64_t other : sums.totals) sums.pieces[0] += other - total;
    }
}

}  // namespace

int main() {
    stoker::Team team(kThreads, {});
    Sums sums{&team};
    for (int64_t round = 1; round <= 2000; ++round) {
        for (int phase = 0; phase < stoker::kPhases; ++phase) team.counters(0)[phase].store(0);
        team.run(add_up, &sums);
        const int64_t wanted = round * kPieces * (kPieces - 1) / 2;
        for (int64_t total : sums.totals) {
            if (total == wanted) continue;
            std::printf("round %lld: %lld instead of %lld\n", static_cast<long long>(round),
                        static_cast<long long>(total), static_cast<long long>(wanted));
            return 1;
        }
    }
    return 0;
}
