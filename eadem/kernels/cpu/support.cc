// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/support.h"

#include <fmt/format.h>

#include <algorithm>

namespace eadem::kernels::cpu {

Requirements::Requirements(const KernelRequest& request) : request_(request) {
  EADEM_CHECK(request.device->backend() == "cpu", "a kernel of the CPU is asked about {}",
              request.device->description());
}

Requirements& Requirements::f32(std::string_view port, const TensorType& type, const Encoding* rounded) {
  if (!refusal_.empty() || is_unconnected(type)) return *this;
  if (type.encoding != nullptr && type.encoding != rounded)
    refusal_ = fmt::format("takes plain values; {} is encoded as {}", port, type.encoding->name());
  else if (type.dtype != DType::f32)
    refusal_ = fmt::format("computes activations in f32; {} is {}", port, dtype_name(type.dtype));
  return *this;
}

Requirements& Requirements::one_of(std::string_view port, const TensorType& type,
                                   std::initializer_list<DType> allowed) {
  if (refusal_.empty() && !is_unconnected(type) && type.encoding != nullptr)
    refusal_ = fmt::format("takes plain values; {} is encoded as {}", port, type.encoding->name());
  return packed(port, type, allowed, nullptr);
}

Requirements& Requirements::packed(std::string_view port, const TensorType& type, std::initializer_list<DType> allowed,
                                   const Encoding* packing) {
  if (!refusal_.empty() || is_unconnected(type)) return *this;
  if (std::find(allowed.begin(), allowed.end(), type.dtype) == allowed.end()) {
    std::string names;
    for (DType dtype : allowed) names += (names.empty() ? "" : ", ") + std::string(dtype_name(dtype));
    refusal_ = fmt::format("takes {} as one of {}; it is {}", port, names, dtype_name(type.dtype));
  } else if (type.encoding != nullptr && type.encoding != packing) {
    refusal_ = fmt::format("takes {} plain or as {}; it is encoded as {}", port,
                           packing == nullptr ? "plain" : packing->name(), type.encoding->name());
  }
  return *this;
}

Requirements& Requirements::require(bool condition, std::string_view reason) {
  if (refusal_.empty() && !condition) refusal_ = reason;
  return *this;
}

Verdict Requirements::verdict(const Estimate& estimate) const {
  return refusal_.empty() ? accept(request_, estimate) : Verdict::no(refusal_);
}

}  // namespace eadem::kernels::cpu
