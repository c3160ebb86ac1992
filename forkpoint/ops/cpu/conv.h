// Causal depthwise convolution with slots: y_t = act(bias + sum_j w_j x_{t-W+1+j}), sums in fp32.
#pragma once

#include <cstdint>

#include "recurrence.h"
#include "vec.h"

namespace forkpoint {

constexpr int MAX_TAPS = 16;

// Slot s of the pool is [W-1, D] at pool + s * pool_stride, oldest first. `taps` is the weight as [W, D] fp32.
template <class T>
struct Conv {
  const T* x;
  int64_t x_stride;
  T* out;  // dense [T, D]
  int64_t dim, width;
  const float *taps, *bias;  // bias may be null
  T* pool;
  int64_t pool_stride;
  bool silu;
};

template <class T>
void conv_prefill(const Conv<T>& c, const Segments& segments);

template <class T>
void conv_update(const Conv<T>& c, int64_t rows, const int32_t* src, const int32_t* dst);

// Raw inputs that tokens leave for the fold, `length` of them in each line.
template <class T>
struct InputRecords {
  T* data;
  int64_t length;
};

template <class T>
void conv_verify(const Conv<T>& c, const InputRecords<T>& records, const VerifyRows& rows);

// What conv_verify does before the tokens.
template <class T>
void conv_fold(const Conv<T>& c, const InputRecords<T>& records, const VerifyRows& rows);

}  // namespace forkpoint
