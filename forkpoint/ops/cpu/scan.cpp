// Tokens one after another: a token's bits are the same in a long segment, behind a cut, and alone as a decode row.
#include "scan.h"

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t CHANNELS = 32;  // of one task
constexpr int64_t STORED = 64;    // tokens after which a state may be stored, and resumed from

template <class T>
const T* at(const ScanRows<T>& rows, int64_t token) {
  return rows.data + token * rows.stride;
}

// One token of channels [first, last); `state` and A rows are padded to `width`.
template <class T>
void step(const Scan<T>& in, int64_t token, int64_t first, int64_t last, int64_t width, float* state) {
  const T *x = at(in.x, token), *dt = at(in.dt, token), *z = at(in.z, token), *b = at(in.b, token), *c = at(in.c, token);
  alignas(64) float y[CHANNELS], gate[CHANNELS];
  for (int64_t d = first; d < last; ++d) {
    const float s = softplus(to_float(dt[d]) + in.dt_bias[d]), value = to_float(x[d]);
    const vf amount = splat(s * value);
    float* row = state + (d - first) * width;
    vf total = {};
    for (int64_t i = 0; i < in.values; i += LANES) {
      const vf next = exp(s * load(in.A + d * width + i)) * load(row + i) + amount * load_n(b + i, in.values - i);
      store(row + i, next);
      total += next * load_n(c + i, in.values - i);
    }
    y[d - first] = sum(total) + in.skip[d] * value;
    gate[d - first] = to_float(z[d]);
  }
  T* out = in.out + token * in.dim + first;
  for (int64_t d = 0; d < last - first; d += LANES) store_n(out + d, load(y + d) * silu(load(gate + d)), last - first - d);
}

}  // namespace

template <class T, class S>
void scan(const Scan<T>& in, S* pool, int64_t pool_stride, const Segments& segments) {
  const int64_t pieces = (in.dim + CHANNELS - 1) / CHANNELS, width = round_up(in.values);
  parallel_tasks(segments.count * pieces, [&](int64_t task) {
    const int64_t n = task / pieces, first = task % pieces * CHANNELS, last = std::min(first + CHANNELS, in.dim);
    Buffer<float> state(CHANNELS * width);
    const auto slot = [&](int32_t index, int64_t d) { return pool + index * pool_stride + d * in.values; };
    const auto keep = [&](int32_t index) {
      if (index < 0) return;
      for (int64_t d = first; d < last; ++d) {
        for (int64_t i = 0; i < in.values; i += LANES) {
          store_n(slot(index, d) + i, load(state + (d - first) * width + i), in.values - i);
        }
      }
    };
    for (int64_t d = first; d < last; ++d) {
      for (int64_t i = 0; i < in.values; i += LANES) {
        const bool old = segments.src[n] >= 0;
        store(state + (d - first) * width + i, old ? load_n(slot(segments.src[n], d) + i, in.values - i) : (vf){});
      }
    }
    const int64_t begin = segments.cu_seqlens[n], length = segments.cu_seqlens[n + 1] - begin;
    int64_t e = segments.save_ptr ? segments.save_ptr[n] : 0;
    const int64_t last_save = segments.save_ptr ? segments.save_ptr[n + 1] : 0;
    for (int64_t t = 0; t < length; ++t) {
      step(in, begin + t, first, last, width, state);
      if ((t + 1) % STORED == 0) pass_through<S>(state, CHANNELS * width);  // as if it were stored and resumed from here
      for (; e < last_save && segments.save_pos[e] == t + 1; ++e) keep(segments.save_dst[e]);
    }
    keep(segments.dst[n]);
  });
}

#define FORKPOINT_SCAN(T, S) template void scan(const Scan<T>&, S*, int64_t, const Segments&);
FORKPOINT_SCAN(float, float)
FORKPOINT_SCAN(bf16, float)
FORKPOINT_SCAN(float, bf16)
FORKPOINT_SCAN(bf16, bf16)

}  // namespace forkpoint
