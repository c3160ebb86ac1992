#pragma once

#include "bind_verify.h"
#include "recurrence.h"
#include "tensors.h"

namespace forkpoint {

namespace recurrence_binding {

// Constants of one layer, kept by the caller so that a step passes one object.
struct Layer {
  Tensor A_log, dt_bias, D;
  Recurrence shape;
};

Layer make_layer(int64_t H, int64_t HV, int64_t K, int64_t V, bool double_beta, bool delta,
                 std::pair<double, double> limit, const Tensor& A_log, const Tensor& dt_bias,
                 const std::optional<Tensor>& D, bool per_key, double bound) {
  TORCH_CHECK(K <= 512 && V <= 512 && HV % H == 0, "recurrence: heads ", H, "/", HV, " of ", K, "/", V);
  const auto constant = [](const Tensor& x) { return x.to(at::kFloat).contiguous(); };
  Layer layer{constant(A_log), constant(dt_bias), D ? constant(*D) : Tensor(), {}};
  layer.shape = {H,
                 HV,
                 K,
                 V,
                 double_beta,
                 delta,
                 float(limit.first),
                 float(limit.second),
                 ptr<float>(layer.A_log),
                 ptr<float>(layer.dt_bias),
                 D ? ptr<float>(layer.D) : nullptr,
                 per_key,
                 float(bound)};
  TORCH_CHECK(!per_key || (delta && H == HV), "a decay for each key needs the delta rule and as many heads of keys");
  TORCH_CHECK(layer.dt_bias.numel() == (per_key ? HV * K : HV), "dt_bias has ", layer.dt_bias.numel(), " values");
  return layer;
}

void check(const Recurrence& s, const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& pool) {
  const int64_t width = 2 * s.num_k_heads * s.key_dim + s.num_v_heads * s.value_dim;
  TORCH_CHECK(mixed.dim() == 2 && mixed.size(1) == width, "mixed is ", mixed.sizes(), ", not [T, ", width, "]");
  TORCH_CHECK(a.scalar_type() == mixed.scalar_type() && b.scalar_type() == mixed.scalar_type(),
              "mixed, a and b must share a dtype");
  TORCH_CHECK(a.size(1) == s.num_v_heads * (s.per_key ? s.key_dim : 1), "a is ", a.sizes());
  TORCH_CHECK(pool.dim() == 4 && pool.stride(3) == 1 && pool.stride(2) == s.key_dim &&
                  pool.stride(1) == s.key_dim * s.value_dim && pool.size(1) == s.num_v_heads,
              "the matrix pool must be [P, HV, V, K], dense within a slot, not ", pool.sizes());
}

template <class F>
Tensor dispatch(const Tensor& mixed_in, const Tensor& a_in, const std::optional<Tensor>& b_in, const Layer& layer,
                const Tensor& pool, const F& fn) {
  const Recurrence& s = layer.shape;
  TORCH_CHECK(b_in || !s.delta, "the delta rule needs b");
  const Tensor mixed = dense_rows(mixed_in), a = dense_rows(a_in), b = b_in ? dense_rows(*b_in) : a;
  check(s, mixed, a, b, pool);
  Tensor out = empty({mixed.size(0), s.num_v_heads, s.value_dim}, mixed.scalar_type());
  by_type(mixed.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    const RecurrenceInput<T> in{ptr<T>(mixed), mixed.stride(0), ptr<T>(a), a.stride(0), ptr<T>(b), b.stride(0), ptr<T>(out)};
    by_type(pool.scalar_type(), [&](auto* state) {
      using S = FORKPOINT_TYPE(state);
      fn(in, StatePool<S>{ptr<S>(pool), pool.stride(0)});
    });
  });
  return out;
}

Tensor prefill(const Tensor& mixed, const Tensor& a, const std::optional<Tensor>& b, const Layer& layer, const Tensor& pool,
               const Tensor& cu_seqlens, const Tensor& src, const Tensor& dst, const Tensor& save_ptr,
               const Tensor& save_pos, const Tensor& save_dst) {
  const Segments segments{src.size(0),      index(cu_seqlens), index(src),    index(dst),
                          index(save_ptr), index(save_pos),    index(save_dst)};
  return dispatch(mixed, a, b, layer, pool,
                  [&](const auto& in, const auto& states) { recurrence_prefill(layer.shape, in, states, segments); });
}

Tensor decode(const Tensor& mixed, const Tensor& a, const std::optional<Tensor>& b, const Layer& layer, const Tensor& pool,
              const Tensor& src, const Tensor& dst) {
  return dispatch(mixed, a, b, layer, pool, [&](const auto& in, const auto& states) {
    recurrence_decode(layer.shape, in, states, mixed.size(0), index(src), index(dst));
  });
}

Records records_of(const std::vector<Tensor>& lines) {
  TORCH_CHECK(lines.size() == 3 && lines[0].is_contiguous() && lines[1].is_contiguous() && lines[2].is_contiguous(),
              "records are dense updates, keys and decays");
  const bool per_key = lines[2].dim() == 4;
  return {lines[0].size(1), lines[1].size(2), lines[0].size(2),     lines[1].size(3),     lines[0].size(3),
          per_key,          ptr<float>(lines[0]), ptr<float>(lines[1]), ptr<float>(lines[2])};
}

Tensor verify(const Tensor& mixed, const Tensor& a, const std::optional<Tensor>& b, const Layer& layer,
              const Tensor& pool, const std::vector<Tensor>& rows, const std::vector<Tensor>& lines) {
  const VerifyRows windows = verify_rows(rows);
  const Records records = records_of(lines);
  return dispatch(mixed, a, b, layer, pool, [&](const auto& in, const auto& states) {
    recurrence_verify(layer.shape, in, states, records, windows);
  });
}

void fold(const Tensor& pool, const std::vector<Tensor>& rows, const std::vector<Tensor>& lines) {
  const VerifyRows windows = verify_rows(rows);
  const Records records = records_of(lines);
  by_type(pool.scalar_type(), [&](auto* state) {
    using S = FORKPOINT_TYPE(state);
    recurrence_fold(StatePool<S>{ptr<S>(pool), pool.stride(0)}, records, windows);
  });
}

}  // namespace recurrence_binding

inline void bind_recurrence(pybind11::module_& m) {
  pybind11::class_<recurrence_binding::Layer>(m, "RecurrenceLayer").def(pybind11::init(&recurrence_binding::make_layer));
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("recurrence_prefill", &recurrence_binding::prefill, Release());
  m.def("recurrence_decode", &recurrence_binding::decode, Release());
  m.def("recurrence_verify", &recurrence_binding::verify, Release());
  m.def("recurrence_fold", &recurrence_binding::fold, Release());
}

}  // namespace forkpoint
