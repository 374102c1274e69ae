// From a stage of the graph to instructions on registers.
#include <algorithm>
#include <cstring>
#include <map>

#include "dvm/program.h"

namespace telechat::dvm {
namespace {

class Lowering {
 public:
  Lowering(const Graph& g, const Fusion& f, const std::vector<int>& workspace_of, size_t index, bool by_rows)
      : g_(g), f_(f), stage_(f.stages[index]), index_(static_cast<int>(index)), workspace_of_(workspace_of) {
    out_.domain = stage_.domain;
    out_.split = stage_.split;
    out_.by_rows = by_rows;
    uses_.assign(g.nodes.size(), 0);
    for (int n : stage_.nodes) {
      for (int arg : g.nodes[n].args) uses_[source(g, arg)]++;
    }
  }

  LoweredStage run() {
    level();
    takes_.assign(g_.nodes.size(), -1);
    absorbed_.assign(g_.nodes.size(), false);
    absolute_.assign(g_.nodes.size(), false);
    for (size_t i = stage_.nodes.size(); i-- > 0;) {
      const int n = stage_.nodes[i], inner = absorbed_[n] ? -1 : takes(n);
      if (inner >= 0) takes_[n] = inner, absorbed_[inner] = true;
    }
    for (int n : stage_.nodes) {
      if (absorbed_[n] || !drops_signs(n)) continue;
      for (int user : {n, takes_[n]}) {
        if (user < 0) continue;
        for (int arg : g_.nodes[user].args) {
          if (g_.nodes[arg].op == Abs && only_here(arg)) absorbed_[arg] = absolute_[arg] = true;
        }
      }
    }
    const int last = out_.by_rows ? 0 : passes_ - 1;
    for (int pass = 0; pass <= last; pass++) {
      std::vector<bool> needed = out_.by_rows ? std::vector<bool>(g_.nodes.size(), true) : closure(pass, pass == last);
      out_.passes.emplace_back();
      body_ = &out_.passes.back();
      moving_.clear();
      if (pass == last) {
        for (const auto& [n, reg] : reduced_) keep(n, reg, Kind::column);
      }
      for (int n : stage_.nodes) {
        if (needed[n] && !absorbed_[n]) emit(n);
      }
      allocate();
    }
    out_.finish();
    return std::move(out_);
  }

 private:
  // The pass in which each value is complete: one more than its argument's for a reduction over columns.
  void level() {
    level_.assign(g_.nodes.size(), 0);
    passes_ = 1;
    for (int n : stage_.nodes) {
      int at = 0;
      for (int arg : g_.nodes[n].args) at = std::max(at, level_[source(g_, arg)]);
      if (is_reduce(g_.nodes[n].op) && !over_rows(n)) at++;
      level_[n] = at;
      if (g_.nodes[n].op == Store || over_rows(n) || f_.kept[n]) passes_ = std::max(passes_, at + 1);
    }
  }

  std::vector<bool> closure(int pass, bool last) const {
    std::vector<bool> needed(g_.nodes.size());
    for (int i = static_cast<int>(stage_.nodes.size()) - 1; i >= 0; i--) {
      const int n = stage_.nodes[i];
      const Node& node = g_.nodes[n];
      const bool reduced = is_reduce(node.op) && !over_rows(n);
      if (reduced) {
        needed[n] = level_[n] == pass + 1;
      } else if (last && (node.op == Store || over_rows(n) || f_.kept[n])) {
        needed[n] = true;
      }
      if (!needed[n]) continue;
      for (int arg : node.args) needed[source(g_, arg)] = true;
    }
    return needed;
  }

  bool over_rows(int n) const {
    const Node& node = g_.nodes[n];
    if (!is_reduce(node.op)) return false;
    const Dims& from = g_.nodes[node.args[0]].dims;
    for (size_t k = 0; k < from.size(); k++) {
      if (from[k] != 1) return node.dims[k] == 1;
    }
    return true;
  }

  bool inside(int n) const { return f_.stage_of[n] == index_; }

  // The instruction that computes `inner` on the way to `outer`, or -1.
  static int joint(int outer, int inner) {
    if (outer == Exp) return inner == Sub ? static_cast<int>(kExpSub) : -1;
    if (outer == Add) return inner == Mul ? static_cast<int>(kMulAdd) : inner == Add ? static_cast<int>(kAddAdd) : -1;
    if (outer != Mul) return -1;
    if (is_unary(inner)) return inner - Neg + static_cast<int>(kMulNeg);
    return inner == Mul ? static_cast<int>(kMulMul) : inner == Add ? static_cast<int>(kAddMul) : inner == Sub ? static_cast<int>(kSubMul) : -1;
  }

