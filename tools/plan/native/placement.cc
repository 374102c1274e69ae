// What a placement of layers takes, and good placements by moving layers (tools/plan/search/placement_problem.py has the definitions).
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "pipeline.h"

namespace telechat {

namespace {

using Ints = std::vector<int>;
using Reals = std::vector<double>;
using Clock = std::chrono::steady_clock;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

uint64_t next(uint64_t& seed) {
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return seed >> 33;
}

// The next `n` numbers, which are passed by.
template <typename To, typename From>
std::vector<To> take(const From*& from, size_t n) {
  from += n;
  return std::vector<To>(from - n, from);
}

template <typename To, typename From>
void fill(To* to, size_t n, const From*& from) {
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<To>(*from++);
}

class Problem {
 public:
  // Takes the numbers of a problem in the order of `_flat` of placement.py.
  Problem(const PipelineProgram& program, const int64_t* whole, const double* reals);

  struct Kind {  // `LayerGroup` of placement_problem.py, field by field; the kind at the front of the model is the first
    int count;
    int64_t times[3], states, recompute_time, working;
    std::vector<int64_t> kept, entry;
    double weights[2];
  };

  struct Split {  // layers of each kind in each chunk, and how many of them are recomputed
    Ints layers[2], recomputed[2];
  };

  // Returns the step, infinity where the placement does not fit.
  double seconds(const Ints& counts, const Ints& recomputed) const;
  // Fills in the recomputed layers of every chunk, as few as fit; returns whether they do.
  bool finish(const Ints& counts, Ints& recomputed) const;
  // Moves single layers off the longest path while that helps and there is time; returns the step.
  double improve(Ints& counts, Ints& recomputed, int patience, Clock::time_point until, uint64_t seed) const;

  int chunks;

 private:
  Split split(const Ints& counts, const Ints& recomputed) const;
  std::vector<int64_t> times(const Split& s) const;
  bool holds(int stage, const Split& s) const;
  bool recompute(int stage, const Split& s, Ints& recomputed) const;

