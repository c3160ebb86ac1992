#include "rows.h"

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t GRAIN = 32768;  // elements that are worth a thread

constexpr float LEAST_AMAX = 1e-12f;  // so that heads of zeros have a scale to divide by

int64_t grain(int64_t size) { return std::max<int64_t>(1, GRAIN / std::max<int64_t>(size, 1)); }

template <class T>
vf factor(const T* x, float eps, int64_t size) {
  vf squares = {};
  for (int64_t i = 0; i < size; i += LANES) {
    const vf v = load_n(x + i, size - i);
    squares += v * v;
  }
  return splat(1.0f / std::sqrt(sum(squares) / float(size) + eps));
}

template <class X, class T>
void norm_row(const X* x, const float* weight, float eps, T* out, int64_t size) {
  const vf f = factor(x, eps, size);
  for (int64_t i = 0; i < size; i += LANES) {
    const int64_t left = size - i;
    store_n(out + i, load_n(x + i, left) * f * load_n(weight + i, left), left);
  }
}

}  // namespace

template <class T>
void rmsnorm(Rows<const T> x, const float* weight, float eps, T* out, int64_t count, int64_t size) {
  parallel_ranges(count, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) norm_row(x.row(r), weight, eps, out + r * size, size);
  });
}

template <class T>
void add_rmsnorm(Rows<const T> x, Rows<const T> residual, const float* weight, float eps, T* total, T* out,
                 int64_t count, int64_t size) {
  parallel_ranges(count, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *a = x.row(r), *b = residual.row(r);
      T* t = total + r * size;
      for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        store_n(t + i, load_n(a + i, left) + load_n(b + i, left), left);
      }
      norm_row(t, weight, eps, out + r * size, size);
    }
  });
}

template <class T>
void gated_rmsnorm(Rows<const T> x, Rows<const T> gate, const float* weights, float eps, const GatedNorm& form, T* out,
                   int64_t count, int64_t size) {
  const auto factor_of = [&](vf g) { return form.sigmoid ? sigmoid(g) : silu(g); };
  parallel_ranges(count, grain(size), [&](int64_t begin, int64_t end) {
    Buffer<float> gated(form.gate_first ? round_up(size) : 0);
    for (int64_t r = begin; r < end; ++r) {
      const T *a = x.row(r), *g = gate.row(r);
      const float* weight = weights + r % form.heads * form.weight_stride;
      if (form.gate_first) {
        for (int64_t i = 0; i < size; i += LANES) {
          store(gated + i, load_n(a + i, size - i) * factor_of(load_n(g + i, size - i)));
        }
        norm_row<float>(gated, weight, eps, out + r * size, size);
        continue;
      }
      const vf f = factor(a, eps, size);
      for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        const vf v = load_n(a + i, left) * f * load_n(weight + i, left) * factor_of(load_n(g + i, left));
        store_n(out + r * size + i, v, left);
      }
    }
  });
}

template <class T>
void mix_residuals(const Residuals<T>& residuals, const float* weight, float eps, T* out, int64_t tokens, int64_t size) {
  const int64_t count = residuals.count + (residuals.current != nullptr);
  parallel_ranges(tokens, grain(size * count), [&](int64_t begin, int64_t end) {
    Buffer<float> shares(count), mixed(round_up(size));
    for (int64_t t = begin; t < end; ++t) {
      const auto source = [&](int64_t n) {
        if (n == residuals.count) return residuals.current + t * residuals.current_stride;
        return residuals.done + n * residuals.source_stride + t * residuals.token_stride;
      };
      float most = -INFINITY, total = 0;
      for (int64_t n = 0; n < count; ++n) {
        const T* x = source(n);
        vf dot = {};
        for (int64_t i = 0; i < size; i += LANES) dot += load_n(x + i, size - i) * load_n(weight + i, size - i);
        shares[n] = sum(dot) * factor(x, eps, size)[0];
        most = std::max(most, shares[n]);
      }
      for (int64_t n = 0; n < count; ++n) total += shares[n] = std::exp(shares[n] - most);
      for (int64_t n = 0; n < count; ++n) {
        const T* x = source(n);
        for (int64_t i = 0; i < size; i += LANES) {
          const vf part = load_n(x + i, size - i) * (shares[n] / total);
          store(mixed + i, n ? load(mixed + i) + part : part);
        }
      }
      for (int64_t i = 0; i < size; i += LANES) store_n(out + t * size + i, load(mixed + i), size - i);
    }
  });
}

template <class T>
void silu_mul(Rows<const T> gate, Rows<const T> up, T* out, int64_t count, int64_t size) {
  parallel_ranges(count, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *g = gate.row(r), *u = up.row(r);
      for (int64_t i = 0; i < size; i += LANES) {
        store_n(out + r * size + i, silu(load_n(g + i, size - i)) * load_n(u + i, size - i), size - i);
      }
    }
  });
}

