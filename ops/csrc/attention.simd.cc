#include "attention.h"

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

void zero(float* x, int64_t n) {
  if (n > 0) std::memset(x, 0, static_cast<size_t>(n) * sizeof(float));
}

float softmax(float* score, int64_t n, int64_t low, int64_t high, float scale, float* top) {
  zero(score, low);
  if (high < n) zero(score + high, n - high);
  float* x = score + low;
  const int64_t count = high - low;
  if (count <= 0) return 0;
  const V none = splat(-__builtin_inff());
  V best[2] = {none, none};
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    best[0] = max_fast(best[0], load(x + i));
    best[1] = max_fast(best[1], load(x + i + W));
  }
  for (; i < count; i += W) best[0] = max_fast(best[0], first_lanes(load_n(x + i, lanes(count - i)), lanes(count - i), none));
  const float higher = max_lanes(max_fast(best[0], best[1]));
  if (higher > *top) *top = higher;
  const V factor = splat(scale), shift = splat(-scale * *top);
  V sum[2] = {};
  i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    for (int j = 0; j < 2; j++) {
      const V e = exp_v(fma(load(x + i + j * W), factor, shift));
      store(x + i + j * W, e);
      sum[j] += e;
    }
  }
  for (; i < count; i += W) {
    const int rest = lanes(count - i);
    const V e = exp_v(fma(load_n(x + i, rest), factor, shift));
    store_n(x + i, e, rest);
    sum[0] += first_lanes(e, rest, V{});
  }
  return sum_lanes(sum[0] + sum[1]);
}

void probabilities(float* score, int64_t n, int64_t low, int64_t high, float scale, float lse) {
  if (high < low) high = low;
  zero(score, low);
  if (high < n) zero(score + high, n - high);
  const V factor = splat(scale), shift = splat(-lse);
  int64_t i = low;
  for (; i + W <= high; i += W) store(score + i, exp_v(fma(load(score + i), factor, shift)));
  if (i < high) {
    const int rest = lanes(high - i);
    store_n(score + i, exp_v(fma(load_n(score + i, rest), factor, shift)), rest);
  }
}

void score_gradient(const float* p, float* d, int64_t n, float delta, float scale) {
  const V minus = splat(delta), factor = splat(scale);
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    store_n(d + i, load_n(p + i, rest) * (load_n(d + i, rest) - minus) * factor, rest);
  }
}

void scale_by(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    store_n(x + i, load_n(x + i, rest) * splat(factor), rest);
  }
}

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    store_n(x + i, load_n(x + i, rest) + load_n(y + i, rest), rest);
  }
}

float dot(const float* x, const float* y, int64_t n) {
  V sum = {};
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    sum = fma(load_n(x + i, rest), load_n(y + i, rest), sum);
  }
  return sum_lanes(sum);
}

void rotate(const float* x, const float* cos, const float* sin, int64_t half, bool interleaved, float* y) {
  for (int64_t i = 0; i < half; i++) {
    const float a = interleaved ? x[2 * i] : x[i], b = interleaved ? x[2 * i + 1] : x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = b * cos[i] + a * sin[i];
  }
}

void rotate_back(const float* y, const float* cos, const float* sin, int64_t half, bool interleaved, float* x) {
  for (int64_t i = 0; i < half; i++) {
    const float a = y[i] * cos[i] + y[half + i] * sin[i], b = y[half + i] * cos[i] - y[i] * sin[i];
    x[interleaved ? 2 * i : i] = a;
    x[interleaved ? 2 * i + 1 : half + i] = b;
  }
}

}  // namespace

extern const AttentionKernels attention;
const AttentionKernels attention = {softmax, probabilities, score_gradient, scale_by, add, dot, rotate, rotate_back};

}  // namespace telechat::SIMD_NS
