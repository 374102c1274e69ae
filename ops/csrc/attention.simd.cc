#include "attention.h"

#include "simd.h"

namespace telechat::SIMD_NS {
namespace {

void zero(float* x, int64_t n) {
  if (n > 0) std::memset(x, 0, static_cast<size_t>(n) * sizeof(float));
}

void scale_by(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    store_n(x + i, load_n(x + i, rest) * splat(factor), rest);
  }
}

float softmax(float* score, int64_t n, int64_t low, int64_t high, float scale, float* top) {
  zero(score, low);
  if (high < n) zero(score + high, n - high);
  float* x = score + low;
  const int64_t count = high - low;
  if (count <= 0) return 0;
  const V none = splat(-__builtin_inff());
  V best[2] = {none, none};
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    best[0] = max_fast(best[0], load(x + i));
    best[1] = max_fast(best[1], load(x + i + W));
  }
  for (; i < count; i += W) best[0] = max_fast(best[0], first_lanes(load_n(x + i, lanes(count - i)), lanes(count - i), none));
  const float higher = max_lanes(max_fast(best[0], best[1]));
  if (higher > *top) *top = higher;
  const V factor = splat(scale), shift = splat(-scale * *top);
  V sum[2] = {};
  i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    for (int j = 0; j < 2; j++) {
      const V e = exp_v(fma(load(x + i + j * W), factor, shift));
      store(x + i + j * W, e);
      sum[j] += e;
    }
  }
  for (; i < count; i += W) {
    const int rest = lanes(count - i);
    const V e = exp_v(fma(load_n(x + i, rest), factor, shift));
    store_n(x + i, e, rest);
    sum[0] += first_lanes(e, rest, V{});
  }
  return sum_lanes(sum[0] + sum[1]);
}

void probabilities(float* score, int64_t n, int64_t low, int64_t high, float scale, float lse) {
  if (high < low) high = low;
  zero(score, low);
  if (high < n) zero(score + high, n - high);
  const V factor = splat(scale), shift = splat(-lse);
  int64_t i = low;
  for (; i + W <= high; i += W) store(score + i, exp_v(fma(load(score + i), factor, shift)));
  if (i < high) {
    const int rest = lanes(high - i);
    store_n(score + i, exp_v(fma(load_n(score + i, rest), factor, shift)), rest);
  }
}

void score_gradient(const float* p, float* d, int64_t n, float delta, float scale) {
  const V minus = splat(delta), factor = splat(scale);
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    store_n(d + i, load_n(p + i, rest) * (load_n(d + i, rest) - minus) * factor, rest);
  }
}

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    store_n(x + i, load_n(x + i, rest) + load_n(y + i, rest), rest);
  }
}

float dot(const float* x, const float* y, int64_t n) {
  V sum = {};
  for (int64_t i = 0; i < n; i += W) {
    const int rest = lanes(n - i);
    sum = fma(load_n(x + i, rest), load_n(y + i, rest), sum);
  }
  return sum_lanes(sum);
}

// ---- products of a block of queries and a chunk of keys: tiles in registers, operands read where they are ----

#if defined(__AVX512F__)
constexpr int MR = 8, NV = 2;
#elif defined(__AVX2__)
constexpr int MR = 6, NV = 2;
#else
constexpr int MR = 4, NV = 2;
#endif
constexpr int kLine = 16 / W;  // vectors of a cache line
constexpr int NR = NV * W;     // queries of a panel: scores are kept by keys, a lane a query
static_assert(kQueries % NR == 0, "a block is whole panels");

struct Product {
  const float* a;
  int64_t lda;
  const float* b;
  int64_t ldb, depth;
  float* c;
  int64_t ldc;
};
enum Kind { kSet, kAddByRows, kAddByColumns };  // C = A B; C += A B; the same with element (i, k) of A at a[k * lda + i]

// ROWS rows and VECTORS vectors of C; the last one's lanes from `last` on are left alone unless all are WHOLE. Every loop over
// the sums is unrolled, or they would live in memory.
template <Kind KIND, int ROWS, int VECTORS, bool WHOLE> void tile(const Product& p, int last) {
  constexpr bool kApart = KIND != kAddByColumns;
  const float *b = p.b, *a[(ROWS + 2) / 3];  // a processor adds 1 or 2 times lda to an address by itself
  float* c = p.c;
  const int64_t lda = p.lda, ldb = p.ldb, ldc = p.ldc;
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i += 3) a[i / 3] = p.a + (kApart ? i * lda : i);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS && KIND != kSet; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j += kLine) __builtin_prefetch(c + i * ldc + j * W, 1);
  }
  V sum[ROWS][VECTORS] = {};
  for (int64_t k = p.depth; k > 0; k--, b += ldb) {
    V right[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) right[j] = WHOLE || j < VECTORS - 1 ? load(b + j * W) : load_n(b + j * W, last);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const V left = splat(a[i / 3][kApart ? i % 3 * lda : i % 3]);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sum[i][j] = fma(left, right[j], sum[i][j]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i += 3) a[i / 3] += kApart ? 1 : lda;
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++, c += ldc) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      if (WHOLE || j < VECTORS - 1) {
        store(c + j * W, KIND == kSet ? sum[i][j] : load(c + j * W) + sum[i][j]);
      } else {
        store_n(c + j * W, KIND == kSet ? sum[i][j] : load_n(c + j * W, last) + sum[i][j], last);
      }
    }
  }
}

