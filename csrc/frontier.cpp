#include "frontier.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <limits>
#include <stdexcept>
#include <utility>

namespace gnnfleet {
namespace {

constexpr int64_t kGrain = 1 << 13;  // sources; with less work, starting threads costs more than they save
constexpr int64_t kAhead = 16;       // steps between a prefetch and its use
constexpr int kLine = 5;             // low bits of an id are its place in a line; the others are the key of the line
constexpr int64_t kMask = (1 << kLine) - 1;
constexpr int kNumber = 32 - kLine;  // bits of a line's number; the place of an id has 32 bits
constexpr uint64_t kEmpty = ~uint64_t{0};
constexpr int64_t kMaxIds = int64_t{1} << (64 - kNumber + kLine);  // ids: their keys share a word with a number
constexpr uint64_t kMinEntries = 1 << 8;                           // entries
constexpr uint64_t kMaxEntries = uint64_t{1} << kNumber;  // at most half of them are in use, so numbers that a thread drops do not run out
constexpr int64_t kEntriesPerKey = 2;  // at least; entries beyond one per key are empty
constexpr int kDigit = 11;    // bits of a sorting pass: the counts of a digit stay in the first-level cache

int64_t key_of(uint64_t word) { return static_cast<int64_t>(word >> kNumber); }

uint32_t place_of(uint64_t word, int64_t id) { return static_cast<uint32_t>(word << kLine | static_cast<uint64_t>(id & kMask)); }

uint32_t mark_of(int64_t id) { return uint32_t{1} << (id & kMask); }

// Radix sort, ascending, with as many digits as the largest number needs.
void sort_numbers(std::vector<int64_t>& numbers, std::vector<int64_t>& spare) {
  int64_t all_lines = 0;
  for (const int64_t number : numbers) all_lines |= number;
  const int width = std::bit_width(static_cast<uint64_t>(all_lines)), passes = (width + kDigit - 1) / kDigit;
  const int bits = passes ? (width + passes - 1) / passes : 0;
  spare.resize(numbers.size());
  for (int pass = 0; pass < passes; ++pass, numbers.swap(spare)) {
    const auto digit = [=](int64_t number) { return static_cast<uint64_t>(number) >> pass * bits & ((1u << bits) - 1); };
    std::array<size_t, (1 << kDigit) + 1> starts{};
    for (const int64_t number : numbers) ++starts[digit(number) + 1];
    for (size_t d = 0; d < size_t{1} << bits; ++d) starts[d + 1] += starts[d];
    for (const int64_t number : numbers) spare[starts[digit(number)]++] = number;
  }
}

}  // namespace

// Keys that one thread enters, and the counter of line numbers that all threads share.
struct Frontier::NewKeys {
  std::vector<int64_t>& keys;
  uint64_t& numbers;
  uint64_t unused_number = kEmpty;  // a number drawn for a line that another thread entered first

