// Multipliers as proofs: what they show of a box, whoever found them.
#include "placement_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace telechat {

// The multipliers of the last solution, scaled so that they prove something whatever rounding did.
Multipliers Search::proof(const LinearProgram& lp) const {
  Multipliers found;
  const int per = p.stages + 1;
  double sums[2] = {0, 0}, paths = 0;
  lp.multipliers([&](int64_t tagged, double y) {
    const int64_t at = tagged & ((int64_t{1} << 40) - 1);
    const int where = static_cast<int>(at);
    switch (tagged >> 40) {
      case kPath:
        found.paths.push_back({where, y});
        paths += y;
        break;
      case kLine:
        if (at == 0) found.share = std::min(y, 1.0);
        break;
      case kParameter:
        found.others.push_back({where, y});
        sums[at / per] += y;
        break;
      case kMemory: found.others.push_back({2 * per + where, y / kGib}); break;
      case kMost: found.others.push_back({2 * per + p.stages + where, y}); break;
      case kFewest: found.others.push_back({2 * per + 2 * p.stages + where, y}); break;
      default: break;
    }
  });
  for (auto& [number, weight] : found.paths) weight /= paths;
  for (auto& [at, weight] : found.others)
    if (at < 2 * per) weight /= sums[at / per];
  for (int i = 0; i < 2; ++i)
    if (sums[i] == 0) found.others.push_back({i * per + p.stages, 1.0});
  return found;
}

// What multipliers prove: the least sum over all placements in a box.
double Search::value(const Multipliers& proof, const Box& box, const Ints& most) const {
  double k, c, u[2];
  {
    const double s = proof.share, r = 1 - s;
    k = s * p.lines[0][0] + r * p.lines[1][0];
    c = s * p.lines[0][1] + r * p.lines[1][1];
    for (int i = 0; i < 2; ++i) u[i] = s * p.lines[0][2 + i] + r * p.lines[1][2 + i];
  }
  Reals counts(3 * n, 0.0), weigh[2] = {Reals(p.stages, 0.0), Reals(p.stages, 0.0)}, memory(p.stages, 0.0),
      extra(p.stages, 0.0);
  double total = c, sends = 0;
  for (auto [number, weight] : proof.paths) {
    const Path& path = pool.at(number);
    for (int i = 0; i < 3 * n; ++i) counts[i] += weight * path.counts[i];
    sends += weight * path.sends;
  }
  for (int i = 0; i < 3 * n; ++i) {
    counts[i] *= k * kPs;
    total += counts[i] * static_cast<double>(p.fixed[i]);
  }
  total += k * kPs * sends * static_cast<double>(p.send);
  const int per = p.stages + 1;
  for (auto [at, y] : proof.others) {
    if (at < 2 * per) {
      const int i = at / per, s = at % per;
      if (s < p.stages) weigh[i][s] = u[i] * y;
      total += u[i] * y * (s < p.stages ? p.weight[i][s] : p.least[i]);
      continue;
    }
    const int kind = (at - 2 * per) / p.stages, s = (at - 2 * per) % p.stages;
    if (kind == 0) {
      memory[s] = y;
      total -= y * box.room[s];
    } else {
      extra[s] += kind == 1 ? y : -y;
      total += kind == 1 ? -y * most[s] : y * box.fewest[s];
    }
  }
  std::vector<std::pair<double, int>> each(n);
  for (size_t g = 0; g < p.kinds.size(); ++g) {
    const Problem::Kind& kind = p.kinds[g];
    int left = kind.count;
    for (int c2 = 0; c2 < n; ++c2) {
      const int s = p.route[c2];
      double one = memory[s] * static_cast<double>(kind.states + kind.kept[s]);
      for (int t = 0; t < 3; ++t) one += counts[t * n + c2] * static_cast<double>(kind.times[t]);
      for (int i = 0; i < 2; ++i) one += kind.weights[i] * weigh[i][s];
      if (p.choice)
        one += std::min(counts[n + c2] * static_cast<double>(kind.recompute_time) -
                            memory[s] * static_cast<double>(kind.kept[s] - kind.entry[s]), 0.0);
      if (g == 0) one += extra[s];
      each[c2] = {one, c2};
    }
    auto range = [&](int c2) -> std::pair<int, int> {
      if (g == 0) return {box.low[c2], box.high[c2]};
      if (box.placed) return {box.few[c2], box.few[c2]};
      return {0, (p.bulk_last ? c2 : n - 1 - c2) <= kind.count ? kind.count : 0};
    };
    for (auto [one, c2] : each) {
      total += one * range(c2).first;
      left -= range(c2).first;
    }
    if (left < 0) return kNone;
    std::sort(each.begin(), each.end());
    for (size_t i = 0; i < each.size() && left; ++i) {
      const auto [low, high] = range(each[i].second);
      const int take = std::min(left, high - low);
      total += each[i].first * take;
      left -= take;
    }
    if (left) return kNone;
  }
  return total;
}

bool Search::proves(const ProofTree& tree, double target) {
  const Placed known = std::exchange(best, {});  // the search itself goes on as if nothing had been looked at
  const bool proven = holds(tree, 0, whole(), target);
  best = known;
  return proven;
}

bool Search::holds(const ProofTree& tree, int at, Box box, double target) {
  const ProofNode& node = tree.nodes[at];
  if (node.count > 0) {
    const std::vector<Box> boxes = cut(box, node, tree.longest);
    bool proven = static_cast<int>(boxes.size()) == node.count;
    for (int i = 0; proven && i < node.count; ++i) proven = holds(tree, node.first + i, boxes[i], target);
    return proven;
  }
  const Ints top = most(box, target);
  if (!possible(box, top)) return true;
  if (node.proof == kExhausted) return box.placed && box.low == box.high && exact(box, target) >= target * (1 - kClose);
  box.room = rooms(box, top);
  return node.proof >= 0 && value(tree.proofs[node.proof], box, top) >= target * (1 - kClose);
}

}  // namespace telechat
