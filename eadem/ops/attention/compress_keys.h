// SPDX-License-Identifier: Apache-2.0
//
// Compressed keys, or values, of native sparse attention. Ports, math and gradients:
// kernels/attention/compressed_attention.h. Only direct rows have a backward pass.
//
// Sharding: x, z and the state `rows` along the heads (axis 1), weight and position along their axis 0. heads are those
// of the part.
//
// Cost assumes that the step's tokens are divided evenly over its sequences, and counts the keys that are read, not the
// whole cache.
#pragma once

#include "eadem/kernels/attention/compressed_attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

// Throws InvalidArgument unless the stride is positive and the length a positive multiple of it.
void expect_grid(std::string_view op, const kernels::RowGrid& grid);

class CompressKeys final : public Op {
 public:
  // Throws InvalidArgument unless heads and width are positive and the grid is as above.
  explicit CompressKeys(const kernels::CompressKeysAttrs& attrs);

  std::string_view name() const override { return "compress_keys"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  bool has_backward() const override { return attrs_.source == kernels::KvSource::direct; }
  std::vector<Saved> saved() const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kWeight, kPosition, kQueryStart, kKvLength, kBlockTable, kSlots, kRows };

  kernels::CompressKeysAttrs attrs_;
};

}  // namespace eadem::ops
