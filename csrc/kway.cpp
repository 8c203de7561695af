// Contraction, growing and the multilevel scheme of kway.h.
#include "kway.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

namespace gnnfleet {
namespace {

constexpr int32_t kNodesPerPart = 30;  // contraction stops here: enough choice for growing, few enough to try often
constexpr int64_t kTries = 12;  // of growing, on the smallest graph
constexpr int64_t kTryWork = int64_t{1} << 19;  // nodes times parts that all tries together may take before there are fewer
constexpr int32_t kMembers = 16;  // joined in one step: slower contraction leaves more levels to refine on
constexpr int kAttempts = 2;
constexpr int kCycles = 1;
constexpr std::array<int64_t, 2> kShares = {8, 16};  // of a part that a contracted node may fill; neither is always better

// Sums of weights by label, cleared in time proportional to the labels seen.
class Connections {
 public:
  explicit Connections(int32_t labels) : sum_(labels, 0) {}

  void add(int32_t label, int32_t weight) {
    if (sum_[label] == 0) seen_.push_back(label);
    sum_[label] += weight;
  }

  template <class Visit>
  void drain(Visit visit) {
    for (int32_t label : seen_) {
      visit(label, sum_[label]);
      sum_[label] = 0;
    }
    seen_.clear();
  }

 private:
  std::vector<int64_t> sum_;
  std::vector<int32_t> seen_;
};

int64_t total(const int64_t* values, int32_t count) { return std::accumulate(values, values + count, int64_t{0}); }

// Labels by two rounds of propagation: each node joins the neighbouring cluster it is tied to most strongly. Light nodes may
// join a heavy cluster at once; a limit on weight per step instead would leave them to cluster among themselves.
std::vector<int32_t> propagate(const KwayGraph& g, KwayCaps caps, const int32_t* within, KwayRandom& random) {
  std::vector<int32_t> label(g.nodes);
  std::iota(label.begin(), label.end(), 0);
  std::vector<int64_t> load(g.load, g.load + g.nodes);
  std::vector<int64_t> size(g.size, g.size + g.nodes);
  std::vector<int32_t> members(g.nodes, 1);
  Connections ties(g.nodes);
  for (int round = 0; round < 2; ++round) {
    for (int32_t v : random.permutation(g.nodes)) {
      for (int32_t e = g.indptr[v]; e < g.indptr[v + 1]; ++e) {
        const int32_t u = g.neighbour[e];
        if (within == nullptr || within[u] == within[v]) ties.add(label[u], g.weight[e]);
      }
      const int32_t own = label[v];
      int32_t best = own;
      int64_t best_tie = 0;
      ties.drain([&](int32_t c, int64_t tie) {
        const bool room = c == own || (members[c] < kMembers && load[c] + g.load[v] <= caps.load && size[c] + g.size[v] <= caps.size);
        if (room && (tie > best_tie || (tie == best_tie && c == own))) {
          best = c;
          best_tie = tie;
        }
      });
      load[own] -= g.load[v];
      size[own] -= g.size[v];
      load[best] += g.load[v];
      size[best] += g.size[v];
      --members[own];
      ++members[best];
      label[v] = best;
    }
  }
  return label;
}

// Renumbers labels to 0 .. count - 1 in order of first use; returns the count.
int32_t compact(std::vector<int32_t>& label) {
  std::vector<int32_t> number(label.size(), -1);
  int32_t count = 0;
  for (int32_t& l : label) {
    if (number[l] < 0) number[l] = count++;
    l = number[l];
  }
  return count;
}

KwayLevel contract(const KwayGraph& g, std::vector<int32_t> map, int32_t count) {
  KwayLevel coarse;
  coarse.load.assign(count, 0);
  coarse.size.assign(count, 0);
  std::vector<int32_t> start(count + 1, 0);
  for (int32_t v = 0; v < g.nodes; ++v) {
    coarse.load[map[v]] += g.load[v];
    coarse.size[map[v]] += g.size[v];
    ++start[map[v] + 1];
  }
  std::partial_sum(start.begin(), start.end(), start.begin());
  std::vector<int32_t> member(g.nodes);
  for (int32_t v = g.nodes; v-- > 0;) member[--start[map[v] + 1]] = v;
  Connections ties(count);
  coarse.indptr.push_back(0);
  for (int32_t c = 0; c < count; ++c) {
    const int32_t end = c + 1 < count ? start[c + 2] : g.nodes;
    for (int32_t m = start[c + 1]; m < end; ++m) {
      const int32_t v = member[m];
      for (int32_t e = g.indptr[v]; e < g.indptr[v + 1]; ++e) {
        if (map[g.neighbour[e]] != c) ties.add(map[g.neighbour[e]], g.weight[e]);
      }
    }
    ties.drain([&](int32_t other, int64_t tie) {
      coarse.neighbour.push_back(other);
      coarse.weight.push_back(static_cast<int32_t>(std::min<int64_t>(tie, std::numeric_limits<int32_t>::max())));
    });
    coarse.indptr.push_back(static_cast<int32_t>(coarse.neighbour.size()));
  }
  coarse.map = std::move(map);
  return coarse;
}

// What growing may put into one part.
struct Region {
  int64_t load = 0;
  int64_t size = 0;
};

}  // namespace

KwayGraph KwayLevel::view() const {
  return {static_cast<int32_t>(load.size()), indptr.data(), neighbour.data(), weight.data(), load.data(), size.data()};
}

uint64_t KwayRandom::next() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15ULL;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
  return z ^ z >> 31;
}