  // Find the entry of a line, or enter it; return its word.
  template <bool shared, bool own>
  uint64_t enter(const Slots& slots, int64_t key, Entry*& entry) {
    for (entry = slots.home<own>(key);; entry = slots.next(entry)) {
      std::atomic_ref<uint64_t> there(entry->word);
      uint64_t found = there.load(std::memory_order_relaxed);
      if (own ? found != kEmpty : key_of(found) == key) [[likely]] return found;
      if (found != kEmpty) continue;
      if (unused_number == kEmpty) unused_number = shared ? std::atomic_ref<uint64_t>(numbers).fetch_add(1, std::memory_order_relaxed) : numbers++;
      const uint64_t word = static_cast<uint64_t>(key) << kNumber | unused_number;
      if constexpr (shared) {
        if (!there.compare_exchange_strong(found, word, std::memory_order_relaxed)) {
          if (key_of(found) == key) return found;
          continue;
        }
      } else {
        there.store(word, std::memory_order_relaxed);
      }
      unused_number = kEmpty;
      keys.push_back(key);
      return word;
    }
  }
};

Frontier::Frontier(int64_t count) : count_(count) {
  if (count >= kMaxIds) throw std::length_error("frontier: 2^42 nodes or more");
  reserve(0);
}

Frontier::Entry* Frontier::Slots::find(int64_t key) const {
  Entry* entry = home(key);
  while (key_of(entry->word) != key && entry->word != kEmpty) entry = next(entry);
  return entry;
}

int64_t Frontier::num_keys() const {
  size_t num_keys = keys_.size();
  for (const auto& part : new_keys_) num_keys += part.size();
  return static_cast<int64_t>(num_keys);
}

// Number of keys that may be entered before the table must grow.
int64_t Frontier::free_keys() const {
  return slots_.own() ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(capacity_) / kEntriesPerKey - num_keys();
}

void Frontier::reserve(int64_t keys) {
  // With as many entries as the graph has lines, every line has its own entry and there are no collisions.
  const uint64_t all_lines = std::bit_ceil(static_cast<uint64_t>((count_ + kMask) >> kLine));
  uint64_t capacity = std::bit_ceil(std::max(kMinEntries, static_cast<uint64_t>(keys * kEntriesPerKey)));
  const bool own = all_lines <= capacity && all_lines <= kMaxEntries / kEntriesPerKey;
  if (own) capacity = all_lines;
  if (capacity <= capacity_) return;
  if (capacity > kMaxEntries) throw std::length_error("frontier: too many nodes for one batch");
  auto entries = std::make_unique_for_overwrite<Entry[]>(capacity);
  std::fill_n(entries.get(), capacity, Entry{kEmpty, 0, 0});
  entries_.swap(entries);
  const uint64_t before = std::exchange(capacity_, capacity);
  slots_ = {entries_.get(), capacity - 1, 1, 0};
  if (!own) {
    slots_.factor = 0x9E3779B97F4A7C15u;
    slots_.shift = 64 - std::countr_zero(capacity);
  }
  for (uint64_t i = 0; i < before; ++i) {
    if (entries[i].word != kEmpty) *slots_.find(key_of(entries[i].word)) = entries[i];
  }
}

int64_t Frontier::start(const int64_t* ids, int64_t n) {
  clear();
  reserve(n);
  NewKeys new_keys{keys_, numbers_};
  for (int64_t i = 0; i < n; ++i) {
    Entry* entry = nullptr;
    uint64_t word = 0;
    if (ids[i] >= 0 && ids[i] < count_) word = new_keys.enter<false, false>(slots_, ids[i] >> kLine, entry);
    if (!entry || entry->rows & mark_of(ids[i])) {
      clear();
      return i;
    }
    entry->added |= mark_of(ids[i]);
    entry->rows |= mark_of(ids[i]);
    if (lines_.size() < numbers_ << kLine) lines_.resize(numbers_ << kLine);
    lines_[place_of(word, ids[i])] = static_cast<int32_t>(i);
  }
  rows_ = n;
  return -1;
}

// Skips sources out of range and returns false for them. The caller has reserved memory for all new keys.
template <bool shared, bool own, typename Index>
bool Frontier::insert_all(const Index* sources, int64_t n, int32_t* places, NewKeys new_keys) const {
  const Slots slots = slots_;
  const uint64_t count = static_cast<uint64_t>(count_);
  bool in_range = true;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(slots.home<own>(sources[i + kAhead] >> kLine), 1);
    const int64_t id = sources[i];
    if (static_cast<uint64_t>(id) >= count) [[unlikely]] {
      in_range = false;
      continue;
    }
    Entry* entry;
    const uint64_t word = new_keys.enter<shared, own>(slots, id >> kLine, entry);
    if constexpr (shared) {
      std::atomic_ref<uint32_t> added(entry->added);
      if (!(added.load(std::memory_order_relaxed) & mark_of(id))) added.fetch_or(mark_of(id), std::memory_order_relaxed);
    } else {
      entry->added |= mark_of(id);  // without a test: its branch would be mispredicted
    }
    places[i] = static_cast<int32_t>(place_of(word, id));
  }
  return in_range;
}

template <bool shared, typename Index>
bool Frontier::insert(const Index* sources, int64_t n, int32_t* places, NewKeys new_keys) const {
  return slots_.own() ? insert_all<shared, true>(sources, n, places, new_keys) : insert_all<shared, false>(sources, n, places, new_keys);
}

template <typename Index>
void Frontier::add(const Index* sources, int64_t n, int32_t* places, int threads) {
  const int num_parts = n < kGrain ? 1 : std::max(1, threads);
  new_keys_.resize(std::max(new_keys_.size(), static_cast<size_t>(num_parts)));
  all_have_rows_ = false;
  num_new_ = -1;
  bool in_range = true;
  // All sources of a chunk may be new. Chunks are as large as the free space, so that the table does not grow for sources
  // that are known already.
  for (int64_t begin = 0, end = 0; begin < n; begin = end) {
    const int64_t least = std::min(n - begin, std::max(kGrain, static_cast<int64_t>(capacity_) / (4 * kEntriesPerKey)));
    if (free_keys() < least) reserve(num_keys() + least);
    end = begin + std::min(n - begin, free_keys());
    const int64_t share = (end - begin + num_parts - 1) / num_parts;
    for (int part = 0; part < num_parts; ++part) {  // outside of the parallel region, where bad_alloc can be caught
      auto& fresh = new_keys_[static_cast<size_t>(part)];
      fresh.reserve(fresh.size() + static_cast<size_t>(std::min(share, static_cast<int64_t>(capacity_))));
    }
    if (num_parts == 1) {
      in_range = insert<false>(sources + begin, end - begin, places + begin, {new_keys_[0], numbers_}) && in_range;
      continue;
    }
#pragma omp parallel for num_threads(num_parts) schedule(static) reduction(&& : in_range)
    for (int part = 0; part < num_parts; ++part) {
      const int64_t first = std::min(end, begin + share * part), last = std::min(end, first + share);
      in_range = insert<true>(sources + first, last - first, places + first, {new_keys_[static_cast<size_t>(part)], numbers_}) && in_range;
    }
  }
  if (!in_range) throw std::out_of_range("frontier: a source is out of range");
}

