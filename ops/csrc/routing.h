// Scores of the router.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct ScoreKernels {
  void (*sigmoid)(const float* x, int64_t n, float* y);
  void (*sigmoid_grad)(const float* y, const float* dy, int64_t n, float* dx);
  void (*softmax)(const float* x, int64_t n, float* y);
  void (*softmax_grad)(const float* y, const float* dy, int64_t n, float* dx);
};

}  // namespace telechat

TELECHAT_DECLARE(ScoreKernels, score_kernels)
