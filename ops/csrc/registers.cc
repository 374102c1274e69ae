#include "registers.h"

#include "pool.h"

TELECHAT_SELECT(telechat::RegisterKernels, registers)

// For benchmarks: every thread multiplies and adds in registers; returns the number of operations of all.
extern "C" int64_t telechat_multiply_adds(int64_t rounds) {
  using namespace telechat;
  const int64_t n = threads();
  parallel_for(n, [&](int64_t) {
    volatile float kept = registers().multiply_adds(rounds);
    static_cast<void>(kept);
  });
  return n * rounds * registers().flops;
}
