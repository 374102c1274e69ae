// Boxes of placements: what they hold, and how they are cut.
#include "placement_search.h"

#include <algorithm>
#include <cmath>

namespace telechat {

Box Search::whole() const {
  Box box{p.lowest, p.highest, Ints(n, 0), Ints(p.stages, 0), Ints(p.stages, bulk.count), other == nullptr};
  for (int c = 0; c < n; ++c) box.high[c] = std::min(box.high[c], bulk.count);
  for (int c = 0; c < n && other; ++c)
    if ((p.bulk_last ? c : n - 1 - c) <= other->count) box.low[c] = 0;
  return box;
}

Box Search::fixed(const Box& box, const Ints& structure) const {
  Box found = box;
  found.few = structure;
  found.placed = true;
  int last = -1, start = n;
  for (int c = 0; c < n; ++c) {
    found.low[c] = std::max({box.low[c], p.lowest[c] - structure[c], 0});
    found.high[c] = std::min(box.high[c], p.highest[c] - structure[c]);
    if (structure[c]) {
      last = c;
      start = std::min(start, c);
    }
  }
  for (int c = 0; c < n; ++c)
    if (last >= 0 && (p.bulk_last ? c < last : c > start)) found.low[c] = found.high[c] = 0;
  return found;
}

Ints Search::within(const Box& box, double makespan) const {
  Ints found(p.stages);
  for (int s = 0; s < p.stages; ++s) {
    double left = makespan / kPs / p.micros - spent[s];
    for (int c : p.own[s])
      if (other) left -= box.few[c] * other->total();
    found[s] = static_cast<int>(std::clamp(std::floor(left / std::max(bulk.total(), 1.0) + 1e-9), -1e6, 1e6));
  }
  return found;
}

Ints Search::most(const Box& box, double target) const {
  Ints found = box.most, fast;
  if (std::isfinite(target)) fast = within(box, target - least_rest());
  for (int s = 0; s < p.stages; ++s) {
    double left = room[s];
    for (int c : p.own[s]) left -= box.few[c] * each_least[1][s];
    const double fit = left < 0 ? -1 : std::floor((left + 0.1) / std::max(each_least[0][s], 1e-9));
    found[s] = static_cast<int>(std::min<double>(found[s], fit));
    if (!fast.empty()) found[s] = std::min(found[s], fast[s]);
  }
  return found;
}

// Returns the memory that layers can use: of a stage whose numbers of layers are fixed, what whole recomputed ones leave of it.
Reals Search::rooms(const Box& box, const Ints& most) const {
  Reals found = room;
  for (int s = 0; s < p.stages && p.choice && box.placed; ++s) {
    int number[2] = {box.fewest[s], 0}, low = 0, high = 0;
    for (int c : p.own[s]) {
      low += box.low[c];
      high += box.high[c];
      number[1] += box.few[c];
    }
    number[0] = std::max(number[0], low);
    if (number[0] != std::min(most[s], high)) continue;
    double all = 0, least = kNone;
    for (size_t g = 0; g < p.kinds.size(); ++g) all += number[g] * static_cast<double>(p.kinds[g].states + p.kinds[g].kept[s]);
    if (all <= room[s]) continue;
    for (int j = 0; j <= number[1]; ++j)
      for (int k = 0; k <= number[0]; ++k) {
        double saved = 0, work = static_cast<double>(p.memory[s]) - room[s];
        for (auto [g, r] : {std::pair{0, k}, std::pair{1, j}}) {
          if (r == 0) continue;
          saved += r * static_cast<double>(p.kinds[g].kept[s] - p.kinds[g].entry[s]);
          work = std::max(work, static_cast<double>(p.kinds[g].working));
        }
        if (all - saved + work <= static_cast<double>(p.memory[s])) least = std::min(least, saved);
      }
    found[s] = std::isfinite(least) ? std::min(room[s], all - least) : -1;
  }
  return found;
}

bool Search::possible(const Box& box, const Ints& most) const {
  int all_below = 0, all_above = 0;
  for (int s = 0; s < p.stages; ++s) {
    int below = 0, above = 0;
    for (int c : p.own[s]) {
      below += box.low[c];
      above += box.high[c];
    }
    below = std::max(below, box.fewest[s]);
    above = std::min(above, most[s]);
    if (below > above) return false;
    all_below += below;
    all_above += above;
  }
  return all_below <= bulk.count && bulk.count <= all_above;
}

Ints Search::longest(const Box& box) const {
  if (p.stages == 1) return {};
  const Ints fit = most(box, kNone);
  auto held = [&](double makespan) {
    Ints found = within(box, makespan);
    for (int s = 0; s < p.stages; ++s) found[s] = std::max(std::min(found[s], fit[s]), 0);
    return found;
  };
  auto sum = [](const Ints& values) {
    int all = 0;
    for (int v : values) all += v;
    return all;
  };
  double low = 0, high = *std::max_element(spent.begin(), spent.end()) + bulk.total() * (bulk.count + 1);
  high *= kPs * p.micros;
  for (int i = 0; i < 50; ++i) {
    const double middle = (low + high) / 2;
    (sum(held(middle)) >= bulk.count ? high : low) = middle;
  }
  Ints found = held(low);
  return sum(found) < bulk.count ? found : Ints{};
}

std::vector<Box> Search::cut(const Box& box, const ProofNode& node, const Ints& longest) const {
  std::vector<Box> found;
  if (node.cut == kStructure) {
    for (const Ints& one : structures) found.push_back(fixed(box, one));
  } else if (node.cut == kLongest) {
    for (int s = 0; s < p.stages; ++s) {
      found.push_back(box);
      found.back().fewest[s] = std::max(box.fewest[s], longest[s] + 1);
      for (int j = 0; j < s; ++j) found.back().most[j] = std::min(box.most[j], longest[j]);  // else it is in an earlier one
    }
  } else {
    found = {box, box};
    (node.cut == kStage ? found[0].most : found[0].high)[node.at] = node.value;
    (node.cut == kStage ? found[1].fewest : found[1].low)[node.at] = node.value + 1;
  }
  return found;
}

}  // namespace telechat
