#pragma once

#include <limits>

#include "bind_rows.h"
#include "experts.h"
#include "tensors.h"
#include "tile_linear.h"

namespace forkpoint {

namespace linear_binding {

constexpr int64_t MANY_ROWS = 128;  // of an output: each starts on a cache line

// A packed weight together with the tensors that hold it.
struct Packed {
  Tensor data, bias;
  PackedWeight weight;
  Tensor scales = {}, zeros = {}, factors = {};
};

Packed pack(const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2, "a linear weight must be [N, K], not ", weight.sizes());
  const Tensor w = dense_rows(weight);
  const int64_t n = w.size(0), k = w.size(1);
  Packed packed{empty({packed_elements(n, k)}, w.scalar_type()), Tensor(), {}};
  const auto type = w.scalar_type() == at::kFloat ? WeightType::f32 : WeightType::bf16;
  by_type(w.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    pack_weight(ptr<T>(w), w.stride(0), n, k, ptr<T>(packed.data));
  });
  if (bias) packed.bias = bias->to(at::kFloat).contiguous();
  packed.weight = {type, n, k, padded_k(k), packed.data.data_ptr(), bias ? ptr<float>(packed.bias) : nullptr};
  return packed;
}

// codes [N, K] uint8 (e4m3); scales [ceil(N / rows), ceil(K / 128)] fp32, or [ceil(N / rows), 1] if not `blocked`.
Packed pack_scaled(const Tensor& codes_in, const Tensor& scales_in, int64_t rows, bool blocked,
                   const std::optional<Tensor>& bias, bool tiled) {
  const Tensor codes = codes_in.contiguous(), scales = scales_in.contiguous();
  const int64_t n = codes.size(0), k = codes.size(1);
  TORCH_CHECK(codes.dim() == 2 && scales.size(0) == (n + rows - 1) / rows &&
                  scales.size(1) == (blocked ? (k + 127) / 128 : 1),
              "codes ", codes.sizes(), " with scales ", scales.sizes());
  Packed packed{empty({packed_elements(n, k)}, at::kByte), Tensor(), {},
                empty({(n + PANEL - 1) / PANEL * scale_blocks(k) * PANEL}, at::kFloat)};
  pack_fp8({reinterpret_cast<const fp8*>(codes.data_ptr()), ptr<float>(scales), n, k, rows, blocked},
           static_cast<fp8*>(packed.data.data_ptr()), ptr<float>(packed.scales));
  if (bias) packed.bias = bias->to(at::kFloat).contiguous();
  packed.weight = {WeightType::fp8, n, k, padded_k(k), packed.data.data_ptr(),
                   bias ? ptr<float>(packed.bias) : nullptr, ptr<float>(packed.scales)};
  packed.weight.tiled = tiled;
  return packed;
}

