// One recurrent step in one pass over the state: o = e^g (S q) + u (k . q), so that S is read and
// written once.
#include "recurrence.h"

#include <cstring>
#include <vector>

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t MAX_KEY = 512;

// Rows of the state, one for each of `count` values, go on. Decoding and folding call the same
// instructions, whose bits have to agree: a compiler may contract either product into the sum.
template <int KV, class S>
__attribute__((noinline)) void carry_rows(const S* source, S* target, int64_t K, int64_t count,
                                          const float* k, float decay, const float* update) {
  const int64_t vectors = KV ? KV : (K + LANES - 1) / LANES;
  for (int64_t v = 0; v < count; ++v, target += K, source += source ? K : 0) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; ++i) {
      const int64_t at = i * LANES;
      const vf before = !source ? (vf){} : KV ? load(source + at) : load_n(source + at, K - at);
      const vf key = KV ? load(k + at) : load_n(k + at, K - at);
      const vf after = before * decay + update[v] * key;
      if (KV) {
        store(target + at, after);
      } else {
        store_n(target + at, after, K - at);
      }
    }
  }
}

// Rows of K = 16 * KV values, or of any K where KV is 0. u of each value is kept in `update`.
template <int KV, class S>
void step(const S* source, S* target, int64_t K, int64_t V, const float* q, const float* k,
          float decay, float beta, bool delta, const float* value, float* out, float* update) {
  const int64_t vectors = KV ? KV : (K + LANES - 1) / LANES;
  vf products = {};
  for (int64_t i = 0; i < vectors; ++i) products += load(q + i * LANES) * load(k + i * LANES);
  const float kq = sum(products);
  const auto read = [&](int64_t v, int64_t i) {
    const S* at = source + v * K + i * LANES;
    return KV ? load(at) : load_n(at, K - i * LANES);
  };
  constexpr int64_t BLOCK = KV == 4 ? 8 : 1;  // short rows are not worth a call each
  for (int64_t first = 0; first < V; first += BLOCK) {
    const int64_t end = std::min(V, first + BLOCK);
    for (int64_t v = first; v < end; ++v) {
      vf sk = {}, sq = {};
      if (source) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < vectors; ++i) {
          const vf row = read(v, i);
          if (delta) sk += row * load(k + i * LANES);
          sq += row * load(q + i * LANES);
        }
      }
      const float u = beta * (value[v] - decay * sum(sk));
      out[v] = decay * sum(sq) + u * kq;
      update[v] = u;
    }
    if (!target) continue;
    const S* before = source ? source + first * K : nullptr;
    carry_rows<KV>(before, target + first * K, K, end - first, k, decay, update + first);
  }
}

// The same where each key has its own decay: S diag(d) k = S (d k).
template <class S>
void key_step(const S* source, S* target, int64_t K, int64_t V, const float* q, const float* k,
              const float* decay, float beta, const float* value, float* out) {
  alignas(64) float past_q[MAX_KEY], past_k[MAX_KEY];
  vf products = {};
  for (int64_t i = 0; i < K; i += LANES) {
    products += load(q + i) * load(k + i);
    store(past_q + i, load(q + i) * load(decay + i));
    store(past_k + i, load(k + i) * load(decay + i));
  }
  const float kq = sum(products);
  for (int64_t v = 0; v < V; ++v) {
    vf sk = {}, sq = {};
    for (int64_t i = 0; source && i < K; i += LANES) {
      const vf row = load_n(source + v * K + i, K - i);
      sk += row * load(past_k + i);
      sq += row * load(past_q + i);
    }
    const float u = beta * (value[v] - sum(sk));
    out[v] = sum(sq) + u * kq;
    for (int64_t i = 0; target && i < K; i += LANES) {
      const vf row = source ? load_n(source + v * K + i, K - i) * load(decay + i) : (vf){};
      store_n(target + v * K + i, row + u * load(k + i), K - i);
    }
  }
}

// What one head of one token is computed in.
struct Scratch {
  alignas(64) float q[MAX_KEY], k[MAX_KEY], value[MAX_KEY];
  alignas(64) float out[MAX_KEY], update[MAX_KEY], decay[MAX_KEY];
};

// One head of one token, from state to state. Returns its decay, and leaves k and the update in
// `x`, unless each key has its own.
template <class T, class S>
float advance(const Recurrence& s, const RecurrenceInput<T>& in, int64_t token, int64_t head,
              const S* source, S* state, Scratch& x) {
  const int64_t K = s.key_dim, V = s.value_dim, HV = s.num_v_heads, KH = s.num_k_heads * K;
  const T* mixed = in.mixed + token * in.mixed_stride;
  const T* keys = mixed + head / (HV / s.num_k_heads) * K;
  load_key(s, keys, x.q, 1.0f / std::sqrt(float(K)));
  load_key(s, keys + KH, x.k, 1.0f);
  const T* v = mixed + 2 * KH + head * V;
  for (int64_t i = 0; i < V; i += LANES) store(x.value + i, load_n(v + i, V - i));
  float decay = 1;
  if (s.per_key) {
    key_decays(s, in, token, head, x.decay);
    for (int64_t i = 0; i < K; i += LANES) store(x.decay + i, exp(load(x.decay + i)));
    const float beta = beta_of(s, in, token, head);
    key_step<S>(source, state, K, V, x.q, x.k, x.decay, beta, x.value, x.out);
  } else {
    const Gate gates = gate(s, in, token, head);
    decay = std::exp(gates.g);
    const auto fn = K == 128 ? step<8, S> : K == 64 ? step<4, S> : step<0, S>;
    fn(source, state, K, V, x.q, x.k, decay, gates.beta, s.delta, x.value, x.out, x.update);
  }
  T* target = in.out + (token * HV + head) * V;
  const float skip = s.D ? s.D[head] : 0.0f;
  for (int64_t i = 0; i < V; i += LANES) {
    store_n(target + i, load(x.out + i) + skip * load(x.value + i), V - i);
  }
  return decay;
}

