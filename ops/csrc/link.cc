// Messages between the processes of a run: MindSpore's CPU backend has collectives, but no Send, no Receive and no
// AlltoAllV.
//
// Each other process is a connected socket with a thread that reads and one that writes, so a sender waits for no
// receiver, and rows travel while the graph computes. A message is its tag, its length and its bytes; a receiver takes
// them by tag, in any order.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <sys/socket.h>

#include "aot.h"
#include "trial.h"

using namespace telechat;

namespace {

using Bytes = std::vector<char>;

struct Header {
  int64_t tag, bytes, sent;
};

// Nanoseconds of the clock that hosts share, as far as they do; what is between two hosts cancels over both directions.
int64_t wall_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

struct Message {
  Moment at;  // of which it was handed over, or arrived
  Bytes bytes;
  int64_t time = 0;  // by the wall clock, of which it was handed over; of one that arrived, how long it was on its way
};

// Whose messages are timed apart: those of pipelines, and those that carry rows to experts.
enum Kind { kPipeline, kExchange, kKinds };

Trial trial;

class Link {
 public:
  explicit Link(int socket) : socket_(socket) {
    std::thread([this] { read(); }).detach();
    std::thread([this] { write(); }).detach();
  }

  void send(int64_t tag, Bytes bytes) {
    std::lock_guard<std::mutex> held(lock_);
    leaving_.emplace_back(tag, Message{Clock::now(), std::move(bytes), wall_clock()});
    change_.notify_all();
  }

  Message take(int64_t tag, int rank, Kind kind) {
    std::unique_lock<std::mutex> held(lock_);
    const auto there = [&] { return !arrived_[tag].empty(); };
    change_.wait(held, [&] { return there() || closed_; });
    // Whoever watches the processes knows why one has ended, and ends this one, too.
    if (!there()) change_.wait_for(held, std::chrono::seconds(30), there);
    check(there(), "rank %d closed its connection before message %ld", rank, static_cast<long>(tag));
    Message message = std::move(arrived_[tag].front());
    arrived_[tag].pop_front();
    way_s_[kind] += 1e-9 * static_cast<double>(message.time);
    return message;
  }

  // Give how long the messages were on their way that were taken since the last call, and begin anew.
  void ways(double* to) {
    std::lock_guard<std::mutex> held(lock_);
    for (double& s : way_s_) *to++ = s, s = 0;
  }

 private:
  bool all(bool out, const void* data, int64_t bytes) {
    for (char* at = static_cast<char*>(const_cast<void*>(data)); bytes > 0;) {
      const ssize_t done = out ? ::send(socket_, at, bytes, MSG_NOSIGNAL) : ::recv(socket_, at, bytes, 0);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return false;
      at += done, bytes -= done;
    }
    return true;
  }

  void read() {
    Header header;
    while (all(false, &header, sizeof header)) {
      Bytes bytes(header.bytes);
      if (!all(false, bytes.data(), header.bytes)) break;
      const int64_t way = wall_clock() - header.sent;
      std::lock_guard<std::mutex> held(lock_);
      arrived_[header.tag].push_back({Clock::now(), std::move(bytes), way});
      change_.notify_all();
    }
    std::lock_guard<std::mutex> held(lock_);
    closed_ = true;
    change_.notify_all();
  }

  void write() {
    for (Moment free{};;) {
      std::unique_lock<std::mutex> held(lock_);
      change_.wait(held, [&] { return !leaving_.empty(); });
      auto [tag, message] = std::move(leaving_.front());
      leaving_.pop_front();
      held.unlock();
      const Bytes& bytes = message.bytes;
      const auto [lasts, late] = trial.of(bytes.size());
      free = std::max(free, message.at) + lasts;
      std::this_thread::sleep_until(free + late);
      Header header{tag, static_cast<int64_t>(bytes.size()), message.time};
      if (!all(true, &header, sizeof header) || !all(true, bytes.data(), header.bytes)) return;
    }
  }

