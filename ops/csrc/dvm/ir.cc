#include "dvm/ir.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace telechat::dvm {

int64_t bytes_of(int type) {
  static const int64_t size[] = {4, 2, 2, 4, 8, 1};
  return size[type];
}

const char* type_name(int type) {
  static const char* name[] = {"float32", "float16", "bfloat16", "int32", "int64", "bool"};
  return type >= 0 && type <= kBool ? name[type] : "unknown";
}

int value_type(int type) { return type == kF16 || type == kBf16 ? static_cast<int>(kF32) : type; }

static const char kUnknown[] = "unknown";

const char* op_name(int op) {
  switch (op) {
#define X(name, code, text) \
  case name: return #text;
    TELECHAT_DVM_UNARY(X) TELECHAT_DVM_BINARY(X) TELECHAT_DVM_OTHER(X)
#undef X
  }
  return kUnknown;
}

void refuse(const Node& node, const char* format, ...) {
  char text[400], all[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::snprintf(all, sizeof all, "line %ld: %s: %s", long(node.line), op_name(node.op), text);
  throw Error(all);
}

namespace {

class Reader {
 public:
  Reader(const int64_t* words, int64_t count) : at_(words), end_(words + count) {}
  int64_t next() {
    check(at_ < end_, "the program ends in the middle of a node");
    return *at_++;
  }
  int64_t count(int64_t most, const char* what) {
    const int64_t n = next();
    check(n >= 0 && n <= most, "%ld %s, expected 0 to %ld", long(n), what, long(most));
    return n;
  }
  bool done() const { return at_ == end_; }

 private:
  const int64_t *at_, *end_;
};

size_t arity(const Node& n) {
  if (n.op == Load || n.op == Scalar) return 0;
  if (n.op == Select) return 3;
  return is_binary(n.op) ? 2 : 1;
}

void same_dims(const Node& n, const Dims& dims, const char* what) {
  if (dims != n.dims) refuse(n, "%s has another shape than the result; broadcast it first", what);
}

void verify_types(const Graph& g, const Node& n) {
  const auto type = [&](size_t i) { return value_type(g.nodes[n.args[i]].dtype); };
  const auto is_float = [](int t) { return t == kF32; };
  for (size_t i = 0; i < n.args.size(); i++) {
    if (type(i) == kI64 && n.op != GatherLoad) refuse(n, "argument %zu is int64, which only indexes gather_load", i);
  }
  if (is_unary(n.op)) {
    const bool integer = (n.op == Neg || n.op == Abs) && type(0) == kI32;
    const bool boolean = n.op == Not && type(0) == kBool;
    if (!integer && !boolean && (!is_float(type(0)) || n.op == Not)) refuse(n, "does not take %s", type_name(type(0)));
  } else if (n.op == And || n.op == Or) {
    if (type(0) != kBool || type(1) != kBool) refuse(n, "takes bool, found %s and %s", type_name(type(0)), type_name(type(1)));
  } else if (is_binary(n.op)) {
    if (type(0) != type(1)) refuse(n, "found %s and %s, expected one type; cast one", type_name(type(0)), type_name(type(1)));
    const bool integer = type(0) == kI32 && n.op != Div && n.op != Pow;
    if (!integer && !is_float(type(0))) refuse(n, "does not take %s", type_name(type(0)));
  } else if (n.op == Select) {
    if (type(0) != kBool) refuse(n, "the condition is %s, expected bool", type_name(type(0)));
    if (type(1) != type(2)) refuse(n, "chooses between %s and %s", type_name(type(1)), type_name(type(2)));
  } else if (is_reduce(n.op)) {
    if (!is_float(type(0))) refuse(n, "reduces float32, found %s", type_name(type(0)));
  }
}

void verify(const Graph& g, const Node& n, int index) {
  if (n.args.size() != arity(n)) refuse(n, "%zu arguments, expected %zu", n.args.size(), arity(n));
  for (int arg : n.args) {
    if (arg < 0 || arg >= index) refuse(n, "argument %d comes from no earlier node", arg);
    if (g.nodes[arg].op == Store) refuse(n, "a store has no value");
  }
  verify_types(g, n);
  if (is_unary(n.op) || n.op == Cast || is_binary(n.op) || n.op == Select) {
    for (int arg : n.args) same_dims(n, g.nodes[arg].dims, "an argument");
  }
  if (is_reduce(n.op)) {
    const Dims& from = g.nodes[n.args[0]].dims;
    if (n.dims.size() != from.size()) refuse(n, "reduces with kept dimensions; reshape afterwards");
    bool any = false;
    for (size_t i = 0; i < from.size(); i++) {
      const bool reduced = std::find(n.attrs.begin() + 1, n.attrs.end(), int64_t(i)) != n.attrs.end();
      if (n.dims[i] != (reduced ? 1 : from[i])) refuse(n, "dimension %zu of the result is wrong", i);
      any |= reduced;
    }
    if (!any) refuse(n, "reduces no dimension");
  }
  if ((n.op == Load || n.op == GatherLoad) && (n.attrs.empty() || n.attrs[0] < 0 || n.attrs[0] >= g.inputs)) {
    refuse(n, "input out of range");
  }
  if (n.op == Scalar && n.attrs.size() != 1) refuse(n, "has no value");
  if (n.op == Store && (n.attrs.empty() || n.attrs[0] < 0 || n.attrs[0] >= g.outputs)) refuse(n, "output out of range");
}

}  // namespace

Graph parse(const int64_t* words, int64_t count) {
  Reader in(words, count);
  check(in.next() == kMagic, "not a DVM program");
  Graph g;
  g.inputs = in.count(256, "inputs");
  g.outputs = in.count(64, "outputs");
  g.symbols = in.count(64, "symbols");
  const int64_t nodes = in.count(kMaxNodes, "nodes");
  g.nodes.reserve(nodes);
  g.input_node.assign(g.inputs, -1);
  std::vector<bool> bound(g.symbols), stored(g.outputs);
  for (int64_t i = 0; i < nodes; i++) {
    Node n;
    n.op = static_cast<int>(in.next());
    n.dtype = static_cast<int>(in.next());
    n.args.resize(in.count(3, "arguments"));
    for (int& x : n.args) x = static_cast<int>(in.next());
    n.dims.resize(in.count(kMaxRank, "dimensions"));
    for (int64_t& x : n.dims) x = in.next();
    n.attrs.resize(in.count(8, "attributes"));
    for (int64_t& x : n.attrs) x = in.next();
    n.line = in.next();
    if (op_name(n.op) == kUnknown) refuse(n, "operation %d", n.op);
    if (n.dtype < 0 || n.dtype > kBool) refuse(n, "data type %d", n.dtype);
    for (int64_t d : n.dims) {
      if (d < -g.symbols) refuse(n, "unbound symbol %ld", long(-1 - d));
    }
    verify(g, n, static_cast<int>(i));
    if (n.op == Load) {
      int& first = g.input_node[n.attrs[0]];
      if (first >= 0) refuse(n, "input %ld is loaded twice", long(n.attrs[0]));
      first = static_cast<int>(i);
      for (int64_t d : n.dims) {
        if (d < 0) bound[-1 - d] = true;
      }
    }
    if (n.op == Store) stored[n.attrs[0]] = true;
    g.nodes.push_back(std::move(n));
  }
  check(in.done(), "words behind the last node");
  for (int64_t k = 0; k < g.inputs; k++) check(g.input_node[k] >= 0, "input %ld is never loaded", long(k));
  for (int64_t k = 0; k < g.outputs; k++) check(stored[k], "output %ld is never stored", long(k));
  for (const Node& n : g.nodes) {
    for (int64_t d : n.dims) {
      if (d < 0 && !bound[-1 - d]) refuse(n, "symbol %ld is the extent of no input", long(-1 - d));
    }
  }
  return g;
}

void bind(const Graph& g, const int64_t* shapes, int64_t* symbols) {
  std::fill(symbols, symbols + g.symbols, -1);
  for (int64_t i = 0; i < g.inputs; i++) {
    const Node& n = g.nodes[g.input_node[i]];
    for (size_t k = 0; k < n.dims.size(); k++) {
      const int64_t found = *shapes++;
      int64_t expected = n.dims[k];
      if (expected < 0) {
        int64_t& value = symbols[-1 - expected];
        if (value < 0) value = found;
        expected = value;
      }
      if (found != expected) refuse(n, "dimension %zu of input %ld is %ld, expected %ld", k, long(i), long(found), long(expected));
    }
  }
}

}  // namespace telechat::dvm
