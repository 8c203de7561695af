#include "cosines.h"

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "turn.h"

namespace gnnfleet::GNNFLEET_ISA {
namespace {

template <typename T>
void all(const CosineArgs& a) {
  const T *since = static_cast<const T*>(a.since), *frequency = static_cast<const T*>(a.frequency), *phase = static_cast<const T*>(a.phase);
  const int64_t room = whole_turns(a.width);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    std::vector<T> w(room), b(room), c(room), s(room);
    std::copy(frequency, frequency + a.width, w.begin());
    std::copy(phase, phase + a.width, b.begin());
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a.n; ++i) {
      turn(w.data(), b.data(), since[i], room, c.data(), s.data());
      std::copy(c.begin(), c.begin() + a.width, static_cast<T*>(a.cosine) + i * a.width);
      std::copy(s.begin(), s.begin() + a.width, static_cast<T*>(a.sine) + i * a.width);
    }
  }
}

}  // namespace

void cosines(const CosineArgs& a) { a.wide ? all<double>(a) : all<float>(a); }

}  // namespace gnnfleet::GNNFLEET_ISA
