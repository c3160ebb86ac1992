#include "linear.h"

#include "parallel.h"
#include "tile.h"
#include "tile_linear.h"

namespace forkpoint {

namespace {

constexpr int64_t ROW_BLOCK = 168;       // rows of x whose fp32 copy stays in L2
constexpr int64_t MAX_TASK_PANELS = 16;  // columns of one task, in panels

template <class T>
struct Problem {
  const T* x;
  int64_t ldx;
  const int32_t* rows;
  const PackedWeight& w;
  T* y;
  int64_t ldy;

  const T* row(int64_t m) const { return x + (rows ? rows[m] : m) * ldx; }
};

// Whether x and the weights are multiplied as pairs of bf16; otherwise x is widened to fp32.
template <class T>
bool in_pairs(const PackedWeight& w) {
  return MULTIPLIES_PAIRS && std::is_same_v<T, bf16> && w.type == WeightType::bf16;
}

// out[0, padded) = x[0, k), zeros behind, in the form in which tiles read it.
template <class T>
void copy_row(const PackedWeight& w, const T* x, float* out, int64_t k, int64_t padded) {
  if (in_pairs<T>(w)) {
    T* pairs = reinterpret_cast<T*>(out);
    std::memcpy(pairs, x, size_t(k) * sizeof(T));
    std::memset(pairs + k, 0, size_t(padded - k) * sizeof(T));
    return;
  }
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) store(out + i, load(x + i));
  if (i < k) {
    store(out + i, load_part(x + i, k - i));
    i += LANES;
  }
  for (; i < padded; i += LANES) store(out + i, (vf){});
}

const float* f32_panel(const PackedWeight& w, int64_t panel) {
  return static_cast<const float*>(w.data) + panel * w.padded_k * PANEL;
}
const fp8* fp8_panel(const PackedWeight& w, int64_t panel) {
  return static_cast<const fp8*>(w.data) + panel * w.padded_k * PANEL;
}
const float* panel_scales(const PackedWeight& w, int64_t panel) {
  return w.scales + panel * scale_blocks(w.k) * PANEL;
}
const uint32_t* bf16_panel(const PackedWeight& w, int64_t panel) {
  return static_cast<const uint32_t*>(w.data) + panel * (w.padded_k / 2) * PANEL;
}

// A few rows, cut into K_BLOCK pieces: weights are read once, straight from memory, and the accumulators never
// leave registers (fp32 weights: rest in L1 between pieces).
template <class T>
void few_rows(const Problem<T>& p, const float* xf, int64_t m, int64_t first, int64_t last) {
  alignas(64) float c[FEW_ROWS * PANEL];
  for (int64_t panel = first; panel < last; ++panel) {
    if (p.w.type == WeightType::f32) {
      for (int64_t k0 = 0; k0 < p.w.padded_k; k0 += K_BLOCK) {
        const int64_t kc = std::min<int64_t>(K_BLOCK, p.w.padded_k - k0);
        const float* piece = xf + k0 / K_BLOCK * m * ROW_STRIDE;
        tile_rows(int(m), piece, f32_panel(p.w, panel) + k0 * PANEL, c, kc, k0 > 0);
      }
    } else if (p.w.type == WeightType::fp8) {
      tile_rows_fp8(int(m), xf, fp8_panel(p.w, panel), panel_scales(p.w, panel), c, p.w.padded_k);
    } else if (p.w.type == WeightType::four_bits) {
      tile_rows_four_bits(int(m), xf, p.w.four, panel, c);
    } else {
      const uint32_t* source = bf16_panel(p.w, panel);
      if (in_pairs<T>(p.w)) {
        tile_rows_pairs(int(m), xf, source, c, p.w.padded_k, false);
      } else if (std::is_same_v<T, bf16> && has_matrix_tiles()) {
        const FlushScope flush;
        tile_rows_as_tiles(int(m), xf, source, c, p.w.padded_k);
      } else {
        tile_rows_bf16(int(m), xf, source, c, p.w.padded_k);
      }
    }
    for (int64_t r = 0; r < m; ++r) store_outputs(p.w, c + r * PANEL, panel * PANEL, p.y + r * p.ldy);
  }
}

struct Workspace {
  Buffer<float> x, wide, c;
  explicit Workspace(int64_t rows, int64_t panels)
      : x(rows * ROW_STRIDE), wide(K_BLOCK * PANEL), c(rows * panels * PANEL) {}
};

// Rows [m0, m1) x panels [p0, p1), blocked over k; partial sums rest in fp32, which keeps each chain whole.
template <class T>
void block(const Problem<T>& p, int64_t m0, int64_t m1, int64_t p0, int64_t p1, Workspace& work) {
  const int64_t rows = m1 - m0, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t k0 = 0; k0 < p.w.padded_k; k0 += K_BLOCK) {
    const int64_t kc = std::min<int64_t>(K_BLOCK, p.w.padded_k - k0);
    const int64_t valid = std::max<int64_t>(0, std::min(kc, p.w.k - k0));
    for (int64_t r = 0; r < rows; ++r) copy_row(p.w, p.row(m0 + r) + k0, work.x + r * ROW_STRIDE, valid, kc);
    for (int64_t panel = p0; panel < p1; ++panel) {
      const float* w = in_pairs<T>(p.w) ? nullptr : panel_block(p.w, panel, k0, kc, work.wide);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t r0 = rows * t / tiles, r1 = rows * (t + 1) / tiles;
        const float* x = work.x + r0 * ROW_STRIDE;
        float* c = work.c + ((panel - p0) * rows + r0) * PANEL;
        if (in_pairs<T>(p.w)) {
          tile_rows_pairs(int(r1 - r0), x, bf16_panel(p.w, panel) + k0 / 2 * PANEL, c, kc, k0 > 0);
        } else {
          tile_rows(int(r1 - r0), x, w, c, kc, k0 > 0);
        }
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t panel = p0; panel < p1; ++panel) {
      store_outputs(p.w, work.c + ((panel - p0) * rows + r) * PANEL, panel * PANEL, p.y + (m0 + r) * p.ldy);
    }
  }
}

