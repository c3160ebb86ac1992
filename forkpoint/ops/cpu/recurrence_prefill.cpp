// The chunked form, 64 tokens at a time. With c = cumsum(g) inside the chunk:
//   (I + A) V' = beta (V - e^c K S0^T),  A_ij = beta_i (k_i . k_j) e^(c_i - c_j) for i > j   (forward substitution)
//   O = e^c Q S0^T + tril((q_i . k_j) e^(c_i - c_j)) V' + D V,   S1 = e^(c_n) S0 + sum_j e^(c_n - c_j) v'_j k_j^T
// Without the delta rule V' is beta V.
// The state is held transposed, [K, V], so that every product runs along V.
#include <optional>
#include <type_traits>

#include "matrix_tiles.h"
#include "parallel.h"
#include "recurrence.h"
#include "tile.h"

namespace forkpoint {

namespace {

constexpr int64_t CHUNK = 64;
constexpr int64_t STEP = 16;  // rows of one step of the substitution
constexpr int64_t MOST_STATE_BYTES = 512 * 1024;  // of the states of a task, which stay in L2

// The halves of x^T for a triangle x[j][i], which is zero for i < j. Blocks of STEP rows and columns below the diagonal
// stay zero, and with `strict` those on it as well. Only the rows i < n of x^T are split.
struct Triangle {
  bool strict;
  Halves columns, rows;
  explicit Triangle(bool strict) : strict(strict), columns(CHUNK, CHUNK), rows(CHUNK, CHUNK) { columns.clear(); }
  void split(const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += STEP) {
      split_right(x, CHUNK, i, i + STEP, 0, strict ? i : i + STEP, columns);
    }
    transpose_halves(columns, rows);
  }
};

// What products in matrix tiles need: the halves of operands, by the names of Scratch.
struct Tiles {
  TileScope scope;
  Halves k, q, turned, state, u, columns, rows;
  Triangle na, p;
  explicit Tiles(const Recurrence& s)
      : k(CHUNK, s.key_dim), q(CHUNK, s.key_dim), turned(CHUNK, s.key_dim), state(s.value_dim, s.key_dim),
        u(s.value_dim, CHUNK), columns(s.key_dim, CHUNK), rows(s.key_dim, CHUNK), na(true), p(false) {}
};

// Scratch of one task; kp and vp are K and V rounded up to 16, with zeros behind. `tiles` is for inputs of bf16 alone,
// whose rounding is far larger than that of halves.
struct Scratch {
  int64_t kp, vp;
  Buffer<float> k, kt, qt, rows, kk, kq, na, p, state, flip, u, o, c, near;
  std::optional<Tiles> tiles;
  Scratch(const Recurrence& s, bool is_rounded)
      : kp(round_up(s.key_dim)), vp(round_up(s.value_dim)),
        k(CHUNK * kp), kt(CHUNK * kp), qt(CHUNK * kp), rows(CHUNK * kp), kk(CHUNK * CHUNK), kq(CHUNK * CHUNK),
        na(CHUNK * CHUNK), p(CHUNK * CHUNK), state(kp * vp), flip(kp * vp), u(CHUNK * vp), o(CHUNK * vp),
        c(s.per_key ? CHUNK * kp : 0), near(s.per_key ? CHUNK * kp : 0) {
    std::fill(p.memory.get(), p + CHUNK * CHUNK, 0.0f);  // rows behind n of a block are multiplied by zeros
    const bool whole = s.key_dim % TILE_DEPTH == 0 && s.value_dim % TILE_DEPTH == 0;
    if (is_rounded && whole && has_matrix_tiles()) tiles.emplace(s);
  }
};

template <class S>
void load_state(const S* source, const Recurrence& s, Scratch& w, float* state) {
  if (!source) return std::fill(state, state + w.kp * w.vp, 0.0f);
  std::fill(w.flip.memory.get(), w.flip + w.kp * w.vp, 0.0f);
  for (int64_t v = 0; v < s.value_dim; ++v) {
    for (int64_t k = 0; k < s.key_dim; k += LANES) {
      store(w.flip + v * w.kp + k, load_n(source + v * s.key_dim + k, s.key_dim - k));
    }
  }
  transpose(w.flip, w.kp, state, w.vp, w.vp, w.kp);
}

template <class S>
void store_state(S* target, const Recurrence& s, Scratch& w, const float* state) {
  if (!target) return;
  transpose(state, w.vp, w.flip, w.kp, w.kp, w.vp);
  for (int64_t v = 0; v < s.value_dim; ++v) {
    for (int64_t k = 0; k < s.key_dim; k += LANES) {
      store_n(target + v * s.key_dim + k, load(w.flip + v * w.kp + k), s.key_dim - k);
    }
  }
}

// The halves of k^T, with the K values of a row of k every kp.
void turn_keys(int64_t n, int64_t K, const float* k, Scratch& w) {
  split_right(k, w.kp, 0, K, 0, round_up(n, TILE_DEPTH), w.tiles->columns);
  transpose_halves(w.tiles->columns, w.tiles->rows);
}

// k, k^T, q^T and the raw products of one key head; columns behind n are zero.
template <class T>
void load_keys(const Recurrence& s, const RecurrenceInput<T>& in, int64_t head, int64_t t0, int64_t n, Scratch& w) {
  const int64_t K = s.key_dim, KH = s.num_k_heads * K;
  std::fill(w.k + n * w.kp, w.k + CHUNK * w.kp, 0.0f);
  std::fill(w.rows + n * w.kp, w.rows + CHUNK * w.kp, 0.0f);
  const float scale = 1.0f / std::sqrt(float(K));
  for (int64_t t = 0; t < n; ++t) {
    const T* row = in.mixed + (t0 + t) * in.mixed_stride + head * K;
    load_key(s, row, w.rows + t * w.kp, scale);
    load_key(s, row + KH, w.k + t * w.kp, 1.0f);
  }
  if (s.per_key) return;
  if (w.tiles) {
    Tiles& t = *w.tiles;
    turn_keys(n, K, w.k, w);
    split_rows(w.k, w.kp, CHUNK, t.k);
    split_rows(w.rows, w.kp, CHUNK, t.q);
    if (s.delta) {
      transpose_halves(t.k, t.turned);
      multiply(t.k, 0, round_up(n), t.turned, CHUNK, K, w.kk, CHUNK, false);
    }
    transpose_halves(t.q, t.turned);
    multiply(t.k, 0, round_up(n), t.turned, CHUNK, K, w.kq, CHUNK, false);
    return;
  }
  transpose(w.rows, w.kp, w.qt, CHUNK, CHUNK, w.kp);
  transpose(w.k, w.kp, w.kt, CHUNK, CHUNK, w.kp);
  if (s.delta) matmul_columns(n, CHUNK, K, w.kt, CHUNK, w.kt, CHUNK, w.kk, CHUNK, false);
  matmul_columns(n, CHUNK, K, w.kt, CHUNK, w.qt, CHUNK, w.kq, CHUNK, false);
}

// x of tokens [t, n), up to LANES of them, which are `stride` apart.
template <class T>
vf of_tokens(const T* x, int64_t stride, int64_t t, int64_t n) {
  alignas(64) float values[LANES] = {};
  for (int64_t i = 0; i < LANES && t + i < n; ++i) values[i] = to_float(x[(t + i) * stride]);
  return load(values);
}

// na[j][i] = -A_ij and p[j][i] = (q_i . k_j) e^(c_i - c_j), both zero for i < j (na also for i = j).
void decay_products(int64_t n, const float* c, const float* beta, bool delta, Scratch& w) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < CHUNK; i += LANES) {
      const int64_t at = j * CHUNK + i;
      const vi behind = lane + int32_t(i - j);
      if (i + LANES <= j) {
        store(w.na + at, (vf){});
        store(w.p + at, (vf){});
        continue;
      }
      const vf decay = exp(load(c + i) - c[j]);
      store(w.p + at, behind >= 0 ? load(w.kq + at) * decay : (vf){});
      if (!delta) continue;
      const vf product = -load(beta + i) * load(w.kk + at) * decay;
      store(w.na + at, behind > 0 ? product : (vf){});
    }
  }
}

