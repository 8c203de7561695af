#include "attend_recent.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "kernels.h"
#include "philox.h"
#include "simd.h"
#include "sincos.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

template <typename T>
inline T dot(const T* a, const T* b, int64_t count) {
  T total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) total += a[i] * b[i];
  return total;
}

template <typename T>
inline void add(T* to, T factor, const T* from, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

// Work of one thread on queries: inputs of their events, attention weights and dropout.
template <typename T>
class Worker {
 public:
  explicit Worker(const RecentArgs& a)
      : a_(a), width_(a.row_width + a.feature_width + a.time_width), times_(padded_count(a.time_width)),
        stride_(a.row_width + a.feature_width + times_), x_(a.places * stride_), sine_(a.places * times_),
        frequency_(times_), phase_(times_), share_(a.heads * a.places), kept_(a.heads * a.places), slot_(a.places) {
    std::copy(at(a.frequency, 0), at(a.frequency, a.time_width), frequency_.begin());
    std::copy(at(a.phase, 0), at(a.phase, a.time_width), phase_.begin());
  }

  void forward(int64_t q) {
    show(q);
    const T* query = at(a_.query, q * a_.heads * width_);
    const T* offset = at(a_.offset, q * a_.heads);
    T* score = at(a_.score, q * a_.heads * a_.places);
    T* out = at(a_.out, q * a_.heads * width_);
    T* weight = at(a_.weight, q * a_.heads);
    std::fill(score, score + a_.heads * a_.places, T(0));
    for (int64_t h = 0; h < a_.heads; ++h) {
      for (int64_t e = 0; e < seen_; ++e) score[h * a_.places + slot_[e]] = dot(query + h * width_, &x_[e * stride_], width_) + offset[h];
    }
    shares(q, score);
    for (int64_t h = 0; h < a_.heads; ++h) {
      T* to = out + h * width_;
      std::fill(to, to + width_, T(0));
      weight[h] = 0;
      for (int64_t e = 0; e < seen_; ++e) {
        const T share = share_[h * a_.places + e] * kept_[h * a_.places + e];
        add(to, share, &x_[e * stride_], width_);
        weight[h] += share;
      }
    }
  }

  // Gradients of rows, frequencies and phases are added to sums of this thread.
  void backward(int64_t q, T* grad_row, T* grad_frequency, T* grad_phase) {
    show(q);
    const T* query = at(a_.query, q * a_.heads * width_);
    const T* score = at(a_.score, q * a_.heads * a_.places);
    const T* grad = at(a_.grad_out, q * a_.heads * width_);
    const T* grad_weight = at(a_.grad_weight, q * a_.heads);
    T* grad_query = at(a_.grad_query, q * a_.heads * width_);
    T* grad_offset = at(a_.grad_offset, q * a_.heads);
    shares(q, score);
    slope_.assign(a_.heads * a_.places, T(0));
    for (int64_t h = 0; h < a_.heads; ++h) {
      T* slope = &slope_[h * a_.places];
      const T* share = &share_[h * a_.places];
      const T* kept = &kept_[h * a_.places];
      T mean = 0;
      for (int64_t e = 0; e < seen_; ++e) {
        slope[e] = (dot(grad + h * width_, &x_[e * stride_], width_) + grad_weight[h]) * kept[e];
        mean += share[e] * slope[e];
      }
      T* to = grad_query + h * width_;
      std::fill(to, to + width_, T(0));
      grad_offset[h] = 0;
      for (int64_t e = 0; e < seen_; ++e) {
        slope[e] = share[e] * (slope[e] - mean) * (score[h * a_.places + slot_[e]] > T(0) ? T(1) : static_cast<T>(a_.slope));
        add(to, slope[e], &x_[e * stride_], width_);
        grad_offset[h] += slope[e];
      }
    }
    const int64_t time = a_.row_width + a_.feature_width;
    for (int64_t e = 0; e < seen_; ++e) {
      T* sine = &sine_[e * times_];
      const T since = at(a_.since, q * a_.places)[slot_[e]];
      T* row = grad_row == nullptr ? nullptr : grad_row + a_.near[q * a_.places + slot_[e]] * a_.row_width;
      for (int64_t h = 0; h < a_.heads; ++h) {
        const int64_t i = h * a_.places + e;
        const T share = share_[i] * kept_[i], slope = slope_[i];
        const T* from = query + h * width_;
        const T* back = grad + h * width_;
        if (row != nullptr) {
#pragma omp simd
          for (int64_t c = 0; c < a_.row_width; ++c) row[c] += slope * from[c] + share * back[c];
        }
#pragma omp simd
        for (int64_t c = 0; c < a_.time_width; ++c) {
          const T change = -sine[c] * (slope * from[time + c] + share * back[time + c]);
          grad_phase[c] += change;
          grad_frequency[c] += change * since;
        }
      }
    }
  }

 private:
  static const T* at(const void* from, int64_t place) { return static_cast<const T*>(from) + place; }
  static T* at(void* from, int64_t place) { return static_cast<T*>(from) + place; }

  // x of a query's events, in order; `slot_` has their slots.
  void show(int64_t q) {
    seen_ = 0;
    for (int64_t p = 0; p < a_.places; ++p) {
      const int64_t i = q * a_.places + p;
      if (a_.near[i] < 0) continue;
      T* x = &x_[seen_ * stride_];
      const T* row = at(a_.row, a_.near[i] * a_.row_width);
      std::copy(row, row + a_.row_width, x);
      const T* feature = at(a_.feature, a_.feature_width ? a_.edge[i] * a_.feature_width : 0);
      std::copy(feature, feature + a_.feature_width, x + a_.row_width);
      sincos(frequency_.data(), phase_.data(), at(a_.since, 0)[i], times_, x + a_.row_width + a_.feature_width,
           &sine_[seen_ * times_]);
      slot_[seen_++] = p;
    }
  }

  void shares(int64_t q, const T* score) {
    for (int64_t h = 0; h < a_.heads; ++h) {
      T* share = &share_[h * a_.places];
      T highest = -std::numeric_limits<T>::infinity(), total = 0;
      for (int64_t e = 0; e < seen_; ++e) {
        const T raw = score[h * a_.places + slot_[e]];
        share[e] = raw > T(0) ? raw : raw * static_cast<T>(a_.slope);
        highest = std::max(highest, share[e]);
      }
      for (int64_t e = 0; e < seen_; ++e) total += share[e] = std::exp(share[e] - highest);
      for (int64_t e = 0; e < seen_; ++e) share[e] /= total;
    }
    drop(q);
  }

  // Word h * places + p of a query is the draw of slot p and head h, as in ops.dropout.mask.
  void drop(int64_t q) {
    if (!a_.threshold) {
      std::fill(kept_.begin(), kept_.end(), T(1));
      return;
    }
    const Draws draws{a_.key, a_.place};
    int64_t group = -1;
    Words words{};
    for (int64_t h = 0; h < a_.heads; ++h) {
      for (int64_t e = 0; e < seen_; ++e) {
        const int64_t word = h * a_.places + slot_[e];
        if (word / 4 != group) words = draws(static_cast<uint64_t>(a_.ids[q]), static_cast<uint32_t>(group = word / 4));
        kept_[h * a_.places + e] = words[word % 4] >= a_.threshold ? static_cast<T>(a_.scale) : T(0);
      }
    }
  }

  const RecentArgs& a_;
  const int64_t width_, times_, stride_;  // columns; of times and of all, padded to whole vectors
  std::vector<T> x_, sine_, frequency_, phase_, share_, kept_, slope_;
  std::vector<int64_t> slot_;
  int64_t seen_ = 0;
};

template <typename T>
void forward(const RecentArgs& a) {
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    Worker<T> worker(a);
#pragma omp for schedule(static)
    for (int64_t q = 0; q < a.n; ++q) worker.forward(q);
  }
}

