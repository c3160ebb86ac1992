// A device `npu` on the host's memory. Operators are the CPU's, on aliases of the arguments; what lies on the host and
// is no scalar is refused among them. Counted: operators, copies between host and device, those of them that the
// host waits for, reads of scalars.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <string>

namespace {

using at::Tensor;
using c10::Stack;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
std::map<std::string, int64_t> counts;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* place = c10::alloc_cpu(size);
    return {place, place, &c10::free_cpu, c10::Device(NPU, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Allocator allocator;
REGISTER_ALLOCATOR(NPU, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<NPU>);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_nocuda(storage, size);
  }
};

bool on_npu(const Tensor& x) { return x.defined() && x.device().type() == NPU; }

// The same bytes as a CPU tensor.
Tensor hosted(const Tensor& x) {
  if (!on_npu(x)) return x;
  Tensor keep = x;
  return at::from_blob(
      const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(), [keep](void*) {}, x.options().device(at::kCPU));
}

void check_type(std::optional<at::ScalarType> type) {
  TORCH_CHECK(type != at::kFloat8_e4m3fn, "a 910B has no 8-bit floats");
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_type(type);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  check_type(type);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (on_npu(from) != on_npu(to) && !non_blocking) counts["blocking copy"]++;
  if (on_npu(from) && !on_npu(to)) counts["to host"]++;
  if (!on_npu(from) && on_npu(to)) counts["to device"]++;
  hosted(to).copy_(hosted(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& x) {
  counts["scalar read"]++;
  return at::_local_scalar_dense(hosted(x));
}

Tensor as_strided(
    const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto first = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
}

Tensor view(const Tensor& x, c10::SymIntArrayRef size) { return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(
    Tensor& x, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      x, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

c10::IValue hosted_value(const c10::IValue& value, const c10::Argument& argument, const std::string& name) {
  if (value.isTensor() && value.toTensor().defined()) {
    const Tensor x = value.toTensor();
    TORCH_CHECK(on_npu(x) || x.dim() == 0, argument.name(), " of ", name, " lies on the host, others on the npu");
    const bool is_out = argument.alias_info() && argument.alias_info()->isWrite();
    // An empty result is resized by the CPU's operator, which an alias cannot be.
    return is_out && x.numel() == 0 ? at::empty(x.sizes(), x.options().device(at::kCPU)) : hosted(x);
  }
  if (value.isTensorList()) {
    std::vector<Tensor> list;
    for (const Tensor& x : value.toTensorVector()) list.push_back(hosted(x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& x : value.toOptionalTensorList())
      list.push_back(x.has_value() && x->defined() ? std::optional<Tensor>(hosted(*x)) : x);
    return list;
  }
  return value.isDevice() ? c10::IValue(at::Device(at::kCPU)) : value;
}

Tensor moved(const Tensor& x) {
  Tensor out = at::empty(x.sizes(), x.options().device(c10::Device(NPU, 0)));
  hosted(out).copy_(x);
  return out;
}

// The argument that a result is, resized where the operator did so.
Tensor written(const Tensor& result, const at::AliasInfo& alias, const std::vector<c10::IValue>& before,
               const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < before.size(); i++) {
    const auto* own = schema.arguments()[i].alias_info();
    if (!own || !own->isWrite() || !(*own == alias)) continue;
    Tensor old = before[i].toTensor();
    if (old.sizes() != result.sizes()) {
      at::native::resize_(old, result.sizes());
      hosted(old).copy_(result);
    }
    return old;
  }
  TORCH_CHECK(false, schema.name(), " writes what none of its arguments is");
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = c10::toString(schema.operator_name());
  counts[name]++;
  const size_t num_args = schema.arguments().size(), num_returns = schema.returns().size();
  const size_t base = stack->size() - num_args;
  const std::vector<c10::IValue> before(stack->begin() + base, stack->end());
  for (size_t i = 0; i < num_args; i++)
    (*stack)[base + i] = hosted_value(before[i], schema.arguments()[i], name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const size_t first = stack->size() - num_returns;
  for (size_t i = 0; i < num_returns; i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (value.isTensor() && value.toTensor().defined()) {
      TORCH_CHECK(!alias || alias->isWrite(), name, " makes a view and has no form of its own here");
      value = alias ? written(value.toTensor(), *alias, before, schema) : moved(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(moved(x));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("as_strided", as_strided);
  library.impl("unfold", at::native::unfold);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
}

c10::Dict<std::string, int64_t> counted() {
  c10::Dict<std::string, int64_t> out;
  for (const auto& [name, count] : counts) out.insert(name, count);
  counts.clear();
  return out;
}

void install() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

TORCH_LIBRARY(fake_npu, library) {
  library.def("install() -> ()", install);
  library.def("hosted(Tensor x) -> Tensor", hosted);
  library.def("counted() -> Dict(str, int)", counted);  // since the last call
}

}  // namespace
