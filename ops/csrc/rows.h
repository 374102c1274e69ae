// What the mixture-of-experts operators do to rows between products.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct RowKernels {
  // y = sum over k, in order, of weight[k] * x[k]; a null row counts as zeros.
  void (*weighted_sum)(const float* const* x, const float* weight, int64_t k, int64_t n, float* y);
  // y = w * x, and the product of x with z.
  float (*scale_dot)(const float* x, const float* z, float w, int64_t n, float* y);
  void (*swiglu)(const float* gate, const float* up, int64_t n, float* y);
  void (*swiglu_grad)(const float* gate, const float* up, const float* dy, int64_t n, float* dgate, float* dup);
};

}  // namespace telechat

TELECHAT_DECLARE(RowKernels, row_kernels)
