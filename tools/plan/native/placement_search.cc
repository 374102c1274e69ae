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
  too_few = longest(all);
  tree.assign(1, {});
  if (too_few.empty()) {
    todo.push(std::unique_ptr<OpenBox>(new OpenBox{0.0, 0, 0, -1, all, nullptr}));
    first = 1;
  } else {
    tree[0] = {kLongest, 0, 0, 1, p.stages, kEmpty};
    tree.resize(1 + p.stages);
    const std::vector<Box> boxes = cut(all, tree[0], too_few);
    for (int s = 0; s < p.stages; ++s)
      todo.push(std::unique_ptr<OpenBox>(new OpenBox{0.0, s, 1 + s, -1, boxes[s], nullptr}));
    first = p.stages;
  }
  number = first - 1;
}

// Proves that no placement takes less than `target`, or finds those that do; continues where it ended.
void Search::solve(double target, int nodes, double limit_s) {
  until = after(limit_s);
  auto limit = [&] { return best.seconds > 0 ? std::min(target, best.seconds) : target; };
  auto closed = [&](double bound) { return bound >= limit() * (1 - kClose); };
  for (int left = nodes + (seen ? 0 : first); !todo.empty(); --left) {
    while (!todo.empty() && closed(todo.top()->bound)) todo.pop();  // by what proves the box that it was cut from
    if (todo.empty() || left <= 0 || Clock::now() > until) break;
    const std::unique_ptr<OpenBox> open = std::move(const_cast<std::unique_ptr<OpenBox>&>(todo.top()));
    todo.pop();
    visit(*open, limit());
  }
  bound = std::min({limit(), stuck, todo.empty() ? kNone : todo.top()->bound});
}

void Search::visit(const OpenBox& open, double limit) {
  ++seen;
  Box box = open.box;
  const Ints top = most(box, limit);
  box.room = rooms(box, top);
  tree[open.node].proof = kEmpty;
  const bool initial = open.number < first;
  if (!possible(box, top)) {
    if (initial) root.push_back(root.empty() ? -1 : root.back());  // of another configuration it may hold placements
    return;
  }
  const std::shared_ptr<const Program> from = open.from ? open.from : initial ? earlier : nullptr;
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
  if (from && !(found.bound >= open.bound * (1 - kClose))) {  // rounding adds up from program to program
    lp = program(box);
    found = relax(lp, box, top, limit, 60, true);
  }
  int proof = open.proof;
  if (proof < 0 || found.bound > open.bound) {
    proof = static_cast<int>(proofs.size());
    proofs.push_back(found.proof);
  } else {
    found.bound = open.bound;
  }
  tree[open.node].proof = proof;
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
  ProofNode& node = tree[open.node];
  if (!where(box, found, node)) {
    const double least = exact(box, limit);
    if (closed(least)) tree[open.node].proof = kExhausted;
    else stuck = std::min(stuck, std::max(found.bound, least));
    return;
  }
  const std::vector<Box> boxes = cut(box, node, too_few);
  node.first = static_cast<int>(tree.size());
  node.count = static_cast<int>(boxes.size());
  for (const Box& one : boxes) {
    const int at = static_cast<int>(tree.size());
    tree.push_back({});
    tree.back().proof = proof;
    todo.push(std::unique_ptr<OpenBox>(new OpenBox{found.bound, ++number, at, proof, one, kept_program}));
  }
}

void Search::take(const Placed& one) {
  if (best.seconds == 0 || one.seconds < best.seconds) best = one;
}

// Chooses where to cut a box; returns false where all layers are placed.
bool Search::where(const Box& box, const Relaxed& found, ProofNode& node) const {
  if (!box.placed) {
    node.cut = kStructure;
    return true;
  }
  double far = 1e-4;
  for (int s = 0; s < p.stages; ++s) {
    double sum = 0;
    for (int c : p.own[s]) sum += found.counts[c];
    const double apart = std::fabs(sum - std::rint(sum));
    if (apart > far) {
      far = apart;
      node.cut = kStage;
      node.at = s;
      node.value = static_cast<int>(std::floor(sum));
    }
  }
  if (node.cut == kStage) return true;
  // the last chunks are beside MTP and head, which decide most: half the boxes of the most fractional one
  int chunk = -1;
  for (int c = 0; c < n; ++c)
    if (box.low[c] < box.high[c] && (chunk < 0 || std::fabs(found.counts[c] - std::rint(found.counts[c])) > 1e-4)) chunk = c;
  if (chunk < 0) return false;
  node.cut = kChunk;
  node.at = chunk;
  node.value = std::clamp(static_cast<int>(std::floor(found.counts[chunk] + 1e-6)), box.low[chunk], box.high[chunk] - 1);
  return true;
}

