// The longest path through a pipeline program (tools/plan/pipeline.py): the same recurrence as tools/plan/schedules/simulate.py,
// with the program laid out once and times in whole picoseconds, so that a step takes 1 to 2 ns an operation.
//
// An operation is the number (kind * chunks + chunk) * micro_batches + micro-batch; kind 0 is F, 1 is B (D where dW stands
// apart), 2 is W.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Step {
  int32_t what;   // kind * chunks + chunk: whose time it takes
  int32_t prev;   // the operation before it on its stage; -1: none
  int32_t from;   // the operation whose output it reads; -1: none, or one before it on its own stage
  uint8_t sent;   // that output comes from another stage
};

struct Pipeline {
  int32_t kinds_chunks;
  std::vector<Step> steps;  // each after those that it waits for
  std::vector<int32_t> ops;
  std::vector<int64_t> end;
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Lays out a program: `lengths` operations of each stage in `ops`, stage after stage; `route` is the stage of each chunk.
// Returns null where operations wait for each other in a circle.
EXPORT void* telechat_pipeline_new(int32_t stages, int32_t chunks, int32_t micros, const int32_t* route,
                                   const int32_t* lengths, const int32_t* ops) {
  auto* p = new Pipeline{3 * chunks, {}, {}, {}};
  std::vector<const int32_t*> next(stages), stop(stages);
  for (int s = 0; s < stages; ++s) {
    next[s] = ops;
    stop[s] = ops += lengths[s];
  }
  std::vector<int32_t> last(stages, -1), done(static_cast<size_t>(3) * chunks * micros, -1);
  auto at = [&](int kind, int chunk, int micro) -> int32_t& { return done[(kind * chunks + chunk) * micros + micro]; };
  for (bool moved = true; moved;) {
    moved = false;
    for (int s = 0; s < stages; ++s) {
      for (; next[s] < stop[s]; ++next[s], moved = true) {
        int32_t op = *next[s], i = op % micros, c = op / micros % chunks, kind = op / micros / chunks;
        int before = kind == 0 ? c - 1 : kind == 1 ? c + 1 : -1;
        bool reads = before >= 0 && before < chunks;
        int32_t from = reads ? at(kind, before, i) : -1;
        if ((reads && from < 0) || (kind > 0 && at(kind - 1, c, i) < 0)) break;
        at(kind, c, i) = static_cast<int32_t>(p->steps.size());
        p->steps.push_back({kind * chunks + c, last[s], from, reads && route[before] != s});
        p->ops.push_back(op);
        last[s] = at(kind, c, i);
      }
    }
  }
  if (!std::equal(next.begin(), next.end(), stop.begin())) {
    delete p;
    return nullptr;
  }
  p->end.resize(p->steps.size());
  return p;
}

EXPORT void telechat_pipeline_delete(void* pipeline) { delete static_cast<Pipeline*>(pipeline); }

// Returns the makespan for the times of each kind and chunk and of a send between stages. Where `path` is given, writes the
// operations of a longest path, last first, and their number; of equally long ways `seed` takes one.
EXPORT int64_t telechat_pipeline_path(void* pipeline, const int64_t* times, int64_t comm, uint64_t seed, int32_t* path,
                                      int32_t* length) {
  auto& p = *static_cast<Pipeline*>(pipeline);
  const int32_t n = static_cast<int32_t>(p.steps.size());
  int32_t at = -1;
  int64_t makespan = -1;
  for (int32_t i = 0; i < n; ++i) {
    const Step& s = p.steps[i];
    int64_t begin = s.prev < 0 ? 0 : p.end[s.prev];
    if (s.from >= 0) begin = std::max(begin, p.end[s.from] + (s.sent ? comm : 0));
    p.end[i] = begin + times[s.what];
    if (p.end[i] > makespan) makespan = p.end[at = i];
  }
  if (path == nullptr) return makespan;
  *length = 0;
  while (at >= 0) {
    path[(*length)++] = p.ops[at];
    const Step& s = p.steps[at];
    int64_t stay = s.prev < 0 ? -1 : p.end[s.prev], read = s.from < 0 ? -1 : p.end[s.from] + (s.sent ? comm : 0);
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    at = read > stay || (read == stay && seed >> 63) ? s.from : s.prev;
  }
  return makespan;
}