// words [N, K/8] int32, scales [N, groups] fp16, factors [N, 1] fp32, zeros [N, groups] uint8. Without zeros, scales
// are e4m3 numbers as uint8.
Packed pack_four(const Tensor& words_in, const Tensor& scales_in, const Tensor& factors_in,
                 const std::optional<Tensor>& zeros_in, int64_t group, const std::optional<Tensor>& bias,
                 bool tiled) {
  const Tensor words = words_in.contiguous(), scales = scales_in.contiguous(), factors = factors_in.contiguous();
  const Tensor zeros = zeros_in ? zeros_in->contiguous() : Tensor();
  const int64_t n = words.size(0), k = words.size(1) * CODES, padded = (n + PANEL - 1) / PANEL * PANEL;
  const FourBitMatrix matrix{static_cast<const uint32_t*>(words.data_ptr()),
                             scales.data_ptr(),
                             zeros_in ? ptr<uint8_t>(zeros) : nullptr, ptr<float>(factors), n, k, group};
  const auto type = zeros_in ? at::kHalf : at::kByte;
  TORCH_CHECK(words.dim() == 2 && words.scalar_type() == at::kInt && scales.scalar_type() == type &&
                  scales.size(0) == n && scales.size(1) == matrix.groups() && factors.numel() == n && group % CODES == 0 &&
                  (!zeros_in || (zeros.sizes() == scales.sizes() && zeros.scalar_type() == at::kByte)),
              "words ", words.sizes(), " with scales ", scales.sizes(), " of groups of ", group);
  Packed packed{empty({padded * words.size(1)}, at::kInt), Tensor(), {}, empty({padded * matrix.groups()}, type)};
  packed.factors = empty({padded}, at::kFloat);
  if (zeros_in) packed.zeros = empty({padded * matrix.groups()}, at::kByte);
  auto* to_zeros = zeros_in ? ptr<uint8_t>(packed.zeros) : nullptr;
  pack_four_bits(matrix, static_cast<uint32_t*>(packed.data.data_ptr()),
                 packed.scales.data_ptr(), to_zeros, ptr<float>(packed.factors));
  if (bias) packed.bias = bias->to(at::kFloat).contiguous();
  packed.weight = {WeightType::four_bits, n, k, padded_k(k), packed.data.data_ptr(),
                   bias ? ptr<float>(packed.bias) : nullptr, nullptr, ptr<float>(packed.factors),
                   {static_cast<const uint32_t*>(packed.data.data_ptr()), packed.scales.data_ptr(), to_zeros, k,
                    group},
                   tiled};
  return packed;
}

void check_width(const Tensor& x, const PackedWeight& w) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == w.k, "linear: x is ", x.sizes(), ", the weight takes K=", w.k);
}

Tensor run(const Tensor& input, const Packed& packed) {
  const PackedWeight& w = packed.weight;
  check_width(input, w);
  const Tensor x = dense_rows(input);
  const int64_t ldy = x.size(0) < MANY_ROWS ? w.n : round_up(w.n, PANEL);
  Tensor y = empty({x.size(0), ldy}, x.scalar_type());
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    linear(ptr<T>(x), x.stride(0), w, ptr<T>(y), ldy, x.size(0));
  });
  return ldy == w.n ? y : y.narrow(1, 0, w.n);
}

// silu(gate) * up [T, N / 2] of `run`.
Tensor run_silu_mul(const Tensor& input, const Packed& packed) {
  const PackedWeight& w = packed.weight;
  if (input.scalar_type() != at::kBFloat16 || !in_gated_tiles(w, input.size(0))) {
    return rows_binding::silu_product(run(input, packed));
  }
  check_width(input, w);
  const Tensor x = dense_rows(input);
  Tensor y = empty({x.size(0), w.n / 2}, x.scalar_type());
  tile_linear_silu_mul(ptr<bf16>(x), x.stride(0), w, ptr<bf16>(y), x.size(0));
  return y;
}

struct ExpertWeights {
  std::vector<Packed> gate_up, down;
  std::vector<PackedExpert> packed;
};

// Matrix e of `gate_up` and `down`, packed, for each of `count` experts.
template <class Pack>
ExpertWeights collect_experts(int64_t count, const Pack& pack_one) {
  ExpertWeights all;
  for (int64_t e = 0; e < count; ++e) {
    all.gate_up.push_back(pack_one(true, e));
    all.down.push_back(pack_one(false, e));
    all.packed.push_back({all.gate_up.back().weight, all.down.back().weight});
  }
  return all;
}

void check_experts(const Tensor& gate_up, const Tensor& down) {
  TORCH_CHECK(gate_up.dim() == 3 && down.dim() == 3 && gate_up.size(0) == down.size(0) &&
                  (gate_up.size(1) == 2 * down.size(2) || gate_up.size(1) == down.size(2)),
              "experts take gate_up [E, 2I, H] or [E, I, H] and down [E, N, I], not ", gate_up.sizes(), " and ", down.sizes());
}

ExpertWeights pack_experts(const Tensor& gate_up, const Tensor& down) {
  check_experts(gate_up, down);
  return collect_experts(gate_up.size(0), [&](bool into, int64_t e) {
    return pack((into ? gate_up : down).select(0, e), std::nullopt);
  });
}

