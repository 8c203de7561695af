#include "product.h"

#include <algorithm>
#include <cstdlib>

#if defined(__x86_64__)
#include <immintrin.h>

// These functions run only on machines with these instructions.
#define FAST __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define FASTER __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"), always_inline)) inline

namespace gnnfleet {
namespace {

// Blocks of C of kRows x kColumns stay in registers while pairs of elements are added up, at most kDepth pairs in a row.
constexpr int64_t kRows = 12, kColumns = 32, kDepth = 256;

// Packed A: pairs by row, or by pair where A is stored by columns. Packed B: for each pair all columns of a block.
constexpr int64_t kRowStride = kDepth + 16;  // pairs; padding, so that rows use different cache lines
constexpr int64_t kPairStride = 16;

FASTER __m512i interleaved(__m512 even, __m512 odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                         19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

FASTER __mmask16 first(int64_t count) { return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << std::max<int64_t>(count, 0)) - 1); }

// Pairs of elements (2 p, 2 p + 1) of `count` neighbours x, of two rows `stride` apart; the second is 0 at the end.
FASTER __m512i pair_of(const float* x, int64_t stride, int64_t count, bool whole) {
  const __mmask16 mask = first(count);
  return interleaved(_mm512_maskz_loadu_ps(mask, x), whole ? _mm512_maskz_loadu_ps(mask, x + stride) : _mm512_setzero_ps());
}

// kDepth pairs at most from `from` on, k elements in all, of columns j to j + kColumns.
FAST void pack_b(const ProductArgs& a, int64_t from, int64_t pairs, int64_t j, int32_t* to) {
  const int64_t columns = std::min(kColumns, a.n - j);
  if (a.b_col == 1) {
    for (int64_t p = 0; p < pairs; ++p) {
      const int64_t r = 2 * (from + p);
      const float* x = a.b + r * a.b_row + j;
      _mm512_storeu_si512(to + p * kColumns, pair_of(x, a.b_row, columns, r + 1 < a.k));
      _mm512_storeu_si512(to + p * kColumns + 16, pair_of(x + 16, a.b_row, columns - 16, r + 1 < a.k));
    }
    return;
  }
  alignas(64) int32_t found[16];
  for (int64_t c = 0; c < kColumns; ++c) {
    const float* x = a.b + (j + c) * a.b_col + 2 * from;
    const int64_t count = c < columns ? a.k - 2 * from : 0;
    for (int64_t p = 0; p < pairs; p += 16) {
      const int64_t left = count - 2 * p;
      const __m512 low = _mm512_maskz_loadu_ps(first(left), x + 2 * p), high = _mm512_maskz_loadu_ps(first(left - 16), x + 2 * p + 16);
      _mm512_store_si512(found, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      for (int64_t q = 0; q < std::min<int64_t>(16, pairs - p); ++q) to[(p + q) * kColumns + c] = found[q];
    }
  }
}

FAST void pack_a(const ProductArgs& a, int64_t from, int64_t pairs, int64_t i, int32_t* to) {
  const int64_t rows = std::min(kRows, a.m - i);
  if (a.a_col != 1) {
    for (int64_t p = 0; p < pairs; ++p) {
      const int64_t r = 2 * (from + p);
      _mm512_storeu_si512(to + p * kPairStride, pair_of(a.a + r * a.a_col + i, a.a_col, rows, r + 1 < a.k));
    }
    return;
  }
  for (int64_t row = 0; row < kRows; ++row) {
    const float* x = a.a + (i + row) * a.a_row + 2 * from;
    const int64_t count = row < rows ? a.k - 2 * from : 0;
    for (int64_t p = 0; p < pairs; p += 16) {
      const int64_t left = count - 2 * p;
      const __m512 low = _mm512_maskz_loadu_ps(first(left), x + 2 * p), high = _mm512_maskz_loadu_ps(first(left - 16), x + 2 * p + 16);
      _mm512_storeu_si512(to + row * kRowStride + p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

// Row i of a block of A is `kAcross` numbers behind row i - 1, its pairs are `kAlong` apart.
template <int64_t kAcross, int64_t kAlong, bool kWide>
FASTER void block(const int32_t* a, const int32_t* b, int64_t pairs, __m512 (&sum)[kRows][2]) {
  for (int64_t i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p) {
    const __m512bh left = (__m512bh)_mm512_loadu_si512(b + p * kColumns), right = (__m512bh)_mm512_loadu_si512(b + p * kColumns + 16);
#pragma GCC unroll 12
    for (int64_t i = 0; i < kRows; ++i) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(a[i * kAcross + p * kAlong]);
      sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, left);
      if (kWide) sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, right);
    }
  }
}

FAST void finish(const ProductArgs& a, int64_t i, int64_t j, const __m512 (&sum)[kRows][2], bool add) {
  for (int64_t half = 0; half < 2; ++half) {
    const __mmask16 mask = first(a.n - j - 16 * half);
    const __m512 bias = a.bias && !add ? _mm512_maskz_loadu_ps(mask, a.bias + j + 16 * half) : _mm512_setzero_ps();
    for (int64_t row = 0; row < std::min(kRows, a.m - i); ++row) {
      float* c = a.c + (i + row) * a.c_row + j + 16 * half;
      const __m512 before = add ? _mm512_maskz_loadu_ps(mask, c) : bias;
      _mm512_mask_storeu_ps(c, mask, _mm512_add_ps(sum[row][half], before));
    }
  }
}

FAST void row_block(const ProductArgs& a, int64_t i, int64_t pairs, const int32_t* packed_a, const int32_t* packed_b, bool add) {
  __m512 sum[kRows][2];
  for (int64_t j = 0; j < a.n; j += kColumns) {
    const int32_t* b = packed_b + j * kDepth;
    const bool wide = a.n - j > kColumns / 2;
    if (a.a_col == 1) {
      wide ? block<kRowStride, 1, true>(packed_a, b, pairs, sum) : block<kRowStride, 1, false>(packed_a, b, pairs, sum);
    } else {
      wide ? block<1, kPairStride, true>(packed_a, b, pairs, sum) : block<1, kPairStride, false>(packed_a, b, pairs, sum);
    }
    finish(a, i, j, sum, add);
  }
}

}  // namespace

bool has_product() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

void product(const ProductArgs& a) {
  const int64_t panels = (a.n + kColumns - 1) / kColumns, all = (a.k + 1) / 2;
  int32_t* packed_b = static_cast<int32_t*>(std::aligned_alloc(64, static_cast<size_t>(std::max<int64_t>(panels, 1) * kColumns * kDepth) * 4));
  if (packed_b == nullptr) std::abort();
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    alignas(64) int32_t packed_a[std::max(kRows * kRowStride, kDepth * kPairStride)];
    int64_t from = 0;
    do {
      const int64_t pairs = std::min(kDepth, all - from);
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < panels; ++panel) pack_b(a, from, pairs, panel * kColumns, packed_b + panel * kColumns * kDepth);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < a.m; i += kRows) {
        pack_a(a, from, pairs, i, packed_a);
        row_block(a, i, pairs, packed_a, packed_b, a.add || from > 0);
      }
      from += kDepth;
    } while (from < all);
  }
  std::free(packed_b);
}

}  // namespace gnnfleet
#else
namespace gnnfleet {
bool has_product() { return false; }
void product(const ProductArgs&) { std::abort(); }
}  // namespace gnnfleet
#endif
