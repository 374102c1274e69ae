// Flash attention (Dao et al. 2022) for CPU: scores exist only for a block of queries at a time.
//
// A query sees the keys from the first of its document (`start`) up to itself; query 0 stands at key `first`, where a process
// has a part of the queries. Forward, a task is a block of queries of one head; its keys are taken in chunks with a running
// maximum and sum. A block ends where its queries' first keys lie far apart, so little is computed between documents.
//
// Backward, a task is a chunk of keys and a band of blocks of one head, if one of these queries sees one of these keys. The
// tasks of a phase have neither chunk nor band in common and write to no place twice, and phases follow one another: results do
// not depend on the number of threads.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "aot.h"
#include "cast.h"
#include "gemm.h"
#include "pool.h"

TELECHAT_SELECT(telechat::AttentionKernels, attention)

namespace {

using namespace telechat;

constexpr int64_t kKeys = 1024;         // of a chunk forward: 128 x 1024 scores stay in L2
constexpr int64_t kKeysBackward = 512;  // two such blocks at once; queries of a band, too
constexpr int64_t kKeysOfPart = 256;    // of a chunk of our own products, which use it for each of the block's panels
constexpr int64_t kKeysOfPartBackward = 128;
constexpr int64_t kApart = 64;          // first keys of a block differ by less, each query's from those before it
enum Slot { kQ, kK, kV, kDo, kScores, kHalf, kRow, kPacked };

struct AttentionState : State {
  float scale;
  bool bf16;
  int64_t first;
  explicit AttentionState(Attributes& a) : scale(a.number("scale")), bf16(a.flag("bf16")), first(a.integer("first", 0)) {}
};

struct StartState : State {
  int64_t first;
  explicit StartState(Attributes& a) : first(a.integer("first", 0)) {}
};

// Queries [begin, end) of sequence b, and the first key that one of them sees.
struct Block {
  int64_t b, begin, end, key;
};

struct Sizes {
  int64_t B, Q, S, N, D, Dv, first;  // Q queries, the first of them at key `first` of S
  const int32_t* start;

  Sizes(const Arg& q, const Arg& k, const Arg& v, const Arg& seen, int64_t at) : first(at) {
    check(q.rank == 4 && k.rank == 4 && v.rank == 4 && seen.rank == 2,
          "ranks of q, k, v, start are %d, %d, %d, %d, expected 4, 4, 4, 2", q.rank, k.rank, v.rank, seen.rank);
    B = q.dim(0), Q = q.dim(1), S = k.dim(1), N = q.dim(2), D = q.dim(3), Dv = v.dim(3);
    for (int i : {0, 2, 3}) check(q.dim(i) == k.dim(i), "q and k differ in dimension %d: %ld and %ld", i, long(q.dim(i)), long(k.dim(i)));
    for (int i = 0; i < 3; i++) check(k.dim(i) == v.dim(i), "k and v differ in dimension %d: %ld and %ld", i, long(k.dim(i)), long(v.dim(i)));
    check(first >= 0 && first + Q <= S, "queries %ld to %ld have %ld keys", long(first), long(first + Q - 1), long(S));
    check(seen.dim(0) == B && seen.dim(1) == Q, "start is not [%ld, %ld]", long(B), long(Q));
    start = seen.as<const int32_t>("start");
    for (int64_t i = 0; i < B * Q; i++) {
      check(start[i] >= 0 && start[i] <= first + i % Q, "the first key of query %ld of sequence %ld is %d", long(first + i % Q), long(i / Q), start[i]);
    }
  }

