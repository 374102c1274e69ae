#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace telechat {
namespace {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  Task task;
  void* context;
  int64_t count;
  std::atomic<int64_t> next{0};
  std::atomic<int> helpers{0};  // helpers that hold a pointer to this job
  std::atomic<bool> failed{false};
  std::exception_ptr error;

  void work() {
    for (;;) {
      int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      try {
        task(context, i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  }
};

constexpr int kSlots = 16;
constexpr int kSpins = 4000;  // about 100 us: the gap between two operators of a graph is shorter

class Pool {
 public:
  Pool() { count_ = available(); }

  int count() const { return count_.load(std::memory_order_relaxed); }

  void resize(int n) { count_.store(std::min(std::max(n, 1), 64), std::memory_order_relaxed); }

  void run(Job& job) {
    int slot = count() > 1 && job.count > 1 ? publish(&job) : -1;
    job.work();
    if (slot < 0) return;
    {
      Lock guard(lock_);
      jobs_[slot] = nullptr;
      published_.fetch_sub(1, std::memory_order_relaxed);
    }
    while (job.helpers.load(std::memory_order_acquire) > 0) pause_cpu();
  }

  // A child of fork() has none of the threads.
  void forget() {
    lock_.clear();
    started_ = 0;
    sleeping_ = 0;
    published_ = 0;
    for (auto& job : jobs_) job = nullptr;
    new (&wake_lock_) std::mutex;
    new (&wake_) std::condition_variable;
  }

 private:
  struct Lock {
    explicit Lock(std::atomic_flag& f) : flag(f) {
      while (flag.test_and_set(std::memory_order_acquire)) pause_cpu();
    }
    ~Lock() { flag.clear(std::memory_order_release); }
    std::atomic_flag& flag;
  };

  static int available() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, std::min(64, CPU_COUNT(&set)));
    return std::max(1u, std::min(64u, std::thread::hardware_concurrency()));
  }

  int publish(Job* job) {
    start_helpers();
    int slot = -1;
    {
      Lock guard(lock_);
      for (int i = 0; i < kSlots && slot < 0; i++) {
        if (!jobs_[i]) slot = i;
      }
      if (slot < 0) return -1;  // many callers at once: each does its own work
      jobs_[slot] = job;
      published_.fetch_add(1, std::memory_order_seq_cst);
    }
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> guard(wake_lock_);
      wake_.notify_all();
    }
    return slot;
  }

  void start_helpers() {
    int wanted = count() - 1;
    if (started_.load(std::memory_order_acquire) >= wanted) return;
    std::lock_guard<std::mutex> guard(wake_lock_);
    while (started_ < wanted) {
      int index = started_;
      std::thread([this, index] { help(index); }).detach();
      started_++;
    }
  }

  Job* take(int index) {
    if (published_.load(std::memory_order_acquire) == 0 || index >= count() - 1) return nullptr;
    Lock guard(lock_);
    for (Job* job : jobs_) {
      if (job && job->next.load(std::memory_order_relaxed) < job->count) {
        job->helpers.fetch_add(1, std::memory_order_acq_rel);
        return job;
      }
    }
    return nullptr;
  }

  void help(int index) {
    for (;;) {
      for (int spin = 0; spin < kSpins; spin++) {
        if (Job* job = take(index)) {
          job->work();
          job->helpers.fetch_sub(1, std::memory_order_release);
          spin = 0;
        }
        pause_cpu();
      }
      std::unique_lock<std::mutex> guard(wake_lock_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(guard, [&] { return published_.load(std::memory_order_seq_cst) > 0; });
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      guard.unlock();
      if (index >= count() - 1) std::this_thread::yield();
    }
  }

  std::atomic<int> count_{1};
  std::atomic<int> started_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<int> published_{0};
  std::atomic_flag lock_ = ATOMIC_FLAG_INIT;
  Job* jobs_[kSlots] = {};
  std::mutex wake_lock_;
  std::condition_variable wake_;
};

// Never destroyed: detached helpers outlive static destructors.
Pool& pool() {
  static Pool* made = [] {
    auto* p = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool().forget(); });
    return p;
  }();
  return *made;
}

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

int threads() { return pool().count(); }
void set_threads(int n) { pool().resize(n); }

void parallel(int64_t count, Task task, void* context) {
  if (count <= 0) return;
  Job job;
  job.task = task;
  job.context = context;
  job.count = count;
  pool().run(job);
  if (job.failed.load()) std::rethrow_exception(job.error);
}

void* scratch_bytes(int slot, size_t bytes) {
  thread_local Buffer buffers[10];
  Buffer& buffer = buffers[slot];
#ifdef TELECHAT_CHECKED  // a buffer of its own for each use, so that a sanitizer sees its end; full of NaN
  const bool grow = true;
  const size_t step = 64;
#else
  const bool grow = buffer.size < bytes;
  const size_t step = 1 << 16;
#endif
  if (grow) {
    std::free(buffer.data);
    buffer.size = (bytes + step - 1) / step * step;
    buffer.data = std::aligned_alloc(64, buffer.size);
    if (!buffer.data) {
      buffer.size = 0;
      throw std::bad_alloc();
    }
  }
#ifdef TELECHAT_CHECKED
  std::memset(buffer.data, 0xff, buffer.size);
#endif
  return buffer.data;
}

}  // namespace telechat

extern "C" int telechat_threads() { return telechat::threads(); }
extern "C" void telechat_set_threads(int n) { telechat::set_threads(n); }
