// Which operations run together: decided once a program, from symbols alone.
#pragma once
#include <string>
#include <vector>

#include "dvm/ir.h"

namespace telechat::dvm {

// How a value lies in the rows x columns of a stage: every element, one row for all, one number a row, one number.
enum class Kind : uint8_t { full, row, column, single };

struct Stage {
  Dims domain;
  int split = -1;  // dimensions before it are rows, the others columns; -1: element by element, no rows
  bool frozen = false;  // holds a reduction: the domain cannot grow
  bool row_reduce = false, column_reduce = false;
  std::vector<int> nodes;
};

struct Fusion {
  std::vector<Stage> stages;
  std::vector<int> stage_of;      // of each node; -1 for what has no instruction
  std::vector<bool> kept;         // values that a later stage reads
  std::vector<std::string> cuts;  // why a stage begins
};

Fusion fuse(const Graph& graph);

// The node whose value an argument reads, behind broadcasts; `reshaped` tells whether a reshape lies between.
int source(const Graph& graph, int node, bool* reshaped = nullptr);

// False where neither rows nor columns of `dims` are all there or all one.
bool kind_of(const Dims& dims, const Stage& stage, Kind* kind);

}  // namespace telechat::dvm
