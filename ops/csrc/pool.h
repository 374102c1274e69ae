// Worker threads of the library.
//
// Work is cut into tasks by shapes only, never by the number of threads, and a task is run by one thread
// from start to end: results are equal to the last bit whatever the number of threads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace telechat {

int threads();              // threads that share the work, the caller included
void set_threads(int n);    // clamped to [1, 64]; default: the processors this process may use

using Task = void (*)(void* context, int64_t index);

// Run task(context, i) for every i in [0, count). The caller works too and waits only for helpers that have
// taken a task: a sleeping helper costs nothing. Re-entrant; a task may itself call parallel(). The first
// exception of a task is thrown again here, after all others have ended.
void parallel(int64_t count, Task task, void* context);

template <typename F>
void parallel_for(int64_t count, F&& body) {
  parallel(count, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); },
           const_cast<void*>(static_cast<const void*>(&body)));
}

// The same with body(i), in tasks of `step` indices next to each other.
template <typename F>
void parallel_for_steps(int64_t count, int64_t step, F&& body) {
  parallel_for((count + step - 1) / step, [&](int64_t task) {
    const int64_t end = (task + 1) * step < count ? (task + 1) * step : count;
    for (int64_t i = task * step; i < end; i++) body(i);
  });
}

// Memory of this thread, aligned to 64 bytes, kept for the next call; `slot` in [0, 10) tells apart buffers that
// are used together, and the last two are our matrix product's. Contents are undefined.
void* scratch_bytes(int slot, size_t bytes);
template <typename T>
T* scratch(int slot, int64_t count) {
  return static_cast<T*>(scratch_bytes(slot, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace telechat