template <class T>
void run_few(const Problem<T>& p, int64_t m, bool parallel) {
  if (m == 0) return;
  const int64_t pieces = (p.w.padded_k + K_BLOCK - 1) / K_BLOCK;
  Buffer<float> buffer(pieces * m * ROW_STRIDE);
  float* xf = buffer;
  for (int64_t i = 0; i < pieces * m; ++i) {
    const int64_t k0 = i / m * K_BLOCK;
    const int64_t valid = std::clamp<int64_t>(p.w.k - k0, 0, K_BLOCK);
    copy_row(p.w, p.row(i % m) + k0, xf + i * ROW_STRIDE, valid, std::min<int64_t>(K_BLOCK, p.w.padded_k - k0));
  }
  if (!parallel) return few_rows(p, xf, m, 0, p.w.panels());
  const int64_t grain = std::max<int64_t>(1, 16384 / (p.w.padded_k * m));
  parallel_ranges(p.w.panels(), grain, [&](int64_t a, int64_t b) { few_rows(p, xf, m, a, b); });
}

}  // namespace

const float* panel_block(const PackedWeight& w, int64_t panel, int64_t k0, int64_t kc, float* wide) {
  if (w.type == WeightType::f32) return f32_panel(w, panel) + k0 * PANEL;
  if (w.type == WeightType::four_bits) {
    widen_four_bits(w.four, panel, k0, kc, wide);
    return wide;
  }
  if (w.type == WeightType::fp8) {
    const fp8* source = fp8_panel(w, panel) + k0 * PANEL;
    const float* scales = panel_scales(w, panel) + k0 / K_BLOCK * PANEL;
    for (int64_t i = 0; i < kc * PANEL; i += LANES) {
      store(wide + i, load_shifted(source + i) * (load(scales + i % PANEL) * FP8_SHIFT));
    }
    return wide;
  }
  const uint32_t* source = bf16_panel(w, panel) + k0 / 2 * PANEL;
  for (int64_t k = 0; k < kc; k += 2, source += PANEL, wide += 2 * PANEL) {
    for (int half = 0; half < PANEL; half += LANES) {
      vu pair;
      __builtin_memcpy(&pair, source + half, sizeof pair);
      store(wide + half, (vf)(pair << 16));
      store(wide + PANEL + half, (vf)(pair & 0xffff0000u));
    }
  }
  return wide - kc * PANEL;
}

