// Small linear programs that grow row by row (tools/plan/placement.py): minimise c x over rows a x <= b and 0 <= x <= u, c >= 0.
//
// Dual simplex with bounded variables on a dense, condensed tableau. With c >= 0 the slack basis is dual feasible, and stays so
// when a row is added, so each call goes on where the last one ended. What comes out is used as multipliers only, and these are
// checked; rounding can make a bound weaker, never wrong.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();
constexpr double kFeasible = 1e-9, kPivot = 1e-9;

struct Program {
  int columns;
  std::vector<double> upper;      // of all variables: columns, then slacks
  std::vector<double> cost;       // reduced, by position
  std::vector<int> out;           // variable at each position of the tableau's columns
  std::vector<uint8_t> at_upper;  // by position
  std::vector<int> in;            // variable of each row
  std::vector<double> value;      // of each row's variable
  std::vector<std::vector<double>> rows;  // in[i] = beta_i - rows[i] . x[out]

  double at(int j) const { return at_upper[j] ? upper[out[j]] : 0; }

  void add(const double* a, double b) {
    std::vector<double> row(columns, 0.0);
    std::vector<int> where(columns, -1);
    double left = b;
    for (int j = 0; j < columns; ++j)
      if (out[j] < columns) where[out[j]] = j;
    for (int j = 0; j < columns; ++j)
      if (where[j] >= 0) {
        row[where[j]] += a[j];
        left -= a[j] * at(where[j]);
      }
    for (size_t i = 0; i < in.size(); ++i) {
      if (in[i] >= columns || a[in[i]] == 0) continue;
      const double k = a[in[i]];
      left -= k * value[i];
      for (int j = 0; j < columns; ++j) row[j] -= k * rows[i][j];
    }
    in.push_back(static_cast<int>(upper.size()));
    upper.push_back(kNone);
    value.push_back(left);
    rows.push_back(std::move(row));
  }

  // Returns 0 at the optimum, 1 where nothing is feasible, 2 after too many pivots.
  int solve(int pivots) {
    while (pivots-- > 0) {
      int r = -1;
      double worst = kFeasible;
      for (size_t i = 0; i < in.size(); ++i) {
        double off = std::max(-value[i], value[i] - upper[in[i]]);
        if (off > worst) {
          worst = off;
          r = static_cast<int>(i);
        }
      }
      if (r < 0) return 0;
      const bool low = value[r] < 0;
      std::vector<double>& row = rows[r];
      int q = -1;
      double least = kNone, size = 0;
      for (int j = 0; j < columns; ++j) {
        if (upper[out[j]] == 0) continue;
        double t = low == static_cast<bool>(at_upper[j]) ? row[j] : -row[j];
        if (t <= kPivot) continue;
        double ratio = std::fabs(cost[j]) / t;
        if (ratio < least - 1e-13 || (ratio <= least && t > size)) {
          least = ratio;
          size = t;
          q = j;
        }
      }
      if (q < 0) return 1;
      pivot(r, q, low);
    }
    return 2;
  }

  void pivot(int r, int q, bool low) {
    std::vector<double>& row = rows[r];
    const double p = row[q], move = (value[r] - (low ? 0.0 : upper[in[r]])) / p, before = at(q);
    for (size_t i = 0; i < in.size(); ++i) value[i] -= rows[i][q] * move;
    for (double& t : row) t /= p;
    row[q] = 1 / p;
    for (size_t i = 0; i < in.size(); ++i) {
      if (static_cast<int>(i) == r) continue;
      double* other = rows[i].data();
      const double k = other[q];
      if (k == 0) continue;
      const double* from = row.data();
      for (int j = 0; j < columns; ++j) other[j] -= k * from[j];
      other[q] = -k / p;
    }
    const double k = cost[q];
    for (int j = 0; j < columns; ++j) cost[j] -= k * row[j];
    cost[q] = -k / p;
    std::swap(in[r], out[q]);
    value[r] = before + move;
    at_upper[q] = !low;
  }
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void* telechat_lp_new(int32_t columns, const double* cost, const double* upper) {
  auto* p = new Program{columns, {upper, upper + columns}, {cost, cost + columns}, {}, {}, {}, {}, {}};
  for (int j = 0; j < columns; ++j) p->out.push_back(j);
  p->at_upper.assign(columns, 0);
  return p;
}

EXPORT void telechat_lp_delete(void* program) { delete static_cast<Program*>(program); }

// Adds rows a x <= b; `a` is [rows, columns].
EXPORT void telechat_lp_add(void* program, int32_t rows, const double* a, const double* b) {
  auto& p = *static_cast<Program*>(program);
  for (int i = 0; i < rows; ++i) p.add(a + static_cast<size_t>(i) * p.columns, b[i]);
}

// Solves; writes the variables and a multiplier for each row. Returns 0 at the optimum, 1 where nothing is feasible, 2 after
// `pivots` pivots.
EXPORT int32_t telechat_lp_solve(void* program, int32_t pivots, double* x, double* multipliers) {
  auto& p = *static_cast<Program*>(program);
  int status = p.solve(pivots);
  std::fill(multipliers, multipliers + p.in.size(), 0.0);
  for (int j = 0; j < p.columns; ++j) {
    int v = p.out[j];
    if (v < p.columns) x[v] = p.at(j);
    else multipliers[v - p.columns] = std::max(p.cost[j], 0.0);
  }
  for (size_t i = 0; i < p.in.size(); ++i)
    if (p.in[i] < p.columns) x[p.in[i]] = p.value[i];
  return status;
}
