// The graph that Python sends: a flat list of integers, see ops/dvm/ir.py.
#pragma once
#include <cstdint>
#include <vector>

#include "error.h"

namespace telechat::dvm {

constexpr int64_t kMagic = 0x44564D31;
constexpr int kMaxRank = 4;
constexpr int kMaxNodes = 4096;

enum Type : int { kF32, kF16, kBf16, kI32, kI64, kBool };
int64_t bytes_of(int type);
const char* type_name(int type);
int value_type(int type);  // of arithmetic: float16 and bfloat16 exist in memory only

// clang-format off
#define TELECHAT_DVM_UNARY(X) \
  X(Neg, 10, neg) X(Abs, 11, abs) X(Sqrt, 12, sqrt) X(Rsqrt, 13, rsqrt) X(Exp, 14, exp) X(Log, 15, log) \
  X(Reciprocal, 16, reciprocal) X(Floor, 17, floor) X(Ceil, 18, ceil) X(Round, 19, round) X(Trunc, 20, trunc) \
  X(Tanh, 21, tanh) X(Sigmoid, 22, sigmoid) X(Erf, 23, erf) X(IsFinite, 24, isfinite) X(Not, 25, logical_not) \
  X(Sin, 26, sin) X(Cos, 27, cos)
#define TELECHAT_DVM_BINARY(X) \
  X(Add, 40, add) X(Sub, 41, sub) X(Mul, 42, mul) X(Div, 43, div) X(Pow, 44, pow) X(Maximum, 45, maximum) \
  X(Minimum, 46, minimum) X(Equal, 47, equal) X(NotEqual, 48, not_equal) X(Less, 49, less) X(LessEqual, 50, less_equal) \
  X(Greater, 51, greater) X(GreaterEqual, 52, greater_equal) X(And, 53, logical_and) X(Or, 54, logical_or)
#define TELECHAT_DVM_OTHER(X) \
  X(Load, 0, load) X(Scalar, 1, scalar) X(Store, 2, store) X(Select, 60, select) X(Cast, 61, cast) X(Sum, 70, sum) \
  X(Max, 71, max) X(Min, 72, min) X(Broadcast, 80, broadcast) X(Reshape, 81, reshape) X(GatherLoad, 82, gather_load)
// clang-format on

enum Op : int {
#define X(name, code, text) name = code,
  TELECHAT_DVM_UNARY(X) TELECHAT_DVM_BINARY(X) TELECHAT_DVM_OTHER(X)
#undef X
};
const char* op_name(int op);
inline bool is_unary(int op) { return op >= Neg && op <= Cos; }
inline bool is_binary(int op) { return op >= Add && op <= Or; }
inline bool is_compare(int op) { return op >= Equal && op <= GreaterEqual; }
inline bool is_reduce(int op) { return op >= Sum && op <= Min; }

using Dims = std::vector<int64_t>;  // >= 0 an extent, -1 - k symbol k

struct Node {
  int op, dtype;
  std::vector<int> args;
  Dims dims;
  std::vector<int64_t> attrs;
  int64_t line;
};

struct Graph {
  int64_t inputs, outputs, symbols;
  std::vector<Node> nodes;
  std::vector<int> input_node;  // the load that gives each input its dimensions
};

// Throws Error with "line L: op: what was found, what was expected".
Graph parse(const int64_t* words, int64_t count);

[[noreturn]] void refuse(const Node& node, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Values of the symbols for these input shapes, concatenated; checks that all inputs agree.
void bind(const Graph& graph, const int64_t* shapes, int64_t* symbols);
inline int64_t extent(int64_t dim, const int64_t* symbols) { return dim >= 0 ? dim : symbols[-1 - dim]; }

}  // namespace telechat::dvm
