// One recurrent step in one pass over the state: o = e^g (S q) + u (k . q), so that S is read and
// written once.
#include "recurrence.h"

#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t MAX_KEY = 512;

// Rows of the state, one for each of `count` values, go on; KEYED has a decay for each key. Decoding
// and folding call the same instructions, whose bits have to agree: a compiler may contract either
// product into the sum.
template <int KV, bool KEYED, class S>
__attribute__((noinline)) void carry_rows(const S* source, S* target, int64_t K, int64_t count,
                                          const float* k, const float* decay, const float* update) {
  const int64_t vectors = KV ? KV : (K + LANES - 1) / LANES;
  const auto part = [&](const auto* row, int64_t at) {
    return KV ? load(row + at) : load_n(row + at, K - at);
  };
  for (int64_t v = 0; v < count; ++v, target += K, source += source ? K : 0) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; ++i) {
      const int64_t at = i * LANES;
      const vf before = source ? part(source, at) : (vf){};
      const vf kept = KEYED ? part(decay, at) : splat(*decay);
      const vf after = before * kept + update[v] * part(k, at);
      if (KV) {
        store(target + at, after);
      } else {
        store_n(target + at, after, K - at);
      }
    }
  }
}

// Rows of K = 16 * KV values, or of any K where KV is 0. u of each value is kept in `update`. Where
// each key has its own decay, S diag(d) k = S (d k).
template <int KV, bool KEYED, class S>
void step(const S* source, S* target, int64_t K, int64_t V, const float* q, const float* k,
          const float* decays, float beta, bool delta, const float* value, float* out, float* update) {
  const int64_t vectors = KV ? KV : (K + LANES - 1) / LANES;
  alignas(64) float past_q[KEYED ? MAX_KEY : 1], past_k[KEYED ? MAX_KEY : 1];
  vf products = {};
  for (int64_t i = 0; i < vectors; ++i) {
    const int64_t at = i * LANES;
    products += load(q + at) * load(k + at);
    if (KEYED) {
      store(past_q + at, load(q + at) * load(decays + at));
      store(past_k + at, load(k + at) * load(decays + at));
    }
  }
  const float kq = sum(products), decay = KEYED ? 1.0f : *decays;
  const float *of_q = KEYED ? past_q : q, *of_k = KEYED ? past_k : k;
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
          if (delta) sk += row * load(of_k + i * LANES);
          sq += row * load(of_q + i * LANES);
        }
      }
      const float u = beta * (value[v] - decay * sum(sk));
      out[v] = decay * sum(sq) + u * kq;
      update[v] = u;
    }
    if (!target) continue;
    const S* before = source ? source + first * K : nullptr;
    carry_rows<KV, KEYED>(before, target + first * K, K, end - first, k, decays, update + first);
  }
}

// What one head of one token is computed in.
struct Scratch {
  alignas(64) float q[MAX_KEY], k[MAX_KEY], value[MAX_KEY];
  alignas(64) float out[MAX_KEY], update[MAX_KEY], decay[MAX_KEY];
};

// One head of one token, from state to state; leaves k, the update and the decay, or those of all
// keys, in `x`.
template <bool KEYED, class T, class S>
void advance(const Recurrence& s, const RecurrenceInput<T>& in, int64_t token, int64_t head,
              const S* source, S* state, Scratch& x) {
  const int64_t K = s.key_dim, V = s.value_dim, HV = s.num_v_heads, KH = s.num_k_heads * K;
  const T* mixed = in.mixed + token * in.mixed_stride;
  const T* keys = mixed + head / (HV / s.num_k_heads) * K;
  load_key(s, keys, x.q, 1.0f / std::sqrt(float(K)));
  load_key(s, keys + KH, x.k, 1.0f);
  const T* v = mixed + 2 * KH + head * V;
  for (int64_t i = 0; i < V; i += LANES) store(x.value + i, load_n(v + i, V - i));
  const vf b = s.delta ? splat(to_float(in.b[token * in.b_stride + head])) : (vf){};
  float beta;
  if (KEYED) {
    key_decays(s, in, token, head, x.decay);
    for (int64_t i = 0; i < K; i += LANES) store(x.decay + i, exp(load(x.decay + i)));
    beta = beta_of(s, b)[0];
  } else {
    const Gates own = gates(s, head, splat(to_float(in.a[token * in.a_stride + head])), b);
    x.decay[0] = exp(own.g)[0];
    beta = own.beta[0];
  }
  const auto fn = K == 128 ? step<8, KEYED, S> : K == 64 ? step<4, KEYED, S> : step<0, KEYED, S>;
  fn(source, state, K, V, x.q, x.k, x.decay, beta, s.delta, x.value, x.out, x.update);
  T* target = in.out + (token * HV + head) * V;
  const float skip = s.D ? s.D[head] : 0.0f;
  for (int64_t i = 0; i < V; i += LANES) {
    store_n(target + i, load(x.out + i) + skip * load(x.value + i), V - i);
  }
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
template <bool KEYED, class S>
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
    const auto carry = K == 128  ? carry_rows<8, KEYED, S>
                       : K == 64 ? carry_rows<4, KEYED, S>
                                 : carry_rows<0, KEYED, S>;
    const int64_t own = at * r.num_v_heads + head;
    carry(state, state, K, V, r.keys + (at * r.num_k_heads + key_head) * K,
          r.decays + own * (KEYED ? K : 1), r.updates + own * V);
    if (i + 1 == w.mark[row]) keep(pool, w.mark_dst[row], head, size, state);
  }
}

