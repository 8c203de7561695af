#include "dropout.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "philox_lanes.h"
#include "simd.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

constexpr int kWords = 4 * kCounters;

// Words of columns 4 * group .. 4 * group + kWords of one row, in column order.
inline void draw(uint64_t id, uint32_t group, const DropoutArgs& a, uint32_t* words) {
  Counters x{};
  for (int v = 0; v < 2; ++v) {
    x.word[0][v] = word_t{} + id;
    x.word[1][v] = word_t{} + (id >> 32);
    x.word[3][v] = word_t{} + a.place;
  }
  uint64_t groups[kCounters];
  for (int l = 0; l < kCounters; ++l) groups[l] = group + static_cast<uint32_t>(l);
  std::memcpy(x.word[2], groups, sizeof groups);
  x.draw(a.key);
  uint64_t first[kCounters], second[kCounters], pairs[2 * kCounters];
  for (int v = 0; v < 2; ++v) {
    const word_t low = (x.word[0][v] & 0xffffffffu) | x.word[1][v] << 32, high = (x.word[2][v] & 0xffffffffu) | x.word[3][v] << 32;
    std::memcpy(first + v * kWordLanes, &low, sizeof low);
    std::memcpy(second + v * kWordLanes, &high, sizeof high);
  }
  for (int l = 0; l < kCounters; ++l) {
    pairs[2 * l] = first[l];
    pairs[2 * l + 1] = second[l];
  }
  std::memcpy(words, pairs, sizeof pairs);
}

template <typename T>
void dropout(const DropoutArgs& a) {
  using A = wide_t<T>;
  const T* x = static_cast<const T*>(a.x);
  T* out = static_cast<T*>(a.out);
  const A scale = static_cast<A>(a.scale);
#pragma omp parallel for num_threads(a.threads) schedule(static)
  for (int64_t i = 0; i < a.n; ++i) {
    uint32_t words[kWords];
    for (int64_t f = 0; f < a.width; f += kWords) {
      const int64_t count = std::min<int64_t>(kWords, a.width - f);
      const T* from = x + i * a.width + f;
      T* to = out + i * a.width + f;
      bool any = false;  // bag-of-words features are mostly zeros, which need no draws
      for (int64_t c = 0; c < count; ++c) any |= widen(from[c]) != A(0);
      if (!any) {
        for (int64_t c = 0; c < count; ++c) set(to + c, A(0));
        continue;
      }
      draw(static_cast<uint64_t>(a.ids[i]), static_cast<uint32_t>(f / 4), a, words);
      for (int64_t c = 0; c < count; ++c) set(to + c, words[c] >= a.threshold ? widen(from[c]) * scale : A(0));
    }
  }
}

}  // namespace

void dropout_rows(const DropoutArgs& a) {
  if (a.element == Element::float64) dropout<double>(a);
  else if (a.element == Element::bfloat16) dropout<BFloat>(a);
  else dropout<float>(a);
}

}  // namespace gnnfleet::GNNFLEET_ISA
