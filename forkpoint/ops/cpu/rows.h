// Row-local operators: norms, gates, rotation, and stores into caches. Arithmetic in fp32, one rounding at the end.
#pragma once

#include <cstdint>

#include "fp8.h"

namespace forkpoint {

// `count` rows of `size` dense elements: row r is at (r / inner) * outer_stride + (r % inner) * inner_stride.
template <class T>
struct Rows {
  T* data;
  int64_t inner, outer_stride, inner_stride;

  T* row(int64_t r) const { return data + r / inner * outer_stride + r % inner * inner_stride; }
};

template <class T>
void rmsnorm(Rows<const T> x, const float* weight, float eps, T* out, int64_t count, int64_t size);

// total = residual + x, rounded to T; out = rmsnorm(total). `total` may be the residual itself.
template <class T>
void add_rmsnorm(Rows<const T> x, Rows<const T> residual, const float* weight, float eps, T* total, T* out,
                 int64_t count, int64_t size);

// How a norm is gated, and from one row's weights to the next head's (0: all heads share them).
struct GatedNorm {
  bool gate_first, sigmoid;
  int64_t heads, weight_stride;
};

template <class T>
void gated_rmsnorm(Rows<const T> x, Rows<const T> gate, const float* weight, float eps, const GatedNorm& form, T* out,
                   int64_t count, int64_t size);

// The residuals of one token: `count` finished ones, and a current one or none.
template <class T>
struct Residuals {
  const T* done;
  int64_t count, source_stride, token_stride;
  const T* current;  // may be null
  int64_t current_stride;
};

// out = sum_i p_i r_i, with p the softmax over the residuals r_i of rmsnorm(r_i) . weight.
template <class T>
void mix_residuals(const Residuals<T>& residuals, const float* weight, float eps, T* out, int64_t tokens, int64_t size);

// silu(gate) * up, or x * sigmoid(gate).
template <class T>
void silu_mul(Rows<const T> gate, Rows<const T> up, T* out, int64_t count, int64_t size);
template <class T>
void sigmoid_mul(Rows<const T> x, Rows<const T> gate, T* out, int64_t count, int64_t size);

// Rotates the first `rotated` of each head's `dim` values in place; cos_sin rows are [cos | sin].
template <class T>
void rope(T* x, int64_t token_stride, int64_t heads, int64_t dim, const float* cos_sin, int64_t rotated,
          const int64_t* positions, int64_t tokens);

// x[T, heads, dim] -> cache[P, heads, block_size, dim] at the tokens' places; -1 is skipped.
template <class T>
void cache_write(const T* x, int64_t token_stride, int64_t heads, int64_t dim, T* cache, int64_t block_stride,
                 int64_t block_size, const int64_t* places, int64_t tokens);

// The same in 8 bits, each head divided by a scale that makes its largest magnitude FP8_MAX.
template <class T>
void cache_write(const T* x, int64_t token_stride, int64_t heads, int64_t dim, fp8* cache, int64_t block_stride,
                 float* scales, int64_t scale_stride, int64_t block_size, const int64_t* places, int64_t tokens);

struct Pool {
  char* data;
  int64_t stride, bytes;  // of one slot
};

// Per pool: slot dst[i] = slot src[i], or zeros.
void state_copy(const Pool* pools, int64_t num_pools, const int32_t* src, const int32_t* dst, int64_t count);

}  // namespace forkpoint
