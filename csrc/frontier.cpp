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

constexpr int64_t kGrain = 1 << 13;  // sources; below this, waking threads costs more than they do
constexpr int64_t kAhead = 16;       // how many steps ahead memory is asked for
constexpr int kLine = 5;             // bits of an id that choose a place in its line; the others are the key of the line
constexpr int64_t kMask = (1 << kLine) - 1;
constexpr int kNumber = 32 - kLine;  // bits of a line's number: the place of an id has 32
constexpr uint64_t kEmpty = ~uint64_t{0};
constexpr int64_t kMost = int64_t{1} << (64 - kNumber + kLine);  // ids: their keys share a word with a number
constexpr uint64_t kSmallest = 1 << 8;                           // entries
constexpr uint64_t kEntries = uint64_t{1} << kNumber;  // at most: half as many lines leave numbers for those a thread drops
constexpr int64_t kFill = 2;  // at most one entry in so many is in use
constexpr int kDigit = 11;    // bits sorted by at a time: the counts of a digit stay in the nearest cache

int64_t key_of(uint64_t word) { return static_cast<int64_t>(word >> kNumber); }

uint32_t place_of(uint64_t word, int64_t id) { return static_cast<uint32_t>(word << kLine | static_cast<uint64_t>(id & kMask)); }

uint32_t mark_of(int64_t id) { return uint32_t{1} << (id & kMask); }

// Ascending, by digits from the lowest up, no more of them than the highest number needs.
void sort_numbers(std::vector<int64_t>& numbers, std::vector<int64_t>& spare) {
  int64_t every = 0;
  for (const int64_t number : numbers) every |= number;
  const int width = std::bit_width(static_cast<uint64_t>(every)), passes = (width + kDigit - 1) / kDigit;
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

// What one thread enters, and the numbers of lines that all take from.
struct Frontier::Newcomers {
  std::vector<int64_t>& keys;
  uint64_t& numbers;
  uint64_t mine = kEmpty;  // a number that was taken for a line which another thread entered first

  // The word of a line, which is entered if it is not there; the entry in any case.
  template <bool shared, bool own>
  uint64_t enter(const Slots& slots, int64_t key, Entry*& entry) {
    for (entry = slots.home<own>(key);; entry = slots.next(entry)) {
      std::atomic_ref<uint64_t> there(entry->word);
      uint64_t found = there.load(std::memory_order_relaxed);
      if (own ? found != kEmpty : key_of(found) == key) [[likely]] return found;
      if (found != kEmpty) continue;
      if (mine == kEmpty) mine = shared ? std::atomic_ref<uint64_t>(numbers).fetch_add(1, std::memory_order_relaxed) : numbers++;
      const uint64_t word = static_cast<uint64_t>(key) << kNumber | mine;
      if constexpr (shared) {
        if (!there.compare_exchange_strong(found, word, std::memory_order_relaxed)) {
          if (key_of(found) == key) return found;
          continue;
        }
      } else {
        there.store(word, std::memory_order_relaxed);
      }
      mine = kEmpty;
      keys.push_back(key);
      return word;
    }
  }
};

Frontier::Frontier(int64_t count) : count_(count) {
  if (count >= kMost) throw std::length_error("frontier: 2^42 nodes or more");
  reserve(0);
}

Frontier::Entry* Frontier::Slots::find(int64_t key) const {
  Entry* entry = home(key);
  while (key_of(entry->word) != key && entry->word != kEmpty) entry = next(entry);
  return entry;
}

int64_t Frontier::known() const {
  size_t known = keys_.size();
  for (const auto& part : fresh_) known += part.size();
  return static_cast<int64_t>(known);
}

// For how many new keys there is room.
int64_t Frontier::room() const {
  return slots_.own() ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(capacity_) / kFill - known();
}

void Frontier::reserve(int64_t keys) {
  // With as many entries as the graph has lines, each is at home in one of its own, and no other can be in its way.
  const uint64_t every = std::bit_ceil(static_cast<uint64_t>((count_ + kMask) >> kLine));
  uint64_t capacity = std::bit_ceil(std::max(kSmallest, static_cast<uint64_t>(keys * kFill)));
  const bool own = every <= capacity && every <= kEntries / kFill;
  if (own) capacity = every;
  if (capacity <= capacity_) return;
  if (capacity > kEntries) throw std::length_error("frontier: too many nodes for one batch");
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
  Newcomers newcomers{keys_, numbers_};
  for (int64_t i = 0; i < n; ++i) {
    Entry* entry = nullptr;
    uint64_t word = 0;
    if (ids[i] >= 0 && ids[i] < count_) word = newcomers.enter<false, false>(slots_, ids[i] >> kLine, entry);
    if (!entry || entry->rows & mark_of(ids[i])) {
      clear();
      return i;
    }
    entry->met |= mark_of(ids[i]);
    entry->rows |= mark_of(ids[i]);
    if (lines_.size() < numbers_ << kLine) lines_.resize(numbers_ << kLine);
    lines_[place_of(word, ids[i])] = static_cast<int32_t>(i);
  }
  rows_ = n;
  return -1;
}

// False for a source out of range, which is left out. There is room among the newcomers for all.
template <bool shared, bool own, typename Index>
bool Frontier::insert_all(const Index* sources, int64_t n, int32_t* places, Newcomers newcomers) const {
  const Slots slots = slots_;
  const uint64_t count = static_cast<uint64_t>(count_);
  bool good = true;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(slots.home<own>(sources[i + kAhead] >> kLine), 1);
    const int64_t id = sources[i];
    if (static_cast<uint64_t>(id) >= count) [[unlikely]] {
      good = false;
      continue;
    }
    Entry* entry;
    const uint64_t word = newcomers.enter<shared, own>(slots, id >> kLine, entry);
    if constexpr (shared) {
      std::atomic_ref<uint32_t> met(entry->met);
      if (!(met.load(std::memory_order_relaxed) & mark_of(id))) met.fetch_or(mark_of(id), std::memory_order_relaxed);
    } else {
      entry->met |= mark_of(id);  // without asking: whether a node is known cannot be foretold
    }
    places[i] = static_cast<int32_t>(place_of(word, id));
  }
  return good;
}

