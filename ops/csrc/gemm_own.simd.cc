// A register-blocked kernel (Goto and van de Geijn 2008) that broadcasts values of A and multiplies vectors of B. A block of B
// of [KC, NC] is packed into panels as wide as the kernel's tile, unless few rows of A would use the copy.
#include "gemm_own.h"
#include "pool.h"
#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

#if defined(__AVX512F__)
constexpr int MR = 8;  // 16 accumulators are enough to be busy
#elif defined(__AVX2__)
constexpr int MR = 6;
#else
constexpr int MR = 4;
#endif
constexpr int NV = 2, NR = NV * W;
constexpr int64_t KC = 512, MC = MR * 32, NC = 512;
constexpr int64_t kLine = 16, kStep = 16;  // values of a cache line; steps of a sum between prefetches
constexpr int kSlotA = 8, kSlotB = 9;

struct Tile {
  const float* a;  // element (i, k) of A at a[i * row + k * step]
  int64_t row, step;
  const float* b;
  int64_t ldb, depth;
  float alpha, beta;
  float* c;
  int64_t ldc, columns;
  const float* next = nullptr;  // what is prefetched, `next_rows` rows every kStep steps
  int64_t next_ld = 0, next_rows = 0, next_step = 0;
};

// What a tile prefetches and stores: packed B, the next tile of C; B in place, its next panel; turned, the next rows of B (here
// the operand that is broadcast), and C transposed.
enum Kind { kPacked, kInPlace, kTurned };

template <Kind KIND> inline __attribute__((always_inline)) void prefetch(const Tile& t, const float* next) {
  for (int64_t i = 0; i < t.next_rows; i++, next += t.next_ld) {
    for (int j = 0; j < (KIND == kTurned ? 1 : NR); j += kLine) {
      if (KIND == kPacked) {
        __builtin_prefetch(next + j, 1);
      } else {
        __builtin_prefetch(next + j, 0, 2);  // into L2
      }
    }
  }
}

// ROWS rows and a vector of columns of C.
template <int ROWS> inline __attribute__((always_inline)) void store_rows(const Tile& t, const V (&sum)[ROWS], float* c, int width) {
  const V beta = splat(t.beta);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++, c += t.ldc) {
    V y = sum[i] * splat(t.alpha);
    if (width == W) {
      if (t.beta != 0) y = fma(beta, load(c), y);
      store(c, y);
    } else {
      if (t.beta != 0) y = fma(beta, load_n(c, width), y);
      store_n(c, y, width);
    }
  }
}

// The same of the transposed: lane j of sum i belongs to c[j * ldc + i].
template <int ROWS> inline __attribute__((always_inline)) void store_turned(const Tile& t, const V (&sum)[ROWS], float* c, int width) {
  float done[W * W], turned[W * W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) store(done + i * W, i < ROWS ? sum[i % ROWS] * splat(t.alpha) : V{});
  turn(done, W, W, W, turned, W);
  for (int j = 0; j < width; j++, c += t.ldc) {
    V y = load(turned + j * W);
    if (t.beta != 0) y = fma(splat(t.beta), load_n(c, ROWS), y);
    __builtin_memcpy(c, &y, ROWS * sizeof(float));  // faster than a mask with AVX2
  }
}

// Every loop over the sums is unrolled, or they would live in memory.
template <Kind KIND, int ROWS, int VECTORS> __attribute__((noinline)) void tile(const Tile& t) {
  const float *b = t.b, *a[(ROWS + 2) / 3], *next = t.next;  // a processor adds 1 or 2 times `row` to an address by itself
  const int64_t row = t.row, step = t.step, ldb = t.ldb;
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i += 3) a[i / 3] = t.a + i * row;
  V sum[VECTORS][ROWS] = {};
  for (int64_t left = t.depth; left > 0; left -= kStep, next += t.next_step) {
    prefetch<KIND>(t, next);
    for (int64_t k = lower(kStep, left); k > 0; k--, b += ldb) {
      V right[VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) right[j] = load(b + j * W);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++) {
        const V x = splat(a[i / 3][i % 3 * row]);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sum[j][i] = fma(x, right[j], sum[j][i]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i += 3) a[i / 3] += step;
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; j++) {
    const int width = lanes(t.columns - j * W);
    if constexpr (KIND == kTurned) {
      store_turned<ROWS>(t, sum[j], t.c + j * W * t.ldc, width);
    } else {
      store_rows<ROWS>(t, sum[j], t.c + j * W, width);
    }
  }
}

