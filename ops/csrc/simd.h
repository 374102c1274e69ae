// Vectors of fp32 of whatever width the instruction set has; include only in *.simd.cc files.
//
// All arithmetic is written on whole vectors; a row's tail is loaded with zeros behind it and stored in part, so an
// element's result does not depend on where it stands.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef SIMD_NS
#error "compile *.simd.cc files through ops/build.py"
#endif

namespace telechat::SIMD_NS {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));
typedef uint16_t VH __attribute__((vector_size(W * 2)));

static inline V splat(float x) { return x - V{}; }  // not 0 + x: that is an addition, and -0 becomes 0
static inline VI splat_i(int32_t x) { return VI{} + x; }

static inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
// Past the caches; p is aligned to the vector. Call `flush_past` before another thread may read it.
static inline void store_past(float* p, V v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#else
  store(p, v);
#endif
}
static inline void flush_past() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
static inline __m256i first_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif
// n in [0, W]: the first n lanes, zeros behind.
static inline V load_n(const float* p, int n) {
#if defined(__AVX512F__)
  return (V)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
#elif defined(__AVX2__)
  return (V)_mm256_maskload_ps(p, first_mask(n));
#else
  V v = {};
  __builtin_memcpy(&v, p, static_cast<size_t>(n) * 4);
  return v;
#endif
}
static inline void store_n(float* p, V v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(p, first_mask(n), (__m256)v);
#else
  __builtin_memcpy(p, &v, static_cast<size_t>(n) * 4);
#endif
}

// Values before the first address at which vectors do not cross cache lines, at most n. For element-wise
// loops only; sums would depend on where a tensor lies.
static inline int64_t until_aligned(const float* p, int64_t n) {
  const int64_t head = static_cast<int64_t>(-(reinterpret_cast<uintptr_t>(p) / sizeof(float)) % W);
  return head < n ? head : n;
}

// Where to prefetch from while the values at `i` are computed: a block ahead, and in its four pages by turns, because a
// processor follows each page's stream by itself and one stream does not fill the path to memory.
constexpr int64_t kStream = 4096;
static inline int64_t ahead(int64_t i) {
  const int64_t line = i % kStream / W;
  return i / kStream * kStream + kStream + line % 4 * (kStream / 4) + line / 4 * W;
}

static inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

static inline V select(VI mask, V yes, V no) { return (V)(((VI)yes & mask) | ((VI)no & ~mask)); }
static inline int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int lanes(int64_t left) { return left < W ? static_cast<int>(left) : W; }
// Lanes behind the n-th are those of `other`.
static inline V first_lanes(V v, int n, V other) {
  VI lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return select(lane < splat_i(n), v, other);
}
// As NumPy: a NaN on either side gives NaN.
static inline V max_nan(V a, V b) { return select((a >= b) | (a != a), a, b); }
static inline V min_nan(V a, V b) { return select((a <= b) | (a != a), a, b); }
// Not for NaN.
static inline V max_fast(V a, V b) {
#if defined(__AVX512F__)
  return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (V)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}
static inline V sqrt_v(V a) {
#if defined(__AVX512F__)
  return (V)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
  return (V)_mm256_sqrt_ps((__m256)a);
#else
  V r;
  for (int i = 0; i < W; i++) r[i] = __builtin_sqrtf(a[i]);
  return r;
#endif
}

// Pairwise in a fixed order.
static inline float sum_lanes(V v) {
  float x[W];
  std::memcpy(x, &v, sizeof v);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  }
  return x[0];
}
static inline float max_lanes(V v) {
  float x[W];
  std::memcpy(x, &v, sizeof v);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) x[i] = x[i] >= x[i + half] || x[i] != x[i] ? x[i] : x[i + half];
  }
  return x[0];
}

// Hide a sum from the compiler, which would cancel what is added and subtracted.
static inline void keep(V& y) {
#if defined(__x86_64__)
  asm("" : "+x"(y));
#elif defined(__aarch64__)
  asm("" : "+w"(y));
#endif
}
static inline V round_even(V x) {  // |x| < 2^22
  V magic = splat(12582912.0f);
  V y = x + magic;
  keep(y);
  return y - magic;
}

