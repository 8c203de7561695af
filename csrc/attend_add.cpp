// Attention forward, for all scores, and the backward of additive scores. A row is computed by one thread in edge order:
// results do not depend on the number of threads. Backward of additive scores is computed by the source's owner from
// these numbers of the destination:
//   dz_j = sum_i k p g_i     Q_j = sum_i phi' k p g_i     dl_j = <z_j, Q_j> - sum_i phi' p D_i
//   dr_i = (1 - slope) (<g_i, pos_i> - D_i P_i)           because sum_j p_ij (k_ij <g_i, z_j> - D_i) = 0
#include <cmath>

#include "attend_sums.h"
#include "kernels.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

template <typename A>
inline A* row_of(void* data, int64_t row, int64_t width) {
  return data ? static_cast<A*>(data) + row * width : nullptr;
}

template <typename A>
void finish_row(const AttendArgs& a, int64_t row) {
  const int64_t width = a.heads * a.channels;
  A* den = row_of<A>(a.den, row, a.heads);
  A* top = row_of<A>(a.max, row, a.heads);
  A* mass = row_of<A>(a.mass, row, a.heads);
  A* num = row_of<A>(a.num, row, width);
  A* pos = row_of<A>(a.pos, row, width);
  for (int64_t h = 0; h < a.heads; ++h) {
    const bool any = den[h] > 0;
    const A share = any ? A(1) / den[h] : A(0);
    top[h] = any ? top[h] + std::log(den[h]) : A(0);
    if (mass) mass[h] *= share;
    for (int64_t f = h * a.channels; f < (h + 1) * a.channels; ++f) num[f] *= share;
    if (pos) {
      for (int64_t f = h * a.channels; f < (h + 1) * a.channels; ++f) pos[f] *= share;
    }
  }
}

// The largest score of each head so far in top; s.top repeats it, s.part becomes the factor of earlier sums.
template <typename A>
void raise_top(const Scratch<A>& s, int64_t count, A* top) {
  s.repeat(top, s.top);
  s.repeat(top, s.part);
  s.over(count, [&](int64_t i, int64_t p) { store<A>(s.top + p, larger<A>(load(s.score + i), load(s.top + p))); });
  for (int64_t p = s.heads; p < s.pattern; ++p) {
    A& best = s.top[p % s.heads];
    best = s.top[p] > best ? s.top[p] : best;
  }
  for (int64_t h = 0; h < s.heads; ++h) top[h] = s.top[h];
  s.repeat(top, s.top);
  for (int64_t p = 0; p < s.pattern; p += s.lanes) store<A>(s.part + p, exp_of<A>(load(s.part + p) - load(s.top + p)));
}

// to[h] = to[h] * s.part[h] + sum over edges of values[k, h]
template <typename A>
void add_heads(const Scratch<A>& s, int64_t count, const A* values, A* to) {
  for (int64_t p = 0; p < s.pattern; ++p) s.sum[p] = A(0);
  s.over(count, [&](int64_t i, int64_t p) { store<A>(s.sum + p, load(s.sum + p) + load(values + i)); });
  for (int64_t h = 0; h < s.heads; ++h) to[h] *= s.part[h];
  for (int64_t p = 0; p < s.pattern; ++p) to[p % s.heads] += s.sum[p];
}

