#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct CrossEntropyKernels {
  float (*log_sum_exp)(const float* x, int64_t n);  // one pass over x
  // dx = factor * exp(x - lse); the caller takes `factor of the label` off at the label.
  void (*softmax)(const float* x, int64_t n, float lse, float factor, float* dx);
};

}  // namespace telechat

TELECHAT_DECLARE(CrossEntropyKernels, cross_entropy)
