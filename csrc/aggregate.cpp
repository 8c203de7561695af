// Aggregation. Bound by the gathers of rows, so the inner loop does one load and one fused multiply-add per vector and the
// rows of a few edges ahead are prefetched. A row is summed by one thread in edge order: results do not depend on threads.
#include "aggregate.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

constexpr int64_t kRowsAtOnce = 64;  // rows per task: degrees are skewed

template <typename A>
inline A factor(const void* values, int64_t i) {
  return values ? static_cast<const A*>(values)[i] : A(1);
}

// Columns f .. f + Tile * lanes of one output row, which is stored as O.
template <int Tile, typename T, typename O, typename Index>
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
  O* out = static_cast<O*>(a.out) + target * a.width + f;
  const O* base = target < a.base_rows ? static_cast<const O*>(a.base) + target * a.width + f : nullptr;
  const vec_t<A> scale = splat<A>(factor<A>(a.row_scale, i));
  for (int t = 0; t < Tile; ++t) {
    const vec_t<A> value = a.row_scale ? sum[t] * scale : sum[t];
    store(out + t * lanes, base ? load(base + t * lanes) + value : value);
  }
}

template <typename T, typename O, typename Index>
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
  O* out = static_cast<O*>(a.out) + target * a.width + f;
  const A before = target < a.base_rows ? widen(static_cast<const O*>(a.base)[target * a.width + f]) : A(0);
  set(out, before + factor<A>(a.row_scale, i) * sum);
}

template <typename T, typename O, typename Index>
void sum_rows_as(const SumArgs& a) {
  constexpr int64_t lanes = Lanes<wide_t<T>>::count;
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, kRowsAtOnce)
  for (int64_t i = 0; i < a.structure.n; ++i) {
    int64_t f = 0;
    for (; f + 8 * lanes <= a.width; f += 8 * lanes) sum_tile<8, T, O, Index>(a, i, f);
    if (f + 4 * lanes <= a.width) sum_tile<4, T, O, Index>(a, i, f), f += 4 * lanes;
    if (f + 2 * lanes <= a.width) sum_tile<2, T, O, Index>(a, i, f), f += 2 * lanes;
    if (f + lanes <= a.width) sum_tile<1, T, O, Index>(a, i, f), f += lanes;
    for (; f < a.width; ++f) sum_scalar<T, O, Index>(a, i, f);
  }
}

template <typename T, typename Index>
void sum_rows(const SumArgs& a) {
  if constexpr (std::is_same_v<wide_t<T>, float>) {
    if (a.narrow) return sum_rows_as<T, BFloat, Index>(a);
  }
  sum_rows_as<T, wide_t<T>, Index>(a);
}

// Signed integers as wide as A: the type of comparisons of vectors of A.
template <typename A> using mask_t = decltype(vec_t<A>{} > vec_t<A>{});
template <typename A> using lane_t = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

// The edges of one row. Winners are held as offsets from `base`, in lanes as wide as those of the values; `narrow`: they
// fit. Positions ascend, so the first of equal values stays; other numbers are compared.
struct RowEdges {
  int64_t begin, end, base;
  bool narrow;
};

template <typename A>
inline RowEdges row_edges(const MaxArgs& a, int64_t i) {
  RowEdges row{a.structure.indptr[i], a.structure.indptr[i + 1], 0, true};
  row.base = row.begin;
  int64_t span = row.end - row.begin;
  if (a.number && row.begin < row.end) {
    const auto [low, high] = std::minmax_element(a.number + row.begin, a.number + row.end);
    row.base = *low;
    span = *high - *low;
  }
  row.narrow = span < std::numeric_limits<lane_t<A>>::max();
  return row;
}

template <typename A>
inline bool beats(A value, int64_t number, A best, int64_t winner) {
  return (winner < 0) | (value > best) | (value != value) | ((value == best) & (number < winner));
}

template <typename A>
inline void settle(const MaxArgs& a, A* out, int64_t* winner, A value, int64_t number) {
  if (a.merge && !beats(value, number, *out, *winner)) return;
  *out = value;
  *winner = number;
}