  // Its instruction can leave out the sign of an operand.
  bool drops_signs(int n) const {
    const Node& node = g_.nodes[n];
    if (node.dtype != kF32 || (node.op != Add && node.op != Sub && node.op != Mul)) return false;
    return takes_[n] < 0 || is_binary(g_.nodes[takes_[n]].op);
  }

  // A value of this stage that one other value reads, and nothing else.
  bool only_here(int n) const { return inside(n) && g_.nodes[n].dtype == kF32 && uses_[n] == 1 && !f_.kept[n]; }

  // The argument that the instruction of `user` computes on the way, or -1.
  int takes(int user) const {
    const Node& u = g_.nodes[user];
    if (u.op != Sum && u.dtype != kF32) return -1;
    for (int arg : u.args) {
      const Node& in = g_.nodes[arg];
      if (!only_here(arg)) continue;
      if (u.op == Sum ? in.op == Mul : joint(u.op, in.op) >= 0 && kind(in.dims, in) == kind(u.dims, u)) return arg;
    }
    return -1;
  }

  Kind kind(const Dims& dims, const Node& n) const {
    Kind k;
    if (!kind_of(dims, stage_, &k)) refuse(n, "a value does not lie in rows and columns of its stage");
    return k;
  }

  int make(Place place, Kind kind, int type, int index) {
    if (static_cast<int>(out_.registers.size()) >= kRegisterLimit) {
      throw Error("the program needs more than " + std::to_string(kRegisterLimit) + " registers in one stage; split it");
    }
    out_.registers.push_back({place, kind, type, index});
    return static_cast<int>(out_.registers.size()) - 1;
  }

  static bool stays(Kind k) { return k == Kind::row || k == Kind::single; }

  // A register of the arena: rows and single numbers stay, the others are numbered by allocate().
  int fresh(Kind kind) {
    if (kind == Kind::row) return make(Place::arena, kind, kF32, out_.row_slots++);
    if (kind == Kind::single) return make(Place::arena, kind, kF32, out_.single_slots++);
    return make(Place::arena, kind, kF32, -1);
  }

  void push(const Code& code) {
    (stays(code.kinds[0]) ? out_.prologue : *body_).push_back(code);
  }

  // Register and kind of an argument.
  int operand(int arg, const Node& user, Kind* k) {
    int n = arg;
    while (g_.nodes[n].op == Broadcast) n = g_.nodes[n].args[0];
    const Node& shape = g_.nodes[n];  // behind broadcasts; a reshape gives its own dimensions
    const int from = source(g_, n);
    if (inside(from)) {
      *k = kind(g_.nodes[from].dims, user);
      const auto reduced = reduced_.find(from);
      if (reduced != reduced_.end()) return reduced->second;
      const auto& known = stays(*k) ? still_ : moving_;
      const auto found = known.find(from);
      if (found == known.end()) refuse(user, "an argument was not computed");
      return found->second;
    }
    if (g_.nodes[from].op == Scalar) return constant(from, k);
    return loaded(n, from, shape, user, k);
  }

  int constant(int n, Kind* k) {
    *k = Kind::single;
    const auto found = still_.find(n);
    if (found != still_.end()) return found->second;
    Code code;
    code.id = kConst;
    code.d = fresh(Kind::single);
    code.kinds[0] = Kind::single;
    double value;
    std::memcpy(&value, &g_.nodes[n].attrs[0], sizeof value);
    if (g_.nodes[n].dtype == kI32) {
      const auto bits = static_cast<int32_t>(value);
      std::memcpy(&code.value, &bits, sizeof bits);
    } else {
      code.value = static_cast<float>(value);
    }
    push(code);
    return still_[n] = code.d;
  }

  int loaded(int n, int from, const Node& shape, const Node& user, Kind* k) {
    const bool spread = !kind_of(shape.dims, stage_, k);
    auto& known = stays(*k) ? still_ : moving_;
    const auto found = known.find(n);
    if (found != known.end()) return found->second;
    const bool input = g_.nodes[from].op == Load;
    const Place place = input ? Place::input : Place::workspace;
    const int type = input ? g_.nodes[from].dtype : value_type(g_.nodes[from].dtype) == kI32 ? static_cast<int>(kI32) : static_cast<int>(kF32);
    const int index = input ? static_cast<int>(g_.nodes[from].attrs[0]) : workspace_of_[from];
    if (type == kI64) refuse(user, "int64 only indexes gather_load");
    if (!spread && (type == kF32 || type == kI32)) return known[n] = make(place, *k, type, index);
    Code code;
    code.id = spread ? static_cast<int>(kSpread) : type == kF16 ? static_cast<int>(kLoadHalf) : type == kBf16 ? static_cast<int>(kLoadBf16) : static_cast<int>(kLoadBool);
    code.a = make(place, spread ? Kind::single : *k, type, index);
    code.d = fresh(*k);
    code.kinds[0] = code.kinds[1] = *k;
    code.tensor = n;
    push(code);
    return known[n] = code.d;
  }

