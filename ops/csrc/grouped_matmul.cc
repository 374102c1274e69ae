// Products of rows sorted by expert with their own expert's matrix, and what is fused with them.
//
// Rows [offset(e), offset(e) + sizes[e]) belong to expert e (`group_list_type` 1 of Ascend's GroupedMatmul: sizes). A task
// is a block of an expert's rows, or for weight gradients a block of a matrix's rows; one thread does it from start to end.
#include <algorithm>
#include <vector>

#include "gemm.h"
#include "pool.h"
#include "rows.h"

namespace {

using namespace telechat;

constexpr int64_t kRows = 256;   // rows of a task: oneDNN repacks the weight once a call
constexpr int64_t kTasks = 16;   // fewer are cut further, down to these
constexpr int64_t kNarrow = 64;  // columns or rows of a weight
constexpr int64_t kDepth = 512;  // rows summed into a weight gradient at a time
enum Slot { kX, kW, kUp, kDy, kDgate, kColumns };

// A block of a result: rows of an expert's group and columns, or rows of an expert's weight gradient.
struct Block {
  int64_t expert, row, rows, column, columns, work;
};

int64_t blocks_of(int64_t n, int64_t block) { return (n + block - 1) / block; }

// The largest first: what is left at the end is short.
void sort_blocks(std::vector<Block>& blocks) {
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.work > b.work; });
}

struct Groups {
  int64_t P, I, O, E;
  std::vector<int64_t> start;  // E + 1

  Groups(const Arg& x, const Arg& w, const Arg& sizes) : Groups(x, sizes) {
    check(w.rank == 3, "w has rank %d, expected 3", w.rank);
    O = w.dim(2);
    check(w.dim(1) == I, "x is [%ld, %ld], w [%ld, %ld, %ld]: the inner dimensions differ", long(P), long(I),
          long(w.dim(0)), long(w.dim(1)), long(O));
    check(w.dim(0) == E, "%ld group sizes for %ld experts", long(E), long(w.dim(0)));
  }
  Groups(const Arg& x, const Arg& sizes) : O(0), start(1, 0) {
    check(x.rank == 2 && sizes.rank == 1, "ranks of x and sizes are %d and %d, expected 2 and 1", x.rank, sizes.rank);
    P = x.dim(0), I = x.dim(1), E = sizes.dim(0);
    const bool wide = sizes.dtype() == DType::i64;
    const auto* i64 = wide ? sizes.as<const int64_t>("sizes") : nullptr;
    const auto* i32 = wide ? nullptr : sizes.as<const int32_t>("sizes");
    for (int64_t e = 0; e < E; e++) {
      const int64_t size = wide ? i64[e] : i32[e];
      check(size >= 0, "the size of group %ld is %ld", long(e), long(size));
      check(size <= P - start.back(), "groups 0 to %ld have more rows than the %ld of x", long(e), long(P));
      start.push_back(start.back() + size);
    }
    check(start.back() == P, "the group sizes add up to %ld, x has %ld rows", long(start.back()), long(P));
  }

  int64_t size(int64_t e) const { return start[e + 1] - start[e]; }