template <bool shared, typename Index>
bool Frontier::insert(const Index* sources, int64_t n, int32_t* places, Newcomers newcomers) const {
  return slots_.own() ? insert_all<shared, true>(sources, n, places, newcomers) : insert_all<shared, false>(sources, n, places, newcomers);
}

template <typename Index>
void Frontier::meet(const Index* sources, int64_t n, int32_t* places, int threads) {
  const int team = n < kGrain ? 1 : std::max(1, threads);
  fresh_.resize(std::max(fresh_.size(), static_cast<size_t>(team)));
  settled_ = false;
  waiting_ = -1;
  bool good = true;
  // All of a chunk may be new. While there is room for many, a chunk is as large as the room: the table need not grow for
  // sources that turn out to be known.
  for (int64_t begin = 0, end = 0; begin < n; begin = end) {
    const int64_t least = std::min(n - begin, std::max(kGrain, static_cast<int64_t>(capacity_) / (4 * kFill)));
    if (room() < least) reserve(known() + least);
    end = begin + std::min(n - begin, room());
    const int64_t share = (end - begin + team - 1) / team;
    for (int part = 0; part < team; ++part) {  // here, where running out of memory can be caught
      auto& fresh = fresh_[static_cast<size_t>(part)];
      fresh.reserve(fresh.size() + static_cast<size_t>(std::min(share, static_cast<int64_t>(capacity_))));
    }
    if (team == 1) {
      good = insert<false>(sources + begin, end - begin, places + begin, {fresh_[0], numbers_}) && good;
      continue;
    }
#pragma omp parallel for num_threads(team) schedule(static) reduction(&& : good)
    for (int part = 0; part < team; ++part) {
      const int64_t first = std::min(end, begin + share * part), last = std::min(end, first + share);
      good = insert<true>(sources + first, last - first, places + first, {fresh_[static_cast<size_t>(part)], numbers_}) && good;
    }
  }
  if (!good) throw std::out_of_range("frontier: a source is out of range");
}

