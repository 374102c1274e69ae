// What Python and MindSpore call.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "aot.h"
#include "dvm/program.h"

namespace telechat::dvm {
namespace {

const char* kInstructionNames[] = {
#define X(name, code, text) #text,
    TELECHAT_DVM_UNARY(X) TELECHAT_DVM_BINARY(X)
#undef X
#define X(name, code, text) "mul_" #text,
    TELECHAT_DVM_UNARY(X)
#undef X
    "const", "copy", "select", "mul_add", "add_add", "mul_mul", "add_mul", "sub_mul", "exp_sub", "round_f16", "round_bf16", "to_i32", "from_i32", "to_bool",
    "neg_i32", "abs_i32", "add_i32", "sub_i32", "mul_i32", "max_i32", "min_i32", "eq_i32", "ne_i32", "lt_i32", "le_i32",
    "gt_i32", "ge_i32", "sum", "sum_product", "max", "min", "column_sum", "column_sum_product", "column_max", "column_min",
    "load_f16", "load_bf16", "load_bool", "store_f16", "store_bf16", "store_bool", "spread", "gather"};
static_assert(sizeof kInstructionNames / sizeof *kInstructionNames == kInstructions);

std::string dims_text(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); i++) {
    text += (i ? ", " : "") + (dims[i] < 0 ? "#" + std::to_string(-1 - dims[i]) : std::to_string(dims[i]));
  }
  return text + "]";
}

std::string register_text(const LoweredStage& s, int r) {
  const Binding& b = s.registers[r];
  static const char* place[] = {"", "in", "out", "tmp", "part"};
  static const char kind[] = {'F', 'R', 'C', 'S'};
  if (b.place == Place::arena) return std::string(1, kind[int(b.kind)]) + std::to_string(b.index);
  return std::string(place[int(b.place)]) + std::to_string(b.index) + "." + kind[int(b.kind)];
}

int operands(int id) {
  if (id == kConst) return 0;
  if (id >= kSelect && id <= kSubMul) return 3;
  const bool binary = (id >= kMulNeg && id <= kMulCos) || (id >= static_cast<int>(kAdd) && id <= static_cast<int>(kOr)) || id == kExpSub ||
                      (id >= kAddInt && id <= kGreaterEqualInt) || id == kSumProduct || id == kColumnSumProduct || id == kGather;
  return binary ? 2 : 1;
}

void print(std::string* text, const LoweredStage& s, const Code& c, const uint64_t w[2]) {
  char line[160];
  std::snprintf(line, sizeof line, "    %016lx %016lx  %-18s %s", static_cast<unsigned long>(w[0]), static_cast<unsigned long>(w[1]),
                kInstructionNames[c.id], register_text(s, c.d).c_str());
  *text += line;
  const int all[] = {c.a, c.b, c.c};
  for (int i = 0; i < operands(c.id); i++) {
    const std::string at = register_text(s, all[i]);
    *text += ", " + (c.flags & kAbsolute << i ? "|" + at + "|" : at);
  }
  if (c.id == kConst) {
    std::snprintf(line, sizeof line, ", %g", static_cast<double>(c.value));
    *text += line;
  }
  if (c.flags & kOnce) *text += "  ; first task only";
  *text += "\n";
}

int64_t copy_text(const std::string& from, char* text, int64_t room) {
  if (room > 0) std::snprintf(text, static_cast<size_t>(room), "%s", from.c_str());
  return static_cast<int64_t>(from.size());
}

}  // namespace

std::string Program::disassemble(const int64_t* shapes) {
  const auto p = plan(shapes);
  std::string text;
  char line[256];
  for (size_t i = 0; i < p->stages.size(); i++) {
    const StagePlan& at = p->stages[i];
    const LoweredStage& s = *at.code;
    std::snprintf(line, sizeof line, "stage %zu: %ld rows x %ld columns, tiles of %ld x %ld, %ld task%s, arena %ld floats, %zu words\n", i,
                  long(at.rows), long(at.columns), long(at.height), long(at.width), long(at.tasks), at.tasks == 1 ? "" : "s",
                  long(at.arena_floats), s.words.size());
    text += line;
    const uint64_t* w = s.words.data() + s.registers.size();
    if (!s.prologue.empty()) text += "  once a task:\n";
    for (size_t k = 0; k < s.prologue.size(); k++, w += 2) print(&text, s, Code::of(w), w);
    for (size_t pass = 0; pass < s.passes.size(); pass++) {
      const uint64_t count = *w++;
      text += s.passes.size() > 1 ? "  once a tile, pass " + std::to_string(pass) + ":\n" : "  once a tile:\n";
      for (uint64_t k = 0; k < count; k++, w += 2) print(&text, s, Code::of(w), w);
    }
  }
  return text;
}

std::string Program::explain() const {
  std::string text = "{\"stages\": [";
  for (size_t i = 0; i < fusion_.stages.size(); i++) {
    const Stage& s = fusion_.stages[i];
    const char* pattern = s.row_reduce && s.column_reduce ? "rows and columns" : s.row_reduce ? "row" : s.column_reduce ? "column" : s.split >= 0 ? "broadcast" : "element";
    text += (i ? ", " : "") + std::string("{\"pattern\": \"") + pattern + "\", \"domain\": \"" + dims_text(s.domain) + "\", \"split\": " + std::to_string(s.split) + ", \"nodes\": [";
    for (size_t k = 0; k < s.nodes.size(); k++) text += (k ? ", " : "") + std::to_string(s.nodes[k]);
    text += "]}";
  }
  text += "], \"cuts\": [";
  for (size_t i = 0; i < fusion_.cuts.size(); i++) text += (i ? ", \"" : "\"") + fusion_.cuts[i] + "\"";
  return text + "], \"kept\": " + std::to_string(kept_.size()) + "}";
}

}  // namespace telechat::dvm