// u = K S0^T where k is wanted, and o = Q S0^T. With tiles, `tiles->k` and `tiles->q` are the halves of K and Q.
void read_state(int64_t n, int64_t K, bool wants_k, const float* state, Scratch& w) {
  if (w.tiles) {
    Tiles& t = *w.tiles;
    split_right(state, w.vp, 0, w.vp, 0, K, t.state);
    if (wants_k) multiply(t.k, 0, round_up(n), t.state, w.vp, K, w.u, w.vp, false);
    return multiply(t.q, 0, round_up(n), t.state, w.vp, K, w.o, w.vp, false);
  }
  if (wants_k) matmul_columns(n, w.vp, K, w.kt, CHUNK, state, w.vp, w.u, w.vp, false);
  matmul_columns(n, w.vp, K, w.qt, CHUNK, state, w.vp, w.o, w.vp, false);
}

// state += k^T V', with the K values of a row of k every kp. With tiles, `turn_keys` has run for k.
void write_state(int64_t n, int64_t K, const float* k, float* state, Scratch& w) {
  if (w.tiles) return multiply(w.tiles->rows, 0, K, w.tiles->u, w.vp, n, state, w.vp, true);
  matmul_columns(K, w.vp, n, k, w.kp, w.u, w.vp, state, w.vp, true);
}

