// Online softmax over blocks of keys in absolute order (Milakov and Gimelshein, 2018). The query rows of a tile,
// (token, head) pairs that share a key head, are the lanes: scores lie [key, lane], so that maxima and sums run
// down columns, and both products are register tiles. A key that a lane may not see adds an exact zero, so a
// lane's bits do not depend on the tile that it falls into.
#include "attention.h"

#include <type_traits>
#include <vector>

#include "parallel.h"
#include "tile.h"

namespace forkpoint {

namespace {

constexpr int64_t MAX_LANES = 128;
constexpr int64_t SPLIT_KEYS = 512;  // decode: keys of one task, cut at absolute positions
constexpr int64_t FEW_LANES = 8;     // decode: up to here dot products beat a tile of 16 lanes
constexpr float NEVER = -1e30f;      // a finite stand-in for -inf, so that differences stay numbers

struct Task {
  int64_t row, head, first_token, num_tokens, first_block, last_block;
  float* partial;       // [lanes, Dv + 2] with maximum and sum, or null: divide and store
  bool chosen = false;  // one token attends to chosen keys, and blocks count those
};

struct Scratch {
  int64_t dp, vp, pieces;
  Buffer<float> k, v, q, scores, o, rows, m, l, alpha;
  Buffer<int32_t> position;
  Scratch(int64_t D, int64_t Dv, int64_t block)
      : dp(round_up(D)), vp(round_up(Dv)), pieces((D + K_BLOCK - 1) / K_BLOCK),
        k(pieces * block * ROW_STRIDE), v(block * vp), q(dp * MAX_LANES), scores(block * MAX_LANES),
        o(MAX_LANES * vp), rows(MAX_LANES * dp), m(MAX_LANES), l(MAX_LANES), alpha(MAX_LANES), position(MAX_LANES) {}
};

template <class C>
constexpr bool SCALED = std::is_same_v<C, fp8>;

// Of the keys of a block and head: what they are kept divided by.
template <class T, class C>
const float* factors(const Attention<T, C>& a, const float* scales, int64_t block, int64_t head) {
  return SCALED<C> ? scales + block * a.scale_stride + head * a.block_size : nullptr;
}

template <class T, class C>
int64_t group_of(const Attention<T, C>& a) {
  return a.num_heads / a.num_kv_heads;
}

// Lane i is token i / group, head i % group of the tile. Lanes behind the last see nothing.
template <class T, class C>
void load_queries(const Attention<T, C>& a, const Task& t, int64_t lanes, Scratch& w) {
  const int64_t group = group_of(a), padded = round_up(lanes);
  const int64_t length = a.cu_queries[t.row + 1] - a.cu_queries[t.row];
  std::fill(w.rows.memory.get(), w.rows + padded * w.dp, 0.0f);
  for (int64_t i = 0; i < padded; ++i) {
    w.position[i] = i < lanes ? int32_t(a.kv_lens[t.row] - length + t.first_token + i / group) : -1;
    w.m[i] = NEVER;
    w.l[i] = 0;
    if (i >= lanes) continue;
    const int64_t token = a.cu_queries[t.row] + t.first_token + i / group;
    const T* q = a.q + token * a.q_stride + (t.head * group + i % group) * a.key_dim;
    for (int64_t d = 0; d < a.key_dim; d += LANES) {
      store(w.rows + i * w.dp + d, load_n(q + d, a.key_dim - d) * a.scale);
    }
  }
  transpose(w.rows, w.dp, w.q, padded, padded, w.dp);
  std::fill(w.o.memory.get(), w.o + lanes * w.vp, 0.0f);
}

// Row j of K (cut into K_BLOCK pieces) and of V as fp32, from place `at` of a block.
template <class T, class C>
void load_key(const Attention<T, C>& a, const Task& t, int64_t block, int64_t at, int64_t j, Scratch& w) {
  const int64_t id = a.block_table[a.table_rows[t.row] * a.table_stride + block];
  const C* k = a.k_cache + id * a.k_stride + (t.head * a.block_size + at) * a.key_dim;
  const C* v = a.v_cache + id * a.v_stride + (t.head * a.block_size + at) * a.v_row;
  vf of_key = {}, of_value = {};
  if constexpr (SCALED<C>) {
    of_key = splat(factors(a, a.k_scales, id, t.head)[at]);
    of_value = splat(factors(a, a.v_scales, id, t.head)[at]);
  }
  for (int64_t d = 0; d < a.key_dim; d += LANES) {
    float* to = w.k + (d / K_BLOCK * a.block_size + j) * ROW_STRIDE + d % K_BLOCK;
    const vf key = load_n(k + d, a.key_dim - d);
    store(to, SCALED<C> ? key * of_key : key);
  }
  for (int64_t d = 0; d < a.value_dim; d += LANES) {
    const vf value = load_n(v + d, a.value_dim - d);
    store(w.v + j * w.vp + d, SCALED<C> ? value * of_value : value);
  }
}

// Scores [key, lane] of the loaded keys.
template <class T, class C>
void multiply_keys(const Attention<T, C>& a, int64_t keys, int64_t padded, Scratch& w) {
  for (int64_t piece = 0; piece < w.pieces; ++piece) {
    const int64_t d = piece * K_BLOCK;
    matmul_rows(keys, padded, std::min(K_BLOCK, a.key_dim - d), w.k + piece * a.block_size * ROW_STRIDE,
                w.q + d * padded, padded, w.scores, padded, piece > 0);
  }
}

// Scores [key, lane] become probabilities against the new running maximum; m, l and alpha follow.
template <class T, class C>
void softmax(const Attention<T, C>& a, int64_t first_key, int64_t keys, bool masked, int64_t padded, Scratch& w) {
  for (int64_t i = 0; i < padded; i += LANES) {
    vi position;
    __builtin_memcpy(&position, w.position + i, sizeof position);
    const vi out = (vi){} + int32_t(a.first_key) - 1;
    const vi windowed = a.window ? position - int32_t(a.window) : out;
    const vi oldest = windowed > out ? windowed : out;
    const vf before = load(w.m + i);
    vf top = before;
    for (int64_t j = 0; j < keys; ++j) {
      vf s = load(w.scores + j * padded + i);
      if (masked) {
        const vi key = (vi){} + int32_t(first_key + j);
        s = (key <= position) & (key > oldest) ? s : splat(2 * NEVER);
        store(w.scores + j * padded + i, s);
      }
      top = s > top ? s : top;
    }
    vf total = {};
    for (int64_t j = 0; j < keys; ++j) {
      const vf p = exp(load(w.scores + j * padded + i) - top);
      store(w.scores + j * padded + i, p);
      total += p;
    }
    const vf alpha = exp(before - top);
    store(w.alpha + i, alpha);
    store(w.l + i, load(w.l + i) * alpha + total);
    store(w.m + i, top);
  }
}

// The sums so far, against the new maximum.
void rescale(int64_t lanes, Scratch& w) {
  for (int64_t i = 0; i < lanes; ++i) {
    if (w.alpha[i] == 1.0f) continue;
    for (int64_t d = 0; d < w.vp; d += LANES) store(w.o + i * w.vp + d, load(w.o + i * w.vp + d) * w.alpha[i]);
  }
}

// A decode row's scores and values straight from the block, G lanes at a time.
template <int G, class T, class C>
void few_scores(const Attention<T, C>& a, const C* k, const float* factor, int64_t keys, Scratch& w) {
  for (int64_t j = 0; j < keys; ++j, k += a.key_dim) {
    vf acc[G] = {};
    for (int64_t d = 0; d < a.key_dim; d += LANES) {
      const vf key = load_n(k + d, a.key_dim - d);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) acc[g] += key * load(w.rows + g * w.dp + d);
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) w.scores[j * LANES + g] = SCALED<C> ? sum(acc[g]) * factor[j] : sum(acc[g]);
  }
}

template <int G, class T, class C>
void few_values(const Attention<T, C>& a, const C* v, const float* factor, int64_t keys, Scratch& w) {
  for (int64_t j = 0; SCALED<C> && j < keys; ++j) {
    store(w.scores + j * LANES, load(w.scores + j * LANES) * factor[j]);
  }
  for (int64_t d = 0; d < a.value_dim; d += LANES) {
    vf acc[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) acc[g] = load(w.o + g * w.vp + d);
    for (int64_t j = 0; j < keys; ++j) {
      const vf value = load_n(v + j * a.v_row + d, a.value_dim - d);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) acc[g] += w.scores[j * LANES + g] * value;
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) store(w.o + g * w.vp + d, acc[g]);
  }
}

