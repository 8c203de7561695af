#include "epilogue.h"

#include <cstdlib>

#include "kernels.h"
#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

template <typename T, bool relu>
void forward(const EpilogueArgs& a) {
  using A = wide_t<T>;
  constexpr int64_t lanes = Lanes<A>::count;
  T* x = static_cast<T*>(a.x);
  const A* bias = static_cast<const A*>(a.bias);
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int64_t i = 0; i < a.n; ++i) {
    T* row = x + i * a.width;
    int64_t f = 0;
    for (; f + lanes <= a.width; f += lanes) {
      const vec_t<A> zero = {}, value = bias ? load(row + f) + load(bias + f) : load(row + f);
      store(row + f, relu ? (value < zero ? zero : value) : value);  // NaN stays
    }
    for (; f < a.width; ++f) {
      const A value = bias ? widen(row[f]) + bias[f] : widen(row[f]);
      set(row + f, relu && value < A(0) ? A(0) : value);
    }
  }
}

constexpr int64_t kColumns = 256;  // columns summed at a time: their totals stay in the first-level cache

template <typename T, bool relu>
void back_rows(const EpilogueArgs& a, int64_t begin, int64_t end, wide_t<T>* sums) {
  using A = wide_t<T>;
  constexpr int64_t lanes = Lanes<A>::count;
  const T* grad = static_cast<const T*>(a.grad);
  const T* out = static_cast<const T*>(a.out);
  T* part = static_cast<T*>(a.part);
  for (int64_t low = 0; low < a.width; low += kColumns) {
    const int64_t count = a.width - low < kColumns ? a.width - low : kColumns;
    A total[kColumns] = {};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * a.width + low;
      int64_t f = 0;
      for (; f + lanes <= count; f += lanes) {
        vec_t<A> masked = load(grad + at + f);
        if constexpr (relu) {
          const vec_t<A> zero = {};
          masked = load(out + at + f) <= zero ? zero : masked;
          store(part + at + f, masked);
        }
        store(total + f, load(total + f) + masked);
      }
      for (; f < count; ++f) {
        A masked = widen(grad[at + f]);
        if constexpr (relu) {
          masked = widen(out[at + f]) <= A(0) ? A(0) : masked;
          set(part + at + f, masked);
        }
        total[f] += masked;
      }
    }
    for (int64_t f = 0; f < count; ++f) sums[low + f] = total[f];
  }
}

// Each thread sums its own rows; the sums of threads are added in order.
template <typename T, bool relu>
void backward(const EpilogueArgs& a) {
  using A = wide_t<T>;
  A* partial = static_cast<A*>(std::malloc(static_cast<size_t>(a.threads * a.width) * sizeof(A)));
  if (partial == nullptr) std::abort();
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int t = 0; t < a.threads; ++t) {
    back_rows<T, relu>(a, a.n * t / a.threads, a.n * (t + 1) / a.threads, partial + t * a.width);
  }
  if (A* sums = static_cast<A*>(a.sums)) {
    for (int t = 0; t < a.threads; ++t) {
      for (int64_t f = 0; f < a.width; ++f) sums[f] += partial[t * a.width + f];
    }
  }
  std::free(partial);
}

template <typename T>
void forward_of(const EpilogueArgs& a) {
  a.relu ? forward<T, true>(a) : forward<T, false>(a);
}

template <typename T>
void backward_of(const EpilogueArgs& a) {
  a.relu ? backward<T, true>(a) : backward<T, false>(a);
}

}  // namespace

void epilogue(const EpilogueArgs& a) {
  if (a.element == Element::float64) forward_of<double>(a);
  else if (a.element == Element::bfloat16) forward_of<BFloat>(a);
  else forward_of<float>(a);
}

void epilogue_back(const EpilogueArgs& a) {
  if (a.element == Element::float64) backward_of<double>(a);
  else if (a.element == Element::bfloat16) backward_of<BFloat>(a);
  else backward_of<float>(a);
}

}  // namespace gnnfleet::GNNFLEET_ISA
