#include "tile_linear.h"

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t STRIP = 32;                    // rows of x that are multiplied at once, in two tiles
constexpr int64_t L2_VALUES = 400 * 1024;        // of x: a task's rows (800 KiB) stay in L2 next to PANELS panels
constexpr int64_t LEAST_ROWS = 8 * STRIP;        // of a task, so that it reads its weights for many rows
constexpr int64_t PANELS = 4;                    // panels that a strip is multiplied by before its sums are stored
constexpr int64_t DEPTH = 8 * TILE_DEPTH;        // columns of a strip that stay in L1 (16 KiB) while these panels use them
constexpr int64_t STREAM_BYTES = 2 * 1024 * 1024;  // outputs of so many bytes bypass caches, which then need not read them

// y[0, 32) = v in bf16, past the caches. y is on a cache line.
inline void stream(bf16* y, const vf* v) {
#ifdef FORKPOINT_ROUNDS_BF16
  _mm512_stream_si512(reinterpret_cast<__m512i*>(y), (__m512i)_mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]));
#else
  __builtin_trap();  // only processors with tiles get here
#endif
}

// Other threads see what this one has streamed.
inline void end_streams() {
#ifdef FORKPOINT_ROUNDS_BF16
  _mm_sfence();
#endif
}

// y = x W or, `gated`, y = silu(x G) * (x U), where the panels of W are those of G and then as many of U.
struct Problem {
  const bf16* x;
  int64_t ldx;
  const int32_t* rows;
  const PackedWeight& w;
  bf16* y;
  int64_t ldy;
  bool gated, streams;  // `streams`: y is stored past the caches

  int64_t panels() const { return gated ? w.panels() / 2 : w.panels(); }  // of y

  // Returns a panel as pairs of bf16. Quantised weights are rounded into `wide`.
  const uint32_t* panel_pairs(int64_t panel, uint32_t* wide) const {
    if (w.type == WeightType::bf16) return static_cast<const uint32_t*>(w.data) + panel * w.padded_k / 2 * PANEL;
    alignas(64) float block[K_BLOCK * PANEL];
    for (int64_t k = 0; k < w.padded_k; k += K_BLOCK) {
      const int64_t count = std::min<int64_t>(K_BLOCK, w.padded_k - k);
      round_pairs(panel_block(w, panel, k, count, block), count, wide + k / 2 * PANEL);
    }
    return wide;
  }

  // to = rows [r, r + count) of x as `multiply_rows` reads them, with zeros behind K.
  void pack_strip(int64_t r, int64_t count, bf16* to) const {
    for (int64_t row = 0; row < count; ++row) {
      const bf16* from = x + (rows ? rows[r + row] : r + row) * ldx;
      bf16* at = to + row * TILE_DEPTH;
      int64_t k = 0;
      for (; k + TILE_DEPTH <= w.k; k += TILE_DEPTH, at += count * TILE_DEPTH) {
        std::memcpy(at, from + k, TILE_DEPTH * sizeof(bf16));
      }
      if (k == w.k) continue;
      std::memcpy(at, from + k, size_t(w.k - k) * sizeof(bf16));
      std::memset(at + (w.k - k), 0, size_t(k + TILE_DEPTH - w.k) * sizeof(bf16));
    }
  }

