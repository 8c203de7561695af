// Neighbours in time: for every node the events it took part in, oldest first, and those before a given event.
//
// Events are numbered in the order of the stream, whose times never fall; "before a time" is thus "below an event number",
// and nothing here knows times. Events may be added at the end.
#pragma once
#include <cstdint>
#include <vector>

#include "philox.h"

namespace gnnfleet {

// What is asked: of node nodes[i] (negative: nobody) up to k events with numbers below before[i].
struct RecentArgs {
  const int64_t* nodes;
  const int64_t* before;
  int64_t n;
  int64_t k;
  int threads;
};

// What is asked of pairs: src[i] and each of dst[i, 0 .. k), in the latest `depth` events of the source below before[i].
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

  // Adds n events; false, with nothing added, if an end is no node. An event of a node with itself is listed once.
  bool append(const int64_t* src, const int64_t* dst, int64_t n);

  // neighbours, events [n, k]: the latest first, -1 where there are no more.
  void recent(const RecentArgs& args, int64_t* neighbours, int64_t* events) const;

  // The same for a subset drawn evenly, by key, node and `before`, latest first.
  void uniform(const RecentArgs& args, Draws draws, int64_t* neighbours, int64_t* events) const;

  // counts [n]: how many events a node has below before[i].
  void counts(const RecentArgs& args, int64_t* counts) const;

  // count, gap, last [n, k]: how often a pair met, the source's events since then (the last meeting included), the event of
  // that meeting; 0, 0, -1 for pairs that did not.
  void meetings(const MeetingArgs& args, int64_t* count, int64_t* gap, int64_t* last) const;

  int64_t num_nodes() const { return static_cast<int64_t>(lists_.size()); }
  int64_t num_events() const { return num_events_; }
  int64_t bytes() const;

 private:
  struct Entry {
    int64_t neighbour, event;
  };
  struct List {
    int64_t first = 0, size = 0, room = 0;  // entries_[first .. first + size), room for more behind
    int64_t coming = 0;                     // while events are added: how many of them
  };

  int64_t count_before(const List& list, int64_t before) const;
  void write(const Entry* from, int64_t k, int64_t* neighbours, int64_t* events) const;
  void make_room(const int64_t* src, const int64_t* dst, int64_t n);

  std::vector<List> lists_;
  std::vector<Entry> entries_;
  int64_t num_events_ = 0;
};

}  // namespace gnnfleet