  // Cut [P, width] into blocks of about kRows rows of one expert, each as large as the others of its group.
  std::vector<Block> row_blocks(int64_t width) const {
    int64_t count = 0;
    for (int64_t e = 0; e < E; e++) count += pieces(size(e));
    const int64_t cuts = count ? std::max<int64_t>(1, std::min(kTasks / count, width / kNarrow)) : 1;
    const int64_t columns = blocks_of(blocks_of(width, cuts), 16) * 16;
    std::vector<Block> blocks;
    for (int64_t e = 0; e < E; e++) {
      const int64_t n = pieces(size(e)), rows = n ? blocks_of(blocks_of(size(e), n), 16) * 16 : 0;
      for (int64_t r = 0; r < size(e); r += rows) {
        for (int64_t c = 0; c < width; c += columns) {
          const int64_t m = std::min(rows, size(e) - r), k = std::min(columns, width - c);
          blocks.push_back({e, start[e] + r, m, c, k, m * k});
        }
      }
    }
    sort_blocks(blocks);
    return blocks;
  }
  // Cut the weights [E, I, O] into blocks of rows; short sums into larger ones, for which dy is packed once.
  std::vector<Block> weight_blocks() const {
    const int64_t wanted = E ? blocks_of(kTasks, E) : 1;
    const int64_t most = P <= E * kShortSum ? 4 * kRows : kRows;
    const int64_t rows = std::max(kNarrow, std::min(most, blocks_of(blocks_of(I, wanted), 16) * 16));
    std::vector<Block> blocks;
    for (int64_t e = 0; e < E; e++) {
      for (int64_t r = 0; r < I; r += rows) {
        const int64_t m = std::min(rows, I - r);
        blocks.push_back({e, r, m, 0, O, m * (size(e) + 1)});
      }
    }
    sort_blocks(blocks);
    return blocks;
  }

 private:
  static int64_t pieces(int64_t rows) { return rows ? std::max<int64_t>(1, (rows + kRows / 2) / kRows) : 0; }
};

void same_shape(const Arg& x, int64_t rows, int64_t width, const char* what) {
  check(x.rank == 2 && x.dim(0) == rows && x.dim(1) == width, "%s does not have the shape [%ld, %ld]", what, long(rows),
        long(width));
}

// y = x w[e] in a block
void forward_block(const Groups& g, const Block& b, const Operand& x, const Operand& w, float* y) {
  // A weight much larger than the cache is packed faster in parts: its rows lie on fewer pages.
  const int64_t depth = g.I * g.O > (1 << 21) ? 256 : g.I;
  for (int64_t k = 0; k == 0 || k < g.I; k += depth) {
    multiply(false, false, b.rows, b.columns, std::min(depth, g.I - k), 1, x.at(b.row, k),
             w.at(b.expert * g.I + k, b.column), k == 0 ? 0 : 1, y + b.row * g.O + b.column, g.O);
  }
}

// dx = beta dx + dy w[e]^T in a block
void input_block(const Groups& g, const Block& b, const Operand& dy, const Operand& w, float beta, float* dx) {
  multiply(false, true, b.rows, b.columns, g.O, 1, dy.at(b.row, 0), w.at(b.expert * g.I + b.column, 0), beta,
           dx + b.row * g.I + b.column, g.I);
}

// dw[e] = beta dw[e] + x_e^T dy_e in a block
void weight_block(const Groups& g, const Block& b, const Operand& x, const Operand& dy, float beta, float* dw) {
  float* to = dw + (b.expert * g.I + b.row) * g.O;
  const int64_t size = g.size(b.expert);
  for (int64_t r = 0; r == 0 || r < size; r += kDepth) {
    const int64_t row = g.start[b.expert] + r, depth = std::min(kDepth, size - r);
    multiply(true, false, b.rows, g.O, depth, 1, columns(x.at(row, b.row), depth, b.rows, kColumns), dy.at(row, 0),
             r == 0 ? beta : 1, to, g.O);
  }
}

Operand weights(const Arg& w, bool bf16, int slot) {
  return operand(w.as<const float>("w"), w.dim(0) * w.dim(1), w.dim(2), bf16, slot);
}

void gradients(const Call& call, float* dx, float* dw, float beta) {
  const Groups g(call[0], call[1], call[2]);
  same_shape(call[3], g.P, g.O, "dy");
  const bool bf16 = call.state<ProductState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand w = weights(call[1], bf16, kW);
  const Operand dy = operand(call[3].as<const float>("dy"), g.P, g.O, bf16, kDy);
  const std::vector<Block> of_w = g.weight_blocks(), of_x = g.row_blocks(g.I);
  const int64_t first = static_cast<int64_t>(of_w.size());
  parallel_for(first + static_cast<int64_t>(of_x.size()), [&](int64_t i) {
    if (i < first) return weight_block(g, of_w[i], x, dy, beta, dw);
    input_block(g, of_x[i - first], dy, w, 0, dx);
  });
}

