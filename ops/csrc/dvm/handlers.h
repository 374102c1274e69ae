// The instructions of the virtual machine.
#pragma once
#include <cstdint>

#include "dispatch.h"
#include "dvm/ir.h"

namespace telechat::dvm {

// Operands of one instruction on one tile: `rows` rows of `n` elements. A stride is the distance to the next row; an
// operand that is not a vector is one number a row.
struct Args {
  void* d;
  const void *a, *b, *c;
  int64_t rows, n;
  int64_t sd, sa, sb, sc;
  bool va, vb, vc;
  int absolute;    // bits of the operands whose sign is dropped
  bool first;      // a reduction begins, or goes on from an earlier part of the row
  float value;     // of kConst
  const char* const* next;  // `nexts` tensors of 4-byte values whose next part is to be fetched meanwhile
  int64_t nexts;
};

using Handler = void (*)(const Args&);

// clang-format off
enum Instruction : int {
#define X(name, code, text) k##name,
  TELECHAT_DVM_UNARY(X) TELECHAT_DVM_BINARY(X)
#undef X
#define X(name, code, text) kMul##name,  // of the unary's result
  TELECHAT_DVM_UNARY(X)
#undef X
  kConst, kCopy, kSelect, kMulAdd, kAddAdd, kMulMul, kAddMul, kSubMul, kExpSub,
  kRoundHalf, kRoundBf16, kToInt, kFromInt, kToBool,
  kNegInt, kAbsInt, kAddInt, kSubInt, kMulInt, kMaxInt, kMinInt, kEqualInt, kNotEqualInt, kLessInt, kLessEqualInt,
  kGreaterInt, kGreaterEqualInt,
  kSum, kSumProduct, kMax, kMin,                          // over the columns of each row
  kColumnSum, kColumnSumProduct, kColumnMax, kColumnMin,  // over rows, into what is there
  kLoadHalf, kLoadBf16, kLoadBool, kStoreHalf, kStoreBf16, kStoreBool,
  kSpread, kGather,                                       // run by the machine itself
  kInstructions
};
// clang-format on

// Those that compute longer than memory takes to bring what they work on: they fetch the next tile as they go.
// X: those that have a form with a factor; Y: the others.
#define TELECHAT_DVM_LENGTHY(X, Y) X(Sqrt) X(Rsqrt) X(Exp) X(Log) X(Reciprocal) X(Tanh) X(Sigmoid) Y(Div) Y(ExpSub)
constexpr bool is_lengthy(int id) {
#define X(name) if (id == k##name || id == kMul##name) return true;
#define Y(name) if (id == k##name) return true;
  TELECHAT_DVM_LENGTHY(X, Y)
#undef X
#undef Y
  return false;
}

struct Handlers {
  Handler run[kInstructions];
};

}  // namespace telechat::dvm

namespace telechat {
using DvmHandlers = dvm::Handlers;
}
TELECHAT_DECLARE(DvmHandlers, dvm_handlers)
