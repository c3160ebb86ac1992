// Routed experts: sum_j weights[t, j] * down(silu(gate) * up)(x[t]) over the experts ids[t, j]; without a gate,
// down(relu(up)^2).
#pragma once

#include <vector>

#include "linear.h"

namespace forkpoint {

struct PackedExpert {
  PackedWeight gate_up, down;
};

// What clamps the gate from above, and up on both sides. Infinity clamps nothing.
struct GateLimits {
  float gate, up;
};

// x rows of stride ldx, out dense [tokens, H], weights and ids dense [tokens, top_k].
template <class T>
void experts(const T* x, int64_t ldx, const std::vector<PackedExpert>& packed, const float* weights, const int32_t* ids,
             int64_t top_k, GateLimits limits, T* out, int64_t tokens);

}  // namespace forkpoint
