// SPDX-License-Identifier: Apache-2.0
//
// Helpers for the host side of every CPU kernel: stating which requests it accepts, and reading the ports of a call.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cpu {

// The dtypes in which parameters are stored plain.
inline constexpr std::initializer_list<DType> kStorageDTypes = {DType::f32, DType::bf16, DType::f16};

inline CpuDevice& cpu_device(const KernelCall& call) { return static_cast<CpuDevice&>(call.context->device); }
inline const CpuDevice& cpu_device(const KernelRequest& request) {
  return static_cast<const CpuDevice&>(*request.device);
}

// Returns the elements of a plain contiguous port, or null if the port is absent.
template <typename T>
T* elements(const TensorView& view) {
  if (!view.defined()) return nullptr;
  EADEM_CHECK(view.encoding == nullptr && view.is_contiguous(), "{} is not plain and contiguous", to_string(view));
  return view.as<T>();
}

// Rounds a number of elements up, so that neighbouring pieces of scratch start on cache lines of their own.
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Collects what a kernel requires of a request. The first requirement that is not met becomes the refusal.
//
//   return Requirements(request).f32("x", request.inputs[0]).f32("y", request.outputs[0]).verdict();
class Requirements {
 public:
  explicit Requirements(const KernelRequest& request);

  // Requires an activation: f32, plain or in the encoding `rounded`, or absent.
  Requirements& f32(std::string_view port, const TensorType& type, const Encoding* rounded = nullptr);
  // Requires a plain port, or an absent one, whose dtype is one of `allowed`.
  Requirements& one_of(std::string_view port, const TensorType& type, std::initializer_list<DType> allowed);
  // Requires a parameter that this kernel prepares as `packing`: its dtype is one of `allowed`, and it is plain or
  // already packed.
  Requirements& packed(std::string_view port, const TensorType& type, std::initializer_list<DType> allowed,
                       const Encoding* packing);
  Requirements& require(bool condition, std::string_view reason);

  // Accepts under `estimate`, unless a requirement was not met.
  Verdict verdict(const Estimate& estimate = {}) const;

 private:
  const KernelRequest& request_;
  std::string refusal_;
};

}  // namespace eadem::kernels::cpu
