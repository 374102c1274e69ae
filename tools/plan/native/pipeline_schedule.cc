// Pipeline schedules: list scheduling by due dates, and a climb that moves due dates
// (tools/plan/schedules/synthesise.py, which checks what comes out of here with its own simulator).
//
// An operation is the number (kind * chunks + chunk) * micro_batches + micro-batch; kind 0 is F, 1 is D (B where dX and dW
// stay together), 2 is W. A pair is its forward followed by its backward with kPair set.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int32_t kPair = 1 << 30;

}  // namespace

// As in synthesise.py; arrays have a value for each chunk, `cap` one for each stage.
struct ScheduleProblem {
  int32_t stages, chunks, micros;
  int32_t split;         // dX and dW may be apart
  int32_t pairs;         // a forward and a backward may overlap
  const int32_t* route;  // stage of each chunk
  const double *forward, *back, *weight;  // back is D where split, else B
  const double *talk_forward, *talk_back;  // communication that a pair hides
  const double *activation, *cap;
  double comm, kept;
};

namespace {

struct Random {  // splitmix64
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
};

using Order = std::vector<std::vector<int32_t>>;

struct Policy {
  std::vector<double> due[3];  // per kind: of (chunk, micro-batch); the earliest goes first
  double wait;                 // how much later a due date counts for each unit of time that the stage would wait
  double eager;                // share of W by which it may delay what arrives meanwhile
  std::vector<double> release;  // before which a micro-batch does not enter the first chunk
};

class Scheduler {
 public:
  explicit Scheduler(const ScheduleProblem& p) : p_(p), held_(p.stages), deeper_(p.chunks, 0.0) {
    for (int c = 0; c < p.chunks; ++c) held_[p.route[c]].push_back(c);
    for (auto& held : held_)
      for (size_t k = held.size(); k-- > 1;) deeper_[held[k - 1]] = deeper_[held[k]] + p.activation[held[k]];
  }

  double spread = 0;  // sum of the stages' ends

  // Returns the makespan, infinity where not everything could run.
  double run(const Policy& policy, Order* order) {
    const size_t all = static_cast<size_t>(p_.chunks) * p_.micros;
    policy_ = &policy;
    end_f_.assign(all, kNever);
    end_b_.assign(all, kNever);
    for (auto& next : next_) next.assign(p_.chunks, 0);
    clock_.assign(p_.stages, 0.0);
    memory_.assign(p_.stages, 0.0);
    wake_.assign(p_.stages, 0.0);
    order->resize(p_.stages);
    for (auto& ops : *order) ops.clear();
    for (int64_t left = static_cast<int64_t>(all) * (p_.split ? 3 : 2); left > 0;) {
      int s = static_cast<int>(std::min_element(wake_.begin(), wake_.end()) - wake_.begin());
      if (wake_[s] == kNever) return kNever;
      left -= decide(s, &(*order)[s]);
    }
    spread = 0;
    for (double c : clock_) spread += c;
    return *std::max_element(clock_.begin(), clock_.end());
  }

 private:
  struct Choice {
    int kind = -1, chunk = 0;
    double start = 0, score = kNever;
    void offer(int k, int c, double s, double rank) {
      if (rank < score) *this = {k, c, s, rank};
    }
  };

  double due(int kind, int c) const { return policy_->due[kind][c * p_.micros + next_[kind][c]]; }
  double link(int c, int d) const { return p_.route[c] != p_.route[d] ? p_.comm : 0; }

  // When the next forward (backward) of a chunk has all that it needs; never, if that is not known yet.
  double ready_forward(int c) const {
    int i = next_[0][c];
    if (i >= p_.micros) return kNever;
    return c == 0 ? policy_->release[i] : end_f_[(c - 1) * p_.micros + i] + link(c - 1, c);
  }
  double ready_back(int c) const {
    int i = next_[1][c];
    if (i >= next_[0][c]) return kNever;
    double own = end_f_[c * p_.micros + i];
    return c == p_.chunks - 1 ? own : std::max(own, end_b_[(c + 1) * p_.micros + i] + link(c, c + 1));
  }

