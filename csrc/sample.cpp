#include "sample.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "logarithm.h"

namespace gnnfleet {
namespace {

constexpr int64_t kGrain = 1 << 13;  // seeds; below this, waking threads costs more than they do
constexpr int64_t kSeeds = 512;      // seeds a thread takes at a time, few enough to balance hubs
constexpr int64_t kAhead = 16;       // how many steps ahead memory is asked for
constexpr int64_t kSmall = 32;       // fanouts up to here are kept sorted by insertion

// The words of one node, one after the other.
class Stream {
 public:
  Stream(const Draws& draws, int64_t node) : draws_(draws), node_(static_cast<uint64_t>(node)) {}

  uint32_t word() {
    if (at_ == 4) {
      words_ = draws_(node_, turn_++);
      at_ = 0;
    }
    return words_[at_++];
  }

  uint64_t wide() {
    const uint32_t low = word();
    return join(low, word());
  }

  // 0 .. n-1, each exactly as likely: Lemire's multiplication, drawing again in the few cases that would favour some.
  int64_t under(int64_t n) {
    if (n > int64_t{0xffffffff}) return static_cast<int64_t>(below(wide(), static_cast<uint64_t>(n)));
    const uint32_t limit = static_cast<uint32_t>(n);
    uint64_t product = static_cast<uint64_t>(word()) * limit;
    if (static_cast<uint32_t>(product) < limit) {
      const uint32_t uneven = (0u - limit) % limit;
      while (static_cast<uint32_t>(product) < uneven) product = static_cast<uint64_t>(word()) * limit;
    }
    return static_cast<int64_t>(product >> 32);
  }

 private:
  const Draws& draws_;
  uint64_t node_;
  uint32_t turn_ = 0;
  int at_ = 4;
  Words words_{};
};

// Room that a thread keeps from seed to seed.
struct Room {
  std::vector<uint64_t> taken;
  std::vector<std::pair<double, int64_t>> keyed;
  std::vector<double> sums;
};

// Floyd's k of 0 .. d-1, every subset as likely: for j = d-k .. d-1 take a number up to j, or j if that is taken. The
// three ways below keep the set differently and agree on it.

void floyd_word(Stream& stream, int64_t degree, int64_t k, int64_t first, int64_t* out) {
  uint64_t taken = 0;
  for (int64_t j = degree - k; j < degree; ++j) {
    const int64_t t = stream.under(j + 1);
    taken |= uint64_t{1} << ((taken >> t & 1) ? j : t);
  }
  for (int64_t i = 0; i < k; ++i, taken &= taken - 1) out[i] = first + std::countr_zero(taken);
}

void floyd_insert(Stream& stream, int64_t degree, int64_t k, int64_t first, int64_t* out) {
  int64_t size = 0;
  for (int64_t j = degree - k; j < degree; ++j, ++size) {
    const int64_t t = first + stream.under(j + 1);
    int64_t at = size;
    while (at > 0 && out[at - 1] > t) --at;
    if (at > 0 && out[at - 1] == t) {
      out[size] = first + j;  // above all before it
      continue;
    }
    std::move_backward(out + at, out + size, out + size + 1);
    out[at] = t;
  }
}

void floyd_bits(Stream& stream, int64_t degree, int64_t k, int64_t first, std::vector<uint64_t>& taken, int64_t* out) {
  taken.assign(static_cast<size_t>((degree + 63) / 64), 0);
  for (int64_t j = degree - k; j < degree; ++j) {
    int64_t t = stream.under(j + 1);
    if (taken[t >> 6] >> (t & 63) & 1) t = j;
    taken[t >> 6] |= uint64_t{1} << (t & 63);
  }
  for (size_t w = 0; w < taken.size(); ++w) {
    for (uint64_t bits = taken[w]; bits; bits &= bits - 1) *out++ = first + static_cast<int64_t>(w) * 64 + std::countr_zero(bits);
  }
}

void draw_subset(Stream& stream, int64_t degree, int64_t k, int64_t first, Room& room, int64_t* out) {
  if (degree <= 64) floyd_word(stream, degree, k, first, out);
  else if (k <= kSmall) floyd_insert(stream, degree, k, first, out);
  else floyd_bits(stream, degree, k, first, room.taken, out);
}

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

// How many edges have a weight, as far as that matters: counting ends at `enough`.
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
    draw_subset(stream, degree, k, first, room, out);
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
