// Branch and bound over placements of layers (tools/plan/search/placement.py): boxes of layers of chunks and stages, each with a linear
// program whose rows are paths through the schedule. A box starts from the program of the one that it was cut from.
#pragma once
#include <limits>
#include <memory>
#include <queue>
#include <utility>

#include "linear_program.h"
#include "placement.h"

namespace telechat {

constexpr double kPs = 1e-12, kGib = 1073741824.0, kNone = LinearProgram::kNone;
constexpr double kClose = 1e-7;  // relative difference below which two steps are the same

enum Cut : int { kWhole, kLongest, kStructure, kStage, kChunk };  // as `CUTS` of placement.py
enum : int { kEmpty = -1, kExhausted = -2 };                   // proofs without multipliers
enum Row : int64_t { kPath, kLine, kParameter, kMemory, kMost, kFewest, kTotal, kAgain };
inline int64_t tag(Row row, int64_t at) { return row << 40 | at; }

struct Box {
  Ints low, high, few;  // layers of the larger kind of every chunk; of the smaller kind, where placed
  Ints fewest, most;    // layers of the larger kind of every stage
  bool placed;          // the layers of the smaller kind are placed
  Reals room = {};      // bytes of every stage for its layers, as `Search::rooms`
};

struct ProofNode {  // a row of `ProofTree.boxes` of placement.py; the boxes that one is cut into follow each other
  int32_t cut = kWhole, at = 0, value = 0, first = -1, count = 0;
  int32_t proof = kEmpty;
};

struct Multipliers;

struct ProofTree {
  const ProofNode* nodes;
  Ints longest;  // of kLongest
  const std::vector<Multipliers>& proofs;
};

struct Multipliers {  // as `Multipliers` of placement.py
  double share = 0;
  std::vector<std::pair<int, double>> paths;
  std::vector<std::pair<int, double>> others;  // position in [parameters, memory, most, fewest] and weight
};

struct Program {
  LinearProgram lp;
  Ints most, fewest;  // right-hand sides of its rows
  Reals room;
};

struct OpenBox {
  double bound;
  int number, node, proof;  // proof: of the box that it was cut from
  Box box;
  std::shared_ptr<const Program> from;  // of the box that it was cut from
};

struct Later {
  bool operator()(const std::unique_ptr<OpenBox>& a, const std::unique_ptr<OpenBox>& b) const {
    return a->bound != b->bound ? a->bound > b->bound : a->number > b->number;
  }
};

class Search {
 public:
  Search(Problem problem, PathPool& pool) : p(std::move(problem)), pool(pool), n(p.chunks), bulk(p.kinds[0]) {
    other = p.kinds.size() > 1 ? &p.kinds[1] : nullptr;
    std::vector<int64_t> work(p.stages, 0);
    for (int c = 0; c < n; ++c)
      if (p.lowest[c]) work[p.route[c]] = p.held;
    for (int s = 0; s < p.stages; ++s) room.push_back(static_cast<double>(p.memory[s] - std::max(work[s], p.buffer[s])));
    // columns: layers of both kinds, recomputed ones of both, makespan, U_0, U_1, step, what does not fit
    int at = n;
    layers[0] = 0;
    if (other) layers[1] = std::exchange(at, at + n);
    for (size_t g = 0; g < p.kinds.size() && p.choice; ++g) recomputed[g] = std::exchange(at, at + n);
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
  // Returns whether a tree, of another configuration with the same schedule perhaps, proves that no placement takes less.
  bool proves(const ProofTree& tree, double target);

  Problem p;
  PathPool& pool;
  std::vector<Ints> structures;  // every way to put the layers of the smaller kind into chunks
  Placed best;            // seconds 0: none
  double bound = 0;
  int seen = 0, first = 0;
  Ints too_few;           // layers of each stage that are too few together
  std::vector<ProofNode> tree;
  std::vector<Multipliers> proofs;
  Ints root;              // proofs of the first boxes
  uint64_t seed = 1;
  Clock::time_point until;

 private:
  struct Relaxed {
    bool possible = false;
    double bound = 0;
    Reals counts, near;  // layers of the larger kind, of both, of every chunk
    Multipliers proof;
  };

  void begin();
  Box whole() const;
  Box fixed(const Box& box, const Ints& structure) const;
  Ints most(const Box& box, double target) const;
  Ints within(const Box& box, double makespan) const;
  Reals rooms(const Box& box, const Ints& most) const;
  bool possible(const Box& box, const Ints& most) const;
  Ints longest(const Box& box) const;
  std::vector<Box> cut(const Box& box, const ProofNode& node, const Ints& longest) const;
  bool holds(const ProofTree& tree, int at, Box box, double target);
  LinearProgram program(const Box& box) const;
  void bounds(LinearProgram& lp, const Box& box) const;
  void add(LinearProgram& lp, Row row, int at, const Box& box, const Ints& most) const;
  void add_path(LinearProgram& lp, int number) const;
  bool separate(LinearProgram& lp, const Box& box, const Ints& most) const;
  double right(Row row, int at, const Box& box, const Ints& most) const;
  Relaxed relax(LinearProgram& lp, const Box& box, const Ints& most, double target, int rounds, bool start);
  Multipliers proof(const LinearProgram& lp) const;
  double value(const Multipliers& proof, const Box& box, const Ints& most) const;
  std::vector<int64_t> times(const Reals& x) const;
  bool where(const Box& box, const Relaxed& found, ProofNode& node) const;
  bool fewest(int stage, const Ints& counts, Ints& recomputed) const;
  double exact(const Box& box, double limit);
  void visit(const OpenBox& open, double limit);
  void take(const Placed& one);
  double least_rest() const { return p.lines[0][1] + p.lines[0][2] * p.least[0] + p.lines[0][3] * p.least[1]; }

  int n;
  const Problem::Kind& bulk;
  const Problem::Kind* other;
  int layers[2] = {-1, -1}, recomputed[2] = {-1, -1}, span = 0, width = 0;
  Reals room, spent;
  std::vector<Reals> each_least;
  size_t kept = 0;  // bytes of programs that wait; programs are gone before it is
  std::priority_queue<std::unique_ptr<OpenBox>, std::vector<std::unique_ptr<OpenBox>>, Later> todo;
  std::shared_ptr<const Program> earlier;  // of the first box: the other first ones differ by one row
  double stuck = kNone;                    // bound of what cannot be cut any more and has too many ways
  int number = 0;
};

}  // namespace telechat
