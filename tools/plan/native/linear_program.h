// A small linear program that grows row by row: minimise c x over rows a x <= b and lo <= x <= up, c >= 0.
//
// Dual simplex with bounded variables on a dense, condensed tableau. With c >= 0 the slack basis is dual feasible, and stays so
// when a row is added, a bound is moved, or a row that does not bind is left out: each call continues where the last one ended, and
// a copy continues from its original. What comes out is used as multipliers only, and these are checked; rounding can make a bound
// weaker, never wrong.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace telechat {

void subtract(double* to, const double* from, double k, size_t n);  // to -= k * from

class LinearProgram {
 public:
  static constexpr double kNone = std::numeric_limits<double>::infinity();

  LinearProgram(std::vector<double> cost, std::vector<double> lo, std::vector<double> up)
      : columns_(static_cast<int>(cost.size())), lo_(std::move(lo)), up_(std::move(up)), cost_(std::move(cost)) {
    objective_ = cost_;
    at_upper_.assign(columns_, 0);
    for (int j = 0; j < columns_; ++j) {
      out_.push_back(j);
      where_.push_back(j);
    }
  }

  // Adds a row a x <= b; `tag` names it.
  void add(const std::vector<double>& a, double b, int64_t tag) {
    const size_t w = out_.size();
    rows_.resize(rows_.size() + w, 0.0);
    double* row = rows_.data() + rows_.size() - w;
    for (int v = 0; v < columns_; ++v) {
      const double k = a[v];
      if (k == 0) continue;
      b -= k * x(v);
      if (where_[v] == kGone) continue;
      if (where_[v] >= 0) row[where_[v]] += k;
      else subtract(row, rows_.data() + (-1 - where_[v]) * w, k, w);
    }
    in_.push_back(columns_ + static_cast<int>(tags_.size()));
    value_.push_back(b);
    tags_.push_back(tag);
  }

  // Moves the bounds of a variable, inwards.
  void bound(int v, double lo, double up) {
    if (lo == lo_[v] && up == up_[v]) return;
    const double before = x(v);
    lo_[v] = lo;
    up_[v] = up;
    if (where_[v] >= 0) shift(where_[v], before - x(v));
  }

  // Adds `more` to the right-hand side of a row; nothing happens where it is not there.
  void move(int64_t tag, double more) {
    if (more == 0) return;
    for (size_t j = 0; j < out_.size(); ++j)
      if (out_[j] >= columns_ && tags_[out_[j] - columns_] == tag) return shift(static_cast<int>(j), more);
    for (size_t i = 0; i < in_.size(); ++i)
      if (in_[i] >= columns_ && tags_[in_[i] - columns_] == tag) value_[i] += more;
  }

  bool has(int64_t tag) const { return std::find(tags_.begin(), tags_.end(), tag) != tags_.end(); }

  // Returns 0 at the optimum, 1 where nothing is feasible, 2 after too many pivots.
  int solve(int pivots) {
    while (pivots-- > 0) {
      int r = -1;
      double worst = kFeasible;
      for (size_t i = 0; i < in_.size(); ++i) {
        const double off = std::max(low(in_[i]) - value_[i], value_[i] - high(in_[i]));
        if (off > worst) {
          worst = off;
          r = static_cast<int>(i);
        }
      }
      if (r < 0) return 0;
      const int q = entering(r);
      if (q < 0) return 1;
      pivot(r, q);
    }
    return 2;
  }

  // Leaves out the rows that do not bind and the columns that cannot move.
  void shrink() {
    std::vector<int> keep;
    for (size_t j = 0; j < out_.size(); ++j) {
      const bool fixed = out_[j] < columns_ && lo_[out_[j]] == up_[out_[j]];
      if (fixed) where_[out_[j]] = kGone;
      else keep.push_back(static_cast<int>(j));
    }
    const size_t w = out_.size();
    size_t rows = 0, at = 0;
    for (size_t i = 0; i < in_.size(); ++i) {
      if (in_[i] >= columns_) continue;
      for (int j : keep) rows_[at++] = rows_[i * w + j];
      where_[in_[i]] = -1 - static_cast<int>(rows);
      in_[rows] = in_[i];
      value_[rows++] = value_[i];
    }
    rows_.resize(at);
    in_.resize(rows);
    value_.resize(rows);
    std::vector<int64_t> tags;
    for (size_t k = 0; k < keep.size(); ++k) {
      const int j = keep[k];
      out_[k] = out_[j];
      cost_[k] = cost_[j];
      at_upper_[k] = at_upper_[j];
      if (out_[k] < columns_) {
        where_[out_[k]] = static_cast<int>(k);
      } else {
        tags.push_back(tags_[out_[k] - columns_]);
        out_[k] = columns_ + static_cast<int>(tags.size()) - 1;
      }
    }
    out_.resize(keep.size());
    cost_.resize(keep.size());
    at_upper_.resize(keep.size());
    tags_ = std::move(tags);
  }

