// Clustering by capped label propagation and the quotient graph between clusters; see stream.h.
#include <algorithm>
#include <array>
#include <utility>

#include "stream.h"

namespace gnnfleet {
namespace {

constexpr int64_t kAhead = 12;         // edges between a prefetch and its use
constexpr int64_t kMostEvidence = 1024;  // in-neighbours read: a larger sample would not change the cluster of a hub

uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

// Counts labels of one neighbourhood. Small enough to stay in the first cache level for ordinary nodes.
class Tally {
 public:
  void add(int32_t label, int32_t count) {
    uint32_t slot = static_cast<uint32_t>(label) * 2654435761u >> kShift;
    while (count_[slot] != 0 && label_[slot] != label) slot = (slot + 1) & kMask;
    if (count_[slot] == 0) {
      label_[slot] = label;
      touched_[used_++] = static_cast<int32_t>(slot);
    }
    count_[slot] += count;
  }

  template <class Visit>
  void drain(Visit visit) {
    for (int32_t i = 0; i < used_; ++i) {
      const int32_t slot = touched_[i];
      visit(label_[slot], count_[slot]);
      count_[slot] = 0;
    }
    used_ = 0;
  }

 private:
  static constexpr int kBits = 12;
  static constexpr uint32_t kShift = 32 - kBits;
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  static_assert((1 << kBits) > 2 * kMostEvidence);
  std::array<int32_t, 1 << kBits> label_{};
  std::array<int32_t, 1 << kBits> count_{};
  std::array<int32_t, 1 << kBits> touched_{};
  int32_t used_ = 0;
};

template <class Id>
void gather(const EdgeChunk<Id>& chunk, int64_t i, const ClusterState& state, Tally& tally) {
  const int64_t v = chunk.first + i;
  const int64_t begin = chunk.indptr[i];
  const int64_t end = chunk.indptr[i + 1];
  const int64_t last = chunk.indptr[chunk.count];
  const int64_t step = std::max<int64_t>(1, (end - begin + kMostEvidence - 1) / kMostEvidence);
  for (int64_t e = begin; e < end; e += step) {
    if (e + kAhead < last) __builtin_prefetch(state.label + chunk.src[e + kAhead]);
    const int64_t u = chunk.src[e];
    if (u != v) tally.add(state.label[u], 1);
  }
  if (state.vote != nullptr && state.vote_count[v] > 0) tally.add(state.vote[v], state.vote_count[v]);
}

// The label with the most neighbours among those with room; the present one wins ties, then the hash decides.
int32_t choose(int64_t v, const ClusterState& state, Tally& tally) {
  const int32_t own = state.label[v];
  const int64_t weight = state.weight ? state.weight[v] : 1;
  int32_t best = own;
  int32_t best_count = 0;
  uint64_t best_rank = 0;
  tally.drain([&](int32_t label, int32_t count) {
    if (count < best_count || (label != own && state.mass[label] + weight > state.cap)) return;
    const uint64_t rank = label == own ? ~0ULL : mix(state.seed ^ static_cast<uint64_t>(label));
    if (count == best_count && rank <= best_rank) return;
    best = label;
    best_count = count;
    best_rank = rank;
  });
  return best;
}

void cast_vote(const ClusterState& state, int64_t voter, int32_t label) {
  int32_t& count = state.vote_count[voter];
  if (count == 0) state.vote[voter] = label;
  count += state.vote[voter] == label ? 1 : -1;
}

}  // namespace

template <class Id>
uint64_t asymmetry_chunk(const EdgeChunk<Id>& chunk) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < chunk.count; ++i) {
    // Two independent hashes f, g; f(u) g(v) - g(u) f(v) changes sign with the direction. Summed over u first, so that an
    // edge costs two hashes.
    uint64_t f = 0;
    uint64_t g = 0;
    for (int64_t e = chunk.indptr[i]; e < chunk.indptr[i + 1]; ++e) {
      f += mix(static_cast<uint64_t>(chunk.src[e]) + 1);
      g += mix(~static_cast<uint64_t>(chunk.src[e]));
    }
    const uint64_t v = static_cast<uint64_t>(chunk.first + i);
    sum += f * mix(~v) - g * mix(v + 1);
  }
  return sum;
}

template <class Id>
int64_t cluster_chunk(const EdgeChunk<Id>& chunk, const ClusterState& state) {
  Tally tally;
  int64_t moves = 0;
  for (int64_t i = 0; i < chunk.count; ++i) {
    const int64_t v = chunk.first + i;
    gather(chunk, i, state, tally);
    const int32_t from = state.label[v];
    const int32_t to = choose(v, state, tally);
    if (to != from) {
      const int64_t weight = state.weight ? state.weight[v] : 1;
      state.mass[from] -= weight;
      state.mass[to] += weight;
      state.label[v] = to;
      ++moves;
    }
    if (state.vote == nullptr) continue;
    for (int64_t e = chunk.indptr[i]; e < chunk.indptr[i + 1]; ++e) {
      if (chunk.src[e] != static_cast<Id>(v)) cast_vote(state, chunk.src[e], to);
    }
  }
  return moves;
}

