// Aggregation. Bound by the gathers of rows, so the inner loop does one load and one fused multiply-add per vector and the
// rows of a few edges ahead are prefetched. A row is summed by one thread in edge order: results do not depend on threads.
#include "aggregate.h"

#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

constexpr int64_t kAhead = 8;       // edges; papers over the latency of a miss, gains 5-17 %
constexpr int64_t kRowsAtOnce = 64;  // rows a thread takes at a time: degrees are skewed

template <typename T>
inline void prefetch_row(const T* row, int64_t elements) {
  const char* from = reinterpret_cast<const char*>(row);
  for (int64_t byte = 0; byte < elements * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(from + byte);
}

template <typename A>
inline A factor(const void* values, int64_t i) {
  return values ? static_cast<const A*>(values)[i] : A(1);
}

// Columns f .. f + Tile * lanes of one output row.
template <int Tile, typename T, typename Index>
inline void sum_tile(const SumArgs& a, int64_t i, int64_t f) {
  using A = wide_t<T>;
  constexpr int lanes = Lanes<A>::count;
  const T* x = static_cast<const T*>(a.x) + f;
  const Index* col = static_cast<const Index*>(a.structure.col);
  const int64_t begin = a.structure.indptr[i], end = a.structure.indptr[i + 1], total = a.structure.indptr[a.structure.n];
  vec_t<A> sum[Tile] = {};
  for (int64_t e = begin; e < end; ++e) {
    if (e + kAhead < total) prefetch_row(x + static_cast<int64_t>(col[e + kAhead]) * a.width, Tile * lanes);
    const int64_t j = static_cast<int64_t>(col[e]);
    const T* row = x + j * a.width;
    if (a.weight || a.col_scale) {
      const vec_t<A> scale = splat<A>(factor<A>(a.weight, e) * factor<A>(a.col_scale, j));
      for (int t = 0; t < Tile; ++t) sum[t] += scale * load(row + t * lanes);
    } else {
      for (int t = 0; t < Tile; ++t) sum[t] += load(row + t * lanes);
    }
  }
  const int64_t target = a.structure.rows ? a.structure.rows[i] : i;
  A* out = static_cast<A*>(a.out) + target * a.width + f;
  const A* base = target < a.base_rows ? static_cast<const A*>(a.base) + target * a.width + f : nullptr;
  const vec_t<A> scale = splat<A>(factor<A>(a.row_scale, i));
  for (int t = 0; t < Tile; ++t) {
    const vec_t<A> value = a.row_scale ? sum[t] * scale : sum[t];
    store(out + t * lanes, base ? load(base + t * lanes) + value : value);
  }
}

template <typename T, typename Index>
inline void sum_scalar(const SumArgs& a, int64_t i, int64_t f) {
  using A = wide_t<T>;
  const T* x = static_cast<const T*>(a.x) + f;
  const Index* col = static_cast<const Index*>(a.structure.col);
  A sum = 0;
  for (int64_t e = a.structure.indptr[i]; e < a.structure.indptr[i + 1]; ++e) {
    const int64_t j = static_cast<int64_t>(col[e]);
    sum += factor<A>(a.weight, e) * factor<A>(a.col_scale, j) * widen(x[j * a.width]);
  }
  const int64_t target = a.structure.rows ? a.structure.rows[i] : i;
  A* out = static_cast<A*>(a.out) + target * a.width + f;
  const A before = target < a.base_rows ? static_cast<const A*>(a.base)[target * a.width + f] : A(0);
  *out = before + factor<A>(a.row_scale, i) * sum;
}

template <typename T, typename Index>
void sum_rows(const SumArgs& a) {
  constexpr int64_t lanes = Lanes<wide_t<T>>::count;
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, kRowsAtOnce)
  for (int64_t i = 0; i < a.structure.n; ++i) {
    int64_t f = 0;
    for (; f + 8 * lanes <= a.width; f += 8 * lanes) sum_tile<8, T, Index>(a, i, f);
    if (f + 4 * lanes <= a.width) sum_tile<4, T, Index>(a, i, f), f += 4 * lanes;
    if (f + 2 * lanes <= a.width) sum_tile<2, T, Index>(a, i, f), f += 2 * lanes;
    if (f + lanes <= a.width) sum_tile<1, T, Index>(a, i, f), f += lanes;
    for (; f < a.width; ++f) sum_scalar<T, Index>(a, i, f);
  }
}

