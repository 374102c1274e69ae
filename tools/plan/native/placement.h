// The inner problem of the planner (tools/plan/search/placement_problem.py): what a placement of layers takes, and paths that many
// configurations share.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "pipeline.h"

namespace telechat {

using Ints = std::vector<int>;
using Reals = std::vector<double>;
using Clock = std::chrono::steady_clock;

// Returns the time that is `seconds` from now.
inline Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e6)));
}

struct Path {
  std::vector<int32_t> ops;
  Ints counts;  // of each kind and chunk, [3, chunks]
  int sends = 0;
};

// Paths of one schedule, each once.
class PathPool {
 public:
  // Keeps a path; returns its number.
  int add(const PipelineProgram& p, const std::vector<int32_t>& ops);
  const Path& at(int number);
  int size();

 private:
  std::mutex lock_;
  std::deque<Path> paths_;
  std::map<Ints, int> numbers_;  // by counts and sends
};

struct Placed {
  Ints layers, recomputed;
  double seconds = 0;
};

class Problem {
 public:
  // Takes the numbers of a problem in the order of `_flat` of placement.py.
  Problem(const PipelineProgram& program, const int64_t* whole, const double* reals);

  struct Kind {  // `Layers` of placement_problem.py, field by field
    int count;
    int64_t times[3], states, recompute_time, working;
    std::vector<int64_t> kept, entry;
    double weights[2];
    double total() const { return static_cast<double>(times[0] + times[1] + times[2]); }
  };

  // Layers of each kind in each chunk, larger kind first, and how many of them are recomputed.
  struct Split {
    Ints own[2], recomputed[2];
  };

  Split split(const Ints& counts, const Ints& recomputed) const;
  std::vector<int64_t> times(const Split& s) const;
  bool fits(const Split& s) const;
  // Returns the step; `more`: no way that recomputes these and more takes less.
  double seconds(const Ints& counts, const Ints& recomputed, double* more = nullptr) const;
  // Returns whether a stage has the memory for its layers.
  bool holds(int stage, const Split& s) const;
  // Fills in the recomputed layers of every chunk, as few as fit; returns whether they do.
  bool finish(const Ints& counts, Ints& recomputed) const;
  // Moves single layers off the longest path while that helps and there is time. Returns false where the first placement does
  // not fit.
  bool improve(Ints counts, int patience, Clock::time_point until, uint64_t& seed, PathPool& pool, Placed& found) const;
  // Returns whole layers of every chunk near fractions of them.
  Ints round(const Reals& near) const;
  // Every way to put the layers of the smaller kind into chunks.
  std::vector<Ints> structures() const;

  const PipelineProgram* pipeline;
  int stages, chunks, micros;
  bool choice, bulk_last;
  int64_t send, held;
  std::vector<Kind> kinds;  // the larger one first
  std::vector<int> route;
  std::vector<Ints> own;    // chunks of each stage
  Ints lowest, highest;
  std::vector<int64_t> fixed, memory, buffer;
  Reals weight[2];
  double least[2], lines[2][4];
  double base, start, reduce[2], update[2], exposed, hides[2];

 private:
  bool recompute(int stage, const Split& s, Ints& recomputed) const;
};

}  // namespace telechat
