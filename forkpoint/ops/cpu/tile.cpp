#include "tile.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace forkpoint {

namespace {

// How A and C lie: A by rows of ROW_STRIDE, or transposed with stride `ska`; Packed: by rows, B and C 32 wide.
enum class Form { rows, columns, packed };

template <int R, int COLS, Form F>
void tile(const float* __restrict a, int64_t ska, const float* __restrict b, int64_t ldb_given,
          float* __restrict c, int64_t ldc_given, int64_t k, bool accumulate) {
  const int64_t ldb = F == Form::packed ? 2 * LANES : ldb_given;
  const int64_t ldc = F == Form::packed ? 2 * LANES : ldc_given;
  vf acc[R][COLS];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < COLS; ++j) acc[r][j] = accumulate ? load(c + r * ldc + j * LANES) : (vf){};
  }
  for (int64_t i = 0; i < k; ++i) {
    vf w[COLS];
#pragma GCC unroll 2
    for (int j = 0; j < COLS; ++j) w[j] = load(b + i * ldb + j * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf x = splat(F != Form::columns ? a[r * ROW_STRIDE + i] : a[i * ska + r]);
#pragma GCC unroll 2
      for (int j = 0; j < COLS; ++j) acc[r][j] += x * w[j];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < COLS; ++j) store(c + r * ldc + j * LANES, acc[r][j]);
  }
}

inline vu load_words(const uint32_t* p) {
  vu v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <int R>
void tile_bf16(const float* __restrict a, const uint32_t* __restrict panel, float* __restrict c, int64_t k) {
  vf acc[R][2] = {};
  for (int64_t k0 = 0; k0 < k; k0 += K_BLOCK, a += R * ROW_STRIDE) {
    const int64_t kc = k - k0 < K_BLOCK ? k - k0 : K_BLOCK;
    for (int64_t i = 0; i < kc; i += 2, panel += 2 * LANES) {
      __builtin_prefetch(panel + 512);
      __builtin_prefetch(panel + 512 + LANES);
      const vu left = load_words(panel), right = load_words(panel + LANES);
      const vf even[2] = {(vf)(left << 16), (vf)(right << 16)};
      const vf odd[2] = {(vf)(left & 0xffff0000u), (vf)(right & 0xffff0000u)};
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf x = splat(a[r * ROW_STRIDE + i]);
        acc[r][0] += x * even[0];
        acc[r][1] += x * even[1];
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf x = splat(a[r * ROW_STRIDE + i + 1]);
        acc[r][0] += x * odd[0];
        acc[r][1] += x * odd[1];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * 2 * LANES, acc[r][0]);
    store(c + r * 2 * LANES + LANES, acc[r][1]);
  }
}

// As matrix tiles add: of 32 neighbours in k, those at even places and those at odd ones are a chain each.
template <int R>
void tile_as_tiles(const float* __restrict a, const uint32_t* __restrict panel, float* __restrict c, int64_t k) {
  vf acc[R][2] = {};
  for (int64_t k0 = 0; k0 < k; k0 += 32) {
    vf even[R][2] = {}, odd[R][2] = {};
    const float* x = a + k0 / K_BLOCK * R * ROW_STRIDE + k0 % K_BLOCK;
    for (int64_t i = 0; i < 32; i += 2, panel += 2 * LANES) {
      __builtin_prefetch(panel + 512);
      __builtin_prefetch(panel + 512 + LANES);
      const vu left = load_words(panel), right = load_words(panel + LANES);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        const vf first = splat(x[r * ROW_STRIDE + i]), second = splat(x[r * ROW_STRIDE + i + 1]);
        even[r][0] += first * (vf)(left << 16);
        even[r][1] += first * (vf)(right << 16);
        odd[r][0] += second * (vf)(left & 0xffff0000u);
        odd[r][1] += second * (vf)(right & 0xffff0000u);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      acc[r][0] += even[r][0] + odd[r][0];
      acc[r][1] += even[r][1] + odd[r][1];
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    store(c + r * 2 * LANES, acc[r][0]);
    store(c + r * 2 * LANES + LANES, acc[r][1]);
  }
}

// acc + the products of the pairs of bf16 in a and b, lane by lane.
inline vf add_pairs(vf acc, vu a, vu b) {
#ifdef __AVX512BF16__
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  __builtin_trap();  // callers ask MULTIPLIES_PAIRS first
#endif
}

template <int R>
void tile_pairs(const float* __restrict a, const uint32_t* __restrict panel, float* __restrict c, int64_t k,
                bool accumulate) {
  vf acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0] = accumulate ? load(c + r * 2 * LANES) : (vf){};
    acc[r][1] = accumulate ? load(c + r * 2 * LANES + LANES) : (vf){};
  }
  for (int64_t k0 = 0; k0 < k; k0 += K_BLOCK, a += R * ROW_STRIDE) {
    const int64_t pairs = (k - k0 < K_BLOCK ? k - k0 : K_BLOCK) / 2;
    for (int64_t i = 0; i < pairs; ++i, panel += 2 * LANES) {
      __builtin_prefetch(panel + 512);
      __builtin_prefetch(panel + 512 + LANES);
      const vu left = load_words(panel), right = load_words(panel + LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        uint32_t pair;
        __builtin_memcpy(&pair, a + r * ROW_STRIDE + i, sizeof pair);
        const vu x = pair - (vu){};
        acc[r][0] = add_pairs(acc[r][0], x, left);
        acc[r][1] = add_pairs(acc[r][1], x, right);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * 2 * LANES, acc[r][0]);
    store(c + r * 2 * LANES + LANES, acc[r][1]);
  }
}

template <int R>
void tile_fp8(const float* __restrict a, const fp8* __restrict panel, const float* __restrict scales,
              float* __restrict c, int64_t k) {
  vf acc[R][2] = {};
  for (int64_t k0 = 0; k0 < k; k0 += K_BLOCK, a += R * ROW_STRIDE, scales += 2 * LANES) {
    const int64_t kc = k - k0 < K_BLOCK ? k - k0 : K_BLOCK;
    const vf left = load(scales) * FP8_SHIFT, right = load(scales + LANES) * FP8_SHIFT;
    for (int64_t i = 0; i < kc; ++i, panel += 2 * LANES) {
      __builtin_prefetch(panel + 2048);
      const vf w[2] = {load_shifted(panel) * left, load_shifted(panel + LANES) * right};
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf x = splat(a[r * ROW_STRIDE + i]);
        acc[r][0] += x * w[0];
        acc[r][1] += x * w[1];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * 2 * LANES, acc[r][0]);
    store(c + r * 2 * LANES + LANES, acc[r][1]);
  }
}

template <int R, int COLS, Form F>
void dispatch(int rows, const float* a, int64_t ska, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t k,
              bool accumulate) {
  if (rows == R) return tile<R, COLS, F>(a, ska, b, ldb, c, ldc, k, accumulate);
  if constexpr (R > 1) dispatch<R - 1, COLS, F>(rows, a, ska, b, ldb, c, ldc, k, accumulate);
}

template <int R>
void dispatch_bf16(int rows, const float* a, const uint32_t* panel, float* c, int64_t k) {
  if (rows == R) return tile_bf16<R>(a, panel, c, k);
  if constexpr (R > 1) dispatch_bf16<R - 1>(rows, a, panel, c, k);
}

template <int R>
void dispatch_pairs(int rows, const float* a, const uint32_t* panel, float* c, int64_t k, bool accumulate) {
  if (rows == R) return tile_pairs<R>(a, panel, c, k, accumulate);
  if constexpr (R > 1) dispatch_pairs<R - 1>(rows, a, panel, c, k, accumulate);
}

template <int R>
void dispatch_fp8(int rows, const float* a, const fp8* panel, const float* scales, float* c, int64_t k) {
  if (rows == R) return tile_fp8<R>(a, panel, scales, c, k);
  if constexpr (R > 1) dispatch_fp8<R - 1>(rows, a, panel, scales, c, k);
}

template <Form F>
void matmul(int64_t m, int64_t n, int64_t k, const float* a, int64_t ska, const float* b, int64_t ldb, float* c,
            int64_t ldc, bool accumulate) {
  const int64_t tiles = (m + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t j = 0; j < n; j += 2 * LANES) {
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t r0 = m * t / tiles;
      const int rows = int(m * (t + 1) / tiles - r0);
      const float* at = a + (F == Form::rows ? r0 * ROW_STRIDE : r0);
      float* ct = c + r0 * ldc + j;
      if (n - j >= 2 * LANES) {
        dispatch<MAX_ROWS, 2, F>(rows, at, ska, b + j, ldb, ct, ldc, k, accumulate);
      } else {
        dispatch<MAX_ROWS, 1, F>(rows, at, ska, b + j, ldb, ct, ldc, k, accumulate);
      }
    }
  }
}

}  // namespace

