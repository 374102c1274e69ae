// Every instruction once, over vectors of whatever width the instruction set has.
#include "dvm/handlers.h"
#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

using dvm::Args;

// bool is 1.0 or 0.0 in a register
V truth(VI mask) { return select(mask, splat(1.0f), splat(0.0f)); }

V tanh_v(V x) {
  const V y = select(x < splat(0.0f), -x, x);
  const V z = x * x;
  V p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const V small = fma(p * z, x, x);
  const V e = exp_v(y + y);
  const V big = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
  const V signed_big = select(x < splat(0.0f), -big, big);
  return select(y < splat(0.625f), small, select(x == x, signed_big, x));
}

template <typename F> V each(V x, F f) {
  V y;
  for (int i = 0; i < W; i++) y[i] = f(x[i]);
  return y;
}

VI whole(V x) { return __builtin_convertvector(x, VI); }
V is_large(V x) { return (V)(((VI)x & 0x7fffffff) >= 0x4b000000); }  // no fraction, or not finite

V rounded(V x, V towards) {  // keeps the sign of zero
  const V y = (V)(((VI)towards & 0x7fffffff) | ((VI)x & splat_i(static_cast<int32_t>(0x80000000u))));
  return select((VI)is_large(x), x, y);
}
V safe(V x) { return select((VI)is_large(x), splat(0.0f), x); }
V trunc_v(V x) { return rounded(x, __builtin_convertvector(whole(safe(x)), V)); }
V floor_v(V x) {
  const V t = __builtin_convertvector(whole(safe(x)), V);
  const V y = t - select(t > safe(x), splat(1.0f), splat(0.0f));
  return select((VI)is_large(x), x, select(y == splat(0.0f), rounded(x, y), y));
}
V ceil_v(V x) { return -floor_v(-x); }
V round_v(V x) { return rounded(x, round_even(safe(x))); }

#define UNARY(Name, expression) \
  struct Name {                 \
    static V f(V x) { return expression; }  \
  };
UNARY(NegOp, -x)
UNARY(AbsOp, (V)((VI)x & 0x7fffffff))
UNARY(SqrtOp, sqrt_v(x))
UNARY(RsqrtOp, splat(1.0f) / sqrt_v(x))
UNARY(ExpOp, exp_v(x))
UNARY(LogOp, log_v(x))
UNARY(ReciprocalOp, splat(1.0f) / x)
UNARY(FloorOp, floor_v(x))
UNARY(CeilOp, ceil_v(x))
UNARY(RoundOp, round_v(x))
UNARY(TruncOp, trunc_v(x))
UNARY(TanhOp, tanh_v(x))
UNARY(SigmoidOp, sigmoid_v(x))
UNARY(ErfOp, each(x, [](float y) { return __builtin_erff(y); }))
UNARY(IsFiniteOp, truth(((VI)x & 0x7fffffff) < 0x7f800000))
UNARY(NotOp, truth(x == splat(0.0f)))
UNARY(SinOp, each(x, [](float y) { return __builtin_sinf(y); }))
UNARY(CosOp, each(x, [](float y) { return __builtin_cosf(y); }))
UNARY(CopyOp, x)
UNARY(RoundBf16Op, round_bf16(x))
UNARY(RoundHalfOp, from_half(to_half(x)))
UNARY(ToIntOp, (V)whole(x))
UNARY(FromIntOp, __builtin_convertvector((VI)x, V))
UNARY(ToBoolOp, truth(x != splat(0.0f)))
UNARY(NegIntOp, (V)(-(VI)x))
UNARY(AbsIntOp, (V)(((VI)x < 0) ? -(VI)x : (VI)x))

#define BINARY(Name, expression) \
  struct Name {                  \
    static V f(V x, V y) { return expression; } \
  };
