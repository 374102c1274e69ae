// The virtual machine: decodes the bytecode of a stage and runs it tile by tile.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cast.h"
#include "dvm/program.h"
#include "pool.h"

TELECHAT_SELECT(telechat::DvmHandlers, dvm_handlers)

namespace telechat::dvm {
namespace {

enum Slot { kArena = 3, kWorkspace = 4, kPartials = 5, kRegisterSlot = 2 };

struct Register {
  char* base;
  int64_t by_row, by_column;  // bytes
  bool stream;
};

struct Machine {
  const Program& program;
  const Plan& plan;
  void* const* data;
  float* workspace;

  char* memory(const Binding& b) const {
    switch (b.place) {
      case Place::input: return static_cast<char*>(data[b.index]);
      case Place::output: return static_cast<char*>(data[program.graph().inputs + b.index]);
      case Place::workspace: return reinterpret_cast<char*>(workspace + plan.workspace[b.index]);
      default: return nullptr;
    }
  }
};

float as_float(const char* p, int type) {
  switch (type) {
    case kF16: case kBf16: {
      uint16_t h;
      std::memcpy(&h, p, sizeof h);
      float y;
      Args x{};
      x.d = &y, x.a = &h, x.rows = x.n = 1;
      dvm_handlers().run[type == kF16 ? kLoadHalf : kLoadBf16](x);
      return y;
    }
    case kBool: return *p ? 1.0f : 0.0f;
    default: {
      float y;
      std::memcpy(&y, p, sizeof y);
      return y;
    }
  }
}

// An instruction whose registers a task has found. Addresses change with the tile, extents only with the last one.
struct Step {
  Handler run;
  Args x;
  int64_t size;   // of the tile for which the extents are
  int64_t share;  // which lengthy instruction of its pass this is, or -1
  Code code;
};

class Task {
 public:
  Task(const Machine& m, size_t stage, int64_t index, float* partials)
      : m_(m), stage_(m.program.fusion().stages[stage]), p_(m.plan.stages[stage]), words_(p_.code->words.data()), index_(index), C_(p_.columns) {
    const LoweredStage& lowered = *p_.code;
    count_ = static_cast<int64_t>(lowered.registers.size());
    char* room = static_cast<char*>(scratch_bytes(kRegisterSlot, count_ * (sizeof(Register) + sizeof(char*)) + lowered.instructions * sizeof(Step)));
    steps_ = reinterpret_cast<Step*>(room);
    reg_ = reinterpret_cast<Register*>(steps_ + lowered.instructions);
    now_ = reinterpret_cast<char**>(reg_ + count_);
    float* arena = scratch<float>(kArena, p_.arena_floats);
    const int64_t stride = p_.tile_floats, row = (C_ + 15) / 16 * 16, column = (p_.height + 15) / 16 * 16;
    float* rows = arena + lowered.full_slots * stride;
    float* columns = rows + lowered.row_slots * row;
    float* singles = columns + lowered.column_slots * column;
    for (int64_t i = 0; i < count_; i++) {
      const Binding b = Binding::of(words_[i]);
      Register& r = reg_[i];
      if (b.place == Place::arena) {
        float* at[] = {arena + b.index * stride, rows + b.index * row, columns + b.index * column, singles + b.index * 16};
        r = {reinterpret_cast<char*>(at[int(b.kind)]), 0, b.kind == Kind::row ? 4 : 0, false};
      } else if (b.place == Place::partial) {
        r = {reinterpret_cast<char*>(partials + (b.index * p_.tasks + index) * C_), 0, 4, false};
      } else {
        const int64_t size = bytes_of(b.type);
        r = {m.memory(b), b.kind == Kind::full ? C_ * size : b.kind == Kind::column ? size : 0,
             b.kind == Kind::full || b.kind == Kind::row ? size : 0, b.kind == Kind::full};
        if (r.stream && size == 4 && streams_ < kStreams) stream_[streams_++] = i;
      }
    }
  }

  void run() {
    const int64_t begin = index_ * p_.task_rows, end = std::min(p_.rows, begin + p_.task_rows);
    const LoweredStage& lowered = *p_.code;
    const uint64_t* word = words_ + count_;
    Step* step = steps_;
    const auto decode = [&](size_t count) {
      int64_t share = 0;
      for (size_t i = 0; i < count; i++, word += 2, step++) {
        step->code = Code::of(word);
        step->run = dvm_handlers().run[step->code.id];
        step->size = -1;
        step->x.nexts = 0;
        step->share = step->code.lengthy() ? share++ : -1;
      }
    };
    decode(lowered.prologue.size());
    const auto body = step;
    for (const auto& pass : lowered.passes) {
      word++;
      decode(pass.size());
    }
    const bool whole = p_.width == C_ && C_;
    row_ = begin, h_ = p_.height;
    move(0, C_);
    for (Step* s = steps_; s < body; s++) execute(*s);
    for (row_ = begin; row_ < end; row_ += h_) {
      h_ = std::min(p_.height, end - row_);
      Step* first = body;
      for (size_t index = 0; index < lowered.passes.size(); index++) {
        const auto& pass = lowered.passes[index];
        const int64_t lengthy = lowered.lengthy[index];
        column_ = 0;
        do {
          move(column_, std::min(p_.width, C_ - column_));
          const bool more = whole && row_ + h_ < end;
          for (size_t i = 0; i < pass.size(); i++) {
            if (first[i].share >= 0) {
              hand_over(first[i], more ? lengthy : 0);
            } else if (more) {
              fetch(lengthy == 0, static_cast<int64_t>(i), static_cast<int64_t>(pass.size()));
            }
            execute(first[i]);
          }
          column_ += p_.width;
        } while (column_ < C_);
        first += pass.size();
      }
    }
  }