template void Frontier::add<int32_t>(const int32_t*, int64_t, int32_t*, int);
template void Frontier::add<int64_t>(const int64_t*, int64_t, int32_t*, int);

int64_t Frontier::count_new() {
  num_new_ = 0;
  if (all_have_rows_) return 0;
  for (auto& part : new_keys_) {
    keys_.insert(keys_.end(), part.begin(), part.end());
    part.clear();
  }
  sort_numbers(keys_, sort_buffer_);
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (i + kAhead < keys_.size()) __builtin_prefetch(slots_.home(keys_[i + kAhead]));
    const Entry& entry = *slots_.find(keys_[i]);
    num_new_ += std::popcount(entry.added & ~entry.rows);
  }
  if (rows_ + num_new_ > int64_t{1} << 31) throw std::length_error("frontier: too many nodes for one batch");
  if (lines_.size() < numbers_ << kLine) lines_.resize(numbers_ << kLine);
  return num_new_;
}

void Frontier::assign_rows(int64_t* ids) {
  int32_t* lines = lines_.data();
  int64_t row = rows_;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (i + kAhead < keys_.size()) {
      __builtin_prefetch(slots_.home(keys_[i + kAhead]), 1);
      __builtin_prefetch(lines + place_of(slots_.home(keys_[i + kAhead / 2])->word, 0), 1);  // the first slot is mostly the right one
    }
    Entry& entry = *slots_.find(keys_[i]);
    uint32_t bits = entry.added & ~entry.rows;
    entry.rows = entry.added;
    for (; bits; bits &= bits - 1) {
      const int64_t id = keys_[i] << kLine | std::countr_zero(bits);
      lines[place_of(entry.word, id)] = static_cast<int32_t>(row++);
      *ids++ = id;
    }
  }
  rows_ = row;
  num_new_ = 0;
  all_have_rows_ = true;
}

void Frontier::rows_at(int64_t n, int32_t* places, int threads) const {
  const int32_t* rows = lines_.data();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n >= kGrain)
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(rows + static_cast<uint32_t>(places[i + kAhead]));
    places[i] = rows[static_cast<uint32_t>(places[i])];
  }
}

template <typename Index>
void Frontier::rows(const Index* sources, int64_t n, int32_t* rows, int threads) const {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n >= kGrain)
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = sources[i];
    rows[i] = -1;
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(count_)) continue;
    const Entry& entry = *slots_.find(id >> kLine);
    if (entry.rows & mark_of(id)) rows[i] = lines_[place_of(entry.word, id)];
  }
}

template void Frontier::rows<int32_t>(const int32_t*, int64_t, int32_t*, int) const;
template void Frontier::rows<int64_t>(const int64_t*, int64_t, int32_t*, int) const;

// Clear entries from the home slot of each key to the next empty entry. All keys are erased, so probe sequences may be
// broken: a key behind a cleared entry was cleared in the same pass.
void Frontier::erase(const std::vector<int64_t>& keys) {
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) __builtin_prefetch(slots_.home(keys[i + kAhead]), 1);
    for (Entry* entry = slots_.home(keys[i]); entry->word != kEmpty; entry = slots_.next(entry)) *entry = {kEmpty, 0, 0};
  }
}

void Frontier::clear() {
  erase(keys_);
  keys_.clear();
  for (auto& part : new_keys_) {
    erase(part);
    part.clear();
  }
  numbers_ = 0;
  rows_ = num_new_ = 0;
  all_have_rows_ = true;
}

int64_t Frontier::bytes() const {
  size_t numbers = keys_.capacity() + sort_buffer_.capacity();
  for (const auto& part : new_keys_) numbers += part.capacity();
  return static_cast<int64_t>(capacity_ * sizeof(Entry) + lines_.capacity() * sizeof(int32_t) + numbers * sizeof(int64_t));
}

template <typename Index>
void gather_sources(const Index* col, const int64_t* edges, int64_t n, Index* sources, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n >= kGrain)
  for (int64_t i = 0; i < n; ++i) {
    if (i + 4 * kAhead < n) __builtin_prefetch(col + edges[i + 4 * kAhead]);
    sources[i] = col[edges[i]];
  }
}

template void gather_sources<int32_t>(const int32_t*, const int64_t*, int64_t, int32_t*, int);
template void gather_sources<int64_t>(const int64_t*, const int64_t*, int64_t, int64_t*, int);

}  // namespace gnnfleet