  const int socket_;
  std::mutex lock_;
  std::condition_variable change_;
  std::deque<std::pair<int64_t, Message>> leaving_;
  std::map<int64_t, std::deque<Message>> arrived_;
  bool closed_ = false;
  double way_s_[kKinds] = {};
};

std::mutex links_lock;
std::map<int, Link*> links;  // never freed: their threads run to the end of the process

Link& link_to(int rank) {
  std::lock_guard<std::mutex> held(links_lock);
  const auto found = links.find(rank);
  check(found != links.end(), "there is no connection to rank %d", rank);
  return *found->second;
}

struct MessageState : State {
  int rank;
  int64_t tag;
  explicit MessageState(Attributes& a) : rank(static_cast<int>(a.integer("peer"))), tag(a.integer("tag")) {}
};

// Experts spread evenly over ranks. A device has rows sorted by expert, and behind them rows that go nowhere; after the exchange,
// all devices' rows for its own experts, sorted by expert and then by sender, and zeros behind them. There is room for the worst
// routing: `times` as many rows as a device has.
std::mutex kept_lock;
std::map<std::pair<int64_t, int64_t>, std::deque<Message>> kept;  // own parts of exchanges under way, by own rank and tag

struct ExpertState : State {
  std::vector<int64_t> ranks;
  int64_t member, tag, times;
  explicit ExpertState(Attributes& a)
      : ranks(a.integers("ranks")), member(a.integer("member")), tag(a.integer("tag")), times(a.integer("times")) {}

  // Send each member its part, and keep this one's own.
  void start(std::vector<Bytes> parts) const {
    for (size_t r = 0; r < ranks.size(); r++) {
      if (static_cast<int64_t>(r) != member) link_to(static_cast<int>(ranks[r])).send(tag, std::move(parts[r]));
    }
    std::lock_guard<std::mutex> held(kept_lock);
    kept[{ranks[member], tag}].push_back({Clock::now(), std::move(parts[member])});
  }

