#include "sample.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "logarithm.h"
#include "subset.h"

namespace gnnfleet {
namespace {

constexpr int64_t kGrain = 1 << 13;  // seeds; with less work, starting threads costs more than they save
constexpr int64_t kSeeds = 512;      // seeds per task, few enough to balance hubs
constexpr int64_t kAhead = 16;       // steps between a prefetch and its use

// Buffers that a thread reuses for all its seeds.
struct Room {
  std::vector<uint64_t> taken;
  std::vector<std::pair<double, int64_t>> keyed;
  std::vector<double> sums;
};

// Efraimidis and Spirakis: the k smallest of exponential draws divided by weight.
void draw_weighted_subset(Stream& stream, const float* weight, int64_t degree, int64_t k, int64_t first, Room& room, int64_t* out) {
  auto& keyed = room.keyed;
  keyed.clear();
  for (int64_t i = 0; i < degree; ++i) {
    const uint64_t word = stream.wide();  // also for edges of weight 0, so that a draw belongs to a position
    if (weight[i] > 0) keyed.emplace_back(-logarithm(1 - unit(word)) / static_cast<double>(weight[i]), first + i);
  }
  if (static_cast<int64_t>(keyed.size()) > k) std::nth_element(keyed.begin(), keyed.begin() + k, keyed.end());
  for (int64_t i = 0; i < k; ++i) out[i] = keyed[static_cast<size_t>(i)].second;
  std::sort(out, out + k);
}

void draw_again(Stream& stream, int64_t degree, int64_t k, int64_t first, int64_t* out) {
  for (int64_t i = 0; i < k; ++i) out[i] = first + stream.under(degree);
  std::sort(out, out + k);
}

void draw_weighted_again(Stream& stream, const float* weight, int64_t degree, int64_t k, int64_t first, Room& room, int64_t* out) {
  auto& sums = room.sums;
  sums.resize(static_cast<size_t>(degree));
  double total = 0;
  int64_t last = 0;  // a product may round up to the total: then the last edge that can be taken is
  for (int64_t i = 0; i < degree; ++i) {
    if (weight[i] > 0) last = i;
    sums[static_cast<size_t>(i)] = total += static_cast<double>(weight[i]);
  }
  for (int64_t i = 0; i < k; ++i) {
    const double at = unit(stream.wide()) * total;
    out[i] = first + std::min<int64_t>(last, std::upper_bound(sums.begin(), sums.end(), at) - sums.begin());
  }
  std::sort(out, out + k);
}

// Number of edges with a weight; counting ends at `enough`.
int64_t count_weighted(const float* weight, int64_t degree, int64_t enough) {
  int64_t count = 0;
  for (int64_t i = 0; i < degree && count < enough; ++i) count += weight[i] > 0;
  return count;
}

int64_t count_of(const SampleArgs& args, int64_t first, int64_t degree) {
  if (args.fanout < 0) return degree;
  if (!args.weight) return args.replace ? (degree ? args.fanout : 0) : std::min(degree, args.fanout);
  if (args.replace) return count_weighted(args.weight + first, degree, 1) ? args.fanout : 0;
  return count_weighted(args.weight + first, degree, args.fanout);
}

void draw(const SampleArgs& args, int64_t node, int64_t first, int64_t degree, int64_t k, Room& room, int64_t* out) {
  if (k == 0) return;
  Stream stream(args.draws, node);
  if (args.fanout < 0 || (!args.replace && k == degree)) {
    for (int64_t i = 0; i < degree; ++i) out[i] = first + i;
  } else if (args.weight) {
    const float* weight = args.weight + first;
    if (args.replace) draw_weighted_again(stream, weight, degree, k, first, room, out);
    else draw_weighted_subset(stream, weight, degree, k, first, room, out);
  } else if (args.replace) {
    draw_again(stream, degree, k, first, out);
  } else {
    draw_subset(stream, degree, k, first, room.taken, out);
  }
}

}  // namespace

void count_samples(const SampleArgs& args, int64_t* offsets) {
  offsets[0] = 0;
#pragma omp parallel for num_threads(args.threads) schedule(static) if (args.threads > 1 && args.n >= kGrain)
  for (int64_t i = 0; i < args.n; ++i) {
    if (i + kAhead < args.n) __builtin_prefetch(args.indptr + args.seeds[i + kAhead]);
    const int64_t first = args.indptr[args.seeds[i]];
    offsets[i + 1] = count_of(args, first, args.indptr[args.seeds[i] + 1] - first);
  }
  for (int64_t i = 0; i < args.n; ++i) offsets[i + 1] += offsets[i];
}

void draw_samples(const SampleArgs& args, const int64_t* offsets, int64_t* edges) {
#pragma omp parallel num_threads(args.threads) if (args.threads > 1 && args.n >= kGrain)
  {
    Room room;
#pragma omp for schedule(dynamic, kSeeds)
    for (int64_t i = 0; i < args.n; ++i) {
      if (i + kAhead < args.n) __builtin_prefetch(args.indptr + args.seeds[i + kAhead]);
      const int64_t row = args.seeds[i], first = args.indptr[row];
      draw(args, args.ids[i], first, args.indptr[row + 1] - first, offsets[i + 1] - offsets[i], room, edges + offsets[i]);
    }
  }
}

}  // namespace gnnfleet