// As `pack_scaled`, with a leading dimension of experts.
ExpertWeights pack_scaled_experts(const Tensor& gate_up, const Tensor& gate_up_scales, int64_t gate_up_rows,
                                  const Tensor& down, const Tensor& down_scales, int64_t down_rows, bool blocked,
                                  bool tiled) {
  check_experts(gate_up, down);
  return collect_experts(gate_up.size(0), [&](bool into, int64_t e) {
    return into ? pack_scaled(gate_up.select(0, e), gate_up_scales.select(0, e), gate_up_rows, blocked, std::nullopt,
                              tiled)
                : pack_scaled(down.select(0, e), down_scales.select(0, e), down_rows, blocked, std::nullopt, tiled);
  });
}

// (words, scales, factors, zeros, group) of `pack_four`, with a leading dimension of experts.
using FourBits = std::tuple<Tensor, Tensor, Tensor, std::optional<Tensor>, int64_t>;

ExpertWeights pack_four_experts(const FourBits& gate_up, const FourBits& down, bool tiled) {
  return collect_experts(std::get<0>(gate_up).size(0), [&](bool into, int64_t e) {
    const auto& [words, scales, factors, zeros, group] = into ? gate_up : down;
    const auto own = zeros ? std::optional<Tensor>(zeros->select(0, e)) : std::nullopt;
    return pack_four(words.select(0, e), scales.select(0, e), factors.select(0, e), own, group, std::nullopt, tiled);
  });
}

Tensor run_experts(const Tensor& input, const ExpertWeights& all, const Tensor& weights_in, const Tensor& ids_in,
                   std::optional<std::pair<double, double>> limits) {
  const Tensor x = dense_rows(input);
  const Tensor weights = weights_in.to(at::kFloat).contiguous(), ids = ids_in.to(at::kInt).contiguous();
  const auto experts_count = int64_t(all.packed.size());
  TORCH_CHECK(x.dim() == 2 && ids.dim() == 2 && ids.sizes() == weights.sizes() && ids.size(0) == x.size(0) &&
                  x.size(1) == all.packed[0].gate_up.k,
              "experts: x ", x.sizes(), ", ids ", ids.sizes(), ", weights ", weights.sizes());
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const int32_t id = ptr<int32_t>(ids)[i];
    TORCH_CHECK_INDEX(id >= 0 && id < experts_count, "expert ", id, " of ", experts_count);
  }
  Tensor out = empty({x.size(0), all.packed[0].down.n}, x.scalar_type());
  constexpr double NONE = std::numeric_limits<double>::infinity();
  const auto [gate_limit, up_limit] = limits.value_or(std::pair(NONE, NONE));
  const GateLimits given{float(gate_limit), float(up_limit)};
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    experts(ptr<T>(x), x.stride(0), all.packed, ptr<float>(weights), ptr<int32_t>(ids), ids.size(1), given, ptr<T>(out),
            x.size(0));
  });
  return out;
}

}  // namespace linear_binding

inline void bind_linear(pybind11::module_& m) {
  pybind11::class_<linear_binding::Packed>(m, "PackedLinear");
  m.def("prepare_linear", &linear_binding::pack);
  m.def("prepare_scaled_linear", &linear_binding::pack_scaled);
  m.def("prepare_four_bit_linear", &linear_binding::pack_four);
  m.def("prepare_four_bit_experts", &linear_binding::pack_four_experts);
  m.def("prepare_scaled_experts", &linear_binding::pack_scaled_experts);
  pybind11::class_<linear_binding::ExpertWeights>(m, "ExpertWeights");
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("linear", &linear_binding::run, Release());
  m.def("linear_silu_mul", &linear_binding::run_silu_mul, Release());
  m.def("prepare_experts", &linear_binding::pack_experts);
  using pybind11::arg;
  m.def("experts", &linear_binding::run_experts, Release(), arg("x"), arg("packed"), arg("weights"), arg("ids"),
        arg("limits") = pybind11::none());
}

}  // namespace forkpoint
