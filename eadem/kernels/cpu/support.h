// SPDX-License-Identifier: Apache-2.0
//
// What the host side of every CPU kernel needs: saying what it can take, and reading the ports of a call.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cpu {

inline CpuDevice& cpu_device(const KernelCall& call) { return static_cast<CpuDevice&>(call.context->device); }
inline const CpuDevice& cpu_device(const KernelRequest& request) {
  return static_cast<const CpuDevice&>(*request.device);
}

// The elements of a plain contiguous port; null when it is absent.
template <typename T>
T* elements(const TensorView& view) {
  if (!view.defined()) return nullptr;
  EADEM_CHECK(view.encoding == nullptr && view.is_contiguous(), "{} is not plain and contiguous", to_string(view));
  return view.as<T>();
}

// Rounds a number of elements up, so that neighbouring pieces of scratch start on cache lines of their own.
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Collects what a kernel requires of a request; the first thing that is not so becomes the refusal.
//
//   return Requirements(request).f32("x", request.inputs[0]).f32("y", request.outputs[0]).at_cost(flops);
class Requirements {
 public:
  explicit Requirements(const KernelRequest& request);

  // An activation: f32, plain, or absent.
  Requirements& f32(std::string_view port, const TensorType& type);
  // Plain, or absent, and of one of `allowed`.
  Requirements& one_of(std::string_view port, const TensorType& type, std::initializer_list<DType> allowed);
  // A parameter that this kernel has prepared as `packing`: one of `allowed`, plain as yet or packed already.
  Requirements& packed(std::string_view port, const TensorType& type, std::initializer_list<DType> allowed,
                       const Encoding* packing);
  Requirements& require(bool condition, std::string_view reason);

  // Yes at the modelled cost of `flops` and of the traffic of all ports, unless something was refused.
  Verdict at_cost(double flops) const;

 private:
  const KernelRequest& request_;
  std::string refusal_;
};

// Elements of a port at the upper bounds of the request, as a double for flop counts.
double elements_of(const KernelRequest& request, const TensorType& type);

}  // namespace eadem::kernels::cpu
