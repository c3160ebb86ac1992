// One function per group of operators; each adds its functions to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace forkpoint {

void bind_attention(pybind11::module_& m);
void bind_gdn(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_rows(pybind11::module_& m);

}  // namespace forkpoint
