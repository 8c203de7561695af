#include "recent.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "subset.h"

namespace gnnfleet {
namespace {

constexpr int64_t kGrain = 1 << 9;  // queries; with less work, starting threads costs more than they save
constexpr int64_t kAhead = 8;       // queries between a prefetch and its use

struct Met {
  int64_t count = 0, gap = 0, last = -1;
};

// Partners of one source. A stamp marks the entries of the current row, so that nothing has to be cleared.
class Company {
 public:
  void begin(int64_t most) {
    const size_t room = std::bit_ceil(static_cast<size_t>(2 * most + 1));
    if (slots_.size() < room) slots_.assign(room, {}), stamp_ = 0;
    mask_ = room - 1;
    ++stamp_;
  }

  Met& meet(int64_t node) {
    Slot& slot = find(node);
    if (slot.stamp != stamp_) slot = {stamp_, node, {}};
    return slot.met;
  }

  Met ask(int64_t node) {
    const Slot& slot = find(node);
    return slot.stamp == stamp_ ? slot.met : Met{};
  }

 private:
  struct Slot {
    int64_t stamp = 0, node = 0;
    Met met;
  };

  Slot& find(int64_t node) {
    size_t at = static_cast<size_t>((static_cast<uint64_t>(node) * 0x9E3779B97F4A7C15u) >> 20) & mask_;
    while (slots_[at].stamp == stamp_ && slots_[at].node != node) at = (at + 1) & mask_;
    return slots_[at];
  }

  std::vector<Slot> slots_;
  size_t mask_ = 0;
  int64_t stamp_ = 0;
};

}  // namespace

TemporalNeighbors::TemporalNeighbors(int64_t num_nodes) : lists_(static_cast<size_t>(num_nodes)) {}

// Full lists move to the end, with twice their capacity or as much as they need: the first events are stored without
// gaps, and every later one costs a constant number of moves.
void TemporalNeighbors::make_room(const int64_t* src, const int64_t* dst, int64_t n) {
  std::vector<int64_t> touched;
  const auto count = [&](int64_t node) {
    if (lists_[node].coming++ == 0) touched.push_back(node);
  };
  for (int64_t i = 0; i < n; ++i) {
    count(src[i]);
    if (src[i] != dst[i]) count(dst[i]);
  }
  int64_t end = static_cast<int64_t>(entries_.size());
  std::vector<std::pair<int64_t, int64_t>> moves;  // node, former position of its entries
  for (const int64_t node : touched) {
    List& list = lists_[node];
    const int64_t need = list.size + list.coming;
    list.coming = 0;
    if (need <= list.room) continue;
    if (list.size) moves.emplace_back(node, list.first);
    list.first = end;
    list.room = std::max(need, 2 * list.room);
    end += list.room;
  }
  entries_.resize(static_cast<size_t>(end));
  for (const auto& [node, first] : moves) {
    std::copy_n(entries_.begin() + first, lists_[node].size, entries_.begin() + lists_[node].first);
  }
}

bool TemporalNeighbors::append(const int64_t* src, const int64_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (src[i] < 0 || src[i] >= num_nodes() || dst[i] < 0 || dst[i] >= num_nodes()) return false;
  }
  make_room(src, dst, n);
  for (int64_t i = 0; i < n; ++i, ++num_events_) {
    List& from = lists_[src[i]];
    entries_[from.first + from.size++] = {dst[i], num_events_};
    if (src[i] == dst[i]) continue;
    List& to = lists_[dst[i]];
    entries_[to.first + to.size++] = {src[i], num_events_};
  }
  return true;
}

int64_t TemporalNeighbors::count_before(const List& list, int64_t before) const {
  const Entry* first = entries_.data() + list.first;
  if (list.size == 0 || first[list.size - 1].event < before) return list.size;
  return std::partition_point(first, first + list.size, [before](const Entry& entry) { return entry.event < before; }) - first;
}

