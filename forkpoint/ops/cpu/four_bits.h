// Weights in 4 bits: integers with zero points, or floats (e2m1), with a scale for each group of K.
#pragma once

#include <cstdint>

#include "fp8.h"
#include "tile.h"

namespace forkpoint {

constexpr int64_t CODES = 8;  // in a word

// One matrix [N, K] as it is stored: words [N, K/8], scales and zeros [N, groups], factors [N]. Scales are in half
// precision for integers, and in fp8 for floats.
struct FourBitMatrix {
  const uint32_t* words;
  const void* scales;
  const uint8_t* zeros;  // null: the codes are floats
  const float* factors;
  int64_t n, k, group;

  int64_t groups() const { return (k + group - 1) / group; }
};

// The same in panels of 32 outputs, each in two halves of 16: words [N/32][2][K/8][16], scales and zeros
// [N/32][2][groups][16]. A row's factor is multiplied in by whoever stores the product, for floats with FP8_SHIFT.
struct FourBitPanels {
  const uint32_t* words;
  const void* scales;
  const uint8_t* zeros;
  int64_t k, group;

  int64_t groups() const { return (k + group - 1) / group; }
};

// N is padded to 32 with scales of 0. Outputs: n / 8 words, `groups` scales and zeros, one factor for each padded row.
void pack_four_bits(const FourBitMatrix& matrix, uint32_t* words, void* scales, uint8_t* zeros, float* factors);

// C[rows, 32] = A W of one panel, up to FEW_ROWS rows, without the factors. A is cut into
// [K / K_BLOCK][rows][ROW_STRIDE]; C rows are 32 apart. The chain of an element is that of `tile_rows`.
void tile_rows_four_bits(int rows, const float* a, const FourBitPanels& w, int64_t panel, float* c);

// Columns [k0, k0 + kc) of a panel as fp32 rows of 32, without the factors; zeros from K on. k0 is a multiple of 8.
void widen_four_bits(const FourBitPanels& w, int64_t panel, int64_t k0, int64_t kc, float* wide);

}  // namespace forkpoint