  // Return what each member has sent since the start, this one's own part included.
  std::vector<Bytes> finish() const {
    const Moment begun = Clock::now();
    std::vector<Bytes> parts(ranks.size());
    Moment arrived{};
    size_t most = 0;
    for (size_t r = 0; r < ranks.size(); r++) {
      const int rank = static_cast<int>(ranks[r]);
      if (static_cast<int64_t>(r) == member) continue;
      Message message = link_to(rank).take(tag, rank, kExchange);
      arrived = std::max(arrived, message.at), most = std::max(most, message.bytes.size());
      parts[r] = std::move(message.bytes);
    }
    const Moment done = Clock::now();
    std::lock_guard<std::mutex> held(kept_lock);
    auto& own = kept[{ranks[member], tag}];
    check(!own.empty(), "exchange %ld is waited for and was not started", static_cast<long>(tag));
    trial.write(tag, most, {own.front().at, arrived, begun, done});
    parts[member] = std::move(own.front().bytes);
    own.pop_front();
    return parts;
  }
};

// Where the rows begin of each expert, and behind them all.
std::vector<int64_t> starts_of(const int32_t* sizes, int64_t experts) {
  std::vector<int64_t> start(experts + 1, 0);
  for (int64_t e = 0; e < experts; e++) {
    check(sizes[e] >= 0, "expert %ld has %d rows", static_cast<long>(e), sizes[e]);
    start[e + 1] = start[e] + sizes[e];
  }
  return start;
}

// Call visit(member, its row, row here) for the rows that each member has sent, `sizes` [member, expert], in blocks.
template <typename Visit>
void sorted_by_expert(const int32_t* sizes, int64_t members, int64_t experts, Visit visit) {
  std::vector<int64_t> row(members, 0);
  for (int64_t e = 0, here = 0; e < experts; e++) {
    for (int64_t r = 0; r < members; r++) {
      const int64_t count = sizes[r * experts + e];
      visit(r, row[r], here, count);
      row[r] += count, here += count;
    }
  }
}

// What each member gets of x [P, H] sorted by expert: the numbers of rows of its experts, then the rows.
std::vector<Bytes> parts_to_experts(const Call& call, const ExpertState& s) {
  const auto R = static_cast<int64_t>(s.ranks.size());
  const int64_t E = call[1].size(), e = E / R, P = call[0].dim(0), width = P ? call[0].bytes() / P : 0;
  const auto* sizes = call[1].as<const int32_t>("sizes");
  const auto start = starts_of(sizes, E);
  check(E == e * R && start[E] <= P, "%ld experts on %ld devices have %ld of %ld rows", static_cast<long>(E), static_cast<long>(R),
        static_cast<long>(start[E]), static_cast<long>(P));
  const char* x = static_cast<const char*>(call[0].data);
  std::vector<Bytes> parts(R);
  for (int64_t r = 0; r < R; r++) {
    const char* counts = reinterpret_cast<const char*>(sizes + r * e);
    parts[r].assign(counts, counts + e * sizeof(int32_t));
    parts[r].insert(parts[r].end(), x + start[r * e] * width, x + start[(r + 1) * e] * width);
  }
  return parts;
}

// Sort by expert what the members have sent, into the last three arguments.
void rows_at_experts(const Call& call, const ExpertState& s, const std::vector<Bytes>& parts) {
  const auto R = static_cast<int64_t>(s.ranks.size());
  const int64_t E = call[1].size(), e = E / R, P = call[0].dim(0), width = P ? call[0].bytes() / P : 0;
  const int64_t head = e * static_cast<int64_t>(sizeof(int32_t));
  const int first = call.count() - 3;
  char* rows = static_cast<char*>(call[first].data);
  auto *own = call[first + 1].as<int32_t>("own sizes"), *got = call[first + 2].as<int32_t>("sizes by sender");
  for (int64_t r = 0; r < R; r++) {
    check(static_cast<int64_t>(parts[r].size()) >= head, "rank %ld sent %ld bytes", static_cast<long>(s.ranks[r]),
          static_cast<long>(parts[r].size()));
    std::memcpy(got + r * e, parts[r].data(), head);
    const int64_t said = starts_of(got + r * e, e)[e];
    check(said <= P && static_cast<int64_t>(parts[r].size()) == head + said * width, "rank %ld sent %ld bytes for %ld of %ld rows",
          static_cast<long>(s.ranks[r]), static_cast<long>(parts[r].size()), static_cast<long>(said), static_cast<long>(P));
  }
  const int64_t room = P * s.times, arrived = starts_of(got, E)[E];
  check(arrived <= room, "%ld rows arrived, with room for %ld", static_cast<long>(arrived), static_cast<long>(room));
  std::memset(rows, 0, room * width);
  std::fill(own, own + e, 0);
  sorted_by_expert(got, R, e, [&](int64_t r, int64_t from, int64_t to, int64_t count) {
    if (count) std::memcpy(rows + to * width, parts[r].data() + head + from * width, count * width);
  });
  for (int64_t i = 0; i < E; i++) own[i % e] += got[i];
  own[e - 1] += static_cast<int32_t>(room - arrived);
}

std::vector<Shape> shapes_at_experts(const Inputs& in) {
  const auto members = static_cast<int64_t>(in.attributes().integers("ranks").size());
  return {{in.dim(0, 0) * in.attributes().integer("times"), in.dim(0, 1)}, {in.dim(1, 0) / members}, {in.dim(1, 0)}};
}

// What each member gets back of y [P times, H]: its rows, in its own order.
std::vector<Bytes> parts_from_experts(const Call& call, const ExpertState& s) {
  const auto R = static_cast<int64_t>(s.ranks.size());
  const int64_t E = call[1].size(), e = E / R, room = call[0].dim(0), width = room ? call[0].bytes() / room : 0;
  const auto *sizes = call[1].as<const int32_t>("sizes"), *got = call[2].as<const int32_t>("sizes by sender");
  const int64_t own = starts_of(sizes, E)[E];
  check(own * s.times <= room && starts_of(got, E)[E] <= room, "sizes of %ld rows, and %ld rows", static_cast<long>(own),
        static_cast<long>(room));
  const char* y = static_cast<const char*>(call[0].data);
  std::vector<Bytes> parts(R);
  for (int64_t r = 0; r < R; r++) parts[r].resize(starts_of(got + r * e, e)[e] * width);
  sorted_by_expert(got, R, e, [&](int64_t r, int64_t to, int64_t from, int64_t count) {
    if (count) std::memcpy(parts[r].data() + to * width, y + from * width, count * width);
  });
  return parts;
}

// Put what the members have sent back in the order of the experts, into the last argument.
void rows_from_experts(const Call& call, const ExpertState& s, const std::vector<Bytes>& parts) {
  const auto R = static_cast<int64_t>(s.ranks.size());
  const Arg result = call[call.count() - 1];
  const int64_t E = call[1].size(), e = E / R, P = result.dim(0), width = P ? result.bytes() / P : 0;
  const auto start = starts_of(call[1].as<const int32_t>("sizes"), E);
  check(start[E] <= P, "sizes of %ld rows, and %ld rows", static_cast<long>(start[E]), static_cast<long>(P));
  char* out = static_cast<char*>(result.data);
  for (int64_t r = 0; r < R; r++) {
    const int64_t bytes = (start[(r + 1) * e] - start[r * e]) * width;
    check(static_cast<int64_t>(parts[r].size()) == bytes, "rank %ld sent back %ld bytes, expected %ld", static_cast<long>(s.ranks[r]),
          static_cast<long>(parts[r].size()), static_cast<long>(bytes));
    if (bytes) std::memcpy(out + start[r * e] * width, parts[r].data(), bytes);
  }
  std::memset(out + start[E] * width, 0, (P - start[E]) * width);
}

Shape shape_from_experts(const Inputs& in) { return {in.dim(0, 0) / in.attributes().integer("times"), in.dim(0, 1)}; }

}  // namespace