std::vector<int32_t> KwayRandom::permutation(int32_t count) {
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (int32_t i = count; i > 1; --i) std::swap(order[i - 1], order[below(static_cast<uint64_t>(i))]);
  return order;
}

KwayLevel kway_coarsen(const KwayGraph& graph, KwayCaps caps, const int32_t* within, KwayRandom& random) {
  std::vector<int32_t> label = propagate(graph, caps, within, random);
  const int32_t count = compact(label);
  return contract(graph, std::move(label), count);
}

void kway_grow(const KwayGraph& g, int32_t parts, KwayCaps caps, KwayRandom& random, int32_t* part) {
  std::fill(part, part + g.nodes, -1);
  const std::vector<int32_t> order = random.permutation(g.nodes);
  std::vector<int64_t> tie(g.nodes, 0);  // to the part being grown
  std::vector<int32_t> reached;
  int64_t left = total(g.load, g.nodes);
  size_t at = 0;
  for (int32_t p = 0; p < parts; ++p) {
    const int64_t goal = left / (parts - p);
    Region region;
    std::priority_queue<std::pair<int64_t, int32_t>> edge;
    for (int32_t v : reached) tie[v] = 0;
    reached.clear();
    while (region.load < goal || (p + 1 == parts && at < order.size())) {
      if (edge.empty()) {
        while (at < order.size() && part[order[at]] >= 0) ++at;
        if (at == order.size()) break;
        edge.emplace(tie[order[at]], order[at]);
      }
      const auto [known, v] = edge.top();
      edge.pop();
      if (part[v] >= 0 || known != tie[v]) continue;
      if (p + 1 < parts && (region.load + g.load[v] > caps.load || region.size + g.size[v] > caps.size)) break;
      part[v] = p;
      region.load += g.load[v];
      region.size += g.size[v];
      for (int32_t e = g.indptr[v]; e < g.indptr[v + 1]; ++e) {
        const int32_t u = g.neighbour[e];
        if (part[u] >= 0) continue;
        if (tie[u] == 0) reached.push_back(u);
        tie[u] += g.weight[e];
        edge.emplace(tie[u], u);
      }
    }
    left -= region.load;
  }
  for (int32_t v = 0; v < g.nodes; ++v) part[v] = std::max(part[v], 0);
}

