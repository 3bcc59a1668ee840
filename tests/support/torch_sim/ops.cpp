// Operators of the simulated accelerator: a few of its own, and the CPU's kernels on aliases of its memory for the rest.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <unordered_map>

namespace sim {
namespace {

using at::Tensor;

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

c10::DispatchKeySet our_keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

// ---- aliases -----------------------------------------------------------------------------------------------------

// CPU tensors over the bytes of the device's; tensors that share a storage have aliases that share one.
class Aliases {
 public:
  Tensor of(const Tensor& tensor) {
    auto known = tensors_.find(tensor.unsafeGetTensorImpl());
    if (known != tensors_.end()) return known->second;
    auto alias = make(tensor);
    tensors_.emplace(tensor.unsafeGetTensorImpl(), alias);
    originals_.emplace(alias.unsafeGetTensorImpl(), tensor);
    return alias;
  }

  // What a kernel has returned, as a tensor of the device.
  Tensor back(const Tensor& result, c10::Device device, const std::string& what) {
    if (!result.defined() || result.device().type() != c10::kCPU) return result;
    auto same = originals_.find(result.unsafeGetTensorImpl());
    if (same != originals_.end()) return same->second;
    if (result.has_storage()) {
      auto shared = by_alias_.find(result.storage().unsafeGetStorageImpl());
      if (shared != by_alias_.end()) {
        auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(shared->second), our_keys(), result.dtype());
        auto* impl = view.unsafeGetTensorImpl();
        impl->set_storage_offset(result.storage_offset());
        impl->set_sizes_and_strides(result.sizes(), result.strides());
        return view;
      }
    }
    c10::DeviceGuard guard(device);
    auto fresh = at::Tensor(at::detail::empty_strided_generic(
        result.sizes(), result.strides(), allocator(), our_keys(), result.scalar_type()));
    note_use(fresh, true, what);
    if (auto num_bytes = fresh.storage().nbytes(); num_bytes && result.numel())
      std::memcpy(bytes_at(fresh.storage().data()), result.const_data_ptr(), num_bytes);
    return fresh;
  }

  // A kernel may have resized what it writes to.
  void after_writing(const Tensor& tensor) {
    auto alias = tensors_.at(tensor.unsafeGetTensorImpl());
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto* written = alias.storage().unsafeGetStorageImpl();
    if (written->data_ptr().get() != bytes_at(storage->data_ptr().get())) {
      if (storage->nbytes() != written->nbytes()) resize_bytes(storage, written->nbytes());
      if (written->nbytes())
        std::memcpy(bytes_at(storage->data_ptr().get()), written->data_ptr().get(), written->nbytes());
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides() ||
        tensor.storage_offset() != alias.storage_offset()) {
      impl->set_storage_offset(alias.storage_offset());
      impl->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
  }

 private:
  Tensor make(const Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = by_storage_.find(storage);
    if (found == by_storage_.end()) {
      auto alias = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
          c10::DataPtr(bytes_at(storage->data_ptr().get()), c10::kCPU), c10::GetCPUAllocator(), true);
      by_alias_.emplace(alias.get(), c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
      found = by_storage_.emplace(storage, c10::Storage(std::move(alias))).first;
    }
    c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    if (tensor.is_conj()) keys = keys.add(c10::DispatchKey::Conjugate);
    if (tensor.is_neg()) keys = keys.add(c10::DispatchKey::Negative);
    auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), keys, tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return alias;
  }

  std::unordered_map<c10::TensorImpl*, Tensor> tensors_, originals_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> by_storage_;
  std::unordered_map<c10::StorageImpl*, c10::intrusive_ptr<c10::StorageImpl>> by_alias_;
};

// ---- the fallback ------------------------------------------------------------------------------------------------

// Arguments that CUDA's kernels take from the CPU, whatever their dimensions.
bool may_lie_on_cpu(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index.Tensor",        "aten::index.Tensor_out",      "aten::index_put_",         "aten::index_put.out",
      "aten::_index_put_impl_",    "aten::_index_put_impl.out",   "aten::_unsafe_index.Tensor", "aten::_ctc_loss.Tensor",
      "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward", "aten::_pad_packed_sequence",
      "aten::lstm.data",           "aten::gru.data",              "aten::tensor_split.tensor_indices_or_sections"};
  return names.count(name) > 0;
}

template <typename Visit>
void visit_tensors(c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
  }
}

