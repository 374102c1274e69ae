#include "adamw.h"

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

void update(float* w, float* m, float* v, const float* g, int64_t n, AdamScalars s) {
  const V b1 = splat(s.beta1), c1 = splat(1 - s.beta1), b2 = splat(s.beta2), c2 = splat(1 - s.beta2);
  const V rate = splat(s.rate), epsilon = splat(s.epsilon), decay = splat(s.decay), clip = splat(s.clip);
  for (int64_t i = 0; i < n; i += W) {
    const int rest = n - i < W ? static_cast<int>(n - i) : W;
    const V gradient = load_n(g + i, rest) * clip;
    const V first = fma(c1, gradient, b1 * load_n(m + i, rest));
    const V second = fma(c2 * gradient, gradient, b2 * load_n(v + i, rest));
    const V weight = load_n(w + i, rest);
    const V step = fma(decay, weight, first / (sqrt_v(second) + epsilon));
    store_n(m + i, first, rest);
    store_n(v + i, second, rest);
    store_n(w + i, weight - rate * step, rest);
  }
}

double square_sum(const float* x, int64_t n) {
  double total = 0;
  while (n > 0) {  // fp32 over 1024 values, fp64 over these
    const int64_t size = n < 1024 ? n : 1024;
    V sum[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W) {
      for (int j = 0; j < 4; j++) {
        const V y = load(x + i + j * W);
        sum[j] = fma(y, y, sum[j]);
      }
    }
    for (; i < size; i += W) {
      const V y = load_n(x + i, size - i < W ? static_cast<int>(size - i) : W);
      sum[0] = fma(y, y, sum[0]);
    }
    total += sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    x += size;
    n -= size;
  }
  return total;
}

}  // namespace

extern const AdamKernels adam;
const AdamKernels adam = {update, square_sum};

}  // namespace telechat::SIMD_NS
