#pragma once

#include "attention.h"
#include "bind_verify.h"
#include "conv.h"
#include "pools.h"
#include "tensors.h"

namespace forkpoint {

namespace attention_binding {

void check_cache(const Tensor& c, at::ScalarType type, const char* name) {
  TORCH_CHECK(dense_blocks(c) && c.scalar_type() == type, name, " must be [P, Hkv, block, D] of ", type,
              ", dense within a block, not ", c.sizes(), " of ", c.scalar_type());
}

Tensor attend(const Tensor& q_in, const Tensor& k_cache, const Tensor& v_cache, int64_t num_decodes,
              const Tensor& cu_queries, const Tensor& kv_lens, const Tensor& block_table,
              const Tensor& table_rows, double scale, std::optional<int64_t> window, int64_t first_key,
              const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales,
              const std::optional<Tensor>& chosen, int64_t pool_size) {
  check_cache(k_cache, k_scales ? at::kFloat8_e4m3fn : q_in.scalar_type(), "k_cache");
  const bool latent = v_cache.data_ptr() == k_cache.data_ptr();  // values are the first dims of keys
  if (!latent) check_cache(v_cache, k_cache.scalar_type(), "v_cache");
  const Tensor q = q_in.stride(2) == 1 && q_in.stride(1) == q_in.size(2) ? q_in : q_in.contiguous();
  TORCH_CHECK(q.size(1) % k_cache.size(1) == 0 && q.size(1) / k_cache.size(1) <= 128 &&
                  q.size(2) == k_cache.size(3),
              "q ", q.sizes(), " does not fit keys ", k_cache.sizes());
  TORCH_CHECK(block_table.scalar_type() == at::kInt && (block_table.stride(1) == 1 || block_table.size(1) <= 1),
              "the block table is int32 with dense rows");
  Tensor out = empty({q.size(0), q.size(1), v_cache.size(3)}, q.scalar_type());
  by_type(q.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    const auto run = [&](auto* kept, const float* of_keys, const float* of_values, int64_t scale_stride) {
      using C = FORKPOINT_TYPE(kept);
      const Attention<T, C> all{ptr<T>(q), q.stride(0), ptr<T>(out), q.size(1), k_cache.size(1), q.size(2),
                                      v_cache.size(3), k_cache.size(2), ptr<C>(k_cache), ptr<C>(v_cache),
                                      k_cache.stride(0), v_cache.stride(0), v_cache.stride(2), of_keys, of_values, scale_stride,
                                      float(scale), window.value_or(0), first_key, kv_lens.size(0), num_decodes,
                                      index(cu_queries), index(kv_lens), ptr<int32_t>(block_table),
                                      index(table_rows), block_table.stride(0)};
      if (chosen) {
        pool_attention(all, ChosenPools{index(*chosen), chosen->size(1), pool_size});
      } else {
        paged_attention(all);
      }
    };
    if (k_scales) {
      check_scales(*k_scales, k_cache);
      check_scales(*v_scales, v_cache);
      TORCH_CHECK(k_scales->stride(0) == v_scales->stride(0), "scales of keys and values lie in the same blocks");
      run(static_cast<fp8*>(nullptr), ptr<float>(*k_scales), ptr<float>(*v_scales), k_scales->stride(0));
    } else {
      run(tag, nullptr, nullptr, 0);
    }
  });
  return out;
}

Tensor choose(const Tensor& q_in, const Tensor& weights_in, const Tensor& cache, const Tensor& cu_queries,
              const Tensor& kv_lens, const Tensor& block_table, const Tensor& table_rows, int64_t size, int64_t most) {
  const Tensor q = q_in.contiguous(), weights = weights_in.contiguous();
  check_cache(cache, q.scalar_type(), "the cache of index keys");
  TORCH_CHECK(q.dim() == 3 && weights.sizes() == q.sizes().slice(0, 2) && weights.scalar_type() == at::kFloat &&
                  cache.size(1) == 1 && cache.size(3) * size == q.size(2),
              "q ", q.sizes(), ", weights ", weights.sizes(), " and index keys ", cache.sizes(), " of pools of ", size,
              " tokens do not fit");
  Tensor chosen = empty({q.size(0), most}, at::kInt);
  std::fill_n(ptr<int32_t>(chosen), chosen.numel(), -1);
  by_type(q.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    choose_pools(PoolIndex<T>{ptr<T>(q), ptr<float>(weights), q.size(1), q.size(2), ptr<T>(cache), cache.stride(0),
                              cache.size(2) / size, size, most, kv_lens.size(0), index(cu_queries), index(kv_lens),
                              ptr<int32_t>(block_table), index(table_rows), block_table.stride(0), ptr<int32_t>(chosen)});
  });
  return chosen;
}

