// Products of rows sorted by expert with their own expert's matrix, and what is fused with them.
//
// Rows [offset(e), offset(e) + sizes[e]) belong to expert e (`group_list_type` 1 of Ascend's GroupedMatmul: sizes). A task
// is a block of an expert's rows, or for weight gradients a block of a matrix's rows; one thread does it from start to end.
#include <algorithm>
#include <vector>

#include "aot.h"
#include "gemm.h"
#include "pool.h"
#include "rows.h"

namespace {

using namespace telechat;

constexpr int64_t kRows = 256;        // rows of a task: oneDNN repacks the weight once a call
constexpr int64_t kWeightRows = 128;  // of a weight gradient
enum Slot { kX, kW, kUp, kDy, kDgate, kDup };

struct GroupedState : State {
  bool bf16;
  explicit GroupedState(Attributes& a) : bf16(a.flag("bf16")) {}
};

struct RowBlock {
  int64_t expert, row, count;
};

struct Groups {
  int64_t P, I, O, E;
  std::vector<int64_t> start;  // E + 1
  std::vector<RowBlock> blocks;    // of rows

  Groups(const Arg& x, const Arg& w, const Arg& sizes) {
    check(x.rank == 2 && w.rank == 3 && sizes.rank == 1, "ranks of x, w, sizes are %d, %d, %d, expected 2, 3, 1", x.rank,
          w.rank, sizes.rank);
    P = x.dim(0), I = x.dim(1), E = w.dim(0), O = w.dim(2);
    check(w.dim(1) == I, "x is [%ld, %ld], w [%ld, %ld, %ld]: the inner dimensions differ", long(P), long(I), long(E),
          long(w.dim(1)), long(O));
    check(sizes.dim(0) == E, "%ld group sizes for %ld experts", long(sizes.dim(0)), long(E));
    const bool wide = sizes.dtype() == DType::i64;
    const void* data = wide ? static_cast<const void*>(sizes.as<const int64_t>("sizes")) : sizes.as<const int32_t>("sizes");
    start.assign(1, 0);
    for (int64_t e = 0; e < E; e++) {
      const int64_t size = wide ? static_cast<const int64_t*>(data)[e] : static_cast<const int32_t*>(data)[e];
      check(size >= 0, "the size of group %ld is %ld", long(e), long(size));
      start.push_back(start.back() + size);
      for (int64_t r = 0; r < size; r += kRows) blocks.push_back({e, start[e] + r, std::min(kRows, size - r)});
    }
    check(start.back() == P, "the group sizes add up to %ld, x has %ld rows", long(start.back()), long(P));
  }
  int64_t size(int64_t e) const { return start[e + 1] - start[e]; }
  int64_t weight_blocks() const { return (I + kWeightRows - 1) / kWeightRows; }
};

void same_shape(const Arg& x, int64_t rows, int64_t width, const char* what) {
  check(x.rank == 2 && x.dim(0) == rows && x.dim(1) == width, "%s does not have the shape [%ld, %ld]", what, long(rows),
        long(width));
}

// dw[e] rows [r, r + m) = beta * itself + x_e^T dy_e
void weight_block(const Groups& g, int64_t task, const Operand& x, const Operand& dy, float beta, float* dw) {
  const int64_t e = task / g.weight_blocks(), r = task % g.weight_blocks() * kWeightRows;
  const int64_t m = std::min(kWeightRows, g.I - r);
  multiply(true, false, m, g.O, g.size(e), 1, x.at(g.start[e], r), dy.at(g.start[e], 0), beta, dw + (e * g.I + r) * g.O, g.O);
}

Operand weights(const Arg& w, bool bf16, int slot) {
  return operand(w.as<const float>("w"), w.dim(0) * w.dim(1), w.dim(2), bf16, slot);
}

void gradients(const Call& call, float* dx, float* dw, float beta) {
  const Groups g(call[0], call[1], call[2]);
  same_shape(call[3], g.P, g.O, "dy");
  const bool bf16 = call.state<GroupedState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand w = weights(call[1], bf16, kW);
  const Operand dy = operand(call[3].as<const float>("dy"), g.P, g.O, bf16, kDy);
  const int64_t of_w = g.E * g.weight_blocks();
  parallel_for(of_w + static_cast<int64_t>(g.blocks.size()), [&](int64_t i) {
    if (i < of_w) return weight_block(g, i, x, dy, beta, dw);
    const RowBlock t = g.blocks[i - of_w];
    multiply(false, true, t.count, g.I, g.O, 1, dy.at(t.row, 0), w.at(t.expert * g.I, 0), 0, dx + t.row * g.I, g.I);
  });
}

void swiglu_gradients(const Call& call, float* dx, float* dgate_w, float* dup_w, float beta) {
  const Groups g(call[0], call[1], call[3]);
  for (int i = 4; i < 7; i++) same_shape(call[i], g.P, g.O, i == 4 ? "gate" : i == 5 ? "up" : "dy");
  const bool bf16 = call.state<GroupedState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand wg = weights(call[1], bf16, kW), wu = weights(call[2], bf16, kUp);
  const float *gate = call[4].as<const float>("gate"), *up = call[5].as<const float>("up");
  const float* dy = call[6].as<const float>("dy");
  float *dgate = scratch<float>(kDgate, 2 * g.P * g.O), *dup = dgate + g.P * g.O;
  parallel_for(static_cast<int64_t>(g.blocks.size()), [&](int64_t i) {
    const int64_t begin = g.blocks[i].row * g.O, count = g.blocks[i].count * g.O;
    row_kernels().swiglu_grad(gate + begin, up + begin, dy + begin, count, dgate + begin, dup + begin);
  });
  const Operand dg = operand(dgate, g.P, g.O, bf16, kDy), du = operand(dup, g.P, g.O, bf16, kDup);
  const int64_t of_w = g.E * g.weight_blocks();
  parallel_for(2 * of_w + static_cast<int64_t>(g.blocks.size()), [&](int64_t i) {
    if (i < of_w) return weight_block(g, i, x, dg, beta, dgate_w);
    if (i < 2 * of_w) return weight_block(g, i - of_w, x, du, beta, dup_w);
    const RowBlock t = g.blocks[i - 2 * of_w];
    float* to = dx + t.row * g.I;
    multiply(false, true, t.count, g.I, g.O, 1, dg.at(t.row, 0), wg.at(t.expert * g.I, 0), 0, to, g.I);
    multiply(false, true, t.count, g.I, g.O, 1, du.at(t.row, 0), wu.at(t.expert * g.I, 0), 1, to, g.I);
  });
}

float* main_grad(const Call& call, int at, int weight) {
  const Arg sum = call[at], w = call[weight];
  check(sum.rank == w.rank && sum.size() == w.size() && std::equal(sum.shape, sum.shape + sum.rank, w.shape),
        "the main gradient does not have the shape of its weight");
  return sum.as<float>("the main gradient");
}

}  // namespace

