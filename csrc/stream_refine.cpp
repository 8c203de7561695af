// Refinement of an assignment on the volume sum (lambda - 1) with saturating pin counters; see stream.h.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <utility>

#include "stream.h"

namespace gnnfleet {
namespace {

constexpr int64_t kAhead = 12;

// Counters of BITS bits in WORDS words a node. The number of words is a template argument because with one word (up to 16
// parts) a net costs one load and a few shifts, and the loop over words must vanish.
template <int BITS, int WORDS>
class Pins {
 public:
  static constexpr int kPerWord = 64 / BITS;
  static constexpr int kParts = kPerWord * WORDS;
  static constexpr uint64_t kFull = (1ULL << BITS) - 1;
  static constexpr uint64_t kOnes = ~0ULL / kFull;  // a one in each counter

  explicit Pins(uint64_t* word) : word_(word) {}

  const uint64_t* net(int64_t j) const { return word_ + j * WORDS; }

  uint64_t count(int64_t j, int part) const { return net(j)[part / kPerWord] >> shift(part) & kFull; }

  void add(int64_t j, int part) {
    if (count(j, part) != kFull) word_[j * WORDS + part / kPerWord] += 1ULL << shift(part);
  }

  // Empty counters stay empty: they occur only if a destination was read in several chunks.
  void remove(int64_t j, int part) {
    const uint64_t now = count(j, part);
    if (now != kFull && now != 0) word_[j * WORDS + part / kPerWord] -= 1ULL << shift(part);
  }

  // A one in each counter that is not zero.
  static uint64_t present(uint64_t word) {
    uint64_t any = word | word >> 1;
    if constexpr (BITS == 4) any |= any >> 2;
    return any & kOnes;
  }

 private:
  static int shift(int part) { return part % kPerWord * BITS; }
  uint64_t* word_;
};

// For one node: the number of its nets in each part, and of those in which it is the only pin of its part.
template <class P, int WORDS>
class Evidence {
 public:
  void clear() {
    if (spilled_) present_.fill(0);
    spilled_ = false;
    packed_.fill(0);
    pending_ = 0;
    nets_ = 0;
    alone_ = 0;
  }

  void add(const P& pins, int64_t j, int own) {
    const uint64_t* net = pins.net(j);
    for (int w = 0; w < WORDS; ++w) packed_[w] += P::present(net[w]);
    alone_ += pins.count(j, own) == 1;
    ++nets_;
    if (++pending_ == static_cast<int>(P::kFull)) spill();
  }

  // Change of volume, positive for better, if the node goes to `part`.
  int64_t gain(int part) const { return alone_ - nets_ + present_[part]; }

  int64_t nets() const { return nets_; }

  // Unless the node is the only pin of some net, no move can reduce the volume.
  bool hopeless() const { return alone_ == 0; }

  void spill() {
    constexpr int bits = 64 / P::kPerWord;
    for (int w = 0; w < WORDS; ++w) {
      for (int c = 0; packed_[w] != 0; ++c, packed_[w] >>= bits) {
        present_[w * P::kPerWord + c] += static_cast<int64_t>(packed_[w] & P::kFull);
      }
    }
    pending_ = 0;
    spilled_ = true;
  }

