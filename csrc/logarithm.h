// Logarithm from basic arithmetic: that of libm differs in the last bit between systems, and so would the draws. Exact to
// a few units in the last place. Compile with -ffp-contract=off.
#pragma once
#include <cmath>

namespace gnnfleet {

inline double logarithm(double x) {
  int exponent;
  double m = std::frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double s = (m - 1) / (m + 1), square = s * s;
  double sum = 0;
  for (int k = 12; k >= 0; --k) sum = sum * square + 1.0 / (2 * k + 1);
  return exponent * 0.69314718055994531 + 2 * s * sum;
}

}  // namespace gnnfleet