template <Kind KIND, int ROWS = MR> void run_tile(const Tile& t, int64_t rows) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return run_tile<KIND, ROWS - 1>(t, rows);
  }
  t.columns > W ? tile<KIND, ROWS, 2>(t) : tile<KIND, ROWS, 1>(t);
}

// Rows cut into the fewest strips; the first ones are a row higher than the others.
struct Strips {
  int64_t rows, count, low, higher;
  explicit Strips(int64_t rows) : rows(rows), count((rows + MR - 1) / MR), low(rows / count), higher(rows % count) {}
  int64_t begin(int64_t s) const { return s * low + lower(s, higher); }
  int64_t size(int64_t s) const { return low + (s < higher); }
};

// Strips of A, stored transposed: out[s][k][i] = a[k][begin(s) + i].
void pack_a(const float* a, int64_t lda, const Strips& strips, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; k++, a += lda) {
    for (int64_t s = 0; s < strips.count; s++) {
      const int64_t r = strips.begin(s), n = strips.size(s);
      float* to = out + s * MR * (depth + 1) + k * n;
      if (r + MR <= strips.rows) {
        __builtin_memcpy(to, a + r, MR * sizeof(float));  // what is too much is written over, or padding
      } else {
        for (int64_t i = 0; i < n; i++) to[i] = a[r + i];
      }
    }
  }
}

// Panels of NR columns: out[p][k][j] = b[k][p * NR + j], zero behind the last column.
void pack_b(bool transposed, const float* b, int64_t ldb, int64_t depth, int64_t columns, float* out) {
  for (int64_t c = 0; transposed && c < columns; c += NR, out += depth * NR) {
    for (int64_t k = 0; k < depth; k += W) {
      for (int64_t j = 0; j < NR; j += W) {
        turn(b + (c + j) * ldb + k, ldb, columns - c - j, depth - k, out + k * NR + j, NR);
      }
    }
  }
  for (int64_t k = 0; !transposed && k < depth; k++, b += ldb) {
    float* to = out + k * NR;
    for (int64_t c = 0; c < columns; c += NR, to += depth * NR) {
      for (int j = 0; j < NR; j += W) {
        const int64_t left = columns - c - j;
        store(to + j, left >= W ? load(b + c + j) : load_n(b + c + j, lanes(higher(0, left))));
      }
    }
  }
}

// C^T = B A^T: rows of B are broadcast where they are, and A, turned, is a few panels that stay in the cache.
void run_turned(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b, int64_t ldb, float beta,
                float* c, int64_t ldc) {
  float* panels = scratch<float>(kSlotB, (m + NR) * KC);
  const Strips strips(n);
  for (int64_t k0 = 0; k0 < k; k0 += KC) {
    Tile t{nullptr, ldb, 1, nullptr, NR, lower(KC, k - k0), alpha, k0 == 0 ? beta : 1, nullptr, ldc, 0};
    t.next_ld = ldb, t.next_step = kStep;
    pack_b(true, a + k0, lda, t.depth, m, panels);
    for (int64_t s = 0; s < strips.count; s++) {
      const int64_t i = strips.begin(s), rows = strips.size(s);
      t.a = b + i * ldb + k0, t.next = t.a + rows * ldb;
      for (int64_t j = 0; j < m; j += NR) {
        t.next_rows = j == 0 && s + 1 < strips.count ? strips.size(s + 1) : 0;
        t.b = panels + j * t.depth, t.c = c + j * ldc + i, t.columns = lower(NR, m - j);
        run_tile<kTurned>(t, rows);
      }
    }
  }
}

