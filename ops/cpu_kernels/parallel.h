// Work shared among the threads of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace kvlab {

// Calls body(i) for every i in [0, count), from the calling thread and the pool's. Which thread
// runs what is open, so a body's result must depend on i alone. The caller takes part and waits
// only for what was begun: a busy pool, or none, makes it slower and never stuck.
template <typename Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, Body body) {
  struct Shared {
    Shared(int64_t count, Body body) : count(count), body(std::move(body)) {}
    void Work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        body(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
    const int64_t count;
    Body body;
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
  };
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  // A task that starts late finds no work, and may find the caller gone: it holds a share.
  auto shared = std::make_shared<Shared>(count, std::move(body));
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([shared] { shared->Work(); });
  shared->Work();
  while (shared->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace kvlab
