// The inner loop of linear programs.
#include "linear_program.h"

namespace telechat {

#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
void subtract(double* to, const double* from, double k, size_t n) {
  for (size_t j = 0; j < n; ++j) to[j] -= k * from[j];
}

}  // namespace telechat
