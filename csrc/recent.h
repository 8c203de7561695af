// Temporal neighbours: the events of every node, oldest first, and those before a given event.
//
// Events are numbered in the order of the stream, whose times never decrease. So "before a time" is "below an event
// number", and times are not needed here. Events may be appended.
#pragma once
#include <cstdint>
#include <vector>

#include "philox.h"

namespace gnnfleet {

// Queries: up to k events of node nodes[i] (none if negative) with numbers below before[i].
struct RecentArgs {
  const int64_t* nodes;
  const int64_t* before;
  int64_t n;
  int64_t k;
  int threads;
};

// Queries of pairs: src[i] and each of dst[i, 0 .. k), in the latest `depth` events of the source below before[i].
struct MeetingArgs {
  const int64_t* src;
  const int64_t* before;
  const int64_t* dst;
  int64_t n;
  int64_t k;
  int64_t depth;
  int threads;
};

class TemporalNeighbors {
 public:
  explicit TemporalNeighbors(int64_t num_nodes);

  // Add n events; false, without any change, if a node is out of range. An event of a node with itself is listed once.
  bool append(const int64_t* src, const int64_t* dst, int64_t n);

  // neighbours, events [n, k]: the latest first, -1 where there are no more.
  void recent(const RecentArgs& args, int64_t* neighbours, int64_t* events) const;

  // The same for a subset drawn evenly, by key, node and `before`, latest first.
  void uniform(const RecentArgs& args, Draws draws, int64_t* neighbours, int64_t* events) const;

  // counts [n]: number of events of a node below before[i].
  void counts(const RecentArgs& args, int64_t* counts) const;

  // count, gap, last [n, k]: number of events of a pair, events of the source since the last of them (included), and that
  // event; 0, 0, -1 for pairs without events.
  void meetings(const MeetingArgs& args, int64_t* count, int64_t* gap, int64_t* last) const;

  int64_t num_nodes() const { return static_cast<int64_t>(lists_.size()); }
  int64_t num_events() const { return num_events_; }
  int64_t bytes() const;

 private:
  struct Entry {
    int64_t neighbour, event;
  };
  struct List {
    int64_t first = 0, size = 0, room = 0;  // entries_[first .. first + size); `room` is the capacity
    int64_t coming = 0;                     // while events are added: number of new entries
  };

  int64_t count_before(const List& list, int64_t before) const;
  void write(const Entry* from, int64_t k, int64_t* neighbours, int64_t* events) const;
  void make_room(const int64_t* src, const int64_t* dst, int64_t n);

  std::vector<List> lists_;
  std::vector<Entry> entries_;
  int64_t num_events_ = 0;
};

}  // namespace gnnfleet
