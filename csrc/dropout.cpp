#include "dropout.h"

#include <algorithm>

#include "kernels.h"
#include "philox.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

constexpr int kLanes = 16;  // counters advanced together: plain loops over arrays that the compiler turns into vectors

// Words of columns 4 * group .. 4 * (group + kLanes) of one row, in column order.
inline void draw(uint64_t id, uint32_t group, const DropoutArgs& a, uint32_t* words) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    c0[l] = static_cast<uint32_t>(id);
    c1[l] = static_cast<uint32_t>(id >> 32);
    c2[l] = group + static_cast<uint32_t>(l);
    c3[l] = a.place;
  }
  uint32_t key0 = static_cast<uint32_t>(a.key), key1 = static_cast<uint32_t>(a.key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < kLanes; ++l) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0[l], p1 = uint64_t{0xCD9E8D57u} * c2[l];
      c0[l] = static_cast<uint32_t>(p1 >> 32) ^ c1[l] ^ key0;
      c2[l] = static_cast<uint32_t>(p0 >> 32) ^ c3[l] ^ key1;
      c1[l] = static_cast<uint32_t>(p1);
      c3[l] = static_cast<uint32_t>(p0);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (int l = 0; l < kLanes; ++l) {
    words[4 * l] = c0[l];
    words[4 * l + 1] = c1[l];
    words[4 * l + 2] = c2[l];
    words[4 * l + 3] = c3[l];
  }
}

template <typename T>
void dropout(const DropoutArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  T* out = static_cast<T*>(a.out);
  const T scale = static_cast<T>(a.scale);
#pragma omp parallel for num_threads(a.threads) schedule(static)
  for (int64_t i = 0; i < a.n; ++i) {
    uint32_t words[4 * kLanes];
    for (int64_t f = 0; f < a.width; f += 4 * kLanes) {
      const int64_t count = std::min<int64_t>(4 * kLanes, a.width - f);
      const T* from = x + i * a.width + f;
      T* to = out + i * a.width + f;
      bool any = false;  // wide bags of words are mostly zeros, which need no draws
      for (int64_t c = 0; c < count; ++c) any |= from[c] != T(0);
      if (!any) {
        for (int64_t c = 0; c < count; ++c) to[c] = T(0);
        continue;
      }
      draw(static_cast<uint64_t>(a.ids[i]), static_cast<uint32_t>(f / 4), a, words);
      for (int64_t c = 0; c < count; ++c) to[c] = words[c] >= a.threshold ? from[c] * scale : T(0);
    }
  }
}

}  // namespace

void dropout_rows(const DropoutArgs& a) {
  if (a.wide) dropout<double>(a);
  else dropout<float>(a);
}

}  // namespace gnnfleet::GNNFLEET_ISA
