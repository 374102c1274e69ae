#include "cast.h"
#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

void to_bf16(const float* x, uint16_t* y, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store_bf16(y + i, load(x + i));
  if (i < n) store_bf16_n(y + i, load_n(x + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

void round_bf16(const float* x, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(y + i, SIMD_NS::round_bf16(load(x + i)));
  if (i < n) store_n(y + i, SIMD_NS::round_bf16(load_n(x + i, static_cast<int>(n - i))), static_cast<int>(n - i));
}

}  // namespace

extern const CastKernels casts;
const CastKernels casts = {to_bf16, round_bf16};

}  // namespace telechat::SIMD_NS
