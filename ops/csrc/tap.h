// Fingerprints of tensors (ops/fingerprint.py): a sketch of 241 buckets and an order-free checksum.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace telechat {

constexpr int64_t kBuckets = 241, kRows = 32, kBlock = kRows * kBuckets;
constexpr int64_t kGroup = 4;  // blocks that are read together: each place's factors are loaded once for all
constexpr int64_t kEven = kBuckets / 16 * 16;  // lanes that vectors take; one is left

// Sign and odd factor of each place in a block, by rows; those of the last lane once more, one after another.
struct TapPlaces {
  double signs[kBlock], last_signs[kRows];
  uint64_t odds[kBlock], last_odds[kRows];
};

struct TapSums {
  double lanes[kGroup][kBuckets];  // of sign * x, a block each
  uint64_t checks[kGroup];         // of odd * mix(bits)
  double squares;                  // of x * x, all blocks; not finite if one element is not
};

struct TapKernels {
  void (*four)(const float* x, const TapPlaces& places, TapSums& out);  // kGroup blocks
  void (*one)(const float* x, const TapPlaces& places, TapSums& out);
};

}  // namespace telechat

TELECHAT_DECLARE(TapKernels, tap_kernels)