template <typename T>
void forward_row(const AttendArgs& a, int64_t i, const Scratch<wide_t<T>>& s) {
  using A = wide_t<T>;
  const int64_t row = a.structure.rows ? a.structure.rows[i] : i, width = a.heads * a.channels;
  A* top = row_of<A>(a.max, row, a.heads);
  A* den = row_of<A>(a.den, row, a.heads);
  A* mass = row_of<A>(a.mass, row, a.heads);
  A* num = row_of<A>(a.num, row, width);
  A* pos = row_of<A>(a.pos, row, width);
  const int64_t begin = a.structure.indptr[i], end = a.structure.indptr[i + 1];
  if (a.fresh) {
    // The lowest number and not -inf: a row of scores -inf, a mask, must not make NaN of their difference.
    for (int64_t h = 0; h < a.heads; ++h) top[h] = -std::numeric_limits<A>::max(), den[h] = A(0);
    if (mass) for (int64_t h = 0; h < a.heads; ++h) mass[h] = A(0);
    if (begin == end) {
      for (int64_t f = 0; f < width; ++f) num[f] = A(0);
      if (pos) for (int64_t f = 0; f < width; ++f) pos[f] = A(0);
    }
  }
  const A* own = static_cast<const A*>(a.dst.data) + row * a.dst.stride;
  if (a.score == Score::add) s.repeat(own, s.own);
  Edges edges;
  for (int64_t first = begin; first < end; first += edges.count) {
    take_edges(a, first, end, edges);
    score_edges(a, edges, own, a.src, s);
    raise_top(s, edges.count, top);
    s.over(edges.count, [&](int64_t e, int64_t p) { store<A>(s.weight + e, exp_of<A>(load(s.score + e) - load(s.top + p))); });
    add_heads(s, edges.count, s.weight, den);
    if (mass) {
      s.over(edges.count, [&](int64_t e, int64_t) { store<A>(s.upper + e, load(s.upper + e) * load(s.weight + e)); });
      add_heads(s, edges.count, s.upper, mass);
    }
    if (a.keep.on) {
      draw_keep(a, edges, s.keep);
      s.over(edges.count, [&](int64_t e, int64_t) {
        store<A>(s.weight + e, load(s.weight + e) * load(s.keep + e));
        store<A>(s.upper + e, load(s.upper + e) * load(s.keep + e));
      });
    }
    const A* shrink = a.fresh && first == begin ? nullptr : s.part;
    sum_edges(Sums<T>{static_cast<const T*>(a.value.data), a.value.stride, a.heads, a.channels, s.weight, s.upper, shrink, num, pos,
                      s.head_of_channel}, edges);
  }
  if (a.finish) finish_row<A>(a, row);
}

template <typename T>
void source_row(const AttendArgs& a, int64_t j, const Scratch<wide_t<T>>& s) {
  using A = wide_t<T>;
  const int64_t row = a.structure.rows ? a.structure.rows[j] : j, width = a.heads * a.channels;
  const int64_t begin = a.structure.indptr[j], end = a.structure.indptr[j + 1];
  const A slope = static_cast<A>(a.slope);
  A* bias = s.top;  // sum_i phi' p D_i of each head
  for (int64_t h = 0; h < a.heads; ++h) bias[h] = A(0), s.part[h] = A(1);
  if (begin == end) {
    for (int64_t f = 0; f < width; ++f) s.row_sum[f] = A(0), s.row_upper[f] = A(0);
  }
  s.repeat(static_cast<const A*>(a.src.data) + row * a.src.stride, s.own);
  Edges edges;
  for (int64_t first = begin; first < end; first += edges.count) {
    take_edges(a, first, end, edges);
    score_edges<A>(a, edges, nullptr, a.dst, s);
    gather_heads(a.side, 0, edges, a.heads, s.lse);
    gather_heads(a.side, a.heads, edges, a.heads, s.dee);
    s.pad(s.dee, edges.count, A(0));
    s.pad(s.lse, edges.count, A(0));
    s.over(edges.count, [&](int64_t e, int64_t) {
      const vec_t<A> p = exp_of<A>(load(s.score + e) - load(s.lse + e)), upper = load(s.upper + e);
      store<A>(s.product + e, p * load(s.dee + e) * (upper * (A(1) - slope) + slope));
      store<A>(s.weight + e, p);
      store<A>(s.upper + e, p * upper);
    });
    add_heads(s, edges.count, s.product, bias);
    if (a.keep.on) {
      draw_keep(a, edges, s.keep);
      s.over(edges.count, [&](int64_t e, int64_t) {
        store<A>(s.weight + e, load(s.weight + e) * load(s.keep + e));
        store<A>(s.upper + e, load(s.upper + e) * load(s.keep + e));
      });
    }
    const A* shrink = first == begin ? nullptr : s.part;
    sum_edges(Sums<A>{static_cast<const A*>(a.grad.data), a.grad.stride, a.heads, a.channels, s.weight, s.upper, shrink,
                      s.row_sum, s.row_upper, s.head_of_channel}, edges);
  }
  const T* value = static_cast<const T*>(a.value.data) + row * a.value.stride;
  A* d_value = row_of<A>(a.d_value, row, width);
  A* d_src = row_of<A>(a.d_src, row, a.heads);
  for (int64_t f = 0; f < width; ++f) {
    d_value[f] = a.add ? d_value[f] + s.row_sum[f] : s.row_sum[f];
    s.row_upper[f] = slope * s.row_sum[f] + (A(1) - slope) * s.row_upper[f];
  }
  for (int64_t h = 0; h < a.heads; ++h) {
    const A d = dot<A>(value + h * a.channels, s.row_upper + h * a.channels, a.channels) - bias[h];
    d_src[h] = a.add ? d_src[h] + d : d;
  }
}

