// Pool of large buffers: page faults make a new mapping of 200 MB ten times as expensive as a reused one. Blocks use huge
// pages if the system has them. Safe to call from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gnnfleet {

struct PoolState {
  int64_t used, highest, kept;  // bytes in use, their maximum so far, and bytes in free blocks
};

void* pool_take(size_t bytes);  // throws std::bad_alloc; contents are undefined
void pool_give(void* block);
void pool_release();  // unmap free blocks
PoolState pool_state();

}  // namespace gnnfleet