// Each thread has sums over a fixed share of the queries; they are added in order.
template <typename T>
void backward(const RecentArgs& a) {
  const int64_t rows = a.grad_row == nullptr ? 0 : a.rows * a.row_width, each = rows + 2 * a.time_width;
  T* sums = static_cast<T*>(std::calloc(static_cast<size_t>(std::max<int64_t>(a.threads * each, 1)), sizeof(T)));
  if (sums == nullptr) std::abort();
#pragma omp parallel for num_threads(a.threads) schedule(static, 1) if (a.threads > 1)
  for (int t = 0; t < a.threads; ++t) {
    Worker<T> worker(a);
    T* own = sums + t * each;
    for (int64_t q = a.n * t / a.threads; q < a.n * (t + 1) / a.threads; ++q) {
      worker.backward(q, rows ? own : nullptr, own + rows, own + rows + a.time_width);
    }
  }
  T* grad_row = static_cast<T*>(a.grad_row);
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.threads > 1)
  for (int64_t i = 0; i < rows; ++i) {
    T total = 0;
    for (int t = 0; t < a.threads; ++t) total += sums[t * each + i];
    grad_row[i] = total;
  }
  for (int64_t c = 0; c < a.time_width; ++c) {
    T frequency = 0, phase = 0;
    for (int t = 0; t < a.threads; ++t) {
      frequency += sums[t * each + rows + c];
      phase += sums[t * each + rows + a.time_width + c];
    }
    static_cast<T*>(a.grad_frequency)[c] = frequency;
    static_cast<T*>(a.grad_phase)[c] = phase;
  }
  std::free(sums);
}

}  // namespace

void attend_recent(const RecentArgs& a) { a.wide ? forward<double>(a) : forward<float>(a); }

void attend_recent_back(const RecentArgs& a) { a.wide ? backward<double>(a) : backward<float>(a); }

}  // namespace gnnfleet::GNNFLEET_ISA