template void Frontier::meet<int32_t>(const int32_t*, int64_t, int32_t*, int);
template void Frontier::meet<int64_t>(const int64_t*, int64_t, int32_t*, int);

int64_t Frontier::grow() {
  waiting_ = 0;
  if (settled_) return 0;
  for (auto& part : fresh_) {
    keys_.insert(keys_.end(), part.begin(), part.end());
    part.clear();
  }
  sort_numbers(keys_, spare_);
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (i + kAhead < keys_.size()) __builtin_prefetch(slots_.home(keys_[i + kAhead]));
    const Entry& entry = *slots_.find(keys_[i]);
    waiting_ += std::popcount(entry.met & ~entry.rows);
  }
  if (rows_ + waiting_ > int64_t{1} << 31) throw std::length_error("frontier: too many nodes for one batch");
  if (lines_.size() < numbers_ << kLine) lines_.resize(numbers_ << kLine);
  return waiting_;
}

void Frontier::place(int64_t* ids) {
  int32_t* lines = lines_.data();
  int64_t row = rows_;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (i + kAhead < keys_.size()) {
      __builtin_prefetch(slots_.home(keys_[i + kAhead]), 1);
      __builtin_prefetch(lines + place_of(slots_.home(keys_[i + kAhead / 2])->word, 0), 1);  // a guess, mostly right
    }
    Entry& entry = *slots_.find(keys_[i]);
    uint32_t bits = entry.met & ~entry.rows;
    entry.rows = entry.met;
    for (; bits; bits &= bits - 1) {
      const int64_t id = keys_[i] << kLine | std::countr_zero(bits);
      lines[place_of(entry.word, id)] = static_cast<int32_t>(row++);
      *ids++ = id;
    }
  }
  rows_ = row;
  waiting_ = 0;
  settled_ = true;
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

// From its home on, up to the first empty entry: everything goes, so nothing behind an emptied entry is needed any more,
// and a key that cannot be reached because an earlier one's walk passed its home went with that walk.
void Frontier::forget(const std::vector<int64_t>& keys) {
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) __builtin_prefetch(slots_.home(keys[i + kAhead]), 1);
    for (Entry* entry = slots_.home(keys[i]); entry->word != kEmpty; entry = slots_.next(entry)) *entry = {kEmpty, 0, 0};
  }
}

void Frontier::clear() {
  forget(keys_);
  keys_.clear();
  for (auto& part : fresh_) {
    forget(part);
    part.clear();
  }
  numbers_ = 0;
  rows_ = waiting_ = 0;
  settled_ = true;
}

int64_t Frontier::bytes() const {
  size_t numbers = keys_.capacity() + spare_.capacity();
  for (const auto& part : fresh_) numbers += part.capacity();
  return static_cast<int64_t>(capacity_ * sizeof(Entry) + lines_.capacity() * sizeof(int32_t) + numbers * sizeof(int64_t));
}

template <typename Index>
void pick(const Index* col, const int64_t* edges, int64_t n, Index* sources, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n >= kGrain)
  for (int64_t i = 0; i < n; ++i) {
    if (i + 4 * kAhead < n) __builtin_prefetch(col + edges[i + 4 * kAhead]);
    sources[i] = col[edges[i]];
  }
}

template void pick<int32_t>(const int32_t*, const int64_t*, int64_t, int32_t*, int);
template void pick<int64_t>(const int64_t*, const int64_t*, int64_t, int64_t*, int);

}  // namespace gnnfleet
