// Tokens one after another: a token's bits are the same in a long segment, behind a cut, alone as a decode row, and
// folded in later.
#include "scan.h"

#include <cstring>

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t CHANNELS = 32;  // of one task
constexpr int64_t STORED = 64;    // tokens after which a state may be stored, and resumed from

template <class T>
const T* at(const ScanRows<T>& rows, int64_t token) {
  return rows.data + token * rows.stride;
}

// States of `count` channels go on. Scanning and folding call the same instructions, whose bits have to agree: a
// compiler may contract either product into the sum.
__attribute__((noinline)) void carry(const float* A, const float* steps, const float* amounts, const float* b,
                                     int64_t count, int64_t values, float* state) {
  for (int64_t d = 0; d < count; ++d, A += values, state += round_up(values)) {
    for (int64_t i = 0; i < values; i += LANES) {
      const int64_t left = values - i;
      store(state + i, exp(steps[d] * load_n(A + i, left)) * load(state + i) + amounts[d] * load_n(b + i, left));
    }
  }
}

// The states of channels [first, last), rows padded to whole vectors, between slots.
template <class S>
struct Piece {
  const ScanPool<S>& pool;
  int64_t first, last, width;
  Buffer<float> state;
  alignas(64) float steps[CHANNELS], amounts[CHANNELS];  // of a token
  Buffer<float> b;

  Piece(const ScanPool<S>& pool, int64_t piece)
      : pool(pool),
        first(piece * CHANNELS),
        last(std::min(first + CHANNELS, pool.dim)),
        width(round_up(pool.values)),
        state(CHANNELS * width),
        b(width) {}

  int64_t count() const { return last - first; }

  template <class F>
  void each(int32_t slot, const F& run) {
    for (int64_t d = first; d < last; ++d) {
      S* kept = pool.data + slot * pool.stride + d * pool.values;
      for (int64_t i = 0; i < pool.values; i += LANES) run(kept + i, state + (d - first) * width + i, pool.values - i);
    }
  }

  void read(int32_t slot) {
    const bool old = slot >= 0;
    each(slot, [&](const S* kept, float* own, int64_t left) { store(own, old ? load_n(kept, left) : (vf){}); });
  }

  void keep(int32_t slot) {
    if (slot < 0) return;
    each(slot, [&](S* kept, const float* own, int64_t left) { store_n(kept, load(own), left); });
  }

  // As if it were stored and resumed from here.
  void round() { pass_through<S>(state, CHANNELS * width); }
};

int64_t pieces(int64_t dim) { return (dim + CHANNELS - 1) / CHANNELS; }

// The states after a token of these inputs.
template <class T, class S>
void advance(const ScanRates& rates, const T* x, const T* dt, const T* b, Piece<S>& p) {
  const int64_t first = p.first, values = p.pool.values;
  for (int64_t i = 0; i < values; i += LANES) store(p.b + i, load_n(b + i, values - i));
  for (int64_t d = 0; d < p.count(); d += LANES) {
    const int64_t left = p.count() - d;
    const vf steps = softplus(load_n(dt + first + d, left) + load_n(rates.dt_bias + first + d, left));
    store_n(p.steps + d, steps, left);
    store_n(p.amounts + d, steps * load_n(x + first + d, left), left);
  }
  carry(rates.A + first * values, p.steps, p.amounts, p.b, p.count(), values, p.state);
}

// One token.
template <class T, class S>
void step(const Scan<T>& in, int64_t token, Piece<S>& p) {
  const int64_t first = p.first, values = in.values;
  const T *x = at(in.x, token), *z = at(in.z, token), *c = at(in.c, token);
  advance(in.rates, x, at(in.dt, token), at(in.b, token), p);
  alignas(64) float y[CHANNELS], gate[CHANNELS];
  for (int64_t d = 0; d < p.count(); ++d) {
    vf total = {};
    for (int64_t i = 0; i < values; i += LANES) total += load(p.state + d * p.width + i) * load_n(c + i, values - i);
    y[d] = sum(total) + in.skip[first + d] * to_float(x[first + d]);
    gate[d] = to_float(z[first + d]);
  }
  T* out = in.out + token * in.dim + first;
  for (int64_t d = 0; d < p.count(); d += LANES) store_n(out + d, load(y + d) * silu(load(gate + d)), p.count() - d);
}

