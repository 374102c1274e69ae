// The inner loop of linear programs, and their border for Python (tools/plan/search/linear_program.py).
#include "linear_program.h"

namespace telechat {

#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
void subtract(double* to, const double* from, double k, size_t n) {
  for (size_t j = 0; j < n; ++j) to[j] -= k * from[j];
}

}  // namespace telechat

#define EXPORT extern "C" __attribute__((visibility("default")))

using telechat::LinearProgram;

EXPORT void* telechat_lp_new(int32_t columns, const double* cost, const double* upper) {
  return new LinearProgram({cost, cost + columns}, std::vector<double>(columns, 0.0), {upper, upper + columns});
}

EXPORT void telechat_lp_delete(void* program) { delete static_cast<LinearProgram*>(program); }

// Adds row `number`: a x <= b.
EXPORT void telechat_lp_add(void* program, int32_t columns, const double* a, double b, int64_t number) {
  static_cast<LinearProgram*>(program)->add({a, a + columns}, b, number);
}

EXPORT void telechat_lp_bound(void* program, int32_t column, double low, double high) {
  static_cast<LinearProgram*>(program)->bound(column, low, high);
}

EXPORT void telechat_lp_shrink(void* program) { static_cast<LinearProgram*>(program)->shrink(); }

// Solves; writes the variables and a multiplier for each row. Returns 0 at the optimum, 1 where nothing is feasible, 2 after
// `pivots` pivots.
EXPORT int32_t telechat_lp_solve(void* program, int32_t pivots, int32_t columns, double* x, double* multipliers) {
  auto& p = *static_cast<LinearProgram*>(program);
  const int status = p.solve(pivots);
  for (int v = 0; v < columns; ++v) x[v] = p.x(v);
  p.multipliers([&](int64_t number, double y) { multipliers[number] = y; });
  return status;
}