// u = V' in place of beta (V - e^c K S0^T), and its halves. The rows of u behind n are zero.
void substitute(int64_t n, bool delta, Scratch& w) {
  std::fill(w.u + n * w.vp, w.u + CHUNK * w.vp, 0.0f);
  if (!delta) {
    if (w.tiles) split_right(w.u, w.vp, 0, w.vp, 0, round_up(n, TILE_DEPTH), w.tiles->u);
    return;
  }
  if (w.tiles) w.tiles->na.split(w.na, n);
  for (int64_t i0 = 0; i0 < n; i0 += STEP) {
    const int64_t i1 = std::min(n, i0 + STEP);
    float* own = w.u + i0 * w.vp;
    if (i0 && w.tiles) {
      multiply(w.tiles->na.rows, i0, STEP, w.tiles->u, w.vp, i0, own, w.vp, true);
    } else if (i0) {
      matmul_columns(i1 - i0, w.vp, i0, w.na + i0, CHUNK, w.u, w.vp, own, w.vp, true);
    }
    for (int64_t i = i0 + 1; i < i1; ++i) {
      for (int64_t v = 0; v < w.vp; v += LANES) {
        vf acc = load(w.u + i * w.vp + v);
        for (int64_t j = i0; j < i; ++j) acc += w.na[j * CHUNK + i] * load(w.u + j * w.vp + v);
        store(w.u + i * w.vp + v, acc);
      }
    }
    // Whole tiles are multiplied: what zeros meet has to be this head's too, since NaN times zero is NaN.
    if (w.tiles) split_right(w.u, w.vp, 0, w.vp, i0, round_up(i1, TILE_DEPTH), w.tiles->u);
  }
}

// out = o + p V' + D V.
template <class T>
void answer(const Recurrence& s, const RecurrenceInput<T>& in, int64_t head, int64_t t0, int64_t n, Scratch& w) {
  const int64_t V = s.value_dim;
  const T* values = in.mixed + t0 * in.mixed_stride + 2 * s.num_k_heads * s.key_dim + head * V;
  if (w.tiles) w.tiles->p.split(w.p, n);
  const int64_t step = w.tiles ? TILE_DEPTH : STEP;
  for (int64_t t = 0; t < n; t += step) {
    const int64_t end = std::min(n, t + step);
    if (w.tiles) {
      multiply(w.tiles->p.rows, t, round_up(end - t), w.tiles->u, w.vp, end, w.o + t * w.vp, w.vp, true);
    } else {
      matmul_columns(end - t, w.vp, end, w.p + t, CHUNK, w.u, w.vp, w.o + t * w.vp, w.vp, true);
    }
  }
  for (int64_t t = 0; t < n; ++t) {
    T* out = in.out + ((t0 + t) * s.num_v_heads + head) * V;
    for (int64_t v = 0; v < V; v += LANES) {
      vf total = load(w.o + t * w.vp + v);
      if (s.D) total += s.D[head] * load_n(values + t * in.mixed_stride + v, V - v);
      store_n(out + v, total, V - v);
    }
  }
}

