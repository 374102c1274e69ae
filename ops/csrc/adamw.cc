// AdamW over all tensors of a model in one operator, and the gradient norm.
#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "aot.h"
#include "pool.h"

TELECHAT_SELECT(telechat::AdamKernels, adam)

namespace {

using namespace telechat;

constexpr int64_t kBlock = 1 << 15;  // values of a task

struct AdamState : State {
  AdamScalars betas{};
  std::vector<int64_t> decayed;  // 1 or 0 for each tensor
  explicit AdamState(Attributes& a) : decayed(a.integers("decayed")) {
    betas.beta1 = a.number("beta1"), betas.new1 = a.number("new1");
    betas.beta2 = a.number("beta2"), betas.new2 = a.number("new2");
  }
};

struct Piece {
  int64_t tensor, begin, count;
};

std::vector<Piece> pieces(const Call& call, int64_t first, int64_t tensors) {
  std::vector<Piece> all;
  for (int64_t i = 0; i < tensors; i++) {
    const int64_t size = call[static_cast<int>(first + i)].size();
    for (int64_t begin = 0; begin < size; begin += kBlock) all.push_back({i, begin, std::min(kBlock, size - begin)});
  }
  return all;
}

}  // namespace

// n weights, n first moments, n second moments, n gradients, rate, epsilon, decay, clip factor -> token [1]
TELECHAT_INIT(AdamW, AdamState)
TELECHAT_SHAPES1(AdamW) {
  (void)in;
  return {1};
}
TELECHAT_RUN(AdamW) {
  const auto& state = call.state<AdamState>();
  const int64_t n = static_cast<int64_t>(state.decayed.size());
  check(call.count() == 4 * n + 5, "%d arguments for %ld tensors, expected %ld", call.count(), long(n), long(4 * n + 5));
  std::vector<float*> data(4 * n);
  for (int64_t i = 0; i < 4 * n; i++) {
    const Arg x = call[static_cast<int>(i)];
    check(x.size() == call[static_cast<int>(i % n)].size(), "tensor %ld: weight, moments and gradient differ in size", long(i % n));
    data[i] = x.as<float>("a weight, moment or gradient");
  }
  const auto number = [&](int64_t i) { return *call[static_cast<int>(4 * n + i)].as<const float>("a scalar"); };
  AdamScalars scalars = state.betas;
  scalars.rate = number(0), scalars.epsilon = number(1), scalars.decay = number(2), scalars.clip = number(3);
  const std::vector<Piece> work = pieces(call, 0, n);
  parallel_for(static_cast<int64_t>(work.size()), [&](int64_t i) {
    const Piece p = work[i];
    AdamScalars s = scalars;
    if (!state.decayed[p.tensor]) s.decay = 0;
    adam().update(data[p.tensor] + p.begin, data[n + p.tensor] + p.begin, data[2 * n + p.tensor] + p.begin,
                  data[3 * n + p.tensor] + p.begin, p.count, s);
  });
  *call[static_cast<int>(4 * n + 4)].as<float>("the token") = 1;
}

// n tensors -> norm [1] of all together, square sums [n]
TELECHAT_SHAPES(SquareSums) {
  Attributes attributes = in.attributes();
  return {{1}, {attributes.integer("tensors")}};
}
TELECHAT_RUN(SquareSums) {
  const int64_t n = call.count() - 2;
  const std::vector<Piece> work = pieces(call, 0, n);
  std::vector<double> part(work.size());
  std::vector<const float*> data(n);
  for (int64_t i = 0; i < n; i++) data[i] = call[static_cast<int>(i)].as<const float>("a gradient");
  parallel_for(static_cast<int64_t>(work.size()), [&](int64_t i) {
    part[i] = adam().square_sum(data[work[i].tensor] + work[i].begin, work[i].count);
  });
  std::vector<double> sums(n);
  double all = 0;
  for (size_t i = 0; i < work.size(); i++) {
    sums[work[i].tensor] += part[i];
    all += part[i];
  }
  *call[static_cast<int>(n)].as<float>("the norm") = static_cast<float>(std::sqrt(all));
  float* out = call[static_cast<int>(n + 1)].as<float>("the square sums");
  for (int64_t i = 0; i < n; i++) out[i] = static_cast<float>(sums[i]);
}
