// A pipeline program laid out once, and its longest paths (tools/plan/search/pipeline_program.py).
#pragma once
#include <cstdint>
#include <vector>

namespace telechat {

struct PipelineProgram {
  struct Step {
    int32_t what;  // kind * chunks + chunk: whose time it takes
    int32_t prev;  // the operation before it on its stage; -1: none
    int32_t from;  // the operation whose output it reads; -1: none, or one before it on its own stage
    uint8_t sent;  // that output comes from another stage
  };

  int32_t chunks, micros;
  std::vector<int32_t> route;  // stage of each chunk
  std::vector<Step> steps;     // each after those that it waits for
  std::vector<int32_t> ops;

  // Returns the makespan for times [3, chunks] and of a send between stages. Where `path` is given, fills it with the operations of
  // a longest path, first to last; of equally long ways `seed` takes one.
  int64_t makespan(const int64_t* times, int64_t send, uint64_t seed = 0, std::vector<int32_t>* path = nullptr) const;
};

}  // namespace telechat