 private:
  std::array<int64_t, P::kParts> present_;
  std::array<uint64_t, WORDS> packed_;
  bool spilled_ = true;
  int pending_;
  int64_t nets_;
  int64_t alone_;
};

bool overfull(const PartState& state, int part) {
  return state.load[part] > state.load_cap || state.size[part] > state.size_cap;
}

bool fits(const PartState& state, int part, int64_t weight) {
  return state.load[part] + weight <= state.load_cap && state.size[part] + 1 <= state.size_cap;
}

// The part with the smallest load that can take the weight, and the node if `sizes`; `own` if there is none.
int lightest_with_room(const PartState& state, int own, int64_t weight, bool sizes) {
  int best = own;
  for (int p = 0; p < state.parts; ++p) {
    const bool room = sizes ? fits(state, p, weight) : state.load[p] + weight <= state.load_cap;
    if (p != own && room && (best == own || state.load[p] < state.load[best])) best = p;
  }
  return best;
}

template <class Gains>
int choose(const PartState& state, int own, int64_t weight, const Gains& gains, int64_t unseen, int64_t max_loss) {
  const bool forced = overfull(state, own);
  int best = own;
  // Half of the nets that were not read are expected to gain a part by the move.
  int64_t best_gain = forced ? -max_loss : (unseen + 1) / 2;
  int64_t best_load = forced ? std::numeric_limits<int64_t>::max() : state.load[own] - weight;
  for (int p = 0; p < state.parts; ++p) {
    if (p == own) continue;
    const int64_t gain = gains.gain(p);
    if (gain < best_gain || !fits(state, p, weight)) continue;
    if (gain == best_gain && state.load[p] >= best_load) continue;
    best = p;
    best_gain = gain;
    best_load = state.load[p];
  }
  return best;
}

void relocate(const PartState& state, int64_t v, int to) {
  const int64_t weight = state.weight ? state.weight[v] : 1;
  const int from = state.part[v];
  state.load[from] -= weight;
  state.load[to] += weight;
  --state.size[from];
  ++state.size[to];
  state.part[v] = to;
}

// Calls `act` for each net that destination i of the chunk is a pin of, except its own. Equal neighbours in a row are one net.
template <class Id, class Layout, class Act>
void for_each_net(const EdgeChunk<Id>& chunk, int64_t i, const Layout& pins, Act act) {
  const int64_t v = chunk.first + i;
  const int64_t last = chunk.indptr[chunk.count];
  int64_t previous = v;
  for (int64_t e = chunk.indptr[i]; e < chunk.indptr[i + 1]; ++e) {
    if (e + kAhead < last) __builtin_prefetch(pins.net(chunk.src[e + kAhead]), 1);
    const int64_t j = chunk.src[e];
    if (j != v && j != previous) act(j);
    previous = j;
  }
}

template <int BITS, int WORDS, class Id>
int64_t refine(const EdgeChunk<Id>& chunk, Pins<BITS, WORDS> pins, const PartState& state, int64_t max_loss) {
  Evidence<Pins<BITS, WORDS>, WORDS> evidence;
  int64_t moves = 0;
  for (int64_t i = 0; i < chunk.count; ++i) {
    const int64_t v = chunk.first + i;
    const int own = state.part[v];
    evidence.clear();
    evidence.add(pins, v, own);
    for_each_net(chunk, i, pins, [&](int64_t j) { evidence.add(pins, j, own); });
    if (evidence.hopeless() && !overfull(state, own)) continue;
    evidence.spill();
    const int64_t weight = state.weight ? state.weight[v] : 1;
    const int64_t unseen = state.degree ? state.degree[v] + 1 - evidence.nets() : 0;
    const int to = choose(state, own, weight, evidence, unseen, max_loss);
    if (to == own) continue;
    for_each_net(chunk, i, pins, [&](int64_t j) {
      pins.remove(j, own);
      pins.add(j, to);
    });
    pins.remove(v, own);
    pins.add(v, to);
    relocate(state, v, to);
    ++moves;
  }
  return moves;
}

// Calls `act` with the counters in their static layout.
template <class Act>
auto dispatch(const PinCounts& pins, Act act) {
  if (pins.bits == 4) {
    if (pins.words == 1) return act(Pins<4, 1>(pins.word));
    if (pins.words == 2) return act(Pins<4, 2>(pins.word));
    return act(Pins<4, 4>(pins.word));
  }
  if (pins.words == 4) return act(Pins<2, 4>(pins.word));
  return act(Pins<2, 6>(pins.word));
}

}  // namespace

void pins_reset(const PinCounts& pins, const int32_t* part, int64_t num_nodes) {
  std::fill(pins.word, pins.word + num_nodes * pins.words, 0ULL);
  dispatch(pins, [&](auto layout) {
    for (int64_t v = 0; v < num_nodes; ++v) layout.add(v, part[v]);
  });
}

template <class Id>
void pins_chunk(const EdgeChunk<Id>& chunk, const PinCounts& pins, const int32_t* part) {
  dispatch(pins, [&](auto layout) {
    for (int64_t i = 0; i < chunk.count; ++i) {
      const int own = part[chunk.first + i];
      for_each_net(chunk, i, layout, [&](int64_t j) { layout.add(j, own); });
    }
  });
}

int64_t pins_volume(const PinCounts& pins, int64_t num_nodes) {
  return dispatch(pins, [&](auto layout) {
    int64_t volume = -num_nodes;
    for (int64_t i = 0; i < num_nodes * pins.words; ++i) volume += __builtin_popcountll(layout.present(pins.word[i]));
    return volume;
  });
}

template <class Id>
int64_t refine_chunk(const EdgeChunk<Id>& chunk, const PinCounts& pins, const PartState& state, int64_t max_loss) {
  return dispatch(pins, [&](auto layout) { return refine(chunk, layout, state, max_loss); });
}

void fill_lightest(const int64_t* order, int64_t count, const int64_t* mass, int32_t* part, std::span<int64_t> load) {
  using Entry = std::pair<int64_t, int32_t>;
  std::vector<Entry> heap;
  for (size_t p = 0; p < load.size(); ++p) heap.emplace_back(load[p], static_cast<int32_t>(p));
  const auto later = std::greater<Entry>();
  std::make_heap(heap.begin(), heap.end(), later);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t item = order[i];
    if (part[item] >= 0) continue;
    std::pop_heap(heap.begin(), heap.end(), later);
    auto& [smallest, p] = heap.back();
    part[item] = p;
    smallest += mass[item];
    load[p] = smallest;
    std::push_heap(heap.begin(), heap.end(), later);
  }
}

int64_t rebalance(const PartState& state, int64_t num_nodes) {
  int64_t moves = 0;
  // First loads, ignoring sizes; then sizes, as far as loads allow.
  for (const bool sizes : {false, true}) {
    for (int64_t v = 0; v < num_nodes; ++v) {
      const int own = state.part[v];
      if (sizes ? state.size[own] <= state.size_cap : state.load[own] <= state.load_cap) continue;
      const int64_t weight = state.weight ? state.weight[v] : 1;
      if (!sizes && weight == 0) continue;
      const int to = lightest_with_room(state, own, weight, sizes);
      if (to == own) continue;
      relocate(state, v, to);
      ++moves;
    }
  }
  return moves;
}

template void pins_chunk(const EdgeChunk<int32_t>&, const PinCounts&, const int32_t*);
template void pins_chunk(const EdgeChunk<int64_t>&, const PinCounts&, const int32_t*);
template int64_t refine_chunk(const EdgeChunk<int32_t>&, const PinCounts&, const PartState&, int64_t);
template int64_t refine_chunk(const EdgeChunk<int64_t>&, const PinCounts&, const PartState&, int64_t);

}  // namespace gnnfleet