 private:
  // Go to a tile: `n` columns from `column` on.
  void move(int64_t column, int64_t n) {
    column_ = column, n_ = n;
    size_ = h_ << 32 | n;  // one number to compare: two that were just stored, loaded as a vector, would wait for all stores
    for (int64_t i = 0; i < count_; i++) now_[i] = reg_[i].base + row_ * reg_[i].by_row + column * reg_[i].by_column;
  }

  // The next tile's part of memory, piece `part` of `parts`, on its way into the cache while this one is computed.
  void fetch(bool all, int64_t part, int64_t parts) const {
    for (int64_t i = 0; i < count_; i++) {
      const Register& r = reg_[i];
      if (!r.stream || (!all && r.by_column == 4)) continue;
      const int64_t bytes = h_ * r.by_row;
      const char* next = now_[i] + bytes;
      for (int64_t at = bytes * part / parts / 64 * 64; at < bytes * (part + 1) / parts / 64 * 64; at += 64) __builtin_prefetch(next + at);
    }
  }

  // Of tensors of 4-byte values every `shares`-th one is brought by a lengthy instruction as it goes: it would wait for
  // many lines asked for at once. No shares: there is no next tile.
  void hand_over(Step& step, int64_t shares) {
    Args& x = step.x;
    x.next = next_, x.nexts = 0;
    for (int64_t i = step.share; shares > 0 && i < streams_; i += shares) {
      const int64_t at = stream_[i];
      next_[x.nexts++] = now_[at] + h_ * reg_[at].by_row;
    }
  }

  int64_t stride(Kind k) const { return k == Kind::full ? n_ : k == Kind::column ? 1 : 0; }

  __attribute__((noinline)) void extents(Step& step) const {
    const Code& c = step.code;
    Args& x = step.x;
    step.size = size_;
    x.value = c.value;
    x.absolute = c.flags / kAbsolute;
    const Kind d = c.kinds[0], a = c.kinds[1], b = c.kinds[2], e = c.kinds[3];
    const bool reduces = c.id >= kSum && c.id <= kColumnMin;
    x.sa = x.sb = x.sc = x.sd = 0;
    if (d == Kind::full || reduces) {
      const auto flat = [](Kind k) { return k == Kind::full || k == Kind::single; };
      if (!reduces && flat(a) && flat(b) && flat(e)) {
        x.rows = 1, x.n = h_ * n_;
        x.va = a == Kind::full, x.vb = b == Kind::full, x.vc = e == Kind::full;
      } else {
        x.rows = h_, x.n = n_;
        x.va = a == Kind::full || a == Kind::row, x.vb = b == Kind::full || b == Kind::row, x.vc = e == Kind::full || e == Kind::row;
        x.sd = reduces ? 1 : n_, x.sa = stride(a), x.sb = stride(b), x.sc = stride(e);
      }
    } else {
      x.rows = 1, x.n = d == Kind::column ? h_ : d == Kind::row ? n_ : 1;
      x.va = a == d, x.vb = b == d, x.vc = e == d;
    }
  }

  void execute(Step& step) {
    const Code& c = step.code;
    if (c.flags & kOnce && index_ != 0) return;
    if (step.size != size_) extents(step);
    Args& x = step.x;
    x.d = now_[c.d], x.a = now_[c.a], x.b = now_[c.b], x.c = now_[c.c];
    x.first = column_ == 0;
    if (c.id == kGather) return gather(c, x);
    if (c.id == kSpread) return spread(c, x);
    if (x.n == 0 || x.rows == 0) {
      if (c.id >= kSum && c.id <= kMin) empty(c.id, static_cast<float*>(x.d), x.rows);
      return;
    }
    step.run(x);
  }

  __attribute__((noinline)) static void empty(int id, float* d, int64_t rows) {
    const float inf = std::numeric_limits<float>::infinity();
    std::fill_n(d, rows, id == kMax ? -inf : id == kMin ? inf : 0.0f);
  }

