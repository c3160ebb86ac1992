// Register tiles: C[rows, 32] (+)= A[rows, K] B[K, 32] in fp32, one chain of multiply-adds per element.
#pragma once

#include <cstdint>

#include "fp8.h"

namespace forkpoint {

#ifdef __AVX512F__
constexpr int MAX_ROWS = 14;  // 28 accumulators, two columns of B, one broadcast: 31 of 32 registers
constexpr int FEW_ROWS = 12;  // a bf16 tile holds four columns of B
#else
constexpr int MAX_ROWS = 3;
constexpr int FEW_ROWS = 2;
#endif
constexpr int64_t K_BLOCK = 128;  // B block of 16 KiB: it and the A rows stay in L1

// Stride of a row of A of up to K_BLOCK values: not a power of two, so that rows fall into different cache sets,
// and a constant, so that one register addresses all rows.
constexpr int64_t ROW_STRIDE = K_BLOCK + LANES;

// A element (r, k) is at a[r * ROW_STRIDE + k]; rows of B and of C are 32 apart.
void tile_rows(int rows, const float* a, const float* b, float* c, int64_t k, bool accumulate);

// Over a whole bf16 panel [K/2][32][2]: A is cut into [K / K_BLOCK][rows][ROW_STRIDE]; C rows are 32 apart.
void tile_rows_bf16(int rows, const float* a, const uint32_t* panel, float* c, int64_t k);

constexpr int AS_TILES_ROWS = 2;

// The same for up to AS_TILES_ROWS rows, with the bits of a product in matrix tiles: callers hold a FlushScope.
void tile_rows_as_tiles(int rows, const float* a, const uint32_t* panel, float* c, int64_t k);

// Whether the processor adds the products of two pairs of bf16 in one step, and fast: on Xeons with AMX, decoding took
// 1.1 to 1.3 times as long as with rows widened to fp32.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool MULTIPLIES_PAIRS = true;
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif

// The same where A is bf16 too: row r of a piece of A has K_BLOCK / 2 pairs, from a + r * ROW_STRIDE on. Needs
// MULTIPLIES_PAIRS. Each element is one chain of pairs.
void tile_rows_pairs(int rows, const float* a, const uint32_t* panel, float* c, int64_t k, bool accumulate);

// The same over an fp8 panel [K][32], whose columns have a scale for each K_BLOCK of K: [K / K_BLOCK][32].
void tile_rows_fp8(int rows, const float* a, const fp8* panel, const float* scales, float* c, int64_t k);

// C[M, N] (+)= A[M, K] B[K, N], A element (r, k) at a[r * ROW_STRIDE + k], K <= K_BLOCK; N a multiple of 16.
void matmul_rows(int64_t m, int64_t n, int64_t k, const float* a, const float* b, int64_t ldb, float* c, int64_t ldc,
                 bool accumulate);

// The same with A transposed: element (r, k) at a[k * ska + r], any K.
void matmul_columns(int64_t m, int64_t n, int64_t k, const float* a, int64_t ska, const float* b, int64_t ldb,
                    float* c, int64_t ldc, bool accumulate);

}  // namespace forkpoint
