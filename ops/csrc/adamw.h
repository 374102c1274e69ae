#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct AdamScalars {
  float rate, epsilon, decay, beta1, beta2, clip;
};

struct AdamKernels {
  void (*update)(float* w, float* m, float* v, const float* g, int64_t n, AdamScalars s);
  double (*square_sum)(const float* x, int64_t n);
};

}  // namespace telechat

TELECHAT_DECLARE(AdamKernels, adam)