// One chunk of one value head: writes out rows and moves `state` on. load_keys has run for its key head.
template <class T>
void chunk(const Recurrence& s, const RecurrenceInput<T>& in, int64_t head, int64_t t0, int64_t n, Scratch& w, float* state) {
  const int64_t V = s.value_dim;
  const T* values = in.mixed + t0 * in.mixed_stride + 2 * s.num_k_heads * s.key_dim + head * V;
  alignas(64) float c[CHUNK] = {}, beta[CHUNK] = {}, growth[CHUNK];
  for (int64_t t = 0; t < n; t += LANES) {
    const vf a = of_tokens(in.a + t0 * in.a_stride + head, in.a_stride, t, n);
    const Gates own = gates(s, head, a, s.delta ? of_tokens(in.b + t0 * in.b_stride + head, in.b_stride, t, n) : (vf){});
    store(c + t, own.g);
    store(beta + t, own.beta);
  }
  for (int64_t t = 1; t < n; ++t) c[t] += c[t - 1];
  std::fill(c + n, c + CHUNK, 0.0f);
  std::fill(beta + n, beta + CHUNK, 0.0f);
  for (int64_t i = 0; i < CHUNK; i += LANES) store(growth + i, exp(load(c + i)));
  decay_products(n, c, beta, s.delta, w);
  read_state(n, s.key_dim, s.delta, state, w);
  for (int64_t t = 0; t < n; ++t) {
    const T* value = values + t * in.mixed_stride;
    for (int64_t v = 0; v < w.vp; v += LANES) {
      const int64_t at = t * w.vp + v;
      const vf own = load_n(value + v, V - v);
      store(w.u + at, (s.delta ? own - growth[t] * load(w.u + at) : own) * beta[t]);
      store(w.o + at, load(w.o + at) * growth[t]);
    }
  }
  substitute(n, s.delta, w);
  answer(s, in, head, t0, n, w);
  // V' takes the decay up to the chunk's end, so that the heads of a key head share its keys.
  for (int64_t t = 0; t < n; ++t) {
    const vf left = exp(splat(c[n - 1] - c[t]));
    for (int64_t v = 0; v < w.vp; v += LANES) store(w.u + t * w.vp + v, load(w.u + t * w.vp + v) * left);
  }
  if (w.tiles) split_right(w.u, w.vp, 0, w.vp, 0, round_up(n, TILE_DEPTH), w.tiles->u);
  const float kept = growth[n - 1];
  for (int64_t i = 0; i < w.kp * w.vp; i += LANES) store(state + i, load(state + i) * kept);
  write_state(n, s.key_dim, w.k, state, w);
}

// near[t] = x[t] * e^(sign (c[t] - at)) for rows [first, last), where `at` is null for zero.
void decayed(const float* x, const float* at, float sign, int64_t first, int64_t last, Scratch& w) {
  for (int64_t t = first; t < last; ++t) {
    for (int64_t k = 0; k < w.kp; k += LANES) {
      const vf steps = load(w.c + t * w.kp + k) - (at ? load(at + k) : (vf){});
      store(w.near + (t - first) * w.kp + k, load(x + t * w.kp + k) * exp(steps * sign));
    }
  }
}

