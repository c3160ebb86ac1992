// Causal attention over paged keys and values, read where they lie.
#pragma once

#include <cstdint>

#include "fp8.h"

namespace forkpoint {

// q rows of `q_stride` per token and D per head; out dense [T, Hq, Dv]. A block is [Hkv, block_size, D], dense; with
// C = fp8 a block's scales are [Hkv, block_size].
template <class T, class C>
struct Attention {
  const T* q;
  int64_t q_stride;
  T* out;
  int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
  const C *k_cache, *v_cache;
  int64_t k_stride, v_stride;  // between blocks
  int64_t v_row;               // between values of a block
  const float *k_scales, *v_scales;
  int64_t scale_stride;
  float scale;
  int64_t window;     // 0: none
  int64_t first_key;  // of those that are seen
  int64_t num_rows, num_decodes;
  const int32_t *cu_queries, *kv_lens, *block_table, *table_rows;
  int64_t table_stride;
};

template <class T, class C>
void paged_attention(const Attention<T, C>& a);

// The pools [T, most] of `size` keys that each token chose, ascending, then -1.
struct ChosenPools {
  const int32_t* pools;
  int64_t most, size;
};

// The same for the keys of the chosen pools, and those after a token's last complete pool. There is no window.
template <class T, class C>
void pool_attention(const Attention<T, C>& a, const ChosenPools& c);

}  // namespace forkpoint
