// Words of the bytecode; tiles and tasks for a shape, of which the last few are kept.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "dvm/handlers.h"
#include "dvm/program.h"

namespace telechat::dvm {
namespace {

constexpr int64_t kTaskElements = 1 << 15;  // less than this is not worth a second thread
constexpr int64_t kMostTasks = 256;         // each keeps a partial row of a column reduction

struct Cache {
  int64_t first, second;
};
const Cache& cache_bytes() {
  static const Cache found = [] {
    const auto ask = [](int name, int64_t otherwise) {
      const long n = sysconf(name);
      return n > 0 ? int64_t(n) : otherwise;
    };
    return Cache{ask(_SC_LEVEL1_DCACHE_SIZE, 32 << 10), ask(_SC_LEVEL2_CACHE_SIZE, 512 << 10)};
  }();
  return found;
}

int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

int64_t product(const Dims& dims, size_t begin, size_t end, const int64_t* symbols) {
  int64_t n = 1;
  for (size_t i = begin; i < end; i++) n *= extent(dims[i], symbols);
  return n;
}

}  // namespace

void Code::words(uint64_t out[2]) const {
  out[0] = uint64_t(id) << 48 | uint64_t(d) << 36 | uint64_t(a) << 24 | uint64_t(b) << 12 | uint64_t(c);
  uint64_t all = 0;
  for (int i = 0; i < 4; i++) all |= uint64_t(kinds[i]) << (2 * (3 - i));
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  out[1] = all << 56 | uint64_t(flags) << 48 | uint64_t(uint16_t(tensor)) << 32 | bits;
}

bool Code::lengthy() const { return kinds[0] == Kind::full && is_lengthy(id); }

Code Code::of(const uint64_t w[2]) {
  Code code;
  code.id = int(w[0] >> 48);
  code.d = int(w[0] >> 36 & 0xfff);
  code.a = int(w[0] >> 24 & 0xfff);
  code.b = int(w[0] >> 12 & 0xfff);
  code.c = int(w[0] & 0xfff);
  for (int i = 0; i < 4; i++) code.kinds[i] = Kind(w[1] >> (56 + 2 * (3 - i)) & 3);
  code.flags = int(w[1] >> 48 & 0xff);
  code.tensor = int(w[1] >> 32 & 0xffff);
  const auto bits = uint32_t(w[1]);
  std::memcpy(&code.value, &bits, sizeof bits);
  return code;
}

void LoweredStage::finish() {
  streams = full_slots;
  for (const Binding& b : registers) {
    words.push_back(b.word());
    streams += b.place != Place::arena && b.kind == Kind::full;
  }
  streams = std::max<int64_t>(streams, 1);
  const auto add = [&](const Code& c) {
    words.resize(words.size() + 2);
    c.words(&words.back() - 1);
    instructions++;
  };
  instructions = 0;
  for (const Code& c : prologue) add(c);
  for (const auto& pass : passes) {
    words.push_back(pass.size());
    for (const Code& c : pass) add(c);
    lengthy.push_back(std::count_if(pass.begin(), pass.end(), [](const Code& c) { return c.lengthy(); }));
  }
}

Program::Program(const int64_t* words, int64_t count) : graph_(parse(words, count)), fusion_(fuse(graph_)) {
  workspace_of_.assign(graph_.nodes.size(), -1);
  for (size_t i = 0; i < graph_.nodes.size(); i++) {
    if (fusion_.kept[i]) {
      workspace_of_[i] = static_cast<int>(kept_.size());
      kept_.push_back(static_cast<int>(i));
    }
  }
  for (size_t i = 0; i < fusion_.stages.size(); i++) {
    rows_.push_back(lower(i, true));
    parts_.push_back(fusion_.stages[i].split >= 0 ? lower(i, false) : LoweredStage{});
  }
}

StagePlan Program::encode_stage(size_t i, const int64_t* symbols) const {
  const Stage& s = fusion_.stages[i];
  const size_t rank = s.domain.size(), split = s.split < 0 ? rank : size_t(s.split);
  StagePlan p;
  const int64_t R = p.rows = product(s.domain, 0, split, symbols), C = p.columns = product(s.domain, split, rank, symbols);
  const bool by_rows = s.split < 0 || C * 4 * rows_[i].streams <= cache_bytes().second / 2;
  const LoweredStage& code = by_rows ? rows_[i] : parts_[i];
  p.code = &code;
  const int64_t tile = std::max<int64_t>(512, cache_bytes().first * 3 / 4 / 4 / code.streams) / 64 * 64;
  p.width = by_rows ? C : std::min(C, std::max<int64_t>(tile, 1024));
  p.height = by_rows ? std::clamp<int64_t>(C ? tile / C : R, 1, std::max<int64_t>(R, 1)) : 1;
  p.task_rows = (std::max<int64_t>(kTaskElements / std::max<int64_t>(C, 1), 1) + p.height - 1) / p.height * p.height;
  p.task_rows = std::max(p.task_rows, (R / kMostTasks + p.height) / p.height * p.height);
  p.tasks = std::max<int64_t>((R + p.task_rows - 1) / p.task_rows, 1);
  p.tile_floats = round16(p.height * p.width);
  p.arena_floats = code.full_slots * p.tile_floats + code.row_slots * round16(C) + code.column_slots * round16(p.height) + code.single_slots * 16;
  return p;
}

std::shared_ptr<const Plan> Program::encode(const int64_t* symbols) const {
  auto plan = std::make_shared<Plan>();
  plan->symbols.assign(symbols, symbols + graph_.symbols);
  plan->stages.reserve(fusion_.stages.size());
  for (size_t i = 0; i < fusion_.stages.size(); i++) plan->stages.push_back(encode_stage(i, symbols));
  plan->workspace.reserve(kept_.size() + 1);
  int64_t total = 0;
  for (int node : kept_) {
    const Dims& dims = graph_.nodes[node].dims;
    plan->workspace.push_back(total);
    total += round16(product(dims, 0, dims.size(), symbols));
  }
  plan->workspace.push_back(total);
  return plan;
}

std::shared_ptr<const Plan> Program::plan(const int64_t* shapes) {
  int64_t symbols[64];
  bind(shapes, symbols);
  const size_t bytes = static_cast<size_t>(graph_.symbols) * sizeof(int64_t);
  std::lock_guard<std::mutex> guard(lock_);
  for (size_t i = 0; i < cache_.size(); i++) {
    if (std::memcmp(cache_[i]->symbols.data(), symbols, bytes) == 0) {
      std::rotate(cache_.begin(), cache_.begin() + static_cast<long>(i), cache_.begin() + static_cast<long>(i) + 1);
      return cache_[0];
    }
  }
  cache_.insert(cache_.begin(), encode(symbols));
  if (cache_.size() > kCached) cache_.pop_back();
  return cache_[0];
}

}  // namespace telechat::dvm
