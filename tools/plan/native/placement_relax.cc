// The linear program of a box: rows are added where its solution breaks them, paths among them.
#include "placement_search.h"

#include <algorithm>
#include <cmath>

namespace telechat {

namespace {

constexpr double kMillion = 1e6;
constexpr double kLacking = 1e4;    // seconds that a missing GiB or a layer too many costs in the program
constexpr double kViolated = 1e-7;  // by so much a row must be broken before it is added
constexpr int kPivots = 5000;
constexpr int kStarts = 3;  // paths of the pool that a first program begins with, twice

}  // namespace

LinearProgram Search::program(const Box& box) const {
  Reals cost(width, 0.0), low(width, 0.0), high(width, kNone);
  cost[span + 3] = 1;
  cost[span + 4] = kLacking;
  LinearProgram lp(cost, low, high);
  bounds(lp, box);
  return lp;
}

void Search::bounds(LinearProgram& lp, const Box& box) const {
  for (int c = 0; c < n; ++c) {
    lp.bound(layers[0] + c, box.low[c], box.high[c]);
    if (p.choice) lp.bound(recomputed[0] + c, 0, box.high[c]);
    if (!other) continue;
    const bool reach = (p.bulk_last ? c : n - 1 - c) <= other->count;
    const double most = box.placed ? box.few[c] : reach ? other->count : 0;
    lp.bound(layers[1] + c, box.placed ? box.few[c] : 0, most);
    if (p.choice) lp.bound(recomputed[1] + c, 0, most);
  }
}

double Search::right(Row row, int at, const Box& box, const Ints& most) const {
  switch (row) {
    case kLine: return -p.lines[at][1];
    case kParameter: {
      const int i = at / (p.stages + 1), s = at % (p.stages + 1);
      return -(s < p.stages ? p.weight[i][s] : p.least[i]) / kMillion;
    }
    case kMemory: return box.room[at] / kGib;
    case kMost: return most[at];
    case kFewest: return -box.fewest[at];
    case kTotal: return (at % 2 ? -1 : 1) * p.kinds[at / 2].count;
    default: return 0;
  }
}

void Search::add(LinearProgram& lp, Row row, int at, const Box& box, const Ints& most) const {
  Reals a(width, 0.0);
  const size_t kinds = p.kinds.size();
  switch (row) {
    case kLine:  // step >= k makespan + c + u U
      a[span] = p.lines[at][0];
      for (int i = 0; i < 2; ++i) a[span + 1 + i] = p.lines[at][2 + i] * kMillion;
      a[span + 3] = -1;
      break;
    case kParameter: {  // U_i >= parameters of a stage, or what some stage has
      const int i = at / (p.stages + 1), s = at % (p.stages + 1);
      for (size_t g = 0; g < kinds && s < p.stages; ++g)
        for (int c : p.own[s]) a[layers[g] + c] = p.kinds[g].weights[i] / kMillion;
      a[span + 1 + i] = -1;
      break;
    }
    case kMemory:
      for (size_t g = 0; g < kinds; ++g)
        for (int c : p.own[at]) {
          a[layers[g] + c] = static_cast<double>(p.kinds[g].states + p.kinds[g].kept[at]) / kGib;
          if (p.choice) a[recomputed[g] + c] = -static_cast<double>(p.kinds[g].kept[at] - p.kinds[g].entry[at]) / kGib;
        }
      a[span + 4] = -1;
      break;
    case kMost:
    case kFewest:
      for (int c : p.own[at]) a[layers[0] + c] = row == kMost ? 1 : -1;
      a[span + 4] = -1;
      break;
    case kTotal:
      for (int c = 0; c < n; ++c) a[layers[at / 2] + c] = at % 2 ? -1 : 1;
      break;
    default:  // no more recomputed than there are
      a[recomputed[at / n] + at % n] = 1;
      a[layers[at / n] + at % n] = -1;
  }
  lp.add(a, right(row, at, box, most), tag(row, at));
}

void Search::add_path(LinearProgram& lp, int number) const {
  if (lp.has(tag(kPath, number))) return;
  const Path& path = pool.at(number);
  Reals a(width, 0.0);
  double fixed = static_cast<double>(path.sends) * static_cast<double>(p.send);
  for (int i = 0; i < 3 * n; ++i) {
    const int k = i / n, c = i % n;
    if (!path.counts[i]) continue;
    fixed += static_cast<double>(path.counts[i]) * static_cast<double>(p.fixed[i]);
    for (size_t g = 0; g < p.kinds.size(); ++g) {
      a[layers[g] + c] += path.counts[i] * static_cast<double>(p.kinds[g].times[k]) * kPs;
      if (k == 1 && p.choice) a[recomputed[g] + c] = path.counts[i] * static_cast<double>(p.kinds[g].recompute_time) * kPs;
    }
  }
  a[span] = -1;
  lp.add(a, -fixed * kPs, tag(kPath, number));
}

// Adds the rows but for paths that the solution breaks; returns whether there were any.
bool Search::separate(LinearProgram& lp, const Box& box, const Ints& most) const {
  std::vector<std::pair<Row, int>> broken;
  auto look = [&](Row row, int at, double left) {
    if (left > right(row, at, box, most) + kViolated) broken.push_back({row, at});
  };
  const double lacking = lp.x(span + 4), size[2] = {lp.x(span + 1), lp.x(span + 2)};
  const size_t kinds = p.kinds.size();
  for (int i = 0; i < 2; ++i) {
    double left = p.lines[i][0] * lp.x(span) - lp.x(span + 3);
    for (int j = 0; j < 2; ++j) left += p.lines[i][2 + j] * kMillion * size[j];
    look(kLine, i, left);
    look(kParameter, i * (p.stages + 1) + p.stages, -size[i]);
  }
  double total[2] = {0, 0};
  for (int s = 0; s < p.stages; ++s) {
    double stage = 0, bytes = 0, weight[2] = {0, 0};
    for (size_t g = 0; g < kinds; ++g) {
      double sum = 0, more = 0;
      for (int c : p.own[s]) {
        const double x = lp.x(layers[g] + c);
        sum += x;
        if (!p.choice) continue;
        const double r = lp.x(recomputed[g] + c);
        more += r;
        look(kAgain, static_cast<int>(g) * n + c, r - x);
      }
      if (g == 0) stage = sum;
      total[g] += sum;
      bytes += sum * static_cast<double>(p.kinds[g].states + p.kinds[g].kept[s]);
      bytes -= more * static_cast<double>(p.kinds[g].kept[s] - p.kinds[g].entry[s]);
      for (int i = 0; i < 2; ++i) weight[i] += sum * p.kinds[g].weights[i] / kMillion;
    }
    look(kMemory, s, bytes / kGib - lacking);
    look(kMost, s, stage - lacking);
    look(kFewest, s, -stage - lacking);
    for (int i = 0; i < 2; ++i) look(kParameter, i * (p.stages + 1) + s, weight[i] - size[i]);
  }
  for (size_t g = 0; g < kinds; ++g) {
    look(kTotal, 2 * static_cast<int>(g), total[g]);
    look(kTotal, 2 * static_cast<int>(g) + 1, -total[g]);
  }
  for (auto [row, at] : broken) add(lp, row, at, box, most);
  return !broken.empty();
}

std::vector<int64_t> Search::times(const Reals& x) const {
  std::vector<int64_t> found(3 * n);
  for (int i = 0; i < 3 * n; ++i) {
    double t = static_cast<double>(p.fixed[i]);
    for (size_t g = 0; g < p.kinds.size(); ++g) {
      t += static_cast<double>(p.kinds[g].times[i / n]) * x[layers[g] + i % n];
      if (i / n == 1 && p.choice) t += static_cast<double>(p.kinds[g].recompute_time) * x[recomputed[g] + i % n];
    }
    found[i] = std::llround(t);
  }
  return found;
}

// Returns the best fractions of layers, rows added until the bound meets the target or no path is longer.
Search::Relaxed Search::relax(LinearProgram& lp, const Box& box, const Ints& most, double target, int rounds, bool start) {
  Relaxed found;
  found.possible = true;
  Reals x(width), center, tried(width);
  auto solve = [&] {
    bool done = lp.solve(kPivots) == 0;
    for (int i = 0; done && i < 200 && lp.value() < target * (1 - kClose / 2) && separate(lp, box, most); ++i)
      done = lp.solve(kPivots) == 0;
    for (int v = 0; v < width; ++v) x[v] = lp.x(v);
    return done;
  };
  bool done = solve();
  const int known = start ? pool.size() : 0;
  for (int i = 0; i < 2 && done && known; ++i) {
    const std::vector<int64_t> t = times(x);
    std::vector<std::pair<double, int>> lengths(known);
    for (int j = 0; j < known; ++j) {
      const Path& path = pool.at(j);
      double length = static_cast<double>(path.sends) * static_cast<double>(p.send);
      for (int k = 0; k < 3 * n; ++k) length += path.counts[k] * static_cast<double>(t[k]);
      lengths[j] = {-length, j};
    }
    const int some = std::min(known, kStarts);
    std::partial_sort(lengths.begin(), lengths.begin() + some, lengths.end());
    for (int j = 0; j < some; ++j) add_path(lp, lengths[j].second);
    done = solve();
  }
  center = x;
  double step = 1;
  std::vector<int32_t> ops;
  for (int turn = 0, still = 0; done && turn < rounds && lp.value() < target * (1 - kClose / 2); ++turn) {
    for (int v = 0; v < width; ++v) tried[v] = x[v] * step + center[v] * (1 - step);
    center = tried;
    const double before = lp.value(), bound = x[span];
    const std::vector<int64_t> t = times(tried);
    const double makespan = kPs * static_cast<double>(p.pipeline->makespan(t.data(), p.send, turn, &ops));
    if (makespan <= bound * (1 + 1e-6)) {
      if (step == 1) break;
      step = 1;
      continue;
    }
    add_path(lp, pool.add(*p.pipeline, ops));
    done = solve();
    still = lp.value() - before < 1e-6 * lp.value() ? still + 1 : 0;
    step = still > 2 ? 1.0 : 0.5;
    if (still > 5) break;
  }
  found.counts.assign(x.begin() + layers[0], x.begin() + layers[0] + n);
  found.near = found.counts;
  for (int c = 0; c < n && other; ++c) found.near[c] += x[layers[1] + c];
  found.proof = proof(lp);
  found.bound = value(found.proof, box, most);
  return found;
}

}  // namespace telechat
