// Products of fp32 matrices in the processor's bf16 matrix tiles (AMX). Each value is split into two halves of bf16:
// its rounding, and the rounding of what is left. Three of the four products of halves are added in fp32, so that a
// product is exact to about 2^-17 of its size. An element's bits depend on its row, its column and the depth alone.
// Functions that load tiles are not inline: GCC does not know that such a load reads memory, and could move the stores
// of a caller behind it.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "vec.h"

namespace forkpoint {

constexpr int64_t TILE_DEPTH = 32;       // values of bf16 in a row of a tile
constexpr int64_t TILE_WORDS = 256;
constexpr int64_t HALVES_WORDS = 2 * TILE_WORDS;  // the tiles of both halves of 16 rows or columns, TILE_DEPTH deep

// Whether this processor and this system have matrix tiles for our use.
bool has_matrix_tiles();

// Configures this thread's tiles, and restores at its end what they were before: oneDNN uses tiles too. The tiles have
// 16 rows each, or, for `multiply_rows`, both of A together `rows`.
class TileScope {
 public:
  explicit TileScope(int64_t rows = 32);
  ~TileScope();

 private:
  alignas(64) uint8_t before_[64];
};

// Makes this thread's vectors take and give zeros for denormal values, as tiles do, and restores at its end what it did.
class FlushScope {
 public:
  FlushScope();
  ~FlushScope();

 private:
  uint32_t before_;
};

// The halves of a left matrix [rows, depth] or of a right one [depth, columns]: tiles along the depth first, and then
// along the rows or columns. Rows and columns are multiples of 16, the depth of TILE_DEPTH.
struct Halves {
  int64_t width, depth;
  Buffer<uint32_t> words;
  Halves(int64_t width, int64_t depth) : width(width), depth(depth), words(num_words()) {}
  int64_t num_words() const { return width / 16 * (depth / TILE_DEPTH) * HALVES_WORDS; }
  void clear() { std::fill(words.memory.get(), words + num_words(), 0u); }
  uint32_t* at(int64_t place, int64_t down) {
    return words + (place / 16 * (depth / TILE_DEPTH) + down / TILE_DEPTH) * HALVES_WORDS;
  }
};

// left = x [rows, depth], a row every `stride` values.
void split_rows(const float* x, int64_t stride, int64_t rows, Halves& left);

// right = x [depth, columns]: of the columns [begin, end) the rows [first, last). The others stay as they are. All four
// are multiples of 16.
void split_right(const float* x, int64_t stride, int64_t begin, int64_t end, int64_t first, int64_t last, Halves& right);

// to = the transposed `from`, which has the same size: a right matrix becomes a left one, and the reverse.
void transpose_halves(Halves& from, Halves& to);

// C [rows, columns] (+)= the first `depth` columns of `left`, from its row `first` on, times the first rows of `right`.
// Columns are a multiple of 32, `depth` is rounded up to TILE_DEPTH, and rows to 16.
void multiply(Halves& left, int64_t first, int64_t rows, Halves& right, int64_t columns, int64_t depth, float* c,
              int64_t stride, bool accumulate);

// pairs[depth / 2][32] = values[depth][32], rounded to bf16.
void round_pairs(const float* values, int64_t depth, uint32_t* pairs);

// C [rows, 32] (+)= A B in bf16, without halves, for the rows of a TileScope. A: [depth / TILE_DEPTH][rows][TILE_DEPTH].
// B: pairs of neighbours in depth, [depth / 2][32]. C is dense. The depth is a multiple of TILE_DEPTH. `streams`: other
// rows read the same B next, so that A should stay in L1 and B need not.
void multiply_rows(const bf16* a, int64_t rows, const uint32_t* pairs, int64_t depth, float* c, bool accumulate,
                   bool streams);

}  // namespace forkpoint