// Messages to and from `rank` go through this socket from now on.
extern "C" void telechat_link(int rank, int socket) {
  std::lock_guard<std::mutex> held(links_lock);
  links[rank] = new Link(socket);
}

// Give the seconds that messages from `rank` were on their way which were taken since the last call: of pipelines, of exchanges.
extern "C" void telechat_link_ways(int rank, double* to) { link_to(rank).ways(to); }

// x -> a token.
TELECHAT_INIT(Send, MessageState)
TELECHAT_SHAPES1(Send) { return {1}; }
TELECHAT_RUN(Send) {
  const auto& s = call.state<MessageState>();
  const char* data = static_cast<const char*>(call[0].data);
  link_to(s.rank).send(s.tag, Bytes(data, data + call[0].bytes()));
  make_token(call);
}

// What comes before -> the message, of the shape and the type of the output.
TELECHAT_INIT(Receive, MessageState)
TELECHAT_SHAPES1(Receive) { return in.attributes().integers("extents"); }
TELECHAT_RUN(Receive) {
  const auto& s = call.state<MessageState>();
  const Arg out = call[call.count() - 1];
  const Bytes bytes = link_to(s.rank).take(s.tag, s.rank, kPipeline).bytes;
  check(static_cast<int64_t>(bytes.size()) == out.bytes(), "rank %d sent %ld bytes as message %ld, expected %ld", s.rank,
        static_cast<long>(bytes.size()), static_cast<long>(s.tag), static_cast<long>(out.bytes()));
  std::memcpy(out.data, bytes.data(), bytes.size());
}

// x [P, H] sorted by expert, sizes [E] -> rows of this device's experts [P times, H], sizes of these (the last with the zeros
// behind), sizes [R E/R] by sender.
TELECHAT_INIT(MoeDispatch, ExpertState)
TELECHAT_SHAPES(MoeDispatch) { return shapes_at_experts(in); }
TELECHAT_RUN(MoeDispatch) {
  const auto& s = call.state<ExpertState>();
  s.start(parts_to_experts(call, s));
  rows_at_experts(call, s, s.finish());
}

// The way back. y [P times, H] as MoeDispatch gives it, its sizes [E] and its sizes by sender -> [P, H] sorted by expert, zeros
// for rows that went nowhere.
TELECHAT_INIT(MoeCombine, ExpertState)
TELECHAT_SHAPES1(MoeCombine) { return shape_from_experts(in); }
TELECHAT_RUN(MoeCombine) {
  const auto& s = call.state<ExpertState>();
  s.start(parts_from_experts(call, s));
  rows_from_experts(call, s, s.finish());
}

// Both in two halves, with computation in between. The first takes the same and gives a token, the second takes the token, too.
// Exchanges that are under way together have tags of their own.
TELECHAT_INIT(MoeDispatchStart, ExpertState)
TELECHAT_SHAPES1(MoeDispatchStart) { return {1}; }
TELECHAT_RUN(MoeDispatchStart) {
  const auto& s = call.state<ExpertState>();
  s.start(parts_to_experts(call, s));
  make_token(call);
}

TELECHAT_INIT(MoeDispatchWait, ExpertState)
TELECHAT_SHAPES(MoeDispatchWait) { return shapes_at_experts(in); }
TELECHAT_RUN(MoeDispatchWait) {
  const auto& s = call.state<ExpertState>();
  rows_at_experts(call, s, s.finish());
}

TELECHAT_INIT(MoeCombineStart, ExpertState)
TELECHAT_SHAPES1(MoeCombineStart) { return {1}; }
TELECHAT_RUN(MoeCombineStart) {
  const auto& s = call.state<ExpertState>();
  s.start(parts_from_experts(call, s));
  make_token(call);
}

TELECHAT_INIT(MoeCombineWait, ExpertState)
TELECHAT_SHAPES1(MoeCombineWait) { return shape_from_experts(in); }
TELECHAT_RUN(MoeCombineWait) {
  const auto& s = call.state<ExpertState>();
  rows_from_experts(call, s, s.finish());
}

// For benchmarks: a message arrives `latency` seconds after it has gone through a link that takes `seconds_per_byte`, and the
// times of exchanges are written down, if so asked. 0, 0 and 0 undo it.
extern "C" void telechat_link_trial(double latency, double seconds_per_byte, int64_t records) {
  trial.set(latency, seconds_per_byte, records != 0);
}

// Copy what was written down, and forget it; return how many numbers there are. An exchange is: tag, bytes of the largest part
// that arrived, and in seconds when it was started, when the last part was there, when the graph began to wait, and when it went on.
extern "C" int64_t telechat_link_times(double* to, int64_t room) { return trial.take(to, room); }