// e^x, at most 1.2 ulp off, 0.9 with fused multiply-add; below -103.97 zero, above 88.72 infinity, NaN stays.
static inline V exp_v(V x) {
  // Minimum and maximum give their second operand where one is NaN.
#if defined(__AVX512F__)
  V clamped = (V)_mm512_min_ps((__m512)splat(89.0f), _mm512_max_ps((__m512)splat(-105.0f), (__m512)x));
#elif defined(__AVX2__)
  V clamped = (V)_mm256_min_ps((__m256)splat(89.0f), _mm256_max_ps((__m256)splat(-105.0f), (__m256)x));
#else
  V clamped = select(x > splat(89.0f), splat(89.0f), x);
  clamped = select(clamped < splat(-105.0f), splat(-105.0f), clamped);
#endif
  const V magic = splat(12582912.0f);  // its last bits are the integer that was added
  V y = fma(clamped, splat(1.44269504088896341f), magic);
  keep(y);
  const V n = y - magic;
  V r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  V p = splat(1.3814598788e-3f);  // minimax for |r| < ln 2 / 2
  p = fma(p, r, splat(8.3687165752e-3f));
  p = fma(p, r, splat(4.1668388993e-2f));
  p = fma(p, r, splat(1.6666521132e-1f));
  p = fma(p, r, splat(4.9999994040e-1f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return (V)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // 2^n in two factors, so that results beyond the normal range come out right.
  const VU i = (VU)y - 0x4b400000u, half = (VU)((VI)i >> 1);
  return p * (V)((half + 127u) << 23) * (V)((i - half + 127u) << 23);
#endif
}

// ln x, at most 2 ulp off; 0 gives -infinity, negative NaN, denormals are handled.
static inline V log_v(V x) {
#if defined(__AVX512F__)
  V m = (V)_mm512_getmant_ps((__m512)x, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_nan);
  V fe = (V)_mm512_getexp_ps((__m512)x) + splat(1.0f);
  const V low = select(m < splat(0.707106781f), splat(1.0f), splat(0.0f));
  m = fma(m, low, m) - splat(1.0f);
  fe = fe - low;
#else
  V tiny = splat(1.17549435e-38f);
  VI small = x < tiny;
  V scaled = select(small, x * splat(8388608.0f), x);
  VI bits = (VI)scaled;
  VI e = ((bits >> 23) & 0xff) - 126;
  V m = (V)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  VI low = m < splat(0.707106781f);
  m = select(low, m + m, m) - splat(1.0f);
  V fe = __builtin_convertvector(e, V) - select(low, splat(1.0f), splat(0.0f)) - select(small, splat(23.0f), splat(0.0f));
#endif
  V z = m * m;
  V p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  V y = p * m * z;
  y = fma(fe, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  V r = m + y;
  r = fma(fe, splat(0.693359375f), r);
#if defined(__AVX512F__)  // zero and infinity: their exponent is infinite
  return (V)_mm512_mask_add_ps((__m512)r, _mm512_fpclass_ps_mask((__m512)fe, 0x18), (__m512)fe, (__m512)m);
#else
  r = select(x == splat(__builtin_inff()), x, r);
  r = select(x == splat(0.0f), splat(-__builtin_inff()), r);
  return select((x < splat(0.0f)) | (x != x), splat(__builtin_nanf("")), r);
#endif
}

static inline V sigmoid_v(V x) { return splat(1.0f) / (splat(1.0f) + exp_v(-x)); }

// Swap the off-diagonal squares of STEP rows and columns; the masks must be constants, or they would be built each time.
template <int STEP> static inline __attribute__((always_inline)) void turn_squares(V (&row)[W]) {
  static constexpr int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  VI lane;
  std::memcpy(&lane, kLane, sizeof lane);
  const VI odd = (lane & STEP) != 0, upper = lane + (odd & (W - STEP)), lower = lane + STEP + (odd & (W - STEP));
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & STEP) continue;
    const V a = row[i], b = row[i + STEP];
    row[i] = __builtin_shuffle(a, b, upper);
    row[i + STEP] = __builtin_shuffle(a, b, lower);
  }
}

// A square of `rows` stored rows of `columns` values, zero beyond, turned over the diagonal into rows `to` apart.
static inline __attribute__((always_inline)) void turn(const float* x, int64_t ld, int64_t rows, int64_t columns, float* out,
                                                       int64_t to) {
  V row[W];
  if (rows >= W && columns >= W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) row[i] = load(x + i * ld);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) row[i] = i < rows ? load_n(x + i * ld, lanes(columns)) : V{};
  }
  turn_squares<1>(row);
  turn_squares<2>(row);
  if constexpr (W > 4) turn_squares<4>(row);
  if constexpr (W > 8) turn_squares<8>(row);
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i < columns) store(out + i * to, row[i]);
  }
}

