// Matrix products on the calling thread; parallelism is the caller's, over experts, heads or blocks of rows.
#pragma once
#include <cstdint>

#include "aot.h"
#include "dispatch.h"

namespace telechat {

// Attributes of a product: whether its operands are rounded to bfloat16.
struct ProductState : State {
  bool bf16;
  explicit ProductState(Attributes& a) : bf16(a.flag("bf16")) {}
};

// C[M,N] = alpha * op(A) op(B) + beta * C, row-major; op transposes where `ta` / `tb` is true, so A is stored
// [M,K] or [K,M]. beta = 0 does not read C. M, N or K may be 0.
void gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc);

// The same with bfloat16 operands and fp32 accumulation and result.
void gemm_bf16(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const uint16_t* a, int64_t lda,
               const uint16_t* b, int64_t ldb, float beta, float* c, int64_t ldc);

// An operand in the precision that a product asks for: fp32, or bfloat16 where the processor multiplies it, or fp32
// rounded to bfloat16 elsewhere (the same products, added up in another order).
struct Operand {
  const float* single = nullptr;
  const uint16_t* half = nullptr;
  int64_t ld = 0;

  Operand at(int64_t row, int64_t column) const {
    int64_t offset = row * ld + column;
    return {single ? single + offset : nullptr, half ? half + offset : nullptr, ld};
  }
};

// `x` [rows, width] as an operand; with `bf16` a rounded copy in scratch memory of this thread, made by all threads.
Operand operand(const float* x, int64_t rows, int64_t width, bool bf16, int slot);

// Columns that will be read down, copied together where rows lie far apart: each value would cost a page and push others
// out of its cache set.
Operand columns(const Operand& x, int64_t rows, int64_t count, int slot);

// Our own product is the faster one for A B^T of so many rows with sums so long, and for A^T B of sums so short.
constexpr int64_t kTall = 512, kShortSum = 48;

// gemm or gemm_bf16, whichever the operands (of one kind) need.
void multiply(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, Operand a, Operand b, float beta, float* c,
              int64_t ldc);

// Keep oneDNN, MindSpore's own products too, from instructions that `isa` lacks. False where it has run or has a limit.
bool limit_onednn(Isa isa);
bool multiplies_bf16();      // the processor and the library do
const char* gemm_backend();  // "onednn" or "own"

}  // namespace telechat
