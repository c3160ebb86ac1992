// S' = exp(g) S; u = beta (v - S' k), or beta v without the delta rule; S = S' + u k^T; o = S q + D v, per value head,
// in fp32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace forkpoint {

struct Recurrence {
  int64_t num_k_heads, num_v_heads, key_dim, value_dim;
  bool double_beta, delta;
  float shortest, longest;  // step
  const float *A_log, *dt_bias, *D;  // D may be null
  bool per_key;  // each key has a decay of its own
  float bound;   // of those decays; 0: none
};

// Rows of `mixed` are [q | k | v], of a and b [HV], or of a [HV, K]; out is dense [T, HV, V]. b is read for the delta rule alone.
template <class T>
struct RecurrenceInput {
  const T* mixed;
  int64_t mixed_stride;
  const T* a;
  int64_t a_stride;
  const T* b;
  int64_t b_stride;
  T* out;
};

// Slot s of the pool is [HV, V, K] at data + s * stride.
template <class S>
struct StatePool {
  S* data;
  int64_t stride;
};

struct Segments {
  int64_t count;
  const int32_t *cu_seqlens, *src, *dst, *save_ptr, *save_pos, *save_dst;
};

template <class T, class S>
void recurrence_prefill(const Recurrence& shape, const RecurrenceInput<T>& in, const StatePool<S>& pool, const Segments& segments);

template <class T, class S>
void recurrence_decode(const Recurrence& shape, const RecurrenceInput<T>& in, const StatePool<S>& pool, int64_t rows, const int32_t* src,
                const int32_t* dst);

// Rows with drafts: see VerifyIndex in ops/metadata.py.
struct VerifyRows {
  int64_t count;
  const int32_t *src, *dst, *cu_tokens, *pending, *mark, *mark_dst, *read, *write;
};

// What tokens leave for the fold, `length` of them in each line: updates [HV, V], keys [H, K], decays [HV] of a token,
// or [HV, K] if `per_key`.
struct Records {
  int64_t length, num_k_heads, num_v_heads, key_dim, value_dim;
  bool per_key;
  float *updates, *keys, *decays;
};

template <class T, class S>
void recurrence_verify(const Recurrence& shape, const RecurrenceInput<T>& in, const StatePool<S>& pool,
                       const Records& records, const VerifyRows& rows);

template <class S>
void recurrence_fold(const StatePool<S>& pool, const Records& records, const VerifyRows& rows);

inline vf beta_of(const Recurrence& s, vf b) {
  const vf beta = sigmoid(b);
  return s.double_beta ? beta + beta : beta;
}

// g: the logs of the decays. beta: beta, or the steps without the delta rule.
struct Gates {
  vf g, beta;
};

// Returns the gates of one head for a token in each lane. b is read for the delta rule alone.
inline Gates gates(const Recurrence& s, int64_t head, vf a, vf b) {
  const vf shortest = splat(s.shortest), longest = splat(s.longest);
  vf step = softplus(a + s.dt_bias[head]);
  step = step < shortest ? shortest : step;
  step = step > longest ? longest : step;
  return {-exp(splat(s.A_log[head])) * step, s.delta ? beta_of(s, b) : step};
}

// g[0, round_up(K)): the logs of the decays of one token's keys, zeros behind K.
template <class T>
inline void key_decays(const Recurrence& s, const RecurrenceInput<T>& in, int64_t token, int64_t head, float* g) {
  const int64_t K = s.key_dim;
  const T* a = in.a + token * in.a_stride + head * K;
  const vf rate = exp(splat(s.A_log[head]));
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < K; i += LANES) {
    const vf raw = load_n(a + i, K - i) + load_n(s.dt_bias + head * K + i, K - i);
    const vf decay = s.bound ? s.bound * sigmoid(rate * raw) : -rate * softplus(raw);
    store(g + i, lane < int32_t(K - i) ? decay : (vf){});
  }
}

// out[0, round_up(n)) = x * scale / sqrt(sum x^2 + 1e-6), zeros behind n.
template <class T>
inline void l2_normalise(const T* x, float* out, int64_t n, float scale) {
  vf squares = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf v = load_n(x + i, n - i);
    store(out + i, v);
    squares += v * v;
  }
  const vf factor = splat(scale / std::sqrt(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < n; i += LANES) store(out + i, load(out + i) * factor);
}

// One head of q and of k, as the recurrence takes them.
template <class T>
inline void load_key(const Recurrence& s, const T* x, float* out, float scale) {
  if (s.delta) return l2_normalise(x, out, s.key_dim, scale);
  for (int64_t i = 0; i < s.key_dim; i += LANES) store(out + i, load_n(x + i, s.key_dim - i));
}

}  // namespace forkpoint
