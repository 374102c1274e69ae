// Branch and bound over placements of layers (tools/plan/placement.py): boxes of layers of chunks and stages, each with a linear
// program whose rows are paths through the schedule. A box goes on from the program of the one that it was cut from.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <queue>
#include <utility>

#include "linear_program.h"
#include "placement.h"

namespace telechat {
namespace {

constexpr double kPs = 1e-12, kGib = 1073741824.0, kMillion = 1e6, kNone = LinearProgram::kNone;
constexpr double kClose = 1e-7;     // relative difference below which two steps are the same
constexpr double kLacking = 1e4;    // seconds that a missing GiB or a layer too many costs in the program
constexpr double kViolated = 1e-7;  // by so much a row must be broken before it is added
constexpr int kPivots = 5000;
constexpr int kStarts = 3;          // paths of the pool that a first program begins with, twice
constexpr double kWays = 5000;      // ways to recompute layers that are looked at one by one
constexpr size_t kKept = 64u << 20;  // bytes of programs that wait; boxes beyond start anew

enum Cut : int { kWhole, kLongest, kStructure, kStage, kChunk };  // as `Part.cut`
enum Row : int64_t { kPath, kLine, kParameter, kMemory, kMost, kFewest, kTotal, kAgain };
int64_t tag(Row row, int64_t at) { return row << 40 | at; }

struct Box {
  Ints low, high, few;  // layers of the larger kind of every chunk; of the smaller kind, where they stand
  Ints fewest, most;    // layers of the larger kind of every stage
  bool placed;          // the layers of the smaller kind stand
};

struct Part {  // as `Part` of placement.py; children stand one after another
  int cut = kWhole, at = 0, value = 0, first = -1, count = 0;
  int proof = -1;  // -1: the box is empty; -2: every way was looked at
};

struct Proof {  // as `Multipliers` of placement.py
  double share = 0;
  std::vector<std::pair<int, double>> paths;
  std::vector<std::pair<int, double>> others;  // position in [parameters, memory, most, fewest] and weight
};

struct Program {
  LinearProgram lp;
  Ints most, fewest;  // right-hand sides of its rows
};

struct Node {
  double bound;
  int number, part, proof;  // proof: of the box that it was cut from
  Box box;
  std::shared_ptr<const Program> from;  // of the box that it was cut from
};

struct Later {
  bool operator()(const std::unique_ptr<Node>& a, const std::unique_ptr<Node>& b) const {
    return a->bound != b->bound ? a->bound > b->bound : a->number > b->number;
  }
};

class Search {
 public:
  Search(const Given& given, Pool& pool) : p(given), pool(pool), n(p.chunks), bulk(p.kinds[0]) {
    other = p.kinds.size() > 1 ? &p.kinds[1] : nullptr;
    std::vector<int64_t> work(p.stages, 0);
    for (int c = 0; c < n; ++c)
      if (p.lowest[c]) work[p.route[c]] = p.held;
    for (int s = 0; s < p.stages; ++s) room.push_back(static_cast<double>(p.memory[s] - std::max(work[s], p.buffer[s])));
    own.resize(p.stages);
    for (int c = 0; c < n; ++c) own[p.route[c]].push_back(c);
    // columns: layers of both kinds, recomputed ones of both, makespan, U_0, U_1, step, what does not fit
    int at = n;
    layers[0] = 0;
    if (other) layers[1] = std::exchange(at, at + n);
    for (size_t g = 0; g < p.kinds.size() && p.choice; ++g) again[g] = std::exchange(at, at + n);
    span = at;
    width = at + 5;
    structures = p.structures();
    spent.assign(p.stages, 0.0);
    for (int c = 0; c < n; ++c)
      for (int k = 0; k < 3; ++k) spent[p.route[c]] += static_cast<double>(p.fixed[k * n + c]);
    each_least.assign(2, Reals(p.stages, 0.0));
    for (size_t g = 0; g < p.kinds.size(); ++g)
      for (int s = 0; s < p.stages; ++s)
        each_least[g][s] = static_cast<double>(p.kinds[g].states + (p.choice ? p.kinds[g].entry[s] : p.kinds[g].kept[s]));
    begin();
  }

