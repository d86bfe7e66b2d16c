// SPDX-License-Identifier: Apache-2.0
//
// Writes the keys and values of new tokens into the cache at their slots. Ports and layout:
// kernels/attention/kv_append.h. Inference only; the outputs are the caches themselves.
//
// Sharding: k, v and the caches along the heads (axis 1). Cost counts the slots that are written, not the cache.
#pragma once

#include "eadem/ops/op.h"

namespace eadem::ops {

class KvAppend final : public Op {
 public:
  std::string_view name() const override { return "kv_append"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kK, kV, kSlots, kCacheK, kCacheV };
};

}  // namespace eadem::ops
