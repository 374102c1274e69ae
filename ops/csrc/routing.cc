// Choice of experts: scores, bias, group limit, the best K, their weights.
#include "routing.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "aot.h"
#include "pool.h"

TELECHAT_SELECT(telechat::ScoreKernels, score_kernels)

namespace {

using namespace telechat;

constexpr int64_t kTokens = 64;     // of a task
constexpr int64_t kBalanced = 256;  // of a task of the balance loss
constexpr int64_t kMost = 64;       // experts of a token
constexpr float kEps = 1e-20f;

struct RoutingState : State {
  int64_t k, groups, kept, best;
  float scale;
  bool normalize, softmax;
  explicit RoutingState(Attributes& a)
      : k(a.integer("top_k")), groups(a.integer("groups")), kept(a.integer("kept_groups")), scale(a.number("scale")),
        normalize(a.flag("normalize")), softmax(a.flag("softmax")) {
    check(k >= 1 && k <= kMost, "%ld experts for each token, expected 1 to %ld", long(k), long(kMost));
    check(groups >= 1 && kept >= 1 && kept <= groups, "%ld of %ld groups of experts kept", long(kept), long(groups));
    check(kept <= kMost, "%ld groups kept, expected at most %ld", long(kept), long(kMost));
    best = std::max<int64_t>(1, k / kept);
  }
  void fits(int64_t experts) const {
    check(k <= experts, "%ld experts for each token of %ld", long(k), long(experts));
    check(experts % groups == 0, "%ld experts do not fall into %ld equal groups", long(experts), long(groups));
  }
};

// Indices of the k highest of n values, highest first; of equal ones the first.
void top(const float* value, int64_t n, int64_t k, int32_t* index) {
  float held[kMost];
  int64_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    const float v = value[i];
    if (found == k && !(v > held[k - 1])) continue;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && held[at - 1] < v; at--) {
      held[at] = held[at - 1];
      index[at] = index[at - 1];
    }
    held[at] = v;
    index[at] = static_cast<int32_t>(i);
  }
}

// Put the experts outside the best groups at -infinity. A group's score is the sum of its `best` highest values.
void limit_groups(const RoutingState& s, int64_t experts, float* value, float* group, int32_t* index) {
  const int64_t each = experts / s.groups, best = std::min(s.best, each);
  for (int64_t g = 0; g < s.groups; g++) {
    top(value + g * each, each, best, index);
    group[g] = 0;
    for (int64_t j = 0; j < best; j++) group[g] += value[g * each + index[j]];
  }
  top(group, s.groups, s.kept, index);
  for (int64_t g = 0; g < s.groups; g++) {
    if (std::find(index, index + s.kept, g) != index + s.kept) continue;
    std::fill(value + g * each, value + (g + 1) * each, -std::numeric_limits<float>::infinity());
  }
}

float sum_of(const float* score, const int32_t* index, int64_t k) {
  float sum = 0;
  for (int64_t j = 0; j < k; j++) sum += score[index[j]];
  return sum;
}

struct ScaleState : State {
  float scale;
  explicit ScaleState(Attributes& a) : scale(a.number("scale")) {}
};

float row_sum(const float* x, int64_t n) {
  float sum = kEps;
  for (int64_t i = 0; i < n; i++) sum += x[i];
  return sum;
}

}  // namespace

// logits [T, E], bias [E] -> score [T, E], index [T, K] int32, weight [T, K], chosen [T, E] of 0 and 1, load [E]
TELECHAT_INIT(Routing, RoutingState)
TELECHAT_SHAPES(Routing) {
  const int64_t T = in.dim(0, 0), E = in.dim(0, 1), K = in.attributes().integer("top_k");
  return {{T, E}, {T, K}, {T, K}, {T, E}, {E}};
}
TELECHAT_RUN(Routing) {
  const auto& s = call.state<RoutingState>();
  const Arg logits = call[0], bias = call[1];
  check(logits.rank == 2 && bias.size() == logits.dim(1), "logits have rank %d, expected 2; %ld biases", logits.rank,
        long(bias.size()));
  const int64_t T = logits.dim(0), E = logits.dim(1), K = s.k;
  s.fits(E);
  const auto *x = logits.as<const float>("logits"), *b = bias.as<const float>("bias");
  auto *score = call[2].as<float>("score"), *weight = call[4].as<float>("weight"), *chosen = call[5].as<float>("chosen");
  auto *index = call[3].as<int32_t>("index");
  parallel_for_steps(T, kTokens, [&](int64_t t) {
    float *own = score + t * E, *w = weight + t * K;
    int32_t* best = index + t * K;
    (s.softmax ? score_kernels().softmax : score_kernels().sigmoid)(x + t * E, E, own);
    float* value = scratch<float>(0, E + s.groups);
    for (int64_t e = 0; e < E; e++) value[e] = own[e] + b[e];
    if (s.groups > 1) limit_groups(s, E, value, value + E, scratch<int32_t>(1, std::max(E, s.groups)));
    top(value, E, K, best);
    const float sum = s.normalize ? sum_of(own, best, K) + kEps : 1;
    std::fill(chosen + t * E, chosen + (t + 1) * E, 0.0f);
    for (int64_t j = 0; j < K; j++) {
      w[j] = own[best[j]] / sum * s.scale;
      chosen[t * E + best[j]] = 1;
    }
  });
  std::vector<int64_t> load(E, 0);
  for (int64_t i = 0; i < T * K; i++) load[index[i]]++;
  std::copy(load.begin(), load.end(), call[6].as<float>("load"));
}