  void solve(double target, int nodes, double limit_s);

  Problem p;
  Pool& pool;
  Placed best;            // seconds 0: none
  double bound = 0;
  int seen = 0, first = 0;
  Ints few;               // `longest`: layers of each stage that are too few together
  std::vector<Part> parts;
  std::vector<Proof> proofs;
  Ints root;              // proofs of the first boxes
  uint64_t seed = 1;

 private:
  struct Relaxed {
    bool possible = false;
    double bound = 0;
    Reals counts, near;  // layers of the larger kind, of both, of every chunk
    Proof proof;
  };

  void begin();
  Box whole() const;
  Box fixed(const Box& box, const Ints& structure) const;
  Ints most(const Box& box, double target) const;
  Ints within(const Box& box, double makespan) const;
  bool possible(const Box& box, const Ints& most) const;
  Ints longest(const Box& box) const;
  std::vector<Box> cut(const Box& box, const Part& part) const;
  LinearProgram program(const Box& box) const;
  void bounds(LinearProgram& lp, const Box& box) const;
  void add(LinearProgram& lp, Row row, int at, const Box& box, const Ints& most) const;
  void add_path(LinearProgram& lp, int number) const;
  bool separate(LinearProgram& lp, const Box& box, const Ints& most) const;
  double right(Row row, int at, const Box& box, const Ints& most) const;
  Relaxed relax(LinearProgram& lp, const Box& box, const Ints& most, double target, int rounds, bool start);
  Proof proof(const LinearProgram& lp) const;
  double value(const Proof& proof, const Box& box, const Ints& most) const;
  std::vector<int64_t> times(const Reals& x) const;
  bool where(const Box& box, const Relaxed& found, Part& part) const;
  bool exact(const Box& box);
  void visit(const Node& node, double limit);
  void take(const Placed& one);
  double least_rest() const { return p.lines[0][1] + p.lines[0][2] * p.least[0] + p.lines[0][3] * p.least[1]; }

