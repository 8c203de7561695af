// Binding of the pool: a buffer is an array whose owner returns it to the pool when the last tensor on it is deleted.
#include "bind.h"
#include "pool.h"

namespace {

using Bytes = nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Bytes pool_take(size_t bytes) {
  void* block = gnnfleet::pool_take(bytes);
  nb::capsule owner(block, [](void* given) noexcept { gnnfleet::pool_give(given); });
  const size_t shape[1] = {bytes};
  return Bytes(block, 1, shape, owner);
}

}  // namespace

void bind_pool(nb::module_& m) {
  m.def("pool_take", pool_take, "bytes"_a, "A buffer of the pool as a tensor of bytes.");
  m.def("pool_release", [] { gnnfleet::pool_release(); }, "Give the memory that waits for its next use back to the system.");
  m.def("pool_state", [] {
    const gnnfleet::PoolState s = gnnfleet::pool_state();
    return nb::make_tuple(s.used, s.highest, s.kept);
  }, "Bytes (in use, in use at most so far, kept).");
}
