#include "gemm.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "cast.h"
#include "error.h"
#include "gemm_own.h"
#include "pool.h"

namespace telechat {
namespace {

using Sgemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t, float,
                      float*, int64_t, void*);
using Bgemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const uint16_t*, int64_t, const uint16_t*, int64_t,
                      float, float*, int64_t, void*);

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime;
};
constexpr unsigned kThreadpool = 8;  // built for a thread pool of the caller's: without one it stays on this thread

struct OneDnn {
  Sgemm sgemm = nullptr;
  Bgemm bgemm = nullptr;
  int (*limit)(int) = nullptr;

  bool open(void* library) {
    if (!library) return false;
    auto version = reinterpret_cast<const Version* (*)()>(dlsym(library, "dnnl_version"));
    if (!version || version()->cpu_runtime != kThreadpool) return false;
    sgemm = reinterpret_cast<Sgemm>(dlsym(library, "dnnl_threadpool_interop_sgemm"));
    bgemm = reinterpret_cast<Bgemm>(dlsym(library, "dnnl_threadpool_interop_gemm_bf16bf16f32"));
    limit = reinterpret_cast<int (*)(int)>(dlsym(library, "dnnl_set_max_cpu_isa"));
    return sgemm && bgemm;
  }
};

// The copy that MindSpore has loaded, found by its name; telechat_use_onednn gives another path.
OneDnn& onednn() {
  static OneDnn found = [] {
    OneDnn x;
    x.open(dlopen("libdnnl.so.3", RTLD_NOW | RTLD_NOLOAD));
    return x;
  }();
  return found;
}

bool use_own = false;
constexpr int kSlotB = 9;  // as in our own product, which runs instead

bool has_bf16_instructions() {
#if defined(__x86_64__)
  return isa() >= Isa::avx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

void scale(int64_t m, int64_t n, float beta, float* c, int64_t ldc) {
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < n; j++) c[i * ldc + j] = beta == 0 ? 0 : beta * c[i * ldc + j];
  }
}

// Rows of `x` as rows `to` values apart.
template <typename T> const T* copy_rows(const T* x, int64_t ld, int64_t rows, int64_t columns, int64_t to, int slot) {
  T* out = scratch<T>(slot, rows * to);
  for (int64_t r = 0; r < rows; r++) std::memcpy(out + r * to, x + r * ld, columns * sizeof(T));
  return out;
}

void onednn_gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
                 int64_t ldb, float beta, float* c, int64_t ldc) {
  int rc = onednn().sgemm(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, nullptr);
  check(rc == 0, "oneDNN sgemm returned %d for %ldx%ldx%ld", rc, long(m), long(n), long(k));
}

// With few rows of A oneDNN reads B where it is; rows of B whose distance is such a multiple share a few sets of the cache.
bool collides(int64_t m, int64_t ldb) {
  constexpr int64_t kFewRows = 256, kWorth = 128;
  return isa() >= Isa::avx512 ? m >= kWorth && m <= kFewRows && ldb % 1024 == 0 : m <= kFewRows && ldb % 512 == 0;
}

// Shapes that our own product computes faster, measured with AVX2 and AVX-512: few rows, for which oneDNN copies B or waits for
// it; short sums, where C comes from memory meanwhile; and long sums of many rows with B transposed.
bool own_is_faster(bool ta, bool tb, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kWide = 256;
  if (isa() != Isa::avx2 && isa() != Isa::avx512 && isa() != Isa::amx) return false;
  if (ta) return !tb && k <= kShortSum && m > kWide && n >= kWide;
  if (tb) return (m >= 8 && m <= kRowsTurned) || (m >= kTall && k >= kTall);
  return m <= kRowsInPlace && n >= kWide;
}

}  // namespace

void gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  if (k == 0) return scale(m, n, beta, c, ldc);
  if (use_own || !onednn().sgemm || own_is_faster(ta, tb, m, n, k)) {
    return own_gemm().run(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
  if (tb || !collides(m, ldb)) return onednn_gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  constexpr int64_t kDepth = 256, kLine = 16;
  for (int64_t k0 = 0; k0 < k; k0 += kDepth) {  // what is copied stays in the cache
    const int64_t depth = std::min(kDepth, k - k0);
    const float* apart = copy_rows(b + k0 * ldb, ldb, depth, n, n + kLine, kSlotB);
    onednn_gemm(ta, tb, m, n, depth, alpha, ta ? a + k0 * lda : a + k0, lda, apart, n + kLine, k0 == 0 ? beta : 1, c, ldc);
  }
}

void gemm_bf16(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const uint16_t* a, int64_t lda,
               const uint16_t* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  if (k == 0) return scale(m, n, beta, c, ldc);
  check(onednn().bgemm, "no library multiplies bfloat16 here");
  int rc = onednn().bgemm(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, nullptr);
  check(rc == 0, "oneDNN gemm_bf16bf16f32 returned %d for %ldx%ldx%ld", rc, long(m), long(n), long(k));
}

const char* gemm_backend() { return onednn().sgemm && !use_own ? "onednn" : "own"; }

bool limit_onednn(Isa isa) {
  const int highest = isa == Isa::scalar ? 0x1 : isa == Isa::avx2 ? 0x7 : isa == Isa::avx512 ? 0x1ef : 0;  // dnnl_cpu_isa_t
  return !onednn().limit || onednn().limit(highest) == 0;
}

bool multiplies_bf16() {
  static const bool has = has_bf16_instructions();
  return has && !use_own && onednn().bgemm;
}

Operand operand(const float* x, int64_t rows, int64_t width, bool bf16, int slot) {
  if (!bf16) return {x, nullptr, width};
  const int64_t count = rows * width, block = 1 << 15;
  const bool native = multiplies_bf16();
  auto* half = native ? scratch<uint16_t>(slot, count) : nullptr;
  auto* single = native ? nullptr : scratch<float>(slot, count);
  parallel_for((count + block - 1) / block, [&](int64_t i) {
    const int64_t begin = i * block, n = std::min(block, count - begin);
    if (native) {
      casts().to_bf16(x + begin, half + begin, n);
    } else {
      casts().round_bf16(x + begin, single + begin, n);
    }
  });
  return {single, half, width};
}

Operand columns(const Operand& x, int64_t rows, int64_t count, int slot) {
  constexpr int64_t kFar = 1024;  // values between rows
  if (x.ld < kFar) return x;
  if (x.half) return {nullptr, copy_rows(x.half, x.ld, rows, count, count, slot), count};
  return {copy_rows(x.single, x.ld, rows, count, count, slot), nullptr, count};
}

void multiply(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, Operand a, Operand b, float beta, float* c,
              int64_t ldc) {
  if (a.half) {
    gemm_bf16(ta, tb, m, n, k, alpha, a.half, a.ld, b.half, b.ld, beta, c, ldc);
  } else {
    gemm(ta, tb, m, n, k, alpha, a.single, a.ld, b.single, b.ld, beta, c, ldc);
  }
}

}  // namespace telechat

// For tests and benchmarks: "own" leaves oneDNN aside, anything else takes it where it is.
extern "C" void telechat_use_gemm(const char* name) { telechat::use_own = std::strcmp(name, "own") == 0; }

extern "C" const char* telechat_gemm_backend() { return telechat::gemm_backend(); }

// Outside MindSpore: load oneDNN from this path. Returns 0, or 1 where it cannot be used.
extern "C" int telechat_use_onednn(const char* path) {
  return telechat::onednn().sgemm || telechat::onednn().open(dlopen(path, RTLD_NOW | RTLD_LOCAL)) ? 0 : 1;
}

// For tests: `gemm` as it is. Returns 0, or 1 with the last error set.
extern "C" int telechat_gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                             const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  return telechat::guarded("gemm", [&] { telechat::gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); });
}