  int n;
  const Problem::Kind& bulk;
  const Problem::Kind* other;
  int layers[2] = {-1, -1}, again[2] = {-1, -1}, span = 0, width = 0;
  Reals room, spent;
  std::vector<Reals> each_least;
  std::vector<Ints> own, structures;
  size_t kept = 0;  // bytes of programs that wait; programs are gone before it is
  std::priority_queue<std::unique_ptr<Node>, std::vector<std::unique_ptr<Node>>, Later> todo;
  std::shared_ptr<const Program> earlier;  // of the first box: the other first ones differ by one row
  double stuck = kNone;                    // bound of what cannot be cut any more and has too many ways
  int number = 0;
};

// boxes ---------------------------------------------------------------------------------------------------------------

Box Search::whole() const {
  Box box{p.lowest, Ints(n, bulk.count), Ints(n, 0), Ints(p.stages, 0), Ints(p.stages, bulk.count), other == nullptr};
  for (int c = 0; c < n && other; ++c)
    if ((p.bulk_last ? c : n - 1 - c) <= other->count) box.low[c] = 0;
  return box;
}

Box Search::fixed(const Box& box, const Ints& structure) const {
  Box found = box;
  found.few = structure;
  found.placed = true;
  int last = -1, start = n;
  for (int c = 0; c < n; ++c) {
    found.low[c] = std::max({box.low[c], p.lowest[c] - structure[c], 0});
    if (structure[c]) {
      last = c;
      start = std::min(start, c);
    }
  }
  for (int c = 0; c < n; ++c)
    if (last >= 0 && (p.bulk_last ? c < last : c > start)) found.low[c] = found.high[c] = 0;
  return found;
}

Ints Search::within(const Box& box, double makespan) const {
  Ints found(p.stages);
  for (int s = 0; s < p.stages; ++s) {
    double left = makespan / kPs / p.micros - spent[s];
    for (int c : own[s])
      if (other) left -= box.few[c] * other->total();
    found[s] = static_cast<int>(std::clamp(std::floor(left / std::max(bulk.total(), 1.0) + 1e-9), -1e6, 1e6));
  }
  return found;
}

Ints Search::most(const Box& box, double target) const {
  Ints found = box.most, fast;
  if (std::isfinite(target)) fast = within(box, target - least_rest());
  for (int s = 0; s < p.stages; ++s) {
    double left = room[s];
    for (int c : own[s]) left -= box.few[c] * each_least[1][s];
    const double fit = left < 0 ? -1 : std::floor((left + 0.1) / std::max(each_least[0][s], 1e-9));
    found[s] = static_cast<int>(std::min<double>(found[s], fit));
    if (!fast.empty()) found[s] = std::min(found[s], fast[s]);
  }
  return found;
}

bool Search::possible(const Box& box, const Ints& most) const {
  int all_below = 0, all_above = 0;
  for (int s = 0; s < p.stages; ++s) {
    int below = 0, above = 0;
    for (int c : own[s]) {
      below += box.low[c];
      above += box.high[c];
    }
    below = std::max(below, box.fewest[s]);
    above = std::min(above, most[s]);
    if (below > above) return false;
    all_below += below;
    all_above += above;
  }
  return all_below <= bulk.count && bulk.count <= all_above;
}

Ints Search::longest(const Box& box) const {
  if (p.stages == 1) return {};
  const Ints fit = most(box, kNone);
  auto held = [&](double makespan) {
    Ints found = within(box, makespan);
    for (int s = 0; s < p.stages; ++s) found[s] = std::max(std::min(found[s], fit[s]), 0);
    return found;
  };
  auto sum = [](const Ints& values) {
    int all = 0;
    for (int v : values) all += v;
    return all;
  };
  double low = 0, high = *std::max_element(spent.begin(), spent.end()) + bulk.total() * (bulk.count + 1);
  high *= kPs * p.micros;
  for (int i = 0; i < 50; ++i) {
    const double middle = (low + high) / 2;
    (sum(held(middle)) >= bulk.count ? high : low) = middle;
  }
  Ints found = held(low);
  return sum(found) < bulk.count ? found : Ints{};
}

std::vector<Box> Search::cut(const Box& box, const Part& part) const {
  std::vector<Box> found;
  if (part.cut == kStructure) {
    for (const Ints& one : structures) found.push_back(fixed(box, one));
  } else if (part.cut == kLongest) {
    for (int s = 0; s < p.stages; ++s) {
      found.push_back(box);
      found.back().fewest[s] = std::max(box.fewest[s], few[s] + 1);
    }
  } else {
    found = {box, box};
    (part.cut == kStage ? found[0].most : found[0].high)[part.at] = part.value;
    (part.cut == kStage ? found[1].fewest : found[1].low)[part.at] = part.value + 1;
  }
  return found;
}

// linear programs -----------------------------------------------------------------------------------------------------

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
    if (p.choice) lp.bound(again[0] + c, 0, box.high[c]);
    if (!other) continue;
    const bool reach = (p.bulk_last ? c : n - 1 - c) <= other->count;
    const double most = box.placed ? box.few[c] : reach ? other->count : 0;
    lp.bound(layers[1] + c, box.placed ? box.few[c] : 0, most);
    if (p.choice) lp.bound(again[1] + c, 0, most);
  }
}