using Tile = void (*)(const Product&, int);

template <Kind KIND, int ROWS, int VECTORS> Tile tile_of(int64_t rows, int64_t vectors, bool whole) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return tile_of<KIND, ROWS - 1, VECTORS>(rows, vectors, whole);
  }
  if constexpr (VECTORS > 1) {
    if (vectors < VECTORS) return tile_of<KIND, ROWS, VECTORS - 1>(rows, vectors, whole);
  }
  return whole || KIND == kSet ? tile<KIND, ROWS, VECTORS, true> : tile<KIND, ROWS, VECTORS, KIND == kSet>;
}

// `rows` <= MR rows of C and all its columns.
template <Kind KIND> void strip(Product p, int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; j += NR, p.b += NR, p.c += NR) {
    const int64_t wide = lower(NR, columns - j), vectors = (wide + W - 1) / W;
    tile_of<KIND, MR, NV>(rows, vectors, wide % W == 0)(p, static_cast<int>(wide - (vectors - 1) * W));
  }
}

// Rows of a strip, when `rows` are cut into the fewest strips of equal height.
int64_t height(int64_t rows) {
  const int64_t strips = (rows + MR - 1) / MR;
  return (rows + strips - 1) / strips;
}

// Panels of NR rows: out[panel][k][i] = x[i][k], zero behind the last row.
void pack(const HeadRows& x, int64_t rows, float* out) {
  for (int64_t y = 0; y < rows; y += NR) {
    for (int64_t k = 0; k < x.width; k += W) {
      for (int64_t j = 0; j < NR; j += W) turn(x.x + (y + j) * x.ld + k, x.ld, rows - y - j, x.width - k, out + k * NR + j, NR);
    }
    out += x.width * NR;
  }
}

// A panel of queries: which keys its lanes see.
struct Panel {
  VI low[NV], high[NV];
  int64_t begin, queries, keys;  // first query, how many, keys up to the last one seen
  int64_t all_low, all_high;     // keys from here to there are seen by all lanes

  Panel(const Seen& z, int64_t y) : begin(y), queries(lower(NR, z.queries - y)), all_low(0), all_high(z.own + y) {
    for (int i = 0; i < NR; i++) {
      low[i / W][i % W] = z.low[y + i];
      high[i / W][i % W] = static_cast<int32_t>(z.own + y + i);
      all_low = higher(all_low, z.low[y + i]);
    }
    keys = higher(0, lower(z.keys, z.own + y + queries));
  }
  bool all(int64_t from, int64_t to) const { return from >= all_low && to - 1 <= all_high; }
  VI sees(int64_t key, int j) const {
    const VI k = splat_i(static_cast<int32_t>(key));
    return (k >= low[j]) & (k <= high[j]);
  }
};

// Products of `rows` keys from `key` on with the panel's queries: those whose first vectors see none of the keys are left out.
void scores(const Seen& z, const Panel& panel, const HeadRows& k, int64_t key, int64_t rows, const float* packed, float* to, int64_t ld) {
  const int64_t from = higher(0, key - z.own - panel.begin) / W * W;
  strip<kSet>({k.x + key * k.ld, k.ld, packed + panel.begin * k.width + from, NR, k.width, to + from, ld}, rows, NR - from);
}

// Add to rows of the panel's queries what the values (or keys) give by weights w[key][query].
void add_to_queries(const Seen& z, const Panel& panel, const float* w, int64_t ld, const HeadRows& v, float* out, int64_t ld_out) {
  const int64_t high = height(panel.queries);
  for (int64_t i = 0; i < panel.queries; i += high) {
    const int64_t rows = lower(high, panel.queries - i), keys = lower(panel.keys, z.own + panel.begin + i + rows);
    if (keys > 0) strip<kAddByColumns>({w + i, ld, v.x, v.ld, keys, out + (panel.begin + i) * ld_out, ld_out}, rows, v.width);
  }
}