// x [P, I], w [E, I, O], sizes [E] -> y [P, O]
TELECHAT_INIT(GroupedMatmul, GroupedState)
TELECHAT_SHAPES1(GroupedMatmul) { return {in.dim(0, 0), in.dim(1, 2)}; }
TELECHAT_RUN(GroupedMatmul) {
  const Groups g(call[0], call[1], call[2]);
  const bool bf16 = call.state<GroupedState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand w = weights(call[1], bf16, kW);
  float* y = call[3].as<float>("y");
  parallel_for(static_cast<int64_t>(g.blocks.size()), [&](int64_t i) {
    const RowBlock t = g.blocks[i];
    multiply(false, false, t.count, g.O, g.I, 1, x.at(t.row, 0), w.at(t.expert * g.I, 0), 0, y + t.row * g.O, g.O);
  });
}

// x, w, sizes, dy [P, O] -> dx, dw
TELECHAT_INIT(GroupedMatmulGrad, GroupedState)
TELECHAT_SHAPES(GroupedMatmulGrad) { return {in.shape(0), in.shape(1)}; }
TELECHAT_RUN(GroupedMatmulGrad) { gradients(call, call[4].as<float>("dx"), call[5].as<float>("dw"), 0); }

// GMMAdd. x, w, sizes, dy, main gradient [E, I, O] -> dx; adds dw to the main gradient in place
TELECHAT_INIT(GroupedMatmulGradAdd, GroupedState)
TELECHAT_SHAPES1(GroupedMatmulGradAdd) { return in.shape(0); }
TELECHAT_RUN(GroupedMatmulGradAdd) { gradients(call, call[5].as<float>("dx"), main_grad(call, 4, 1), 1); }

// x [P, I], gate and up weights [E, I, O], sizes -> silu(gate) * up, gate, up, each [P, O]
TELECHAT_INIT(GroupedSwiGLU, GroupedState)
TELECHAT_SHAPES(GroupedSwiGLU) {
  const Shape y = {in.dim(0, 0), in.dim(1, 2)};
  return {y, y, y};
}
TELECHAT_RUN(GroupedSwiGLU) {
  const Groups g(call[0], call[1], call[3]);
  const Groups same(call[0], call[2], call[3]);
  check(same.O == g.O, "gate and up weights differ in width");
  const bool bf16 = call.state<GroupedState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand wg = weights(call[1], bf16, kW), wu = weights(call[2], bf16, kUp);
  float *y = call[4].as<float>("y"), *gate = call[5].as<float>("gate"), *up = call[6].as<float>("up");
  parallel_for(static_cast<int64_t>(g.blocks.size()), [&](int64_t i) {
    const RowBlock t = g.blocks[i];
    const int64_t at = t.row * g.O;
    multiply(false, false, t.count, g.O, g.I, 1, x.at(t.row, 0), wg.at(t.expert * g.I, 0), 0, gate + at, g.O);
    multiply(false, false, t.count, g.O, g.I, 1, x.at(t.row, 0), wu.at(t.expert * g.I, 0), 0, up + at, g.O);
    row_kernels().swiglu(gate + at, up + at, t.count * g.O, y + at);
  });
}

// x, gate and up weights, sizes, gate, up, dy -> dx, dgate_w, dup_w
TELECHAT_INIT(GroupedSwiGLUGrad, GroupedState)
TELECHAT_SHAPES(GroupedSwiGLUGrad) { return {in.shape(0), in.shape(1), in.shape(2)}; }
TELECHAT_RUN(GroupedSwiGLUGrad) {
  swiglu_gradients(call, call[7].as<float>("dx"), call[8].as<float>("dw of gate"), call[9].as<float>("dw of up"), 0);
}

// ..., dy, main gradients of gate and up -> dx; adds in place
TELECHAT_INIT(GroupedSwiGLUGradAdd, GroupedState)
TELECHAT_SHAPES1(GroupedSwiGLUGradAdd) { return in.shape(0); }
TELECHAT_RUN(GroupedSwiGLUGradAdd) {
  swiglu_gradients(call, call[9].as<float>("dx"), main_grad(call, 7, 1), main_grad(call, 8, 2), 1);
}
