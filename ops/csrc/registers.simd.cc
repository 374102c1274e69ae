#include "registers.h"

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

constexpr int kSums = 12;  // more than a processor has under way at once

float multiply_adds(int64_t rounds) {
  V sum[kSums], a = splat(0.999f), b = splat(1e-4f);
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i++) sum[i] = splat(static_cast<float>(i));
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i++) sum[i] = fma(a, sum[i], b);
  }
#pragma GCC unroll 16
  for (int i = 1; i < kSums; i++) sum[0] = sum[0] + sum[i];
  return sum_lanes(sum[0]);
}

}  // namespace

extern const RegisterKernels registers;
const RegisterKernels registers = {multiply_adds, 2 * kSums * W};

}  // namespace telechat::SIMD_NS
