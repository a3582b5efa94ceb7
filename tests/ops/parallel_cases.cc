// ParallelFor under several callers at once: every index is run once, by threads of the pool and by
// threads that wait between jobs. Exits with the number of calls that went wrong.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel.h"

namespace {

// A pool as XLA's: tasks wait in a queue for a few threads.
class Pool {
 public:
  explicit Pool(int64_t count) {
    for (int64_t i = 0; i < count; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

  void Schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::vector<std::thread> threads_;
  std::deque<std::function<void()>> tasks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
};

}  // namespace

int main() {
  constexpr int kCallers = 3, kCalls = 2000;
  std::atomic<int> wrong{0};
  Pool pool(3);
  const auto call_many = [&] {
    for (int64_t call = 0; call < kCalls; ++call) {
      const int64_t count = call % 41;
      std::vector<int64_t> runs(count, 0);  // not atomic: an index belongs to one thread
      kvlab::ParallelFor(pool, count, [&runs](int64_t i) {
        for (volatile int step = 0; step < 1000; step = step + 1) {
        }
        runs[i] += i + 1;
      });
      for (int64_t i = 0; i < count; ++i) {
        if (runs[i] != i + 1) ++wrong;
      }
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) callers.emplace_back(call_many);
  for (std::thread& caller : callers) caller.join();
  return wrong;
}