BINARY(AddOp, x + y)
BINARY(SubOp, x - y)
BINARY(MulOp, x* y)
BINARY(DivOp, x / y)
BINARY(MaximumOp, max_nan(x, y))
BINARY(MinimumOp, min_nan(x, y))
BINARY(EqualOp, truth(x == y))
BINARY(NotEqualOp, truth(x != y))
BINARY(LessOp, truth(x < y))
BINARY(LessEqualOp, truth(x <= y))
BINARY(GreaterOp, truth(x > y))
BINARY(GreaterEqualOp, truth(x >= y))
BINARY(AndOp, truth((x != splat(0.0f)) & (y != splat(0.0f))))
BINARY(OrOp, truth((x != splat(0.0f)) | (y != splat(0.0f))))
BINARY(ExpSubOp, exp_v(x - y))
BINARY(AddIntOp, (V)((VU)x + (VU)y))
BINARY(SubIntOp, (V)((VU)x - (VU)y))
BINARY(MulIntOp, (V)((VU)x * (VU)y))
BINARY(MaxIntOp, (V)((VI)x > (VI)y ? (VI)x : (VI)y))
BINARY(MinIntOp, (V)((VI)x < (VI)y ? (VI)x : (VI)y))
BINARY(EqualIntOp, truth((VI)x == (VI)y))
BINARY(NotEqualIntOp, truth((VI)x != (VI)y))
BINARY(LessIntOp, truth((VI)x < (VI)y))
BINARY(LessEqualIntOp, truth((VI)x <= (VI)y))
BINARY(GreaterIntOp, truth((VI)x > (VI)y))
BINARY(GreaterEqualIntOp, truth((VI)x >= (VI)y))
#define TERNARY(Name, expression) \
  struct Name {                   \
    static V f(V x, V y, V z) { return expression; } \
  };
TERNARY(SelectOp, select(x != splat(0.0f), y, z))
TERNARY(MulAddOp, x* y + z)
TERNARY(AddAddOp, (x + y) + z)
TERNARY(MulMulOp, (x * y) * z)
TERNARY(AddMulOp, (x + y) * z)
TERNARY(SubMulOp, (x - y) * z)
template <typename Op> struct TimesOp {
  static V f(V x, V y) { return Op::f(x) * y; }
};
struct PowOp {
  static V f(V x, V y) {
    V z;
    for (int i = 0; i < W; i++) z[i] = __builtin_powf(x[i], y[i]);
    return z;
  }
};

const float* at(const void* p, int64_t row, int64_t stride) { return static_cast<const float*>(p) + row * stride; }
float* out(const Args& x, int64_t row) { return static_cast<float*>(x.d) + row * x.sd; }

template <typename Op> constexpr bool lengthy = false;
#define X(name) Y(name) template <> constexpr bool lengthy<TimesOp<name##Op>> = true;
#define Y(name) template <> constexpr bool lengthy<name##Op> = true;
TELECHAT_DVM_LENGTHY(X, Y)
#undef X
#undef Y

// Element-wise: N operands, each a vector or, where K is false, one number a row.
template <typename Op, bool Absolute, bool KA, bool KB, bool KC, int N> void map_rows(const Args& x) {
  const auto mask = [&](int i) { return splat_i(x.absolute >> i & 1 ? 0x7fffffff : -1); };
  const VI mp = mask(0), mq = mask(1), ms = mask(2);
  const auto f = [&](V p, V q, V s) {
    if constexpr (Absolute) p = (V)((VI)p & mp), q = (V)((VI)q & mq), s = (V)((VI)s & ms);
    if constexpr (N == 1) return Op::f(p);
    else if constexpr (N == 2) return Op::f(p, q);
    else return Op::f(p, q, s);
  };
  const int64_t rows = x.rows, n = x.n;
  [[maybe_unused]] const int64_t nexts = x.nexts;
  [[maybe_unused]] const char* const* const next = x.next;
  for (int64_t r = 0; r < rows; r++) {
    const float* a = at(x.a, r, x.sa);
    const float *b = N > 1 ? at(x.b, r, x.sb) : a, *c = N > 2 ? at(x.c, r, x.sc) : a;
    float* d = out(x, r);
    const V one_a = splat(*a), one_b = splat(*b), one_c = splat(*c);
    const auto whole = [&](int64_t i) { return f(KA ? load(a + i) : one_a, KB ? load(b + i) : one_b, KC ? load(c + i) : one_c); };
    const auto part = [&](int64_t i, int n) {
      store_n(d + i, f(KA ? load_n(a + i, n) : one_a, KB ? load_n(b + i, n) : one_b, KC ? load_n(c + i, n) : one_c), n);
    };
    int64_t i = until_aligned(d, n);
    if (i) part(0, static_cast<int>(i));
    for (; i + 2 * W <= n; i += 2 * W) {
      if constexpr (lengthy<Op>) {
        for (int64_t s = 0; s < nexts; s++) {
          for (int at = 0; at < 2 * W; at += 16) __builtin_prefetch(next[s] + (r * n + i + at) * 4);
        }
      }
      const V p = whole(i), q = whole(i + W);
      store(d + i, p);
      store(d + i + W, q);
    }
    for (; i < n; i += W) part(i, lanes(n - i));
  }
}