// bfloat16, round to nearest even; NaN stays NaN.
static inline V from_bf16(VH h) { return (V)(__builtin_convertvector(h, VU) << 16); }
static inline VU bf16_bits(V v) {
  VU u = (VU)v;
  VU rounded = u + 0x7fffu + ((u >> 16) & 1u);
  VU nan = (u & 0x7fffffffu) > 0x7f800000u ? (u | 0x00400000u) : rounded;
  return nan >> 16;
}
static inline VH to_bf16(V v) { return __builtin_convertvector(bf16_bits(v), VH); }
static inline V round_bf16(V v) { return (V)(bf16_bits(v) << 16); }
static inline V load_bf16(const uint16_t* p) {
  VH h;
  std::memcpy(&h, p, sizeof h);
  return from_bf16(h);
}
static inline V load_bf16_n(const uint16_t* p, int n) {
  VH h = {};
  __builtin_memcpy(&h, p, static_cast<size_t>(n) * 2);
  return from_bf16(h);
}
static inline void store_bf16(uint16_t* p, V v) {
  VH h = to_bf16(v);
  std::memcpy(p, &h, sizeof h);
}
static inline void store_bf16_n(uint16_t* p, V v, int n) {
  VH h = to_bf16(v);
  __builtin_memcpy(p, &h, static_cast<size_t>(n) * 2);
}

// IEEE half precision, round to nearest even.
static inline V from_half(VH h) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (V)_mm256_cvtph_ps((__m128i)h);
#else
  const VU x = __builtin_convertvector(h, VU);
  const VU sign = (x & 0x8000u) << 16, body = x & 0x7fffu;
  const V normal = (V)((body << 13) + (112u << 23));
  const V tiny = __builtin_convertvector((VI)body, V) * splat(5.9604644775390625e-8f);
  const V special = (V)((body << 13) | 0x7f800000u);
  const V y = select((VI)body < 0x0400, tiny, select((VI)body >= 0x7c00, special, normal));
  return (V)((VU)y | sign);
#endif
}
static inline VH to_half(V v) {
#if defined(__AVX512F__)
  return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  return (VH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
  const VU x = (VU)v;
  const VU sign = (x >> 16) & 0x8000u, body = x & 0x7fffffffu;
  const VU normal = (body - (112u << 23) + 0x0fffu + ((body >> 13) & 1u)) >> 13;
  const VU tiny = (VU)((V)body + splat(0.5f)) - 0x3f000000u;  // adding 0.5 rounds at half's last denormal bit
  const VU special = (VU)((VI)body > 0x7f800000 ? (VI)((body >> 13) | 0x7e00u) & 0x7fff : (VI)(VU{} + 0x7c00u));
  const VU finite = (VI)body < 0x38800000 ? tiny : normal;
  const VU y = (VI)body >= 0x477ff000 ? special : finite;
  return __builtin_convertvector(y | sign, VH);
#endif
}

}  // namespace telechat::SIMD_NS
