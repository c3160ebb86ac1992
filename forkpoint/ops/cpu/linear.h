// y[M, N] = x[M, K] W^T (+ bias) over packed weights.
//
// Each output element is one chain of fused multiply-adds over k in ascending order, in fp32, whatever M, the
// row's position, the tile that it falls into and the thread: rows do not depend on the batch, bit for bit.
// Processors with AVX512-BF16 add the products of two neighbours in k at once, for bf16 rows and weights: the chain has
// half as many links. Processors with matrix tiles add as their tiles do (tile_linear.h).
#pragma once

#include <cstdint>

#include "four_bits.h"

namespace forkpoint {

constexpr int PANEL = 32;  // output columns of one packed panel

enum class WeightType { f32, bf16, fp8, four_bits };

// Panels of 32 outputs. fp32: [N/32][K][32]; bf16: [N/32][K/2][32][2], two neighbours in k in one 32-bit word.
// fp8: [N/32][K][32]. four_bits: `four`. N is padded to 32 and K to `padded_k` with zeros.
struct PackedWeight {
  WeightType type;
  int64_t n, k, padded_k;
  const void* data;
  const float* bias;              // [N] or null
  const float* scales = nullptr;   // fp8: [N/32][K/128][32]
  const float* factors = nullptr;  // [N] or null: what outputs are multiplied by
  FourBitPanels four = {};
  bool tiled = false;  // quantised: matrix tiles take products of many rows, with weights rounded to bf16

  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

inline int64_t padded_k(int64_t k) { return (k + 31) / 32 * 32; }
int64_t packed_elements(int64_t n, int64_t k);

// The outputs [col, col + 16) of a row from their sums c, with factors and bias. Columns from N on do not exist.
inline vf output(const PackedWeight& w, const float* c, int64_t col) {
  vf v = load(c);
  if (w.factors) v *= load_n(w.factors + col, w.n - col);
  if (w.bias) v += load_n(w.bias + col, w.n - col);
  return v;
}

// y[col, col + 32) = the outputs of a row.
template <class T>
inline void store_outputs(const PackedWeight& w, const float* c, int64_t col, T* y) {
  for (int64_t i = 0; i < PANEL && col + i < w.n; i += LANES) {
    store_n(y + col + i, output(w, c + i, col + i), w.n - col - i);
  }
}

// Columns [k0, k0 + kc) of a panel as fp32 rows of 32, without factors; up to K_BLOCK columns from a multiple of it on.
// `wide` is used where the weights are not.
const float* panel_block(const PackedWeight& w, int64_t panel, int64_t k0, int64_t kc, float* wide);

// weight[n, k] rows of stride `ld` -> out, `packed_elements(n, k)` elements of the same type.
template <class T>
void pack_weight(const T* weight, int64_t ld, int64_t n, int64_t k, T* out);

// codes[n, k], dense, with a scale for each `rows` of N by 128 of K, or, not `blocked`, by all of K.
struct ScaledCodes {
  const fp8* codes;
  const float* scales;
  int64_t n, k, rows;
  bool blocked;
};
inline int64_t scale_blocks(int64_t k) { return (padded_k(k) + 127) / 128; }
// -> out, `packed_elements(n, k)` codes, and scales[N/32][scale_blocks(k)][32].
void pack_fp8(const ScaledCodes& weight, fp8* out, float* scales);

// x rows of stride ldx, y rows of stride ldy.
template <class T>
void linear(const T* x, int64_t ldx, const PackedWeight& w, T* y, int64_t ldy, int64_t m);

// The same on the calling thread alone; `rows` (or null) names the rows of x to take.
template <class T>
void linear_serial(const T* x, int64_t ldx, const int32_t* rows, const PackedWeight& w, T* y, int64_t ldy, int64_t m);

}  // namespace forkpoint
