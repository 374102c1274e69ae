// The longest path through a pipeline program (tools/plan/search/pipeline_program.py): the same recurrence as tools/plan/schedules/simulate.py,
// with the program laid out once and times in whole picoseconds, so that a step takes 1 to 2 ns an operation.
//
// An operation is the number (kind * chunks + chunk) * micro_batches + micro-batch; kind 0 is F, 1 is B (D where dW is
// apart), 2 is W.
#include <algorithm>

#include "pipeline.h"

namespace telechat {

int64_t PipelineProgram::makespan(const int64_t* times, int64_t send, uint64_t seed, std::vector<int32_t>* path) const {
  static thread_local std::vector<int64_t> ends;
  const int32_t n = static_cast<int32_t>(steps.size());
  if (ends.size() < steps.size()) ends.resize(steps.size());
  int64_t* end = ends.data();
  int32_t at = -1;
  int64_t makespan = -1;
  for (int32_t i = 0; i < n; ++i) {
    const Step& s = steps[i];
    int64_t begin = s.prev < 0 ? 0 : end[s.prev];
    if (s.from >= 0) begin = std::max(begin, end[s.from] + (s.sent ? send : 0));
    end[i] = begin + times[s.what];
    if (end[i] > makespan) makespan = end[at = i];
  }
  if (path == nullptr) return makespan;
  path->clear();
  while (at >= 0) {
    path->push_back(ops[at]);
    const Step& s = steps[at];
    int64_t stay = s.prev < 0 ? -1 : end[s.prev], read = s.from < 0 ? -1 : end[s.from] + (s.sent ? send : 0);
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    at = read > stay || (read == stay && seed >> 63) ? s.from : s.prev;
  }
  std::reverse(path->begin(), path->end());
  return makespan;
}

}  // namespace telechat

#define EXPORT extern "C" __attribute__((visibility("default")))

using telechat::PipelineProgram;

// Lays out a program: `lengths` operations of each stage in `ops`, stage after stage; `route` is the stage of each chunk.
// Returns null where operations wait for each other in a cycle.
EXPORT void* telechat_pipeline_new(int32_t stages, int32_t chunks, int32_t micros, const int32_t* route,
                                   const int32_t* lengths, const int32_t* ops) {
  auto* p = new PipelineProgram{chunks, micros, {route, route + chunks}, {}, {}};
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
  return p;
}

EXPORT void telechat_pipeline_delete(void* pipeline) { delete static_cast<PipelineProgram*>(pipeline); }

// Returns the makespan for times [3, chunks]; writes how often a longest path takes each of them and sends, [3 chunks + 1]. Of equally
// long paths `seed` takes one.
EXPORT int64_t telechat_pipeline_path(void* pipeline, const int64_t* times, int64_t send, uint64_t seed, int64_t* counts) {
  const auto& p = *static_cast<PipelineProgram*>(pipeline);
  std::vector<int32_t> ops;
  const int64_t makespan = p.makespan(times, send, seed, &ops);
  std::fill(counts, counts + 3 * p.chunks + 1, 0);
  int32_t before = -1;
  for (int32_t op : ops) {
    const int32_t what = op / p.micros, stage = p.route[what % p.chunks];
    ++counts[what];
    counts[3 * p.chunks] += before >= 0 && stage != before;
    before = stage;
  }
  return makespan;
}
