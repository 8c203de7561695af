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

// Eight sizes per power of two, and a block may serve what needs a quarter less: batches of slightly different sizes find
// each other's blocks.
size_t rounded(size_t bytes) {
  bytes = std::max(bytes, kPage);
  const size_t step = std::max(kPage, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

struct Pool {
  std::mutex guard;
  std::multimap<size_t, void*> kept;
  std::unordered_map<void*, size_t> taken;  // how large the blocks in use are
  size_t used = 0, highest = 0, waiting = 0;

  void count(void* block, size_t size) {
    taken.emplace(block, size);
    used += size;
    highest = std::max(highest, used);
  }

  void drop(std::multimap<size_t, void*>::iterator at) {
    munmap(at->second, at->first);
    waiting -= at->first;
    kept.erase(at);
  }
};

Pool& pool() {
  static Pool* one = new Pool;  // never destroyed: tensors may outlive the module
  return *one;
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
  if (const auto at = p.kept.lower_bound(size); at != p.kept.end() && at->first <= size + size / 4) {
    const auto [found, block] = *at;
    p.kept.erase(at);
    p.waiting -= found;
    p.count(block, found);
    return block;
  }
  p.highest = std::max(p.highest, p.used + size);
  // Never more mapped than a quarter above the most that was in use at once: the largest of what waits goes first.
  while (!p.kept.empty() && p.used + size + p.waiting > p.highest + p.highest / 4) p.drop(std::prev(p.kept.end()));
  void* block = map(size);
  if (block == nullptr) {
    while (!p.kept.empty()) p.drop(p.kept.begin());
    block = map(size);
  }
  if (block == nullptr) throw std::bad_alloc();
  p.count(block, size);
  return block;
}

void pool_give(void* block) {
  Pool& p = pool();
  std::lock_guard lock(p.guard);
  const auto at = p.taken.find(block);
  const size_t size = at->second;
  p.taken.erase(at);
  p.used -= size;
  p.waiting += size;
  p.kept.emplace(size, block);
}

void pool_release() {
  Pool& p = pool();
  std::lock_guard lock(p.guard);
  while (!p.kept.empty()) p.drop(p.kept.begin());
  p.highest = p.used;
}

PoolState pool_state() {
  Pool& p = pool();
  std::lock_guard lock(p.guard);
  return {static_cast<int64_t>(p.used), static_cast<int64_t>(p.highest), static_cast<int64_t>(p.waiting)};
}

}  // namespace gnnfleet
