// Work shared among the threads of a pool, XLA's (xla::ffi::ThreadPool) as a rule.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

namespace kvlab {

// Waits for what takes a microsecond as a rule, and gives way to others where it takes longer.
class Patience {
 public:
  void Wait() {
    if (++waited_ % kPauses == 0) {
      std::this_thread::yield();
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  }

 private:
  static constexpr int kPauses = 32;
  int waited_ = 0;
};

// Something that any number of threads may work at together.
class Job {
 public:
  virtual ~Job() = default;
  // Takes part until nothing is left to begin.
  virtual void Work() = 0;
};

// Where threads of the pool wait a moment for the next job before they go back to the pool: to wake
// a sleeping thread takes longer than a small layer, and the next one is often microseconds away.
class Lounge {
 public:
  static Lounge& Get() {
    static Lounge* const lounge = new Lounge;  // for ever: threads outlive static objects
    return *lounge;
  }

  // Gives a job to one waiting thread; false when none waits.
  bool Give(const std::shared_ptr<Job>& job) {
    for (Seat& seat : seats_) {
      if (waiting_.load(std::memory_order_acquire) == 0) return false;
      State expected = State::kWaiting;
      if (seat.state.load(std::memory_order_relaxed) == expected &&
          seat.state.compare_exchange_strong(expected, State::kTaken)) {
        seat.job = job;
        seat.state.store(State::kGiven, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  // The next job, or null when none came for a while, or all seats are taken.
  std::shared_ptr<Job> Wait() {
    for (Seat& seat : seats_) {
      State expected = State::kEmpty;
      if (seat.state.compare_exchange_strong(expected, State::kWaiting)) {
        ++waiting_;
        std::shared_ptr<Job> job = WaitAt(seat);
        --waiting_;
        return job;
      }
    }
    return nullptr;
  }

 private:
  static constexpr int kSeats = 64;
  static constexpr std::chrono::microseconds kPatience{100};

  enum class State { kEmpty, kWaiting, kTaken, kGiven };

  struct alignas(64) Seat {
    std::atomic<State> state{State::kEmpty};
    std::shared_ptr<Job> job;
  };

  static std::shared_ptr<Job> WaitAt(Seat& seat) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    Patience patience;
    while (seat.state.load(std::memory_order_acquire) != State::kGiven) {
      State expected = State::kWaiting;
      if (std::chrono::steady_clock::now() > end &&
          seat.state.compare_exchange_strong(expected, State::kEmpty)) {
        return nullptr;
      }
      patience.Wait();
    }
    std::shared_ptr<Job> job = std::move(seat.job);
    seat.job.reset();
    seat.state.store(State::kEmpty, std::memory_order_release);
    return job;
  }

  std::array<Seat, kSeats> seats_;
  std::atomic<int> waiting_{0};
};

// Calls body(i) for every i in [0, count), from the calling thread and the pool's. A thread takes
// runs of neighbours, half of an equal share of what is left, so that what body(i) fetches ahead for
// i + 1 serves. Which thread runs what is open, so a body's result must depend on i alone. The caller takes part and waits
// only for what was begun: a busy pool, or none, makes it slower and never stuck.
template <typename Pool, typename Body>
void ParallelFor(Pool& pool, int64_t count, Body body) {
  struct Shared final : Job {
    Shared(int64_t threads, int64_t count, Body body)
        : threads(threads), count(count), body(std::move(body)) {}
    void Work() override {
      for (int64_t begin = next.load(std::memory_order_relaxed); begin < count;) {
        const int64_t run = std::max<int64_t>(1, (count - begin) / (2 * threads));
        if (!next.compare_exchange_weak(begin, begin + run, std::memory_order_relaxed)) continue;
        for (int64_t i = begin; i < begin + run; ++i) body(i);
        done.fetch_add(run, std::memory_order_release);
        begin = next.load(std::memory_order_relaxed);
      }
    }
    const int64_t threads;
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
  // A thread that comes late finds no work, and may find the caller gone: it holds a share.
  auto shared = std::make_shared<Shared>(threads, count, std::move(body));
  for (int64_t i = 1; i < threads; ++i) {
    if (Lounge::Get().Give(shared)) continue;
    pool.Schedule([job = std::shared_ptr<Job>(shared)]() mutable {
      for (; job != nullptr; job = Lounge::Get().Wait()) job->Work();
    });
  }
  shared->Work();
  Patience patience;
  while (shared->done.load(std::memory_order_acquire) < count) patience.Wait();
}

}  // namespace kvlab
