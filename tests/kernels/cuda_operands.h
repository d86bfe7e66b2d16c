// SPDX-License-Identifier: Apache-2.0
//
// Operands of kernels on a CUDA device, results as bytes, and whether the device runs the kernels for Hopper.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/core/encoding.h"
#include "eadem/core/philox.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/kernel.h"

// Ends a test of kernels for Hopper where they do not run.
#define EADEM_SKIP_WITHOUT_HOPPER()                                                                 \
  do {                                                                                              \
    if (const std::string why = ::eadem::test::hopper_refusal(); !why.empty()) GTEST_SKIP() << why; \
  } while (false)

namespace eadem::test {

// Why the first device runs no kernels for Hopper; empty if it does.
inline std::string hopper_refusal() {
  static const std::string why =
      num_cuda_devices() == 0 ? "no CUDA device" : static_cast<CudaDevice&>(*open_cuda_device(0)).hopper_refusal();
  return why;
}

// Uniform in [-1, 1), a pure function of (seed, index).
inline Tensor random_tensor(DType dtype, const Shape& shape, uint64_t seed) {
  const Tensor values = Tensor::on_host(DType::f32, shape);
  float* out = values.view.as<float>();
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    out[i] = 2.0f * uniform_float(philox4x32(seed, static_cast<uint64_t>(i)).words[0]) - 1.0f;
  return converted_on_host(values.view, dtype);
}

inline Tensor random_on(const std::shared_ptr<Device>& device, DType dtype, const Shape& shape, uint64_t seed) {
  return copy_to_device(device, random_tensor(dtype, shape, seed).view);
}

inline Tensor integers_on(const std::shared_ptr<Device>& device, const std::vector<int32_t>& values, Shape shape = {}) {
  if (shape.rank() == 0) shape = Shape{static_cast<int64_t>(values.size())};
  const Tensor host = Tensor::on_host(DType::i32, shape);
  std::copy(values.begin(), values.end(), host.view.as<int32_t>());
  return copy_to_device(device, host.view);
}

// A host tensor in one plane, encoded: a copy on the device. It lives as long as `memory`.
inline TensorView encoded_on(const std::shared_ptr<Device>& device, const TensorView& host, Tensor& memory) {
  const int64_t bytes = encoded_bytes(*host.encoding, host.shape);
  memory = copy_to_device(device, TensorView(host.data, DType::u8, {bytes}));
  TensorView view(memory.view.data, host.dtype, host.shape);
  view.encoding = host.encoding;
  return view;
}

inline std::vector<char> bytes_of(Device& device, const TensorView& view) {
  const Tensor host = copy_to_host(device, view);
  const char* bytes = static_cast<const char*>(host.view.data);
  return std::vector<char>(bytes, bytes + host.view.size_bytes());
}

// The kernel of a list that has this name and computes inference.
inline const kernels::Kernel& named(const kernels::KernelList& list, std::string_view name) {
  for (const kernels::Kernel* kernel : list)
    if (kernel->name == name && kernel->pass == kernels::Pass::inference) return *kernel;
  EADEM_UNREACHABLE("no kernel {}", name);
}

// The plan of a kernel for ports of the extents of these views; undefined views are absent.
inline kernels::PlanPtr plan_for(const kernels::Kernel& kernel, std::string_view op, kernels::AttrsRef attrs,
                                 std::span<const TensorView> inputs, std::span<const TensorView> outputs,
                                 Context& context) {
  const auto types_of = [](std::span<const TensorView> views) {
    std::vector<TensorType> types;
    for (const TensorView& view : views) {
      std::vector<Dim> dims;
      for (int i = 0; i < view.shape.rank(); ++i) dims.emplace_back(view.shape[i]);
      types.push_back(view.defined() ? TensorType(view.dtype, dims, view.encoding) : kernels::unconnected_port());
    }
    return types;
  };
  const std::vector<TensorType> input_types = types_of(inputs), output_types = types_of(outputs);
  return kernel.prepare({.op = op,
                         .pass = kernel.pass,
                         .device = &context.device,
                         .attrs = attrs,
                         .inputs = input_types,
                         .outputs = output_types},
                        context);
}

}  // namespace eadem::test