template <int N, typename Op, bool Absolute, bool... K> void map_kinds(const Args& x) {
  constexpr int known = sizeof...(K);
  if constexpr (known == N) {
    constexpr bool k[] = {K..., false, false};
    map_rows<Op, Absolute, k[0], k[1], k[2], N>(x);
  } else {
    const bool is[] = {x.va, x.vb, x.vc};
    is[known] ? map_kinds<N, Op, Absolute, K..., true>(x) : map_kinds<N, Op, Absolute, K..., false>(x);
  }
}
template <typename Op> constexpr bool arithmetic = false;
template <> constexpr bool arithmetic<AddOp> = true;
template <> constexpr bool arithmetic<SubOp> = true;
template <> constexpr bool arithmetic<MulOp> = true;
template <> constexpr bool arithmetic<MulAddOp> = true;
template <> constexpr bool arithmetic<AddAddOp> = true;
template <> constexpr bool arithmetic<MulMulOp> = true;
template <> constexpr bool arithmetic<AddMulOp> = true;
template <> constexpr bool arithmetic<SubMulOp> = true;

template <int N, typename Op> void map(const Args& x) {
  if constexpr (arithmetic<Op>) {
    if (x.absolute) return map_kinds<N, Op, true>(x);
  }
  map_kinds<N, Op, false>(x);
}

void constant(const Args& x) { *static_cast<float*>(x.d) = x.value; }

// Sums over a row: four running vectors, added in a fixed order.
template <bool Product> void sum(const Args& x) {
  for (int64_t r = 0; r < x.rows; r++) {
    const float *a = at(x.a, r, x.sa), *b = Product ? at(x.b, r, x.sb) : nullptr;
    const V one_a = splat(*a), one_b = Product ? splat(*b) : one_a;
    V s[4] = {};
    int64_t i = 0;
    for (; x.va && (!Product || x.vb) && i + 4 * W <= x.n; i += 4 * W) {
      for (int j = 0; j < 4; j++) {
        const V y = load(a + i + j * W);
        s[j] = Product ? fma(y, load(b + i + j * W), s[j]) : s[j] + y;
      }
    }
    for (; i < x.n; i += W) {
      const int n = lanes(x.n - i);
      V y = x.va ? load_n(a + i, n) : one_a;
      if (Product) y = y * (x.vb ? load_n(b + i, n) : one_b);
      s[0] += first_lanes(y, n, V{});
    }
    const float total = sum_lanes((s[0] + s[1]) + (s[2] + s[3]));
    float* d = out(x, r);
    *d = x.first ? total : *d + total;
  }
}

