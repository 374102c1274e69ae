#include "rows.h"

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

void weighted_sum(const float* const* x, const float* weight, int64_t k, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    V sum = {};
    for (int64_t j = 0; j < k; j++) {
      if (x[j]) sum = fma(splat(weight[j]), load_n(x[j] + i, rest), sum);
    }
    store_n(y + i, sum, rest);
  }
}

float scale_dot(const float* x, const float* z, float w, int64_t n, float* y) {
  V sum[2] = {};
  int which = 0;
  for (int64_t i = 0; i < n; i += W, which ^= 1) {
    const int rest = lanes(n - i);
    const V value = load_n(x + i, rest);
    sum[which] = fma(value, load_n(z + i, rest), sum[which]);
    store_n(y + i, splat(w) * value, rest);
  }
  return sum_lanes(sum[0] + sum[1]);
}

void swiglu(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    const V g = load_n(gate + i, rest);
    store_n(y + i, g * sigmoid_v(g) * load_n(up + i, rest), rest);
  }
}

void swiglu_grad(const float* gate, const float* up, const float* dy, int64_t n, float* dgate, float* dup) {
  const V one = splat(1.0f);
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    const V g = load_n(gate + i, rest), d = load_n(dy + i, rest);
    const V s = sigmoid_v(g);
    const V du = d * g * s;
    const V dg = d * load_n(up + i, rest) * s * fma(g, one - s, one);
    store_n(dgate + i, dg, rest);
    store_n(dup + i, du, rest);
  }
}

}  // namespace

extern const RowKernels row_kernels;
const RowKernels row_kernels = {weighted_sum, scale_dot, swiglu, swiglu_grad};

}  // namespace telechat::SIMD_NS