  double pair(int f, int b) const {
    double talk = p_.talk_forward[f] + p_.talk_back[b], both = p_.forward[f] + p_.back[b];
    return std::max({p_.forward[f], p_.back[b], both - talk, talk});
  }

  // Let a stage begin one thing at the time it wakes, or sleep. Returns how many operations it has begun.
  int decide(int s, std::vector<int32_t>* out) {
    const double now = wake_[s];
    Choice forward, back, weight;
    double blocked = kNever;
    for (int c : held_[s]) {
      double ready = ready_forward(c);
      if (ready < kNever) {
        // What the deeper chunks of this stage need for one micro-batch stays free: then every micro-batch that was
        // begun can be ended, whatever the order.
        bool fits = memory_[s] + p_.activation[c] + deeper_[c] <= p_.cap[s] * (1 + 1e-10);
        double start = std::max(now, ready);
        if (fits) forward.offer(0, c, start, due(0, c) + policy_->wait * (start - now));
        else if (ready <= now) blocked = std::min(blocked, due(0, c));
      }
      ready = ready_back(c);
      if (ready < kNever) {
        double start = std::max(now, ready);
        back.offer(1, c, start, due(1, c) + policy_->wait * (start - now));
      }
      if (p_.split && next_[2][c] < next_[1][c]) weight.offer(2, c, now, due(2, c));
    }
    Choice best = forward.score < back.score ? forward : back;
    if (weight.kind == 2) {
      double score = std::min(weight.score, blocked);  // only dW lets the blocked forward in
      bool fits = best.start - now >= (1 - policy_->eager) * p_.weight[weight.chunk];
      if (best.kind < 0 || score < best.score || fits) best = weight;
    }
    if (best.kind < 0 || best.start > now) {  // until then, or until something else arrives
      wake_[s] = best.kind < 0 ? kNever : best.start;
      return 0;
    }
    if (p_.pairs && best.kind < 2 && forward.kind == 0 && back.kind == 1) {
      double start = std::max(forward.start, back.start), lasting = pair(forward.chunk, back.chunk);
      if (start + lasting < now + p_.forward[forward.chunk] + p_.back[back.chunk]) {
        begin(s, 0, forward.chunk, start + lasting, 0, out);
        begin(s, 1, back.chunk, start + lasting, kPair, out);
        return 2;
      }
    }
    const double* lasting = best.kind == 0 ? p_.forward : best.kind == 1 ? p_.back : p_.weight;
    begin(s, best.kind, best.chunk, now + lasting[best.chunk], 0, out);
    return 1;
  }

  void begin(int s, int kind, int c, double end, int32_t mark, std::vector<int32_t>* out) {
    int i = next_[kind][c]++;
    out->push_back(((kind * p_.chunks + c) * p_.micros + i) | mark);
    clock_[s] = wake_[s] = end;
    if (kind == 0) {
      memory_[s] += p_.activation[c];
      end_f_[c * p_.micros + i] = end;
      if (c + 1 < p_.chunks) tell(s, p_.route[c + 1], end);
    } else if (kind == 1) {
      memory_[s] -= p_.activation[c] * (p_.split ? 1 - p_.kept : 1);
      end_b_[c * p_.micros + i] = end;
      if (c > 0) tell(s, p_.route[c - 1], end);
    } else {
      memory_[s] -= p_.activation[c] * p_.kept;
    }
  }

  void tell(int from, int to, double end) {
    if (to != from) wake_[to] = std::min(wake_[to], std::max(end + p_.comm, clock_[to]));
  }

