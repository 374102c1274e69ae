#include "routing.h"

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

void sigmoid(const float* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += W) store_n(y + i, sigmoid_v(load_n(x + i, lanes(n - i))), lanes(n - i));
}

void sigmoid_grad(const float* y, const float* dy, int64_t n, float* dx) {
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    const V s = load_n(y + i, rest);
    store_n(dx + i, load_n(dy + i, rest) * s * (splat(1.0f) - s), rest);
  }
}

void softmax(const float* x, int64_t n, float* y) {
  V top = splat(-__builtin_inff());
  for (int64_t i = 0; i < n; i += W) {
    V v = load_n(x + i, lanes(n - i));
    for (int j = lanes(n - i); j < W; j++) v[j] = x[i];
    top = max_nan(top, v);
  }
  const V high = splat(max_lanes(top));
  V sum = {};
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    store_n(y + i, exp_v(load_n(x + i, rest) - high), rest);
    sum += load_n(y + i, rest);
  }
  const V total = splat(sum_lanes(sum));
  for (int64_t i = 0; i < n; i += W) store_n(y + i, load_n(y + i, lanes(n - i)) / total, lanes(n - i));
}

void softmax_grad(const float* y, const float* dy, int64_t n, float* dx) {
  V sum = {};
  for (int64_t i = 0; i < n; i += W) sum = fma(load_n(y + i, lanes(n - i)), load_n(dy + i, lanes(n - i)), sum);
  const V mean = splat(sum_lanes(sum));
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    store_n(dx + i, load_n(y + i, rest) * (load_n(dy + i, rest) - mean), rest);
  }
}

}  // namespace

extern const ScoreKernels score_kernels;
const ScoreKernels score_kernels = {sigmoid, sigmoid_grad, softmax, softmax_grad};

}  // namespace telechat::SIMD_NS
