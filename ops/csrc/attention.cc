// Flash attention (Dao et al. 2022) for CPU: scores exist only for a block of queries at a time.
//
// A query sees the keys from the first of its document (`start`) up to itself. Forward, a task is a block of queries of one
// head; its keys are taken in chunks with a running maximum and sum. Backward, a task is a chunk of keys of one head: it
// owns the gradients of its keys and values and writes a part of the query gradient, and the parts are added in order
// afterwards, so results do not depend on the number of threads.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "aot.h"
#include "cast.h"
#include "gemm.h"
#include "pool.h"

TELECHAT_SELECT(telechat::AttentionKernels, attention)

namespace {

using namespace telechat;

constexpr int64_t kQueries = 128;       // of a block; the diagonal wastes half of its square
constexpr int64_t kKeys = 1024;         // of a chunk forward: 128 x 1024 scores stay in L2
constexpr int64_t kKeysBackward = 512;  // two such blocks at once
enum Slot { kQ, kK, kV, kDo, kScores, kHalf, kRow, kPart };

struct AttentionState : State {
  float scale;
  bool bf16;
  explicit AttentionState(Attributes& a) : scale(a.number("scale")), bf16(a.flag("bf16")) {}
};

struct Sizes {
  int64_t B, S, N, D, Dv;
  const int32_t* start;

