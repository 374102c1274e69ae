// Errors of the native library: thrown inside, turned into a return code and a message at the border.
#pragma once
#include <cstdio>
#include <stdexcept>
#include <string>

namespace telechat {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throw unless `ok`; the format says what was found and what was expected.
template <typename... Args>
void check(bool ok, const char* format, Args... args) {
  if (__builtin_expect(ok, 1)) return;
  char text[512];
  if constexpr (sizeof...(Args) == 0) {
    std::snprintf(text, sizeof text, "%s", format);
  } else {
    std::snprintf(text, sizeof text, format, args...);
  }
  throw Error(text);
}

void set_last_error(const std::string& message);  // kept for telechat_last_error()

}  // namespace telechat