// The k entries that end before `from`, backwards; the caller has filled the output with -1.
void TemporalNeighbors::write(const Entry* from, int64_t k, int64_t* neighbours, int64_t* events) const {
  for (int64_t j = 0; j < k; ++j) {
    --from;
    neighbours[j] = from->neighbour;
    events[j] = from->event;
  }
}

void TemporalNeighbors::recent(const RecentArgs& args, int64_t* neighbours, int64_t* events) const {
#pragma omp parallel for num_threads(args.threads) schedule(static) if (args.threads > 1 && args.n >= kGrain)
  for (int64_t i = 0; i < args.n; ++i) {
    if (i + kAhead < args.n && args.nodes[i + kAhead] >= 0) __builtin_prefetch(&lists_[args.nodes[i + kAhead]]);
    int64_t found = 0;
    if (args.nodes[i] >= 0) {
      const List& list = lists_[args.nodes[i]];
      const int64_t count = count_before(list, args.before[i]);
      found = std::min(count, args.k);
      write(entries_.data() + list.first + count, found, neighbours + i * args.k, events + i * args.k);
    }
    std::fill(neighbours + i * args.k + found, neighbours + (i + 1) * args.k, -1);
    std::fill(events + i * args.k + found, events + (i + 1) * args.k, -1);
  }
}

void TemporalNeighbors::uniform(const RecentArgs& args, Draws draws, int64_t* neighbours, int64_t* events) const {
#pragma omp parallel num_threads(args.threads) if (args.threads > 1 && args.n >= kGrain)
  {
    std::vector<uint64_t> taken;
    std::vector<int64_t> picked(static_cast<size_t>(args.k));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < args.n; ++i) {
      int64_t* near = neighbours + i * args.k;
      int64_t* when = events + i * args.k;
      int64_t found = 0;
      if (args.nodes[i] >= 0) {
        const List& list = lists_[args.nodes[i]];
        const int64_t count = count_before(list, args.before[i]);
        const Entry* first = entries_.data() + list.first;
        found = std::min(count, args.k);
        if (count <= args.k) {
          write(first + count, found, near, when);
        } else {
          Stream stream(draws, args.before[i] * num_nodes() + args.nodes[i]);
          draw_subset(stream, count, args.k, 0, taken, picked.data());
          for (int64_t j = 0; j < args.k; ++j) write(first + picked[args.k - 1 - j] + 1, 1, near + j, when + j);
        }
      }
      std::fill(near + found, near + args.k, -1);
      std::fill(when + found, when + args.k, -1);
    }
  }
}

void TemporalNeighbors::counts(const RecentArgs& args, int64_t* counts) const {
#pragma omp parallel for num_threads(args.threads) schedule(static) if (args.threads > 1 && args.n >= kGrain)
  for (int64_t i = 0; i < args.n; ++i) counts[i] = args.nodes[i] < 0 ? 0 : count_before(lists_[args.nodes[i]], args.before[i]);
}

void TemporalNeighbors::meetings(const MeetingArgs& args, int64_t* count, int64_t* gap, int64_t* last) const {
#pragma omp parallel num_threads(args.threads) if (args.threads > 1)
  {
    Company company;
#pragma omp for schedule(dynamic, 16)
    for (int64_t i = 0; i < args.n; ++i) {
      const List& list = lists_[args.src[i]];
      const int64_t known = count_before(list, args.before[i]), seen = std::min(known, args.depth);
      company.begin(seen);
      const Entry* end = entries_.data() + list.first + known;
      for (int64_t back = 1; back <= seen; ++back) {
        Met& met = company.meet(end[-back].neighbour);
        if (met.count++ == 0) met.gap = back, met.last = end[-back].event;
      }
      for (int64_t j = i * args.k; j < (i + 1) * args.k; ++j) {
        const Met met = company.ask(args.dst[j]);
        count[j] = met.count;
        gap[j] = met.gap;
        last[j] = met.last;
      }
    }
  }
}

int64_t TemporalNeighbors::bytes() const {
  return static_cast<int64_t>(lists_.capacity() * sizeof(List) + entries_.capacity() * sizeof(Entry));
}

}  // namespace gnnfleet
