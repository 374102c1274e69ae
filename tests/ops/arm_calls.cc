// Calls functions of a library for a process of another machine (tests/support/arm_library.py): a request on standard
// input is a function's name and its arguments, the reply is its result and the memory that it was given.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <vector>

namespace {

enum Kind { kNumber, kReal, kFunction, kMemory, kMemories };
using Bytes = std::vector<char>;

void take(void* to, size_t n) {
  if (n && std::fread(to, 1, n, stdin) != n) std::exit(0);
}
int64_t number() {
  int64_t x;
  take(&x, sizeof x);
  return x;
}
Bytes bytes() {
  Bytes all(static_cast<size_t>(number()));
  take(all.data(), all.size());
  return all;
}
int64_t function() {
  const Bytes name = bytes();
  void* found = dlsym(RTLD_DEFAULT, name.data());
  if (!found) std::fprintf(stderr, "%s\n", dlerror());
  return reinterpret_cast<int64_t>(found);
}

}  // namespace

int main(int, char** argv) {
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  for (;;) {
    const int64_t called = function();
    int64_t x[11] = {}, *next = x;
    double real[2] = {}, *next_real = real;
    std::list<Bytes> memory;
    std::list<std::vector<char*>> lists;
    const auto keep = [&] {
      memory.push_back(bytes());
      return memory.back().data();
    };
    for (int64_t left = number(); left > 0; left--) {
      switch (number()) {
        case kNumber: *next++ = number(); break;
        case kReal: take(next_real++, sizeof *real); break;
        case kFunction: *next++ = function(); break;
        case kMemory: *next++ = reinterpret_cast<int64_t>(keep()); break;
        case kMemories:
          lists.emplace_back();
          for (int64_t n = number(); n > 0; n--) lists.back().push_back(keep());
          *next++ = reinterpret_cast<int64_t>(lists.back().data());
      }
    }
    // Numbers and reals go to registers of their own, the ninth number and those behind it to the stack (AAPCS64).
    using Any = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double, double, int64_t,
                            int64_t, int64_t);
    const int64_t result =
        reinterpret_cast<Any>(called)(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], real[0], real[1], x[8], x[9], x[10]);
    std::fwrite(&result, sizeof result, 1, stdout);
    for (const Bytes& m : memory) std::fwrite(m.data(), 1, m.size(), stdout);
    std::fflush(stdout);
  }
}
