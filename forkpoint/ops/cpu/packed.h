// A packed weight together with the tensors that hold it.
#pragma once

#include "linear.h"
#include "tensors.h"

namespace forkpoint {

struct Packed {
  Tensor data, bias;
  PackedWeight weight;
};

Packed pack(const Tensor& weight, const std::optional<Tensor>& bias);

}  // namespace forkpoint