// Few rows of A: each panel of B is read where it is, but for the last unless it is whole.
void run_in_place(int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                  float beta, float* c, int64_t ldc) {
  float* spare = scratch<float>(kSlotB, NR * KC);
  const Strips strips(m);
  for (int64_t k0 = 0; k0 < k; k0 += KC, b += KC * ldb) {
    Tile t{nullptr, lda, 1, nullptr, ldb, lower(KC, k - k0), alpha, k0 == 0 ? beta : 1, nullptr, ldc, 0};
    t.next_ld = ldb, t.next_step = kStep * ldb;
    for (int64_t j = 0; j < n; j += NR) {
      t.b = b + j, t.columns = lower(NR, n - j), t.next = t.b + NR;
      if (t.columns < NR) pack_b(false, t.b, ldb, t.depth, t.columns, spare), t.b = spare, t.ldb = NR;
      for (int64_t s = 0; s < strips.count; s++) {
        t.next_rows = s + 1 == strips.count && j + NR < n ? kStep : 0;
        t.a = a + strips.begin(s) * lda + k0, t.c = c + strips.begin(s) * ldc + j;
        run_tile<kInPlace>(t, strips.size(s));
      }
    }
  }
}

// Each strip of A, packed or not, with all packed panels of B.
void run_packed(Tile t, const Strips& strips, bool packed_a, int64_t columns) {
  const float *a = t.a, *b = t.b;
  float* c = t.c;
  t.next_ld = t.ldc;
  for (int64_t s = 0; s < strips.count; s++) {
    const int64_t i = strips.begin(s), rows = strips.size(s);
    t.a = a + (packed_a ? s * MR * (t.depth + 1) : i * t.row);
    if (packed_a) t.step = rows;
    t.next_rows = higher(1, rows * kStep / higher(kStep, t.depth)), t.next_step = t.next_rows * t.ldc;
    for (int64_t j = 0; j < columns; j += NR) {
      t.b = b + j * t.depth, t.c = c + i * t.ldc + j, t.columns = lower(NR, columns - j);
      t.next = j + NR < columns ? t.c + NR : c + (i + rows) * t.ldc;
      run_tile<kPacked>(t, rows);
    }
  }
}

void run(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
         int64_t ldb, float beta, float* c, int64_t ldc) {
  if (!ta && m <= (tb ? kRowsTurned : kRowsInPlace)) {
    return (tb ? run_turned : run_in_place)(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
  float* packed_a = ta ? scratch<float>(kSlotA, MC * (KC + 1)) : nullptr;
  float* packed_b = scratch<float>(kSlotB, (NC + NR) * KC);
  for (int64_t c0 = 0; c0 < n; c0 += NC) {
    const int64_t columns = lower(NC, n - c0);
    for (int64_t k0 = 0; k0 < k; k0 += KC) {
      const int64_t depth = lower(KC, k - k0);
      pack_b(tb, tb ? b + c0 * ldb + k0 : b + k0 * ldb + c0, ldb, depth, columns, packed_b);
      for (int64_t r0 = 0; r0 < m; r0 += MC) {
        const Strips strips(lower(MC, m - r0));
        if (ta) pack_a(a + k0 * lda + r0, lda, strips, depth, packed_a);
        run_packed({ta ? packed_a : a + r0 * lda + k0, ta ? 1 : lda, 1, packed_b, NR, depth, alpha, k0 == 0 ? beta : 1,
                    c + r0 * ldc + c0, ldc, 0}, strips, ta, columns);
      }
    }
  }
}

}  // namespace

extern const OwnGemm own_gemm;
const OwnGemm own_gemm = {run};

}  // namespace telechat::SIMD_NS