void weight_gradient(const Call& call, float* dw, float beta) {
  Groups g(call[0], call[1]);
  g.O = call[2].dim(-1);
  same_shape(call[2], g.P, g.O, "dy");
  const bool bf16 = call.state<ProductState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand dy = operand(call[2].as<const float>("dy"), g.P, g.O, bf16, kDy);
  const std::vector<Block> blocks = g.weight_blocks();
  parallel_for(static_cast<int64_t>(blocks.size()), [&](int64_t i) { weight_block(g, blocks[i], x, dy, beta, dw); });
}

void swiglu_gradients(const Call& call, float* dx, float* dgate_w, float* dup_w, float beta) {
  const Groups g(call[0], call[1], call[3]), same(call[0], call[2], call[3]);
  check(same.O == g.O, "gate and up weights differ in width");
  for (int i = 4; i < 7; i++) same_shape(call[i], g.P, g.O, i == 4 ? "gate" : i == 5 ? "up" : "dy");
  const bool bf16 = call.state<ProductState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand wg = weights(call[1], bf16, kW), wu = weights(call[2], bf16, kUp);
  const float *gate = call[4].as<const float>("gate"), *up = call[5].as<const float>("up");
  const float* dy = call[6].as<const float>("dy");
  float *dgate = scratch<float>(kDgate, 2 * g.P * g.O), *dup = dgate + g.P * g.O;
  const int64_t all = g.P * g.O, part = 1 << 14;
  parallel_for(blocks_of(all, part), [&](int64_t i) {
    const int64_t at = i * part;
    row_kernels().swiglu_grad(gate + at, up + at, dy + at, std::min(part, all - at), dgate + at, dup + at);
  });
  const Operand dg = operand(dgate, 2 * g.P, g.O, bf16, kDy), du = dg.at(g.P, 0);
  const std::vector<Block> of_w = g.weight_blocks(), of_x = g.row_blocks(g.I);
  const int64_t first = static_cast<int64_t>(of_w.size());
  parallel_for(2 * first + static_cast<int64_t>(of_x.size()), [&](int64_t i) {
    if (i < 2 * first) return weight_block(g, of_w[i / 2], x, i % 2 ? du : dg, beta, i % 2 ? dup_w : dgate_w);
    input_block(g, of_x[i - 2 * first], dg, wg, 0, dx);
    input_block(g, of_x[i - 2 * first], du, wu, 1, dx);
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
TELECHAT_INIT(GroupedMatmul, ProductState)
TELECHAT_SHAPES1(GroupedMatmul) { return {in.dim(0, 0), in.dim(1, 2)}; }
TELECHAT_RUN(GroupedMatmul) {
  const Groups g(call[0], call[1], call[2]);
  const bool bf16 = call.state<ProductState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand w = weights(call[1], bf16, kW);
  float* y = call[3].as<float>("y");
  const std::vector<Block> blocks = g.row_blocks(g.O);
  parallel_for(static_cast<int64_t>(blocks.size()), [&](int64_t i) { forward_block(g, blocks[i], x, w, y); });
}

// x, w, sizes, dy [P, O] -> dx, dw
TELECHAT_INIT(GroupedMatmulGrad, ProductState)
TELECHAT_SHAPES(GroupedMatmulGrad) { return {in.shape(0), in.shape(1)}; }
TELECHAT_RUN(GroupedMatmulGrad) { gradients(call, call[4].as<float>("dx"), call[5].as<float>("dw"), 0); }

// x [P, I], sizes [E], dy [P, O] -> dw [E, I, O]
TELECHAT_INIT(GroupedMatmulDw, ProductState)
TELECHAT_SHAPES1(GroupedMatmulDw) { return {in.dim(1, 0), in.dim(0, 1), in.dim(2, 1)}; }
TELECHAT_RUN(GroupedMatmulDw) { weight_gradient(call, call[3].as<float>("dw"), 0); }

// GMMAdd. x, sizes, dy, main gradient [E, I, O] -> a token; adds dw to the main gradient in place
TELECHAT_INIT(GMMAdd, ProductState)
TELECHAT_SHAPES1(GMMAdd) { return {1}; }
TELECHAT_RUN(GMMAdd) {
  const Arg sum = call[3];
  check(sum.rank == 3 && sum.dim(0) == call[1].dim(0) && sum.dim(1) == call[0].dim(1) && sum.dim(2) == call[2].dim(1),
        "the main gradient does not have the shape [%ld, %ld, %ld]", long(call[1].dim(0)), long(call[0].dim(1)),
        long(call[2].dim(1)));
  weight_gradient(call, sum.as<float>("the main gradient"), 1);
  call[4].as<float>("token")[0] = 0;
}

// GMMAdd with dx. x, w, sizes, dy, main gradient [E, I, O] -> dx; adds dw to the main gradient in place
TELECHAT_INIT(GroupedMatmulGradAdd, ProductState)
TELECHAT_SHAPES1(GroupedMatmulGradAdd) { return in.shape(0); }
TELECHAT_RUN(GroupedMatmulGradAdd) { gradients(call, call[5].as<float>("dx"), main_grad(call, 4, 1), 1); }

// x [P, I], gate and up weights [E, I, O], sizes -> silu(gate) * up, gate, up, each [P, O]
TELECHAT_INIT(GroupedSwiGLU, ProductState)
TELECHAT_SHAPES(GroupedSwiGLU) {
  const Shape y = {in.dim(0, 0), in.dim(1, 2)};
  return {y, y, y};
}
TELECHAT_RUN(GroupedSwiGLU) {
  const Groups g(call[0], call[1], call[3]);
  const Groups same(call[0], call[2], call[3]);
  check(same.O == g.O, "gate and up weights differ in width");
  const bool bf16 = call.state<ProductState>().bf16;
  const Operand x = operand(call[0].as<const float>("x"), g.P, g.I, bf16, kX);
  const Operand wg = weights(call[1], bf16, kW), wu = weights(call[2], bf16, kUp);
  float *y = call[4].as<float>("y"), *gate = call[5].as<float>("gate"), *up = call[6].as<float>("up");
  const std::vector<Block> blocks = g.row_blocks(g.O);
  parallel_for(static_cast<int64_t>(blocks.size()), [&](int64_t i) {
    const Block b = blocks[i];
    forward_block(g, b, x, wg, gate);
    forward_block(g, b, x, wu, up);
    for (int64_t r = b.row; r < b.row + b.rows; r++) {
      const int64_t at = r * g.O + b.column;
      row_kernels().swiglu(gate + at, up + at, b.columns, y + at);
    }
  });
}

// x, gate and up weights, sizes, gate, up, dy -> dx, dgate_w, dup_w
TELECHAT_INIT(GroupedSwiGLUGrad, ProductState)
TELECHAT_SHAPES(GroupedSwiGLUGrad) { return {in.shape(0), in.shape(1), in.shape(2)}; }
TELECHAT_RUN(GroupedSwiGLUGrad) {
  swiglu_gradients(call, call[7].as<float>("dx"), call[8].as<float>("dw of gate"), call[9].as<float>("dw of up"), 0);
}

// ..., dy, main gradients of gate and up -> dx; adds in place
TELECHAT_INIT(GroupedSwiGLUGradAdd, ProductState)
TELECHAT_SHAPES1(GroupedSwiGLUGradAdd) { return in.shape(0); }
TELECHAT_RUN(GroupedSwiGLUGradAdd) {
  swiglu_gradients(call, call[9].as<float>("dx"), main_grad(call, 7, 1), main_grad(call, 8, 2), 1);
}
