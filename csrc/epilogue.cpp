#include "epilogue.h"

#include "kernels.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

template <typename T, bool relu>
void forward(const EpilogueArgs& a) {
  T* x = static_cast<T*>(a.x);
  const T* bias = static_cast<const T*>(a.bias);
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int64_t i = 0; i < a.n; ++i) {
    T* row = x + i * a.width;
    for (int64_t f = 0; f < a.width; ++f) {
      const T value = bias ? row[f] + bias[f] : row[f];
      row[f] = relu && value < T(0) ? T(0) : value;  // NaN stays
    }
  }
}

// Threads share columns, not rows: a column is summed in one order whatever their number.
template <typename T, bool relu>
void backward(const EpilogueArgs& a) {
  const T* grad = static_cast<const T*>(a.grad);
  const T* out = static_cast<const T*>(a.out);
  T* part = static_cast<T*>(a.part);
  T* sums = static_cast<T*>(a.sums);
  constexpr int64_t kColumns = 64;
  const int64_t strips = (a.width + kColumns - 1) / kColumns;
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int64_t s = 0; s < strips; ++s) {
    const int64_t low = s * kColumns, count = a.width - low < kColumns ? a.width - low : kColumns;
    T total[kColumns] = {};
    for (int64_t i = 0; i < a.n; ++i) {
      const T* g = grad + i * a.width + low;
      if constexpr (relu) {
        const T* o = out + i * a.width + low;
        T* p = part + i * a.width + low;
        for (int64_t f = 0; f < count; ++f) {
          p[f] = o[f] <= T(0) ? T(0) : g[f];
          total[f] += p[f];
        }
      } else {
        for (int64_t f = 0; f < count; ++f) total[f] += g[f];
      }
    }
    if (sums) {
      for (int64_t f = 0; f < count; ++f) sums[low + f] += total[f];
    }
  }
}

}  // namespace

void epilogue(const EpilogueArgs& a) {
  if (a.wide) a.relu ? forward<double, true>(a) : forward<double, false>(a);
  else a.relu ? forward<float, true>(a) : forward<float, false>(a);
}

void epilogue_back(const EpilogueArgs& a) {
  if (a.wide) a.relu ? backward<double, true>(a) : backward<double, false>(a);
  else a.relu ? backward<float, true>(a) : backward<float, false>(a);
}

}  // namespace gnnfleet::GNNFLEET_ISA