template <typename T>
void forward(const AttendArgs& a) {
#pragma omp parallel num_threads(a.threads)
  {
    const Scratch<wide_t<T>> s(a);
#pragma omp for schedule(dynamic, kRowsAtOnce)
    for (int64_t i = 0; i < a.structure.n; ++i) forward_row<T>(a, i, s);
  }
}

template <typename T>
void source(const AttendArgs& a) {
#pragma omp parallel num_threads(a.threads)
  {
    const Scratch<wide_t<T>> s(a);
#pragma omp for schedule(dynamic, kRowsAtOnce)
    for (int64_t j = 0; j < a.structure.n; ++j) source_row<T>(a, j, s);
  }
}

template <typename A>
void local(const AttendLocalArgs& a) {
  const int64_t heads = a.heads, width = heads * a.channels, stride = (a.dst ? 3 : 2) * heads;
#pragma omp parallel for num_threads(a.threads) schedule(static)
  for (int64_t i = 0; i < a.n; ++i) {
    const A* grad = static_cast<const A*>(a.grad) + i * width;
    const A* out = static_cast<const A*>(a.out) + i * width;
    A* side = static_cast<A*>(a.side) + i * stride;
    for (int64_t h = 0; h < heads; ++h) {
      const A dee = dot<A>(grad + h * a.channels, out + h * a.channels, a.channels);
      if (a.dst) side[h] = static_cast<const A*>(a.dst)[i * heads + h];
      side[stride - 2 * heads + h] = static_cast<const A*>(a.lse)[i * heads + h];
      side[stride - heads + h] = dee;
      if (!a.d_dst) continue;
      const A* pos = static_cast<const A*>(a.pos) + i * width + h * a.channels;
      const A mass = static_cast<const A*>(a.mass)[i * heads + h];
      static_cast<A*>(a.d_dst)[i * heads + h] = (A(1) - static_cast<A>(a.slope)) * (dot<A>(grad + h * a.channels, pos, a.channels) - dee * mass);
    }
  }
}

template <typename A>
void finish(const AttendArgs& a, int64_t n) {
#pragma omp parallel for num_threads(a.threads) schedule(static)
  for (int64_t i = 0; i < n; ++i) finish_row<A>(a, i);
}

}  // namespace

void attend_forward(const AttendArgs& a) {
  if (a.element == Element::float64) forward<double>(a);
  else if (a.element == Element::bfloat16) forward<BFloat>(a);
  else forward<float>(a);
}

void attend_finish(const AttendArgs& a, int64_t n) { a.element == Element::float64 ? finish<double>(a, n) : finish<float>(a, n); }

void attend_local(const AttendLocalArgs& a) { a.element == Element::float64 ? local<double>(a) : local<float>(a); }

void attend_source(const AttendArgs& a) {
  if (a.element == Element::float64) source<double>(a);
  else if (a.element == Element::bfloat16) source<BFloat>(a);
  else source<float>(a);
}

}  // namespace gnnfleet::GNNFLEET_ISA
