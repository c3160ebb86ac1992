#pragma once

#include "rows.h"
#include "tensors.h"

namespace forkpoint {

namespace rows_binding {

// Rows over the last dimension of a 2-D or 3-D tensor with a dense last dimension.
template <class T>
Rows<const T> rows_of(const Tensor& t) {
  TORCH_CHECK(t.dim() == 2 || t.dim() == 3, "expected [T, D] or [T, heads, D], not ", t.sizes());
  if (t.dim() == 2) return {ptr<const T>(t), 1, t.stride(0), 0};
  return {ptr<const T>(t), t.size(1), t.stride(0), t.stride(1)};
}

const float* weight_of(const Tensor& w, const Tensor& x) {
  TORCH_CHECK(w.scalar_type() == at::kFloat && w.is_contiguous() && w.numel() == x.size(-1),
              "a norm's weight is dense float32 of ", x.size(-1), ", not ", w.sizes());
  return ptr<float>(w);
}

Tensor norm(const Tensor& input, const Tensor& weight, double eps) {
  const Tensor x = dense_rows(input);
  Tensor out = empty(x.sizes(), x.scalar_type());
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    rmsnorm(rows_of<T>(x), weight_of(weight, x), float(eps), ptr<T>(out), x.numel() / x.size(-1), x.size(-1));
  });
  return out;
}

void same(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type(), "operands differ: ", a.sizes(), " ",
              a.scalar_type(), " and ", b.sizes(), " ", b.scalar_type());
}

std::tuple<Tensor, Tensor> add_norm(const Tensor& x_in, const Tensor& residual_in, const Tensor& weight, double eps) {
  const Tensor x = dense_rows(x_in), residual = dense_rows(residual_in);
  same(x, residual);
  Tensor out = empty(x.sizes(), x.scalar_type()), total = empty(x.sizes(), x.scalar_type());
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    add_rmsnorm(rows_of<T>(x), rows_of<T>(residual), weight_of(weight, x), float(eps), ptr<T>(total), ptr<T>(out),
                x.numel() / x.size(-1), x.size(-1));
  });
  return {out, total};
}

Tensor gated_norm(const Tensor& x_in, const Tensor& gate_in, const Tensor& weight, double eps, bool gate_first,
                  bool sigmoid) {
  const Tensor x = dense_rows(x_in), gate = dense_rows(gate_in);
  same(x, gate);
  const bool own = weight.dim() == 2;
  TORCH_CHECK(!own || (x.dim() == 3 && weight.size(0) == x.size(1)), "weights ", weight.sizes(), " for ", x.sizes());
  const GatedNorm form{gate_first, sigmoid, x.dim() == 3 ? x.size(1) : 1, own ? x.size(-1) : 0};
  Tensor out = empty(x.sizes(), x.scalar_type());
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    gated_rmsnorm(rows_of<T>(x), rows_of<T>(gate), weight_of(own ? weight[0] : weight, x), float(eps), form,
                  ptr<T>(out), x.numel() / x.size(-1), x.size(-1));
  });
  return out;
}

Tensor mix(const Tensor& done, const std::optional<Tensor>& current, const Tensor& weight, double eps) {
  TORCH_CHECK(done.dim() == 3 && done.stride(2) == 1, "finished residuals are [N, T, H] with dense rows, not ", done.sizes());
  TORCH_CHECK(!current || (current->stride(1) == 1 && current->sizes() == done.sizes().slice(1) &&
                           current->scalar_type() == done.scalar_type()),
              "the current residual is like one of the finished ones");
  Tensor out = empty(done.sizes().slice(1), done.scalar_type());
  by_type(done.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    const T* now = current ? ptr<const T>(*current) : nullptr;
    const Residuals<T> residuals{ptr<const T>(done), done.size(0), done.stride(0), done.stride(1), now,
                                 current ? current->stride(0) : 0};
    mix_residuals(residuals, weight_of(weight, done), float(eps), ptr<T>(out), done.size(1), done.size(2));
  });
  return out;
}

Tensor silu_product(const Tensor& input) {
  const Tensor x = dense_rows(input);
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "silu_mul takes [T, 2I], not ", x.sizes());
  const int64_t size = x.size(1) / 2;
  Tensor out = empty({x.size(0), size}, x.scalar_type());
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    const Rows<const T> gate = rows_of<T>(x);
    Rows<const T> up = gate;
    up.data += size;
    silu_mul(gate, up, ptr<T>(out), x.size(0), size);
  });
  return out;
}

Tensor sigmoid_product(const Tensor& x_in, const Tensor& gate_in) {
  const Tensor x = dense_rows(x_in);
  const Tensor gate = dense_rows(gate_in.sizes() == x.sizes() ? gate_in : gate_in.expand_as(x));
  same(x, gate);
  Tensor out = empty(x.sizes(), x.scalar_type());
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    sigmoid_mul(rows_of<T>(x), rows_of<T>(gate), ptr<T>(out), x.numel() / x.size(-1), x.size(-1));
  });
  return out;
}