  const PipelineProgram* pipeline;
  int stages;
  bool choice;
  int64_t send, working;
  std::vector<Kind> kinds;
  std::vector<Ints> chunks_of;  // of each stage
  Ints lowest, highest;
  std::vector<int64_t> fixed, memory, buffer;
  Reals weight[2];
  double base, start, reduce[2], update[2], exposed, hides[2];
};

Problem::Problem(const PipelineProgram& program, const int64_t* whole, const double* reals)
    : chunks(program.chunks), pipeline(&program) {
  stages = static_cast<int>(*whole++);
  kinds.resize(static_cast<size_t>(*whole++));
  choice = *whole++ != 0;
  send = *whole++;
  working = *whole++;
  lowest = take<int>(whole, chunks);
  highest = take<int>(whole, chunks);
  fixed = take<int64_t>(whole, 3 * chunks);
  memory = take<int64_t>(whole, stages);
  buffer = take<int64_t>(whole, stages);
  for (Reals& w : weight) w = take<double>(reals, stages);
  base = *reals++;
  start = *reals++;
  exposed = *reals++;
  for (double* pair : {reduce, update, hides}) fill(pair, 2, reals);
  for (Kind& kind : kinds) {
    kind.count = static_cast<int>(*whole++);
    fill(kind.times, 3, whole);
    kind.states = *whole++;
    kind.recompute_time = *whole++;
    kind.working = *whole++;
    kind.kept = take<int64_t>(whole, stages);
    kind.entry = take<int64_t>(whole, stages);
    fill(kind.weights, 2, reals);
  }
  chunks_of.resize(stages);
  for (int c = 0; c < chunks; ++c) chunks_of[program.route[c]].push_back(c);
}

Problem::Split Problem::split(const Ints& counts, const Ints& recomputed) const {
  Split s{{counts, {}}, {recomputed, {}}};
  if (kinds.size() == 1) return s;
  s.layers[1].resize(chunks);
  s.recomputed[1].resize(chunks);
  for (int c = 0, before = 0; c < chunks; before += counts[c++]) {
    s.layers[0][c] = std::clamp(kinds[0].count - before, 0, counts[c]);
    s.recomputed[0][c] = std::min(recomputed[c], s.layers[0][c]);
    s.layers[1][c] = counts[c] - s.layers[0][c];
    s.recomputed[1][c] = recomputed[c] - s.recomputed[0][c];
  }
  return s;
}

std::vector<int64_t> Problem::times(const Split& s) const {
  std::vector<int64_t> t = fixed;
  for (size_t g = 0; g < kinds.size(); ++g)
    for (int c = 0; c < chunks; ++c) {
      for (int k = 0; k < 3; ++k) t[k * chunks + c] += kinds[g].times[k] * s.layers[g][c];
      t[chunks + c] += kinds[g].recompute_time * s.recomputed[g][c];
    }
  return t;
}

bool Problem::holds(int stage, const Split& s) const {
  int64_t need = 0, work = buffer[stage];
  for (size_t g = 0; g < kinds.size(); ++g) {
    const int64_t kept = kinds[g].kept[stage];
    for (int c : chunks_of[stage]) {
      need += s.layers[g][c] * (kinds[g].states + kept) - s.recomputed[g][c] * (kept - kinds[g].entry[stage]);
      if (s.layers[g][c]) work = std::max(work, working);
      if (s.recomputed[g][c]) work = std::max(work, kinds[g].working);
    }
  }
  return need + work <= memory[stage];
}

double Problem::seconds(const Ints& counts, const Ints& recomputed) const {
  const Split s = split(counts, recomputed);
  for (int stage = 0; stage < stages; ++stage)
    if (!holds(stage, s)) return kInfinity;
  const std::vector<int64_t> t = times(s);
  const double span = 1e-12 * static_cast<double>(pipeline->makespan(t.data(), send));
  Reals hides_of(stages, 0);
  Reals largest[2] = {weight[0], weight[1]};  // parameters of each stage
  for (int c = 0; c < chunks; ++c) {
    const int stage = pipeline->route[c];
    const auto backward = static_cast<double>(t[chunks + c] + t[2 * chunks + c]);
    hides_of[stage] += hides[0] * static_cast<double>(t[c]) + hides[1] * backward;
    for (size_t g = 0; g < kinds.size(); ++g)
      for (int i = 0; i < 2; ++i) largest[i][stage] += kinds[g].weights[i] * s.layers[g][c];
  }
  double whole = start, late = 0;
  for (int i = 0; i < 2; ++i) {
    const double most = *std::max_element(largest[i].begin(), largest[i].end());
    whole += reduce[i] * most;
    late += update[i] * most;
  }
  const double hidden = 1e-12 * *std::max_element(hides_of.begin(), hides_of.end());
  return span + std::max(whole - hidden, exposed * whole) + late + base;
}

bool Problem::finish(const Ints& counts, Ints& recomputed) const {
  recomputed.assign(chunks, 0);
  const Split s = split(counts, recomputed);
  for (int stage = 0; stage < stages; ++stage)
    if (!holds(stage, s) && !(choice && recompute(stage, s, recomputed))) return false;
  return true;
}

// Recomputes as few layers of a stage as fit, its chunks in proportion.
bool Problem::recompute(int stage, const Split& s, Ints& recomputed) const {
  int64_t need = 0, work = std::max(working, buffer[stage]);
  for (int c : chunks_of[stage])
    for (size_t g = 0; g < kinds.size(); ++g)
      need += s.layers[g][c] * (kinds[g].states + kinds[g].kept[stage]);
  while (need + work > memory[stage]) {
    int best = -1;
    double share = 2;
    for (int c : chunks_of[stage]) {
      const int n = s.layers[0][c] + (kinds.size() > 1 ? s.layers[1][c] : 0);
      if (recomputed[c] < n && static_cast<double>(recomputed[c]) / n < share) {
        share = static_cast<double>(recomputed[c]) / n;
        best = c;
      }
    }
    if (best < 0) return false;
    const size_t g = kinds.size() > 1 && recomputed[best] >= s.layers[0][best];
    need -= kinds[g].kept[stage] - kinds[g].entry[stage];
    work = std::max(work, kinds[g].working);
    ++recomputed[best];
  }
  return true;
}

double Problem::improve(Ints& counts, Ints& recomputed, int patience, Clock::time_point until, uint64_t seed) const {
  const Kind& bulk = kinds.size() > 1 && kinds[1].count >= kinds[0].count ? kinds[1] : kinds[0];
  Ints now = counts, again = recomputed, more;
  double took = seconds(now, again), best = took;
  std::vector<int32_t> ops;
  for (int stall = 0; stall < patience && Clock::now() < until;) {
    const std::vector<int64_t> t = times(split(now, again));
    pipeline->makespan(t.data(), send, next(seed), &ops);
    Reals layer(chunks, 0);  // what a layer more in a chunk adds to the longest path
    for (int32_t op : ops) {
      const int what = op / pipeline->micros;
      layer[what % chunks] += static_cast<double>(bulk.times[what / chunks]);
    }
    std::vector<std::pair<double, std::pair<int, int>>> moves;  // by how much the path becomes shorter, from, to
    for (int a = 0; a < chunks; ++a)
      for (int b = 0; b < chunks && now[a] > lowest[a]; ++b)
        if (layer[a] > layer[b] && now[b] < highest[b]) moves.push_back({layer[b] - layer[a], {a, b}});
    const size_t some = std::min<size_t>(moves.size(), 3 * chunks);
    std::partial_sort(moves.begin(), moves.begin() + static_cast<std::ptrdiff_t>(some), moves.end());
    bool moved = false;
    for (size_t i = 0; i < some && !moved && Clock::now() < until; ++i) {
      const auto [a, b] = moves[i].second;
      --now[a];
      ++now[b];
      const double value = finish(now, more) ? seconds(now, more) : kInfinity;
      moved = value < took * (1 - 1e-9);
      if (moved) {
        took = value;
        again = more;
      } else {
        ++now[a];
        --now[b];
      }
    }
    if (took < best * (1 - 1e-9)) {
      best = took;
      counts = now;
      recomputed = again;
      stall = 0;
    }
    if (moved) continue;
    ++stall;  // continue from the best one with a few layers moved at random
    now = counts;
    for (uint64_t k = 1 + next(seed) % 3; k > 0; --k) {
      const int a = static_cast<int>(next(seed) % chunks);
      const int b = static_cast<int>(next(seed) % chunks);
      if (now[a] <= lowest[a] || now[b] >= highest[b]) continue;
      --now[a];
      ++now[b];
    }
    if (!finish(now, again)) {
      now = counts;
      again = recomputed;
    }
    took = seconds(now, again);
  }
  return best;
}

}  // namespace
}  // namespace telechat