  __attribute__((noinline)) void gather(const Code& c, const Args& x) {
    const Node& node = m_.program.graph().nodes[c.tensor];
    const Node& table = m_.program.graph().nodes[m_.program.graph().input_node[node.attrs[0]]];
    const int64_t count = extent(table.dims[0], m_.plan.symbols.data()), size = bytes_of(table.dtype);
    const bool wide = Binding::of(words_[c.a]).type == kI64;
    const char* from = reg_[c.b].base;
    float* to = static_cast<float*>(x.d);
    for (int64_t r = 0; r < h_; r++, to += n_) {
      const int64_t i = wide ? static_cast<const int64_t*>(x.a)[r] : static_cast<const int32_t*>(x.a)[r];
      if (i < 0 || i >= count) refuse(node, "index %ld of row %ld, expected 0 to %ld", long(i), long(row_ + r), long(count - 1));
      const char* row = from + (i * C_ + column_) * size;
      if (size == 4) {
        std::memcpy(to, row, static_cast<size_t>(n_) * 4);
      } else {
        for (int64_t k = 0; k < n_; k++) to[k] = as_float(row + k * size, table.dtype);
      }
    }
  }

  // A tensor with other ones than rows or columns, spread over a tile element by element.
  __attribute__((noinline)) void spread(const Code& c, const Args& x) {
    const Dims& dims = m_.program.graph().nodes[c.tensor].dims;
    const size_t rank = stage_.domain.size(), pad = rank - dims.size();
    int64_t size[kMaxRank], step[kMaxRank], at[kMaxRank], run = 1;
    const Binding b = Binding::of(words_[c.a]);
    for (size_t i = rank; i-- > 0;) {
      size[i] = std::max<int64_t>(extent(stage_.domain[i], m_.plan.symbols.data()), 1);
      if (C_ == 0 && static_cast<int>(i) >= stage_.split) size[i] = 1;  // the sums of no columns are one number a row
      const int64_t own = i < pad ? 1 : extent(dims[i - pad], m_.plan.symbols.data());
      step[i] = own == 1 && (i < pad || dims[i - pad] == 1) ? 0 : run;
      run *= own;
    }
    const char* from = reg_[c.a].base;
    float* to = static_cast<float*>(x.d);
    const int64_t rows = c.kinds[0] == Kind::row ? 1 : h_, columns = c.kinds[0] == Kind::column ? 1 : n_;
    for (int64_t r = 0; r < rows; r++) {
      int64_t flat = (row_ + r) * std::max<int64_t>(C_, 1) + column_, offset = 0;
      for (size_t i = rank; i-- > 0;) {
        at[i] = flat % size[i];
        flat /= size[i];
        offset += at[i] * step[i];
      }
      for (int64_t k = 0; k < columns; k++) {
        *to++ = as_float(from + offset * bytes_of(b.type), b.type);
        for (size_t i = rank; i-- > 0;) {
          offset += step[i];
          if (++at[i] < size[i]) break;
          offset -= at[i] * step[i];
          at[i] = 0;
        }
      }
    }
  }

  const Machine& m_;
  const Stage& stage_;
  const StagePlan& p_;
  const uint64_t* words_;
  const int64_t index_, C_;
  int64_t count_;
  int64_t row_ = 0, column_ = 0, h_ = 0, n_ = 0, size_ = 0;
  Step* steps_;
  Register* reg_;
  char** now_;  // where each register is for this tile
  static constexpr int kStreams = 8;
  int64_t stream_[kStreams], streams_ = 0;  // registers that lengthy instructions may bring
  const char* next_[kStreams];
};

float identity(int op) {
  const float inf = std::numeric_limits<float>::infinity();
  return op == Sum ? 0.0f : op == Max ? -inf : inf;
}

float joined(int op, float a, float b) {
  if (op == Sum) return a + b;
  if (a != a || b != b) return std::numeric_limits<float>::quiet_NaN();
  return op == Max ? std::max(a, b) : std::min(a, b);
}

}  // namespace

void run(const Program& program, const Plan& plan, void* const* data) {
  Machine machine{program, plan, data, scratch<float>(kWorkspace, plan.workspace.back())};
  for (size_t s = 0; s < plan.stages.size(); s++) {
    const LoweredStage& lowered = *plan.stages[s].code;
    const int64_t tasks = plan.stages[s].tasks, C = plan.stages[s].columns;
    float* partials = nullptr;
    if (!lowered.partials.empty()) {
      partials = scratch<float>(kPartials, tasks * C * static_cast<int64_t>(lowered.partials.size()));
      float* at = partials;
      for (int node : lowered.partials) at = std::fill_n(at, tasks * C, identity(program.graph().nodes[node].op));
    }
    parallel_for(tasks, [&](int64_t i) { Task(machine, s, i, partials).run(); });
    for (size_t p = 0; p < lowered.partials.size(); p++) {
      const int node = lowered.partials[p], op = program.graph().nodes[node].op;
      float* to = machine.workspace + plan.workspace[program.workspace_index(node)];
      const float* from = partials + static_cast<int64_t>(p) * tasks * C;
      std::fill_n(to, C, identity(op));
      for (int64_t t = 0; t < tasks; t++, from += C) {
        for (int64_t i = 0; i < C; i++) to[i] = joined(op, to[i], from[i]);
      }
    }
  }
}

}  // namespace telechat::dvm