// NaN is looked for apart: the largest number of all values' bits without their sign tells whether there is one.
template <bool Max> void extreme(const Args& x) {
  const V worst = splat(Max ? -__builtin_inff() : __builtin_inff());
  const auto better = [](float p, float q) { return (Max ? p > q : p < q) ? p : q; };
  for (int64_t r = 0; r < x.rows; r++) {
    const float* a = at(x.a, r, x.sa);
    V s[4] = {worst, worst, worst, worst};
    VI size = {};
    const auto take = [&](V* best, V v) {
      *best = Max ? max_fast(*best, v) : -max_fast(-*best, -v);
      const VI bits = (VI)v & 0x7fffffff;
      size = size > bits ? size : bits;
    };
    int64_t i = 0;
    for (; x.va && i + 4 * W <= x.n; i += 4 * W) {
      for (int j = 0; j < 4; j++) take(&s[j], load(a + i + j * W));
    }
    for (; i < x.n; i += W) take(s, x.va ? first_lanes(load_n(a + i, lanes(x.n - i)), lanes(x.n - i), worst) : splat(*a));
    float y[4 * W];
    int32_t bits[W];
    store(y, s[0]), store(y + W, s[1]), store(y + 2 * W, s[2]), store(y + 3 * W, s[3]);
    __builtin_memcpy(bits, &size, sizeof size);
    for (int half = 2 * W; half > 0; half /= 2) {
      for (int j = 0; j < half; j++) y[j] = better(y[j], y[j + half]);
    }
    for (int half = W / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; j++) bits[j] = bits[j] > bits[j + half] ? bits[j] : bits[j + half];
    }
    float* d = out(x, r);
    const float best = bits[0] > 0x7f800000 ? __builtin_nanf("") : y[0];
    *d = x.first || *d == *d ? (x.first || best != best ? best : better(*d, best)) : *d;
  }
}

// Rows of a tile added to the row `d`; with one column the tile is one long row.
template <typename Op, bool Product> void column(const Args& x, float worst) {
  if (x.n == 1) {
    float* d = static_cast<float*>(x.d);
    V s[4];
    for (V& v : s) v = splat(worst);
    const float *a = static_cast<const float*>(x.a), *b = static_cast<const float*>(x.b);
    const auto value = [&](int64_t i, int n) {
      V y = x.sa ? load_n(a + i, n) : splat(*a);
      return Product ? y * (x.sb ? load_n(b + i, n) : splat(*b)) : y;
    };
    int64_t i = 0;
    for (; i + 4 * W <= x.rows; i += 4 * W) {
      for (int j = 0; j < 4; j++) s[j] = Op::f(s[j], value(i + j * W, W));
    }
    for (; i < x.rows; i += W) s[0] = Op::f(s[0], first_lanes(value(i, lanes(x.rows - i)), lanes(x.rows - i), splat(worst)));
    float y[W];
    store(y, Op::f(Op::f(s[0], s[1]), Op::f(s[2], s[3])));
    for (int half = W / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; j++) y[j] = Op::f(splat(y[j]), splat(y[j + half]))[0];
    }
    *d = Op::f(splat(*d), splat(y[0]))[0];
    return;
  }
  for (int64_t i = 0; i < x.n; i += W) {
    const int n = lanes(x.n - i);
    float* d = static_cast<float*>(x.d) + i;
    V s = load_n(d, n);
    for (int64_t r = 0; r < x.rows; r++) {
      const float* a = at(x.a, r, x.sa);
      V y = x.va ? load_n(a + i, n) : splat(*a);
      if (Product) {
        const float* b = at(x.b, r, x.sb);
        y = y * (x.vb ? load_n(b + i, n) : splat(*b));
      }
      s = Op::f(s, y);
    }
    store_n(d, s, n);
  }
}
void column_sum(const Args& x) { column<AddOp, false>(x, 0.0f); }
void column_sum_product(const Args& x) { column<AddOp, true>(x, 0.0f); }
void column_max(const Args& x) { column<MaximumOp, false>(x, -__builtin_inff()); }
void column_min(const Args& x) { column<MinimumOp, false>(x, __builtin_inff()); }

