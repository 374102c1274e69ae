#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

// log-sum-exp of a row as its maximum and the rest: their sum would round away what large logits differ by.
struct LogSumExp {
  float top, rest;
};

struct CrossEntropyKernels {
  LogSumExp (*log_sum_exp)(const float* x, int64_t n);  // one pass over x
  // dx = factor * exp(x - top - rest); the caller takes its share off at the label.
  // `past`: dx goes past the caches.
  void (*softmax)(const float* x, int64_t n, LogSumExp lse, float factor, float* dx, bool past);
};

}  // namespace telechat

TELECHAT_DECLARE(CrossEntropyKernels, cross_entropy)
