#include "matrix_tiles.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace forkpoint {

namespace {

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
constexpr int64_t ROW_BYTES = 64;
constexpr uint32_t FLUSH_DENORMALS = 0x8040;  // of operands and of results

struct alignas(64) Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// 16 values of bf16 and 16 more behind them.
inline vu rounded(vf first, vf second) { return (vu)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }

// The rounded values of two rows in pairs.
inline vu rounded_pairs(vf even, vf odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (vu)_mm512_permutexvar_epi16(order, (__m512i)rounded(even, odd));
}

// high = the rounded values of two rows in pairs, even below odd; low = the same of what is left.
inline void split_pairs(vf even, vf odd, uint32_t* high, uint32_t* low) {
  const vu upper = rounded_pairs(even, odd);
  const vu lower = rounded_pairs(even - (vf)(upper << 16), odd - (vf)(upper & 0xffff0000u));
  __builtin_memcpy(high, &upper, sizeof upper);
  __builtin_memcpy(low, &lower, sizeof lower);
}

// Adds the products of the tiles 4 and 5, of A, and 6 and 7, of B, to those of C.
template <int ROWS>
inline void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (ROWS == 2) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The tiles 0 to 3 are 32 x 32 values of C, or with one ROW of tiles 16 x 32.
template <int ROWS>
inline void load_sums(const float* c, int64_t stride, bool accumulate) {
  const int64_t bytes = stride * int64_t(sizeof(float));
  const float* lower = c + 16 * stride;
  if (accumulate) {
    _tile_loadd(0, c, bytes);
    _tile_loadd(1, c + 16, bytes);
    if (ROWS == 2) {
      _tile_loadd(2, lower, bytes);
      _tile_loadd(3, lower + 16, bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int ROWS>
inline void store_sums(float* c, int64_t stride) {
  const int64_t bytes = stride * int64_t(sizeof(float));
  float* lower = c + 16 * stride;
  _tile_stored(0, c, bytes);
  _tile_stored(1, c + 16, bytes);
  if (ROWS == 2) {
    _tile_stored(2, lower, bytes);
    _tile_stored(3, lower + 16, bytes);
  }
}

template <int ROWS>
void block(const uint32_t* a, int64_t a_step, const uint32_t* b, int64_t b_step, int64_t tiles, float* c,
           int64_t stride, bool accumulate) {
  load_sums<ROWS>(c, stride, accumulate);
  for (int64_t t = 0; t < tiles; ++t, a += HALVES_WORDS, b += HALVES_WORDS) {
    _tile_loadd(4, a, ROW_BYTES);
    if (ROWS == 2) _tile_loadd(5, a + a_step, ROW_BYTES);
    _tile_loadd(6, b + TILE_WORDS, ROW_BYTES);
    _tile_loadd(7, b + b_step + TILE_WORDS, ROW_BYTES);
    add_products<ROWS>();
    _tile_loadd(6, b, ROW_BYTES);
    _tile_loadd(7, b + b_step, ROW_BYTES);
    add_products<ROWS>();
    _tile_loadd(4, a + TILE_WORDS, ROW_BYTES);
    if (ROWS == 2) _tile_loadd(5, a + a_step + TILE_WORDS, ROW_BYTES);
    add_products<ROWS>();
  }
  store_sums<ROWS>(c, stride);
}

// STREAMS: B passes by, and leaves the cache to A.
template <int ROWS, bool STREAMS>
void block_pairs(const bf16* a, int64_t rows, const uint32_t* pairs, int64_t tiles, float* c, bool accumulate) {
  load_sums<ROWS>(c, 32, accumulate);
  for (int64_t t = 0; t < tiles; ++t, a += rows * TILE_DEPTH, pairs += 2 * TILE_WORDS) {
    if (STREAMS) {
      _tile_stream_loadd(6, pairs, 2 * ROW_BYTES);
      _tile_stream_loadd(7, pairs + 16, 2 * ROW_BYTES);
    } else {
      _tile_loadd(6, pairs, 2 * ROW_BYTES);
      _tile_loadd(7, pairs + 16, 2 * ROW_BYTES);
    }
    _tile_loadd(4, a, ROW_BYTES);
    if (ROWS == 2) _tile_loadd(5, a + 16 * TILE_DEPTH, ROW_BYTES);
    add_products<ROWS>();
  }
  store_sums<ROWS>(c, 32);
}

}  // namespace

bool has_matrix_tiles() {
  static const bool found = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
  return found;
}

TileScope::TileScope(int64_t rows) {
  _tile_storeconfig(before_);
  Config config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(std::min<int64_t>(rows, 16));
  if (rows > 16) config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(rows - 16);
  asm volatile("" : : "r"(&config) : "memory");  // GCC takes only the first bytes of a configuration for read
  _tile_loadconfig(&config);
}

TileScope::~TileScope() {
  if (before_[0]) {
    _tile_loadconfig(before_);
  } else {
    _tile_release();
  }
}

FlushScope::FlushScope() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_DENORMALS); }

FlushScope::~FlushScope() { _mm_setcsr(before_); }

void split_rows(const float* x, int64_t stride, int64_t rows, Halves& left) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t at = 0; at < left.depth; at += TILE_DEPTH) {
      uint32_t* high = left.at(row, at) + row % 16 * LANES;
      const vf first = load(x + row * stride + at), second = load(x + row * stride + at + LANES);
      const vu upper = rounded(first, second);
      vh halves[2];
      __builtin_memcpy(halves, &upper, sizeof upper);
      const vu lower = rounded(first - widen(halves[0]), second - widen(halves[1]));
      __builtin_memcpy(high, &upper, sizeof upper);
      __builtin_memcpy(high + TILE_WORDS, &lower, sizeof lower);
    }
  }
}