  void define(int n, Code& code, Kind k) {
    code.d = fresh(k);
    code.kinds[0] = k;
    push(code);
    (stays(k) ? still_ : moving_)[n] = code.d;
    keep(n, code.d, k);
  }

  void keep(int n, int from, Kind k) {
    if (f_.kept[n]) {
      const int type = value_type(g_.nodes[n].dtype) == kI32 ? static_cast<int>(kI32) : static_cast<int>(kF32);
      write(make(Place::workspace, k, type, workspace_of_[n]), from, k, k, type);
    }
  }

  void write(int to, int from, Kind k, Kind from_kind, int type) {
    // The instruction before may write to memory itself.
    const Binding b = out_.registers[from];
    if (b.place == Place::arena && k == from_kind && (k == Kind::full || k == Kind::column) && (type == kF32 || type == kI32) &&
        b.index == -1 && !bound_.count(from) && writable(from)) {
      bound_[from] = to;
      return;
    }
    const bool narrow = bytes_of(type) != 4;
    if (narrow && k != from_kind) {  // only registers are spread out
      Code copy;
      copy.id = kCopy;
      copy.d = fresh(k);
      copy.a = from;
      copy.kinds[0] = k;
      copy.kinds[1] = from_kind;
      push(copy);
      from = copy.d;
      from_kind = k;
    }
    Code code;
    code.id = type == kF16 ? static_cast<int>(kStoreHalf) : type == kBf16 ? static_cast<int>(kStoreBf16) : type == kBool ? static_cast<int>(kStoreBool) : static_cast<int>(kCopy);
    code.d = to;
    code.a = from;
    code.kinds[0] = k;
    code.kinds[1] = from_kind;
    if (stays(k)) code.flags = kOnce;
    push(code);
  }

  // Only an instruction of this very pass may be sent elsewhere (a reduction keeps its place from pass to pass).
  bool writable(int reg) const {
    for (const auto& [n, r] : reduced_) {
      if (r == reg) return false;
    }
    for (const Code& code : *body_) {
      if (code.d == reg) return true;
    }
    return false;
  }

  void emit(int n) {
    const Node& node = g_.nodes[n];
    if (node.op == Store) return store(node);
    if (node.op == GatherLoad) return gather(n, node);
    if (is_reduce(node.op)) return reduce(n, node);
    const Kind k = kind(node.dims, node);
    if (stays(k) && still_.count(n)) return;  // computed before an earlier pass
    Code code;
    int* to[] = {&code.a, &code.b, &code.c};
    int i = 0;
    const auto take = [&](int arg, const Node& user) {
      if (absolute_[arg]) code.flags |= kAbsolute << i, arg = g_.nodes[arg].args[0];
      *to[i] = operand(arg, user, &code.kinds[i + 1]);
      i++;
    };
    const int inner = takes_[n];
    code.id = inner < 0 ? instruction(node) : joint(node.op, g_.nodes[inner].op);
    if (inner >= 0) {
      for (int arg : g_.nodes[inner].args) take(arg, g_.nodes[inner]);
    }
    for (int arg : node.args) {
      if (arg != inner) take(arg, node);
    }
    define(n, code, k);
  }

  int instruction(const Node& node) const {
    const int from = value_type(g_.nodes[node.args[0]].dtype);
    const bool integer = from == kI32;
    if (node.op == Select) return kSelect;
    if (node.op == Cast) {
      if (node.dtype == kF16 && !integer) return kRoundHalf;
      if (node.dtype == kBf16 && !integer) return kRoundBf16;
      if (node.dtype == kI32) return integer ? kCopy : kToInt;
      if (node.dtype == kBool) {
        if (integer) refuse(node, "int32 to bool: compare with 0 instead");
        return from == kBool ? kCopy : kToBool;
      }
      if (integer && node.dtype != kF32) refuse(node, "int32 to %s: cast to float32 first", type_name(node.dtype));
      return integer ? kFromInt : kCopy;
    }
    if (is_unary(node.op)) {
      if (integer) return node.op == Neg ? kNegInt : kAbsInt;
      return node.op - Neg + static_cast<int>(kNeg);
    }
    if (!integer || node.op == And || node.op == Or) return node.op - Add + static_cast<int>(kAdd);
    switch (node.op) {
      case Add: return kAddInt;
      case Sub: return kSubInt;
      case Mul: return kMulInt;
      case Maximum: return kMaxInt;
      case Minimum: return kMinInt;
      default: return node.op - Equal + static_cast<int>(kEqualInt);
    }
  }

