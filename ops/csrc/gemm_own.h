// Our own matrix product: for processes without oneDNN, and for shapes that oneDNN computes more slowly.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct OwnGemm {
  void (*run)(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
              const float* b, int64_t ldb, float beta, float* c, int64_t ldc);
};

// Up to so many rows of A, B is not packed: too few would use the copy. Transposed, B is the one that is broadcast then.
constexpr int64_t kRowsInPlace = 48, kRowsTurned = 96;

}  // namespace telechat

TELECHAT_DECLARE(OwnGemm, own_gemm)
