// Causal attention over paged keys and values, read where they lie.
#pragma once

#include <cstdint>

#include "vec.h"

namespace forkpoint {

// q rows of `q_stride` per token and D per head; out dense [T, Hq, Dv]. A block is [Hkv, block_size, D], dense.
template <class T>
struct Attention {
  const T* q;
  int64_t q_stride;
  T* out;
  int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
  const T *k_cache, *v_cache;
  int64_t k_stride, v_stride;  // between blocks
  float scale;
  int64_t window;  // 0: none
  int64_t num_rows, num_decodes;
  const int32_t *cu_queries, *kv_lens, *block_table, *table_rows;
  int64_t table_stride;
};

template <class T>
void paged_attention(const Attention<T>& a);

}  // namespace forkpoint