template <int G, class T, class C>
void few_lanes(const Attention<T, C>& a, const Task& t, int64_t lanes, int64_t block, int64_t keys, Scratch& w) {
  if (lanes != G) {
    if constexpr (G > 1) few_lanes<G - 1>(a, t, lanes, block, keys, w);
    return;
  }
  const int64_t id = a.block_table[a.table_rows[t.row] * a.table_stride + block];
  const C* k = a.k_cache + id * a.k_stride + t.head * a.block_size * a.key_dim;
  const C* v = a.v_cache + id * a.v_stride + t.head * a.block_size * a.v_row;
  few_scores<G>(a, k, factors(a, a.k_scales, id, t.head), keys, w);
  softmax(a, block * a.block_size, keys, true, LANES, w);
  rescale(lanes, w);
  few_values<G>(a, v, factors(a, a.v_scales, id, t.head), keys, w);
}

template <class T, class C>
void attend(const Attention<T, C>& a, const Task& t, Scratch& w) {
  const int64_t lanes = t.num_tokens * group_of(a), padded = round_up(lanes), length = a.kv_lens[t.row];
  load_queries(a, t, lanes, w);
  for (int64_t block = t.first_block; block < t.last_block; ++block) {
    const int64_t first_key = block * a.block_size, keys = std::min(a.block_size, length - first_key);
    if (t.row < a.num_decodes && lanes <= FEW_LANES) {
      few_lanes<FEW_LANES>(a, t, lanes, block, keys, w);
      continue;
    }
    for (int64_t j = 0; j < keys; ++j) load_key(a, t, block, j, j, w);
    multiply_keys(a, keys, padded, w);
    const bool behind = first_key < a.first_key || (a.window && first_key <= w.position[lanes - 1] - a.window);
    softmax(a, first_key, keys, behind || first_key + keys - 1 > w.position[0] || lanes < padded, padded, w);
    rescale(lanes, w);
    matmul_columns(lanes, w.vp, keys, w.scores, padded, w.v, w.vp, w.o, w.vp, true);
  }
}

