// Products of rows in bf16 and packed weights in the processor's matrix tiles (AMX), for any number of rows.
//
// An element is a sum over pieces of 32 columns of x, in ascending order, in fp32. In a piece, the products at even
// places and those at odd places are a chain each. The bits of a row do not depend on the batch, unless the weights are
// `tiled`: products of more than FEW_ROWS rows then round them to bf16.
#pragma once

#include "linear.h"
#include "matrix_tiles.h"
#include "tile.h"

namespace forkpoint {

// Whether `tile_linear` takes a product of `m` rows in bf16. A product of fewer rows waits less for its weights in
// vectors: plain weights give the same bits there, and quantised ones are not rounded.
inline bool in_tiles(const PackedWeight& w, int64_t m) {
  return has_matrix_tiles() && (w.type == WeightType::bf16 ? m > AS_TILES_ROWS : w.tiled && m > FEW_ROWS);
}

// `linear_serial`, or, if `parallel`, the same on all threads.
void tile_linear(const bf16* x, int64_t ldx, const int32_t* rows, const PackedWeight& w, bf16* y, int64_t ldy, int64_t m,
                 bool parallel);

// Whether `tile_linear_silu_mul` takes a product of `m` rows in bf16 with [gate | up] as weights.
inline bool in_gated_tiles(const PackedWeight& w, int64_t m) { return in_tiles(w, m) && w.n % (2 * PANEL) == 0; }

// y[m, N / 2], dense = silu(gate) * up of what `tile_linear` stores, bit for bit.
void tile_linear_silu_mul(const bf16* x, int64_t ldx, const PackedWeight& w, bf16* y, int64_t m);

}  // namespace forkpoint
