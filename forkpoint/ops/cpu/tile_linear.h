// Products of rows in bf16 and packed weights in the processor's matrix tiles (AMX), for any number of rows.
//
// The tiles add an element's products in the order of k, in fp32. Rows in bf16 do not depend on the batch, bit for bit,
// unless `tiled` weights are quantised.
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

}  // namespace forkpoint
