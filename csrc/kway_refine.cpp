// Refinement of a k-way partition: balance first, then Fiduccia-Mattheyses moves that may go uphill; see kway.h.
#include <algorithm>
#include <limits>
#include <queue>

#include "kway.h"

namespace gnnfleet {
namespace {

constexpr int kRounds = 6;
constexpr int64_t kMostTies = int64_t{1} << 22;  // entries of the node-by-part table; larger graphs get greedy rounds only

struct Move {
  int64_t gain;
  int32_t node;
  int32_t to;
  bool operator<(const Move& other) const { return gain != other.gain ? gain < other.gain : node > other.node; }
};

class Refiner {
 public:
  Refiner(const KwayGraph& graph, int32_t parts, KwayCaps caps, int32_t* part)
      : g_(graph), parts_(parts), caps_(caps), part_(part), load_(parts, 0), size_(parts, 0), ties_(parts, 0) {
    for (int32_t v = 0; v < g_.nodes; ++v) {
      load_[part[v]] += g_.load[v];
      size_[part[v]] += g_.size[v];
    }
  }

  bool balanced() const {
    for (int32_t p = 0; p < parts_; ++p) {
      if (overfull(p)) return false;
    }
    return true;
  }

  // Twice the weight of edges between parts.
  int64_t cut() const {
    int64_t sum = 0;
    for (int32_t v = 0; v < g_.nodes; ++v) {
      for (int32_t e = g_.indptr[v]; e < g_.indptr[v + 1]; ++e) {
        if (part_[v] != part_[g_.neighbour[e]]) sum += g_.weight[e];
      }
    }
    return sum;
  }

  // Empties parts above their cap, nodes with the least loss first.
  void rebalance() {
    std::vector<Move> leaving;
    for (int32_t v = 0; v < g_.nodes; ++v) {
      if (overfull(part_[v])) leaving.push_back(best_move(v));
    }
    std::sort(leaving.begin(), leaving.end(), [](const Move& a, const Move& b) { return b < a; });
    for (const Move& move : leaving) {
      if (!overfull(part_[move.node])) continue;
      const Move now = best_move(move.node);
      if (now.to >= 0) apply(now.node, now.to);
    }
  }

  // One sweep of moves that gain. Returns whether there were any.
  bool sweep() {
    bool moved = false;
    for (int32_t v = 0; v < g_.nodes; ++v) {
      const Move move = best_move(v);
      if (move.to < 0 || move.gain <= 0) continue;
      apply(v, move.to);
      moved = true;
    }
    return moved;
  }

  // One round of best-first moves, each node at most once, undone back to the best point. Returns the gain kept.
  int64_t climb() {
    std::priority_queue<Move> queue;
    std::vector<bool> locked(g_.nodes, false);
    for (int32_t v = 0; v < g_.nodes; ++v) push(queue, v, true);
    std::vector<std::pair<int32_t, int32_t>> done;  // node, part it came from
    int64_t gain = 0;
    int64_t best = 0;
    size_t best_length = 0;
    const size_t patience = 50 + static_cast<size_t>(g_.nodes) / 50;
    while (!queue.empty() && done.size() < best_length + patience) {
      const Move move = queue.top();
      queue.pop();
      if (locked[move.node]) continue;
      const Move now = best_move(move.node);
      if (now.to < 0) continue;
      if (now.gain < move.gain) {
        queue.push(now);
        continue;
      }
      locked[now.node] = true;
      done.emplace_back(now.node, part_[now.node]);
      apply(now.node, now.to);
      gain += now.gain;
      if (gain > best) {
        best = gain;
        best_length = done.size();
      }
      for (int32_t e = g_.indptr[now.node]; e < g_.indptr[now.node + 1]; ++e) {
        if (!locked[g_.neighbour[e]]) push(queue, g_.neighbour[e], false);
      }
    }
    while (done.size() > best_length) {
      apply(done.back().first, done.back().second);
      done.pop_back();
    }
    return best;
  }

  // With the table a node's ties to all parts are at hand; without it they are summed for each question.
  void keep_table() {
    table_.assign(static_cast<size_t>(g_.nodes) * parts_, 0);
    for (int32_t v = 0; v < g_.nodes; ++v) {
      for (int32_t e = g_.indptr[v]; e < g_.indptr[v + 1]; ++e) row(v)[part_[g_.neighbour[e]]] += g_.weight[e];
    }
  }

 private:
  bool overfull(int32_t p) const { return load_[p] > caps_.load || size_[p] > caps_.size; }

  int32_t* row(int32_t v) { return table_.data() + static_cast<size_t>(v) * parts_; }

  const int32_t* ties(int32_t v) {
    if (!table_.empty()) return row(v);
    std::fill(ties_.begin(), ties_.end(), 0);
    for (int32_t e = g_.indptr[v]; e < g_.indptr[v + 1]; ++e) ties_[part_[g_.neighbour[e]]] += g_.weight[e];
    return ties_.data();
  }

  // Best part with room, however little it gains; to is -1 if there is none. Equal gains go to the lighter part.
  Move best_move(int32_t v) {
    const int32_t* tie = ties(v);
    const int32_t own = part_[v];
    Move best{std::numeric_limits<int64_t>::min(), v, -1};
    for (int32_t p = 0; p < parts_; ++p) {
      if (p == own || load_[p] + g_.load[v] > caps_.load || size_[p] + g_.size[v] > caps_.size) continue;
      const int64_t gain = static_cast<int64_t>(tie[p]) - tie[own];
      if (gain > best.gain || (gain == best.gain && load_[p] < load_[best.to])) best = {gain, v, p};
    }
    return best;
  }

  void push(std::priority_queue<Move>& queue, int32_t v, bool boundary_only) {
    const Move move = best_move(v);
    if (move.to < 0 || (boundary_only && ties(v)[move.to] == 0)) return;
    queue.push(move);
  }

  void apply(int32_t v, int32_t to) {
    const int32_t from = part_[v];
    load_[from] -= g_.load[v];
    size_[from] -= g_.size[v];
    load_[to] += g_.load[v];
    size_[to] += g_.size[v];
    part_[v] = to;
    if (table_.empty()) return;
    for (int32_t e = g_.indptr[v]; e < g_.indptr[v + 1]; ++e) {
      row(g_.neighbour[e])[from] -= g_.weight[e];
      row(g_.neighbour[e])[to] += g_.weight[e];
    }
  }

  const KwayGraph& g_;
  int32_t parts_;
  KwayCaps caps_;
  int32_t* part_;
  std::vector<int64_t> load_, size_;
  std::vector<int32_t> ties_, table_;
};

}  // namespace

int64_t kway_refine(const KwayGraph& graph, int32_t parts, KwayCaps caps, int32_t* part) {
  Refiner refiner(graph, parts, caps, part);
  const bool table = static_cast<int64_t>(graph.nodes) * parts <= kMostTies;
  if (table) refiner.keep_table();
  if (!refiner.balanced()) refiner.rebalance();
  for (int round = 0; round < kRounds; ++round) {
    const bool moved = table ? refiner.climb() > 0 : refiner.sweep();
    if (!moved) break;
  }
  return refiner.balanced() ? refiner.cut() : std::numeric_limits<int64_t>::max();
}

}  // namespace gnnfleet
