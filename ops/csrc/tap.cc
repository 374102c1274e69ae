// An operator that writes down what it is given: values, statistics or a fingerprint. `tools/align/capture/mindspore.py`
// puts one behind each operator of a graph. Nothing happens between `telechat_tap_end` and the next `_begin`.
//
// A folder gets `values.bin`, what was written, one tensor after another, and `index.txt`, a line each:
// tap, bytes from the start, bytes, type, extents.
#include "tap.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "aot.h"
#include "pool.h"

using namespace telechat;

TELECHAT_SELECT(TapKernels, tap_kernels)

namespace {

enum Mode { kValues = 0, kStatistics = 1, kFingerprint = 2 };

struct Files {
  std::mutex lock;
  std::FILE* values = nullptr;
  std::FILE* index = nullptr;
  int64_t at = 0, count = 0;
  int mode = kValues;
} files;

uint64_t splitmix(uint64_t x) {
  x = (x + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

TapPlaces* make_places() {
  auto* made = new TapPlaces;
  for (int64_t i = 0; i < kBlock; i++) {
    const uint64_t bits = splitmix(static_cast<uint64_t>(i) + (1ull << 40));
    made->signs[i] = bits >> 63 ? -1.0 : 1.0;
    made->odds[i] = splitmix(bits) | 1;
  }
  for (int64_t r = 0; r < kRows; r++) {
    made->last_signs[r] = made->signs[r * kBuckets + kEven];
    made->last_odds[r] = made->odds[r * kBuckets + kEven];
  }
  return made;
}

// As Fingerprint.to_bytes() has it.
struct Print {
  char magic[4] = {'T', 'C', 'F', '1'};
  uint16_t flags = 3, width = kBuckets;
  uint64_t count = 0, total = 0, special = 0, checksum = 0;
  double squares = 0;
  double buckets[kBuckets] = {};
};
static_assert(sizeof(Print) == 48 + 8 * kBuckets, "as the file format");

float wide(float x) { return x; }
float wide(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Add the lanes of a block to the buckets, turned by its shift.
void turn(Print& out, int64_t number, uint64_t check, const double* lanes) {
  const uint64_t bits = splitmix(static_cast<uint64_t>(number));
  const double sign = bits >> 63 ? -1.0 : 1.0;
  const int64_t shift = static_cast<int64_t>((bits & 0xFFFFFFFFull) % kBuckets);
  out.checksum += check * (splitmix(bits) | 1);
  for (int64_t b = 0; b < kBuckets - shift; b++) out.buckets[b + shift] += sign * lanes[b];
  for (int64_t b = 0; b < shift; b++) out.buckets[b] += sign * lanes[b + kBuckets - shift];
}

// A block of numbers of any type, one by one; what is no number counts as 0 but in the checksum.
template <typename T>
void slow_block(const T* x, int64_t n, int64_t number, const TapPlaces& places, Print& out) {
  double lanes[kBuckets] = {}, squares = 0;
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    uint64_t bits = 0;
    std::memcpy(&bits, x + i, sizeof(T));
    uint64_t mixed = bits * 0x9E3779B97F4A7C15ull;
    mixed ^= mixed >> 32;
    sum += mixed * places.odds[i];
    const double d = static_cast<double>(x[i]);
    if (!std::isfinite(d)) {
      out.special++;
      continue;
    }
    lanes[i % kBuckets] += places.signs[i] * d;
    squares += d * d;
  }
  out.squares += squares;
  turn(out, number, sum, lanes);
}

template <typename T>
void blocks(const T* x, int64_t size, int64_t first, int64_t last, const TapPlaces& places, Print& out) {
  for (int64_t q = first; q < last; q++) slow_block(x + q * kBlock, std::min(kBlock, size - q * kBlock), q, places, out);
}

// Blocks of fp32, from `number` on. Where one element is not finite, its block goes the slow way.
void float_group(const float* x, int64_t count, int64_t number, const TapPlaces& places, Print& out) {
  TapSums sums;
  (count == kGroup ? tap_kernels().four : tap_kernels().one)(x, places, sums);
  if (std::isfinite(sums.squares)) {
    out.squares += sums.squares;
    for (int64_t b = 0; b < count; b++) turn(out, number + b, sums.checks[b], sums.lanes[b]);
  } else if (count > 1) {
    for (int64_t b = 0; b < count; b++) float_group(x + b * kBlock, 1, number + b, places, out);
  } else {
    slow_block(x, kBlock, number, places, out);
  }
}

// fp32, or bf16 widened to it.
template <typename T>
void float_blocks(const T* x, int64_t size, int64_t first, int64_t last, const TapPlaces& places, Print& out) {
  for (int64_t q = first, count; q < last; q += count) {
    const T* begin = x + q * kBlock;
    count = last - q >= kGroup ? kGroup : 1;
    const int64_t n = std::min(count * kBlock, size - q * kBlock);
    const float* here = reinterpret_cast<const float*>(begin);
    if (sizeof(T) != sizeof(float) || n < count * kBlock) {
      float* room = scratch<float>(0, kGroup * kBlock);
      for (int64_t i = 0; i < n; i++) room[i] = wide(begin[i]);
      std::fill(room + n, room + count * kBlock, 0.0f);
      here = room;
    }
    float_group(here, count, q, places, out);
  }
}

// fp16 has no type of its own here: its value, with the bits that are stored.
struct Half {
  uint16_t bits;
  explicit operator double() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                        : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                       : std::ldexp(fraction, -24);
    return bits >> 15 ? -size : size;
  }
};

template <typename F>
void with_type(const Arg& x, F&& body) {
  switch (x.dtype()) {
    case DType::f32: return body(static_cast<const float*>(x.data));
    case DType::bf16: return body(static_cast<const uint16_t*>(x.data));
    case DType::f16: return body(static_cast<const Half*>(x.data));
    case DType::f64: return body(static_cast<const double*>(x.data));
    case DType::i32: return body(static_cast<const int32_t*>(x.data));
    case DType::i64: return body(static_cast<const int64_t*>(x.data));
    case DType::u8:
    case DType::b8: return body(static_cast<const uint8_t*>(x.data));
    default: break;
  }
  const std::string name = x.type_name;
  if (name == "int8") return body(static_cast<const int8_t*>(x.data));
  if (name == "int16") return body(static_cast<const int16_t*>(x.data));
  if (name == "uint32") return body(static_cast<const uint32_t*>(x.data));
  if (name == "uint64") return body(static_cast<const uint64_t*>(x.data));
  check(false, "a tap cannot read %s", x.type_name);
}

template <typename T>
void print_part(const T* x, int64_t size, int64_t first, int64_t last, const TapPlaces& places, Print& out) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, uint16_t>) {
    float_blocks(x, size, first, last, places, out);
  } else {
    blocks(x, size, first, last, places, out);
  }
}