// Calls `run` with whether each key has its own decay, which kernels take as a constant.
template <class F>
void by_decays(bool keyed, const F& run) {
  keyed ? run(std::true_type()) : run(std::false_type());
}

}  // namespace

template <class S>
void recurrence_fold(const StatePool<S>& pool, const Records& r, const VerifyRows& w) {
  const int64_t size = r.key_dim * r.value_dim;
  by_decays(r.per_key, [&](auto keyed) {
    parallel_ranges(w.count * r.num_v_heads, 1, [&](int64_t begin, int64_t end) {
      std::vector<S> state(size);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / r.num_v_heads, head = task % r.num_v_heads;
        fold_pending<keyed.value>(pool, r, w, row, head, state.data());
        keep(pool, w.dst[row], head, size, state.data());
      }
    });
  });
}

template <class T, class S>
void recurrence_verify(const Recurrence& s, const RecurrenceInput<T>& in, const StatePool<S>& pool,
                       const Records& r, const VerifyRows& w) {
  const int64_t K = s.key_dim, V = s.value_dim, size = K * V;
  const int64_t HV = s.num_v_heads, ratio = HV / s.num_k_heads, decays = s.per_key ? K : 1;
  const int64_t grain = std::max<int64_t>(1, 16384 / size);
  by_decays(s.per_key, [&](auto keyed) {
    parallel_ranges(w.count * HV, grain, [&](int64_t begin, int64_t end) {
      Scratch x;
      std::vector<S> state(size);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / HV, head = task % HV;
        const int64_t first = w.cu_tokens[row], last = w.cu_tokens[row + 1];
        fold_pending<keyed.value>(pool, r, w, row, head, state.data());
        if (last - first > 1) keep(pool, w.dst[row], head, size, state.data());
        for (int64_t token = first; token < last; ++token) {
          advance<keyed.value>(s, in, token, head, state.data(), state.data(), x);
          const int64_t at = w.write[row] * r.length + token - first, own = at * HV + head;
          std::memcpy(r.decays + own * decays, x.decay, size_t(decays) * sizeof(float));
          std::memcpy(r.updates + own * V, x.update, size_t(V) * sizeof(float));
          if (head % ratio == 0) {
            float* key = r.keys + (at * s.num_k_heads + head / ratio) * K;
            std::memcpy(key, x.k, size_t(K) * sizeof(float));
          }
        }
        if (last - first <= 1) keep(pool, w.dst[row], head, size, state.data());
      }
    });
  });
}

template <class T, class S>
void recurrence_decode(const Recurrence& s, const RecurrenceInput<T>& in, const StatePool<S>& pool,
                       int64_t rows, const int32_t* src, const int32_t* dst) {
  const int64_t HV = s.num_v_heads, size = s.key_dim * s.value_dim;
  const int64_t grain = std::max<int64_t>(1, 16384 / size);
  by_decays(s.per_key, [&](auto keyed) {
    parallel_ranges(rows * HV, grain, [&](int64_t begin, int64_t end) {
      Scratch x;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / HV, head = task % HV;
        const S* source = head_of(pool, src[row], head, size);
        S* target = head_of(pool, dst[row], head, size);
        advance<keyed.value>(s, in, row, head, source, target, x);
      }
    });
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