  // Computes y of rows [m0, m1) and of its panels [p0, p1).
  void multiply(int64_t m0, int64_t m1, int64_t p0, int64_t p1) const {
    const int64_t whole = m1 - (m1 - m0) % STRIP, wide_panel = w.type == WeightType::bf16 ? 0 : w.padded_k / 2 * PANEL;
    Buffer<bf16> strips((m1 - m0) * w.padded_k);
    Buffer<float> sums(PANELS * STRIP * PANEL);
    Buffer<uint32_t> wide(PANELS * wide_panel);
    for (int64_t r = m0; r < m1; r += STRIP) pack_strip(r, std::min(STRIP, m1 - r), strips + (r - m0) * w.padded_k);
    const int64_t width = gated ? PANELS / 2 : PANELS, groups = (p1 - p0 + width - 1) / width;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = p0 + (p1 - p0) * g / groups, end = p0 + (p1 - p0) * (g + 1) / groups;
      const uint32_t* pairs[PANELS];
      int64_t count = 0;
      for (int64_t first = 0; first < w.panels(); first += panels()) {
        for (int64_t panel = begin; panel < end; ++panel, ++count) {
          pairs[count] = panel_pairs(first + panel, wide + count * wide_panel);
        }
      }
      const auto strip = [&](int64_t r, int64_t num_rows, int64_t depth) {
        multiply_strip(strips + (r - m0) * w.padded_k, num_rows, pairs, count, depth, sums);
        store_strip(r, num_rows, begin, end, sums);
      };
      if (m0 < whole) {
        const TileScope scope(STRIP);
        for (int64_t r = m0; r < whole; r += STRIP) strip(r, STRIP, m1 - m0 > STRIP ? DEPTH : w.padded_k);
      }
      if (whole < m1) {
        const TileScope scope(m1 - whole);
        strip(whole, m1 - whole, m0 < whole ? DEPTH : w.padded_k);
      }
    }
    if (streams) end_streams();
  }

  // sums[i] = the products of a packed strip and panel i. All `count` panels use `depth` columns of it before any uses
  // the next ones.
  void multiply_strip(const bf16* strip, int64_t num_rows, const uint32_t* const* pairs, int64_t count, int64_t depth,
                      float* sums) const {
    for (int64_t k = 0; k < w.padded_k; k += depth) {
      for (int64_t i = 0; i < count; ++i) {
        multiply_rows(strip + k * num_rows, num_rows, pairs[i] + k / 2 * PANEL, std::min(depth, w.padded_k - k),
                      sums + i * STRIP * PANEL, k > 0, depth < w.padded_k);
      }
    }
  }

  // Stores the panels [begin, end) of y's rows from r on.
  void store_strip(int64_t r, int64_t num_rows, int64_t begin, int64_t end, const float* sums) const {
    for (int64_t row = 0; row < num_rows; ++row) {
      bf16* to = y + (r + row) * ldy;
      for (int64_t panel = begin; panel < end; ++panel) {
        const float* c = sums + ((panel - begin) * STRIP + row) * PANEL;
        if (gated) {
          store_gated(c, c + (end - begin) * STRIP * PANEL, panel, to);
        } else if (streams && (panel + 1) * PANEL <= w.n) {
          const vf v[2] = {output(w, c, panel * PANEL), output(w, c + LANES, panel * PANEL + LANES)};
          stream(to + panel * PANEL, v);
        } else {
          store_outputs(w, c, panel * PANEL, to);
        }
      }
    }
  }

  // Stores a panel of y for a row from its sums of G and U, which are rounded as if they were stored.
  void store_gated(const float* gates, const float* ups, int64_t panel, bf16* to) const {
    vf v[2];
    for (int64_t i = 0; i < PANEL; i += LANES) {
      const vf gate = output(w, gates + i, panel * PANEL + i), up = output(w, ups + i, w.n / 2 + panel * PANEL + i);
      v[i / LANES] = silu(widen(round_bf16(gate))) * widen(round_bf16(up));
    }
    if (streams) return stream(to + panel * PANEL, v);
    for (int64_t i = 0; i < PANEL; i += LANES) store(to + panel * PANEL + i, v[i / LANES]);
  }
};

// Rows of a task.
int64_t block_rows(int64_t padded_k) { return std::max(LEAST_ROWS, L2_VALUES / padded_k / STRIP * STRIP); }

void run(const Problem& p, int64_t m, bool parallel) {
  const int64_t panels = p.panels(), rows = block_rows(p.w.padded_k), blocks = (m + rows - 1) / rows;
  if (!parallel) {
    for (int64_t r = 0; r < m; r += rows) p.multiply(r, std::min(m, r + rows), 0, panels);
  } else if (m <= STRIP) {  // each thread reads the weights from one place on
    const int64_t grain = std::max<int64_t>(1, 16384 / p.w.padded_k);
    parallel_ranges(panels, grain, [&](int64_t a, int64_t b) { p.multiply(0, m, a, b); });
  } else {
    const int64_t columns = std::clamp<int64_t>(2 * num_threads() / blocks, 1, panels);
    parallel_tasks(blocks * columns, [&](int64_t task) {
      const int64_t r = task / columns * rows, c = task % columns;
      p.multiply(r, std::min(m, r + rows), panels * c / columns, panels * (c + 1) / columns);
    });
  }
}

bool streams(const bf16* y, int64_t ldy, int64_t m, int64_t columns) {
  const auto on_lines = uintptr_t(y) % 64 == 0 && ldy * sizeof(bf16) % 64 == 0;
  return on_lines && m * columns * int64_t(sizeof(bf16)) >= STREAM_BYTES;
}

}  // namespace

void tile_linear(const bf16* x, int64_t ldx, const int32_t* rows, const PackedWeight& w, bf16* y, int64_t ldy, int64_t m,
                 bool parallel) {
  run({x, ldx, rows, w, y, ldy, false, streams(y, ldy, m, w.n)}, m, parallel);
}

void tile_linear_silu_mul(const bf16* x, int64_t ldx, const PackedWeight& w, bf16* y, int64_t m) {
  run({x, ldx, nullptr, w, y, w.n / 2, true, streams(y, w.n / 2, m, w.n / 2)}, m, true);
}

}  // namespace forkpoint
