#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>

namespace gnnfleet {
namespace {

constexpr size_t kPage = size_t{2} << 20;

// Eight sizes per power of two, and a block may serve a request that is a quarter smaller: batches of slightly different
// sizes share blocks.
size_t rounded(size_t bytes) {
  bytes = std::max(bytes, kPage);
  const size_t step = std::max(kPage, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

struct Pool {
  std::mutex guard;
  std::multimap<size_t, void*> free_blocks;
  std::unordered_map<void*, size_t> used_blocks;  // size of each block in use
  size_t used = 0, highest = 0, free_bytes = 0;

  void count(void* block, size_t size) {
    used_blocks.emplace(block, size);
    used += size;
    highest = std::max(highest, used);
  }

  void unmap(std::multimap<size_t, void*>::iterator it) {
    munmap(it->second, it->first);
    free_bytes -= it->first;
    free_blocks.erase(it);
  }
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: tensors may outlive the module
  return *instance;
}

void* map(size_t size) {
  char* raw = static_cast<char*>(
      mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (raw == MAP_FAILED) return nullptr;
  char* block = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + kPage - 1) / kPage * kPage);
  if (block != raw) munmap(raw, static_cast<size_t>(block - raw));
  if (const size_t tail = static_cast<size_t>(raw + kPage - block)) munmap(block + size, tail);
#ifdef MADV_HUGEPAGE
  madvise(block, size, MADV_HUGEPAGE);
#endif
  return block;
}

}  // namespace

void* pool_take(size_t bytes) {
  const size_t size = rounded(bytes);
  Pool& p = pool();
  std::lock_guard lock(p.guard);
  if (const auto it = p.free_blocks.lower_bound(size); it != p.free_blocks.end() && it->first <= size + size / 4) {
    const auto [found_size, block] = *it;
    p.free_blocks.erase(it);
    p.free_bytes -= found_size;
    p.count(block, found_size);
    return block;
  }
  p.highest = std::max(p.highest, p.used + size);
  // Mapped bytes are at most 5 / 4 of the maximum in use; the largest free block is unmapped first.
  while (!p.free_blocks.empty() && p.used + size + p.free_bytes > p.highest + p.highest / 4) p.unmap(std::prev(p.free_blocks.end()));
  void* block = map(size);
  if (block == nullptr) {
    while (!p.free_blocks.empty()) p.unmap(p.free_blocks.begin());
    block = map(size);
  }
  if (block == nullptr) throw std::bad_alloc();
  p.count(block, size);
  return block;
}

void pool_give(void* block) {
  Pool& p = pool();
  std::lock_guard lock(p.guard);
  const auto it = p.used_blocks.find(block);
  const size_t size = it->second;
  p.used_blocks.erase(it);
  p.used -= size;
  p.free_bytes += size;
  p.free_blocks.emplace(size, block);
}

void pool_release() {
  Pool& p = pool();
  std::lock_guard lock(p.guard);
  while (!p.free_blocks.empty()) p.unmap(p.free_blocks.begin());
  p.highest = p.used;
}

PoolState pool_state() {
  Pool& p = pool();
  std::lock_guard lock(p.guard);
  return {static_cast<int64_t>(p.used), static_cast<int64_t>(p.highest), static_cast<int64_t>(p.free_bytes)};
}

}  // namespace gnnfleet
