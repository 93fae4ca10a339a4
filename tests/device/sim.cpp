// Simulated accelerator for tests: tensors of type PrivateUse1 ("sim") in host memory.
//
// Every operation runs the CPU's kernel on the same memory (no copies), through one boxed fallback which
//   - refuses an operation that mixes host tensors with device tensors, as CUDA does;
//   - draws random numbers from a generator of the device, not from the host's;
//   - counts what would stall or copy on a real accelerator (see `counts`);
//   - rounds the factors of float32 products to TF32 where torch's settings for CUDA allow it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

using at::Tensor;
using Sizes = c10::SymIntArrayRef;
using MaybeTensor = std::optional<Tensor>;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(TYPE, 0);

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }

// ---- counters: operations, stalls, copies and bytes in each direction, float64 operations ------------------------

std::mutex counter_lock;
std::map<std::string, int64_t> counters;

void count(const std::string& name, int64_t by = 1) {
  std::lock_guard<std::mutex> guard(counter_lock);
  counters[name] += by;
}

void count_stall(const std::string& cause) {
  count("stalls");
  count("stall: " + cause);
}

// ---- device, generator, memory ------------------------------------------------------------------------------------

struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<TYPE> {
  static c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

at::Generator& device_generator() {
  static at::Generator generator = at::detail::createCPUGenerator(20261118);
  return generator;
}

void release_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// Memory of `storage`, labelled as memory of `device`; keeps `storage` alive.
c10::DataPtr shared_memory(const c10::Storage& storage, c10::Device device) {
  return {const_cast<void*>(storage.data()), new c10::Storage(storage), release_storage, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* host = c10::GetCPUAllocator();
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, host->allocate(bytes), host, true);
    return shared_memory(storage, DEVICE);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

struct DeviceHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return device_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto larger = allocator.allocate(bytes);
    memcpy(larger.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- one memory, seen as a host tensor or as a device tensor ------------------------------------------------------

// Tensor over `storage` with the shape, strides and lazy bits of `like`.
Tensor view_over(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) out._set_conj(true);
  if (like.is_neg()) out._set_neg(true);
  return out;
}

// The host views of the device storages of one operation: aliases on the device are aliases on the host.
struct HostViews {
  std::map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages;  // device storage -> (host, device)

  Tensor to_host(const Tensor& t) {
    auto* key = t.storage().unsafeGetStorageImpl();
    if (!storages.count(key)) {
      c10::Storage host(c10::Storage::use_byte_size_t(), t.storage().nbytes(), shared_memory(t.storage(), c10::kCPU),
                        c10::GetCPUAllocator(), true);
      storages.emplace(key, std::make_pair(host, t.storage()));
    }
    return view_over(storages.at(key).first, c10::DispatchKey::CPU, t);
  }

  c10::Storage device_storage(const Tensor& host) const {
    for (const auto& [key, pair] : storages)
      if (pair.first.unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl()) return pair.second;
    return {c10::Storage::use_byte_size_t(), host.storage().nbytes(), shared_memory(host.storage(), DEVICE), &allocator, true};
  }

  Tensor to_device(const Tensor& t) const {
    if (!t.defined() || on_device(t)) return t;
    TORCH_CHECK(t.layout() == c10::kStrided, "sim: sparse tensors are not supported");
    return view_over(device_storage(t), c10::DispatchKey::PrivateUse1, t);
  }
};

// ---- TF32 -----------------------------------------------------------------------------------------------------------

bool allows_tf32(at::Float32Op operation) {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, operation) == at::Float32Precision::TF32;
}

bool tf32() { return allows_tf32(at::Float32Op::MATMUL); }  // off by default, as on CUDA

// A float32 tensor with 10 bits of mantissa, as a tensor core reads it.
Tensor as_tf32(const Tensor& t) {
  if (!t.defined() || t.scalar_type() != at::kFloat) return t;
  auto bits = t.contiguous().view(at::kInt);
  return bits.add(1 << 12).bitwise_and(~((1 << 13) - 1)).view(at::kFloat);
}

const std::set<std::string> PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_",
                                        "aten::addbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::vdot"};

// ---- the fallback ---------------------------------------------------------------------------------------------------

const std::set<std::string> STALLS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
                                      "aten::is_nonzero", "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave",
                                      "aten::bincount", "aten::unique_consecutive"};
