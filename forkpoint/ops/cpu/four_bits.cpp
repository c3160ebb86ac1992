#include "four_bits.h"

#include <algorithm>

#include "parallel.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace forkpoint {

namespace {

constexpr int HALVES = 2;  // of a panel
constexpr int64_t AHEAD = 2048;  // words; the fastest distance of prefetches

#ifdef __AVX2__
inline vf join(__m256 left, __m256 right) {
  vf v;
  __builtin_memcpy(&v, &left, sizeof left);
  __builtin_memcpy(reinterpret_cast<char*>(&v) + sizeof left, &right, sizeof right);
  return v;
}
#endif

// Half-precision numbers, none of which is infinite or NaN.
inline vf load_half(const uint16_t* p) {
#ifdef __AVX512F__
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__)
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return join(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
#else
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  const vu u = __builtin_convertvector(h, vu);
  return (vf)((vu)((vf)((u & 0x7fffu) << 13) * 0x1p112f) | ((u & 0x8000u) << 16));
#endif
}

inline vf load_bytes(const uint8_t* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return join(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
              _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))));
#else
  vb b;
  __builtin_memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
#endif
}

inline vu load_words(const uint32_t* p) {
  vu v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// The values of float codes in the lowest four bits of each lane; the bits above them mean nothing.
inline vf levels(vu codes) {
#ifdef __AVX512F__
  const vf table = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)table);
#else
  // A float's exponent counts from -127 and the code's from -1; numbers without a leading one come out right too.
  const vf magnitude = (vf)((codes & 7u) << 22) * 0x1p126f;
  return (vf)((vu)magnitude | ((codes & 8u) << 28));
#endif
}

constexpr int PLACES = 4;  // codes of half a word

// A group's scales for the codes of half a word, and zero points times scales. A code is used where it stands in the
// word, 16 times as large from place to place, and its scale is as much smaller. Every product of the two is exact in
// fp32, so the order of operations does not matter.
struct Group {
  vf scales[PLACES], zero;
};

template <bool FLOATS>
inline Group load_group(const FourBitPanels& w, int64_t at) {
  if (FLOATS) return {{load_shifted(static_cast<const fp8*>(w.scales) + at)}, vf{}};
  const vf scale = load_half(static_cast<const uint16_t*>(w.scales) + at);
  return {{scale, scale * 0x1p-4f, scale * 0x1p-8f, scale * 0x1p-12f}, load_bytes(w.zeros + at) * scale};
}

template <bool FLOATS>
inline vf value(vu words, int place, const Group& group) {
  if (FLOATS) return levels(words >> (4 * place)) * group.scales[0];
  const vu half = place < PLACES ? words : words >> 16;
  return __builtin_convertvector((vi)(half & (15u << (4 * (place % PLACES)))), vf) * group.scales[place % PLACES] -
         group.zero;
}

template <int R, bool FLOATS>
void tile(const float* __restrict a, const FourBitPanels& w, int64_t panel, float* __restrict c) {
  const int64_t first = panel * HALVES, length = w.k / CODES * LANES;
  const uint32_t* __restrict words = w.words + first * length;
  vf acc[R][HALVES] = {};  // both halves, because one chain of multiply-adds waits for itself
  for (int64_t g = 0; g < w.groups(); ++g) {
    const int64_t at = (first * w.groups() + g) * LANES;
    const Group left = load_group<FLOATS>(w, at), right = load_group<FLOATS>(w, at + w.groups() * LANES);
    const int64_t end = std::min(w.k, (g + 1) * w.group);
    for (int64_t k = g * w.group; k < end; k += CODES, words += LANES) {
      __builtin_prefetch(words + AHEAD);
      __builtin_prefetch(words + length + AHEAD);
      const vu own[HALVES] = {load_words(words), load_words(words + length)};
      const float* x = a + k / K_BLOCK * R * ROW_STRIDE + k % K_BLOCK;
#pragma GCC unroll 8
      for (int i = 0; i < CODES; ++i) {
        const vf v[HALVES] = {value<FLOATS>(own[0], i, left), value<FLOATS>(own[1], i, right)};
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const vf xr = splat(x[r * ROW_STRIDE + i]);
          acc[r][0] += xr * v[0];
          acc[r][1] += xr * v[1];
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * HALVES * LANES, acc[r][0]);
    store(c + r * HALVES * LANES + LANES, acc[r][1]);
  }
}

template <int R>
void dispatch(int rows, const float* a, const FourBitPanels& w, int64_t panel, float* c) {
  if (rows == R) return w.zeros ? tile<R, false>(a, w, panel, c) : tile<R, true>(a, w, panel, c);
  if constexpr (R > 1) dispatch<R - 1>(rows, a, w, panel, c);
}

template <bool FLOATS>
void widen(const FourBitPanels& w, int64_t panel, int64_t k0, int64_t kc, float* wide) {
  for (int half = 0; half < HALVES; ++half) {
    const int64_t part = panel * HALVES + half;
    for (int64_t k = 0; k < kc; k += CODES) {
      float* out = wide + k * HALVES * LANES + half * LANES;
      if (k0 + k >= w.k) {
        for (int i = 0; i < CODES; ++i) store(out + i * HALVES * LANES, vf{});
        continue;
      }
      const Group group = load_group<FLOATS>(w, (part * w.groups() + (k0 + k) / w.group) * LANES);
      const vu own = load_words(w.words + (part * (w.k / CODES) + (k0 + k) / CODES) * LANES);
      for (int i = 0; i < CODES; ++i) store(out + i * HALVES * LANES, value<FLOATS>(own, i, group));
    }
  }
}

}  // namespace

void pack_four_bits(const FourBitMatrix& matrix, uint32_t* words, void* scales, uint8_t* zeros, float* factors) {
  const int64_t width = matrix.k / CODES, groups = matrix.groups(), parts = (matrix.n + 31) / 32 * HALVES;
  parallel_tasks(parts, [&](int64_t part) {
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const int64_t row = part * LANES + lane;
      const bool inside = row < matrix.n;
      factors[row] = inside ? matrix.factors[row] * (matrix.zeros ? 1.0f : FP8_SHIFT) : 0.0f;
      for (int64_t i = 0; i < width; ++i) {
        words[(part * width + i) * LANES + lane] = inside ? matrix.words[row * width + i] : 0;
      }
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t to = (part * groups + g) * LANES + lane, from = row * groups + g;
        if (matrix.zeros) {
          static_cast<uint16_t*>(scales)[to] = inside ? static_cast<const uint16_t*>(matrix.scales)[from] : 0;
          zeros[to] = inside ? matrix.zeros[from] : 0;
        } else {
          static_cast<fp8*>(scales)[to] = inside ? static_cast<const fp8*>(matrix.scales)[from] : fp8{0};
        }
      }
    }
  });
}

void tile_rows_four_bits(int rows, const float* a, const FourBitPanels& w, int64_t panel, float* c) {
  dispatch<FEW_ROWS>(rows, a, w, panel, c);
}

void widen_four_bits(const FourBitPanels& w, int64_t panel, int64_t k0, int64_t kc, float* wide) {
  return w.zeros ? widen<false>(w, panel, k0, kc, wide) : widen<true>(w, panel, k0, kc, wide);
}

}  // namespace forkpoint
