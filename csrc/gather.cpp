// Row gather; half-precision rows are widened. Memory bound: each thread has a range of output rows and prefetches rows a
// few steps ahead.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

// Rows to gather, and their output rows: at[i], or i without `at`.
struct RowList {
  const void* rows;
  bool wide;
  const int64_t* at;
  int64_t n;
};

template <typename Index, typename Element, typename Copy>
void for_each_row(const Element* table, const Index* rows, const int64_t* at, int64_t n, int64_t width, int threads, Copy copy) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_row(table + static_cast<int64_t>(rows[i + kAhead]) * width, width);
    copy(at ? at[i] : i, table + static_cast<int64_t>(rows[i]) * width);
  }
}

template <typename Element, typename Copy>
void for_each_row(const Element* table, const RowList& p, int64_t width, int threads, Copy copy) {
  if (p.wide) for_each_row(table, static_cast<const int64_t*>(p.rows), p.at, p.n, width, threads, copy);
  else for_each_row(table, static_cast<const int32_t*>(p.rows), p.at, p.n, width, threads, copy);
}

inline float widen_bfloat(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Branch-free half → float: normals by rebias; subnormals by a subtraction of the implied one; inf and NaN by exponent.
inline float widen_half(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t body = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  const uint32_t exponent = body & 0x0f800000u;
  const uint32_t normal = body + ((127u - 15u) << 23);
  const uint32_t special = body + ((255u - 31u) << 23);
  float subnormal;
  const uint32_t shifted = body + (113u << 23);
  std::memcpy(&subnormal, &shifted, 4);
  subnormal -= 6.103515625e-05f;
  uint32_t small;
  std::memcpy(&small, &subnormal, 4);
  const uint32_t wide = sign | (exponent == 0 ? small : exponent == 0x0f800000u ? special : normal);
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

}  // namespace

void gather_rows(const uint8_t* table, const void* rows, bool wide, const int64_t* at, int64_t n, int64_t width, uint8_t* out,
                 int64_t stride, int threads) {
  for_each_row(table, RowList{rows, wide, at, n}, width, threads,
           [=](int64_t i, const uint8_t* row) { std::memcpy(out + i * stride, row, static_cast<size_t>(width)); });
}

void gather_half(const uint16_t* table, const void* rows, bool wide, const int64_t* at, int64_t n, int64_t width, float* out,
                 int64_t stride, int threads) {
  for_each_row(table, RowList{rows, wide, at, n}, width, threads, [=](int64_t i, const uint16_t* row) {
    float* target = out + i * stride;
    for (int64_t f = 0; f < width; ++f) target[f] = widen_half(row[f]);
  });
}

void gather_bfloat(const uint16_t* table, const void* rows, bool wide, const int64_t* at, int64_t n, int64_t width, float* out,
                 int64_t stride, int threads) {
  for_each_row(table, RowList{rows, wide, at, n}, width, threads, [=](int64_t i, const uint16_t* row) {
    float* target = out + i * stride;
    for (int64_t f = 0; f < width; ++f) target[f] = widen_bfloat(row[f]);
  });
}

}  // namespace gnnfleet::GNNFLEET_ISA