  const ScheduleProblem& p_;
  std::vector<std::vector<int>> held_;  // chunks of each stage
  std::vector<double> deeper_;          // activations of the later chunks on the same stage
  const Policy* policy_ = nullptr;
  std::vector<double> end_f_, end_b_, clock_, memory_, wake_;
  std::vector<int> next_[3];
};

// Adds to the due dates of one kind, of some chunks and neighbouring micro-batches; or changes how the stages wait.
class Move {
 public:
  Move(const ScheduleProblem& p, double unit, Random* random, Policy* policy)
      : policy_(policy), wait_(policy->wait), eager_(policy->eager) {
    int what = random->below(16);
    if (what == 0) {
      policy->wait = random->below(3) * 2 * random->unit();
      return;
    }
    if (what == 1) {
      policy->eager = random->below(3) * 0.5;
      return;
    }
    if (what == 2 && policy->release.back() > 0) {  // some enter earlier or later
      release_ = policy->release;
      double later = unit * 6 * (random->unit() - 0.5);
      int from = random->below(p.micros), to = random->below(2) ? p.micros : from + 1;
      for (int i = from; i < to; ++i) policy->release[i] += later;
      return;
    }
    kind_ = random->below(p.split && random->below(4) == 0 ? 3 : 2);
    const int m = p.micros;
    int width = 1 + random->below(random->below(2) ? m : std::min(m, 8));
    int first = random->below(m - width + 1);
    if (random->below(2)) first = std::min(first, random->below(m / 4 + 1));  // the start-up matters most
    int which = random->below(4), c0 = random->below(p.chunks);
    double amount = unit * 8 * (random->unit() - 0.5) * (random->below(3) ? 1 : 6);
    saved_ = policy->due[kind_];
    for (int c = 0; c < p.chunks; ++c) {
      bool in = which == 0 || (which == 1 && c == c0) || (which == 2 && c / p.stages == c0 / p.stages) ||
                (which == 3 && p.route[c] == p.route[c0]);
      for (int i = first; in && i < first + width; ++i) policy->due[kind_][c * m + i] += amount;
    }
  }
  void undo() {
    policy_->wait = wait_;
    policy_->eager = eager_;
    if (!release_.empty()) policy_->release.swap(release_);
    if (kind_ >= 0) policy_->due[kind_].swap(saved_);
  }

 private:
  Policy* policy_;
  double wait_, eager_;
  int kind_ = -1;
  std::vector<double> saved_, release_;
};

}  // namespace

// Schedule by `due` (3 * chunks * micro-batches values) and `release` (one a micro-batch), then change them `steps` times,
// keeping what is not worse, until the makespan reaches `enough`. Writes the best order, stage after stage, the length of
// each stage's, and the dates that make it. Returns its makespan; infinity where the memory does not suffice.
extern "C" __attribute__((visibility("default"))) double telechat_schedule_pipeline(
    const ScheduleProblem* p, double* due, double* release, double* wait, double* eager, uint64_t seed, int64_t steps,
    double enough, int32_t* out, int32_t* lengths) {
  const size_t all = static_cast<size_t>(p->chunks) * p->micros;
  Policy policy;
  for (int k = 0; k < 3; ++k) policy.due[k].assign(due + k * all, due + (k + 1) * all);
  policy.release.assign(release, release + p->micros);
  policy.wait = *wait;
  policy.eager = *eager;
  double unit = 0;
  for (int c = 0; c < p->chunks; ++c) unit += (p->forward[c] + p->back[c] + p->weight[c]) / (3 * p->chunks);
  Scheduler scheduler(*p);
  Random random{seed};
  Order best, order;
  double makespan = scheduler.run(policy, &best), spread = scheduler.spread;
  for (int64_t k = 0; k < steps && makespan > enough; ++k) {
    Move move(*p, unit, &random, &policy);
    double got = scheduler.run(policy, &order);
    if (got < makespan || (got == makespan && scheduler.spread <= spread)) {
      makespan = got;
      spread = scheduler.spread;
      std::swap(best, order);
    } else {
      move.undo();
    }
  }
  for (int k = 0; k < 3; ++k) std::copy(policy.due[k].begin(), policy.due[k].end(), due + k * all);
  std::copy(policy.release.begin(), policy.release.end(), release);
  *wait = policy.wait;
  *eager = policy.eager;
  for (auto& ops : best) {
    *lengths++ = static_cast<int32_t>(ops.size());
    out = std::copy(ops.begin(), ops.end(), out);
  }
  return makespan;
}