void split_right(const float* x, int64_t stride, int64_t begin, int64_t end, int64_t first, int64_t last,
                 Halves& right) {
  for (int64_t column = begin; column < end; column += LANES) {
    for (int64_t row = first; row < last; row += 2) {
      uint32_t* high = right.at(column, row) + row % TILE_DEPTH / 2 * LANES;
      const float* even = x + row * stride + column;
      split_pairs(load(even), load(even + stride), high, high + TILE_WORDS);
    }
  }
}

void transpose_halves(Halves& from, Halves& to) {
  const float* values = reinterpret_cast<const float*>(from.words.memory.get());
  float* turned = reinterpret_cast<float*>(to.words.memory.get());
  for (int64_t at = 0; at < from.num_words(); at += TILE_WORDS) transpose16(values + at, LANES, turned + at, LANES);
}

void multiply(Halves& left, int64_t first, int64_t rows, Halves& right, int64_t columns, int64_t depth, float* c,
              int64_t stride, bool accumulate) {
  const int64_t tiles = (depth + TILE_DEPTH - 1) / TILE_DEPTH;
  const int64_t a_step = left.at(16, 0) - left.at(0, 0), b_step = right.at(16, 0) - right.at(0, 0);
  for (int64_t row = 0; row < rows; row += 32) {
    const uint32_t* a = left.at(first + row, 0);
    for (int64_t column = 0; column < columns; column += 32) {
      const auto fn = rows - row > 16 ? block<2> : block<1>;
      fn(a, a_step, right.at(column, 0), b_step, tiles, c + row * stride + column, stride, accumulate);
    }
  }
}

void round_pairs(const float* values, int64_t depth, uint32_t* pairs) {
  for (int64_t k = 0; k < depth; k += 2, values += 64) {
    for (int64_t column = 0; column < 32; column += LANES, pairs += LANES) {
      const vu both = rounded_pairs(load(values + column), load(values + 32 + column));
      __builtin_memcpy(pairs, &both, sizeof both);
    }
  }
}

void multiply_rows(const bf16* a, int64_t rows, const uint32_t* pairs, int64_t depth, float* c, bool accumulate,
                   bool streams) {
  const auto fn = rows <= 16 ? block_pairs<1, false> : streams ? block_pairs<2, true> : block_pairs<2, false>;
  fn(a, rows, pairs, depth / TILE_DEPTH, c, accumulate);
}

}  // namespace forkpoint

#else

namespace forkpoint {

// Callers ask has_matrix_tiles first.
bool has_matrix_tiles() { return false; }
TileScope::TileScope(int64_t) { __builtin_trap(); }
TileScope::~TileScope() {}
FlushScope::FlushScope() { __builtin_trap(); }
FlushScope::~FlushScope() {}
void split_rows(const float*, int64_t, int64_t, Halves&) { __builtin_trap(); }
void split_right(const float*, int64_t, int64_t, int64_t, int64_t, int64_t, Halves&) { __builtin_trap(); }
void transpose_halves(Halves&, Halves&) { __builtin_trap(); }
void multiply(Halves&, int64_t, int64_t, Halves&, int64_t, int64_t, float*, int64_t, bool) { __builtin_trap(); }
void round_pairs(const float*, int64_t, uint32_t*) { __builtin_trap(); }
void multiply_rows(const bf16*, int64_t, const uint32_t*, int64_t, float*, bool, bool) { __builtin_trap(); }

}  // namespace forkpoint

#endif