void forward(const ForwardPart& p) {
  const Seen& z = p.seen;
  const V factor = splat(p.scale);
  const int64_t high = height(z.keys);
  for (int64_t y = 0; y < z.queries; y += NR) {
    const Panel panel(z, y);
    V top[NV], sum[NV], shift[NV];
    for (int j = 0; j < NV; j++) top[j] = load(p.top + y + j * W);
    for (int64_t x = 0; x < panel.keys; x += high) {
      const int64_t rows = lower(high, panel.keys - x);
      float* s = p.scores + x * NR;
      scores(z, panel, p.k, x, rows, p.q, s, NR);
      const bool all = panel.all(x, x + rows);
      for (int64_t i = 0; i < rows; i++, s += NR) {
        for (int j = 0; j < NV; j++) {
          V score = load(s + j * W);
          if (!all) store(s + j * W, score = select(panel.sees(x + i, j), score, splat(-__builtin_inff())));
          top[j] = max_fast(top[j], score);
        }
      }
    }
    for (int j = 0; j < NV; j++) {
      float fade[W];
      const V before = load(p.top + y + j * W), less = exp_v(factor * (before - top[j]));
      store(fade, less);
      store(p.top + y + j * W, top[j]);
      sum[j] = load(p.sum + y + j * W) * less;
      shift[j] = -factor * top[j];
      for (int i = 0; i < W && y + j * W + i < z.queries; i++) {
        if (fade[i] != 1) scale_by(p.out + (y + j * W + i) * p.ld_out, p.v.width, fade[i]);
      }
    }
    for (int64_t x = 0; x < panel.keys; x += high) {  // sums of few keys at first: they lose less
      V part[NV] = {};
      for (int64_t i = x; i < lower(x + high, panel.keys); i++) {
        for (int j = 0; j < NV; j++) {
          float* s = p.scores + i * NR + j * W;
          const V e = exp_v(fma(load(s), factor, shift[j]));
          part[j] += e;
          store(s, p.round ? round_bf16(e) : e);
        }
      }
      for (int j = 0; j < NV; j++) sum[j] += part[j];
    }
    for (int j = 0; j < NV; j++) store(p.sum + y + j * W, sum[j]);
    add_to_queries(z, panel, p.scores, NR, p.v, p.out, p.ld_out);
  }
}

// Scores and their gradients before, probabilities and the gradients of scores after.
void gradients(const BackwardPart& p, const Panel& panel, int64_t key, int64_t rows, float* prob, float* ds) {
  const V factor = splat(p.scale);
  const bool all = panel.all(key, key + rows);
  for (int j = 0; j < NV; j++) {
    const int there = lanes(higher(0, panel.queries - j * W));
    const V shift = -load_n(p.lse + panel.begin + j * W, there), delta = load_n(p.delta + panel.begin + j * W, there);
    for (int64_t i = 0; i < rows; i++) {
      float *at = prob + i * kScoresApart + j * W, *d = ds + i * kScoresApart + j * W;
      V e = exp_v(fma(load(at), factor, shift)), g = e * (load(d) - delta) * factor;
      if (!all) {
        const VI sees = panel.sees(key + i, j);
        e = select(sees, e, V{}), g = select(sees, g, V{});
      }
      store(at, p.round ? round_bf16(e) : e);
      store(d, p.round ? round_bf16(g) : g);
    }
  }
}

void backward(const BackwardPart& p) {
  const Seen& z = p.seen;
  const int64_t high = height(z.keys);
  for (int64_t y = 0; y < z.queries; y += NR) {
    const Panel panel(z, y);
    for (int64_t x = 0; x < panel.keys; x += high) {
      const int64_t rows = lower(high, z.keys - x);  // whole strips, as they are read below
      float *prob = p.p + x * kScoresApart + y, *ds = p.ds + x * kScoresApart + y;
      scores(z, panel, p.k, x, rows, p.packed_q, prob, kScoresApart);
      scores(z, panel, p.v, x, rows, p.packed_do, ds, kScoresApart);
      gradients(p, panel, x, rows, prob, ds);
    }
    add_to_queries(z, panel, p.ds + y, kScoresApart, p.k, p.dq, p.q.ld);
  }
  for (int64_t x = 0; x < z.keys; x += high) {
    const int64_t rows = lower(high, z.keys - x), from = higher(0, x - z.own), depth = z.queries - from;
    const float *prob = p.p + x * kScoresApart + from, *ds = p.ds + x * kScoresApart + from;
    strip<kAddByRows>({prob, kScoresApart, p.d_out.x + from * p.d_out.ld, p.d_out.ld, depth, p.dv + x * p.v.ld, p.v.ld}, rows, p.v.width);
    strip<kAddByRows>({ds, kScoresApart, p.q.x + from * p.q.ld, p.q.ld, depth, p.dk + x * p.k.ld, p.k.ld}, rows, p.k.width);
  }
}

void rotate(const float* x, const float* cos, const float* sin, int64_t half, bool interleaved, float* y) {
  for (int64_t i = 0; i < half; i++) {
    const float a = interleaved ? x[2 * i] : x[i], b = interleaved ? x[2 * i + 1] : x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = b * cos[i] + a * sin[i];
  }
}

void rotate_back(const float* y, const float* cos, const float* sin, int64_t half, bool interleaved, float* x) {
  for (int64_t i = 0; i < half; i++) {
    const float a = y[i] * cos[i] + y[half + i] * sin[i], b = y[half + i] * cos[i] - y[i] * sin[i];
    x[interleaved ? 2 * i : i] = a;
    x[interleaved ? 2 * i + 1 : half + i] = b;
  }
}

}  // namespace

extern const AttentionKernels attention;
const AttentionKernels attention = {pack, forward, backward, softmax, probabilities, score_gradient, scale_by, add, dot, rotate, rotate_back};

}  // namespace telechat::SIMD_NS