double Search::right(Row row, int at, const Box& box, const Ints& most) const {
  switch (row) {
    case kLine: return -p.lines[at][1];
    case kParameter: {
      const int i = at / (p.stages + 1), s = at % (p.stages + 1);
      return -(s < p.stages ? p.weight[i][s] : p.least[i]) / kMillion;
    }
    case kMemory: return room[at] / kGib;
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
        for (int c : own[s]) a[layers[g] + c] = p.kinds[g].weights[i] / kMillion;
      a[span + 1 + i] = -1;
      break;
    }
    case kMemory:
      for (size_t g = 0; g < kinds; ++g)
        for (int c : own[at]) {
          a[layers[g] + c] = static_cast<double>(p.kinds[g].states + p.kinds[g].kept[at]) / kGib;
          if (p.choice) a[again[g] + c] = -static_cast<double>(p.kinds[g].kept[at] - p.kinds[g].entry[at]) / kGib;
        }
      a[span + 4] = -1;
      break;
    case kMost:
    case kFewest:
      for (int c : own[at]) a[layers[0] + c] = row == kMost ? 1 : -1;
      a[span + 4] = -1;
      break;
    case kTotal:
      for (int c = 0; c < n; ++c) a[layers[at / 2] + c] = at % 2 ? -1 : 1;
      break;
    default:  // no more recomputed than there are
      a[again[at / n] + at % n] = 1;
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
      if (k == 1 && p.choice) a[again[g] + c] = path.counts[i] * static_cast<double>(p.kinds[g].again) * kPs;
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
      for (int c : own[s]) {
        const double x = lp.x(layers[g] + c);
        sum += x;
        if (!p.choice) continue;
        const double r = lp.x(again[g] + c);
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
      if (i / n == 1 && p.choice) t += static_cast<double>(p.kinds[g].again) * x[again[g] + i % n];
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

// proofs --------------------------------------------------------------------------------------------------------------

// The multipliers of the last solution, scaled so that they prove something whatever rounding did.
Proof Search::proof(const LinearProgram& lp) const {
  Proof found;
  const int per = p.stages + 1;
  double sums[2] = {0, 0}, paths = 0;
  lp.multipliers([&](int64_t tagged, double y) {
    const int64_t at = tagged & ((int64_t{1} << 40) - 1);
    const int where = static_cast<int>(at);
    switch (tagged >> 40) {
      case kPath:
        found.paths.push_back({where, y});
        paths += y;
        break;
      case kLine:
        if (at == 0) found.share = std::min(y, 1.0);
        break;
      case kParameter:
        found.others.push_back({where, y});
        sums[at / per] += y;
        break;
      case kMemory: found.others.push_back({2 * per + where, y / kGib}); break;
      case kMost: found.others.push_back({2 * per + p.stages + where, y}); break;
      case kFewest: found.others.push_back({2 * per + 2 * p.stages + where, y}); break;
      default: break;
    }
  });
  for (auto& [number, weight] : found.paths) weight /= paths;
  for (auto& [at, weight] : found.others)
    if (at < 2 * per) weight /= sums[at / per];
  for (int i = 0; i < 2; ++i)
    if (sums[i] == 0) found.others.push_back({i * per + p.stages, 1.0});
  return found;
}

// What multipliers prove: the least sum over all placements in a box.
double Search::value(const Proof& proof, const Box& box, const Ints& most) const {
  double k, c, u[2];
  {
    const double s = proof.share, r = 1 - s;
    k = s * p.lines[0][0] + r * p.lines[1][0];
    c = s * p.lines[0][1] + r * p.lines[1][1];
    for (int i = 0; i < 2; ++i) u[i] = s * p.lines[0][2 + i] + r * p.lines[1][2 + i];
  }
  Reals counts(3 * n, 0.0), weigh[2] = {Reals(p.stages, 0.0), Reals(p.stages, 0.0)}, memory(p.stages, 0.0),
      extra(p.stages, 0.0);
  double total = c, sends = 0;
  for (auto [number, weight] : proof.paths) {
    const Path& path = pool.at(number);
    for (int i = 0; i < 3 * n; ++i) counts[i] += weight * path.counts[i];
    sends += weight * path.sends;
  }
  for (int i = 0; i < 3 * n; ++i) {
    counts[i] *= k * kPs;
    total += counts[i] * static_cast<double>(p.fixed[i]);
  }
  total += k * kPs * sends * static_cast<double>(p.send);
  const int per = p.stages + 1;
  for (auto [at, y] : proof.others) {
    if (at < 2 * per) {
      const int i = at / per, s = at % per;
      if (s < p.stages) weigh[i][s] = u[i] * y;
      total += u[i] * y * (s < p.stages ? p.weight[i][s] : p.least[i]);
      continue;
    }
    const int kind = (at - 2 * per) / p.stages, s = (at - 2 * per) % p.stages;
    if (kind == 0) {
      memory[s] = y;
      total -= y * room[s];
    } else {
      extra[s] += kind == 1 ? y : -y;
      total += kind == 1 ? -y * most[s] : y * box.fewest[s];
    }
  }
  std::vector<std::pair<double, int>> each(n);
  for (size_t g = 0; g < p.kinds.size(); ++g) {
    const Problem::Kind& kind = p.kinds[g];
    int left = kind.count;
    for (int c2 = 0; c2 < n; ++c2) {
      const int s = p.route[c2];
      double one = memory[s] * static_cast<double>(kind.states + kind.kept[s]);
      for (int t = 0; t < 3; ++t) one += counts[t * n + c2] * static_cast<double>(kind.times[t]);
      for (int i = 0; i < 2; ++i) one += kind.weights[i] * weigh[i][s];
      if (p.choice)
        one += std::min(counts[n + c2] * static_cast<double>(kind.again) -
                            memory[s] * static_cast<double>(kind.kept[s] - kind.entry[s]), 0.0);
      if (g == 0) one += extra[s];
      each[c2] = {one, c2};
    }
    auto range = [&](int c2) -> std::pair<int, int> {
      if (g == 0) return {box.low[c2], box.high[c2]};
      if (box.placed) return {box.few[c2], box.few[c2]};
      return {0, (p.bulk_last ? c2 : n - 1 - c2) <= kind.count ? kind.count : 0};
    };
    for (auto [one, c2] : each) {
      total += one * range(c2).first;
      left -= range(c2).first;
    }
    if (left < 0) return kNone;
    std::sort(each.begin(), each.end());
    for (size_t i = 0; i < each.size() && left; ++i) {
      const auto [low, high] = range(each[i].second);
      const int take = std::min(left, high - low);
      total += each[i].first * take;
      left -= take;
    }
    if (left) return kNone;
  }
  return total;
}

// the search ----------------------------------------------------------------------------------------------------------

void Search::begin() {
  const Box all = whole();
  few = longest(all);
  parts.assign(1, {});
  if (few.empty()) {
    todo.push(std::unique_ptr<Node>(new Node{0.0, 0, 0, -1, all, nullptr}));
    first = 1;
  } else {
    parts[0] = {kLongest, 0, 0, 1, p.stages, -1};
    parts.resize(1 + p.stages);
    const std::vector<Box> boxes = cut(all, parts[0]);
    for (int s = 0; s < p.stages; ++s)
      todo.push(std::unique_ptr<Node>(new Node{0.0, s, 1 + s, -1, boxes[s], nullptr}));
    first = p.stages;
  }
  number = first - 1;
}

// Proves that no placement takes less than `target`, or finds those that do; goes on where it ended.
void Search::solve(double target, int nodes, double limit_s) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(limit_s, 1e6));
  auto limit = [&] { return best.seconds > 0 ? std::min(target, best.seconds) : target; };
  auto closed = [&](double bound) { return bound >= limit() * (1 - kClose); };
  for (int left = nodes + (seen ? 0 : first); !todo.empty(); --left) {
    while (!todo.empty() && closed(todo.top()->bound)) todo.pop();  // by what proves the box that it was cut from
    if (todo.empty() || left <= 0 || std::chrono::steady_clock::now() > until) break;
    const std::unique_ptr<Node> node = std::move(const_cast<std::unique_ptr<Node>&>(todo.top()));
    todo.pop();
    visit(*node, limit());
  }
  bound = std::min({limit(), stuck, todo.empty() ? kNone : todo.top()->bound});
}

