#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

constexpr int64_t kQueries = 128;  // of a block at most

// A head's rows of an operand.
struct HeadRows {
  const float* x;
  int64_t ld, width;
};

// Keys of a chunk that a block's queries see: query i those from low[i] to own + i. `low` has kQueries values, those behind
// the last query's are the largest integer.
struct Seen {
  int64_t queries, keys, own;
  const int32_t* low;
};

// What a chunk of keys gives to a block of queries of one head. `q` is packed; rows of `out` are added to, as they are with
// the highest score so far (`top`, not yet scaled) and the sum of exponentials (`sum`).
struct ForwardPart {
  Seen seen;
  const float* q;
  HeadRows k, v;
  float scale;
  bool round;     // probabilities to bfloat16
  float* scores;  // memory for kQueries values of each key
  float *top, *sum, *out;
  int64_t ld_out;
};

// The same backward: to dq, dk and dv, whose rows are apart like those of q, k and v, is added.
struct BackwardPart {
  Seen seen;
  const float *packed_q, *packed_do, *lse, *delta;
  HeadRows q, k, v, d_out;
  float scale;
  bool round;   // probabilities and scores' gradients to bfloat16
  float *p, *ds;  // memory for kScoresApart values of each key
  float *dq, *dk, *dv;
};
constexpr int64_t kScoresApart = kQueries + 16;  // a power of two would keep all keys' scores in few sets of the cache

struct AttentionKernels {
  // Rows of queries as `q` and `packed_do` are, at most kQueries: kQueries * width values.
  void (*pack)(const HeadRows& x, int64_t rows, float* out);
  void (*forward)(const ForwardPart& part);
  void (*backward)(const BackwardPart& part);
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