// A running maximum and edges with numbers come in any order, so that equal values compare numbers; otherwise the first stays.
template <bool AnyOrder, typename T, typename Index>
void max_rows_in(const MaxArgs& a) {
  using A = wide_t<T>;
  const T* x = static_cast<const T*>(a.x);
  const Index* col = static_cast<const Index*>(a.structure.col);
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, kRowsAtOnce)
  for (int64_t i = 0; i < a.structure.n; ++i) {
    const int64_t target = a.structure.rows ? a.structure.rows[i] : i;
    A* __restrict out = static_cast<A*>(a.out) + target * a.width;
    int64_t* __restrict winner = a.winner + target * a.width;
    if (!a.merge) std::fill(out, out + a.width, A(0)), std::fill(winner, winner + a.width, int64_t{-1});
    for (int64_t e = a.structure.indptr[i]; e < a.structure.indptr[i + 1]; ++e) {
      if (e + kAhead < a.structure.indptr[a.structure.n]) prefetch_row(x + static_cast<int64_t>(col[e + kAhead]) * a.width, a.width);
      const T* row = x + static_cast<int64_t>(col[e]) * a.width;
      const int64_t number = a.number ? a.number[e] : e;
      for (int64_t f = 0; f < a.width; ++f) {
        const A value = widen(row[f]);
        bool better = (winner[f] < 0) | (value > out[f]) | (value != value);
        if constexpr (AnyOrder) better |= (value == out[f]) & (number < winner[f]);
        out[f] = better ? value : out[f];
        winner[f] = better ? number : winner[f];
      }
    }
  }
}

template <typename T, typename Index>
void max_rows(const MaxArgs& a) {
  a.merge || a.number ? max_rows_in<true, T, Index>(a) : max_rows_in<false, T, Index>(a);
}

template <typename A, typename Index>
void max_back(const MaxBackArgs& a) {
  const A* grad = static_cast<const A*>(a.grad);
  const Index* col = static_cast<const Index*>(a.structure.col);
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, kRowsAtOnce)
  for (int64_t j = 0; j < a.structure.n; ++j) {
    const int64_t target = a.structure.rows ? a.structure.rows[j] : j;
    A* __restrict dx = static_cast<A*>(a.dx) + target * a.width;
    if (!a.add) std::fill(dx, dx + a.width, A(0));
    for (int64_t e = a.structure.indptr[j]; e < a.structure.indptr[j + 1]; ++e) {
      const int64_t i = static_cast<int64_t>(col[e]);
      const A* g = grad + i * a.width;
      const int64_t* winner = a.winner + i * a.width;
      const int64_t position = a.positions ? a.positions[e] : e;
      const int64_t number = a.number ? a.number[position] : position;
      for (int64_t f = 0; f < a.width; ++f) dx[f] += winner[f] == number ? g[f] : A(0);
    }
  }
}

template <typename T, typename Index>
void dot_edges(const DotArgs& a) {
  using A = wide_t<T>;
  constexpr int64_t lanes = Lanes<A>::count;
  const Index* col = static_cast<const Index*>(a.structure.col);
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, kRowsAtOnce)
  for (int64_t i = 0; i < a.structure.n; ++i) {
    const int64_t own = a.structure.rows ? a.structure.rows[i] : i;
    const T* left = static_cast<const T*>(a.a) + own * a.width;
    for (int64_t e = a.structure.indptr[i]; e < a.structure.indptr[i + 1]; ++e) {
      const T* right = static_cast<const T*>(a.b) + static_cast<int64_t>(col[e]) * a.width;
      vec_t<A> sums = {};
      int64_t f = 0;
      for (; f + lanes <= a.width; f += lanes) sums += load(left + f) * load(right + f);
      A sum = 0;
      for (int l = 0; l < lanes; ++l) sum += sums[l];
      for (; f < a.width; ++f) sum += widen(left[f]) * widen(right[f]);
      static_cast<A*>(a.out)[e] = sum * factor<A>(a.row_scale, i);
    }
  }
}

#define GNNFLEET_BY_ELEMENT(function, a)                                            \
  do {                                                                              \
    if ((a).element == Element::float64) {                                          \
      (a).structure.wide ? function<double, int64_t>(a) : function<double, int32_t>(a); \
    } else if ((a).element == Element::bfloat16) {                                  \
      (a).structure.wide ? function<BFloat, int64_t>(a) : function<BFloat, int32_t>(a); \
    } else {                                                                        \
      (a).structure.wide ? function<float, int64_t>(a) : function<float, int32_t>(a);   \
    }                                                                               \
  } while (0)

}  // namespace

void aggregate_sum(const SumArgs& a) { GNNFLEET_BY_ELEMENT(sum_rows, a); }
void aggregate_max(const MaxArgs& a) { GNNFLEET_BY_ELEMENT(max_rows, a); }
void edge_dot(const DotArgs& a) { GNNFLEET_BY_ELEMENT(dot_edges, a); }
void aggregate_max_back(const MaxBackArgs& a) {
  if (a.element == Element::float64) a.structure.wide ? max_back<double, int64_t>(a) : max_back<double, int32_t>(a);
  else a.structure.wide ? max_back<float, int64_t>(a) : max_back<float, int32_t>(a);
}

}  // namespace gnnfleet::GNNFLEET_ISA
