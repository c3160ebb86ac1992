// Scores are [key, lane] tiles, whose lanes are (token, head) pairs. A score is one chain of multiply-adds, so its bits
// do not depend on the tile.
#include "pools.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "tile.h"

namespace forkpoint {

namespace {

constexpr int64_t MAX_LANES = 128;
constexpr int64_t RANGE = 64;                  // blocks of index keys of one task
constexpr int64_t SCORES_AT_ONCE = int64_t(1) << 24;

// Tokens of one row, whose scores are [tokens, width] from `scores` on.
struct Tile {
  int64_t row, first, count, position;  // the first token and its position
  int64_t width;                        // pools that are complete for the last token
  float* scores;
};

template <class T>
void score(const PoolIndex<T>& a, const Tile& t, int64_t first_block, int64_t last_block) {
  const int64_t lanes = t.count * a.heads, padded = round_up(lanes), dims = round_up(a.dim);
  const int64_t pieces = (a.dim + K_BLOCK - 1) / K_BLOCK;
  Buffer<float> rows(padded * dims), q(dims * padded), k(pieces * a.pools * ROW_STRIDE), found(a.pools * padded);
  std::fill(rows.memory.get(), rows + padded * dims, 0.0f);
  for (int64_t i = 0; i < lanes; ++i) {
    const T* from = a.q + (t.first * a.heads + i) * a.dim;
    for (int64_t d = 0; d < a.dim; d += LANES) store(rows + i * dims + d, load_n(from + d, a.dim - d));
  }
  transpose(rows, dims, q, padded, padded, dims);
  const float* weights = a.weights + t.first * a.heads;
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * a.pools, count = std::min(a.pools, t.width - first);
    const T* keys = a.cache + a.block_table[a.table_rows[t.row] * a.table_stride + block] * a.cache_stride;
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t d = 0; d < a.dim; d += LANES) {
        store(k + (d / K_BLOCK * a.pools + j) * ROW_STRIDE + d % K_BLOCK, load_n(keys + j * a.dim + d, a.dim - d));
      }
    }
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t d = piece * K_BLOCK;
      matmul_rows(count, padded, std::min(K_BLOCK, a.dim - d), k + piece * a.pools * ROW_STRIDE, q + d * padded, padded,
                  found, padded, piece > 0);
    }
    for (int64_t token = 0; token < t.count; ++token) {
      for (int64_t j = 0; j < count; ++j) {
        const float *own = found + j * padded + token * a.heads, *factors = weights + token * a.heads;
        float total = 0;
        for (int64_t h = 0; h < a.heads; ++h) total += factors[h] * (own[h] > 0 ? own[h] : 0);
        t.scores[token * t.width + first + j] = std::isnan(total) ? std::numeric_limits<float>::infinity() : total;
      }
    }
  }
}

// The pools of the highest scores, ascending. Among equal scores the earlier pool goes first.
void choose(const float* scores, int64_t count, int64_t most, int32_t* chosen) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + most, order.end(), [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  std::copy(order.begin(), order.begin() + most, chosen);
  std::sort(chosen, chosen + most);
}

template <class T>
void run(const PoolIndex<T>& a, std::vector<Tile>& tiles) {
  int64_t total = 0;
  for (const Tile& t : tiles) total += t.count * t.width;
  Buffer<float> scores(total);
  struct Part {
    const Tile* tile;
    int64_t first, last;
  };
  std::vector<Part> parts, tokens;
  float* next = scores;
  for (Tile& t : tiles) {
    t.scores = next;
    next += t.count * t.width;
    const int64_t blocks = (t.width + a.pools - 1) / a.pools;
    for (int64_t b = 0; b < blocks; b += RANGE) parts.push_back({&t, b, std::min(b + RANGE, blocks)});
    for (int64_t i = 0; i < t.count; ++i) tokens.push_back({&t, i, 0});
  }
  parallel_tasks(int64_t(parts.size()), [&](int64_t i) {
    const Part& p = parts[size_t(i)];
    score(a, *p.tile, p.first, p.last);
  });
  parallel_tasks(int64_t(tokens.size()), [&](int64_t i) {
    const auto& [tile, token, unused] = tokens[size_t(i)];
    const int64_t complete = (tile->position + token + 1) / a.size;
    choose(tile->scores + token * tile->width, complete, a.most, a.chosen + (tile->first + token) * a.most);
  });
  tiles.clear();
}

}  // namespace

template <class T>
void choose_pools(const PoolIndex<T>& a) {
  const int64_t most_tokens = std::max<int64_t>(1, MAX_LANES / a.heads);
  std::vector<Tile> tiles;
  int64_t num_scores = 0;
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const int64_t first = a.cu_queries[row], length = a.cu_queries[row + 1] - first, start = a.kv_lens[row] - length;
    int64_t token = 0;
    for (; token < length && (start + token + 1) / a.size <= a.most; ++token) {  // all complete pools are chosen
      int32_t* own = a.chosen + (first + token) * a.most;
      const int64_t complete = (start + token + 1) / a.size;
      for (int64_t i = 0; i < a.most; ++i) own[i] = i < complete ? int32_t(i) : -1;
    }
    for (; token < length; token += most_tokens) {
      const int64_t count = std::min(most_tokens, length - token), width = (start + token + count) / a.size;
      tiles.push_back({row, first + token, count, start + token, width, nullptr});
      num_scores += count * width;
      if (num_scores >= SCORES_AT_ONCE) {
        run(a, tiles);
        num_scores = 0;
      }
    }
  }
  run(a, tiles);
}

template void choose_pools(const PoolIndex<float>&);
template void choose_pools(const PoolIndex<bf16>&);

}  // namespace forkpoint