std::string found_device(const Tensor& tensor) { return tensor.device().str(); }

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name();
  const auto num_arguments = schema.arguments().size();
  const auto begin = stack->size() - num_arguments;
  const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  refuse_after_fork();

  // On which device?
  Tensor first, cpu_tensor;
  bool masks = false;
  std::optional<c10::Device> asked;
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[begin + i];
    const bool is_written = schema.arguments()[i].alias_info() && schema.arguments()[i].alias_info()->isWrite();
    if (value.isDevice()) asked = value.toDevice();
    visit_tensors(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (is_ours(tensor)) {
        if (!first.defined()) first = tensor;
        TORCH_CHECK(
            tensor.device() == first.device(), "Expected all tensors to be on the same device, but found at least two ",
            "devices, ", found_device(first), " and ", found_device(tensor), "! (when checking ", full, ")");
        masks |= value.isOptionalTensorList() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
      } else if (tensor.device().type() == c10::kCPU && (tensor.dim() > 0 || is_written)) {
        cpu_tensor = tensor;
      } else {
        TORCH_CHECK(
            tensor.device().type() == c10::kCPU, "Expected all tensors to be on the same device, but found ",
            found_device(tensor), " (when checking ", full, ")");
      }
    });
  }
  if (cpu_tensor.defined() && first.defined()) {
    TORCH_CHECK(
        may_lie_on_cpu(full), "Expected all tensors to be on the same device, but found at least two devices, ",
        found_device(first), " and ", found_device(cpu_tensor), "! (when checking ", full, ")");
    if (!cpu_tensor.is_floating_point()) note_wait("blocking copy", full);
  }
  auto device = first.defined() ? first.device() : asked.value_or(c10::Device(kSim, current_device()));
  if (!device.has_index()) device = c10::Device(kSim, current_device());
  c10::DeviceGuard guard(device);
  before_kernel(device.index());
  for (size_t i = 0; i < num_arguments; ++i) {
    const bool is_written = schema.arguments()[i].alias_info() && schema.arguments()[i].alias_info()->isWrite();
    visit_tensors((*stack)[begin + i], [&](const Tensor& tensor) { note_use(tensor, is_written, full); });
  }

  // Indexing by a mask has looked for its nonzero elements before it comes here, except where it assigns.
  const bool finds = name.name == "aten::_index_put_impl_" ? masks
      : name.name == "aten::index"                         ? false
                                                           : op.hasTag(at::Tag::data_dependent_output) ||
          op.hasTag(at::Tag::dynamic_output_shape);
  if (finds) {
    note_wait("data-dependent", full);
    finish_stream(current_stream(device.index()));
    before_kernel(device.index());
  }

  // Arguments for the CPU's kernel.
  Aliases aliases;
  std::vector<Tensor> written;
  bool has_generator = false;
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[begin + i];
    const bool is_written = schema.arguments()[i].alias_info() && schema.arguments()[i].alias_info()->isWrite();
    if (value.isTensor()) {
      const auto tensor = value.toTensor();
      if (!is_ours(tensor)) continue;
      if (is_written) written.push_back(tensor);
      value = aliases.of(tensor);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) {
        if (!is_ours(tensor)) continue;
        if (is_written) written.push_back(tensor);
        tensor = aliases.of(tensor);
      }
      value = c10::IValue(tensors);
    } else if (value.isOptionalTensorList()) {
      auto tensors = value.toOptionalTensorVector();
      for (auto& tensor : tensors)
        if (tensor && is_ours(*tensor)) tensor = aliases.of(*tensor);
      value = c10::IValue(tensors);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == kSim, "Expected a '", c10::Device(kSim).str(),
          "' device type for generator but found '", generator.device().str(), "'");
      has_generator = true;
      value = cpu_generator_of(generator);
    }
  }

  {
    std::optional<BorrowedGenerator> borrowed;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && !has_generator) borrowed.emplace(device.index());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }

  for (const auto& tensor : written) {
    aliases.after_writing(tensor);
    note_use(tensor, true, full);  // elsewhere now, where it was resized
  }
  const auto num_returns = schema.returns().size();
  for (auto i = stack->size() - num_returns; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.back(value.toTensor(), device, full);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = aliases.back(tensor, device, full);
      value = c10::IValue(tensors);
    }
  }
}

// ---- operators of its own ----------------------------------------------------------------------------------------

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kSim, current_device());
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "The simulated accelerator has strided tensors only.");
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, allocator(), our_keys(), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), our_keys(), c10::dtype_or_default(dtype));
}

void grow_to(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.numel() == 0) return;
  auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_bytes(storage, needed);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow_to(self);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage_offset(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  grow_to(self);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, size, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator(), true);
  return set_storage_offset(self, std::move(storage), 0, {0}, {});
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

at::Scalar local_scalar(const Tensor& self) {
  note_wait("item", "aten::_local_scalar_dense");
  c10::DeviceGuard guard(self.device());
  before_kernel(self.device().index());
  note_use(self, false, "aten::_local_scalar_dense");
  finish_stream(current_stream(self.device().index()));
  return at::_local_scalar_dense(Aliases().of(self));
}