namespace {

// Slot of `key`, or the empty slot where it belongs.
uint64_t find(const PairTable& table, uint64_t key) {
  const uint64_t mask = table.key.size() - 1;
  uint64_t slot = mix(key) & mask;
  while (table.weight[slot] != 0 && table.key[slot] != key) slot = (slot + 1) & mask;
  return slot;
}

// Drops the lightest pairs so that at most a quarter of the slots stays in use; returns the pairs left. Equal weights are
// ranked by hash bits that do not decide the slot: ranked by slot, the remaining pairs would fill one end of the table.
int64_t prune(const PairTable& table) {
  using Entry = std::pair<uint64_t, uint32_t>;
  std::vector<Entry> left;
  left.reserve(table.key.size() / 2 + 1);
  for (size_t s = 0; s < table.key.size(); ++s) {
    if (table.weight[s] != 0) left.emplace_back(table.key[s], table.weight[s]);
  }
  const size_t room = table.key.size() / 4;
  const auto heavier = [](const Entry& a, const Entry& b) {
    return a.second != b.second ? a.second > b.second : mix(a.first) >> 32 < mix(b.first) >> 32;
  };
  if (left.size() > room) {
    std::nth_element(left.begin(), left.begin() + static_cast<int64_t>(room), left.end(), heavier);
    left.resize(room);
  }
  std::fill(table.weight.begin(), table.weight.end(), 0u);
  for (const auto& [key, weight] : left) {
    const uint64_t slot = find(table, key);
    table.key[slot] = key;
    table.weight[slot] = weight;
  }
  return static_cast<int64_t>(left.size());
}

}  // namespace

template <class Id>
int64_t quotient_chunk(const EdgeChunk<Id>& chunk, const int32_t* label, const PairTable& table, int64_t used) {
  const int64_t most = static_cast<int64_t>(table.key.size()) / 2;
  const int64_t last = chunk.indptr[chunk.count];
  for (int64_t i = 0; i < chunk.count; ++i) {
    const uint64_t a = static_cast<uint32_t>(label[chunk.first + i]);
    for (int64_t e = chunk.indptr[i]; e < chunk.indptr[i + 1]; ++e) {
      if (e + kAhead < last) __builtin_prefetch(label + chunk.src[e + kAhead]);
      const uint64_t b = static_cast<uint32_t>(label[chunk.src[e]]);
      if (a == b) continue;
      const uint64_t key = std::min(a, b) << 32 | std::max(a, b);
      const uint64_t slot = find(table, key);
      if (table.weight[slot]++ != 0) continue;
      table.key[slot] = key;
      if (++used > most) used = prune(table);
    }
  }
  return used;
}

void quotient_csr(const PairTable& table, int64_t clusters, int32_t* indptr, int32_t* neighbour, int32_t* weight) {
  std::vector<int32_t> fill(clusters + 1, 0);
  for (size_t s = 0; s < table.key.size(); ++s) {
    if (table.weight[s] == 0) continue;
    ++fill[table.key[s] >> 32];
    ++fill[table.key[s] & 0xffffffffULL];
  }
  indptr[0] = 0;
  for (int64_t c = 0; c < clusters; ++c) {
    indptr[c + 1] = indptr[c] + fill[c];
    fill[c] = indptr[c];
  }
  for (size_t s = 0; s < table.key.size(); ++s) {
    if (table.weight[s] == 0) continue;
    const int32_t a = static_cast<int32_t>(table.key[s] >> 32);
    const int32_t b = static_cast<int32_t>(table.key[s] & 0xffffffffULL);
    const int32_t w = static_cast<int32_t>(std::min<uint32_t>(table.weight[s], 1u << 30));
    neighbour[fill[a]] = b;
    weight[fill[a]++] = w;
    neighbour[fill[b]] = a;
    weight[fill[b]++] = w;
  }
}

template uint64_t asymmetry_chunk(const EdgeChunk<int32_t>&);
template uint64_t asymmetry_chunk(const EdgeChunk<int64_t>&);
template int64_t cluster_chunk(const EdgeChunk<int32_t>&, const ClusterState&);
template int64_t cluster_chunk(const EdgeChunk<int64_t>&, const ClusterState&);
template int64_t quotient_chunk(const EdgeChunk<int32_t>&, const int32_t*, const PairTable&, int64_t);
template int64_t quotient_chunk(const EdgeChunk<int64_t>&, const int32_t*, const PairTable&, int64_t);

}  // namespace gnnfleet
