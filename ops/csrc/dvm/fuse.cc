#include "dvm/fuse.h"

#include <algorithm>

namespace telechat::dvm {
namespace {

// Dimensions with ones in front, up to a rank.
class Padded {
 public:
  Padded(const Dims& dims, size_t rank) : dims_(dims), rank_(rank), ones_(rank - dims.size()) {
    check(dims.size() <= rank, "a value has more dimensions than its stage");
  }
  size_t size() const { return rank_; }
  int64_t operator[](size_t i) const { return i < ones_ ? 1 : dims_[i - ones_]; }
  bool operator==(const Dims& other) const {
    for (size_t i = 0; i < rank_; i++) {
      if ((*this)[i] != other[i]) return false;
    }
    return true;
  }

 private:
  const Dims& dims_;
  const size_t rank_, ones_;
};

// Every dimension of `small` is that of `large`, or 1.
bool fits(const Dims& small, const Dims& large) {
  if (small.size() > large.size()) return false;
  const Padded p(small, large.size());
  for (size_t i = 0; i < p.size(); i++) {
    if (p[i] != large[i] && p[i] != 1) return false;
  }
  return true;
}

// Where the rows of a value that is not full end: [1, 1, x] or [x, x, 1] in a domain [x, x, x]; -1 where it is full or
// single, -2 where ones and others mix.
int boundary(const Dims& dims, const Dims& domain) {
  if (dims == domain) return -1;
  const Padded p(dims, domain.size());
  int changes = 0, at = -1, last = -1;
  for (size_t i = 0; i < p.size(); i++) {
    if (domain[i] == 1) continue;
    const int one = p[i] == 1;
    if (last >= 0 && one != last) {
      changes++;
      at = static_cast<int>(i);
    }
    last = one;
  }
  return changes == 0 ? -1 : changes == 1 ? at : -2;
}

bool set_split(Stage& s, int split) {
  if (s.split >= 0 && s.split != split) return false;
  s.split = split;
  return true;
}

class Fuser {
 public:
  explicit Fuser(const Graph& g) : g_(g) {
    out_.stage_of.assign(g.nodes.size(), -1);
    out_.kept.assign(g.nodes.size(), false);
    after_.assign(g.nodes.size(), false);
  }

  Fusion run() {
    const std::vector<bool> live = used();
    for (int i = 0; i < static_cast<int>(g_.nodes.size()); i++) {
      const int op = g_.nodes[i].op;
      if (!live[i] || op == Load || op == Scalar || op == Broadcast || op == Reshape) continue;
      place(i);
    }
    for (int i = 0; i < static_cast<int>(g_.nodes.size()); i++) {
      if (out_.stage_of[i] < 0) continue;
      for (int arg : g_.nodes[i].args) {
        bool reshaped = false;
        const int from = source(g_, arg, &reshaped);
        if (out_.stage_of[from] >= 0 && out_.stage_of[from] < out_.stage_of[i]) out_.kept[from] = true;
      }
    }
    return std::move(out_);
  }

 private:
  std::vector<bool> used() const {
    std::vector<bool> live(g_.nodes.size());
    for (int i = static_cast<int>(g_.nodes.size()) - 1; i >= 0; i--) {
      if (g_.nodes[i].op == Store) live[i] = true;
      if (!live[i]) continue;
      for (int arg : g_.nodes[i].args) live[arg] = true;
    }
    return live;
  }

  void place(int i) {
    int earliest = 0;
    const char* why = nullptr;
    for (int arg : g_.nodes[i].args) {
      bool reshaped = false;
      const int from = source(g_, arg, &reshaped);
      if (out_.stage_of[from] < 0) continue;
      const bool moved = reshaped && g_.nodes[i].op != Store;
      const int stage = out_.stage_of[from] + (after_[from] || moved ? 1 : 0);
      if (stage > out_.stage_of[from]) {
        why = moved ? "a value is reshaped" : "a reduction over rows is complete only when all of them are done";
      }
      earliest = std::max(earliest, stage);
    }
    for (int s = earliest; s < static_cast<int>(out_.stages.size()); s++) {
      Stage trial = out_.stages[s];
      const char* reason = "";
      if (join(trial, i, s, &reason)) {
        trial.nodes.push_back(i);
        out_.stages[s] = std::move(trial);
        return settle(i, s);
      }
      if (!why) why = reason;
    }
    Stage fresh;
    const char* reason = "";
    const int s = static_cast<int>(out_.stages.size());
    if (!join(fresh, i, s, &reason)) refuse(g_.nodes[i], "%s", reason);
    fresh.nodes.push_back(i);
    out_.stages.push_back(std::move(fresh));
    if (s > 0) {
      out_.cuts.push_back("before " + std::string(op_name(g_.nodes[i].op)) + " of line " + std::to_string(g_.nodes[i].line) + ": " +
                          (why ? why : "independent"));
    }
    settle(i, s);
  }

  void settle(int i, int s) {
    out_.stage_of[i] = s;
    if (is_reduce(g_.nodes[i].op)) after_[i] = out_.stages[s].column_reduce && over_rows(i);
  }

  // The reduction goes over leading dimensions (or all).
  bool over_rows(int i) const {
    const Node& n = g_.nodes[i];
    const Dims& from = g_.nodes[n.args[0]].dims;
    for (size_t k = 0; k < from.size(); k++) {
      if (from[k] != 1) return n.dims[k] == 1;
    }
    return true;
  }

