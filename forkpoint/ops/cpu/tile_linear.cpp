#include "tile_linear.h"

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t STRIP = 32;              // rows of x that are multiplied at once, in two tiles
constexpr int64_t ROW_BLOCK = 8 * STRIP;   // rows of x of a task: they stay in L2 next to PANELS panels
constexpr int64_t PANELS = 8;              // panels that a strip is multiplied by before its sums are stored
constexpr int64_t DEPTH = 8 * TILE_DEPTH;  // columns of a strip that stay in L1 (16 KiB) while these panels use them

// y = x W, where rows of x have padded_k values.
struct Problem {
  const bf16* x;
  int64_t ldx;
  const PackedWeight& w;
  bf16* y;
  int64_t ldy;

  // Returns panels [begin, end) as pairs of bf16. Quantised weights are rounded into `wide`.
  const uint32_t* panel_pairs(int64_t begin, int64_t end, uint32_t* wide) const {
    if (w.type == WeightType::bf16) return static_cast<const uint32_t*>(w.data) + begin * w.padded_k / 2 * PANEL;
    alignas(64) float block[K_BLOCK * PANEL];
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t k = 0; k < w.padded_k; k += K_BLOCK) {
        const int64_t count = std::min<int64_t>(K_BLOCK, w.padded_k - k);
        const float* values = panel_block(w, panel, k, count, block);
        round_pairs(values, count, wide + ((panel - begin) * w.padded_k + k) / 2 * PANEL);
      }
    }
    return wide;
  }

  // Computes y of rows [m0, m1) and panels [p0, p1).
  void multiply(int64_t m0, int64_t m1, int64_t p0, int64_t p1) const {
    const int64_t groups = (p1 - p0 + PANELS - 1) / PANELS, whole = m1 - (m1 - m0) % STRIP;
    Buffer<float> sums(PANELS * STRIP * PANEL);
    Buffer<uint32_t> wide(w.type == WeightType::bf16 ? 0 : PANELS * w.padded_k / 2 * PANEL);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = p0 + (p1 - p0) * g / groups, end = p0 + (p1 - p0) * (g + 1) / groups;
      const uint32_t* pairs = panel_pairs(begin, end, wide);
      if (m0 < whole) {
        const TileScope scope(STRIP);
        for (int64_t r = m0; r < whole; r += STRIP) multiply_strip(r, STRIP, pairs, DEPTH, begin, end, sums);
      }
      if (whole < m1) {
        const TileScope scope(m1 - whole);
        multiply_strip(whole, m1 - whole, pairs, m0 < whole ? DEPTH : w.padded_k, begin, end, sums);
      }
    }
  }

  // Computes y of rows [r, r + count), up to STRIP, and panels [begin, end), which `pairs` holds. All these panels use
  // `depth` columns of x before any uses the next ones.
  void multiply_strip(int64_t r, int64_t count, const uint32_t* pairs, int64_t depth, int64_t begin, int64_t end,
                      float* sums) const {
    for (int64_t k = 0; k < w.padded_k; k += depth) {
      for (int64_t i = 0; i < end - begin; ++i) {
        multiply_rows(x + r * ldx + k, ldx, count, pairs + (i * w.padded_k + k) / 2 * PANEL,
                       std::min(depth, w.padded_k - k), sums + i * STRIP * PANEL, k > 0);
      }
    }
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t i = 0; i < end - begin; ++i) {
        store_outputs(w, sums + (i * STRIP + row) * PANEL, (begin + i) * PANEL, y + (r + row) * ldy);
      }
    }
  }
};

}  // namespace

void tile_linear(const bf16* x, int64_t ldx, const int32_t* rows, const PackedWeight& w, bf16* y, int64_t ldy, int64_t m,
                 bool parallel) {
  const bool copies = rows || w.k < w.padded_k;
  Buffer<bf16> copy(copies ? m * w.padded_k : 0);
  if (copies) {
    for (int64_t r = 0; r < m; ++r) {
      bf16* to = copy + r * w.padded_k;
      std::memcpy(to, x + (rows ? rows[r] : r) * ldx, size_t(w.k) * sizeof(bf16));
      std::memset(to + w.k, 0, size_t(w.padded_k - w.k) * sizeof(bf16));
    }
  }
  const Problem p{copies ? copy : x, copies ? w.padded_k : ldx, w, y, ldy};
  const int64_t panels = w.panels(), blocks = (m + ROW_BLOCK - 1) / ROW_BLOCK;
  if (!parallel) {
    for (int64_t r = 0; r < m; r += ROW_BLOCK) p.multiply(r, std::min(m, r + ROW_BLOCK), 0, panels);
  } else if (m <= STRIP) {  // each thread reads the weights from one place on
    const int64_t grain = std::max<int64_t>(1, 16384 / w.padded_k);
    parallel_ranges(panels, grain, [&](int64_t a, int64_t b) { p.multiply(0, m, a, b); });
  } else {
    const int64_t columns = std::clamp<int64_t>(4 * num_threads() / blocks, 1, panels);
    parallel_tasks(blocks * columns, [&](int64_t task) {
      const int64_t r = task / columns * ROW_BLOCK, c = task % columns;
      p.multiply(r, std::min(m, r + ROW_BLOCK), panels * c / columns, panels * (c + 1) / columns);
    });
  }
}

}  // namespace forkpoint
