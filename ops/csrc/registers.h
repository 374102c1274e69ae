// The rate of multiply-adds that a processor reaches in registers: what products are measured against.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

struct RegisterKernels {
  float (*multiply_adds)(int64_t rounds);
  int64_t flops;  // of a round
};

}  // namespace telechat

TELECHAT_DECLARE(RegisterKernels, registers)