  Sizes(const Arg& q, const Arg& k, const Arg& v, const Arg& first) {
    check(q.rank == 4 && k.rank == 4 && v.rank == 4 && first.rank == 2,
          "ranks of q, k, v, start are %d, %d, %d, %d, expected 4, 4, 4, 2", q.rank, k.rank, v.rank, first.rank);
    B = q.dim(0), S = q.dim(1), N = q.dim(2), D = q.dim(3), Dv = v.dim(3);
    for (int i = 0; i < 4; i++) check(q.dim(i) == k.dim(i), "q and k differ in dimension %d: %ld and %ld", i, long(q.dim(i)), long(k.dim(i)));
    for (int i = 0; i < 3; i++) check(q.dim(i) == v.dim(i), "q and v differ in dimension %d: %ld and %ld", i, long(q.dim(i)), long(v.dim(i)));
    check(first.dim(0) == B && first.dim(1) == S, "start is not [%ld, %ld]", long(B), long(S));
    start = first.as<const int32_t>("start");
    for (int64_t i = 0; i < B * S; i++) {
      check(start[i] >= 0 && start[i] <= i % S, "the first key of query %ld of sequence %ld is %d", long(i % S), long(i / S), start[i]);
    }
  }
  int64_t blocks() const { return (S + kQueries - 1) / kQueries; }
  // First key that any query of rows [begin, end) sees.
  int64_t first_key(int64_t b, int64_t begin, int64_t end) const { return *std::min_element(start + b * S + begin, start + b * S + end); }
};

// Head n of sequence b of a [B, S, N, width] operand, from row s on.
Operand head(const Operand& x, const Sizes& z, int64_t width, int64_t b, int64_t n, int64_t s) {
  return x.at(b * z.S + s, n * width);
}

// A block made by this thread as an operand of the same kind as the others.
Operand block(float* x, int64_t rows, int64_t width, bool bf16) {
  if (!bf16) return {x, nullptr, width};
  if (multiplies_bf16()) {
    auto* half = scratch<uint16_t>(kHalf, rows * width);
    casts().to_bf16(x, half, rows * width);
    return {nullptr, half, width};
  }
  casts().round_bf16(x, x, rows * width);
  return {x, nullptr, width};
}

void forward_block(const Sizes& z, const AttentionState& a, const Operand& q, const Operand& k, const Operand& v, int64_t b,
                   int64_t n, int64_t begin, float* o, float* lse) {
  const int64_t end = std::min(z.S, begin + kQueries), rows = end - begin, ldo = z.N * z.Dv;
  float* out = o + (b * z.S + begin) * ldo + n * z.Dv;
  float* scores = scratch<float>(kScores, kQueries * kKeys);
  float top[kQueries], sum[kQueries] = {};
  std::fill(top, top + kQueries, -std::numeric_limits<float>::infinity());
  bool first = true;
  for (int64_t k0 = z.first_key(b, begin, end); k0 < end; k0 += kKeys, first = false) {
    const int64_t keys = std::min(kKeys, end - k0);
    multiply(false, true, rows, keys, z.D, 1, head(q, z, z.D, b, n, begin), head(k, z, z.D, b, n, k0), 0, scores, keys);
    for (int64_t i = 0; i < rows; i++) {
      const int64_t query = begin + i;
      const int64_t low = std::clamp<int64_t>(z.start[b * z.S + query] - k0, 0, keys);
      const int64_t high = std::clamp<int64_t>(query + 1 - k0, low, keys);
      const float before = top[i];
      const float added = attention().softmax(scores + i * keys, keys, low, high, a.scale, &top[i]);
      if (!first && top[i] > before) {
        const float factor = std::exp(a.scale * (before - top[i]));
        sum[i] *= factor;
        attention().scale(out + i * ldo, z.Dv, factor);
      }
      sum[i] += added;
    }
    multiply(false, false, rows, z.Dv, keys, 1, block(scores, rows, keys, a.bf16), head(v, z, z.Dv, b, n, k0), first ? 0 : 1, out, ldo);
  }
  for (int64_t i = 0; i < rows; i++) {
    attention().scale(out + i * ldo, z.Dv, 1 / sum[i]);
    lse[(b * z.N + n) * z.S + begin + i] = a.scale * top[i] + std::log(sum[i]);
  }
}

struct Gradients {
  float *dq, *dk, *dv;  // dq: the part of this chunk of keys
  const float *lse, *delta;
};

void backward_chunk(const Sizes& z, const AttentionState& a, const Operand& q, const Operand& k, const Operand& v,
                    const Operand& d_out, int64_t b, int64_t n, int64_t k0, const Gradients& g) {
  const int64_t last = std::min(z.S, k0 + kKeysBackward), ld = z.N * z.D, ldv = z.N * z.Dv;
  float* p = scratch<float>(kScores, 2 * kQueries * kKeysBackward);
  float* dp = p + kQueries * kKeysBackward;
  float* dk = g.dk + (b * z.S + k0) * ld + n * z.D;
  float* dv = g.dv + (b * z.S + k0) * ldv + n * z.Dv;
  for (int64_t i = 0; i < last - k0; i++) {  // the last queries see only some of the keys
    std::fill_n(dk + i * ld, z.D, 0.0f);
    std::fill_n(dv + i * ldv, z.Dv, 0.0f);
  }
  for (int64_t begin = k0 / kQueries * kQueries; begin < z.S; begin += kQueries) {
    const int64_t end = std::min(z.S, begin + kQueries), rows = end - begin;
    float* dq = g.dq + (b * z.S + begin) * ld + n * z.D;
    const int64_t from = std::max(k0, z.first_key(b, begin, end)), keys = std::min(last, end) - from;
    if (keys <= 0) {
      for (int64_t i = 0; i < rows; i++) std::fill_n(dq + i * ld, z.D, 0.0f);
      continue;
    }
    const Operand Q = head(q, z, z.D, b, n, begin), K = head(k, z, z.D, b, n, from);
    const Operand dO = head(d_out, z, z.Dv, b, n, begin);
    multiply(false, true, rows, keys, z.D, 1, Q, K, 0, p, keys);
    multiply(false, true, rows, keys, z.Dv, 1, dO, head(v, z, z.Dv, b, n, from), 0, dp, keys);
    for (int64_t i = 0; i < rows; i++) {
      const int64_t query = begin + i, at = (b * z.N + n) * z.S + query;
      const int64_t low = std::clamp<int64_t>(z.start[b * z.S + query] - from, 0, keys);
      const int64_t high = std::clamp<int64_t>(query + 1 - from, low, keys);
      attention().probabilities(p + i * keys, keys, low, high, a.scale, g.lse[at]);
      attention().score_gradient(p + i * keys, dp + i * keys, keys, g.delta[at], a.scale);
    }
    const int64_t skip = from - k0;
    multiply(true, false, keys, z.Dv, rows, 1, block(p, rows, keys, a.bf16), dO, 1, dv + skip * ldv, ldv);
    const Operand dS = block(dp, rows, keys, a.bf16);
    multiply(true, false, keys, z.D, rows, 1, dS, Q, 1, dk + skip * ld, ld);
    multiply(false, false, rows, z.D, keys, 1, dS, K, 0, dq, ld);
  }
}

}  // namespace

// q, k [B, S, N, D], v [B, S, N, Dv], start [B, S] int32 -> o [B, S, N, Dv], lse [B, N, S]
TELECHAT_INIT(FlashAttention, AttentionState)
TELECHAT_SHAPES(FlashAttention) { return {in.shape(2), {in.dim(0, 0), in.dim(0, 2), in.dim(0, 1)}}; }
TELECHAT_RUN(FlashAttention) {
  const Sizes z(call[0], call[1], call[2], call[3]);
  const auto& a = call.state<AttentionState>();
  const Operand q = operand(call[0].as<const float>("q"), z.B * z.S, z.N * z.D, a.bf16, kQ);
  const Operand k = operand(call[1].as<const float>("k"), z.B * z.S, z.N * z.D, a.bf16, kK);
  const Operand v = operand(call[2].as<const float>("v"), z.B * z.S, z.N * z.Dv, a.bf16, kV);
  float *o = call[4].as<float>("o"), *lse = call[5].as<float>("lse");
  const int64_t heads = z.B * z.N;
  parallel_for(heads * z.blocks(), [&](int64_t task) {  // the longest rows first
    const int64_t at = task % heads, begin = (z.blocks() - 1 - task / heads) * kQueries;
    forward_block(z, a, q, k, v, at / z.N, at % z.N, begin, o, lse);
  });
}

