#pragma once

#include <numeric>
#include <vector>

#include "bind_verify.h"
#include "scan.h"
#include "tensors.h"

namespace forkpoint {

namespace scan_binding {

// Constants of one layer, kept by the caller so that a step passes one object.
struct Layer {
  Tensor A, dt_bias, skip;
};

Layer make_layer(const Tensor& A, const Tensor& dt_bias, const Tensor& skip) {
  TORCH_CHECK(A.dim() == 2 && A.scalar_type() == at::kFloat, "A is [D, N] float32, not ", A.sizes());
  return {A.contiguous(), dt_bias.contiguous(), skip.contiguous()};
}

ScanRates rates_of(const Layer& layer) { return {ptr<float>(layer.A), ptr<float>(layer.dt_bias)}; }

template <class T>
ScanRows<T> rows(const Tensor& t, int64_t tokens, int64_t size) {
  TORCH_CHECK(t.dim() == 2 && t.size(0) == tokens && t.size(1) == size, "an input of the scan is ", t.sizes(),
              ", not [", tokens, ", ", size, "]");
  return {ptr<const T>(t), t.stride(0)};
}

// Calls `fn` with the pool by its type.
template <class F>
void with_pool(const Tensor& A, const Tensor& pool, const F& fn) {
  const int64_t dim = A.size(0), values = A.size(1);
  TORCH_CHECK(pool.dim() == 3 && pool.size(1) == dim && pool.size(2) == values && pool.stride(2) == 1 &&
                  pool.stride(1) == values,
              "the scan's pool must be [P, ", dim, ", ", values, "], dense within a slot, not ", pool.sizes());
  by_type(pool.scalar_type(), [&](auto* state) {
    using S = FORKPOINT_TYPE(state);
    fn(ScanPool<S>{ptr<S>(pool), pool.stride(0), dim, values});
  });
}

template <class F>
Tensor run(const std::vector<Tensor>& given, const Layer& layer, const Tensor& pool, const F& fn) {
  std::vector<Tensor> in;
  for (const Tensor& t : given) {
    in.push_back(dense_rows(t));
    TORCH_CHECK(t.scalar_type() == given[0].scalar_type(), "the scan's inputs must share a dtype");
  }
  const int64_t tokens = in[0].size(0), dim = layer.A.size(0), values = layer.A.size(1);
  Tensor out = empty({tokens, dim}, in[0].scalar_type());
  by_type(in[0].scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    const Scan<T> call{rows<T>(in[0], tokens, dim),    rows<T>(in[1], tokens, dim), rows<T>(in[2], tokens, values),
                       rows<T>(in[3], tokens, values), rows<T>(in[4], tokens, dim), ptr<T>(out),
                       dim,                            values,                      rates_of(layer),
                       ptr<float>(layer.skip)};
    with_pool(layer.A, pool, [&](const auto& states) { fn(call, states); });
  });
  return out;
}

Tensor over_segments(const std::vector<Tensor>& in, const Layer& layer, const Tensor& pool, const Segments& segments) {
  return run(in, layer, pool, [&](const auto& call, const auto& states) { scan(call, states, segments); });
}

Tensor prefill(const std::vector<Tensor>& in, const Layer& layer, const Tensor& pool, const Tensor& cu_seqlens,
               const Tensor& src, const Tensor& dst, const Tensor& save_ptr, const Tensor& save_pos,
               const Tensor& save_dst) {
  return over_segments(
      in, layer, pool,
      {src.size(0), index(cu_seqlens), index(src), index(dst), index(save_ptr), index(save_pos), index(save_dst)});
}

// A row is a segment of one token.
Tensor decode(const std::vector<Tensor>& in, const Layer& layer, const Tensor& pool, const Tensor& src,
              const Tensor& dst) {
  std::vector<int32_t> starts(size_t(src.size(0)) + 1);
  std::iota(starts.begin(), starts.end(), 0);
  return over_segments(in, layer, pool, {src.size(0), starts.data(), index(src), index(dst), nullptr, nullptr, nullptr});
}

template <class T>
ScanRecords<T> records_of(const std::vector<Tensor>& lines, const Tensor& line, const Tensor& A) {
  TORCH_CHECK(lines.size() == 3 && lines[0].size(2) == A.size(0) && lines[2].size(2) == A.size(1),
              "records are those of x, dt and b");
  for (const Tensor& line : lines) TORCH_CHECK(line.is_contiguous(), "records are dense");
  return {lines[0].size(1), index(line), ptr<T>(lines[0]), ptr<T>(lines[1]), ptr<T>(lines[2])};
}

Tensor verify(const std::vector<Tensor>& in, const Layer& layer, const Tensor& pool, const std::vector<Tensor>& rows,
              const Tensor& line, const std::vector<Tensor>& lines) {
  const VerifyRows windows = verify_rows(rows);
  return run(in, layer, pool, [&](const auto& call, const auto& states) {
    using T = std::remove_reference_t<decltype(*call.out)>;
    scan_verify(call, states, records_of<T>(lines, line, layer.A), windows);
  });
}

void fold(const Tensor& pool, const std::vector<Tensor>& rows, const Tensor& line, const std::vector<Tensor>& lines,
          const Tensor& A, const Tensor& dt_bias) {
  TORCH_CHECK(A.is_contiguous() && dt_bias.is_contiguous(), "A and dt_bias are dense");
  const VerifyRows windows = verify_rows(rows);
  by_type(lines[0].scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    with_pool(A, pool, [&](const auto& states) {
      scan_fold(rates_of({A, dt_bias, dt_bias}), states, records_of<T>(lines, line, A), windows);
    });
  });
}

}  // namespace scan_binding

inline void bind_scan(pybind11::module_& m) {
  pybind11::class_<scan_binding::Layer>(m, "ScanLayer").def(pybind11::init(&scan_binding::make_layer));
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("scan_prefill", &scan_binding::prefill, Release());
  m.def("scan_decode", &scan_binding::decode, Release());
  m.def("scan_verify", &scan_binding::verify, Release());
  m.def("scan_fold", &scan_binding::fold, Release());
}

}  // namespace forkpoint