// score [T, E], index [T, K], dscore [T, E], dweight [T, K] -> dlogits [T, E]
TELECHAT_INIT(RoutingGrad, RoutingState)
TELECHAT_SHAPES1(RoutingGrad) { return in.shape(0); }
TELECHAT_RUN(RoutingGrad) {
  const auto& s = call.state<RoutingState>();
  const Arg scores = call[0], indices = call[1], dscores = call[2], dweights = call[3];
  const int64_t T = scores.dim(0), E = scores.dim(1), K = s.k;
  check(indices.size() == T * K && dweights.size() == T * K && dscores.size() == T * E,
        "shapes of scores, indices and their gradients do not fit");
  const auto* score = scores.as<const float>("score");
  const auto* index = indices.as<const int32_t>("index");
  const auto *dscore = dscores.as<const float>("dscore"), *dweight = dweights.as<const float>("dweight");
  float* dlogits = call[4].as<float>("dlogits");
  for (int64_t i = 0; i < T * K; i++) {
    check(index[i] >= 0 && index[i] < E, "token %ld chose expert %d of %ld", long(i / K), index[i], long(E));
  }
  parallel_for_steps(T, kTokens, [&](int64_t t) {
    const auto *own = score + t * E, *dw = dweight + t * K;
    const int32_t* best = index + t * K;
    float* d = scratch<float>(0, E);
    std::copy_n(dscore + t * E, E, d);
    const float sum = s.normalize ? sum_of(own, best, K) + kEps : 1;
    float mean = 0;
    for (int64_t j = 0; s.normalize && j < K; j++) mean += dw[j] * (own[best[j]] / sum);
    for (int64_t j = 0; j < K; j++) d[best[j]] += s.scale * (dw[j] - mean) / sum;
    (s.softmax ? score_kernels().softmax_grad : score_kernels().sigmoid_grad)(own, d, E, dlogits + t * E);
  });
}

// score, chosen [g, n, E] -> loss [1], fraction [g, E] of a group's tokens that chose an expert:
// scale / g * sum over groups and experts of fraction * (mean over tokens of score / (sum of its row + eps))
TELECHAT_INIT(BalanceLoss, ScaleState)
TELECHAT_SHAPES(BalanceLoss) { return {{1}, {in.dim(0, 0), in.dim(0, 2)}}; }
TELECHAT_RUN(BalanceLoss) {
  const Arg scores = call[0], chosen = call[1];
  check(scores.rank == 3 && chosen.size() == scores.size(), "scores have rank %d, expected 3; %ld choices of %ld", scores.rank,
        long(chosen.size()), long(scores.size()));
  const int64_t G = scores.dim(0), n = scores.dim(1), E = scores.dim(2), blocks = (n + kBalanced - 1) / kBalanced;
  const auto *score = scores.as<const float>("scores"), *choice = chosen.as<const float>("choices");
  auto* fraction = call[3].as<float>("fractions");
  std::vector<double> sums(2 * G * blocks * E);  // of normalised scores and of choices, by block of tokens
  parallel_for(G * blocks, [&](int64_t i) {
    const int64_t g = i / blocks, first = i % blocks * kBalanced, end = std::min(n, first + kBalanced);
    double* sum = sums.data() + 2 * i * E;
    for (int64_t t = g * n + first; t < g * n + end; t++) {
      const float inverse = 1 / row_sum(score + t * E, E);
      for (int64_t e = 0; e < E; e++) sum[e] += score[t * E + e] * inverse, sum[E + e] += choice[t * E + e];
    }
  });
  double loss = 0;
  for (int64_t g = 0; g < G; g++) {
    for (int64_t e = 0; e < E; e++) {
      double mean = 0, count = 0;
      for (int64_t b = 0; b < blocks; b++) mean += sums[2 * (g * blocks + b) * E + e], count += sums[(2 * (g * blocks + b) + 1) * E + e];
      fraction[g * E + e] = static_cast<float>(count / n);
      loss += mean / n * (count / n);
    }
  }
  *call[2].as<float>("the loss") = static_cast<float>(call.state<ScaleState>().scale / G * loss);
}

// score [g, n, E], fraction [g, E], dloss [1] -> dscore
TELECHAT_INIT(BalanceLossGrad, ScaleState)
TELECHAT_SHAPES1(BalanceLossGrad) { return in.shape(0); }
TELECHAT_RUN(BalanceLossGrad) {
  const Arg scores = call[0];
  const int64_t G = scores.dim(0), n = scores.dim(1), E = scores.dim(2);
  check(call[1].size() == G * E, "%ld fractions for %ld groups of %ld experts", long(call[1].size()), long(G), long(E));
  const auto *score = scores.as<const float>("scores"), *fraction = call[1].as<const float>("fractions");
  auto* dscore = call[3].as<float>("dscore");
  const float share = *call[2].as<const float>("dloss") * call.state<ScaleState>().scale / static_cast<float>(G * n);
  parallel_for_steps(G * n, kTokens, [&](int64_t t) {
    const float *own = score + t * E, *f = fraction + t / n * E, inverse = 1 / row_sum(own, E);
    float mean = 0;
    for (int64_t e = 0; e < E; e++) mean += f[e] * own[e] * inverse;
    for (int64_t e = 0; e < E; e++) dscore[t * E + e] = share * inverse * (f[e] - mean);
  });
}