// The number of pools that are complete for token `first_token + token` of a row.
template <class T, class C>
int64_t num_complete(const Attention<T, C>& a, int64_t row, int64_t token, const ChosenPools& c) {
  return (a.kv_lens[row] - (a.cu_queries[row + 1] - a.cu_queries[row]) + token + 1) / c.size;
}

template <class T, class C>
void attend_chosen(const Attention<T, C>& a, const ChosenPools& c, const Task& t, Scratch& w) {
  const int64_t lanes = group_of(a), padded = round_up(lanes), in_pools = c.most * c.size;
  load_queries(a, t, lanes, w);
  const int32_t* pools = c.pools + (a.cu_queries[t.row] + t.first_token) * c.most;
  const int64_t open = num_complete(a, t.row, t.first_token, c) * c.size, total = in_pools + w.position[0] + 1 - open;
  for (int64_t block = t.first_block; block < t.last_block; ++block) {
    const int64_t first = block * a.block_size, keys = std::min(a.block_size, total - first);
    int64_t num_hidden = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = first + j;
      const int64_t key = at < in_pools ? pools[at / c.size] * c.size + at % c.size : open + at - in_pools;
      load_key(a, t, key / a.block_size, key % a.block_size, j, w);
      if (key < a.first_key) num_hidden = j + 1;  // keys ascend
    }
    multiply_keys(a, keys, padded, w);
    std::fill_n(w.scores.memory.get(), num_hidden * padded, 2 * NEVER);
    softmax(a, first, keys, false, padded, w);
    rescale(lanes, w);
    matmul_columns(lanes, w.vp, keys, w.scores, padded, w.v, w.vp, w.o, w.vp, true);
  }
}

