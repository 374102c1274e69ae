#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct AttentionKernels {
  // Columns [low, high) of a row of scores become exp(scale * (score - top)), with top = max(old top, their maximum);
  // the others become zero. Returns the sum; `top` is in units of unscaled scores.
  float (*softmax)(float* score, int64_t n, int64_t low, int64_t high, float scale, float* top);
  // Columns [low, high) become exp(scale * score - lse), the others zero.
  void (*probabilities)(float* score, int64_t n, int64_t low, int64_t high, float scale, float lse);
  // d = scale * p * (d - delta), n columns.
  void (*score_gradient)(const float* p, float* d, int64_t n, float delta, float scale);
  void (*scale)(float* x, int64_t n, float factor);
  void (*add)(float* x, const float* y, int64_t n);
  float (*dot)(const float* x, const float* y, int64_t n);
  // Rotate pairs by (cos, sin): neighbours where `interleaved`, else the two halves; y holds all first members, then all
  // second members. `back` undoes it.
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t half, bool interleaved, float* y);
  void (*rotate_back)(const float* y, const float* cos, const float* sin, int64_t half, bool interleaved, float* x);
};

}  // namespace telechat

TELECHAT_DECLARE(AttentionKernels, attention)