// As decay_products, where each key has its own decay. Blocks of rows take it from their first row on, so that no
// exponent is positive; within a block on the diagonal every pair has its own.
void key_products(int64_t n, int64_t K, const float* beta, Scratch& w) {
  std::fill(w.na.memory.get(), w.na + CHUNK * CHUNK, 0.0f);
  std::fill(w.p.memory.get(), w.p + CHUNK * CHUNK, 0.0f);
  for (int64_t i0 = 0; i0 < n; i0 += STEP) {
    const float* first = w.c + i0 * w.kp;
    if (i0) {
      decayed(w.k, first, -1.0f, 0, i0, w);
      transpose(w.near, w.kp, w.kt, CHUNK, i0, w.kp);
      decayed(w.rows, first, 1.0f, i0, i0 + STEP, w);
      transpose(w.near, w.kp, w.qt, CHUNK, STEP, w.kp);
      matmul_columns(i0, STEP, K, w.kt, CHUNK, w.qt, CHUNK, w.p + i0, CHUNK, false);
      decayed(w.k, first, 1.0f, i0, i0 + STEP, w);
      transpose(w.near, w.kp, w.qt, CHUNK, STEP, w.kp);
      matmul_columns(i0, STEP, K, w.kt, CHUNK, w.qt, CHUNK, w.na + i0, CHUNK, false);
    }
    for (int64_t j = i0; j < i0 + STEP; ++j) {
      for (int64_t i = j; i < i0 + STEP; ++i) {
        vf of_q = {}, of_k = {};
        for (int64_t k = 0; k < w.kp; k += LANES) {
          const vf key = load(w.k + j * w.kp + k) * exp(load(w.c + i * w.kp + k) - load(w.c + j * w.kp + k));
          of_q += key * load(w.rows + i * w.kp + k);
          of_k += key * load(w.k + i * w.kp + k);
        }
        w.p[j * CHUNK + i] = sum(of_q);
        if (i > j) w.na[j * CHUNK + i] = sum(of_k);
      }
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < CHUNK; i += LANES) store(w.na + j * CHUNK + i, load(w.na + j * CHUNK + i) * -load(beta + i));
  }
}

// As chunk, where each key has its own decay.
template <class T>
void key_chunk(const Recurrence& s, const RecurrenceInput<T>& in, int64_t head, int64_t t0, int64_t n, Scratch& w, float* state) {
  const int64_t K = s.key_dim, V = s.value_dim;
  const T* values = in.mixed + t0 * in.mixed_stride + 2 * s.num_k_heads * K + head * V;
  alignas(64) float beta[CHUNK] = {};
  for (int64_t t = 0; t < n; t += LANES) {
    store(beta + t, beta_of(s, of_tokens(in.b + t0 * in.b_stride + head, in.b_stride, t, n)));
  }
  std::fill(beta + n, beta + CHUNK, 0.0f);
  for (int64_t t = 0; t < CHUNK; ++t) {
    float* c = w.c + t * w.kp;
    if (t < n) {
      key_decays(s, in, t0 + t, head, c);
    } else {
      std::fill(c, c + w.kp, 0.0f);
    }
    for (int64_t k = 0; t && k < w.kp; k += LANES) store(c + k, load(c + k) + load(c - w.kp + k));
  }
  key_products(n, K, beta, w);
  const auto keep = [&](const float* x, Buffer<float>& columns, Halves* left) {
    decayed(x, nullptr, 1.0f, 0, CHUNK, w);
    if (left) return split_rows(w.near, w.kp, CHUNK, *left);
    transpose(w.near, w.kp, columns, CHUNK, CHUNK, w.kp);
  };
  keep(w.k, w.kt, w.tiles ? &w.tiles->k : nullptr);
  keep(w.rows, w.qt, w.tiles ? &w.tiles->q : nullptr);
  read_state(n, K, true, state, w);
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t v = 0; v < w.vp; v += LANES) {
      const vf own = load_n(values + t * in.mixed_stride + v, V - v);
      store(w.u + t * w.vp + v, (own - load(w.u + t * w.vp + v)) * beta[t]);
    }
  }
  substitute(n, true, w);
  answer(s, in, head, t0, n, w);
  const float* last = w.c + (n - 1) * w.kp;
  decayed(w.k, last, -1.0f, 0, n, w);
  for (int64_t k = 0; k < K; ++k) {
    const vf kept = exp(splat(last[k]));
    for (int64_t v = 0; v < w.vp; v += LANES) store(state + k * w.vp + v, load(state + k * w.vp + v) * kept);
  }
  if (w.tiles) turn_keys(n, K, w.near, w);
  write_state(n, K, w.near, state, w);
}

