// The nodes of one type that a batch reads, in the order of its rows: a table from store id to row whose size goes by the
// nodes that were met, not by those there are.
//
// Open addressing with linear probing, one entry for a line of 32 ids. Where ids lie close, as they do in most stores, an
// entry serves many: the table stays in a near cache, and there are few entries to sort. Where no two share a line, a node
// costs about 210 bytes. Neither threads nor the order of sources matter.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace gnnfleet {

class Frontier {
 public:
  explicit Frontier(int64_t count);  // ids are below count, which is below 2^42; throws std::length_error

  // Rows 0 .. for some ids, in their order. Returns the first one out of range or there already as its position, and
  // then holds nothing; or -1.
  int64_t start(const int64_t* ids, int64_t n);

  // Keeps the sources that have no row, and notes the place of each, good until `clear`. Throws std::out_of_range for one
  // out of range, and then no place is to be used.
  template <typename Index>
  void meet(const Index* sources, int64_t n, int32_t* places, int threads);

  // How many of those that were met will get a row in `place_nodes`, which must follow before more is met. Throws
  // std::length_error where int32 does not suffice.
  int64_t grow();

  // Gives them rows, in ascending order of ids, and writes the ids.
  void place(int64_t* ids);

  // Places become rows.
  void rows_at(int64_t n, int32_t* places, int threads) const;

  // rows[i]: the row of sources[i], -1 without one.
  template <typename Index>
  void rows(const Index* sources, int64_t n, int32_t* rows, int threads) const;

  void clear();

  int64_t waiting() const { return waiting_; }  // what `grow` said; -1 if more was met since
  bool settled() const { return settled_; }  // all that was met has a row
  int64_t bytes() const;

 private:
  struct Entry {
    uint64_t word;       // which line of ids, and below that its number here: one word, so that threads see both or neither
    uint32_t met, rows;  // one bit per id
  };

  // Copied by those who walk over many ids, so that it stays in registers.
  struct Slots {
    Entry* entries = nullptr;
    uint64_t last = 0;  // their number is a power of two
    uint64_t factor = 1;
    int shift = 0;

    bool own() const { return factor == 1; }  // each key has an entry of its own
    template <bool own = false>
    Entry* home(int64_t key) const {
      return entries + (own ? static_cast<uint64_t>(key) : static_cast<uint64_t>(key) * factor >> shift);
    }
    Entry* next(Entry* entry) const { return entries + (static_cast<uint64_t>(entry - entries + 1) & last); }
    Entry* find(int64_t key) const;  // or the empty one where it would be
  };
  struct Newcomers;

  template <bool shared, typename Index>
  bool insert(const Index* sources, int64_t n, int32_t* places, Newcomers newcomers) const;
  template <bool shared, bool own, typename Index>
  bool insert_all(const Index* sources, int64_t n, int32_t* places, Newcomers newcomers) const;
  void reserve(int64_t keys);
  void forget(const std::vector<int64_t>& keys);
  int64_t known() const;
  int64_t room() const;

  int64_t count_;
  int64_t rows_ = 0, waiting_ = 0;
  bool settled_ = true;
  uint64_t capacity_ = 0;
  std::unique_ptr<Entry[]> entries_;
  Slots slots_;
  uint64_t numbers_ = 0;                     // lines that have one
  std::vector<int32_t> lines_;               // rows, 32 a line, by its number; not cleared, entries say what counts
  std::vector<int64_t> keys_;                // in the table, but for the fresh ones
  std::vector<std::vector<int64_t>> fresh_;  // entered since the last growth, by thread
  std::vector<int64_t> spare_;               // for sorting; kept, as new pages cost more than the sorting
};

// sources[i] = col[edges[i]].
template <typename Index>
void pick(const Index* col, const int64_t* edges, int64_t n, Index* sources, int threads);

}  // namespace gnnfleet