  bool join(Stage& s, int i, int index, const char** why) {
    const Node& n = g_.nodes[i];
    const Dims& dims = is_reduce(n.op) ? g_.nodes[n.args[0]].dims : n.op == Store ? stored_dims(n, index) : n.dims;
    if (s.nodes.empty()) s.domain = dims;
    const int split = s.split;
    bool grown = false;
    if (!fits(dims, s.domain)) {
      if (s.frozen || !fits(s.domain, dims)) {
        *why = "its extents are not those of the stage";
        return false;
      }
      if (s.split >= 0) s.split += static_cast<int>(dims.size() - s.domain.size());
      s.domain = dims;
      grown = true;
    }
    if (is_reduce(n.op) && !join_reduce(s, n, why)) return false;
    if (n.op == GatherLoad && !join_gather(s, n, why)) return false;
    // What is computed here, this node included, must lie in rows and columns; what is loaded can be spread out.
    if (!lies(s, n.op == Store || is_reduce(n.op) ? dims : n.dims, why)) return false;
    for (int arg : n.args) {
      if (n.op == GatherLoad) break;
      const int from = source(g_, arg);
      const bool computed = out_.stage_of[from] == index;
      const Dims& shape = computed ? g_.nodes[from].dims : operand_dims(arg);
      const int at = boundary(shape, s.domain);
      if (at == -1) continue;
      if (at >= 0 && set_split(s, at)) continue;
      if (computed) {
        *why = "a value of the stage is broadcast along other dimensions";
        return false;
      }
    }
    if (!grown && s.split == split) return true;  // what is there lies as it did
    for (int other : s.nodes) {
      const Node& o = g_.nodes[other];
      if (!lies(s, o.op == Store ? stored_dims(o, index) : o.dims, why)) return false;
    }
    return true;
  }

  // A store of what this stage computes looks behind reshapes: memory is the same.
  const Dims& stored_dims(const Node& n, int index) const {
    bool reshaped = false;
    const int from = source(g_, n.args[0], &reshaped);
    return reshaped && out_.stage_of[from] == index ? g_.nodes[from].dims : n.dims;
  }

  const Dims& operand_dims(int arg) const {
    while (g_.nodes[arg].op == Broadcast) arg = g_.nodes[arg].args[0];
    return g_.nodes[arg].dims;
  }

  static bool lies(Stage& s, const Dims& dims, const char** why) {
    const int at = boundary(dims, s.domain);
    if (at == -1 || (at >= 0 && set_split(s, at))) return true;
    *why = "a value lies across rows and columns of the stage";
    return false;
  }

  bool join_reduce(Stage& s, const Node& n, const char** why) {
    const Dims& from = g_.nodes[n.args[0]].dims;
    if (!(Padded(from, s.domain.size()) == s.domain)) {
      *why = "it reduces a part of the stage";
      return false;
    }
    int at = boundary(n.dims, s.domain);
    if (at == -2) {
      *why = "only leading or trailing dimensions can be reduced; reshape first";
      return false;
    }
    if (at == -1) at = static_cast<int>(s.domain.size());  // everything: rows of one element
    const bool rows = over_rows(static_cast<int>(&n - g_.nodes.data()));
    if (!set_split(s, at)) {
      *why = "it reduces other dimensions than the stage does";
      return false;
    }
    s.frozen = true;
    (rows ? s.column_reduce : s.row_reduce) = true;
    return true;
  }

  bool join_gather(Stage& s, const Node& n, const char** why) {
    const Dims& index = g_.nodes[n.args[0]].dims;
    const int from = source(g_, n.args[0]);
    if (g_.nodes[from].op != Load) refuse(n, "the index is computed, expected a load");
    const int pad = static_cast<int>(s.domain.size() - n.dims.size());
    if (!(Padded(n.dims, s.domain.size()) == s.domain) || !set_split(s, pad + static_cast<int>(index.size()))) {
      *why = "rows of a table do not lie in the rows of the stage";
      return false;
    }
    s.frozen = true;
    return true;
  }

  const Graph& g_;
  Fusion out_;
  std::vector<bool> after_;  // complete only after its stage
};

}  // namespace

int source(const Graph& g, int node, bool* reshaped) {
  while (g.nodes[node].op == Broadcast || g.nodes[node].op == Reshape) {
    if (g.nodes[node].op == Reshape && reshaped) *reshaped = true;
    node = g.nodes[node].args[0];
  }
  return node;
}

bool kind_of(const Dims& dims, const Stage& s, Kind* kind) {
  const Padded p(dims, s.domain.size());
  const int split = s.split < 0 ? static_cast<int>(s.domain.size()) : s.split;
  bool rows_full = true, rows_one = true, columns_full = true, columns_one = true;
  for (int i = 0; i < static_cast<int>(p.size()); i++) {
    bool& full = i < split ? rows_full : columns_full;
    bool& one = i < split ? rows_one : columns_one;
    full &= p[i] == s.domain[i];
    one &= p[i] == 1;
  }
  if (rows_full && columns_full) return *kind = Kind::full, true;
  if (rows_one && columns_full) return *kind = columns_one ? Kind::single : Kind::row, true;
  if (rows_full && columns_one) return *kind = Kind::column, true;
  if (rows_one && columns_one) return *kind = Kind::single, true;
  *kind = s.split >= 0 && columns_one ? Kind::column : rows_one ? Kind::row : Kind::full;
  return false;
}

Fusion fuse(const Graph& graph) { return Fuser(graph).run(); }

}  // namespace telechat::dvm
