// The choice of pools of keys by their index keys.
#pragma once

#include <cstdint>

#include "vec.h"

namespace forkpoint {

// q [T, heads, dim] and weights [T, heads] are dense. A block has `pools` index keys of `dim`, dense, and blocks are
// `cache_stride` apart. Pools have `size` tokens. chosen is [T, most], dense.
template <class T>
struct PoolIndex {
  const T* q;
  const float* weights;
  int64_t heads, dim;
  const T* cache;
  int64_t cache_stride, pools, size, most;
  int64_t num_rows;
  const int32_t *cu_queries, *kv_lens, *block_table, *table_rows;
  int64_t table_stride;
  int32_t* chosen;
};

template <class T>
void choose_pools(const PoolIndex<T>& a);

}  // namespace forkpoint
