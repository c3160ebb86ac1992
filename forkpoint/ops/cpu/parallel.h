// Threads and scratch memory. OpenMP regions run on the pool that torch itself uses.
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace forkpoint {

inline int num_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

// fn(i) for 0 <= i < n, each on some thread, in any order. No result may depend on which.
template <class F>
void parallel_tasks(int64_t n, const F& fn) {
  if (n <= 1 || num_threads() == 1) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < n; ++i) fn(i);
}

// fn(begin, end) over [0, n) in one contiguous range per thread, at least `grain` long.
template <class F>
void parallel_ranges(int64_t n, int64_t grain, const F& fn) {
  const int64_t parts = std::min<int64_t>(num_threads(), (n + grain - 1) / std::max<int64_t>(grain, 1));
  if (parts <= 1) {
    if (n > 0) fn(int64_t(0), n);
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(int(parts))
  for (int64_t p = 0; p < parts; ++p) fn(n * p / parts, n * (p + 1) / parts);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

constexpr size_t HUGE_PAGE = 2 * 1024 * 1024;

// Returns memory on a cache line, or null, for `free`. From HUGE_PAGE bytes on it is in huge pages where the system lends
// them. Finding a small page may take as long as reading it, and small pages that lie anywhere compete for the same sets
// of a cache.
inline void* allocate(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, bytes < HUGE_PAGE ? 64 : HUGE_PAGE, bytes)) return nullptr;
#ifdef MADV_HUGEPAGE
  if (bytes >= HUGE_PAGE) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

// Uninitialised, on a cache line. What fills much of L2 takes whole huge pages.
template <class T>
struct Buffer {
  static constexpr size_t LARGE = 256 * 1024;
  std::unique_ptr<T[], Free> memory;
  explicit Buffer(int64_t n) {
    const size_t bytes = size_t(std::max<int64_t>(n, 1)) * sizeof(T);
    memory.reset(static_cast<T*>(allocate(bytes < LARGE ? bytes : (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE)));
    if (!memory) throw std::bad_alloc();
  }
  operator T*() { return memory.get(); }
};

}  // namespace forkpoint