template <class T, class C>
T* out_of(const Attention<T, C>& a, const Task& t, int64_t lane) {
  const int64_t group = group_of(a), token = a.cu_queries[t.row] + t.first_token + lane / group;
  return a.out + (token * a.num_heads + t.head * group + lane % group) * a.value_dim;
}

template <class T, class C>
void finish(const Attention<T, C>& a, const Task& t, Scratch& w) {
  for (int64_t i = 0; i < t.num_tokens * group_of(a); ++i) {
    if (t.partial) {
      float* p = t.partial + i * (a.value_dim + 2);
      std::copy(w.o + i * w.vp, w.o + i * w.vp + a.value_dim, p);
      p[a.value_dim] = w.m[i];
      p[a.value_dim + 1] = w.l[i];
      continue;
    }
    T* out = out_of(a, t, i);
    for (int64_t d = 0; d < a.value_dim; d += LANES) {
      store_n(out + d, load(w.o + i * w.vp + d) / w.l[i], a.value_dim - d);
    }
  }
}

// The splits of one decode row and key head, in order of their keys.
template <class T, class C>
void combine(const Attention<T, C>& a, const Task* splits, int64_t count) {
  const int64_t group = group_of(a), width = a.value_dim + 2;
  std::vector<float> o(size_t(round_up(a.value_dim)));
  for (int64_t lane = 0; lane < group; ++lane) {
    float top = NEVER, total = 0;
    for (int64_t s = 0; s < count; ++s) top = std::max(top, splits[s].partial[lane * width + a.value_dim]);
    std::fill(o.begin(), o.end(), 0.0f);
    for (int64_t s = 0; s < count; ++s) {
      const float* p = splits[s].partial + lane * width;
      const float factor = std::exp(p[a.value_dim] - top);
      total += p[a.value_dim + 1] * factor;
      for (int64_t d = 0; d < a.value_dim; ++d) o[size_t(d)] += p[d] * factor;
    }
    T* out = out_of(a, splits[0], lane);
    for (int64_t d = 0; d < a.value_dim; d += LANES) {
      store_n(out + d, load(o.data() + d) / total, a.value_dim - d);
    }
  }
}

template <class T, class C>
int64_t split_blocks(const Attention<T, C>& a) {
  return std::max<int64_t>(1, SPLIT_KEYS / a.block_size);
}

// The first `length` tokens of a row: a decode row is cut at absolute multiples of SPLIT_KEYS, another row into tiles
// of queries, the last (the longest) first.
template <class T, class C>
void cut(const Attention<T, C>& a, int64_t row, int64_t head, int64_t length, std::vector<Task>& tasks) {
  const int64_t tile = std::max<int64_t>(1, MAX_LANES / group_of(a)), step = split_blocks(a);
  const int64_t start = a.kv_lens[row] - (a.cu_queries[row + 1] - a.cu_queries[row]);
  for (int64_t t = (length - 1) / tile * tile; length > 0 && t >= 0; t -= tile) {
    const int64_t count = std::min(tile, length - t), end = (start + t + count - 1) / a.block_size + 1;
    const int64_t oldest = a.window ? std::max<int64_t>(0, start + t - a.window + 1) : 0;
    const int64_t first = oldest / a.block_size;
    if (row >= a.num_decodes) {
      tasks.push_back({row, head, t, count, first, end, nullptr});
      continue;
    }
    for (int64_t b = first / step * step; b < end; b += step) {
      tasks.push_back({row, head, t, count, std::max(b, first), std::min(b + step, end), nullptr});
    }
  }
}