// A row's state after its pending tokens; stored at the mark on the way.
template <class T, class S>
void fold_pending(const ScanRates& rates, const ScanRecords<T>& r, const VerifyRows& w, int64_t row, Piece<S>& p) {
  const int64_t dim = p.pool.dim, values = p.pool.values;
  p.read(w.src[row]);
  for (int64_t i = 0; i < w.pending[row]; ++i) {
    const int64_t own = r.line[row] * r.length + i, shared = w.read[row] * r.length + i;
    advance(rates, r.x + own * dim, r.dt + own * dim, r.b + shared * values, p);
    p.round();
    if (i + 1 == w.mark[row]) p.keep(w.mark_dst[row]);
  }
}

// `count` elements from `first` on.
template <class T>
void copy(T* to, const T* from, int64_t first, int64_t count) {
  std::memcpy(to + first, from + first, size_t(count) * sizeof(T));
}

}  // namespace

template <class T, class S>
void scan(const Scan<T>& in, const ScanPool<S>& pool, const Segments& segments) {
  parallel_tasks(segments.count * pieces(in.dim), [&](int64_t task) {
    const int64_t n = task / pieces(in.dim);
    Piece<S> p(pool, task % pieces(in.dim));
    p.read(segments.src[n]);
    const int64_t begin = segments.cu_seqlens[n], length = segments.cu_seqlens[n + 1] - begin;
    int64_t e = segments.save_ptr ? segments.save_ptr[n] : 0;
    const int64_t last_save = segments.save_ptr ? segments.save_ptr[n + 1] : 0;
    for (int64_t t = 0; t < length; ++t) {
      step(in, begin + t, p);
      if ((t + 1) % STORED == 0) p.round();
      for (; e < last_save && segments.save_pos[e] == t + 1; ++e) p.keep(segments.save_dst[e]);
    }
    p.keep(segments.dst[n]);
  });
}

template <class T, class S>
void scan_verify(const Scan<T>& in, const ScanPool<S>& pool, const ScanRecords<T>& r, const VerifyRows& w) {
  parallel_tasks(w.count * pieces(in.dim), [&](int64_t task) {
    const int64_t row = task / pieces(in.dim), first = w.cu_tokens[row], last = w.cu_tokens[row + 1];
    Piece<S> p(pool, task % pieces(in.dim));
    fold_pending(in.rates, r, w, row, p);
    if (last - first > 1) p.keep(w.dst[row]);
    for (int64_t token = first; token < last; ++token) {
      step(in, token, p);
      p.round();
      const int64_t i = token - first, own = r.line[row] * r.length + i, shared = w.write[row] * r.length + i;
      copy(r.x + own * in.dim, at(in.x, token), p.first, p.count());
      copy(r.dt + own * in.dim, at(in.dt, token), p.first, p.count());
      if (p.first == 0) copy(r.b + shared * in.values, at(in.b, token), 0, in.values);
    }
    if (last - first <= 1) p.keep(w.dst[row]);
  });
}

template <class T, class S>
void scan_fold(const ScanRates& rates, const ScanPool<S>& pool, const ScanRecords<T>& r, const VerifyRows& w) {
  parallel_tasks(w.count * pieces(pool.dim), [&](int64_t task) {
    const int64_t row = task / pieces(pool.dim);
    Piece<S> p(pool, task % pieces(pool.dim));
    fold_pending(rates, r, w, row, p);
    p.keep(w.dst[row]);
  });
}

#define FORKPOINT_SCAN(T, S)                                                                            \
  template void scan(const Scan<T>&, const ScanPool<S>&, const Segments&);                             \
  template void scan_verify(const Scan<T>&, const ScanPool<S>&, const ScanRecords<T>&, const VerifyRows&); \
  template void scan_fold(const ScanRates&, const ScanPool<S>&, const ScanRecords<T>&, const VerifyRows&);
FORKPOINT_SCAN(float, float)
FORKPOINT_SCAN(bf16, float)
FORKPOINT_SCAN(float, bf16)
FORKPOINT_SCAN(bf16, bf16)

}  // namespace forkpoint
