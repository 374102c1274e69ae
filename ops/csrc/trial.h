// What a benchmark asks of a link; otherwise links are as fast as what they are made of, and nothing is written down.
#pragma once
#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <mutex>
#include <utility>
#include <vector>

namespace telechat {

using Clock = std::chrono::steady_clock;
using Moment = Clock::time_point;

class Trial {
 public:
  void set(double latency, double seconds_per_byte, bool records) {
    std::lock_guard<std::mutex> held(lock_);
    latency_ = latency, seconds_per_byte_ = seconds_per_byte, records_ = records;
    rows_.clear();
  }

  // How long a transfer holds the link, and how much later it arrives.
  std::pair<Clock::duration, Clock::duration> of(size_t bytes) {
    std::lock_guard<std::mutex> held(lock_);
    const auto length = [](double s) { return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s)); };
    return {length(seconds_per_byte_ * static_cast<double>(bytes)), length(latency_)};
  }

  void write(int64_t tag, size_t bytes, std::initializer_list<Moment> times) {
    std::lock_guard<std::mutex> held(lock_);
    if (!records_) return;
    rows_.push_back(static_cast<double>(tag));
    rows_.push_back(static_cast<double>(bytes));
    for (const Moment& t : times) rows_.push_back(std::chrono::duration<double>(t.time_since_epoch()).count());
  }

  // Copy what was written down, and forget it; return how many numbers there are.
  int64_t take(double* to, int64_t room) {
    std::lock_guard<std::mutex> held(lock_);
    const auto count = static_cast<int64_t>(rows_.size());
    if (count <= room) {
      std::copy(rows_.begin(), rows_.end(), to);
      rows_.clear();
    }
    return count;
  }

 private:
  std::mutex lock_;
  double latency_ = 0, seconds_per_byte_ = 0;
  bool records_ = false;
  std::vector<double> rows_;
};

}  // namespace telechat
