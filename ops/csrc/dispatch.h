// One source, several instruction sets: every *.simd.cc file is compiled once for each, inside
// `namespace telechat::SIMD_NS`, and the best one that this processor has is chosen when the library loads.
//
// A *.simd.cc file uses no templates or inline functions of the standard library: the linker keeps one copy of
// those, and it may be the one that an older processor cannot run.
//
//   norm.h         struct NormKernels { void (*rms)(...); };
//                  TELECHAT_DECLARE(NormKernels, norm)      // declares norm() -> const NormKernels&
//   norm.simd.cc   namespace telechat::SIMD_NS { ... extern const NormKernels norm; const NormKernels norm = {rms}; }
//   norm.cc        TELECHAT_SELECT(NormKernels, norm)
#pragma once

namespace telechat {

// amx: the vectors of avx512, and oneDNN's bfloat16 products on tiles.
enum class Isa { scalar, avx2, avx512, amx, neon };
Isa isa();  // fixed from the first call on

}  // namespace telechat

#if defined(__x86_64__)
#define TELECHAT_DECLARE(Table, name)                                \
  namespace telechat {                                               \
  namespace scalar { extern const Table name; }                      \
  namespace avx2 { extern const Table name; }                        \
  namespace avx512 { extern const Table name; }                      \
  const Table& name();                                               \
  }
#define TELECHAT_SELECT(Table, name)                                 \
  const Table& telechat::name() {                                    \
    static const Table& chosen = isa() >= Isa::avx512 ? avx512::name \
                                 : isa() == Isa::avx2 ? avx2::name   \
                                                      : scalar::name; \
    return chosen;                                                   \
  }
#else
#if defined(__aarch64__)
#define TELECHAT_ONLY neon
#else
#define TELECHAT_ONLY scalar
#endif
#define TELECHAT_DECLARE(Table, name)                                \
  namespace telechat {                                               \
  namespace TELECHAT_ONLY { extern const Table name; }               \
  const Table& name();                                               \
  }
#define TELECHAT_SELECT(Table, name) const Table& telechat::name() { return TELECHAT_ONLY::name; }
#endif
