// Bytecode of a program: lowered once from the graph, for all shapes; a Plan holds what depends on the shape.
//
// A stage is a run of 64-bit words:
//   bindings   one word a register: where its memory is
//   prologue   instructions on rows and single numbers, once a task
//   passes     for each: number of instructions, then the instructions, once a tile
// An instruction is two words:
//   id:16 d:12 a:12 b:12 c:12  |  kinds d a b c: 2 bits each (at 56), flags:8 (at 48), tensor:16 (at 32), value:32
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dvm/fuse.h"
#include "dvm/handlers.h"

namespace telechat::dvm {

// Where a register's memory is. `full` and `column` registers move with the tile.
enum class Place : int { arena, input, output, workspace, partial };

struct Binding {
  Place place;
  Kind kind;
  int type;   // of the memory
  int index;  // slot of the arena, input, output, workspace buffer, or column reduction

  uint64_t word() const {
    return uint64_t(place) << 56 | uint64_t(kind) << 48 | uint64_t(type) << 40 | uint64_t(uint32_t(index));
  }
  static Binding of(uint64_t w) { return {Place(w >> 56), Kind(w >> 48 & 0xff), int(w >> 40 & 0xff), int(uint32_t(w))}; }
};

constexpr int kOnce = 1;      // flag: only the first task runs it
constexpr int kAbsolute = 2;  // flag: without the sign of operand a; shifted by one or two, of b or c
constexpr int kRegisterLimit = 4095;

struct Code {
  int id = 0, d = 0, a = 0, b = 0, c = 0;
  Kind kinds[4] = {};
  int flags = 0, tensor = 0;
  float value = 0;

  void words(uint64_t out[2]) const;
  static Code of(const uint64_t w[2]);
  bool lengthy() const;  // computes for long, on a whole tile
};

struct LoweredStage {
  Dims domain;
  int split;
  bool by_rows;  // a whole row in a tile; else parts of rows, in as many passes as reductions follow one another
  int full_slots = 0, row_slots = 0, column_slots = 0, single_slots = 0;
  std::vector<Binding> registers;
  std::vector<Code> prologue;
  std::vector<std::vector<Code>> passes;
  std::vector<int> partials;  // nodes of the column reductions
  std::vector<uint64_t> words;
  std::vector<int64_t> lengthy;  // how many instructions of each pass are
  int64_t instructions, streams;  // streams: tensors of which a tile needs a part

  void finish();  // the words and counts
};

struct StagePlan {
  const LoweredStage* code;
  int64_t rows, columns;
  int64_t height, width;     // of a tile
  int64_t tile_floats, arena_floats;
  int64_t task_rows, tasks;
};

struct Plan {
  std::vector<int64_t> symbols;
  std::vector<StagePlan> stages;
  std::vector<int64_t> workspace;  // floats before each kept value, and the total
};

class Program {
 public:
  Program(const int64_t* words, int64_t count);
  const Graph& graph() const { return graph_; }
  const Fusion& fusion() const { return fusion_; }
  std::shared_ptr<const Plan> plan(const int64_t* shapes);           // from the cache, or encoded now
  std::shared_ptr<const Plan> encode(const int64_t* symbols) const;  // always encoded
  void bind(const int64_t* shapes, int64_t* symbols) const { dvm::bind(graph_, shapes, symbols); }
  std::string explain() const;
  std::string disassemble(const int64_t* shapes);
  int workspace_index(int node) const { return workspace_of_[node]; }
  int workspaces() const { return static_cast<int>(kept_.size()); }

 private:
  LoweredStage lower(size_t stage, bool by_rows) const;
  StagePlan encode_stage(size_t i, const int64_t* symbols) const;

  Graph graph_;
  Fusion fusion_;
  std::vector<int> kept_, workspace_of_;
  std::vector<LoweredStage> rows_, parts_;
  static constexpr int kCached = 16;
  std::mutex lock_;
  std::vector<std::shared_ptr<const Plan>> cache_;  // most recent first
};

void run(const Program& program, const Plan& plan, void* const* data);

}  // namespace telechat::dvm