template <class S>
S* head_of(const StatePool<S>& pool, int32_t slot, int64_t head, int64_t size) {
  return slot < 0 ? nullptr : pool.data + slot * pool.stride + head * size;
}

template <class S>
void keep(const StatePool<S>& pool, int32_t slot, int64_t head, int64_t size, const S* state) {
  S* target = head_of(pool, slot, head, size);
  if (target) std::memcpy(target, state, size_t(size) * sizeof(S));
}

// The head's state of a row after its pending tokens, in `state`; stored at the mark on the way.
template <class S>
void fold_pending(const StatePool<S>& pool, const Records& r, const VerifyRows& w, int64_t row,
                  int64_t head, S* state) {
  const int64_t K = r.key_dim, V = r.value_dim, size = V * K;
  const int64_t key_head = head / (r.num_v_heads / r.num_k_heads);
  if (const S* source = head_of(pool, w.src[row], head, size)) {
    std::memcpy(state, source, size_t(size) * sizeof(S));
  } else {
    std::memset(static_cast<void*>(state), 0, size_t(size) * sizeof(S));
  }
  for (int64_t i = 0; i < w.pending[row]; ++i) {
    const int64_t at = w.read[row] * r.length + i;
    const auto carry = K == 128 ? carry_rows<8, S> : K == 64 ? carry_rows<4, S> : carry_rows<0, S>;
    carry(state, state, K, V, r.keys + (at * r.num_k_heads + key_head) * K,
          r.decays[at * r.num_v_heads + head], r.updates + (at * r.num_v_heads + head) * V);
    if (i + 1 == w.mark[row]) keep(pool, w.mark_dst[row], head, size, state);
  }
}

}  // namespace

template <class S>
void recurrence_fold(const StatePool<S>& pool, const Records& r, const VerifyRows& w) {
  const int64_t size = r.key_dim * r.value_dim;
  parallel_ranges(w.count * r.num_v_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<S> state(size);
    for (int64_t task = begin; task < end; ++task) {
      fold_pending(pool, r, w, task / r.num_v_heads, task % r.num_v_heads, state.data());
      keep(pool, w.dst[task / r.num_v_heads], task % r.num_v_heads, size, state.data());
    }
  });
}

template <class T, class S>
void recurrence_verify(const Recurrence& s, const RecurrenceInput<T>& in, const StatePool<S>& pool,
                       const Records& r, const VerifyRows& w) {
  const int64_t K = s.key_dim, V = s.value_dim, size = K * V;
  const int64_t HV = s.num_v_heads, ratio = HV / s.num_k_heads;
  const int64_t grain = std::max<int64_t>(1, 16384 / size);
  parallel_ranges(w.count * HV, grain, [&](int64_t begin, int64_t end) {
    Scratch x;
    std::vector<S> state(size);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / HV, head = task % HV;
      const int64_t first = w.cu_tokens[row], last = w.cu_tokens[row + 1];
      fold_pending(pool, r, w, row, head, state.data());
      if (last - first > 1) keep(pool, w.dst[row], head, size, state.data());
      for (int64_t token = first; token < last; ++token) {
        const float decay = advance(s, in, token, head, state.data(), state.data(), x);
        const int64_t at = w.write[row] * r.length + token - first;
        r.decays[at * HV + head] = decay;
        std::memcpy(r.updates + (at * HV + head) * V, x.update, size_t(V) * sizeof(float));
        if (head % ratio == 0) {
          float* key = r.keys + (at * s.num_k_heads + head / ratio) * K;
          std::memcpy(key, x.k, size_t(K) * sizeof(float));
        }
      }
      if (last - first <= 1) keep(pool, w.dst[row], head, size, state.data());
    }
  });
}

template <class T, class S>
void recurrence_decode(const Recurrence& s, const RecurrenceInput<T>& in, const StatePool<S>& pool,
                       int64_t rows, const int32_t* src, const int32_t* dst) {
  const int64_t HV = s.num_v_heads, size = s.key_dim * s.value_dim;
  parallel_ranges(rows * HV, std::max<int64_t>(1, 16384 / size), [&](int64_t begin, int64_t end) {
    Scratch x;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / HV, head = task % HV;
      const S* source = head_of(pool, src[row], head, size);
      advance(s, in, row, head, source, head_of(pool, dst[row], head, size), x);
    }
  });
}

#define FORKPOINT_DECODE(T, S)                                                            \
  template void recurrence_decode(const Recurrence&, const RecurrenceInput<T>&,             \
                                  const StatePool<S>&, int64_t, const int32_t*, const int32_t*);
FORKPOINT_DECODE(float, float)
FORKPOINT_DECODE(bf16, float)
FORKPOINT_DECODE(float, bf16)
FORKPOINT_DECODE(bf16, bf16)

#define FORKPOINT_VERIFY(T, S)                                                            \
  template void recurrence_verify(const Recurrence&, const RecurrenceInput<T>&,             \
                                  const StatePool<S>&, const Records&, const VerifyRows&);
FORKPOINT_VERIFY(float, float)
FORKPOINT_VERIFY(bf16, float)
FORKPOINT_VERIFY(float, bf16)
FORKPOINT_VERIFY(bf16, bf16)
template void recurrence_fold(const StatePool<float>&, const Records&, const VerifyRows&);
template void recurrence_fold(const StatePool<bf16>&, const Records&, const VerifyRows&);

}  // namespace forkpoint