  std::vector<Block> blocks() const {
    std::vector<Block> found;
    for (int64_t b = 0; b < B; b++) {
      const int32_t* seen = start + b * Q;
      for (int64_t begin = 0, end; begin < Q; begin = end) {
        int64_t key = seen[begin];
        const int64_t most = std::min(Q, begin / kKeysBackward * kKeysBackward + kKeysBackward);  // a block is of one band
        for (end = begin + 1; end < std::min(most, begin + kQueries) && seen[end] - key < kApart; end++) key = std::min<int64_t>(key, seen[end]);
        found.push_back({b, begin, end, key});
      }
    }
    return found;
  }
};

// Head n of an operand [rows, N * width], from a row on.
Operand head(const Operand& x, int64_t width, int64_t n, int64_t row) { return x.at(row, n * width); }

// A block made by this thread in the precision of the other operands.
Operand block(float* x, int64_t rows, int64_t width) {
  auto* half = scratch<uint16_t>(kHalf, rows * width);
  casts().to_bf16(x, half, rows * width);
  return {nullptr, half, width};
}

// What a block of queries sees of a chunk of keys.
struct Sight : Seen {
  int32_t first[kQueries];

  Sight(const Sizes& z, const Block& x, int64_t from, int64_t keys_) : Seen{x.end - x.begin, keys_, z.first + x.begin - from, first} {
    const int32_t* start = z.start + x.b * z.Q + x.begin;
    for (int64_t i = 0; i < kQueries; i++) first[i] = i < queries ? int32_t(start[i] - from) : std::numeric_limits<int32_t>::max();
  }
};

HeadRows rows_of(const Operand& x, int64_t width) { return {x.single, x.ld, width}; }

// Exponentials of scores, their sums and products with the values; all chunks of keys.
void forward_single(const Sizes& z, const AttentionState& a, const Operand& q, const Operand& k, const Operand& v,
                    const Block& x, int64_t n, float* out, float* top, float* sum) {
  const int64_t rows = x.end - x.begin, ldo = z.N * z.Dv, keys_end = z.first + x.end;
  float* scores = scratch<float>(kScores, kQueries * kKeysOfPart);
  float* packed = scratch<float>(kPacked, kQueries * z.D);
  attention().pack(rows_of(head(q, z.D, n, x.b * z.Q + x.begin), z.D), rows, packed);
  for (int64_t i = 0; i < rows; i++) std::fill_n(out + i * ldo, z.Dv, 0.0f);
  for (int64_t k0 = x.key; k0 < keys_end; k0 += kKeysOfPart) {
    const Sight seen(z, x, k0, std::min(kKeysOfPart, keys_end - k0));
    const int64_t column = x.b * z.S + k0;
    attention().forward({seen, packed, rows_of(head(k, z.D, n, column), z.D), rows_of(head(v, z.Dv, n, column), z.Dv), a.scale, a.bf16,
                         scores, top, sum, out, ldo});
  }
}

// The same by bfloat16 products.
void forward_half(const Sizes& z, const AttentionState& a, const Operand& q, const Operand& k, const Operand& v,
                  const Block& x, int64_t n, float* out, float* top, float* sum) {
  const int64_t rows = x.end - x.begin, ldo = z.N * z.Dv, keys_end = z.first + x.end;
  float* scores = scratch<float>(kScores, kQueries * kKeys);
  for (int64_t k0 = x.key; k0 < keys_end; k0 += kKeys) {
    const int64_t keys = std::min(kKeys, keys_end - k0);
    multiply(false, true, rows, keys, z.D, 1, head(q, z.D, n, x.b * z.Q + x.begin), head(k, z.D, n, x.b * z.S + k0), 0, scores, keys);
    for (int64_t i = 0; i < rows; i++) {
      const int64_t query = x.begin + i;
      const int64_t low = std::clamp<int64_t>(z.start[x.b * z.Q + query] - k0, 0, keys);
      const int64_t high = std::clamp<int64_t>(z.first + query + 1 - k0, low, keys);
      const float before = top[i];
      const float added = attention().softmax(scores + i * keys, keys, low, high, a.scale, &top[i]);
      if (k0 > x.key && top[i] > before) {
        const float factor = std::exp(a.scale * (before - top[i]));
        sum[i] *= factor;
        attention().scale(out + i * ldo, z.Dv, factor);
      }
      sum[i] += added;
    }
    multiply(false, false, rows, z.Dv, keys, 1, block(scores, rows, keys), head(v, z.Dv, n, x.b * z.S + k0), k0 > x.key, out, ldo);
  }
}

void forward_block(const Sizes& z, const AttentionState& a, const Operand& q, const Operand& k, const Operand& v,
                   const Block& x, int64_t n, float* o, float* lse) {
  float* out = o + (x.b * z.Q + x.begin) * z.N * z.Dv + n * z.Dv;
  float top[kQueries], sum[kQueries] = {};
  std::fill(top, top + kQueries, -1e30f);  // of no score; infinity less itself would be no number
  (q.half ? forward_half : forward_single)(z, a, q, k, v, x, n, out, top, sum);
  for (int64_t i = 0; i < x.end - x.begin; i++) {
    attention().scale(out + i * z.N * z.Dv, z.Dv, 1 / sum[i]);
    lse[(x.b * z.N + n) * z.Q + x.begin + i] = a.scale * top[i] + std::log(sum[i]);
  }
}

struct Gradients {
  float *dq, *dk, *dv;
  const float *lse, *delta;
};

// Keys of a block within a chunk: [first, second), empty where first >= second.
std::pair<int64_t, int64_t> keys_of(const Sizes& z, const Block& block_of, int64_t chunk) {
  const int64_t k0 = chunk * kKeysBackward;
  return {std::max(k0, block_of.key), std::min(k0 + kKeysBackward, z.first + block_of.end)};
}

// Add what a block of queries gives to the gradients of its keys of a chunk, and to its own.
void backward_single(const Sizes& z, const AttentionState& a, const Operand& q, const Operand& k, const Operand& v,
                     const Operand& d_out, const Block& x, int64_t n, int64_t from, int64_t to, const Gradients& g) {
  const int64_t rows = x.end - x.begin, ld = z.N * z.D, ldv = z.N * z.Dv, row = x.b * z.Q + x.begin;
  const int64_t at = (x.b * z.N + n) * z.Q + x.begin;
  float* p = scratch<float>(kScores, 2 * kScoresApart * kKeysOfPartBackward);
  float* packed = scratch<float>(kPacked, kQueries * (z.D + z.Dv));
  const HeadRows rows_q = rows_of(head(q, z.D, n, row), z.D), rows_do = rows_of(head(d_out, z.Dv, n, row), z.Dv);
  attention().pack(rows_q, rows, packed);
  attention().pack(rows_do, rows, packed + kQueries * z.D);
  for (int64_t k0 = from; k0 < to; k0 += kKeysOfPartBackward) {
    const Sight seen(z, x, k0, std::min(kKeysOfPartBackward, to - k0));
    const int64_t column = x.b * z.S + k0;
    attention().backward({seen, packed, packed + kQueries * z.D, g.lse + at, g.delta + at, rows_q, rows_of(head(k, z.D, n, column), z.D),
                          rows_of(head(v, z.Dv, n, column), z.Dv), rows_do, a.scale, a.bf16, p, p + kScoresApart * kKeysOfPartBackward,
                          g.dq + row * ld + n * z.D, g.dk + column * ld + n * z.D, g.dv + column * ldv + n * z.Dv});
  }
}

// The same by bfloat16 products.
void backward_half(const Sizes& z, const AttentionState& a, const Operand& q, const Operand& k, const Operand& v,
                   const Operand& d_out, const Block& x, int64_t n, int64_t from, int64_t to, const Gradients& g) {
  const int64_t b = x.b, begin = x.begin, rows = x.end - begin, keys = to - from, ld = z.N * z.D, ldv = z.N * z.Dv;
  const int64_t row = b * z.Q + begin, column = b * z.S + from;
  float* p = scratch<float>(kScores, 2 * kQueries * kKeysBackward);
  float* dp = p + kQueries * kKeysBackward;
  const Operand rows_q = head(q, z.D, n, row), keys_k = head(k, z.D, n, column), rows_do = head(d_out, z.Dv, n, row);
  multiply(false, true, rows, keys, z.D, 1, rows_q, keys_k, 0, p, keys);
  multiply(false, true, rows, keys, z.Dv, 1, rows_do, head(v, z.Dv, n, column), 0, dp, keys);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t query = begin + i, at = (b * z.N + n) * z.Q + query;
    const int64_t low = std::clamp<int64_t>(z.start[b * z.Q + query] - from, 0, keys);
    const int64_t high = std::clamp<int64_t>(z.first + query + 1 - from, low, keys);
    attention().probabilities(p + i * keys, keys, low, high, a.scale, g.lse[at]);
    attention().score_gradient(p + i * keys, dp + i * keys, keys, g.delta[at], a.scale);
  }
  multiply(true, false, keys, z.Dv, rows, 1, block(p, rows, keys), rows_do, 1, g.dv + column * ldv + n * z.Dv, ldv);
  const Operand d_scores = block(dp, rows, keys);
  multiply(true, false, keys, z.D, rows, 1, d_scores, rows_q, 1, g.dk + column * ld + n * z.D, ld);
  multiply(false, false, rows, z.D, keys, 1, d_scores, keys_k, 1, g.dq + row * ld + n * z.D, ld);
}

