// What a placement of layers takes, and good placements by moving layers (tools/plan/search/placement_problem.py has the definitions).
#include "placement.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace telechat {

namespace {

uint64_t next(uint64_t& seed) {
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return seed >> 33;
}

}  // namespace

int PathPool::add(const PipelineProgram& p, const std::vector<int32_t>& ops) {
  Path path;
  path.counts.assign(3 * p.chunks, 0);
  int before = -1;
  for (int32_t op : ops) {
    const int what = op / p.micros, stage = p.route[what % p.chunks];
    ++path.counts[what];
    path.sends += before >= 0 && stage != before;
    before = stage;
  }
  Ints key = path.counts;
  key.push_back(path.sends);
  std::lock_guard<std::mutex> held(lock_);
  const auto [at, added] = numbers_.try_emplace(std::move(key), static_cast<int>(paths_.size()));
  if (added) {
    path.ops = ops;
    paths_.push_back(std::move(path));
  }
  return at->second;
}

const Path& PathPool::at(int number) {
  std::lock_guard<std::mutex> held(lock_);
  return paths_[number];  // a deque's elements stay where they are
}

int PathPool::size() {
  std::lock_guard<std::mutex> held(lock_);
  return static_cast<int>(paths_.size());
}

namespace {

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

}  // namespace

Problem::Problem(const PipelineProgram& program, const int64_t* whole, const double* reals)
    : pipeline(&program), chunks(program.chunks), micros(program.micros), route(program.route) {
  stages = static_cast<int>(*whole++);
  kinds.resize(static_cast<size_t>(*whole++));
  bulk_last = *whole++ == 1;
  choice = *whole++ != 0;
  send = *whole++;
  held = *whole++;
  lowest = take<int>(whole, chunks);
  highest = take<int>(whole, chunks);
  fixed = take<int64_t>(whole, 3 * chunks);
  memory = take<int64_t>(whole, stages);
  buffer = take<int64_t>(whole, stages);
  for (Reals& one : weight) one = take<double>(reals, stages);
  fill(least, 2, reals);
  for (auto& line : lines) fill(line, 4, reals);
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
  own.resize(stages);
  for (int c = 0; c < chunks; ++c) own[route[c]].push_back(c);
}

Problem::Split Problem::split(const Ints& counts, const Ints& recomputed) const {
  Split s;
  s.own[0] = counts;
  s.recomputed[0] = recomputed;
  if (kinds.size() == 1) return s;
  const int first = bulk_last ? 1 : 0;  // the kind at the front of the model
  s.own[1].resize(chunks);
  s.recomputed[1].resize(chunks);
  for (int c = 0, before = 0; c < chunks; before += counts[c++]) {
    const int front = std::clamp(kinds[first].count - before, 0, counts[c]), twice = std::min(recomputed[c], front);
    s.own[first][c] = front;
    s.own[1 - first][c] = counts[c] - front;
    s.recomputed[first][c] = twice;
    s.recomputed[1 - first][c] = recomputed[c] - twice;
  }
  return s;
}

std::vector<int64_t> Problem::times(const Split& s) const {
  std::vector<int64_t> t = fixed;
  for (size_t g = 0; g < kinds.size(); ++g)
    for (int c = 0; c < chunks; ++c) {
      for (int k = 0; k < 3; ++k) t[k * chunks + c] += kinds[g].times[k] * s.own[g][c];
      t[chunks + c] += kinds[g].recompute_time * s.recomputed[g][c];
    }
  return t;
}

bool Problem::fits(const Split& s) const {
  for (int stage = 0; stage < stages; ++stage)
    if (!holds(stage, s)) return false;
  return true;
}

bool Problem::holds(int stage, const Split& s) const {
  int64_t need = 0, work = buffer[stage];
  for (size_t g = 0; g < kinds.size(); ++g) {
    const int64_t kept = kinds[g].kept[stage];
    for (int c : own[stage]) {
      need += s.own[g][c] * (kinds[g].states + kept) - s.recomputed[g][c] * (kept - kinds[g].entry[stage]);
      if (s.own[g][c]) work = std::max(work, held);
      if (s.recomputed[g][c]) work = std::max(work, kinds[g].working);
    }
  }
  return need + work <= memory[stage];
}

double Problem::seconds(const Ints& counts, const Ints& recomputed, double* more) const {
  const Split s = split(counts, recomputed);
  const std::vector<int64_t> t = times(s);
  const double span = 1e-12 * static_cast<double>(pipeline->makespan(t.data(), send));
  Reals back(stages, 0), all(stages, 0);  // what hides; and with all layers recomputed
  Reals largest[2] = {weight[0], weight[1]};  // parameters of each stage
  for (int c = 0; c < chunks; ++c) {
    back[route[c]] += hides[0] * static_cast<double>(t[c]) + hides[1] * static_cast<double>(t[chunks + c] + t[2 * chunks + c]);
    for (size_t g = 0; g < kinds.size(); ++g) {
      for (int i = 0; i < 2; ++i) largest[i][route[c]] += kinds[g].weights[i] * s.own[g][c];
      all[route[c]] += hides[1] * static_cast<double>(kinds[g].recompute_time * (s.own[g][c] - s.recomputed[g][c]));
    }
  }
  for (int r = 0; r < stages; ++r) all[r] += back[r];
  double whole = start, late = 0;
  for (int i = 0; i < 2; ++i) {
    const double most = *std::max_element(largest[i].begin(), largest[i].end());
    whole += reduce[i] * most;
    late += update[i] * most;
  }
  const double hidden = 1e-12 * *std::max_element(back.begin(), back.end());
  if (more) *more = span + std::max(whole - 1e-12 * *std::max_element(all.begin(), all.end()), exposed * whole) + late + base;
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
  int64_t need = 0, work = std::max(held, buffer[stage]);
  for (int c : own[stage])
    for (size_t g = 0; g < kinds.size(); ++g)
      need += s.own[g][c] * (kinds[g].states + kinds[g].kept[stage]);
  const size_t front = kinds.size() > 1 && bulk_last ? 1 : 0;
  while (need + work > memory[stage]) {
    int best = -1;
    double share = 2;
    for (int c : own[stage]) {
      const int n = s.own[0][c] + (kinds.size() > 1 ? s.own[1][c] : 0);
      if (recomputed[c] < n && static_cast<double>(recomputed[c]) / n < share) {
        share = static_cast<double>(recomputed[c]) / n;
        best = c;
      }
    }
    if (best < 0) return false;
    const size_t g = kinds.size() > 1 && recomputed[best] >= s.own[front][best] ? 1 - front : front;
    need -= kinds[g].kept[stage] - kinds[g].entry[stage];
    work = std::max(work, kinds[g].working);
    ++recomputed[best];
  }
  return true;
}

