// What this processor can do at most: bytes read from memory per second, and fused multiply-adds.
// Built when bench.limits asks, for the very processor it runs on; vectors by GCC's and Clang's
// extension, so it knows no instruction set by name.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kChains = 12;  // enough to hide the latency of a multiply-add, and they fit registers

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::uint64_t Words __attribute__((vector_size(kLanes * sizeof(float))));

volatile float g_sink;

template <typename Work>
double seconds_on(int threads, Work work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> team;
  for (int i = 1; i < threads; ++i) team.emplace_back(work, i);
  work(0);
  for (auto& thread : team) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

extern "C" {

// Seconds to read `bytes` from `data`, each thread its own part, as fast as it goes.
double probe_read(const void* data, std::int64_t bytes, int threads) {
  const std::int64_t vectors = bytes / threads / std::int64_t(sizeof(Words));
  return seconds_on(threads, [=](int index) {
    const Words* at = static_cast<const Words*>(data) + index * vectors;
    Words a = {}, b = {}, c = {}, d = {};
    for (std::int64_t i = 0; i + 4 <= vectors; i += 4) {
      a ^= at[i];
      b ^= at[i + 1];
      c ^= at[i + 2];
      d ^= at[i + 3];
    }
    a ^= b ^ c ^ d;
    g_sink = float(a[0]);
  });
}

// Seconds for `rounds` rounds of kChains multiply-adds of kLanes floats on each thread.
double probe_multiply(std::int64_t rounds, int threads) {
  return seconds_on(threads, [=](int index) {
    Vec sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = Vec{} + float(i + index);
    const Vec factor = Vec{} + 0.999f, addend = Vec{} + 1e-3f;
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * factor + addend;
    }
    for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
    g_sink = sums[0][0];
  });
}

std::int64_t probe_flops_per_round() { return 2 * kChains * kLanes; }

}  // extern "C"
