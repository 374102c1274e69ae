// Copies of many arrays at once: a snapshot of all parameters between two steps.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "pool.h"

namespace {
constexpr int64_t kPiece = 1 << 20;
constexpr int64_t kLine = 64;

// Stores past the caches: the copy is not read soon, and its lines need not be fetched before they are overwritten.
void copy_past_caches(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t kAhead = 2048;
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & (kLine - 1));
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  const int64_t whole = bytes / kLine * kLine;
  for (int64_t i = 0; i < whole; i += kLine) {
    __builtin_prefetch(from + i + kAhead);  // past the end: no fault
    const __m128i* source = reinterpret_cast<const __m128i*>(from + i);
    __m128i* place = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(place, a);
    _mm_stream_si128(place + 1, b);
    _mm_stream_si128(place + 2, c);
    _mm_stream_si128(place + 3, d);
  }
  _mm_sfence();
  std::memcpy(to + whole, from + whole, bytes - whole);
#else
  std::memcpy(to, from, bytes);
#endif
}

struct Piece {
  char* to;
  const char* from;
  int64_t bytes;
};
}  // namespace

// Copies `bytes[i]` from `from[i]` to `to[i]`, on this thread or on all; the arrays do not overlap.
extern "C" void telechat_copy(int64_t count, char* const* to, const char* const* from, const int64_t* bytes,
                              bool all_threads) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; i++) {
    for (int64_t at = 0; at < bytes[i]; at += kPiece) {
      pieces.push_back({to[i] + at, from[i] + at, bytes[i] - at < kPiece ? bytes[i] - at : kPiece});
    }
  }
  const auto copy = [](const Piece& piece) { copy_past_caches(piece.to, piece.from, piece.bytes); };
  if (all_threads) {
    telechat::parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i) { copy(pieces[i]); });
  } else {
    std::for_each(pieces.begin(), pieces.end(), copy);
  }
}