void Search::visit(const Node& node, double limit) {
  ++seen;
  const Box& box = node.box;
  const Ints top = most(box, limit);
  parts[node.part].proof = -1;
  if (!possible(box, top)) return;
  const bool initial = node.number < first;
  const std::shared_ptr<const Program> from = node.from ? node.from : initial ? earlier : nullptr;
  LinearProgram lp = from ? from->lp : program(box);
  if (from) {
    bounds(lp, box);
    for (int s = 0; s < p.stages; ++s) {
      lp.move(tag(kMost, s), top[s] - from->most[s]);
      lp.move(tag(kFewest, s), from->fewest[s] - box.fewest[s]);
    }
  }
  Relaxed found = relax(lp, box, top, limit, initial ? 60 : 12, !from);
  if (from && !(found.bound >= node.bound * (1 - kClose))) {  // rounding adds up from program to program
    lp = program(box);
    found = relax(lp, box, top, limit, 60, true);
  }
  int proof = node.proof;
  if (proof < 0 || found.bound > node.bound) {
    proof = static_cast<int>(proofs.size());
    proofs.push_back(found.proof);
  } else {
    found.bound = node.bound;
  }
  parts[node.part].proof = proof;
  if (initial) root.push_back(proof);
  std::shared_ptr<const Program> kept_program;
  if (kept < kKept) {
    lp.shrink();
    auto* one = new Program{std::move(lp), top, box.fewest};
    kept += one->lp.bytes();
    kept_program = {one, [this](Program* gone) { kept -= gone->lp.bytes(); delete gone; }};
    if (initial && !earlier) earlier = kept_program;
  }
  const auto closed = [&] { return found.bound >= std::min(limit, best.seconds > 0 ? best.seconds : kNone) * (1 - kClose); };
  if (closed()) return;
  bool whole = true;
  for (double x : found.counts) whole = whole && std::fabs(x - std::rint(x)) < 1e-6;
  if (seen == 1 || seen % 16 == 0 || whole) {
    Placed one;
    if (p.improve(p.round(found.near), seen == 1 ? 2 : seen % 16 == 0, seed, pool, one)) take(one);
    if (closed()) return;
  }
  Part& part = parts[node.part];
  if (!where(box, found, part)) {
    if (exact(box)) parts[node.part].proof = -2;
    else stuck = std::min(stuck, found.bound);
    return;
  }
  const std::vector<Box> boxes = cut(box, part);
  part.first = static_cast<int>(parts.size());
  part.count = static_cast<int>(boxes.size());
  for (const Box& one : boxes) {
    const int at = static_cast<int>(parts.size());
    parts.push_back({});
    parts.back().proof = proof;
    todo.push(std::unique_ptr<Node>(new Node{found.bound, ++number, at, proof, one, kept_program}));
  }
}

