#include <c10/core/CPUAllocator.h>
#include <malloc.h>

// One translation unit for all bindings: reading torch's headers costs more than compiling these.
#include "bind_attention.h"
#include "bind_recurrence.h"
#include "bind_linear.h"
#include "bind_rows.h"
#include "bind_scan.h"

namespace {

// Allocates torch's tensors on the host as `allocate` does.
struct HugePages : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? forkpoint::allocate(bytes) : nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, memory || !bytes, "can't allocate memory for a tensor of ", bytes, " bytes");
    return {memory, memory, &std::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Sets how this process allocates. glibc returns large freed blocks to the system and fetches them back at the next
// allocation, page fault by page fault; activations of a prefill step are such blocks.
void keep_freed_memory() {
  static HugePages huge_pages;
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, 2147483647);
  c10::SetCPUAllocator(&huge_pages, 1);
}

}  // namespace

PYBIND11_MODULE(forkpoint_cpu_ops, m) {
  forkpoint::bind_attention(m);
  forkpoint::bind_recurrence(m);
  forkpoint::bind_linear(m);
  forkpoint::bind_rows(m);
  forkpoint::bind_scan(m);
  m.def("keep_freed_memory", &keep_freed_memory);
}
