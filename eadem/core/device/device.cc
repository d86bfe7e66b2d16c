// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/device/device.h"

#include <algorithm>
#include <cstdlib>

namespace eadem {

namespace {

// The event of a device that has done all of its work whenever a call returns.
class PastEvent final : public Event {
 public:
  explicit PastEvent(Device& device) : device_(device) {}
  void record() override {}
  void wait() override { device_.synchronize(); }

 private:
  Device& device_;
};

}  // namespace

Buffer Device::allocate_on_host(int64_t size_bytes) {
  const auto padded = static_cast<size_t>((std::max<int64_t>(size_bytes, 1) + 63) / 64 * 64);
  void* data = std::aligned_alloc(64, padded);
  if (data == nullptr) throw OutOfMemory("cannot allocate {} bytes on the host", size_bytes);
  return Buffer(
      data, size_bytes, [](void* memory, int64_t, void*) { std::free(memory); }, nullptr);
}

std::unique_ptr<Event> Device::make_event() { return std::make_unique<PastEvent>(*this); }

std::unique_ptr<Recording> Device::record(FunctionRef<void()>) {
  EADEM_UNREACHABLE("{} records nothing", description());
}
void Device::replay(const Recording&) { EADEM_UNREACHABLE("{} records nothing", description()); }

Tensor allocate_tensor(Device& device, DType dtype, const Shape& shape) {
  auto buffer =
      std::make_shared<Buffer>(device.allocate(shape.num_elements() * static_cast<int64_t>(dtype_size(dtype))));
  const TensorView view(buffer->data(), dtype, shape);
  return Tensor(view, std::move(buffer));
}

Tensor allocate_tensor(Device& device, const TensorType& type, const SymbolValues& symbols) {
  const Shape shape = type.bind(symbols);
  if (type.encoding == nullptr) return allocate_tensor(device, type.dtype, shape);
  auto planes = std::make_shared<std::vector<Buffer>>();
  TensorView view(nullptr, type.dtype, shape);
  view.encoding = type.encoding;
  for (const PlaneSpec& spec : type.encoding->planes(shape)) {
    planes->push_back(device.allocate(spec.size_bytes()));
    (planes->size() == 1 ? view.data : view.more_planes[planes->size() - 2]) = planes->back().data();
  }
  return Tensor(view, std::move(planes));
}

void fill_zero(Device& device, const TensorView& view) {
  if (view.encoding == nullptr) return device.fill_zero(view.data, view.size_bytes());
  const std::vector<PlaneSpec> planes = view.encoding->planes(view.shape);
  for (size_t i = 0; i < planes.size(); ++i) device.fill_zero(view.plane(static_cast<int>(i)), planes[i].size_bytes());
}

void fill_new(Device& device, const TensorView& view, Placement placement) {
  if (view.encoding == nullptr) return device.fill_new(view.data, view.size_bytes(), placement);
  const std::vector<PlaneSpec> planes = view.encoding->planes(view.shape);
  for (size_t i = 0; i < planes.size(); ++i)
    device.fill_new(view.plane(static_cast<int>(i)), planes[i].size_bytes(), placement);
}

Tensor copy_to_device(const std::shared_ptr<Device>& device, const TensorView& host) {
  EADEM_CHECK(host.is_contiguous() && !host.encoding, "copy of a strided or encoded tensor {}", to_string(host));
  Tensor result = allocate_tensor(*device, host.dtype, host.shape);
  device->copy_from_host(result.view.data, host.data, host.size_bytes());
  return result;
}

Tensor copy_to_host(Device& device, const TensorView& view) {
  EADEM_CHECK(view.is_contiguous(), "copy of a strided tensor {}", to_string(view));
  if (view.encoding == nullptr) {
    Tensor result = Tensor::on_host(view.dtype, view.shape);
    device.copy_to_host(result.view.data, view.data, view.size_bytes());
    return result;
  }
  Tensor result = Tensor::on_host(view.dtype, view.shape, *view.encoding);
  const std::vector<PlaneSpec> planes = view.encoding->planes(view.shape);
  for (size_t i = 0; i < planes.size(); ++i)
    device.copy_to_host(result.view.plane(static_cast<int>(i)), view.plane(static_cast<int>(i)),
                        planes[i].size_bytes());
  return result;
}

}  // namespace eadem