  void reduce(int n, const Node& node) {
    Code code;
    const bool rows = over_rows(n);
    const int inner = takes_[n];
    code.id = (node.op == Sum ? static_cast<int>(kSum) : node.op == Max ? static_cast<int>(kMax) : static_cast<int>(kMin)) + (rows ? kColumnSum - kSum : 0);
    if (inner >= 0) {
      code.id++;
      const Node& in = g_.nodes[inner];
      code.a = operand(in.args[0], in, &code.kinds[1]);
      code.b = operand(in.args[1], in, &code.kinds[2]);
    } else {
      code.a = operand(node.args[0], node, &code.kinds[1]);
    }
    if (rows) {
      code.kinds[0] = Kind::row;
      code.d = make(Place::partial, Kind::row, kF32, static_cast<int>(out_.partials.size()));
      out_.partials.push_back(n);
      body_->push_back(code);
      return;
    }
    code.kinds[0] = Kind::column;
    if (out_.by_rows) return define(n, code, Kind::column);
    code.d = reduced_[n] = make(Place::arena, Kind::column, kF32, out_.column_slots++);
    push(code);
  }

  void gather(int n, const Node& node) {
    Code code;
    code.id = kGather;
    const Node& index = g_.nodes[source(g_, node.args[0])];
    const Node& table = g_.nodes[g_.input_node[node.attrs[0]]];
    code.a = make(Place::input, Kind::column, index.dtype, static_cast<int>(index.attrs[0]));
    code.b = make(Place::input, Kind::single, table.dtype, static_cast<int>(node.attrs[0]));
    code.kinds[1] = Kind::column;
    code.kinds[2] = Kind::single;
    code.tensor = n;
    define(n, code, Kind::full);
  }

  void store(const Node& node) {
    bool reshaped = false;
    const int from = source(g_, node.args[0], &reshaped);
    Kind from_kind;
    const int reg = operand(reshaped && inside(from) ? from : node.args[0], node, &from_kind);
    const Kind k = kind(reshaped && inside(from) ? g_.nodes[from].dims : node.dims, node);
    write(make(Place::output, k, node.dtype, static_cast<int>(node.attrs[0])), reg, k, from_kind, node.dtype);
  }

  // Slots of the moving registers of one pass, by the last instruction that reads each.
  void allocate() {
    for (const auto& [from, to] : bound_) out_.registers[from] = out_.registers[to];
    bound_.clear();
    std::vector<int> last(out_.registers.size(), -1);
    for (int i = 0; i < static_cast<int>(body_->size()); i++) {
      for (int r : {(*body_)[i].a, (*body_)[i].b, (*body_)[i].c}) last[r] = i;
    }
    std::vector<int> free_full, free_column;
    for (int i = 0; i < static_cast<int>(body_->size()); i++) {
      const Code& code = (*body_)[i];
      // An operand that ends here may be overwritten by an element-wise result of its own kind.
      const bool in_place = code.id < kSum && code.id != kSelect;
      const auto release = [&](int r) {
        const Binding& b = out_.registers[r];
        if (b.place != Place::arena || b.index < 0 || last[r] != i) return;
        if (b.kind == Kind::full) free_full.push_back(b.index);
        if (b.kind == Kind::column && out_.by_rows) free_column.push_back(b.index);
        last[r] = -1;
      };
      if (in_place) {
        if (code.kinds[1] == code.kinds[0]) release(code.a);
        if (code.kinds[2] == code.kinds[0]) release(code.b);
      }
      Binding& d = out_.registers[code.d];
      if (d.place == Place::arena && d.index < 0) {
        std::vector<int>& spare = d.kind == Kind::full ? free_full : free_column;
        int& slots = d.kind == Kind::full ? out_.full_slots : out_.column_slots;
        if (spare.empty()) {
          d.index = slots++;
        } else {
          d.index = spare.back();
          spare.pop_back();
        }
      }
      for (int r : {code.a, code.b, code.c}) release(r);
    }
  }

  const Graph& g_;
  const Fusion& f_;
  const Stage& stage_;
  const int index_;
  const std::vector<int>& workspace_of_;
  LoweredStage out_;
  std::vector<int> uses_;       // of each node in this stage
  std::vector<int> takes_;      // the argument that a node's instruction computes on the way
  std::vector<bool> absorbed_;  // by the instruction of its only user
  std::vector<bool> absolute_;  // of these, operands without their sign
  std::vector<int> level_;
  int passes_ = 1;
  std::vector<Code>* body_ = nullptr;
  std::map<int, int> still_, moving_, reduced_;  // node -> register
  std::map<int, int> bound_;                     // register -> the memory that it writes to
};

}  // namespace

LoweredStage Program::lower(size_t stage, bool by_rows) const {
  return Lowering(graph_, fusion_, workspace_of_, stage, by_rows).run();
}

}  // namespace telechat::dvm
