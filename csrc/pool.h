// Large buffers that are kept when they are given back: a fresh mapping of 200 MB costs ten times a reused one, in page
// faults. Blocks are mapped in huge pages where the system has them. Safe to call from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gnnfleet {

struct PoolState {
  int64_t used, highest, kept;  // bytes handed out now, at most so far, and waiting for their next use
};

void* pool_take(size_t bytes);  // throws std::bad_alloc; the contents are whatever they were
void pool_give(void* block);
void pool_release();  // unmap what is kept
PoolState pool_state();

}  // namespace gnnfleet