template <class T>
void sigmoid_mul(Rows<const T> x, Rows<const T> gate, T* out, int64_t count, int64_t size) {
  parallel_ranges(count, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *a = x.row(r), *g = gate.row(r);
      for (int64_t i = 0; i < size; i += LANES) {
        store_n(out + r * size + i, load_n(a + i, size - i) * sigmoid(load_n(g + i, size - i)), size - i);
      }
    }
  });
}

template <class T>
void rope(T* x, int64_t token_stride, int64_t heads, int64_t dim, const float* cos_sin, int64_t rotated,
          const int64_t* positions, int64_t tokens) {
  const int64_t half = rotated / 2;
  parallel_ranges(tokens, grain(heads * rotated), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *cos = cos_sin + positions[t] * rotated, *sin = cos + half;
      for (int64_t h = 0; h < heads; ++h) {
        T* row = x + t * token_stride + h * dim;
        for (int64_t i = 0; i < half; i += LANES) {
          const int64_t left = half - i;
          const vf a = load_n(row + i, left), b = load_n(row + half + i, left);
          const vf c = load_n(cos + i, left), s = load_n(sin + i, left);
          store_n(row + i, a * c - b * s, left);
          store_n(row + half + i, b * c + a * s, left);
        }
      }
    }
  });
}

template <class T>
void cache_write(const T* x, int64_t token_stride, int64_t heads, int64_t dim, T* cache, int64_t block_stride,
                 int64_t block_size, const int64_t* places, int64_t tokens) {
  parallel_ranges(tokens, grain(heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (places[t] < 0) continue;
      T* block = cache + places[t] / block_size * block_stride + places[t] % block_size * dim;
      for (int64_t h = 0; h < heads; ++h) {
        std::memcpy(block + h * block_size * dim, x + t * token_stride + h * dim, size_t(dim) * sizeof(T));
      }
    }
  });
}

template <class T>
void cache_write(const T* x, int64_t token_stride, int64_t heads, int64_t dim, fp8* cache, int64_t block_stride,
                 float* scales, int64_t scale_stride, int64_t block_size, const int64_t* places, int64_t tokens) {
  parallel_ranges(tokens, grain(heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (places[t] < 0) continue;
      const int64_t block = places[t] / block_size, offset = places[t] % block_size;
      for (int64_t h = 0; h < heads; ++h) {
        const T* row = x + t * token_stride + h * dim;
        vf top = {};
        for (int64_t d = 0; d < dim; d += LANES) {
          const vf v = load_n(row + d, dim - d);
          top = max(v > -v ? v : -v, top);
        }
        const float scale = std::max(max_lane(top), LEAST_AMAX) / FP8_MAX;
        fp8* out = cache + block * block_stride + (h * block_size + offset) * dim;
        for (int64_t d = 0; d < dim; d += LANES) store_n(out + d, load_n(row + d, dim - d) / scale, dim - d);
        scales[block * scale_stride + h * block_size + offset] = scale;
      }
    }
  });
}

void state_copy(const Pool* pools, int64_t num_pools, const int32_t* src, const int32_t* dst, int64_t count) {
  parallel_tasks(num_pools * count, [&](int64_t task) {
    const Pool& pool = pools[task / count];
    const int32_t from = src[task % count], to = dst[task % count];
    if (to < 0 || from == to) return;
    char* target = pool.data + to * pool.stride;
    if (from < 0) {
      std::memset(target, 0, size_t(pool.bytes));
    } else {
      std::memcpy(target, pool.data + from * pool.stride, size_t(pool.bytes));
    }
  });
}

#define FORKPOINT_ROWS(T)                                                                                            \
  template void rmsnorm(Rows<const T>, const float*, float, T*, int64_t, int64_t);                                   \
  template void add_rmsnorm(Rows<const T>, Rows<const T>, const float*, float, T*, T*, int64_t, int64_t);            \
  template void gated_rmsnorm(Rows<const T>, Rows<const T>, const float*, float, const GatedNorm&, T*, int64_t, int64_t); \
  template void mix_residuals(const Residuals<T>&, const float*, float, T*, int64_t, int64_t);                       \
  template void silu_mul(Rows<const T>, Rows<const T>, T*, int64_t, int64_t);                                        \
  template void sigmoid_mul(Rows<const T>, Rows<const T>, T*, int64_t, int64_t);                                     \
  template void rope(T*, int64_t, int64_t, int64_t, const float*, int64_t, const int64_t*, int64_t);                 \
  template void cache_write(const T*, int64_t, int64_t, int64_t, T*, int64_t, int64_t, const int64_t*, int64_t);       \
  template void cache_write(const T*, int64_t, int64_t, int64_t, fp8*, int64_t, float*, int64_t, int64_t,              \
                            const int64_t*, int64_t);
FORKPOINT_ROWS(float)
FORKPOINT_ROWS(bf16)

}  // namespace forkpoint
