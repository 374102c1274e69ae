#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct AdamScalars {
  float rate, epsilon, decay, clip;
  float beta1, beta2, new1, new2;  // new = 1 - beta, which fp32 would round at the wrong place
};

struct AdamKernels {
  void (*update)(float* w, float* m, float* v, const float* g, int64_t n, AdamScalars s);
  double (*square_sum)(const float* x, int64_t n);
};

}  // namespace telechat

TELECHAT_DECLARE(AdamKernels, adam)