void tile_rows(int rows, const float* a, const float* b, float* c, int64_t k, bool accumulate) {
  dispatch<MAX_ROWS, 2, Form::packed>(rows, a, 0, b, 0, c, 0, k, accumulate);
}

void tile_rows_bf16(int rows, const float* a, const uint32_t* panel, float* c, int64_t k) {
  dispatch_bf16<FEW_ROWS>(rows, a, panel, c, k);
}

void tile_rows_as_tiles(int rows, const float* a, const uint32_t* panel, float* c, int64_t k) {
  return rows == 1 ? tile_as_tiles<1>(a, panel, c, k) : tile_as_tiles<2>(a, panel, c, k);
}

void tile_rows_pairs(int rows, const float* a, const uint32_t* panel, float* c, int64_t k, bool accumulate) {
  dispatch_pairs<MAX_ROWS>(rows, a, panel, c, k, accumulate);
}

void tile_rows_fp8(int rows, const float* a, const fp8* panel, const float* scales, float* c, int64_t k) {
  dispatch_fp8<FEW_ROWS>(rows, a, panel, scales, c, k);
}

void matmul_rows(int64_t m, int64_t n, int64_t k, const float* a, const float* b, int64_t ldb, float* c, int64_t ldc,
                 bool accumulate) {
  matmul<Form::rows>(m, n, k, a, 0, b, ldb, c, ldc, accumulate);
}

void matmul_columns(int64_t m, int64_t n, int64_t k, const float* a, int64_t ska, const float* b, int64_t ldb,
                    float* c, int64_t ldc, bool accumulate) {
  matmul<Form::columns>(m, n, k, a, ska, b, ldb, c, ldc, accumulate);
}

}  // namespace forkpoint
