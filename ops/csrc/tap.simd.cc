#include "tap.h"

#include <cstring>

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

#if defined(__AVX512F__)
constexpr int L = 8;  // lanes that are taken together
#else
constexpr int L = 4;
#endif
typedef float F __attribute__((vector_size(L * 4)));
typedef uint32_t U __attribute__((vector_size(L * 4)));
typedef double D __attribute__((vector_size(L * 8)));
typedef uint64_t Q __attribute__((vector_size(L * 8)));

template <typename T>
inline T at(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

#if defined(__AVX512F__)  // g++ 12 makes four shuffles of each of these
inline D doubles(const float* x) { return (D)_mm512_cvtps_pd(_mm256_loadu_ps(x)); }
inline Q bits_of(const float* x) { return (Q)_mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i*)x)); }
#else
inline D doubles(const float* x) { return __builtin_convertvector(at<F>(x), D); }
inline Q bits_of(const float* x) { return __builtin_convertvector(at<U>(x), Q); }
#endif

inline void take(const float* x, D sign, Q odd, D& total, D& square, Q& check) {
  const D d = doubles(x);
  total += d * sign;
  square += d * d;
  Q mixed = bits_of(x) * 0x9E3779B97F4A7C15ull;
  mixed ^= mixed >> 32;
  check += mixed * odd;
}

template <typename V>
inline auto sum_of(V v) {
  auto sum = v[0];
  for (int j = 1; j < L; j++) sum += v[j];
  return sum;
}

// Sixteen lanes at a time through all rows of B blocks: their sums stay in registers, and B blocks use what is loaded of
// the tables. What lies behind is prefetched meanwhile: a processor does not foresee this way through memory.
template <int B>
void blocks(const float* x, const TapPlaces& places, TapSums& out) {
  D square[2] = {};
  Q check[B] = {};
  const float* ahead = x + B * kBlock;
  for (int64_t lane = 0; lane < kEven; lane += 2 * L) {
    D total[B][2] = {};
    for (int64_t i = lane; i < kBlock; i += kBuckets) {
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) __builtin_prefetch(ahead + b * kBlock, 0, 2);
      ahead += 16;
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) {
        const D sign = at<D>(places.signs + i + g * L);
        const Q odd = at<Q>(places.odds + i + g * L);
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) take(x + b * kBlock + i + g * L, sign, odd, total[b][g], square[g], check[b]);
      }
    }
    for (int b = 0; b < B; b++) std::memcpy(&out.lanes[b][lane], total[b], sizeof total[b]);
  }
  for (int b = 0; b < B; b++) {
    float last[kRows];
    for (int64_t r = 0; r < kRows; r++) last[r] = x[b * kBlock + r * kBuckets + kEven];
    D total = {};
    for (int64_t r = 0; r < kRows; r += L) {
      take(last + r, at<D>(places.last_signs + r), at<Q>(places.last_odds + r), total, square[0], check[b]);
    }
    out.lanes[b][kEven] = sum_of(total);
    out.checks[b] = sum_of(check[b]);
  }
  out.squares = sum_of(square[0] + square[1]);
}

}  // namespace

extern const TapKernels tap_kernels;
const TapKernels tap_kernels = {blocks<kGroup>, blocks<1>};

}  // namespace telechat::SIMD_NS
