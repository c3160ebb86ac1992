#include <malloc.h>

// One translation unit for all bindings: reading torch's headers costs more than compiling these.
#include "bind_attention.h"
#include "bind_recurrence.h"
#include "bind_linear.h"
#include "bind_rows.h"
#include "bind_scan.h"

namespace {

// glibc returns large freed blocks to the system and fetches them back at the next allocation, page fault by page
// fault; activations of a prefill step are such blocks.
void keep_freed_memory() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, 2147483647);
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
