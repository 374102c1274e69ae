// The search over boxes: the one with the least bound first, cut where its program is not whole.
#include "placement_search.h"

#include <algorithm>
#include <cmath>

namespace telechat {

namespace {

constexpr double kWays = 1000;       // ways to recompute layers that are looked at one by one
constexpr size_t kKept = 64u << 20;  // bytes of programs that wait; boxes beyond start anew

}  // namespace

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
  until = after(limit_s);
  auto limit = [&] { return best.seconds > 0 ? std::min(target, best.seconds) : target; };
  auto closed = [&](double bound) { return bound >= limit() * (1 - kClose); };
  for (int left = nodes + (seen ? 0 : first); !todo.empty(); --left) {
    while (!todo.empty() && closed(todo.top()->bound)) todo.pop();  // by what proves the box that it was cut from
    if (todo.empty() || left <= 0 || Clock::now() > until) break;
    const std::unique_ptr<Node> node = std::move(const_cast<std::unique_ptr<Node>&>(todo.top()));
    todo.pop();
    visit(*node, limit());
  }
  bound = std::min({limit(), stuck, todo.empty() ? kNone : todo.top()->bound});
}

void Search::visit(const Node& node, double limit) {
  ++seen;
  Box box = node.box;
  const Ints top = most(box, limit);
  box.room = rooms(box, top);
  parts[node.part].proof = -1;
  const bool initial = node.number < first;
  if (!possible(box, top)) {
    if (initial) root.push_back(root.empty() ? -1 : root.back());  // of another configuration it may hold placements
    return;
  }
  const std::shared_ptr<const Program> from = node.from ? node.from : initial ? earlier : nullptr;
  LinearProgram lp = from ? from->lp : program(box);
  if (from) {
    bounds(lp, box);
    for (int s = 0; s < p.stages; ++s) {
      lp.move(tag(kMost, s), top[s] - from->most[s]);
      lp.move(tag(kFewest, s), from->fewest[s] - box.fewest[s]);
      lp.move(tag(kMemory, s), (box.room[s] - from->room[s]) / kGib);
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
  if (initial) {
    root.push_back(proof);
    std::replace(root.begin(), root.end(), -1, proof);
  }
  std::shared_ptr<const Program> kept_program;
  if (kept < kKept) {
    lp.shrink();
    auto* one = new Program{std::move(lp), top, box.fewest, box.room};
    kept += one->lp.bytes();
    kept_program = {one, [this](Program* gone) { kept -= gone->lp.bytes(); delete gone; }};
    if (initial && !earlier) earlier = kept_program;
  }
  const auto closed = [&](double bound) {
    return bound >= std::min(limit, best.seconds > 0 ? best.seconds : kNone) * (1 - kClose);
  };
  if (closed(found.bound)) return;
  bool whole = true;
  for (double x : found.counts) whole = whole && std::fabs(x - std::rint(x)) < 1e-6;
  if (seen == 1 || seen % 16 == 0 || whole) {
    Placed one;
    if (p.improve(p.round(found.near), seen == 1 ? 2 : seen % 16 == 0, until, seed, pool, one)) take(one);
    if (closed(found.bound)) return;
  }
  Part& part = parts[node.part];
  if (!where(box, found, part)) {
    const double least = exact(box, limit);
    if (closed(least)) parts[node.part].proof = -2;
    else stuck = std::min(stuck, std::max(found.bound, least));
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

// Raises `again` to the fewest layers of each chunk of a stage that any way to recompute has that fits. Returns whether one does,
// or there are too many to look at.
bool Search::fewest(int stage, const Ints& counts, Ints& again) const {
  Ints now(n, 0), least = counts;
  const auto holds = [&] { return p.holds(stage, p.split(counts, now)); };
  double ways = 1;
  for (int c : own[stage]) ways *= counts[c] + 1;
  if (holds() || (p.choice && ways > kWays)) return true;
  bool found = false;
  for (size_t i = 0; p.choice && i < own[stage].size();) {
    if (holds()) {
      found = true;
      for (int c : own[stage]) least[c] = std::min(least[c], now[c]);
    }
    for (i = 0; i < own[stage].size() && ++now[own[stage][i]] > counts[own[stage][i]]; ++i) now[own[stage][i]] = 0;
  }
  for (int c : own[stage]) again[c] = least[c];
  return found;
}

// Looks at the ways to recompute layers of a box whose layers all stand. Of those that recompute more than one that took too long
// already, whatever more of them hides, none is looked at. Returns a step that none is below; 0 where there are too many.
double Search::exact(const Box& box, double limit) {
  Ints counts(n), start(n, 0);
  for (int c = 0; c < n; ++c) counts[c] = box.low[c] + box.few[c];
  for (int s = 0; s < p.stages; ++s)
    if (!fewest(s, counts, start)) return kNone;
  double lowest = kNone;
  std::vector<std::pair<Ints, int>> todo{{start, 0}};
  for (size_t i = 0; i < todo.size(); ++i) {
    const auto [again, at] = todo[i];
    double least = 0;
    const double took = p.seconds(counts, again, &least);
    if (p.fits(p.split(counts, again))) {
      take({counts, again, took});
      lowest = std::min(lowest, took);
    }
    limit = std::min(limit, best.seconds > 0 ? best.seconds : kNone);
    for (int c = at; c < n && p.choice && least < limit * (1 - kClose); ++c) {
      if (again[c] == counts[c]) continue;
      if (todo.size() > kWays) return 0;
      todo.push_back({again, c});
      ++todo.back().first[c];
    }
    if (least >= limit * (1 - kClose)) lowest = std::min(lowest, std::max(least, limit));
  }
  return lowest;
}

}  // namespace telechat

#define EXPORT extern "C" __attribute__((visibility("default")))

using telechat::Path;
using telechat::PathPool;
using telechat::Problem;
using telechat::Search;

EXPORT void* telechat_paths_new() { return new PathPool; }

EXPORT void telechat_paths_delete(void* pool) { delete static_cast<PathPool*>(pool); }

// Writes the operations of a path, which are at most as many as the schedule has, and returns how many there are.
EXPORT int32_t telechat_paths_at(void* pool, int32_t number, int32_t* ops) {
  const Path& path = static_cast<PathPool*>(pool)->at(number);
  std::copy(path.ops.begin(), path.ops.end(), ops);
  return static_cast<int32_t>(path.ops.size());
}

EXPORT void* telechat_placement_new(const telechat::Given* given, void* pool) {
  return new Search(*given, *static_cast<PathPool*>(pool));
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

// Tries to improve a placement, [chunks], for a time; without one, writes the best that is known. Returns its seconds, 0: there
// is none.
EXPORT double telechat_placement_best(void* search, const int32_t* start, int32_t patience, double limit_s, int32_t* layers,
                                      int32_t* again) {
  auto& s = *static_cast<Search*>(search);
  telechat::Placed found = s.best;
  if (start && !s.p.improve({start, start + s.p.chunks}, patience, telechat::after(limit_s), s.seed, s.pool, found)) return 0;
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