  double x(int v) const {
    const int j = where_[v];
    if (j == kGone) return lo_[v];
    return j < 0 ? value_[-1 - j] : at_upper_[j] ? up_[v] : lo_[v];
  }

  double value() const {
    double sum = 0;
    for (int v = 0; v < columns_; ++v)
      if (objective_[v] != 0) sum += objective_[v] * x(v);
    return sum;
  }

  // Calls f(tag, multiplier) for every row that binds.
  template <typename F>
  void multipliers(F&& f) const {
    for (size_t j = 0; j < out_.size(); ++j)
      if (out_[j] >= columns_ && cost_[j] > 0) f(tags_[out_[j] - columns_], cost_[j]);
  }

  size_t bytes() const { return sizeof(double) * (rows_.size() + 4 * columns_); }

 private:
  static constexpr double kFeasible = 1e-9, kPivot = 1e-8, kDual = 1e-10;
  static constexpr int kGone = std::numeric_limits<int>::max();

  double low(int v) const { return v < columns_ ? lo_[v] : 0.0; }
  double high(int v) const { return v < columns_ ? up_[v] : kNone; }

  // The variable at position j falls by `less`.
  void shift(int j, double less) {
    if (less == 0) return;
    const size_t w = out_.size();
    for (size_t i = 0; i < in_.size(); ++i) value_[i] += rows_[i * w + j] * less;
  }

  int entering(int r) const {
    const bool below = value_[r] < low(in_[r]);
    const double* row = rows_.data() + r * out_.size();
    // Harris: of the columns that become infeasible by no more than rounding, the one with the largest pivot.
    auto rate = [&](size_t j) {
      const double t = below == static_cast<bool>(at_upper_[j]) ? row[j] : -row[j];
      return t <= kPivot || low(out_[j]) == high(out_[j]) ? 0.0 : t;
    };
    double most = kNone, size = 0;
    for (size_t j = 0; j < out_.size(); ++j)
      if (const double t = rate(j)) most = std::min(most, (std::fabs(cost_[j]) + kDual) / t);
    int q = -1;
    for (size_t j = 0; j < out_.size(); ++j)
      if (const double t = rate(j); t > size && std::fabs(cost_[j]) / t <= most) {
        size = t;
        q = static_cast<int>(j);
      }
    return q;
  }

  void pivot(int r, int q) {
    const size_t w = out_.size();
    const bool below = value_[r] < low(in_[r]);
    double* row = rows_.data() + r * w;
    const int enters = out_[q], leaves = in_[r];
    const double p = row[q], by = (value_[r] - (below ? low(leaves) : high(leaves))) / p;
    const double before = at_upper_[q] ? high(enters) : low(enters);
    for (size_t j = 0; j < w; ++j) row[j] /= p;
    row[q] = 1 / p;
    for (size_t i = 0; i < in_.size(); ++i) {
      double* other = rows_.data() + i * w;
      const double k = other[q];
      if (static_cast<int>(i) == r || k == 0) continue;
      value_[i] -= k * by;
      subtract(other, row, k, w);
      other[q] = -k / p;
    }
    const double k = cost_[q];
    subtract(cost_.data(), row, k, w);
    cost_[q] = -k / p;
    out_[q] = leaves;
    in_[r] = enters;
    value_[r] = before + by;
    at_upper_[q] = !below;
    if (leaves < columns_) where_[leaves] = q;
    if (enters < columns_) where_[enters] = -1 - r;
  }

  int columns_;
  std::vector<double> lo_, up_, objective_;  // of the columns
  std::vector<int> where_;                   // position of each column; -1 - row where it is basic; kGone
  std::vector<int64_t> tags_;                // of each row's slack, which is variable columns + number
  std::vector<double> cost_;                 // reduced, by position
  std::vector<int> out_;                     // variable at each position
  std::vector<uint8_t> at_upper_;            // by position
  std::vector<int> in_;                      // variable of each row
  std::vector<double> value_;                // of each row's variable
  std::vector<double> rows_;                 // in[i] = beta_i - rows[i] . x[out], [rows, positions]
};

}  // namespace telechat
