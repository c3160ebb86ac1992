// Sixteen-lane vectors through GCC's vector extensions: one 512-bit register where the machine has it, two
// 256-bit ones elsewhere. The same source, and the same bits, on either width.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// Where tiles multiply, the processor's own rounding is used too: it takes denormal numbers for zero, as tiles do.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define FORKPOINT_ROUNDS_BF16
#endif

namespace forkpoint {

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; a NaN stays one (the quiet bit is set, so that truncation cannot make it infinite).
inline vh round_bf16(vf x) {
#ifdef FORKPOINT_ROUNDS_BF16
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#endif
  const vu u = (vu)x;
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vu nan = (u >> 16) | 0x40u;
  return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded, vh);
}

inline vf splat(float x) { return x - (vf){}; }

inline vf widen(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }

inline vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline vf load(const bf16* p) {
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  return widen(h);
}
inline void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vf v) {
  const vh h = round_bf16(v);
  __builtin_memcpy(p, &h, sizeof h);
}

// `count` values as they are after having been stored as S; a multiple of 16.
template <class S>
void pass_through(float* values, int64_t count) {
  if (std::is_same_v<S, float>) return;
  for (int64_t i = 0; i < count; i += LANES) {
    S stored[LANES];
    store(stored, load(values + i));
    store(values + i, load(stored));
  }
}

// The first n < 16 elements; the other lanes are zero and not stored.
template <class T>
inline vf load_part(const T* p, int64_t n) {
  T buffer[LANES] = {};
  __builtin_memcpy(buffer, p, size_t(n) * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_part(T* p, vf v, int64_t n) {
  T buffer[LANES];
  store(buffer, v);
  __builtin_memcpy(p, buffer, size_t(n) * sizeof(T));
}
template <class T>
inline vf load_n(const T* p, int64_t n) {
  return n >= LANES ? load(p) : load_part(p, n);
}
template <class T>
inline void store_n(T* p, vf v, int64_t n) {
  if (n >= LANES) {
    store(p, v);
  } else {
    store_part(p, v, n);
  }
}

inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) { store_part(p, splat(x), 1); }

// Always the same tree, whatever the machine's width.
inline float sum(vf v) {
  typedef float half __attribute__((vector_size(32)));
  typedef float quarter __attribute__((vector_size(16)));
  half h[2];
  __builtin_memcpy(h, &v, sizeof v);
  const half s = h[0] + h[1];
  quarter q[2];
  __builtin_memcpy(q, &s, sizeof s);
  const quarter t = q[0] + q[1];
  return (t[0] + t[2]) + (t[1] + t[3]);
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

inline float max_lane(vf v) {
  float m = v[0];
  for (int i = 1; i < LANES; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// out[j][i] = in[i][j] for a 16 x 16 block.
#ifdef __AVX512F__
inline void transpose16(const float* in, int64_t ldi, float* out, int64_t ldo) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vf r[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) r[i] = load(in + i * ldi);
#pragma GCC unroll 4
  for (int s = 1; s < LANES; s *= 2) {
    const vi upper = (lane & s) != 0;
    const vi low = upper ? lane - s + LANES : lane, high = upper ? lane + LANES : lane + s;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      if (i & s) continue;
      const vf a = r[i], b = r[i + s];
      r[i] = __builtin_shuffle(a, b, low);
      r[i + s] = __builtin_shuffle(a, b, high);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) store(out + i * ldo, r[i]);
}
#else
inline void transpose16(const float* in, int64_t ldi, float* out, int64_t ldo) {
  for (int i = 0; i < LANES; ++i) {
    for (int j = 0; j < LANES; ++j) out[j * ldo + i] = in[i * ldi + j];
  }
}
#endif

// The same for a [rows, cols] array, both multiples of 16.
inline void transpose(const float* in, int64_t ldi, float* out, int64_t ldo, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; i += LANES) {
    for (int64_t j = 0; j < cols; j += LANES) transpose16(in + i * ldi + j, ldi, out + j * ldo + i, ldo);
  }
}

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
inline int64_t round_up(int64_t n, int64_t to = LANES) { return ceil_div(n, to) * to; }

// e^x to about 1 ulp: 2^n * p(r) with |r| <= ln(2)/2. Below -87.3 it is 0, above 88.3 about 2.3e38; NaN stays.
inline vf exp(vf x) {
  const vf hi = splat(88.3f), lo = splat(-87.3f);
  vf y = x > hi ? hi : x;
  y = y < lo ? lo : y;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf shifted = y * 1.44269504f + magic;
  const vf n = shifted - magic;
  const vf r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vi power = ((vi)shifted - 0x4b400000 + 127) << 23;
  const vf value = p * (vf)power;
  return x < lo ? (vf){} : value;
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

inline vf silu(vf x) { return x * sigmoid(x); }

// log(1 + e^x) to 3 ulp: max(x, 0) + log(1 + y) with y = e^-|x|, as 2 artanh(r) with r = y / (2 + y) <= 1/3.
inline vf softplus(vf x) {
  const vf y = exp(x > 0.0f ? -x : x), r = y / (2.0f + y), z = r * r;
  vf p = z * (1.0f / 13) + 1.0f / 11;
  p = p * z + 1.0f / 9;
  p = p * z + 1.0f / 7;
  p = p * z + 1.0f / 5;
  p = p * z + 1.0f / 3;
  return (x > 0.0f ? x : (vf){}) + (r + r + (r + r) * (p * z));
}

}  // namespace forkpoint