#define EXPORT extern "C" __attribute__((visibility("default")))

using telechat::Problem;

EXPORT void* telechat_placement_new(void* program, const int64_t* whole, const double* reals) {
  return new Problem(*static_cast<telechat::PipelineProgram*>(program), whole, reals);
}

EXPORT void telechat_placement_delete(void* problem) { delete static_cast<Problem*>(problem); }

// Writes the fewest recomputed layers of every chunk that fit; returns whether any do.
EXPORT bool telechat_placement_finish(void* problem, const int32_t* layers, int32_t* recomputed) {
  const auto& p = *static_cast<Problem*>(problem);
  std::vector<int> fewest;
  if (!p.finish({layers, layers + p.chunks}, fewest)) return false;
  std::copy(fewest.begin(), fewest.end(), recomputed);
  return true;
}

// Improves a placement, [chunks], for a time; returns its seconds, infinity where it does not fit.
EXPORT double telechat_placement_improve(void* problem, int32_t* layers, int32_t* recomputed, int32_t patience, double limit_s) {
  const auto& p = *static_cast<Problem*>(problem);
  std::vector<int> counts(layers, layers + p.chunks), again(recomputed, recomputed + p.chunks);
  const auto limit = std::chrono::duration<double>(std::min(limit_s, 1e6));
  const auto until = telechat::Clock::now() + std::chrono::duration_cast<telechat::Clock::duration>(limit);
  const double took = p.improve(counts, again, std::isinf(p.seconds(counts, again)) ? 0 : patience, until, 1);
  std::copy(counts.begin(), counts.end(), layers);
  std::copy(again.begin(), again.end(), recomputed);
  return took;
}
