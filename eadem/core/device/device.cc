// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/device/device.h"

#include <charconv>

#include "eadem/core/device/cpu_device.h"
#include "eadem/core/device/cuda_device.h"

namespace eadem {

std::string_view device_type_name(DeviceType type) {
  switch (type) {
    case DeviceType::cpu: return "cpu";
    case DeviceType::cuda: return "cuda";
  }
  return "?";
}

std::shared_ptr<Device> open_device(std::string_view name, const DeviceOptions& options) {
  if (name == "cpu") return std::make_shared<CpuDevice>(options);
  const std::string_view kind = name.substr(0, name.find(':'));
  int index = 0;
  bool valid_index = true;
  if (kind.size() < name.size()) {
    const std::string_view digits = name.substr(kind.size() + 1);
    const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    valid_index = code == std::errc() && end == digits.data() + digits.size() && index >= 0;
  }
  if (kind != "cuda" || !valid_index) throw InvalidArgument("unknown device '{}'; expected cpu, cuda or cuda:N", name);
  if (!options.isa.empty())
    throw InvalidArgument("instruction set '{}' was asked for, but device '{}' is not a CPU", options.isa, name);
  return open_cuda_device(index);
}

std::vector<std::string> list_devices() {
  std::vector<std::string> result = {"cpu"};
  for (int index = 0; index < num_cuda_devices(); ++index) result.push_back(fmt::format("cuda:{}", index));
  return result;
}

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
  EADEM_CHECK(view.is_contiguous() && !view.encoding, "copy of a strided or encoded tensor {}", to_string(view));
  Tensor result = Tensor::on_host(view.dtype, view.shape);
  device.copy_to_host(result.view.data, view.data, view.size_bytes());
  return result;
}

}  // namespace eadem
