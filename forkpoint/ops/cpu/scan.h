// Selective scan: S = exp(s A) S + (s x) b^T, y = (S c + skip x) silu(z), s = softplus(dt + dt_bias), in fp32.
#pragma once

#include <cstdint>

#include "recurrence.h"
#include "vec.h"

namespace forkpoint {

template <class T>
struct ScanRows {
  const T* data;
  int64_t stride;
};

// A is [D, N].
struct ScanRates {
  const float *A, *dt_bias;
};

// x, dt, z rows are [D], b and c rows [N]; out is dense [T, D].
template <class T>
struct Scan {
  ScanRows<T> x, dt, b, c, z;
  T* out;
  int64_t dim, values;
  ScanRates rates;
  const float* skip;
};

// Slot s of the pool is [D, N] at data + s * stride.
template <class S>
struct ScanPool {
  S* data;
  int64_t stride, dim, values;
};

// What tokens leave for the fold, `length` of them in each line: x and dt [D], b [N] of a token. Row r's lines of x and
// dt are line[r].
template <class T>
struct ScanRecords {
  int64_t length;
  const int32_t* line;
  T *x, *dt, *b;
};

template <class T, class S>
void scan(const Scan<T>& in, const ScanPool<S>& pool, const Segments& segments);

// Rows with drafts: see VerifyIndex in ops/metadata.py.
template <class T, class S>
void scan_verify(const Scan<T>& in, const ScanPool<S>& pool, const ScanRecords<T>& records, const VerifyRows& rows);

template <class T, class S>
void scan_fold(const ScanRates& rates, const ScanPool<S>& pool, const ScanRecords<T>& records, const VerifyRows& rows);

}  // namespace forkpoint
