// Matrix products on the calling thread; parallelism is the caller's, over experts, heads or blocks of rows.
#pragma once
#include <cstdint>

namespace telechat {

// C[M,N] = alpha * op(A) op(B) + beta * C, row-major; op transposes where `ta` / `tb` is true, so A is stored
// [M,K] or [K,M]. beta = 0 does not read C. M, N or K may be 0.
void gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc);

// The same with bfloat16 operands and fp32 accumulation and result.
void gemm_bf16(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const uint16_t* a, int64_t lda,
               const uint16_t* b, int64_t ldb, float beta, float* c, int64_t ldc);

const char* gemm_backend();  // "onednn" or "own"

}  // namespace telechat
