#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#include "aot.h"
#include "gemm.h"

namespace telechat {
namespace {

const char* const kNames[] = {"scalar", "avx2", "avx512", "amx", "neon"};  // as in Isa
const char* name_of(Isa isa) { return kNames[static_cast<int>(isa)]; }

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") ? Isa::amx : Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
  return Isa::scalar;
#elif defined(__aarch64__)
  return Isa::neon;
#else
  return Isa::scalar;
#endif
}

Isa chosen = best();
std::atomic<bool> used{false};

void use_isa(const char* name) {
  const auto known = std::find_if(std::begin(kNames), std::end(kNames), [&](const char* n) { return !std::strcmp(n, name); });
  check(known != std::end(kNames), "'%s' is none: scalar, avx2, avx512, amx or neon expected", name);
  const Isa wish = static_cast<Isa>(known - kNames), has = best();
  check(wish == has || (wish < has && has != Isa::neon), "this processor has no %s, its best is %s", name, name_of(has));
  if (wish == chosen) return;
  check(!used, "the operators already use %s; choose before the first one runs", name_of(chosen));
  check(limit_onednn(wish), "oneDNN has already run or is limited; choose once, before MindSpore computes anything");
  chosen = wish;
}

}  // namespace

Isa isa() {
  used = true;
  return chosen;
}

}  // namespace telechat

extern "C" const char* telechat_isa() { return telechat::name_of(telechat::chosen); }

// For tests and benchmarks, before the first operator runs. Returns 0, or 1 with the last error set.
extern "C" int telechat_use_isa(const char* name) {
  return telechat::guarded("instruction set", [&] { telechat::use_isa(name); });
}
