#include "dispatch.h"

#include <cstdlib>
#include <cstring>

namespace telechat {
namespace {

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
  return Isa::scalar;
#elif defined(__aarch64__)
  return Isa::neon;
#else
  return Isa::scalar;
#endif
}

// Tests choose an older instruction set before the first operator runs; a newer one than there is is ignored.
Isa wished = best();

}  // namespace

Isa isa() { return wished; }

const char* isa_name() {
  switch (isa()) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::neon: return "neon";
    default: return "scalar";
  }
}

}  // namespace telechat

extern "C" const char* telechat_isa() { return telechat::isa_name(); }

// For tests, before the first operator runs. Returns 0, or 1 where this processor lacks it.
extern "C" int telechat_use_isa(const char* name) {
  using telechat::Isa;
  Isa wish = !std::strcmp(name, "avx512") ? Isa::avx512
             : !std::strcmp(name, "avx2") ? Isa::avx2
             : !std::strcmp(name, "neon") ? Isa::neon
                                          : Isa::scalar;
  Isa has = telechat::best();
  bool older = wish == has || wish == Isa::scalar || (wish == Isa::avx2 && has == Isa::avx512);
  if (!older) return 1;
  telechat::wished = wish;
  return 0;
}