// q, k, v, start, o, lse, do -> dq, dk, dv
TELECHAT_INIT(FlashAttentionGrad, AttentionState)
TELECHAT_SHAPES(FlashAttentionGrad) { return {in.shape(0), in.shape(1), in.shape(2)}; }
TELECHAT_RUN(FlashAttentionGrad) {
  const Sizes z(call[0], call[1], call[2], call[3]);
  const auto& a = call.state<AttentionState>();
  check(call[6].size() == z.B * z.S * z.N * z.Dv, "the gradient of o does not have o's shape");
  const Operand q = operand(call[0].as<const float>("q"), z.B * z.S, z.N * z.D, a.bf16, kQ);
  const Operand k = operand(call[1].as<const float>("k"), z.B * z.S, z.N * z.D, a.bf16, kK);
  const Operand v = operand(call[2].as<const float>("v"), z.B * z.S, z.N * z.Dv, a.bf16, kV);
  const float *o = call[4].as<const float>("o"), *d_out = call[6].as<const float>("do");
  const Operand d = operand(d_out, z.B * z.S, z.N * z.Dv, a.bf16, kDo);
  float* dq = call[7].as<float>("dq");
  const int64_t heads = z.B * z.N, size = z.B * z.S * z.N * z.D, chunks = (z.S + kKeysBackward - 1) / kKeysBackward;
  float* delta = scratch<float>(kRow, heads * z.S);
  float* parts = chunks > 1 ? scratch<float>(kPart, (chunks - 1) * size) : nullptr;
  parallel_for(z.B * z.S, [&](int64_t row) {
    for (int64_t n = 0; n < z.N; n++) {
      const int64_t at = (row * z.N + n) * z.Dv;
      delta[(row / z.S * z.N + n) * z.S + row % z.S] = attention().dot(o + at, d_out + at, z.Dv);
    }
  });
  parallel_for(heads * chunks, [&](int64_t task) {  // the first chunk has the most queries
    const int64_t at = task % heads, chunk = task / heads;
    const Gradients g{chunk ? parts + (chunk - 1) * size : dq, call[8].as<float>("dk"), call[9].as<float>("dv"),
                      call[5].as<const float>("lse"), delta};
    backward_chunk(z, a, q, k, v, d, at / z.N, at % z.N, chunk * kKeysBackward, g);
  });
  if (chunks == 1) return;
  const int64_t width = z.N * z.D;
  parallel_for(z.B * z.S, [&](int64_t row) {  // a chunk writes only the queries that come after its beginning
    for (int64_t c = 1; c < chunks && c * kKeysBackward / kQueries * kQueries <= row % z.S; c++) {
      attention().add(dq + row * width, parts + (c - 1) * size + row * width, width);
    }
  });
}

// mask [B, 1, S, S] uint8, 1 = hidden -> start [B, S]; only masks that let a query see the keys of its document up to itself
TELECHAT_SHAPES1(AttentionStart) { return {in.dim(0, 0), in.dim(0, 2)}; }
TELECHAT_RUN(AttentionStart) {
  const Arg mask = call[0];
  check(mask.rank == 4 && mask.dim(1) == 1 && mask.dim(2) == mask.dim(3), "the mask is not [B, 1, S, S]");
  const int64_t S = mask.dim(2);
  const auto* hidden = mask.as<const uint8_t>("mask");
  auto* start = call[1].as<int32_t>("start");
  parallel_for(mask.dim(0) * S, [&](int64_t row) {
    const uint8_t* h = hidden + row * S;
    const int64_t query = row % S;
    int64_t first = query;
    while (first > 0 && !h[first - 1]) first--;
    bool fits = !h[query];
    for (int64_t j = 0; j < S; j++) fits = fits && (h[j] != 0) == (j < first || j > query);
    check(fits, "the mask of query %ld of sequence %ld is not 'its document up to itself'; set telechat_moe.operators.attention to plain",
          long(query), long(row / S));
    start[row] = static_cast<int32_t>(first);
  });
}
