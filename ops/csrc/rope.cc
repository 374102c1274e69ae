// Rotary positions, and the assembly of attention's inputs from the projections of multi-head latent attention.
#include <algorithm>

#include "aot.h"
#include "attention.h"
#include "pool.h"

namespace {

using namespace telechat;

struct RopeState : State {
  bool interleaved;
  explicit RopeState(Attributes& a) : interleaved(a.flag("interleaved")) {}
};

struct MlaState : RopeState {
  int64_t heads, nope;
  explicit MlaState(Attributes& a) : RopeState(a), heads(a.integer("heads")), nope(a.integer("nope")) {}
};

// cos and sin [B, S, 1, half]: one row a token
struct Angles {
  const float *cos, *sin;
  int64_t half, T;
  Angles(const Arg& c, const Arg& s) : cos(c.as<const float>("cos")), sin(s.as<const float>("sin")), half(c.dim(-1)), T(c.rows()) {
    check(s.size() == c.size() && s.dim(-1) == half, "cos and sin differ in shape");
  }
};

void rotate_all(const Call& call, bool back) {
  const Arg x = call[0];
  const Angles angle(call[1], call[2]);
  check(x.rank == 4 && x.dim(3) == 2 * angle.half && x.dim(0) * x.dim(1) == angle.T,
        "x has %ld tokens of width %ld, the angles are for %ld of width %ld", long(x.dim(0) * x.dim(1)), long(x.dim(-1)),
        long(angle.T), long(2 * angle.half));
  const int64_t N = x.dim(2), R = x.dim(3);
  const bool interleaved = call.state<RopeState>().interleaved;
  const float* from = x.as<const float>("x");
  float* to = call[3].as<float>("y");
  const auto run = back ? attention().rotate_back : attention().rotate;
  parallel_for(angle.T, [&](int64_t t) {
    for (int64_t n = 0; n < N; n++) {
      const int64_t at = (t * N + n) * R;
      run(from + at, angle.cos + t * angle.half, angle.sin + t * angle.half, angle.half, interleaved, to + at);
    }
  });
}

struct MlaSizes {
  int64_t T, N, nope, rope, D, Dv;
  MlaSizes(const MlaState& s, const Angles& angle, int64_t kv_width) {
    T = angle.T, N = s.heads, nope = s.nope, rope = 2 * angle.half, D = nope + rope, Dv = kv_width / N - nope;
    check(kv_width % N == 0 && Dv > 0, "keys and values of width %ld do not fit %ld heads of %ld", long(kv_width), long(N), long(nope));
  }
};

}  // namespace

// x [B, S, N, R], cos, sin [B, S, 1, R / 2] -> y
TELECHAT_INIT(Rope, RopeState)
TELECHAT_SHAPES1(Rope) { return in.shape(0); }
TELECHAT_RUN(Rope) { rotate_all(call, false); }

TELECHAT_INIT(RopeGrad, RopeState)
TELECHAT_SHAPES1(RopeGrad) { return in.shape(0); }
TELECHAT_RUN(RopeGrad) { rotate_all(call, true); }

// q [T, N (nope + rope)], kv [T, N (nope + Dv)], k_rope [T, rope], cos, sin [B, S, 1, rope / 2]
// -> q, k [B, S, N, nope + rope], v [B, S, N, Dv]; rotated, the rotary key shared by the heads
TELECHAT_INIT(MlaAssemble, MlaState)
TELECHAT_SHAPES(MlaAssemble) {
  Attributes a = in.attributes();
  const int64_t B = in.dim(3, 0), S = in.dim(3, 1), N = a.integer("heads"), nope = a.integer("nope");
  const Shape key = {B, S, N, nope + 2 * in.dim(3, 3)};
  return {key, key, {B, S, N, in.dim(1, 1) / N - nope}};
}
TELECHAT_RUN(MlaAssemble) {
  const auto& state = call.state<MlaState>();
  const Angles angle(call[3], call[4]);
  const MlaSizes z(state, angle, call[1].dim(1));
  check(call[0].rows() == z.T && call[0].dim(1) == z.N * z.D, "queries are not [%ld, %ld]", long(z.T), long(z.N * z.D));
  check(call[1].rows() == z.T && call[2].rows() == z.T && call[2].dim(1) == z.rope, "keys do not have %ld rows of their widths", long(z.T));
  const float *q = call[0].as<const float>("q"), *kv = call[1].as<const float>("kv"), *shared = call[2].as<const float>("k_rope");
  float *Q = call[5].as<float>("Q"), *K = call[6].as<float>("K"), *V = call[7].as<float>("V");
  parallel_for(z.T, [&](int64_t t) {
    const float *cos = angle.cos + t * angle.half, *sin = angle.sin + t * angle.half;
    for (int64_t n = 0; n < z.N; n++) {
      const int64_t at = (t * z.N + n) * z.D;
      const float* from = kv + (t * z.N + n) * (z.nope + z.Dv);
      std::copy_n(q + at, z.nope, Q + at);
      attention().rotate(q + at + z.nope, cos, sin, angle.half, state.interleaved, Q + at + z.nope);
      std::copy_n(from, z.nope, K + at);
      if (n == 0) {
        attention().rotate(shared + t * z.rope, cos, sin, angle.half, state.interleaved, K + at + z.nope);
      } else {
        std::copy_n(K + t * z.N * z.D + z.nope, z.rope, K + at + z.nope);
      }
      std::copy_n(from + z.nope, z.Dv, V + (t * z.N + n) * z.Dv);
    }
  });
}

// dQ, dK, dV, cos, sin -> dq, dkv, dk_rope
TELECHAT_INIT(MlaAssembleGrad, MlaState)
TELECHAT_SHAPES(MlaAssembleGrad) {
  Attributes a = in.attributes();
  const int64_t T = in.dim(3, 0) < 0 || in.dim(3, 1) < 0 ? -1 : in.dim(3, 0) * in.dim(3, 1);
  const int64_t N = a.integer("heads");
  return {{T, N * in.dim(0, 3)}, {T, N * (a.integer("nope") + in.dim(2, 3))}, {T, 2 * in.dim(3, 3)}};
}
TELECHAT_RUN(MlaAssembleGrad) {
  const auto& state = call.state<MlaState>();
  const Angles angle(call[3], call[4]);
  const MlaSizes z(state, angle, state.heads * (state.nope + call[2].dim(3)));
  const float *dQ = call[0].as<const float>("dQ"), *dK = call[1].as<const float>("dK"), *dV = call[2].as<const float>("dV");
  float *dq = call[5].as<float>("dq"), *dkv = call[6].as<float>("dkv"), *dshared = call[7].as<float>("dk_rope");
  parallel_for(z.T, [&](int64_t t) {
    const float *cos = angle.cos + t * angle.half, *sin = angle.sin + t * angle.half;
    float* sum = scratch<float>(0, z.rope);
    std::fill_n(sum, z.rope, 0.0f);
    for (int64_t n = 0; n < z.N; n++) {
      const int64_t at = (t * z.N + n) * z.D;
      float* to = dkv + (t * z.N + n) * (z.nope + z.Dv);
      std::copy_n(dQ + at, z.nope, dq + at);
      attention().rotate_back(dQ + at + z.nope, cos, sin, angle.half, state.interleaved, dq + at + z.nope);
      std::copy_n(dK + at, z.nope, to);
      std::copy_n(dV + (t * z.N + n) * z.Dv, z.Dv, to + z.nope);
      attention().add(sum, dK + at + z.nope, z.rope);
    }
    attention().rotate_back(sum, cos, sin, angle.half, state.interleaved, dshared + t * z.rope);
  });
}
