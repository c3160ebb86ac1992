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

// x, dt, z rows are [D], b and c rows [N]; out is dense [T, D]. A is [D, N].
template <class T>
struct Scan {
  ScanRows<T> x, dt, b, c, z;
  T* out;
  int64_t dim, values;
  const float *A, *dt_bias, *skip;
};

// Slot s of the pool is [D, N] at data + s * stride.
template <class S>
struct ScanPool {
  S* data;
  int64_t stride, dim, values;
};

// What tokens leave for the fold, `length` of them in each line: updates s x and steps s [D], keys b [N] of a token.
struct ScanRecords {
  int64_t length;
  float *updates, *steps, *keys;
};

template <class T, class S>
void scan(const Scan<T>& in, const ScanPool<S>& pool, const Segments& segments);

// Rows with drafts: see VerifyIndex in ops/metadata.py.
template <class T, class S>
void scan_verify(const Scan<T>& in, const ScanPool<S>& pool, const ScanRecords& records, const VerifyRows& rows);

template <class S>
void scan_fold(const float* A, const ScanPool<S>& pool, const ScanRecords& records, const VerifyRows& rows);

}  // namespace forkpoint
