// SPDX-License-Identifier: Apache-2.0
//
// Writes rows of new tokens into a cache in which keys and values lie together. Ports and layout:
// kernels/attention/kv_append.h. Inference only; the output is the cache itself.
//
// Sharding: none; every rank keeps every row. Cost counts the slots that are written, not the cache.
#pragma once

#include "eadem/kernels/attention/kv_append.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class LatentAppend final : public Op {
 public:
  // Throws InvalidArgument unless the stride is positive, and with one the block size.
  explicit LatentAppend(const kernels::LatentAppendAttrs& attrs = {});

  std::string_view name() const override { return "latent_append"; }
  std::vector<Port> inputs() const override {
    return {{"rows"}, {"slots", Port::Role::index}, {"cache", Port::Role::state}};
  }
  std::vector<Port> outputs() const override { return {{"cache", Port::Role::state}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kRows, kSlots, kCache };

  kernels::LatentAppendAttrs attrs_;
};

}  // namespace eadem::ops
