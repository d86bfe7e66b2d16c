// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/support.h"

#include <algorithm>
#include <span>

#include "eadem/core/encodings/row_encoding.h"

namespace eadem::kernels::cuda {

Requirements::Requirements(const KernelRequest& request, std::span<const size_t> encoded_inputs,
                           std::span<const size_t> encoded_outputs)
    : request_(request) {
  EADEM_CHECK(request.device->backend() == "cuda", "a CUDA kernel is asked about {}", request.device->description());
  const auto require_plain = [&](std::span<const TensorType> types, std::span<const size_t> encoded) {
    for (size_t i = 0; i < types.size(); ++i)
      if (types[i].encoding != nullptr && std::find(encoded.begin(), encoded.end(), i) == encoded.end())
        require(false, fmt::format("a port is {}; takes plain tensors only", to_string(types[i])));
  };
  require_plain(request.inputs, encoded_inputs);
  require_plain(request.outputs, encoded_outputs);
}

Requirements& Requirements::dtype(std::string_view port, const TensorType& type, std::initializer_list<DType> allowed) {
  if (is_unconnected(type) || std::find(allowed.begin(), allowed.end(), type.dtype) != allowed.end()) return *this;
  std::string names;
  for (DType dtype : allowed) names += fmt::format("{}{}", names.empty() ? "" : ", ", dtype_name(dtype));
  return require(false, fmt::format("{} is {}; takes {}", port, dtype_name(type.dtype), names));
}

Requirements& Requirements::same_dtype(std::string_view port, const TensorType& type, std::string_view other_port,
                                       const TensorType& other) {
  if (is_unconnected(type) || type.dtype == other.dtype) return *this;
  return require(false, fmt::format("{} is {} and {} is {}; takes equal dtypes", port, dtype_name(type.dtype),
                                    other_port, dtype_name(other.dtype)));
}

KvCode kv_code_of(const TensorType& cache) {
  const RowEncoding* rows = cache.encoding == nullptr ? nullptr : RowEncoding::of(cache.encoding);
  if (rows == nullptr) return KvCode::none;
  return rows->code() == RowEncoding::Code::int8 ? KvCode::int8 : KvCode::e4m3;
}

Requirements& Requirements::kv_cache(std::string_view port, const TensorType& type) {
  if (type.encoding == nullptr) return dtype(port, type, kStorageDTypes);
  const int64_t width = type.fixed(type.rank() - 1);
  return require(kv_code_of(type) != KvCode::none,
                 fmt::format("{} is {}; takes plain caches, int8 and fp8_e4m3", port, to_string(type)))
      .require(width % 4 == 0 && width <= kMaxHeadDim,
               fmt::format("{} has rows of {} elements; takes codes in multiples of 4, at most {}", port, width,
                           kMaxHeadDim));
}

Requirements& Requirements::require(bool condition, std::string_view reason) {
  if (!condition && refusal_.empty()) refusal_ = reason;
  return *this;
}

Requirements& Requirements::hopper() {
  const std::string& refused = static_cast<const CudaDevice*>(request_.device)->hopper_refusal();
  return refused.empty() ? *this : require(false, fmt::format("is for Hopper; the device: {}", refused));
}

Requirements& Requirements::at_most(std::string_view what, int64_t value, int64_t limit) {
  if (value <= limit) return *this;
  return require(false, fmt::format("{}={} is more than {}", what, value, limit));
}

Verdict Requirements::verdict(const Estimate& estimate) const {
  return refusal_.empty() ? accept(request_, estimate) : Verdict::no(refusal_);
}

}  // namespace eadem::kernels::cuda
