#include "epilogue.h"

#include <cstdlib>

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

constexpr int64_t kColumns = 256;  // summed at a time: their totals stay in the first cache

template <typename T, bool relu>
void back_rows(const EpilogueArgs& a, int64_t begin, int64_t end, T* sums) {
  const T* grad = static_cast<const T*>(a.grad);
  const T* out = static_cast<const T*>(a.out);
  T* part = static_cast<T*>(a.part);
  for (int64_t low = 0; low < a.width; low += kColumns) {
    const int64_t count = a.width - low < kColumns ? a.width - low : kColumns;
    T total[kColumns] = {};
    for (int64_t i = begin; i < end; ++i) {
      const T* g = grad + i * a.width + low;
      if constexpr (relu) {
        const T* o = out + i * a.width + low;
        T* p = part + i * a.width + low;
        for (int64_t f = 0; f < count; ++f) {
          const T kept = o[f] <= T(0) ? T(0) : g[f];
          p[f] = kept;
          total[f] += kept;
        }
      } else {
        for (int64_t f = 0; f < count; ++f) total[f] += g[f];
      }
    }
    for (int64_t f = 0; f < count; ++f) sums[low + f] = total[f];
  }
}

// Every thread sums rows of its own; their sums are added in order.
template <typename T, bool relu>
void backward(const EpilogueArgs& a) {
  T* partial = static_cast<T*>(std::malloc(static_cast<size_t>(a.threads * a.width) * sizeof(T)));
  if (partial == nullptr) std::abort();
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int t = 0; t < a.threads; ++t) {
    back_rows<T, relu>(a, a.n * t / a.threads, a.n * (t + 1) / a.threads, partial + t * a.width);
  }
  if (T* sums = static_cast<T*>(a.sums)) {
    for (int t = 0; t < a.threads; ++t) {
      for (int64_t f = 0; f < a.width; ++f) sums[f] += partial[t * a.width + f];
    }
  }
  std::free(partial);
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
