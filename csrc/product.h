// C = A B (+ bias), or C += A B, of float32 matrices whose elements are rounded to bfloat16 and whose sums are float32. The
// conversion is part of packing the operands.
#pragma once
#include <cstdint>

namespace gnnfleet {

struct ProductArgs {
  int64_t m, n, k;
  const float* a;        // a(i, r) at i * a_row + r * a_col; one of the two is 1
  int64_t a_row, a_col;
  const float* b;        // b(r, j) at r * b_row + j * b_col; one of the two is 1
  int64_t b_row, b_col;
  float* c;              // [m, n], rows c_row apart
  int64_t c_row;
  const float* bias;     // [n], added if not null; only without `add`
  bool add;
  int threads;
};

bool has_product();  // true if this CPU multiplies bfloat16
void product(const ProductArgs& a);

}  // namespace gnnfleet