constexpr int64_t kTask = 32;  // blocks, 1 MB of fp32

std::unique_ptr<Print> print_of(const Arg& x) {
  static const TapPlaces& places = *make_places();
  const int64_t size = x.size(), count = (size + kBlock - 1) / kBlock, tasks = (count + kTask - 1) / kTask;
  std::vector<Print> parts(static_cast<size_t>(tasks));
  with_type(x, [&](const auto* data) {
    parallel_for(tasks, [&](int64_t t) {
      print_part(data, size, t * kTask, std::min(count, (t + 1) * kTask), places, parts[t]);
    });
  });
  auto out = std::make_unique<Print>();
  out->count = out->total = static_cast<uint64_t>(size);
  for (const Print& part : parts) {
    out->special += part.special;
    out->checksum += part.checksum;
    out->squares += part.squares;
    for (int64_t b = 0; b < kBuckets; b++) out->buckets[b] += part.buckets[b];
  }
  return out;
}

// max, min, mean, L2 norm
void statistics_of(const Arg& x, double* out) {
  const int64_t n = x.size();
  double most = n ? -INFINITY : NAN, least = n ? INFINITY : NAN, sum = 0, squares = 0;
  bool strange = false;
  auto take = [&](double d) {
    most = d > most ? d : most;
    least = d < least ? d : least;
    strange |= std::isnan(d);
    sum += d;
    squares += d * d;
  };
  with_type(x, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    for (int64_t i = 0; i < n; i++) {
      if constexpr (std::is_same_v<T, uint16_t>) take(wide(data[i]));
      else take(static_cast<double>(data[i]));
    }
  });
  out[0] = strange ? NAN : most;
  out[1] = strange ? NAN : least;
  out[2] = n ? sum / n : NAN;
  out[3] = std::sqrt(squares);
}

int64_t item_bytes(const Arg& x) {
  int64_t bytes = 0;
  with_type(x, [&](const auto* data) { bytes = sizeof(*data); });
  return bytes;
}

void write_down(int64_t tap, const Arg& x, const void* data, int64_t bytes) {
  std::lock_guard<std::mutex> guard(files.lock);
  if (!files.values) return;
  check(bytes == 0 || std::fwrite(data, 1, static_cast<size_t>(bytes), files.values) == static_cast<size_t>(bytes),
        "values.bin cannot be written; is the disk full?");
  std::fprintf(files.index, "%ld %ld %ld %s", long(tap), long(files.at), long(bytes), x.type_name);
  for (int i = 0; i < x.rank; i++) std::fprintf(files.index, " %ld", long(x.shape[i]));
  check(std::fputc('\n', files.index) == '\n', "index.txt cannot be written; is the disk full?");
  files.at += bytes;
  files.count++;
}

struct TapState : State {
  int64_t tap;
  explicit TapState(Attributes& a) : tap(a.integer("tap")) {}
};

}  // namespace

// Write from now on into two files of a folder, which must exist; returns whether they could be made.
extern "C" int64_t telechat_tap_begin(const char* folder, int64_t mode) {
  std::lock_guard<std::mutex> guard(files.lock);
  const std::string place = folder;
  files.values = std::fopen((place + "/values.bin").c_str(), "wb");
  files.index = std::fopen((place + "/index.txt").c_str(), "w");
  files.at = files.count = 0;
  files.mode = static_cast<int>(mode);
  return files.values && files.index;
}

// Returns how many tensors were written, or -1 if the disk did not take them.
extern "C" int64_t telechat_tap_end() {
  std::lock_guard<std::mutex> guard(files.lock);
  int failed = 0;
  for (std::FILE** file : {&files.values, &files.index}) {
    if (*file && std::fclose(*file)) failed = 1;
    *file = nullptr;
  }
  return failed ? -1 : files.count;
}

TELECHAT_INIT(Tap, TapState)
TELECHAT_SHAPES1(Tap) { return {1}; }
TELECHAT_RUN(Tap) {  // x -> a token
  if (!files.values) return;
  const Arg x = call[0];
  const int64_t tap = call.state<TapState>().tap;
  if (files.mode == kFingerprint) {
    const auto print = print_of(x);
    write_down(tap, x, print.get(), sizeof(Print));
  } else if (files.mode == kStatistics) {
    double found[4];
    statistics_of(x, found);
    write_down(tap, x, found, sizeof(found));
  } else {
    write_down(tap, x, x.data, x.size() * item_bytes(x));
  }
}
