// Cross-entropy straight from logits: the forward pass keeps one number a row, the backward pass writes the gradient of
// the logits in one go.
#include "cross_entropy.h"

#include <algorithm>
#include <vector>

#include "aot.h"
#include "pool.h"

TELECHAT_SELECT(telechat::CrossEntropyKernels, cross_entropy)

namespace {

using namespace telechat;

constexpr double kTiny = 1e-8;  // MindFormers' guard against a batch without labels
constexpr int64_t kValues = 1 << 16;  // logits of a task
constexpr int64_t kCached = 1 << 22;  // logits; of more, the gradient has left the caches before it is read

struct ZState : State {
  float z_loss;
  explicit ZState(Attributes& a) : z_loss(a.number("z_loss")) {}
};

struct Rows {
  const float* x;
  const int32_t* label;
  const float* mask;
  int64_t T, V;
};

Rows rows(const Call& call) {
  const Arg x = call[0], label = call[1], mask = call[2];
  check(x.rank == 2, "logits have rank %d, expected 2", x.rank);
  check(label.rank == 1 && mask.rank == 1 && label.dim(0) == x.dim(0) && mask.dim(0) == x.dim(0),
        "logits have %ld rows, label and mask do not", long(x.dim(0)));
  Rows r{x.as<const float>("logits"), label.as<const int32_t>("label"), mask.as<const float>("mask"), x.dim(0), x.dim(1)};
  for (int64_t t = 0; t < r.T; t++) {
    check(r.label[t] >= 0 && r.label[t] < r.V, "the label of row %ld is %d, expected 0 to %ld", long(t), r.label[t],
          long(r.V - 1));
  }
  return r;
}

int64_t rows_of_task(const Rows& r) { return std::max<int64_t>(1, kValues / std::max<int64_t>(1, r.V)); }

double total(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += x[i];
  return sum;
}

}  // namespace

// logits [T, V], label [T] int32, mask [T] -> loss [1], log-sum-exp in two parts [T, 2]
TELECHAT_INIT(CrossEntropy, ZState)
TELECHAT_SHAPES(CrossEntropy) { return {{1}, {in.dim(0, 0), 2}}; }
TELECHAT_RUN(CrossEntropy) {
  const Rows r = rows(call);
  const float z = call.state<ZState>().z_loss;
  auto* lse = reinterpret_cast<LogSumExp*>(call[4].as<float>("the log-sum-exp"));
  float* loss_of = scratch<float>(0, r.T);
  parallel_for_steps(r.T, rows_of_task(r), [&](int64_t t) {
    lse[t] = cross_entropy().log_sum_exp(r.x + t * r.V, r.V);
    const float whole = lse[t].top + lse[t].rest, label = r.x[t * r.V + r.label[t]];
    loss_of[t] = r.mask[t] * (lse[t].top - label + lse[t].rest + z * whole * whole);
  });
  *call[3].as<float>("the loss") = static_cast<float>(total(loss_of, r.T) / (total(r.mask, r.T) + kTiny));
}

// logits, label, mask, log-sum-exp, gradient of the loss [1] -> gradient of the logits
TELECHAT_INIT(CrossEntropyGrad, ZState)
TELECHAT_SHAPES1(CrossEntropyGrad) { return in.shape(0); }
TELECHAT_RUN(CrossEntropyGrad) {
  const Rows r = rows(call);
  const float z = call.state<ZState>().z_loss;
  const auto* lse = reinterpret_cast<const LogSumExp*>(call[3].as<const float>("the log-sum-exp"));
  float* dx = call[5].as<float>("dlogits");
  const bool past = r.T * r.V > kCached;
  const double share = *call[4].as<const float>("dloss") / (total(r.mask, r.T) + kTiny);
  parallel_for_steps(r.T, rows_of_task(r), [&](int64_t t) {
    const float factor = static_cast<float>(share * r.mask[t]);
    cross_entropy().softmax(r.x + t * r.V, r.V, lse[t], factor * (1 + 2 * z * (lse[t].top + lse[t].rest)), dx + t * r.V, past);
    dx[t * r.V + r.label[t]] -= factor;
  });
}