// Blocks [first, last) of a band and a chunk of keys that they see something of.
struct Pair {
  int64_t first, last, chunk;
};

// Pairs by phase: in phase p chunk c meets band (c + p) mod max(chunks, bands).
std::vector<std::vector<Pair>> phases(const Sizes& z, const std::vector<Block>& blocks) {
  const int64_t chunks = (z.S + kKeysBackward - 1) / kKeysBackward, bands = (z.Q + kKeysBackward - 1) / kKeysBackward;
  const int64_t count = std::max(chunks, bands);
  std::vector<std::vector<Pair>> found(count);
  for (int64_t first = 0, last; first < int64_t(blocks.size()); first = last) {
    const int64_t band = blocks[first].begin / kKeysBackward;
    for (last = first + 1; last < int64_t(blocks.size()) && blocks[last].b == blocks[first].b && blocks[last].begin / kKeysBackward == band;) last++;
    for (int64_t c = 0; c < chunks; c++) {
      const bool seen = std::any_of(&blocks[first], &blocks[first] + (last - first), [&](const Block& x) {
        const auto [from, to] = keys_of(z, x, c);
        return from < to;
      });
      if (seen) found[(band - c + count) % count].push_back({first, last, c});
    }
  }
  return found;
}

}  // namespace

// q [B, Q, N, D], k [B, S, N, D], v [B, S, N, Dv], start [B, Q] int32 -> o [B, Q, N, Dv], lse [B, N, Q]
TELECHAT_INIT(FlashAttention, AttentionState)
TELECHAT_SHAPES(FlashAttention) { return {{in.dim(0, 0), in.dim(0, 1), in.dim(0, 2), in.dim(2, 3)}, {in.dim(0, 0), in.dim(0, 2), in.dim(0, 1)}}; }
TELECHAT_RUN(FlashAttention) {
  const auto& a = call.state<AttentionState>();
  const Sizes z(call[0], call[1], call[2], call[3], a.first);
  const Operand q = operand(call[0].as<const float>("q"), z.B * z.Q, z.N * z.D, a.bf16, kQ);
  const Operand k = operand(call[1].as<const float>("k"), z.B * z.S, z.N * z.D, a.bf16, kK);
  const Operand v = operand(call[2].as<const float>("v"), z.B * z.S, z.N * z.Dv, a.bf16, kV);
  float *o = call[4].as<float>("o"), *lse = call[5].as<float>("lse");
  std::vector<Block> blocks = z.blocks();
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& x, const Block& y) {  // the longest rows first
    return (x.end - x.begin) * (x.end - x.key) > (y.end - y.begin) * (y.end - y.key);
  });
  parallel_for(z.N * int64_t(blocks.size()), [&](int64_t task) { forward_block(z, a, q, k, v, blocks[task / z.N], task % z.N, o, lse); });
}