// Value heads [first, last) of one segment, all of one key head.
template <class T, class S>
void run(const Recurrence& s, const RecurrenceInput<T>& in, const StatePool<S>& pool, const Segments& seg, int64_t n,
         int64_t first, int64_t last) {
  const int64_t begin = seg.cu_seqlens[n], length = seg.cu_seqlens[n + 1] - begin, count = last - first;
  const int64_t head_size = s.value_dim * s.key_dim, key_head = first / (s.num_v_heads / s.num_k_heads);
  Scratch w(s, std::is_same_v<T, bf16>);
  Buffer<float> states(count * w.kp * w.vp);
  const auto state_of = [&](int64_t h) { return states + (h - first) * w.kp * w.vp; };
  const auto slot = [&](int32_t index, int64_t h) {
    return index < 0 ? nullptr : pool.data + index * pool.stride + h * head_size;
  };
  for (int64_t h = first; h < last; ++h) load_state<S>(slot(seg.src[n], h), s, w, state_of(h));
  int64_t saved = seg.save_ptr[n];
  const auto save_at = [&](int64_t position) {
    for (; saved < seg.save_ptr[n + 1] && seg.save_pos[saved] == position; ++saved) {
      for (int64_t h = first; h < last; ++h) store_state<S>(slot(seg.save_dst[saved], h), s, w, state_of(h));
    }
  };
  for (int64_t t = 0; t < length; t += CHUNK) {
    const int64_t rows = std::min(CHUNK, length - t);
    load_keys(s, in, key_head, begin + t, rows, w);
    for (int64_t h = first; h < last; ++h) {
      (s.per_key ? key_chunk<T> : chunk<T>)(s, in, h, begin + t, rows, w, state_of(h));
      pass_through<S>(state_of(h), w.kp * w.vp);  // as if it were stored and resumed from here
    }
    save_at(t + rows);
  }
  for (int64_t h = first; h < last; ++h) store_state<S>(slot(seg.dst[n], h), s, w, state_of(h));
}

}  // namespace

template <class T, class S>
void recurrence_prefill(const Recurrence& s, const RecurrenceInput<T>& in, const StatePool<S>& pool, const Segments& seg) {
  const int64_t ratio = s.num_v_heads / s.num_k_heads, key_heads = seg.count * s.num_k_heads;
  // Value heads share the products of their key head, in as many parts as keep threads busy and states in L2.
  const int64_t state_bytes = ratio * s.key_dim * s.value_dim * int64_t(sizeof(float));
  const int64_t cached = ceil_div(state_bytes, MOST_STATE_BYTES);
  const int64_t busy = ceil_div(2 * num_threads(), std::max<int64_t>(1, key_heads));
  const int64_t parts = std::min(ratio, std::max(busy, cached));
  parallel_tasks(key_heads * parts, [&](int64_t task) {
    const int64_t part = task % parts, key_head = task / parts % s.num_k_heads, from = key_head * ratio;
    run(s, in, pool, seg, task / parts / s.num_k_heads, from + ratio * part / parts, from + ratio * (part + 1) / parts);
  });
}

template void recurrence_prefill(const Recurrence&, const RecurrenceInput<float>&, const StatePool<float>&, const Segments&);
template void recurrence_prefill(const Recurrence&, const RecurrenceInput<bf16>&, const StatePool<float>&, const Segments&);
template void recurrence_prefill(const Recurrence&, const RecurrenceInput<float>&, const StatePool<bf16>&, const Segments&);
template void recurrence_prefill(const Recurrence&, const RecurrenceInput<bf16>&, const StatePool<bf16>&, const Segments&);

}  // namespace forkpoint
