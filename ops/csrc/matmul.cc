// Linear layers: y = x w^T, its gradients, and the gradient of w added to a running sum.
#include <algorithm>

#include "gemm.h"
#include "pool.h"

namespace {

using namespace telechat;

constexpr int64_t kRows = 256, kColumns = 1024;  // a task's part of a result; large enough for oneDNN's own packing
constexpr int64_t kWorth = 1 << 20;  // multiplications that are worth a task
constexpr int kSlotX = 0, kSlotW = 1, kSlotDy = 2, kSlotStrip = 3;

// A product cut into tasks.
struct Blocks {
  int64_t m, n, rows, columns;
  Blocks(int64_t m, int64_t n, int64_t rows, int64_t columns = kColumns) : m(m), n(n), rows(rows), columns(columns) {}
  int64_t down() const { return (m + rows - 1) / rows; }
  int64_t count() const { return down() * ((n + columns - 1) / columns); }
  template <typename F> void run(int64_t task, F&& body) const {
    const int64_t r = task % down() * rows, c = task / down() * columns;
    body(r, c, std::min(rows, m - r), std::min(columns, n - c));
  }
};

// Rows of a task of [m, depth] x [depth, n]: fewer where the whole is small, so that there is work for other threads;
// below 128 rows oneDNN loses more than a few threads gain.
int64_t product_rows(int64_t m, int64_t n, int64_t depth) {
  int64_t rows = kRows;
  const auto few = [&] {
    const int64_t tasks = Blocks(m, n, rows).count();
    return (rows > 128 && tasks < 8) || (rows > 32 && tasks < 2);
  };
  while (few() && rows / 2 * std::min(n, kColumns) * depth >= kWorth) rows /= 2;
  return rows;
}

// The rows of dw are few and its sum is long: smaller blocks, so that there are enough of them.
int64_t weight_rows(int64_t outputs) { return outputs >= 2048 ? 256 : outputs >= 512 ? 128 : 64; }

struct Sizes {
  int64_t T, I, O;
};

Sizes sizes(const Arg& x, const Arg& w) {
  check(x.rank == 2 && w.rank == 2, "x and w have ranks %d and %d, expected 2 and 2", x.rank, w.rank);
  check(x.dim(1) == w.dim(1), "x is [%ld, %ld], w [%ld, %ld]: the last dimensions differ", long(x.dim(0)), long(x.dim(1)),
        long(w.dim(0)), long(w.dim(1)));
  return {x.dim(0), x.dim(1), w.dim(0)};
}

void gradients(const Call& call, const Arg& x, const Arg& w, const Arg& dy, float* dx, float* dw, float beta) {
  const auto [T, I, O] = sizes(x, w);
  check(dy.rank == 2 && dy.dim(0) == T && dy.dim(1) == O, "dy does not have the shape [%ld, %ld] of y", long(T), long(O));
  const bool bf16 = call.state<ProductState>().bf16;
  const Operand X = operand(x.as<const float>("x"), T, I, bf16, kSlotX);
  const Operand Wt = operand(w.as<const float>("w"), O, I, bf16, kSlotW);
  const Operand Dy = operand(dy.as<const float>("dy"), T, O, bf16, kSlotDy);
  const Blocks of_x(T, I, product_rows(T, I, O)), of_w(O, I, weight_rows(O));
  const int64_t width = I, depth = O, tokens = T;
  parallel_for(of_x.count() + of_w.count(), [&](int64_t task) {
    if (task < of_w.count()) {
      of_w.run(task, [&](int64_t r, int64_t c, int64_t m, int64_t n) {
        multiply(true, false, m, n, tokens, 1, columns(Dy.at(0, r), tokens, m, kSlotStrip), X.at(0, c), beta, dw + r * width + c, width);
      });
    } else {
      of_x.run(task - of_w.count(), [&](int64_t r, int64_t c, int64_t m, int64_t n) {
        multiply(false, false, m, n, depth, 1, Dy.at(r, 0), Wt.at(0, c), 0, dx + r * width + c, width);
      });
    }
  });
}

}  // namespace

// x [T, I], w [O, I] -> y [T, O]
TELECHAT_INIT(Matmul, ProductState)
TELECHAT_SHAPES1(Matmul) { return {in.dim(0, 0), in.dim(1, 0)}; }
TELECHAT_RUN(Matmul) {
  const Arg x = call[0], w = call[1];
  const auto [T, I, O] = sizes(x, w);
  const bool bf16 = call.state<ProductState>().bf16;
  const Operand X = operand(x.as<const float>("x"), T, I, bf16, kSlotX);
  const Operand Wt = operand(w.as<const float>("w"), O, I, bf16, kSlotW);
  float* y = call[2].as<float>("y");
  const bool tall = !bf16 && T >= kTall && I >= kTall;  // our own product packs few columns of the weight for many rows
  const Blocks blocks = tall ? Blocks(T, O, kTall, kColumns / 4) : Blocks(T, O, product_rows(T, O, I));
  const int64_t depth = I, width = O;
  parallel_for(blocks.count(), [&](int64_t task) {
    blocks.run(task, [&](int64_t r, int64_t c, int64_t m, int64_t n) {
      multiply(false, true, m, n, depth, 1, X.at(r, 0), Wt.at(c, 0), 0, y + r * width + c, width);
    });
  });
}

// x, w, dy [T, O] -> dx [T, I], dw [O, I]
TELECHAT_INIT(MatmulGrad, ProductState)
TELECHAT_SHAPES(MatmulGrad) { return {in.shape(0), in.shape(1)}; }
TELECHAT_RUN(MatmulGrad) {
  gradients(call, call[0], call[1], call[2], call[3].as<float>("dx"), call[4].as<float>("dw"), 0);
}

// x, w, dy, sum [O, I] -> dx; adds dw to `sum` in place
TELECHAT_INIT(MatmulGradAdd, ProductState)
TELECHAT_SHAPES1(MatmulGradAdd) { return in.shape(0); }
TELECHAT_RUN(MatmulGradAdd) {
  const Arg w = call[1], sum = call[3];
  check(sum.rank == 2 && sum.dim(0) == w.dim(0) && sum.dim(1) == w.dim(1), "the sum does not have the shape of w");
  gradients(call, call[0], w, call[2], call[4].as<float>("dx"), sum.as<float>("the sum"), 1);
}