// Raises `recomputed` to the fewest layers of each chunk of a stage that any way to recompute has that fits. Returns whether one does,
// or there are too many to look at.
bool Search::fewest(int stage, const Ints& counts, Ints& recomputed) const {
  Ints now(n, 0), least = counts;
  const auto holds = [&] { return p.holds(stage, p.split(counts, now)); };
  double ways = 1;
  for (int c : p.own[stage]) ways *= counts[c] + 1;
  if (holds() || (p.choice && ways > kWays)) return true;
  bool found = false;
  for (size_t i = 0; p.choice && i < p.own[stage].size();) {
    if (holds()) {
      found = true;
      for (int c : p.own[stage]) least[c] = std::min(least[c], now[c]);
    }
    for (i = 0; i < p.own[stage].size() && ++now[p.own[stage][i]] > counts[p.own[stage][i]]; ++i) now[p.own[stage][i]] = 0;
  }
  for (int c : p.own[stage]) recomputed[c] = least[c];
  return found;
}

// Looks at the ways to recompute layers of a box whose layers are all placed. Of those that recompute more than one that took too long
// already, whatever more of them hides, none is looked at. Returns a lower bound on the step time; 0 where there are too many.
double Search::exact(const Box& box, double limit) {
  Ints counts(n), start(n, 0);
  for (int c = 0; c < n; ++c) counts[c] = box.low[c] + box.few[c];
  for (int s = 0; s < p.stages; ++s)
    if (!fewest(s, counts, start)) return kNone;
  double lowest = kNone;
  std::vector<std::pair<Ints, int>> todo{{start, 0}};
  for (size_t i = 0; i < todo.size(); ++i) {
    const auto [recomputed, at] = todo[i];
    double least = 0;
    const double took = p.seconds(counts, recomputed, &least);
    if (p.fits(p.split(counts, recomputed))) {
      take({counts, recomputed, took});
      lowest = std::min(lowest, took);
    }
    limit = std::min(limit, best.seconds > 0 ? best.seconds : kNone);
    for (int c = at; c < n && p.choice && least < limit * (1 - kClose); ++c) {
      if (recomputed[c] == counts[c]) continue;
      if (todo.size() > kWays) return 0;
      todo.push_back({recomputed, c});
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

// Begins a search; writes the layers of every stage, [stages], that are too few together: -1 where nothing is known.
EXPORT void* telechat_placement_new(void* program, void* pool, const int64_t* whole, const double* reals, int32_t* too_few) {
  auto* search = new Search({*static_cast<telechat::PipelineProgram*>(program), whole, reals}, *static_cast<PathPool*>(pool));
  std::fill(too_few, too_few + search->p.stages, -1);
  std::copy(search->too_few.begin(), search->too_few.end(), too_few);
  return search;
}

EXPORT void telechat_placement_delete(void* search) { delete static_cast<Search*>(search); }

// Looks at up to `nodes` further boxes for placements that take less than `target`. Writes the bound into `bound`, and into `size`
// the numbers of boxes seen, boxes of the tree, first boxes and whether a placement is known.
EXPORT void telechat_placement_solve(void* search, double target, int32_t nodes, double limit_s, double* bound, int32_t* size) {
  auto& s = *static_cast<Search*>(search);
  s.solve(target, nodes, limit_s);
  *bound = s.bound;
  const int found[] = {s.seen, static_cast<int>(s.tree.size()), static_cast<int>(s.root.size()), s.best.seconds > 0};
  std::copy(found, found + 4, size);
}

// Tries to improve a placement, [chunks], for a time; without one, writes the best that is known. Returns its seconds, 0: there
// is none.
EXPORT double telechat_placement_best(void* search, const int32_t* start, int32_t patience, double limit_s, int32_t* layers,
                                      int32_t* recomputed) {
  auto& s = *static_cast<Search*>(search);
  telechat::Placed found = s.best;
  if (start && !s.p.improve({start, start + s.p.chunks}, patience, telechat::after(limit_s), s.seed, s.pool, found)) return 0;
  std::copy(found.layers.begin(), found.layers.end(), layers);
  std::copy(found.recomputed.begin(), found.recomputed.end(), recomputed);
  return found.seconds;
}

// Writes the tree, box by box as `ProofNode`, and the proofs of the first boxes.
EXPORT void telechat_placement_tree(void* search, telechat::ProofNode* tree, int32_t* root) {
  auto& s = *static_cast<Search*>(search);
  std::copy(s.tree.begin(), s.tree.end(), tree);
  std::copy(s.root.begin(), s.root.end(), root);
}

// Returns whether a tree with the multipliers of `other`, a search with the same paths, proves that no placement takes less than
// `target`; `longest` has `stages` values, or none.
EXPORT bool telechat_placement_proves(void* search, void* other, const telechat::ProofNode* tree, const int32_t* longest,
                                      int32_t stages, double target) {
  return static_cast<Search*>(search)->proves({tree, {longest, longest + stages}, static_cast<Search*>(other)->proofs}, target);
}

// Writes every way to put the layers of the smaller kind into chunks, [ways, chunks]; returns how many there are.
EXPORT int32_t telechat_placement_structures(void* search, int32_t* ways) {
  const auto& structures = static_cast<Search*>(search)->structures;
  for (const auto& one : structures)
    if (ways) ways = std::copy(one.begin(), one.end(), ways);
  return static_cast<int32_t>(structures.size());
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