int64_t packed_elements(int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * PANEL * padded_k(k); }

template <class T>
void pack_weight(const T* weight, int64_t ld, int64_t n, int64_t k, T* out) {
  const int64_t kp = padded_k(k), group = sizeof(T) == 2 ? 2 : 1;
  parallel_tasks((n + PANEL - 1) / PANEL, [&](int64_t panel) {
    T* base = out + panel * kp * PANEL;
    for (int64_t col = 0; col < PANEL; ++col) {
      const int64_t row = panel * PANEL + col;
      for (int64_t i = 0; i < kp; ++i) {
        base[i / group * group * PANEL + col * group + i % group] = row < n && i < k ? weight[row * ld + i] : T{};
      }
    }
  });
}

void pack_fp8(const ScaledCodes& weight, fp8* out, float* scales) {
  static_assert(K_BLOCK == 128, "a piece of K has one scale");
  const int64_t kp = padded_k(weight.k), blocks = scale_blocks(weight.k), columns = weight.blocked ? blocks : 1;
  parallel_tasks((weight.n + PANEL - 1) / PANEL, [&](int64_t panel) {
    for (int64_t col = 0; col < PANEL; ++col) {
      const int64_t row = panel * PANEL + col;
      for (int64_t i = 0; i < kp; ++i) {
        const bool inside = row < weight.n && i < weight.k;
        out[(panel * kp + i) * PANEL + col] = inside ? weight.codes[row * weight.k + i] : fp8{};
      }
      for (int64_t b = 0; b < blocks; ++b) {
        const float* own = weight.scales + row / weight.rows * columns;
        scales[(panel * blocks + b) * PANEL + col] = row < weight.n ? own[weight.blocked ? b : 0] : 0.0f;
      }
    }
  });
}

template <class T>
void linear(const T* x, int64_t ldx, const PackedWeight& w, T* y, int64_t ldy, int64_t m) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (in_tiles(w, m)) return tile_linear(x, ldx, nullptr, w, y, ldy, m, true);
  }
  const Problem<T> p{x, ldx, nullptr, w, y, ldy};
  if (m <= FEW_ROWS) return run_few(p, m, true);
  const int64_t blocks = (m + ROW_BLOCK - 1) / ROW_BLOCK, panels = w.panels();
  const int64_t wanted = panels * blocks / (int64_t(num_threads()) * 8);
  const int64_t width = std::clamp<int64_t>(wanted, 1, MAX_TASK_PANELS);
  const int64_t columns = (panels + width - 1) / width;
  parallel_tasks(blocks * columns, [&](int64_t task) {
    const int64_t b = task / columns, c = task % columns;
    const int64_t m0 = m * b / blocks, m1 = m * (b + 1) / blocks;
    Workspace work(m1 - m0, width);
    block(p, m0, m1, panels * c / columns, panels * (c + 1) / columns, work);
  });
}

template <class T>
void linear_serial(const T* x, int64_t ldx, const int32_t* rows, const PackedWeight& w, T* y, int64_t ldy, int64_t m) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (in_tiles(w, m)) return tile_linear(x, ldx, rows, w, y, ldy, m, false);
  }
  const Problem<T> p{x, ldx, rows, w, y, ldy};
  if (m <= FEW_ROWS) return run_few(p, m, false);
  Workspace work(std::min(m, ROW_BLOCK), std::min(w.panels(), MAX_TASK_PANELS));
  for (int64_t m0 = 0; m0 < m; m0 += ROW_BLOCK) {
    for (int64_t c = 0; c < w.panels(); c += MAX_TASK_PANELS) {
      block(p, m0, std::min(m, m0 + ROW_BLOCK), c, std::min(w.panels(), c + MAX_TASK_PANELS), work);
    }
  }
}

#define FORKPOINT_LINEAR(T)                                                                  \
  template void pack_weight<T>(const T*, int64_t, int64_t, int64_t, T*);                     \
  template void linear<T>(const T*, int64_t, const PackedWeight&, T*, int64_t, int64_t);     \
  template void linear_serial<T>(const T*, int64_t, const int32_t*, const PackedWeight&, T*, \
                                 int64_t, int64_t);
FORKPOINT_LINEAR(float)
FORKPOINT_LINEAR(bf16)

}  // namespace forkpoint
