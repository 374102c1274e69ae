// Activations that are outside of the graph's memory between their forward and their backward pass, and moments between updates.
//
// They are in a file without a name, the pool, in memory or in a folder; their places in it are in the graph
// (telechat_moe/graph/swapping.py, swapped_states.py). As on the two directions of a link, a thread copies to the pool and another one back.
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include <unistd.h>

#include "aot.h"
#include "trial.h"

using namespace telechat;

namespace {

Trial trial;
std::atomic<int> pool{-1};

struct Copy {
  int64_t number, at, bytes;
  char* data;
  Moment asked, done{};
  std::string error = {};
};

class Direction {
 public:
  explicit Direction(bool out) : out_(out) { std::thread([this] { run(); }).detach(); }

  void start(Copy copy) {
    std::lock_guard<std::mutex> held(lock_);
    done_.erase(copy.number);  // of a step that failed
    waiting_.push_back(std::move(copy));
    change_.notify_all();
  }

  void finish(int64_t number) {
    const Moment begun = Clock::now();
    std::unique_lock<std::mutex> held(lock_);
    change_.wait(held, [&] { return done_.count(number) > 0; });
    const Copy copy = std::move(done_.extract(number).mapped());
    held.unlock();
    check(copy.error.empty(), "%ld bytes that are swapped %s: %s", static_cast<long>(copy.bytes),
          out_ ? "cannot be written to the pool" : "cannot be read from the pool", copy.error.c_str());
    trial.write(2 * number + !out_, copy.bytes, {copy.asked, copy.done, begun, Clock::now()});
  }

 private:
  void run() {
    for (Moment free{};;) {
      std::unique_lock<std::mutex> held(lock_);
      change_.wait(held, [&] { return !waiting_.empty(); });
      Copy copy = std::move(waiting_.front());
      waiting_.pop_front();
      held.unlock();
      const auto [lasts, late] = trial.of(copy.bytes);
      free = std::max(free, copy.asked) + lasts;
      transfer(copy);
      std::this_thread::sleep_until(free + late);
      copy.done = Clock::now();
      held.lock();
      done_.emplace(copy.number, std::move(copy));
      change_.notify_all();
    }
  }

  void transfer(Copy& copy) const {
    for (int64_t done = 0; done < copy.bytes;) {
      char* data = copy.data + done;
      const size_t left = copy.bytes - done;
      const ssize_t count = out_ ? pwrite(pool, data, left, copy.at + done) : pread(pool, data, left, copy.at + done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        copy.error = count < 0 ? std::strerror(errno) : "it ends early";
        return;
      }
      done += count;
    }
  }

  const bool out_;
  std::mutex lock_;
  std::condition_variable change_;
  std::deque<Copy> waiting_;
  std::map<int64_t, Copy> done_;
};

Direction& direction(bool out) {  // never freed: their threads run to the end of the process
  static Direction &away = *new Direction(true), &back = *new Direction(false);
  return out ? away : back;
}

struct SwapState : State {
  int64_t number, at;
  explicit SwapState(Attributes& a) : number(a.integer("number")), at(a.integer("at")) {
    check(pool >= 0, "no pool for what is swapped; telechat_swap_pool names one");
  }
  void start(bool out, const Arg& x) const { direction(out).start({number, at, x.bytes(), static_cast<char*>(x.data), Clock::now()}); }
};

}  // namespace

// x -> a token. x may not go before SwapOutWait.
TELECHAT_INIT(SwapOut, SwapState)
TELECHAT_SHAPES1(SwapOut) { return {1}; }
TELECHAT_RUN(SwapOut) {
  call.state<SwapState>().start(true, call[0]);
  make_token(call);
}

// x, the token of SwapOut -> a token: x is in the pool.
TELECHAT_INIT(SwapOutWait, SwapState)
TELECHAT_SHAPES1(SwapOutWait) { return {1}; }
TELECHAT_RUN(SwapOutWait) {
  direction(true).finish(call.state<SwapState>().number);
  make_token(call);
}

// The token of SwapOutWait -> x, which is read only behind SwapBackWait.
TELECHAT_INIT(SwapBack, SwapState)
TELECHAT_SHAPES1(SwapBack) { return in.attributes().integers("extents"); }
TELECHAT_RUN(SwapBack) { call.state<SwapState>().start(false, call[call.count() - 1]); }

// What SwapBack gave -> a token: it is there.
TELECHAT_INIT(SwapBackWait, SwapState)
TELECHAT_SHAPES1(SwapBackWait) { return {1}; }
TELECHAT_RUN(SwapBackWait) {
  direction(false).finish(call.state<SwapState>().number);
  make_token(call);
}

// Keep what is swapped in this file from now on; the one before is closed.
extern "C" void telechat_swap_pool(int file) {
  const int before = pool.exchange(file);
  if (before >= 0) close(before);
}

// For benchmarks: each direction takes `seconds_per_byte`, and the times of copies are written down, if so asked. 0 and 0 undo it.
extern "C" void telechat_swap_trial(double seconds_per_byte, int64_t records) { trial.set(0, seconds_per_byte, records != 0); }

// Copy what was written down, and forget it; return how many numbers there are. A copy is: twice its number, and one more if it is
// back; its bytes; and in seconds when it was asked for, when it was done, when the graph began to wait, and when it went on.
extern "C" int64_t telechat_swap_times(double* to, int64_t room) { return trial.take(to, room); }
