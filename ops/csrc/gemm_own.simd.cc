// Packed panels and a register-blocked kernel (Goto and van de Geijn 2008): a block of B of [KC, NC] and a block of A of
// [MC, KC] are copied into panels as wide as the kernel's tile, so that it reads memory in order.
#include "gemm_own.h"
#include "pool.h"
#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

#if defined(__AVX512F__)
constexpr int MR = 14, NV = 2;  // 28 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int MR = 6, NV = 2;  // 12 of 16
#else
constexpr int MR = 4, NV = 2;
#endif
constexpr int NR = NV * W;
constexpr int64_t KC = 256, MC = MR * 12, NC = 1024;
constexpr int kSlotA = 8, kSlotB = 9;

// Panels of MR rows: out[p][k][i] = a[i][k], zero behind the last row.
void pack_a(bool transposed, const float* a, int64_t lda, int64_t rows, int64_t depth, float* out) {
  for (int64_t r = 0; r < rows; r += MR) {
    const int64_t height = lower(MR, rows - r);
    for (int64_t k = 0; k < depth; k++, out += MR) {
      for (int64_t i = 0; i < MR; i++) {
        out[i] = i >= height ? 0.0f : transposed ? a[k * lda + r + i] : a[(r + i) * lda + k];
      }
    }
  }
}

void pack_b(bool transposed, const float* b, int64_t ldb, int64_t depth, int64_t columns, float* out) {
  for (int64_t c = 0; c < columns; c += NR) {
    const int64_t width = lower(NR, columns - c);
    if (transposed) {
      for (int64_t k = 0; k < depth; k += W) {
        for (int64_t j = 0; j < NR; j += W) {
          turn(b + (c + j) * ldb + k, ldb, width - j, depth - k, out + k * NR + j, NR);
        }
      }
    } else if (width == NR) {
      for (int64_t k = 0; k < depth; k++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) store(out + k * NR + j * W, load(b + k * ldb + c + j * W));
      }
    } else {
      for (int64_t k = 0; k < depth; k++) {
        for (int64_t j = 0; j < NR; j++) out[k * NR + j] = j < width ? b[k * ldb + c + j] : 0.0f;
      }
    }
    out += depth * NR;
  }
}

// Every loop over the sums is unrolled, or they would live in memory.
void tile(const float* a, const float* b, int64_t depth, float alpha, float beta, float* c, int64_t ldc, int64_t rows,
          int64_t columns) {
  V sum[MR][NV] = {};
  for (int64_t k = 0; k < depth; k++, a += MR, b += NR) {
    V right[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) right[j] = load(b + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const V left = splat(a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) sum[i][j] = fma(left, right[j], sum[i][j]);
    }
  }
  float done[MR * NR];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(done + i * NR + j * W, sum[i][j] * splat(alpha));
  }
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < columns; j += W) {
      const int n = static_cast<int>(lower(W, columns - j));
      float* at = c + i * ldc + j;
      V y = load(done + i * NR + j);
      if (beta != 0) y = fma(splat(beta), load_n(at, n), y);
      store_n(at, y, n);
    }
  }
}

void run(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
         int64_t ldb, float beta, float* c, int64_t ldc) {
  float* packed_a = static_cast<float*>(scratch_bytes(kSlotA, (MC + MR) * KC * sizeof(float)));
  float* packed_b = static_cast<float*>(scratch_bytes(kSlotB, (NC + NR) * KC * sizeof(float)));
  for (int64_t c0 = 0; c0 < n; c0 += NC) {
    const int64_t columns = lower(NC, n - c0);
    for (int64_t k0 = 0; k0 < k; k0 += KC) {
      const int64_t depth = lower(KC, k - k0);
      const float keep = k0 == 0 ? beta : 1.0f;
      pack_b(tb, tb ? b + c0 * ldb + k0 : b + k0 * ldb + c0, ldb, depth, columns, packed_b);
      for (int64_t r0 = 0; r0 < m; r0 += MC) {
        const int64_t rows = lower(MC, m - r0);
        pack_a(ta, ta ? a + k0 * lda + r0 : a + r0 * lda + k0, lda, rows, depth, packed_a);
        for (int64_t j = 0; j < columns; j += NR) {
          for (int64_t i = 0; i < rows; i += MR) {
            tile(packed_a + i * depth, packed_b + j * depth, depth, alpha, keep, c + (r0 + i) * ldc + c0 + j, ldc,
                 lower(MR, rows - i), lower(NR, columns - j));
          }
        }
      }
    }
  }
}

}  // namespace

extern const OwnGemm own_gemm;
const OwnGemm own_gemm = {run};

}  // namespace telechat::SIMD_NS