// The tokens of a row that do not see all keys, one by one. A decode row's chosen keys are cut at multiples of
// SPLIT_KEYS. Returns the number of tokens before them.
template <class T, class C>
int64_t cut_chosen(const Attention<T, C>& a, const ChosenPools& c, int64_t row, int64_t head, std::vector<Task>& tasks) {
  const int64_t length = a.cu_queries[row + 1] - a.cu_queries[row], start = a.kv_lens[row] - length;
  const int64_t first = std::clamp<int64_t>((c.most + 1) * c.size - 1 - start, 0, length);
  for (int64_t t = length - 1; t >= first; --t) {
    const int64_t keys = c.most * c.size + start + t + 1 - num_complete(a, row, t, c) * c.size;
    const int64_t blocks = (keys + a.block_size - 1) / a.block_size;
    const int64_t step = row < a.num_decodes ? split_blocks(a) : blocks;
    for (int64_t b = 0; b < blocks; b += step) {
      tasks.push_back({row, head, t, 1, b, std::min(b + step, blocks), nullptr, true});
    }
  }
  return first;
}

template <class T, class C>
void run(const Attention<T, C>& a, const ChosenPools& c, std::vector<Task> tasks) {
  std::vector<std::pair<int64_t, int64_t>> shared;  // [first, last) tasks of one row and head
  for (int64_t i = 0, j; i < int64_t(tasks.size()); i = j) {
    for (j = i + 1; j < int64_t(tasks.size()) && tasks[i].row < a.num_decodes && tasks[j].row == tasks[i].row &&
                    tasks[j].head == tasks[i].head;) {
      ++j;
    }
    if (j > i + 1) shared.emplace_back(i, j);
  }
  const int64_t size = group_of(a) * (a.value_dim + 2);
  int64_t parts = 0;
  for (const auto& [i, j] : shared) parts += j - i;
  Buffer<float> partials(parts * size);
  int64_t next = 0;
  for (const auto& [i, j] : shared) {
    for (int64_t s = i; s < j; ++s) tasks[size_t(s)].partial = partials + size * next++;
  }
  parallel_tasks(int64_t(tasks.size()), [&](int64_t i) {
    Scratch w(a.key_dim, a.value_dim, a.block_size);
    const Task& t = tasks[size_t(i)];
    if (t.chosen) {
      attend_chosen(a, c, t, w);
    } else {
      attend(a, t, w);
    }
    finish(a, t, w);
  });
  for (const auto& [i, j] : shared) combine(a, &tasks[size_t(i)], j - i);
}

}  // namespace

template <class T, class C>
void paged_attention(const Attention<T, C>& a) {
  std::vector<Task> tasks;
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const int64_t length = a.cu_queries[row + 1] - a.cu_queries[row];
    for (int64_t head = 0; head < a.num_kv_heads; ++head) cut(a, row, head, length, tasks);
  }
  run(a, {}, std::move(tasks));
}

template <class T, class C>
void pool_attention(const Attention<T, C>& a, const ChosenPools& c) {
  std::vector<Task> tasks;
  for (int64_t row = 0; row < a.num_rows; ++row) {
    for (int64_t head = 0; head < a.num_kv_heads; ++head) {
      const int64_t length = cut_chosen(a, c, row, head, tasks);
      cut(a, row, head, length, tasks);
    }
  }
  run(a, c, std::move(tasks));
}

template void pool_attention(const Attention<float, float>&, const ChosenPools&);
template void pool_attention(const Attention<bf16, bf16>&, const ChosenPools&);
template void pool_attention(const Attention<float, fp8>&, const ChosenPools&);
template void pool_attention(const Attention<bf16, fp8>&, const ChosenPools&);
template void paged_attention(const Attention<float, float>&);
template void paged_attention(const Attention<bf16, bf16>&);
template void paged_attention(const Attention<float, fp8>&);
template void paged_attention(const Attention<bf16, fp8>&);

}  // namespace forkpoint