// Heads must lie side by side within a token; other layouts are copied.
Tensor dense_heads(const Tensor& t) {
  TORCH_CHECK(t.dim() == 3, "expected [T, heads, D], not ", t.sizes());
  return t.stride(2) == 1 && (t.stride(1) == t.size(2) || t.size(1) == 1) ? t : t.contiguous();
}

const int64_t* longs(const Tensor& t, int64_t count) {
  TORCH_CHECK(t.scalar_type() == at::kLong && t.is_contiguous() && t.numel() == count,
              "positions and places are dense int64, one per token");
  return ptr<int64_t>(t);
}

std::tuple<Tensor, Tensor> rotate(const Tensor& q_in, const Tensor& k_in, const Tensor& cos_sin,
                                  const Tensor& positions) {
  const Tensor q = dense_heads(q_in), k = dense_heads(k_in);
  TORCH_CHECK(cos_sin.scalar_type() == at::kFloat && cos_sin.is_contiguous() && cos_sin.size(1) <= q.size(2),
              "cos_sin must be dense float32 [max_len, R], R at most the head size");
  by_type(q.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    for (const Tensor* t : {&q, &k}) {
      rope(ptr<T>(*t), t->stride(0), t->size(1), t->size(2), ptr<float>(cos_sin), cos_sin.size(1),
           longs(positions, t->size(0)), t->size(0));
    }
  });
  return {q, k};
}

void write(const Tensor& x_in, const Tensor& cache, const Tensor& places, const std::optional<Tensor>& scales) {
  const Tensor x = dense_heads(x_in);
  const int64_t dim = x.size(2);
  const at::ScalarType kept = scales ? at::kFloat8_e4m3fn : x.scalar_type();
  TORCH_CHECK(dense_blocks(cache) && cache.size(1) == x.size(1) && cache.size(3) == dim && cache.scalar_type() == kept,
              "a KV cache must be [P, ", x.size(1), ", block, ", dim, "] of ", kept, ", dense within a block, not ",
              cache.sizes());
  if (scales) check_scales(*scales, cache);
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    const int64_t* at = longs(places, x.size(0));
    if (scales) {
      cache_write(ptr<T>(x), x.stride(0), x.size(1), dim, ptr<fp8>(cache), cache.stride(0), ptr<float>(*scales),
                  scales->stride(0), cache.size(2), at, x.size(0));
    } else {
      cache_write(ptr<T>(x), x.stride(0), x.size(1), dim, ptr<T>(cache), cache.stride(0), cache.size(2), at, x.size(0));
    }
  });
}

void kv_write(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& places,
              const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales) {
  write(k, k_cache, places, k_scales);
  write(v, v_cache, places, v_scales);
}

void copy_states(const std::vector<Tensor>& tensors, const Tensor& src, const Tensor& dst) {
  std::vector<Pool> pools;
  for (const Tensor& t : tensors) {
    TORCH_CHECK(t.size(0) == 0 || t.select(0, 0).is_contiguous(), "a pool must be dense within a slot");
    pools.push_back({static_cast<char*>(t.data_ptr()), t.stride(0) * t.element_size(),
                     t.numel() / std::max<int64_t>(t.size(0), 1) * t.element_size()});
  }
  TORCH_CHECK(src.numel() == dst.numel(), "src and dst differ in length");
  state_copy(pools.data(), int64_t(pools.size()), index(src), index(dst), src.numel());
}

}  // namespace rows_binding

inline void bind_rows(pybind11::module_& m) {
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  using Arg = pybind11::arg;
  m.def("rmsnorm", &rows_binding::norm, Release());
  m.def("add_rmsnorm", &rows_binding::add_norm, Release());
  m.def("gated_rmsnorm", &rows_binding::gated_norm, Arg("x"), Arg("gate"), Arg("weight"), Arg("eps"),
        Arg("gate_first") = false, Arg("sigmoid") = false, Release());
  m.def("mix_residuals", &rows_binding::mix, Release());
  m.def("silu_mul", &rows_binding::silu_product, Release());
  m.def("sigmoid_mul", &rows_binding::sigmoid_product, Release());
  m.def("rope", &rows_binding::rotate, Release());
  const auto store = [](const Tensor& x, const Tensor& cache, const Tensor& places) {
    rows_binding::write(x, cache, places, std::nullopt);
  };
  m.def("store_rows", store, Release());
  m.def("kv_write", &rows_binding::kv_write, Release());
  m.def("state_copy", &rows_binding::copy_states, Release());
}

}  // namespace forkpoint