void Search::take(const Placed& one) {
  if (best.seconds == 0 || one.seconds < best.seconds) best = one;
}

// Says where to cut a box; returns false where all layers stand.
bool Search::where(const Box& box, const Relaxed& found, Part& part) const {
  if (!box.placed) {
    part.cut = kStructure;
    return true;
  }
  double far = 1e-4;
  for (int s = 0; s < p.stages; ++s) {
    double sum = 0;
    for (int c : own[s]) sum += found.counts[c];
    const double apart = std::fabs(sum - std::rint(sum));
    if (apart > far) {
      far = apart;
      part.cut = kStage;
      part.at = s;
      part.value = static_cast<int>(std::floor(sum));
    }
  }
  if (part.cut == kStage) return true;
  // the last chunks stand beside MTP and head, which decide most: half the boxes of the most fractional one
  int chunk = -1;
  for (int c = 0; c < n; ++c)
    if (box.low[c] < box.high[c] && (chunk < 0 || std::fabs(found.counts[c] - std::rint(found.counts[c])) > 1e-4)) chunk = c;
  if (chunk < 0) return false;
  part.cut = kChunk;
  part.at = chunk;
  part.value = std::clamp(static_cast<int>(std::floor(found.counts[chunk] + 1e-6)), box.low[chunk], box.high[chunk] - 1);
  return true;
}

// Looks at every way to recompute layers of a box whose layers all stand; returns false where there are too many.
bool Search::exact(const Box& box) {
  Ints counts(n), none(n, 0), over;
  for (int c = 0; c < n; ++c) counts[c] = box.low[c] + box.few[c];
  p.fits(p.split(counts, none), &over);
  Ints ways(n, 1);
  double all = 1;
  for (int c = 0; c < n && p.choice; ++c)
    if (std::find(over.begin(), over.end(), p.route[c]) != over.end()) all *= ways[c] = counts[c] + 1;
  if (all > kWays) return false;
  Ints now(n, 0);
  for (int c = 0; c >= 0;) {
    if (p.fits(p.split(counts, now))) take({counts, now, p.seconds(counts, now)});
    for (c = n - 1; c >= 0 && ++now[c] == ways[c]; --c) now[c] = 0;
  }
  return true;
}

}  // namespace
}  // namespace telechat

