// Rounding fp32 to bfloat16.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct CastKernels {
  void (*to_bf16)(const float* x, uint16_t* y, int64_t n);
  void (*round_bf16)(const float* x, float* y, int64_t n);  // the same values, kept as fp32
};

}  // namespace telechat

TELECHAT_DECLARE(CastKernels, casts)
