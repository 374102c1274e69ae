#include "cross_entropy.h"

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

// Online log-sum-exp (Milakov and Gimelshein 2018), a block at a time: the block stays in cache between its maximum and
// its sum, so that memory is read once; the next block is on its way meanwhile.
constexpr int64_t kBlock = kStream;

float block_max(const float* x, int64_t n) {
  V top[4];
  for (V& t : top) t = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    for (int j = 0; j < 4; j++) top[j] = max_fast(top[j], load(x + i + j * W));
  }
  for (; i + W <= n; i += W) top[0] = max_fast(top[0], load(x + i));
  float best = max_lanes(max_fast(max_fast(top[0], top[1]), max_fast(top[2], top[3])));
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  return best;
}

float block_sum(const float* x, int64_t n, float top) {
  const V shift = splat(top);
  V sum[2] = {};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    for (int j = 0; j < 2; j++) {
      __builtin_prefetch(x + ahead(i + j * W));
      sum[j] += exp_v(load(x + i + j * W) - shift);
    }
  }
  for (; i + W <= n; i += W) sum[0] += exp_v(load(x + i) - shift);
  float total = sum_lanes(sum[0] + sum[1]);
  if (i < n) {
    float rest[W];
    store(rest, exp_v(load_n(x + i, static_cast<int>(n - i)) - shift));
    for (int64_t j = 0; j < n - i; j++) total += rest[j];
  }
  return total;
}

LogSumExp log_sum_exp(const float* x, int64_t n) {
  float top = -__builtin_inff(), sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = n - begin < kBlock ? n - begin : kBlock;
    const float higher = block_max(x + begin, size);
    if (higher > top) {
      sum *= __builtin_expf(top - higher);
      top = higher;
    }
    sum += block_sum(x + begin, size, top > -__builtin_inff() ? top : 0.0f);  // NaN in x comes out here
  }
  return {top, __builtin_logf(sum)};
}

void softmax(const float* x, int64_t n, LogSumExp lse, float factor, float* dx, bool past) {
  const V top = splat(lse.top), rest = splat(lse.rest), scale = splat(factor);
  const auto part = [&](int64_t i, int64_t count) {
    const int some = static_cast<int>(count);
    store_n(dx + i, exp_v(load_n(x + i, some) - top - rest) * scale, some);
  };
  int64_t i = until_aligned(dx, n);
  if (i > 0) part(0, i);
  for (; i + W <= n; i += W) {
    __builtin_prefetch(x + ahead(i));
    const V y = exp_v(load(x + i) - top - rest) * scale;
    if (past) {
      store_past(dx + i, y);
    } else {
      __builtin_prefetch(dx + ahead(i), 1);
      store(dx + i, y);
    }
  }
  if (i < n) part(i, n - i);
  if (past) flush_past();
}

}  // namespace

extern const CrossEntropyKernels cross_entropy;
const CrossEntropyKernels cross_entropy = {log_sum_exp, softmax};

}  // namespace telechat::SIMD_NS
