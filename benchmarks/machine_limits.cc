// The limits of this machine: bytes a second read from memory, float32 operations a second.
// Prints "threads GB/s GFLOP/s", best of a few rounds.
//
//     c++ -O3 -march=native -std=c++17 -pthread benchmarks/machine_limits.cc -o limits && ./limits 2

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "vectors.h"

using kvlab::Floats;
using kvlab::kLanes;
using kvlab::kVectorBytes;

volatile float sink;

template <typename Work>
double Seconds(int threads, Work work) {
  const auto began = std::chrono::steady_clock::now();
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) pool.emplace_back(work, i);
  for (auto& thread : pool) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void Read(const Floats* from, size_t count) {
  Floats sums[4] = {};
  for (size_t i = 0; i + 4 <= count; i += 4) {
    for (int j = 0; j < 4; ++j) sums[j] += from[i + j];
    __builtin_prefetch(from + i + 32);
    __builtin_prefetch(from + i + 34);
  }
  const Floats sum = sums[0] + sums[1] + sums[2] + sums[3];
  sink = sum[0];
}

constexpr long kSteps = 10'000'000;
constexpr int kChains = 12;

void Multiply() {
  Floats sums[kChains] = {};
  Floats x = Floats{} + 0.999f, y = Floats{} + 0.001f;
  asm volatile("" : "+m"(x), "+m"(y));
  for (long step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * x + y;
  }
  for (const Floats& sum : sums) sink = sum[0];
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : std::thread::hardware_concurrency();
  const size_t count = (size_t{1} << 29) / kVectorBytes;
  std::vector<Floats> memory(count, Floats{} + 1.0f);
  double bandwidth = 0, operations = 0;
  for (int round = 0; round < 7; ++round) {
    const size_t part = count / threads;
    const double read = Seconds(threads, [&](int i) { Read(memory.data() + i * part, part); });
    bandwidth = std::max(bandwidth, count * kVectorBytes / read / 1e9);
    const double multiplied = Seconds(threads, [](int) { Multiply(); });
    operations = std::max(operations, 2.0 * threads * kSteps * kChains * kLanes / multiplied / 1e9);
  }
  std::printf("%d %.1f %.1f\n", threads, bandwidth, operations);
}