// q, k, v, start, o, lse, do -> dq, dk, dv
TELECHAT_INIT(FlashAttentionGrad, AttentionState)
TELECHAT_SHAPES(FlashAttentionGrad) { return {in.shape(0), in.shape(1), in.shape(2)}; }
TELECHAT_RUN(FlashAttentionGrad) {
  const auto& a = call.state<AttentionState>();
  const Sizes z(call[0], call[1], call[2], call[3], a.first);
  check(call[6].size() == z.B * z.Q * z.N * z.Dv, "the gradient of o does not have o's shape");
  const Operand q = operand(call[0].as<const float>("q"), z.B * z.Q, z.N * z.D, a.bf16, kQ);
  const Operand k = operand(call[1].as<const float>("k"), z.B * z.S, z.N * z.D, a.bf16, kK);
  const Operand v = operand(call[2].as<const float>("v"), z.B * z.S, z.N * z.Dv, a.bf16, kV);
  const float *o = call[4].as<const float>("o"), *d_out = call[6].as<const float>("do");
  const Operand d = operand(d_out, z.B * z.Q, z.N * z.Dv, a.bf16, kDo);
  float* delta = scratch<float>(kRow, z.B * z.N * z.Q);
  const Gradients g{call[7].as<float>("dq"), call[8].as<float>("dk"), call[9].as<float>("dv"), call[5].as<const float>("lse"), delta};
  parallel_for(z.B * z.Q, [&](int64_t row) {
    std::fill_n(g.dq + row * z.N * z.D, z.N * z.D, 0.0f);
    for (int64_t n = 0; n < z.N; n++) {
      const int64_t at = (row * z.N + n) * z.Dv;
      delta[(row / z.Q * z.N + n) * z.Q + row % z.Q] = attention().dot(o + at, d_out + at, z.Dv);
    }
  });
  parallel_for(z.B * z.S, [&](int64_t row) {
    std::fill_n(g.dk + row * z.N * z.D, z.N * z.D, 0.0f);
    std::fill_n(g.dv + row * z.N * z.Dv, z.N * z.Dv, 0.0f);
  });
  const std::vector<Block> blocks = z.blocks();
  for (const std::vector<Pair>& pairs : phases(z, blocks)) {
    parallel_for(z.N * int64_t(pairs.size()), [&](int64_t task) {
      const auto [first, last, chunk] = pairs[task / z.N];
      for (int64_t i = first; i < last; i++) {
        const auto [from, to] = keys_of(z, blocks[i], chunk);
        if (from < to) (q.half ? backward_half : backward_single)(z, a, q, k, v, d, blocks[i], task % z.N, from, to, g);
      }
    });
  }
}