bool Problem::improve(Ints counts, int patience, Clock::time_point until, uint64_t& seed, PathPool& pool, Placed& found) const {
  int left = -std::accumulate(counts.begin(), counts.end(), 0);
  for (const Kind& k : kinds) left += k.count;
  Ints recomputed, more;
  if (left != 0 || !finish(counts, recomputed)) return false;  // chunks may hold fewer than there are
  double now = seconds(counts, recomputed);
  found = {counts, recomputed, now};
  std::vector<int32_t> ops;
  Reals each(chunks);
  for (int stall = 0; stall < patience && Clock::now() < until;) {
    const std::vector<int64_t> t = times(split(counts, recomputed));
    pipeline->makespan(t.data(), send, next(seed), &ops);
    const Path& path = pool.at(pool.add(*pipeline, ops));
    for (int c = 0; c < chunks; ++c) {
      each[c] = 0;
      for (int k = 0; k < 3; ++k) each[c] += static_cast<double>(kinds[0].times[k]) * path.counts[k * chunks + c];
    }
    std::vector<std::pair<double, std::pair<int, int>>> moves;  // by how much the path becomes shorter, from, to
    for (int a = 0; a < chunks; ++a)
      for (int b = 0; b < chunks && counts[a] > lowest[a]; ++b)
        if (each[a] > each[b] && counts[b] < highest[b]) moves.push_back({each[b] - each[a], {a, b}});
    const size_t some = std::min<size_t>(moves.size(), 3 * chunks);
    std::partial_sort(moves.begin(), moves.begin() + static_cast<std::ptrdiff_t>(some), moves.end());
    bool moved = false;
    for (size_t i = 0; i < some && !moved && Clock::now() < until; ++i) {
      const auto [a, b] = moves[i].second;
      --counts[a];
      ++counts[b];
      const double value = finish(counts, more) ? seconds(counts, more) : std::numeric_limits<double>::infinity();
      if (value < now * (1 - 1e-9)) {
        now = value;
        recomputed = more;
        moved = true;
      } else {
        ++counts[a];
        --counts[b];
      }
    }
    if (now < found.seconds * (1 - 1e-9)) {
      found = {counts, recomputed, now};
      stall = 0;
    }
    if (moved) continue;
    ++stall;  // continue from the best one with a few layers moved at random
    counts = found.layers;
    for (uint64_t k = 1 + next(seed) % 3; k > 0; --k) {
      const int a = static_cast<int>(next(seed) % chunks);
      const int b = static_cast<int>(next(seed) % chunks);
      if (counts[a] <= lowest[a] || counts[b] >= highest[b]) continue;
      --counts[a];
      ++counts[b];
    }
    if (!finish(counts, recomputed)) {
      counts = found.layers;
      recomputed = found.recomputed;
    }
    now = seconds(counts, recomputed);
  }
  return true;
}

Ints Problem::round(const Reals& near) const {
  int left = 0;
  for (const Kind& k : kinds) left += k.count;
  Ints whole(chunks), order(chunks);
  for (int c = 0; c < chunks; ++c) left -= whole[c] = std::clamp(static_cast<int>(std::floor(near[c] + 1e-6)), lowest[c], highest[c]);
  for (int before = 0; left != 0 && left != before;) {
    before = left;
    std::iota(order.begin(), order.end(), 0);
    const int step = left > 0 ? 1 : -1;
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return step * (near[a] - whole[a]) > step * (near[b] - whole[b]); });
    for (int c : order)
      if (left != 0 && (step > 0 ? whole[c] < highest[c] : whole[c] > lowest[c])) {
        whole[c] += step;
        left -= step;
      }
  }
  return whole;
}

std::vector<Ints> Problem::structures() const {
  std::vector<Ints> found;
  Ints now(chunks, 0);
  if (kinds.size() == 1) return {now};
  auto walk = [&](auto&& self, int left, int at) -> void {
    if (left == 0) {
      found.push_back(now);
      if (!bulk_last) std::reverse(found.back().begin(), found.back().end());
      return;
    }
    if (at == chunks) return;
    const int c = bulk_last ? at : chunks - 1 - at;
    for (int here = std::min(left, highest[c]); here >= (at > 0 && at < chunks - 1 ? 1 : 0); --here) {
      now[at] = here;
      self(self, left - here, at + 1);
    }
    now[at] = 0;
  };
  walk(walk, kinds[1].count, 0);
  return found;
}

}  // namespace telechat