const std::set<std::string> INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

struct Call {
  const std::string& name;
  HostViews views;
  std::vector<std::pair<Tensor, Tensor>> arguments;  // (device tensor, its host view)
  std::string host_arguments;                        // host tensors that are no scalars
  bool uses_device = false;
  bool indexing, product;
  bool written = false;  // whether the operation writes the argument at hand

  explicit Call(const std::string& operation)
      : name(operation), indexing(INDEXING.count(operation)), product(tf32() && PRODUCTS.count(operation)) {}

  Tensor host_argument(const Tensor& t) {
    if (!t.defined()) return t;
    if (on_device(t)) {
      uses_device = true;
      if (t.scalar_type() == at::kDouble) count("float64 operations"), count("float64 numbers", t.numel());
      arguments.emplace_back(t, views.to_host(t));
      return product && !written ? as_tf32(arguments.back().second) : arguments.back().second;
    }
    if (t.dim() > 0 && indexing) {  // torch copies host indices to the device
      count("copies to device"), count("bytes to device", t.nbytes());
      count_stall("host index");
    } else if (t.dim() > 0) {
      host_arguments += " " + c10::str(t.sizes()) + " on " + t.device().str();
    }
    return t;
  }

  void replace(c10::IValue& value) {
    if (value.isTensor()) {
      value = host_argument(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& t : value.toTensorVector()) list.push_back(host_argument(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<MaybeTensor> list;
      for (const auto& t : value.toOptionalTensorVector()) {
        if (indexing && t && t->defined() && t->scalar_type() == at::kBool) count_stall("boolean index");
        list.push_back(t ? MaybeTensor(host_argument(*t)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      uses_device = uses_device || value.toDevice().type() == TYPE;
      value = c10::Device(c10::kCPU);
    }
  }

  // Arguments that the kernel resized.
  void update_shapes() {
    for (auto& [device, host] : arguments) {
      if (device.sizes() == host.sizes() && device.strides() == host.strides()) continue;
      auto* tensor = device.unsafeGetTensorImpl();
      if (device.storage().data() != host.storage().data())
        tensor->set_storage_keep_dtype(HostViews().device_storage(host));
      tensor->set_storage_offset(host.storage_offset());
      tensor->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }

  Tensor result(const Tensor& t) {
    for (auto& [device, host] : arguments)
      if (t.defined() && host.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return device;
    return views.to_device(t);
  }
};

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  Call call(schema.name());
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    call.written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    call.replace((*stack)[stack->size() - arguments.size() + i]);
  }
  TORCH_CHECK(!call.uses_device || call.host_arguments.empty(),
              "Expected all tensors to be on the same device: ", call.name, " got ", DEVICE, " and", call.host_arguments);
  count("operations");
  if (STALLS.count(call.name)) count_stall(call.name);
  if (operation.hasTag(at::Tag::nondeterministic_seeded)) {
    auto host = at::detail::getDefaultCPUGenerator();
    auto before = host.get_state();
    host.set_state(device_generator().get_state());
    operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    device_generator().set_state(host.get_state());
    host.set_state(before);
  } else {
    operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.update_shapes();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.result(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& t : value.toTensorVector()) list.push_back(call.result(t));
      value = list;
    }
  }
}

// ---- operations that cannot fall back: memory, copies, convolutions, fused cells ------------------------------------

Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  HostViews views;
  bool from = on_device(source), to = on_device(target);
  (to ? views.to_host(target) : target).copy_(from ? views.to_host(source) : source);
  if (from && !to) {
    count("copies to host"), count("bytes to host", source.nbytes());
    count_stall("copy to host");
  } else if (to && !from) {
    count("copies to device"), count("bytes to device", source.nbytes());
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset.expect_int());
  tensor->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t numbers = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {c10::SymInt(numbers)}, {c10::SymInt(1)});
}

const Tensor& resize(const Tensor& self, Sizes size, std::optional<at::MemoryFormat>) {
  auto shape = C10_AS_INTARRAYREF_SLOW(size);
  int64_t bytes = c10::multiply_integers(shape) * self.element_size();
  if (bytes > static_cast<int64_t>(self.storage().nbytes()))
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return self;
}

// A factor of a convolution. CUDA allows TF32 there by default; here only if it is allowed for matrices too.
Tensor factor(HostViews& views, const Tensor& t) {
  return tf32() && allows_tf32(at::Float32Op::CONV) ? as_tf32(views.to_host(t)) : views.to_host(t);
}

Tensor convolution(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Sizes stride, Sizes padding, Sizes dilation,
                   bool transposed, Sizes output_padding, c10::SymInt groups) {
  bool has_bias = bias && bias->defined();
  TORCH_CHECK(on_device(x) && on_device(weight) && (!has_bias || on_device(*bias)),
              "Expected all tensors to be on the same device: convolution");
  count("operations");
  HostViews views;
  at::AutoDispatchBelowAutograd below;
  auto host_bias = has_bias ? MaybeTensor(views.to_host(*bias)) : std::nullopt;
  return views.to_device(at::convolution_symint(factor(views, x), factor(views, weight), host_bias, stride, padding, dilation,
                                                transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight, Sizes stride,
                                                        Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                                                        c10::SymInt groups, std::array<bool, 3> mask) {
  TORCH_CHECK(on_device(gradient) && on_device(x) && on_device(weight),
              "Expected all tensors to be on the same device: convolution_backward");
  count("operations");
  HostViews views;
  at::AutoDispatchBelowAutograd below;
  std::vector<c10::SymInt> bias_sizes{weight.sym_size(transposed ? 1 : 0)};
  auto [dx, dw, db] = at::convolution_backward_symint(factor(views, gradient), factor(views, x), factor(views, weight),
                                                      at::OptionalSymIntArrayRef(bias_sizes), stride, padding, dilation,
                                                      transposed, output_padding, groups, mask);
  return {views.to_device(dx), views.to_device(dw), views.to_device(db)};
}

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

Tensor or_zeros(const MaybeTensor& t, const Tensor& like) { return t && t->defined() ? *t : at::zeros_like(like); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell, const MaybeTensor& bias_1,
                                             const MaybeTensor& bias_2) {
  auto all = input + hidden;
  if (bias_1 && bias_1->defined()) all = all + *bias_1 + *bias_2;
  auto gates = all.chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  auto next = f * cell + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_h, const MaybeTensor& grad_c, const Tensor& cell,
                                                      const Tensor& next, const Tensor& workspace, bool bias) {
  auto gates = workspace.chunk(4, 1);
  auto i = gates[0], f = gates[1], g = gates[2], o = gates[3], t = next.tanh();
  auto dh = or_zeros(grad_h, cell);
  auto dc = or_zeros(grad_c, cell) + dh * o * (1 - t * t);
  auto all = at::cat({dc * g * i * (1 - i), dc * cell * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  return {all, dc * f, bias ? all.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state, const MaybeTensor& bias_1,
                                    const MaybeTensor& bias_2) {
  auto x = (bias_1 && bias_1->defined() ? input + *bias_1 : input).chunk(3, 1);
  auto h = (bias_2 && bias_2->defined() ? hidden + *bias_2 : hidden).chunk(3, 1);
  auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
  return {n + z * (state - n), at::cat({r, z, n, state, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool bias) {
  auto w = workspace.chunk(5, 1);
  auto r = w[0], z = w[1], n = w[2], state = w[3], h = w[4];
  auto dn = grad * (1 - z) * (1 - n * n), dz = grad * (state - n) * z * (1 - z), dr = dn * h * r * (1 - r);
  auto dx = at::cat({dr, dz, dn}, 1), dh = at::cat({dr, dz, dn * r}, 1);
  return {dx, dh, grad * z, bias ? dx.sum(0) : Tensor(), bias ? dh.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // As CPU and CUDA: kernels of their own, not torch's composition of simpler operations.
  for (auto name : {"native_group_norm", "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("resize_", &resize);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("_fused_sdp_choice", &plain_attention);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(new DeviceHooks()); });
  module.def("counts", [] { std::lock_guard<std::mutex> guard(counter_lock); return counters; });
  module.def("reset", [] { std::lock_guard<std::mutex> guard(counter_lock); counters.clear(); });
  module.def("manual_seed", [](uint64_t seed) { device_generator().set_current_seed(seed); });
  module.def("get_rng_state", [] { return device_generator().get_state(); });
  module.def("set_rng_state", [](const Tensor& state) { device_generator().set_state(state); });
}
