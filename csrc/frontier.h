// The nodes of one type that a batch reads, in the order of its rows: a table from store id to row. Its size depends on
// the nodes of the batch, not on those of the graph.
//
// Open addressing with linear probing, one entry for a line of 32 ids. Ids that are close together, as in most stores,
// share an entry: the table fits a cache, and there are few entries to sort. If no two ids share a line, a node costs
// about 210 bytes. The result does not depend on threads or on the order of sources.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace gnnfleet {

class Frontier {
 public:
  explicit Frontier(int64_t count);  // ids are below count, which is below 2^42; throws std::length_error

  // Give ids the rows 0, 1, … in their order. Returns -1, or the position of the first id that is out of range or repeated;
  // the table is empty then.
  int64_t start(const int64_t* ids, int64_t n);

  // Add the sources that have no row yet, and write the place of each, valid until `clear`. Throws std::out_of_range for a
  // source out of range; places are invalid then.
  template <typename Index>
  void add(const Index* sources, int64_t n, int32_t* places, int threads);

  // Number of added nodes that `assign_rows` will give a row; it must be called before the next `add`. Throws
  // std::length_error if int32 is too small.
  int64_t count_new();

  // Give added nodes rows, in ascending order of ids, and write the ids.
  void assign_rows(int64_t* ids);

  // Replace places by rows.
  void rows_at(int64_t n, int32_t* places, int threads) const;

  // rows[i]: the row of sources[i], -1 without one.
  template <typename Index>
  void rows(const Index* sources, int64_t n, int32_t* rows, int threads) const;

  void clear();

  int64_t num_new() const { return num_new_; }  // result of `count_new`; -1 if sources were added since
  bool all_have_rows() const { return all_have_rows_; }  // all added nodes have a row
  int64_t bytes() const;

 private:
  struct Entry {
    uint64_t word;       // line of ids, and in the low bits its number: one word, so that threads see both or neither
    uint32_t added, rows;  // one bit per id
  };

  // Copied by loops over many ids, so that it stays in registers.
  struct Slots {
    Entry* entries = nullptr;
    uint64_t last = 0;  // the number of entries, a power of two, minus 1
    uint64_t factor = 1;
    int shift = 0;

    bool own() const { return factor == 1; }  // every key of the graph has its own entry
    template <bool own = false>
    Entry* home(int64_t key) const {
      return entries + (own ? static_cast<uint64_t>(key) : static_cast<uint64_t>(key) * factor >> shift);
    }
    Entry* next(Entry* entry) const { return entries + (static_cast<uint64_t>(entry - entries + 1) & last); }
    Entry* find(int64_t key) const;  // the entry of the key, or the empty one where it belongs
  };
  struct NewKeys;

  template <bool shared, typename Index>
  bool insert(const Index* sources, int64_t n, int32_t* places, NewKeys new_keys) const;
  template <bool shared, bool own, typename Index>
  bool insert_all(const Index* sources, int64_t n, int32_t* places, NewKeys new_keys) const;
  void reserve(int64_t keys);
  void erase(const std::vector<int64_t>& keys);
  int64_t num_keys() const;
  int64_t free_keys() const;

  int64_t count_;
  int64_t rows_ = 0, num_new_ = 0;
  bool all_have_rows_ = true;
  uint64_t capacity_ = 0;
  std::unique_ptr<Entry[]> entries_;
  Slots slots_;
  uint64_t numbers_ = 0;                     // lines with a number
  std::vector<int32_t> lines_;               // rows, 32 per line, by its number; not cleared: entries tell which are valid
  std::vector<int64_t> keys_;                // in the table, except new_keys_
  std::vector<std::vector<int64_t>> new_keys_;  // entered since the last `assign_rows`, by thread
  std::vector<int64_t> sort_buffer_;               // reused, because new pages cost more than the sorting
};

// sources[i] = col[edges[i]].
template <typename Index>
void gather_sources(const Index* col, const int64_t* edges, int64_t n, Index* sources, int threads);

}  // namespace gnnfleet