using telechat::dvm::Program;

extern "C" void* dvm_create(const int64_t* words, int64_t count) {
  void* made = nullptr;
  telechat::guarded("dvm", [&] { made = new Program(words, count); });
  return made;
}
extern "C" void dvm_destroy(void* p) { delete static_cast<Program*>(p); }

extern "C" int dvm_encode(void* p, const int64_t* shapes) {
  return telechat::guarded("dvm", [&] { static_cast<Program*>(p)->plan(shapes); });
}

// data: inputs, then outputs; shapes: the inputs', concatenated.
extern "C" int dvm_run(void* p, void* const* data, const int64_t* shapes) {
  return telechat::guarded("dvm", [&] {
    auto* program = static_cast<Program*>(p);
    telechat::dvm::run(*program, *program->plan(shapes), data);
  });
}

// Extents of all outputs one after the other; returns how many numbers, or -1.
extern "C" int64_t dvm_output_shapes(void* p, const int64_t* shapes, int64_t* dims) {
  int64_t count = -1;
  telechat::guarded("dvm", [&] {
    const auto& g = static_cast<Program*>(p)->graph();
    int64_t symbols[64];
    static_cast<Program*>(p)->bind(shapes, symbols);
    int64_t n = 0;
    for (int64_t out = 0; out < g.outputs; out++) {
      for (const auto& node : g.nodes) {
        if (node.op != telechat::dvm::Store || node.attrs[0] != out) continue;
        for (int64_t d : node.dims) dims[n++] = telechat::dvm::extent(d, symbols);
      }
    }
    count = n;
  });
  return count;
}

extern "C" int64_t dvm_disassemble(void* p, const int64_t* shapes, char* text, int64_t room) {
  int64_t n = -1;
  telechat::guarded("dvm", [&] { n = telechat::dvm::copy_text(static_cast<Program*>(p)->disassemble(shapes), text, room); });
  return n;
}
extern "C" int64_t dvm_explain(void* p, char* text, int64_t room) {
  return telechat::dvm::copy_text(static_cast<Program*>(p)->explain(), text, room);
}

// Nanoseconds of each of `repeats` encodings, the cache left aside.
extern "C" int dvm_time_encode(void* p, const int64_t* shapes, int64_t repeats, double* nanoseconds) {
  return telechat::guarded("dvm", [&] {
    int64_t symbols[64];
    for (int64_t i = 0; i < repeats; i++) {
      const auto begin = std::chrono::steady_clock::now();
      static_cast<Program*>(p)->bind(shapes, symbols);
      const auto plan = static_cast<Program*>(p)->encode(symbols);
      nanoseconds[i] = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
    }
  });
}

// "code name" lines of every operation, for the test that holds Python's table to this one.
extern "C" int64_t dvm_opcode_names(char* text, int64_t room) {
  std::string all;
#define X(name, code, text) all += std::to_string(code) + " " #text "\n";
  TELECHAT_DVM_UNARY(X) TELECHAT_DVM_BINARY(X) TELECHAT_DVM_OTHER(X)
#undef X
  return telechat::dvm::copy_text(all, text, room);
}

// ------------------------------------------------------------------ the MindSpore node: attribute `prog`, one or more results

namespace {

using namespace telechat;

struct DvmState : State {
  Program program;
  explicit DvmState(Attributes& a) : DvmState(a.integers("prog")) {}
  explicit DvmState(const std::vector<int64_t>& words) : program(words.data(), static_cast<int64_t>(words.size())) {}
};

std::vector<Shape> result_shapes(const Inputs& in) {
  const auto words = in.attributes().integers("prog");
  const dvm::Graph g = dvm::parse(words.data(), static_cast<int64_t>(words.size()));
  std::vector<int64_t> symbols(g.symbols, -1);
  for (int64_t i = 0; i < g.inputs; i++) {
    const auto& dims = g.nodes[g.input_node[i]].dims;
    for (size_t k = 0; k < dims.size(); k++) {
      if (dims[k] < 0 && in.shapes[i][k] >= 0) symbols[-1 - dims[k]] = in.shapes[i][k];
    }
  }
  std::vector<Shape> all(g.outputs);
  for (const auto& node : g.nodes) {
    if (node.op != dvm::Store) continue;
    for (int64_t d : node.dims) all[node.attrs[0]].push_back(d >= 0 ? d : symbols[-1 - d]);
  }
  return all;
}

void run_node(const Call& call) {
  auto& program = call.state<DvmState>().program;
  const auto& g = program.graph();
  std::vector<int64_t> shapes;
  std::vector<void*> data;
  for (int i = 0; i < g.inputs + g.outputs; i++) {
    const Arg x = call[i];
    data.push_back(x.data);
    if (i >= g.inputs) continue;
    const auto& load = g.nodes[g.input_node[i]];
    check(x.rank == static_cast<int>(load.dims.size()), "input %d has rank %d, expected %zu", i, x.rank, load.dims.size());
    check(std::strcmp(x.type_name, dvm::type_name(load.dtype)) == 0, "input %d is %s, expected %s", i, x.type_name, dvm::type_name(load.dtype));
    shapes.insert(shapes.end(), x.shape, x.shape + x.rank);
  }
  dvm::run(program, *program.plan(shapes.data()), data.data());
}

}  // namespace

TELECHAT_INIT(Dvm, DvmState)
TELECHAT_SHAPES1(Dvm) { return result_shapes(in)[0]; }
TELECHAT_RUN(Dvm) { run_node(call); }

TELECHAT_INIT(DvmMulti, DvmState)
TELECHAT_SHAPES(DvmMulti) { return result_shapes(in); }
TELECHAT_RUN(DvmMulti) { run_node(call); }
