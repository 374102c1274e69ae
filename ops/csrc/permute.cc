// Tokens to expert order and back. A pair is (token, choice), number token * K + choice; the plan gives every pair its row
// (-1: dropped) and every row its pair (-1: empty).
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "aot.h"
#include "pool.h"
#include "rows.h"

namespace {

using namespace telechat;

constexpr int64_t kTokens = 64;  // of a task

struct PlanState : State {
  int64_t experts;
  explicit PlanState(Attributes& a) : experts(a.integer("experts")) {}
};

// The capacity factor travels as a fraction: a float attribute would lose half of its digits.
struct CapacityState : State {
  int64_t experts;
  double factor;
  bool by_weight;
  explicit CapacityState(Attributes& a)
      : experts(a.integer("experts")),
        factor(static_cast<double>(a.integer("numerator")) / static_cast<double>(a.integer("denominator"))),
        by_weight(a.flag("by_weight")) {}
  int64_t capacity(int64_t pairs) const { return static_cast<int64_t>(std::ceil(factor * pairs / experts)); }
};

const int32_t* experts_of(const Arg& index, int64_t experts) {
  check(index.rank == 2, "expert indices have rank %d, expected 2", index.rank);
  const auto* e = index.as<const int32_t>("expert indices");
  for (int64_t i = 0; i < index.size(); i++) {
    check(e[i] >= 0 && e[i] < experts, "token %ld chose expert %d of %ld", long(i / index.dim(1)), e[i], long(experts));
  }
  return e;
}

void check_rows(const int32_t* row, int64_t pairs, int64_t rows) {
  for (int64_t i = 0; i < pairs; i++) check(row[i] >= -1 && row[i] < rows, "pair %ld has row %d of %ld", long(i), row[i], long(rows));
}

void check_pairs(const int32_t* pair, int64_t rows, int64_t pairs) {
  for (int64_t p = 0; p < rows; p++) check(pair[p] >= -1 && pair[p] < pairs, "row %ld holds pair %d of %ld", long(p), pair[p], long(pairs));
}

// Pairs of an index [T, K]; -1 where an extent is not known yet.
int64_t pairs_of(const Inputs& in) {
  return in.dim(0, 0) < 0 || in.dim(0, 1) < 0 ? -1 : in.dim(0, 0) * in.dim(0, 1);
}

// out[t] = sum over k of weight[t, k] * y[row[t, k]]; without weights they are 1
void combine(const Arg& y, const Arg& row, const float* weight, int64_t T, int64_t K, float* out) {
  const int64_t H = y.dim(1), P = y.dim(0);
  const auto* at = row.as<const int32_t>("rows");
  const auto* from = y.as<const float>("y");
  check(row.size() == T * K, "%ld rows for %ld pairs", long(row.size()), long(T * K));
  check_rows(at, T * K, P);
  const std::vector<float> ones(weight ? 0 : K, 1.0f);
  parallel_for_steps(T, kTokens, [&](int64_t t) {
    const float* source[64];
    for (int64_t k = 0; k < K; k++) source[k] = at[t * K + k] < 0 ? nullptr : from + at[t * K + k] * H;
    row_kernels().weighted_sum(source, weight ? weight + t * K : ones.data(), K, H, out + t * H);
  });
}

int64_t choices(const Arg& pairs_of, int64_t T) {
  const int64_t K = T ? pairs_of.size() / T : 1;
  check(K >= 1 && K <= 64 && K * T == pairs_of.size(), "%ld pairs for %ld tokens, expected 1 to 64 each",
        long(pairs_of.size()), long(T));
  return K;
}

}  // namespace

// index [T, K] int32 -> row of each pair [T * K], pair of each row [T * K], group sizes [E]; int32, stable
TELECHAT_INIT(PermutePlan, PlanState)
TELECHAT_SHAPES(PermutePlan) {
  const int64_t pairs = pairs_of(in);
  return {{pairs}, {pairs}, {in.attributes().integer("experts")}};
}
TELECHAT_RUN(PermutePlan) {
  const int64_t E = call.state<PlanState>().experts, pairs = call[0].size();
  const int32_t* expert = experts_of(call[0], E);
  auto *row = call[1].as<int32_t>("rows"), *pair = call[2].as<int32_t>("pairs"), *sizes = call[3].as<int32_t>("sizes");
  std::fill(sizes, sizes + E, 0);
  for (int64_t i = 0; i < pairs; i++) sizes[expert[i]]++;
  std::vector<int32_t> next(E, 0);
  for (int64_t e = 1; e < E; e++) next[e] = next[e - 1] + sizes[e - 1];
  for (int64_t i = 0; i < pairs; i++) {
    row[i] = next[expert[i]]++;
    pair[row[i]] = static_cast<int32_t>(i);
  }
}