// A conv layer's weight as [W, D] fp32, made once.
struct Taps {
  Tensor weight, bias;
  int64_t dim, width;
};

Taps make_taps(const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) <= MAX_TAPS, "a conv weight is [D, W], W at most ", MAX_TAPS,
              ", not ", weight.sizes());
  return {weight.t().to(at::kFloat).contiguous(), bias ? bias->to(at::kFloat).contiguous() : Tensor(), weight.size(0),
          weight.size(1)};
}

template <class F>
Tensor convolve(const Tensor& x_in, const Taps& taps, const Tensor& pool, bool silu, const F& fn) {
  const Tensor x = dense_rows(x_in);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == taps.dim, "conv: x is ", x.sizes(), ", the weight has D=", taps.dim);
  TORCH_CHECK(pool.dim() == 3 && pool.size(1) == taps.width - 1 && pool.size(2) == taps.dim && pool.stride(2) == 1 &&
                  pool.stride(1) == taps.dim && pool.scalar_type() == x.scalar_type(),
              "the conv pool must be [P, W-1, D] of ", x.scalar_type(), ", dense within a slot, not ", pool.sizes());
  Tensor out = empty(x.sizes(), x.scalar_type());
  by_type(x.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    fn(Conv<T>{ptr<T>(x), x.stride(0), ptr<T>(out), taps.dim, taps.width, ptr<float>(taps.weight),
               taps.bias.defined() ? ptr<float>(taps.bias) : nullptr, ptr<T>(pool), pool.stride(0), silu});
  });
  return out;
}

// The lines of raw inputs [L, M, D].
template <class T>
InputRecords<T> records_of(const Conv<T>& conv, const Tensor& inputs) {
  TORCH_CHECK(inputs.is_contiguous() && inputs.dim() == 3 && inputs.size(2) == conv.dim && inputs.element_size() == sizeof(T),
              "records of inputs must be dense [L, M, ", conv.dim, "], not ", inputs.sizes());
  return {ptr<T>(inputs), inputs.size(1)};
}

Tensor prefill(const Tensor& x, const Taps& taps, const Tensor& pool, bool silu, const Tensor& cu_seqlens,
               const Tensor& src, const Tensor& dst, const Tensor& save_ptr, const Tensor& save_pos,
               const Tensor& save_dst) {
  const Segments segments{src.size(0),    index(cu_seqlens), index(src),    index(dst),
                          index(save_ptr), index(save_pos),    index(save_dst)};
  return convolve(x, taps, pool, silu, [&](const auto& conv) { conv_prefill(conv, segments); });
}

Tensor update(const Tensor& x, const Taps& taps, const Tensor& pool, bool silu, const Tensor& src, const Tensor& dst) {
  return convolve(x, taps, pool, silu,
                  [&](const auto& conv) { conv_update(conv, x.size(0), index(src), index(dst)); });
}

Tensor verify(const Tensor& x, const Taps& taps, const Tensor& pool, bool silu, const std::vector<Tensor>& columns,
              const Tensor& inputs) {
  const VerifyRows rows = verify_rows(columns);
  return convolve(x, taps, pool, silu, [&](const auto& conv) {
    conv_verify(conv, records_of(conv, inputs), rows);
  });
}

void fold(const Tensor& pool, const std::vector<Tensor>& columns, const Tensor& inputs) {
  const VerifyRows rows = verify_rows(columns);
  by_type(pool.scalar_type(), [&](auto* tag) {
    using T = FORKPOINT_TYPE(tag);
    const int64_t dim = pool.size(2), width = pool.size(1) + 1;
    const Conv<T> conv{nullptr, 0, nullptr, dim, width, nullptr, nullptr, ptr<T>(pool), pool.stride(0), false};
    conv_fold(conv, records_of(conv, inputs), rows);
  });
}

}  // namespace attention_binding

inline void bind_attention(pybind11::module_& m) {
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<attention_binding::Taps>(m, "ConvTaps").def(pybind11::init(&attention_binding::make_taps));
  m.def("paged_attention", &attention_binding::attend, Release());
  m.def("choose_pools", &attention_binding::choose, Release());
  m.def("conv_prefill", &attention_binding::prefill, Release());
  m.def("conv_update", &attention_binding::update, Release());
  m.def("conv_verify", &attention_binding::verify, Release());
  m.def("conv_fold", &attention_binding::fold, Release());
}

}  // namespace forkpoint