// mask [B, 1, Q, S] uint8, 1 = hidden -> start [B, Q]; only masks that let a query see the keys of its document up to itself
TELECHAT_INIT(AttentionStart, StartState)
TELECHAT_SHAPES1(AttentionStart) { return {in.dim(0, 0), in.dim(0, 2)}; }
TELECHAT_RUN(AttentionStart) {
  const Arg mask = call[0];
  const int64_t at = call.state<StartState>().first, Q = mask.dim(2), S = mask.dim(3);
  check(mask.rank == 4 && mask.dim(1) == 1 && at + Q <= S, "the mask is not [B, 1, queries, keys] with a key for each query");
  const auto* hidden = mask.as<const uint8_t>("mask");
  auto* start = call[1].as<int32_t>("start");
  parallel_for(mask.dim(0) * Q, [&](int64_t row) {
    const uint8_t* h = hidden + row * S;
    const int64_t query = at + row % Q;
    int64_t first = query;
    while (first > 0 && !h[first - 1]) first--;
    bool fits = !h[query];
    for (int64_t j = 0; j < S; j++) fits = fits && (h[j] != 0) == (j < first || j > query);
    check(fits, "the mask of query %ld of sequence %ld is not 'its document up to itself'; set telechat_moe.operators.attention to plain",
          long(query), long(row / Q));
    start[row] = static_cast<int32_t>(first);
  });
}
