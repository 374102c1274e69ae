// Messages between the processes of a run: MindSpore's CPU backend has collectives, but no Send and no Receive.
//
// Each other process is a connected socket with a thread that reads and one that writes, so a sender waits for no
// receiver. A message is its tag, its length and its bytes; a receiver takes them by tag, in any order.
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

using namespace telechat;

namespace {

using Bytes = std::vector<char>;

struct Header {
  int64_t tag, bytes;
};

class Link {
 public:
  explicit Link(int socket) : socket_(socket) {
    std::thread([this] { read(); }).detach();
    std::thread([this] { write(); }).detach();
  }

  void send(int64_t tag, Bytes bytes) {
    std::lock_guard<std::mutex> held(lock_);
    leaving_.emplace_back(tag, std::move(bytes));
    change_.notify_all();
  }

  Bytes take(int64_t tag, int rank) {
    std::unique_lock<std::mutex> held(lock_);
    const auto there = [&] { return !arrived_[tag].empty(); };
    change_.wait(held, [&] { return there() || closed_; });
    // Whoever watches the processes knows why one has ended, and ends this one, too.
    if (!there()) change_.wait_for(held, std::chrono::seconds(30), there);
    check(there(), "rank %d closed its connection before message %ld", rank, static_cast<long>(tag));
    Bytes bytes = std::move(arrived_[tag].front());
    arrived_[tag].pop_front();
    return bytes;
  }

 private:
  bool all(bool out, void* data, int64_t bytes) {
    for (char* at = static_cast<char*>(data); bytes > 0;) {
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
      std::lock_guard<std::mutex> held(lock_);
      arrived_[header.tag].push_back(std::move(bytes));
      change_.notify_all();
    }
    std::lock_guard<std::mutex> held(lock_);
    closed_ = true;
    change_.notify_all();
  }

  void write() {
    while (true) {
      std::unique_lock<std::mutex> held(lock_);
      change_.wait(held, [&] { return !leaving_.empty(); });
      auto [tag, bytes] = std::move(leaving_.front());
      leaving_.pop_front();
      held.unlock();
      Header header{tag, static_cast<int64_t>(bytes.size())};
      if (!all(true, &header, sizeof header) || !all(true, bytes.data(), header.bytes)) return;
    }
  }

  const int socket_;
  std::mutex lock_;
  std::condition_variable change_;
  std::deque<std::pair<int64_t, Bytes>> leaving_;
  std::map<int64_t, std::deque<Bytes>> arrived_;
  bool closed_ = false;
};

std::mutex links_lock;
std::map<int, Link*> links;  // never freed: their threads run to the end of the process

Link& link_to(int rank) {
  std::lock_guard<std::mutex> held(links_lock);
  const auto found = links.find(rank);
  check(found != links.end(), "there is no connection to rank %d", rank);
  return *found->second;
}

int64_t bytes_of(const Arg& x) {
  switch (x.dtype()) {
    case DType::f32: case DType::i32: return 4 * x.size();
    case DType::f16: case DType::bf16: return 2 * x.size();
    case DType::i64: case DType::f64: return 8 * x.size();
    case DType::u8: case DType::b8: return x.size();
    default: check(false, "a message cannot be %s", x.type_name); return 0;
  }
}

struct MessageState : State {
  int rank;
  int64_t tag;
  explicit MessageState(Attributes& a) : rank(static_cast<int>(a.integer("peer"))), tag(a.integer("tag")) {}
};

}  // namespace

// Messages to and from `rank` go through this socket from now on.
extern "C" void telechat_link(int rank, int socket) {
  std::lock_guard<std::mutex> held(links_lock);
  links[rank] = new Link(socket);
}

// x -> a token.
TELECHAT_INIT(Send, MessageState)
TELECHAT_SHAPES1(Send) { return {1}; }
TELECHAT_RUN(Send) {
  const auto& s = call.state<MessageState>();
  const char* data = static_cast<const char*>(call[0].data);
  link_to(s.rank).send(s.tag, Bytes(data, data + bytes_of(call[0])));
  *static_cast<float*>(call[call.count() - 1].data) = 0.0f;
}

// What comes before -> the message, of the shape and the type of the output.
TELECHAT_INIT(Receive, MessageState)
TELECHAT_SHAPES1(Receive) { return in.attributes().integers("extents"); }
TELECHAT_RUN(Receive) {
  const auto& s = call.state<MessageState>();
  const Arg out = call[call.count() - 1];
  const Bytes bytes = link_to(s.rank).take(s.tag, s.rank);
  check(static_cast<int64_t>(bytes.size()) == bytes_of(out), "rank %d sent %ld bytes as message %ld, expected %ld", s.rank,
        static_cast<long>(bytes.size()), static_cast<long>(s.tag), static_cast<long>(bytes_of(out)));
  std::memcpy(out.data, bytes.data(), bytes.size());
}