namespace {

// Contracts until growing is cheap or nothing contracts any more. With `within`, only nodes of the same part are joined.
std::vector<KwayLevel> coarsen_all(const KwayGraph& graph, int32_t parts, KwayCaps caps, int64_t share,
                                   const int32_t* within, KwayRandom& random) {
  std::vector<KwayLevel> levels;
  std::vector<int32_t> side;
  KwayGraph now = graph;
  while (now.nodes > kNodesPerPart * parts) {
    KwayLevel next = kway_coarsen(now, {caps.load / share + 1, caps.size / share + 1}, within, random);
    if (static_cast<int64_t>(next.load.size()) * 20 > static_cast<int64_t>(now.nodes) * 19) break;
    if (within != nullptr) {
      std::vector<int32_t> coarse_side(next.load.size());
      for (int32_t v = 0; v < now.nodes; ++v) coarse_side[next.map[v]] = within[v];
      side = std::move(coarse_side);
      within = side.data();
    }
    levels.push_back(std::move(next));
    now = levels.back().view();
  }
  return levels;
}

std::vector<int32_t> grow_best(const KwayGraph& graph, int32_t parts, KwayCaps caps, KwayRandom& random) {
  std::vector<int32_t> best;
  int64_t best_cut = std::numeric_limits<int64_t>::max();
  const int64_t tries = std::clamp<int64_t>(kTryWork / (static_cast<int64_t>(graph.nodes) * parts + 1), 2, kTries);
  for (int64_t attempt = 0; attempt < tries; ++attempt) {
    std::vector<int32_t> now(graph.nodes);
    kway_grow(graph, parts, caps, random, now.data());
    const int64_t cut = kway_refine(graph, parts, caps, now.data());
    if (attempt > 0 && cut >= best_cut) continue;
    best_cut = cut;
    best = std::move(now);
  }
  return best;
}

// Carries the parts of the smallest graph back to the first one, refining at every level; consumes the levels.
std::vector<int32_t> project(const KwayGraph& graph, std::vector<KwayLevel>& levels, std::vector<int32_t> part,
                             int32_t parts, KwayCaps caps) {
  while (!levels.empty()) {
    const KwayLevel level = std::move(levels.back());
    levels.pop_back();
    const KwayGraph finer = levels.empty() ? graph : levels.back().view();
    std::vector<int32_t> now(finer.nodes);
    for (int32_t v = 0; v < finer.nodes; ++v) now[v] = part[level.map[v]];
    kway_refine(finer, parts, caps, now.data());
    part = std::move(now);
  }
  return part;
}

}  // namespace

namespace {

// Twice the cut, or the greatest int64 if a cap is exceeded, so that the smaller of two results is the better.
struct Found {
  std::vector<int32_t> part;
  int64_t cut;
};

Found from_scratch(const KwayGraph& graph, int32_t parts, KwayCaps caps, int64_t share, KwayRandom& random) {
  std::vector<KwayLevel> levels = coarsen_all(graph, parts, caps, share, nullptr, random);
  std::vector<int32_t> part = grow_best(levels.empty() ? graph : levels.back().view(), parts, caps, random);
  part = project(graph, levels, std::move(part), parts, caps);
  const int64_t cut = kway_refine(graph, parts, caps, part.data());
  return {std::move(part), cut};
}

// Contracts within the parts found and refines on the way back: clusters move that single nodes could not pull along.
Found again(const KwayGraph& graph, const Found& found, int32_t parts, KwayCaps caps, int64_t share, KwayRandom& random) {
  std::vector<KwayLevel> levels = coarsen_all(graph, parts, caps, share, found.part.data(), random);
  std::vector<int32_t> part = found.part;
  for (const KwayLevel& level : levels) {
    std::vector<int32_t> coarse(level.load.size());
    for (size_t v = 0; v < level.map.size(); ++v) coarse[level.map[v]] = part[v];
    part = std::move(coarse);
  }
  kway_refine(levels.empty() ? graph : levels.back().view(), parts, caps, part.data());
  part = project(graph, levels, std::move(part), parts, caps);
  const int64_t cut = kway_refine(graph, parts, caps, part.data());
  return {std::move(part), cut};
}

}  // namespace

void partition_kway(const KwayGraph& graph, int32_t parts, KwayCaps caps, uint64_t seed, int32_t* part) {
  KwayRandom random(seed);
  Found best{std::vector<int32_t>(graph.nodes, 0), std::numeric_limits<int64_t>::max()};
  const auto keep = [&](Found found, bool first) {
    if (first || found.cut < best.cut) best = std::move(found);
  };
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    keep(from_scratch(graph, parts, caps, kShares[attempt % 2], random), attempt == 0);
  }
  for (int cycle = 0; cycle < kCycles; ++cycle) {
    keep(again(graph, best, parts, caps, kShares[cycle % 2], random), false);
  }
  std::copy(best.part.begin(), best.part.end(), part);
}

}  // namespace gnnfleet