// ---- copies ------------------------------------------------------------------------------------------------------

// Whether the bytes are copied as they are, in one piece.
bool is_plain_copy(const Tensor& from, const Tensor& to) {
  return from.sizes() == to.sizes() && from.strides() == to.strides() && from.is_non_overlapping_and_dense() &&
      from.scalar_type() == to.scalar_type() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto stream = current_stream(to.device().index());
  const bool is_async = non_blocking && from.is_contiguous() && from.sizes() == to.sizes() && is_pinned(from.const_data_ptr());
  before_kernel(to.device().index());
  note_use(to, true, "copy from the host");
  if (!is_async) {
    note_wait(non_blocking ? "pageable copy" : "blocking copy", "host to device");
    finish_stream(stream);
    Aliases().of(to).copy_(from);
    return;
  }
  if (!copies_are_late()) {
    Aliases().of(to).copy_(from);
    return;
  }
  watch_pinned(stream, from.storage(), from.const_data_ptr(), from.nbytes());
  auto kept = from.detach();
  c10::weak_intrusive_ptr<c10::StorageImpl> storage(to.storage().getWeakStorageImpl());
  auto sizes = to.sizes().vec(), strides = to.strides().vec();
  enqueue(stream, true, [kept, storage, sizes, strides, offset = to.storage_offset(), dtype = to.dtype()] {
    auto alive = storage.lock();
    if (!alive) return;
    auto target = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(alive), our_keys(), dtype);
    target.unsafeGetTensorImpl()->set_storage_offset(offset);
    target.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    at::AutoDispatchBelowADInplaceOrView below;
    Aliases().of(target).copy_(kept);
  });
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto stream = current_stream(from.device().index());
  before_kernel(from.device().index());
  note_use(from, false, "copy to the host");
  if (!non_blocking || !is_pinned(to.const_data_ptr()) || !is_plain_copy(from, to)) {
    note_wait(non_blocking ? "pageable copy" : "blocking copy", "device to host");
    finish_stream(stream);
    to.copy_(Aliases().of(from));
    return;
  }
  if (!copies_are_late()) {
    to.copy_(Aliases().of(from));
    return;
  }
  enqueue(stream, false, [to, value = Aliases().of(from).clone()] {
    std::memcpy(to.data_ptr(), value.const_data_ptr(), value.nbytes());
  });
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  refuse_after_fork();
  if (to.numel() == 0) return to;
  if (is_ours(from) && is_ours(to)) {
    before_kernel(from.device().index());
    before_kernel(to.device().index());
    if (from.device() != to.device()) meet(current_stream(from.device().index()), current_stream(to.device().index()));
    note_use(from, false, "aten::copy_");
    note_use(to, true, "aten::copy_");
    Aliases aliases;
    aliases.of(to).copy_(aliases.of(from));
  } else if (is_ours(to)) {
    TORCH_CHECK(from.device().type() == c10::kCPU, "Cannot copy from ", from.device(), " to ", to.device());
    c10::DeviceGuard guard(to.device());
    copy_to_device(from, to, non_blocking);
  } else {
    TORCH_CHECK(to.device().type() == c10::kCPU, "Cannot copy from ", from.device(), " to ", to.device());
    c10::DeviceGuard guard(from.device());
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// Whether `parameter.data = tensor` may take the tensor's memory over: as between two tensors of a GPU, or of the CPU
// and a GPU, which torch answers with no for devices that it does not know.
bool may_share(const Tensor& self, const Tensor& from) {
  auto is_dense = [](const Tensor& tensor) { return tensor.layout() == at::kStrided; };
  const bool both_ours = is_ours(self) && is_ours(from);
  return both_ours || (shares_on_assignment() && is_dense(self) && is_dense(from));
}

void record_storage(Tensor& tensor, c10::Stream stream) { record_stream(tensor.storage().data(), stream); }

}  // namespace

void note_use(const Tensor& tensor, bool writes, const std::string& what) {
  if (is_ours(tensor) && tensor.numel()) note_use(tensor.storage().data(), writes, what);
}

Tensor cpu_alias(const Tensor& tensor) { return Aliases().of(tensor); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_storage);
  m.impl("_has_compatible_shallow_copy_type", &may_share);
}

// Operators for which torch would compose others on a device that it does not know, where a GPU has a kernel.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "_stack", "_stack.out", "any.dims",
        "any.dims_out", "all.dims", "all.dims_out", "convolution", "convolution_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A copy reads conjugated and negated views as they are; torch would resolve them by a copy, without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &may_share);
}

}  // namespace sim