#define EXPORT extern "C" __attribute__((visibility("default")))

using telechat::Path;
using telechat::Pool;
using telechat::Problem;
using telechat::Search;

EXPORT void* telechat_paths_new() { return new Pool; }

EXPORT void telechat_paths_delete(void* pool) { delete static_cast<Pool*>(pool); }

// Writes the operations of a path, which are at most as many as the schedule has, and returns how many there are.
EXPORT int32_t telechat_paths_at(void* pool, int32_t number, int32_t* ops) {
  const Path& path = static_cast<Pool*>(pool)->at(number);
  std::copy(path.ops.begin(), path.ops.end(), ops);
  return static_cast<int32_t>(path.ops.size());
}

EXPORT void* telechat_placement_new(const telechat::Given* given, void* pool) {
  return new Search(*given, *static_cast<Pool*>(pool));
}

EXPORT void telechat_placement_delete(void* search) { delete static_cast<Search*>(search); }

// Looks at up to `nodes` further boxes for placements that take less than `target`. Writes the bound into `bound`, and into `size`
// the numbers of boxes seen, parts, first boxes and whether a placement is known.
EXPORT void telechat_placement_solve(void* search, double target, int32_t nodes, double limit_s, double* bound, int32_t* size) {
  auto& s = *static_cast<Search*>(search);
  s.solve(target, nodes, limit_s);
  *bound = s.bound;
  const int found[] = {s.seen, static_cast<int>(s.parts.size()), static_cast<int>(s.root.size()), s.best.seconds > 0};
  std::copy(found, found + 4, size);
}

// Tries to improve a placement, [chunks]; without one, writes the best that is known. Returns its seconds, 0: there is none.
EXPORT double telechat_placement_best(void* search, const int32_t* start, int32_t patience, int32_t* layers, int32_t* again) {
  auto& s = *static_cast<Search*>(search);
  telechat::Placed found = s.best;
  if (start && !s.p.improve({start, start + s.p.chunks}, patience, s.seed, s.pool, found)) return 0;
  std::copy(found.layers.begin(), found.layers.end(), layers);
  std::copy(found.again.begin(), found.again.end(), again);
  return found.seconds;
}

// Writes the tree: cut, at, value, first, count and proof of every part; `few` of the first cut, [stages]; and the proofs of the
// first boxes.
EXPORT void telechat_placement_tree(void* search, int32_t* parts, int32_t* few, int32_t* root) {
  auto& s = *static_cast<Search*>(search);
  for (const auto& part : s.parts)
    for (int value : {part.cut, part.at, part.value, part.first, part.count, part.proof}) *parts++ = value;
  std::copy(s.few.begin(), s.few.end(), few);
  std::copy(s.root.begin(), s.root.end(), root);
}

// Writes multipliers: [share, parameters (2, stages + 1), memory, most, fewest (stages each)], their paths with weights, and the
// operations and sends of all these, [3 chunks + 1]. Returns the number of paths; where `paths` is null, only that.
EXPORT int32_t telechat_placement_proof(void* search, int32_t number, double* weights, int32_t* paths, double* shares,
                                        double* counts) {
  auto& s = *static_cast<Search*>(search);
  const auto& proof = s.proofs[number];
  if (paths) {
    *weights = proof.share;
    for (auto [at, y] : proof.others) weights[1 + at] = y;
    for (auto [at, y] : proof.paths) {
      const Path& path = s.pool.at(at);
      for (size_t i = 0; i < path.counts.size(); ++i) counts[i] += y * path.counts[i];
      counts[path.counts.size()] += y * path.sends;
      *paths++ = at;
      *shares++ = y;
    }
  }
  return static_cast<int32_t>(proof.paths.size());
}
