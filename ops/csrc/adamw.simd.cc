#include "adamw.h"

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

constexpr int64_t kAhead = 96;  // values; the processor alone does not keep up with four streams

void update(float* w, float* m, float* v, const float* g, int64_t n, AdamScalars s) {
  const V b1 = splat(s.beta1), n1 = splat(s.new1), b2 = splat(s.beta2), n2 = splat(s.new2);
  const V rate = splat(s.rate), epsilon = splat(s.epsilon), decay = splat(s.decay), clip = splat(s.clip);
  const auto step = [&](V& weight, V& first, V& second, V gradient) {
    gradient *= clip;
    first = fma(n1, gradient, b1 * first);
    second = fma(n2 * gradient, gradient, b2 * second);
    weight -= rate * fma(decay, weight, first / (sqrt_v(second) + epsilon));
  };
  const auto part = [&](int64_t i, int64_t count) {
    const int some = static_cast<int>(count);
    V weight = load_n(w + i, some), first = load_n(m + i, some), second = load_n(v + i, some);
    step(weight, first, second, load_n(g + i, some));
    store_n(w + i, weight, some);
    store_n(m + i, first, some);
    store_n(v + i, second, some);
  };
  int64_t i = until_aligned(w, n);
  if (i > 0) part(0, i);
  for (; i + 2 * W <= n; i += 2 * W) {
#pragma GCC unroll 2
    for (int64_t at = i; at < i + 2 * W; at += W) {
      __builtin_prefetch(w + at + kAhead);
      __builtin_prefetch(m + at + kAhead);
      __builtin_prefetch(v + at + kAhead);
      __builtin_prefetch(g + at + kAhead);
      V weight = load(w + at), first = load(m + at), second = load(v + at);
      step(weight, first, second, load(g + at));
      store(w + at, weight);
      store(m + at, first);
      store(v + at, second);
    }
  }
  for (; i < n; i += W) part(i, n - i < W ? n - i : W);
}

double square_sum(const float* x, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += 1024) {  // fp32 over 1024 values, fp64 over these
    const int64_t end = begin + 1024 < n ? begin + 1024 : n;
    V sum[4] = {};
    int64_t i = begin;
    for (; i + 4 * W <= end; i += 4 * W) {
      for (int j = 0; j < 4; j++) {
        __builtin_prefetch(x + ahead(i + j * W));
        const V y = load(x + i + j * W);
        sum[j] = fma(y, y, sum[j]);
      }
    }
    for (; i < end; i += W) {
      const V y = load_n(x + i, end - i < W ? static_cast<int>(end - i) : W);
      sum[0] = fma(y, y, sum[0]);
    }
    total += sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  return total;
}

}  // namespace

extern const AdamKernels adam;
const AdamKernels adam = {update, square_sum};

}  // namespace telechat::SIMD_NS