// Columns f .. f + Tile * lanes of one row that has edges.
template <int Tile, bool Numbered, typename T, typename Index>
inline void max_tile(const MaxArgs& a, int64_t target, int64_t f, const RowEdges& edges) {
  using A = wide_t<T>;
  using Lane = lane_t<A>;
  constexpr int lanes = Lanes<A>::count;
  const T* x = static_cast<const T*>(a.x) + f;
  const Index* col = static_cast<const Index*>(a.structure.col);
  const int64_t total = a.structure.indptr[a.structure.n];
  const auto offset = [&](int64_t e) { return static_cast<Lane>((Numbered ? a.number[e] : e) - edges.base); };
  vec_t<A> best[Tile];
  mask_t<A> winner[Tile];
  const T* row = x + static_cast<int64_t>(col[edges.begin]) * a.width;
  for (int t = 0; t < Tile; ++t) best[t] = load(row + t * lanes), winner[t] = mask_t<A>{} + offset(edges.begin);
  for (int64_t e = edges.begin + 1; e < edges.end; ++e) {
    if (e + kAhead < total) prefetch_row(x + static_cast<int64_t>(col[e + kAhead]) * a.width, Tile * lanes);
    row = x + static_cast<int64_t>(col[e]) * a.width;
    const mask_t<A> here = mask_t<A>{} + offset(e);
    for (int t = 0; t < Tile; ++t) {
      const vec_t<A> value = load(row + t * lanes);
      mask_t<A> better = (value > best[t]) | (value != value);
      if constexpr (Numbered) better |= (value == best[t]) & (here < winner[t]);
      best[t] = better ? value : best[t];
      winner[t] = better ? here : winner[t];
    }
  }
  A* out = static_cast<A*>(a.out) + target * a.width + f;
  int64_t* winners = a.winner + target * a.width + f;
  for (int t = 0; t < Tile; ++t) {
    for (int l = 0; l < lanes; ++l) settle(a, out + t * lanes + l, winners + t * lanes + l, best[t][l], edges.base + winner[t][l]);
  }
}

// Fewer columns than a vector, or edge numbers that do not fit its lanes.
template <typename T, typename Index>
inline void max_few(const MaxArgs& a, int64_t target, int64_t f, int64_t count, const RowEdges& edges) {
  using A = wide_t<T>;
  const T* x = static_cast<const T*>(a.x) + f;
  const Index* col = static_cast<const Index*>(a.structure.col);
  A best[Lanes<A>::count] = {};
  int64_t winner[Lanes<A>::count];
  std::fill_n(winner, count, int64_t{-1});
  for (int64_t e = edges.begin; e < edges.end; ++e) {
    const T* row = x + static_cast<int64_t>(col[e]) * a.width;
    const int64_t number = a.number ? a.number[e] : e;
    for (int64_t c = 0; c < count; ++c) {
      const A value = widen(row[c]);
      const bool better = beats(value, number, best[c], winner[c]);
      best[c] = better ? value : best[c];
      winner[c] = better ? number : winner[c];
    }
  }
  A* out = static_cast<A*>(a.out) + target * a.width + f;
  for (int64_t c = 0; c < count; ++c) settle(a, out + c, a.winner + target * a.width + f + c, best[c], winner[c]);
}

template <bool Numbered, typename T, typename Index>
void max_rows_in(const MaxArgs& a) {
  using A = wide_t<T>;
  constexpr int64_t lanes = Lanes<A>::count;
#pragma omp parallel for num_threads(a.threads) schedule(dynamic, kRowsAtOnce)
  for (int64_t i = 0; i < a.structure.n; ++i) {
    const int64_t target = a.structure.rows ? a.structure.rows[i] : i;
    const RowEdges edges = row_edges<A>(a, i);
    int64_t f = 0;
    if (edges.begin == edges.end) {
      if (a.merge) continue;
      std::fill_n(static_cast<A*>(a.out) + target * a.width, a.width, A(0));
      std::fill_n(a.winner + target * a.width, a.width, int64_t{-1});
      continue;
    }
    if (edges.narrow && a.width >= lanes) {
      for (; f + 4 * lanes <= a.width; f += 4 * lanes) max_tile<4, Numbered, T, Index>(a, target, f, edges);
      for (; f + lanes <= a.width; f += lanes) max_tile<1, Numbered, T, Index>(a, target, f, edges);
      // The last columns overlap with former ones: max is idempotent.
      if (f < a.width) max_tile<1, Numbered, T, Index>(a, target, a.width - lanes, edges);
      continue;
    }
    for (; f < a.width; f += lanes) max_few<T, Index>(a, target, f, std::min(lanes, a.width - f), edges);
  }
}

template <typename T, typename Index>
void max_rows(const MaxArgs& a) {
  a.number ? max_rows_in<true, T, Index>(a) : max_rows_in<false, T, Index>(a);
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
