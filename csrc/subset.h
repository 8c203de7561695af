// Subsets drawn by the words of one node: uniform, and independent of the thread.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "philox.h"

namespace gnnfleet {

// The words of one node, one after the other.
class Stream {
 public:
  Stream(const Draws& draws, int64_t node) : draws_(draws), node_(static_cast<uint64_t>(node)) {}

  uint32_t word() {
    if (at_ == 4) {
      words_ = draws_(node_, turn_++);
      at_ = 0;
    }
    return words_[at_++];
  }

  uint64_t wide() {
    const uint32_t low = word();
    return join(low, word());
  }

  // Uniform in 0 .. n-1: Lemire's multiplication, with another draw in the few cases that would bias the result.
  int64_t under(int64_t n) {
    if (n > int64_t{0xffffffff}) return static_cast<int64_t>(below(wide(), static_cast<uint64_t>(n)));
    const uint32_t limit = static_cast<uint32_t>(n);
    uint64_t product = static_cast<uint64_t>(word()) * limit;
    if (static_cast<uint32_t>(product) < limit) {
      const uint32_t uneven = (0u - limit) % limit;
      while (static_cast<uint32_t>(product) < uneven) product = static_cast<uint64_t>(word()) * limit;
    }
    return static_cast<int64_t>(product >> 32);
  }

 private:
  const Draws& draws_;
  uint64_t node_;
  uint32_t turn_ = 0;
  int at_ = 4;
  Words words_{};
};

// Floyd's uniform subset of k of 0 .. d-1: for j = d-k .. d-1 take a number up to j, or j if that is taken. The three
// implementations below store the set differently and give the same result.

inline void floyd_word(Stream& stream, int64_t degree, int64_t k, int64_t first, int64_t* out) {
  uint64_t taken = 0;
  for (int64_t j = degree - k; j < degree; ++j) {
    const int64_t t = stream.under(j + 1);
    taken |= uint64_t{1} << ((taken >> t & 1) ? j : t);
  }
  for (int64_t i = 0; i < k; ++i, taken &= taken - 1) out[i] = first + std::countr_zero(taken);
}

inline void floyd_insert(Stream& stream, int64_t degree, int64_t k, int64_t first, int64_t* out) {
  int64_t size = 0;
  for (int64_t j = degree - k; j < degree; ++j, ++size) {
    const int64_t t = first + stream.under(j + 1);
    int64_t at = size;
    while (at > 0 && out[at - 1] > t) --at;
    if (at > 0 && out[at - 1] == t) {
      out[size] = first + j;  // larger than all former ones
      continue;
    }
    std::move_backward(out + at, out + size, out + size + 1);
    out[at] = t;
  }
}

inline void floyd_bits(Stream& stream, int64_t degree, int64_t k, int64_t first, std::vector<uint64_t>& taken, int64_t* out) {
  taken.assign(static_cast<size_t>((degree + 63) / 64), 0);
  for (int64_t j = degree - k; j < degree; ++j) {
    int64_t t = stream.under(j + 1);
    if (taken[t >> 6] >> (t & 63) & 1) t = j;
    taken[t >> 6] |= uint64_t{1} << (t & 63);
  }
  for (size_t w = 0; w < taken.size(); ++w) {
    for (uint64_t bits = taken[w]; bits; bits &= bits - 1) *out++ = first + static_cast<int64_t>(w) * 64 + std::countr_zero(bits);
  }
}

// k of 0 .. degree-1 (k < degree), each plus `first`, ascending; `taken` is a reused buffer.
inline void draw_subset(Stream& stream, int64_t degree, int64_t k, int64_t first, std::vector<uint64_t>& taken, int64_t* out) {
  constexpr int64_t kSmall = 32;  // up to this size, by insertion into a sorted array
  if (degree <= 64) floyd_word(stream, degree, k, first, out);
  else if (k <= kSmall) floyd_insert(stream, degree, k, first, out);
  else floyd_bits(stream, degree, k, first, taken, out);
}

}  // namespace gnnfleet