// Between memory and registers; both sides are contiguous.
template <typename F> void each_vector(const Args& x, F f) {
  int64_t i = 0;
  for (; i + W <= x.n; i += W) f(i, W);
  if (i < x.n) f(i, lanes(x.n - i));
}
#define INLINE __attribute__((always_inline))
void load_bf16_rows(const Args& x) {
  const auto* a = static_cast<const uint16_t*>(x.a);
  float* d = static_cast<float*>(x.d);
  each_vector(x, [&](int64_t i, int n) INLINE { store_n(d + i, load_bf16_n(a + i, n), n); });
}
void store_bf16_rows(const Args& x) {
  const auto* a = static_cast<const float*>(x.a);
  auto* d = static_cast<uint16_t*>(x.d);
  each_vector(x, [&](int64_t i, int n) INLINE { store_bf16_n(d + i, x.va ? load_n(a + i, n) : splat(*a), n); });
}
void load_half_rows(const Args& x) {
  const auto* a = static_cast<const uint16_t*>(x.a);
  float* d = static_cast<float*>(x.d);
  each_vector(x, [&](int64_t i, int n) INLINE {
    VH h = {};
    __builtin_memcpy(&h, a + i, static_cast<size_t>(n) * 2);
    store_n(d + i, from_half(h), n);
  });
}
void store_half_rows(const Args& x) {
  const auto* a = static_cast<const float*>(x.a);
  auto* d = static_cast<uint16_t*>(x.d);
  each_vector(x, [&](int64_t i, int n) INLINE {
    const VH h = to_half(x.va ? load_n(a + i, n) : splat(*a));
    __builtin_memcpy(d + i, &h, static_cast<size_t>(n) * 2);
  });
}
void load_bool_rows(const Args& x) {
  const auto* a = static_cast<const uint8_t*>(x.a);
  float* d = static_cast<float*>(x.d);
  for (int64_t i = 0; i < x.n; i++) d[i] = a[i] ? 1.0f : 0.0f;
}
void store_bool_rows(const Args& x) {
  const auto* a = static_cast<const float*>(x.a);
  auto* d = static_cast<uint8_t*>(x.d);
  for (int64_t i = 0; i < x.n; i++) d[i] = a[x.va ? i : 0] != 0.0f;
}

}  // namespace

extern const DvmHandlers dvm_handlers;
// clang-format off
const DvmHandlers dvm_handlers = {{
#define X(name, code, text) map<1, name##Op>,
  TELECHAT_DVM_UNARY(X)
#undef X
#define X(name, code, text) map<2, name##Op>,
  TELECHAT_DVM_BINARY(X)
#undef X
#define X(name, code, text) map<2, TimesOp<name##Op>>,
  TELECHAT_DVM_UNARY(X)
#undef X
  constant, map<1, CopyOp>, map<3, SelectOp>, map<3, MulAddOp>, map<3, AddAddOp>, map<3, MulMulOp>, map<3, AddMulOp>, map<3, SubMulOp>,
  map<2, ExpSubOp>,
  map<1, RoundHalfOp>, map<1, RoundBf16Op>, map<1, ToIntOp>, map<1, FromIntOp>, map<1, ToBoolOp>,
  map<1, NegIntOp>, map<1, AbsIntOp>, map<2, AddIntOp>, map<2, SubIntOp>, map<2, MulIntOp>, map<2, MaxIntOp>,
  map<2, MinIntOp>, map<2, EqualIntOp>, map<2, NotEqualIntOp>, map<2, LessIntOp>, map<2, LessEqualIntOp>,
  map<2, GreaterIntOp>, map<2, GreaterEqualIntOp>,
  sum<false>, sum<true>, extreme<true>, extreme<false>,
  column_sum, column_sum_product, column_max, column_min,
  load_half_rows, load_bf16_rows, load_bool_rows, store_half_rows, store_bf16_rows, store_bool_rows,
  nullptr, nullptr,
}};
// clang-format on

}  // namespace telechat::SIMD_NS