// index [T, K], weight [T, K] -> row of each pair, pair of each of the E * C rows, sizes [E] (all C), pairs dropped [1] fp32
TELECHAT_INIT(CapacityPlan, CapacityState)
TELECHAT_SHAPES(CapacityPlan) {
  Attributes attributes = in.attributes();
  const CapacityState state(attributes);
  const int64_t pairs = pairs_of(in);
  return {{pairs}, {pairs < 0 ? -1 : state.experts * state.capacity(pairs)}, {state.experts}, {1}};
}
TELECHAT_RUN(CapacityPlan) {
  const auto& state = call.state<CapacityState>();
  const int64_t E = state.experts, pairs = call[0].size(), C = state.capacity(pairs);
  const int32_t* expert = experts_of(call[0], E);
  check(call[1].size() == pairs, "%ld weights for %ld pairs", long(call[1].size()), long(pairs));
  const auto* weight = call[1].as<const float>("weights");
  auto *row = call[2].as<int32_t>("rows"), *pair = call[3].as<int32_t>("pairs"), *sizes = call[4].as<int32_t>("sizes");
  std::vector<int32_t> order(pairs), taken(E, 0);
  std::iota(order.begin(), order.end(), 0);
  if (state.by_weight) {
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return weight[a] > weight[b]; });
  }
  std::fill(pair, pair + E * C, -1);
  std::fill(sizes, sizes + E, static_cast<int32_t>(C));
  int64_t dropped = 0;
  for (int32_t i : order) {
    int32_t& rank = taken[expert[i]];
    row[i] = rank < C ? static_cast<int32_t>(expert[i] * C + rank++) : -1;
    if (row[i] < 0) {
      dropped++;
    } else {
      pair[row[i]] = i;
    }
  }
  *call[5].as<float>("dropped") = static_cast<float>(dropped);
}

// x [T, H], pair of each row [P], row of each pair [N] -> rows [P, H]; an empty row is zeros
TELECHAT_SHAPES1(Permute) { return {in.dim(1, 0), in.dim(0, 1)}; }
TELECHAT_RUN(Permute) {
  const Arg x = call[0], pairs = call[1];
  const int64_t T = x.dim(0), H = x.dim(1), K = choices(call[2], T);
  const auto* pair = pairs.as<const int32_t>("pairs");
  const auto* from = x.as<const float>("x");
  float* to = call[3].as<float>("rows");
  check_pairs(pair, pairs.size(), T * K);
  parallel_for_steps(pairs.size(), kTokens, [&](int64_t p) {
    if (pair[p] < 0) {
      std::fill(to + p * H, to + (p + 1) * H, 0.0f);
    } else {
      std::copy_n(from + pair[p] / K * H, H, to + p * H);
    }
  });
}

// dy [P, H], row of each pair [N], x [T, H] for its shape -> dx [T, H]
TELECHAT_SHAPES1(PermuteGrad) { return in.shape(2); }
TELECHAT_RUN(PermuteGrad) {
  const int64_t T = call[2].dim(0), K = choices(call[1], T);
  combine(call[0], call[1], nullptr, T, K, call[3].as<float>("dx"));
}

// y [P, H], row of each pair [N], weight [T, K] -> out [T, H]
TELECHAT_SHAPES1(Unpermute) { return {in.dim(2, 0), in.dim(0, 1)}; }
TELECHAT_RUN(Unpermute) {
  const Arg weight = call[2];
  choices(call[1], weight.dim(0));
  combine(call[0], call[1], weight.as<const float>("weight"), weight.dim(0), weight.dim(1), call[3].as<float>("out"));
}

// y, pair of each row [P], weight, dout [T, H] -> dy [P, H], dweight [T, K]
TELECHAT_SHAPES(UnpermuteGrad) { return {in.shape(0), in.shape(2)}; }
TELECHAT_RUN(UnpermuteGrad) {
  const Arg y = call[0], pairs = call[1], weight = call[2], dout = call[3];
  const int64_t P = y.dim(0), H = y.dim(1), T = weight.dim(0), K = weight.dim(1);
  check(pairs.size() == P && dout.rank == 2 && dout.dim(0) == T && dout.dim(1) == H, "shapes of y, pairs, weight and dout do not fit");
  const auto* pair = pairs.as<const int32_t>("pairs");
  const auto *w = weight.as<const float>("weight"), *from = y.as<const float>("y"), *d = dout.as<const float>("dout");
  float *dy = call[4].as<float>("dy"), *dw = call[5].as<float>("dweight");
  check_pairs(pair, P, T * K);
  std::fill(dw, dw + T * K, 0.0f);
  parallel_for_steps(P, kTokens, [&](int64_t p) {
    if (pair[p] < 0) {
      std::fill(dy + p * H, dy + (p + 1) * H, 0.0f);
    } else {
      dw[pair[p]] = row_kernels().scale_dot(d + pair[p] / K * H, from + p * H, w[pair[p]], H, dy + p * H);
    }
  });
}
