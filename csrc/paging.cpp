#include "paging.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace gnnfleet {
namespace {

constexpr int64_t kGap = 8;  // pages; reading these costs less than another request

int64_t page_size() { return static_cast<int64_t>(sysconf(_SC_PAGESIZE)); }

// Whole pages of the table's own.
void advise(const uint8_t* table, int64_t nbytes, int advice) {
  const int64_t page = page_size();
  const int64_t base = static_cast<int64_t>(reinterpret_cast<uintptr_t>(table));
  const int64_t first = (base + page - 1) / page, end = (base + nbytes) / page;
  if (end > first) madvise(reinterpret_cast<void*>(first * page), static_cast<size_t>((end - first) * page), advice);
}

}  // namespace

int64_t read_ahead(const uint8_t* table, int64_t nbytes, int64_t width, const int64_t* rows, int64_t n) {
  const int64_t page = page_size();
  const int64_t base = static_cast<int64_t>(reinterpret_cast<uintptr_t>(table));
  const int64_t last = (base + nbytes - 1) / page;
  // A page that was not asked for, or has gone again, would bring 31 neighbours with it.
  advise(table, nbytes, MADV_RANDOM);
  int64_t runs = 0, begin = -1, end = -1;
  const auto ask = [&] {
    if (begin < 0) return;
    madvise(reinterpret_cast<void*>(begin * page), static_cast<size_t>((end - begin + 1) * page), MADV_WILLNEED);
    ++runs;
  };
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = (base + rows[i] * width) / page, final = std::min(last, (base + (rows[i] + 1) * width - 1) / page);
    if (begin >= 0 && first <= end + kGap) {
      end = std::max(end, final);
      continue;
    }
    ask();
    begin = first;
    end = final;
  }
  ask();
  return runs;
}

void let_go(const uint8_t* table, int64_t nbytes) {
  advise(table, nbytes, MADV_DONTNEED);
  advise(table, nbytes, MADV_NORMAL);
}

}  // namespace gnnfleet
