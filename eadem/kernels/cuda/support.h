// SPDX-License-Identifier: Apache-2.0
//
// Helpers for the host part of every CUDA kernel: stating which requests it accepts, and reading the ports of a call.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cuda {

inline CudaDevice& cuda_device(const KernelCall& call) { return static_cast<CudaDevice&>(call.context->device); }
// Whether the request's device is of this backend and runs the kernels for Hopper.
inline bool runs_hopper_kernels(const KernelRequest& request) {
  return request.device->backend() == "cuda" && static_cast<const CudaDevice*>(request.device)->runs_hopper_kernels();
}
inline cudaStream_t stream_of(const KernelCall& call) { return cuda_device(call).stream(); }

// Returns the elements of a plain contiguous port, or null if the port is absent.
inline void* elements(const TensorView& view) {
  EADEM_CHECK(!view.defined() || (view.encoding == nullptr && view.is_contiguous()), "{} is not plain and contiguous",
              to_string(view));
  return view.data;
}
template <typename T>
T* elements(const TensorView& view) {
  return elements(view) == nullptr ? nullptr : view.as<T>();
}

// The codes of a KV cache of this type. Not in a step: it looks the encoding up.
KvCode kv_code_of(const TensorType& cache);
// Elements or codes of a KV cache, and the scales of the codes, or null.
inline void* cache_rows(const TensorView& cache) {
  EADEM_CHECK(cache.is_contiguous(), "{} is not contiguous", to_string(cache));
  return cache.data;
}
inline float* cache_scales(const TensorView& cache) {
  return cache.encoding == nullptr ? nullptr : static_cast<float*>(cache.plane(1));
}

// Collects what a kernel requires of a request. The first requirement that is not met becomes the refusal. Every port
// must be plain, apart from inputs that the kernel reads encoded and outputs that it writes encoded.
//
//   return Requirements(request).dtype("x", request.inputs[0], {DType::f32}).verdict();
class Requirements {
 public:
  explicit Requirements(const KernelRequest& request, std::initializer_list<size_t> encoded_inputs = {},
                        std::initializer_list<size_t> encoded_outputs = {})
      : Requirements(request, std::span(encoded_inputs), std::span(encoded_outputs)) {}
  Requirements(const KernelRequest& request, std::span<const size_t> encoded_inputs,
               std::span<const size_t> encoded_outputs);

  // Requires a dtype of `allowed`, or an absent port.
  Requirements& dtype(std::string_view port, const TensorType& type, std::initializer_list<DType> allowed);
  Requirements& same_dtype(std::string_view port, const TensorType& type, std::string_view other_port,
                           const TensorType& other);
  Requirements& require(bool condition, std::string_view reason);
  // Requires that the device runs the kernels for Hopper (capability.h). Goes first: the refusal is of the device, not
  // of the request, and begins with "is for".
  Requirements& hopper();
  // Requires an input that may be encoded to be a plain cache of kStorageDTypes, or one in a RowEncoding whose rows are
  // a multiple of 4 elements, so that scales are aligned, and at most kMaxHeadDim.
  Requirements& kv_cache(std::string_view port, const TensorType& type);
  Requirements& at_most(std::string_view what, int64_t value, int64_t limit);

  // Accepts under `estimate`, whose shares are of the device's bf16 rate and of its bandwidth, unless a requirement was
  // not met.
  Verdict verdict(const Estimate& estimate = {}) const;

 private:
  const KernelRequest& request_;
  std::string refusal_;
};

inline constexpr std::initializer_list<DType> kActivationDTypes = {DType::f32, DType::bf16};
inline constexpr std::initializer_list<DType> kStorageDTypes = {DType::f32, DType::bf16, DType::f16};

// Prepares kernels that settle nothing: the plan is the function.
template <void (*kRun)(const KernelCall& call)>
PlanPtr prepare_nothing(const KernelRequest&, Context&) {
  return make_plan(kRun);
}

// A kernel of the inference pass, in the forward pass.
constexpr Kernel in_forward(Kernel kernel) {
  kernel.pass = Pass::forward;
  return kernel;
}

}  // namespace eadem::kernels::cuda
