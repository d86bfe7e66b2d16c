// SPDX-License-Identifier: Apache-2.0
//
// The backend `reference` computes every pass of every op by the op's definition, in double precision on one thread.
// It is slow and has nothing to be wrong about, so whole models on other devices are tested against it.
#include "eadem/kernels/backend.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "eadem/kernels/reference/device.h"
#include "eadem/kernels/reference/values.h"

namespace eadem::kernels::reference {

MemoryInfo ReferenceDevice::memory() const {
  struct sysinfo info {};
  sysinfo(&info);
  const int64_t unit = info.mem_unit;
  return {static_cast<int64_t>(info.totalram) * unit, static_cast<int64_t>(info.freeram + info.bufferram) * unit};
}

DeviceRates ReferenceDevice::rates() const {
  return {.flops_per_second = 5e8, .bytes_per_second = 2e9, .launch_seconds = 1e-6};
}

Buffer ReferenceDevice::allocate(int64_t size_bytes) {
  constexpr std::align_val_t kAlignment{64};
  EADEM_CHECK(size_bytes >= 0, "allocate {} bytes", size_bytes);
  void* data = ::operator new(static_cast<size_t>(std::max<int64_t>(size_bytes, 1)), kAlignment, std::nothrow);
  if (data == nullptr)
    throw OutOfMemory("cannot allocate {} bytes of host memory ({} bytes free)", size_bytes, memory().free_bytes);
  return Buffer(
      data, size_bytes, [](void* freed, int64_t, void*) { ::operator delete(freed, kAlignment); }, nullptr);
}

void ReferenceDevice::copy(void* dst, const void* src, int64_t size_bytes) {
  if (size_bytes > 0) std::memmove(dst, src, static_cast<size_t>(size_bytes));
}

void ReferenceDevice::fill_zero(void* dst, int64_t size_bytes) {
  if (size_bytes > 0) std::memset(dst, 0, static_cast<size_t>(size_bytes));
}

namespace {

Verdict can_handle(const KernelRequest& request) {
  for (const TensorType& type : request.outputs)
    if (type.encoding != nullptr)
      return Verdict::no(fmt::format("an output is {}; writes plain values", to_string(type)));
  return accept(request);
}

// The definition of an op, run on copies of the ports in double precision.
class ReferencePlan final : public Plan {
 public:
  explicit ReferencePlan(const KernelRequest& request)
      : Plan(0), definition_(*request.definition), pass_(request.pass) {
    for (const TensorType& type : request.outputs) is_absent_.push_back(is_unconnected(type));
  }

  // A port that is both input and output is read before it is written.
  void run(const KernelCall& call) const override {
    std::vector<RefTensor> inputs, outputs;
    for (const TensorView& view : call.inputs) inputs.push_back(widen(view));
    for (size_t i = 0; i < call.outputs.size(); ++i)
      outputs.push_back(is_absent_[i] ? RefTensor() : widen(call.outputs[i]));
    definition_.reference(pass_, inputs, outputs);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const TensorView& view = call.outputs[i];
      if (!view.defined() || is_absent_[i]) continue;
      EADEM_CHECK(std::ssize(outputs[i].data) == view.num_elements(), "output {} has {} elements; {}", i,
                  outputs[i].data.size(), to_string(view));
      const Tensor rounded = narrow(outputs[i], view.dtype);
      std::memcpy(view.data, rounded.view.data, static_cast<size_t>(view.size_bytes()));
    }
  }

 private:
  const Definition& definition_;
  Pass pass_;
  std::vector<bool> is_absent_;  // outputs that nobody asked for
};

PlanPtr prepare(const KernelRequest& request, Context& context) {
  if (context.mesh.num_ranks() > 1)
    throw Unsupported("device 'reference' runs on one rank; there are {}", context.mesh.num_ranks());
  return std::make_unique<const ReferencePlan>(request);
}

// The ports of an op are widened all at once. Of decoder_layers that may be the weights of a whole model.
constexpr int64_t kMostWidenedBytes = int64_t{1} << 30;

Verdict can_handle_layers(const KernelRequest& request) {
  int64_t bytes = 0;
  for (const TensorType& type : request.inputs)
    bytes += static_cast<int64_t>(sizeof(double)) * type.bind(request.bounds).num_elements();
  if (bytes > kMostWidenedBytes)
    return Verdict::no(fmt::format("inputs take {} bytes in double; at most {}", bytes, kMostWidenedBytes));
  return can_handle(request);
}

constexpr Kernel kForward{.name = "reference", .pass = Pass::forward, .can_handle = can_handle, .prepare = prepare};
constexpr Kernel kBackward{.name = "reference", .pass = Pass::backward, .can_handle = can_handle, .prepare = prepare};
constexpr Kernel kInference{.name = "reference", .pass = Pass::inference, .can_handle = can_handle, .prepare = prepare};

constexpr Kernel kLayers{
    .name = "reference", .pass = Pass::inference, .can_handle = can_handle_layers, .prepare = prepare};

KernelList kernels_of(std::string_view op) {
  return op == "decoder_layers" ? KernelList{&kLayers} : KernelList{&kForward, &kBackward, &kInference};
}

std::vector<std::string> list() { return {}; }  // nobody should be offered it

std::shared_ptr<Device> open(int index, const DeviceOptions&) {
  if (index != 0) throw NotFound("device 'reference:{}' not found: there is one, 'reference'", index);
  return std::make_shared<ReferenceDevice>();
}

}  // namespace

extern const Backend kBackend{.name = "reference", .list = list, .open = open, .kernels = kernels_of};

}  // namespace eadem::kernels::reference
