// SPDX-License-Identifier: Apache-2.0
//
// Latent attention over a cache of rows, in the form that each token's position asks for. Ports, math and the two
// forms: kernels/attention/latent_attention.h. It has no backward pass.
//
// Sharding: q and y along 1, the heads, with k_b and v_b along 0; every rank has all rows. attrs.heads are those of the
// part.
//
// Cost is that of the absorbed form where a step has no more tokens than sequences, as where each generates one, and of
// the decompressed form elsewhere, since a step does not tell how many of its tokens are of prompts. Tokens are divided
// evenly over the sequences, each of which fills max_blocks blocks.
#pragma once

#include "eadem/kernels/attention/latent_attention.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class LatentAttention final : public Op {
 public:
  // Throws InvalidArgument unless every size is positive and scale finite.
  explicit LatentAttention(const kernels::LatentAttentionAttrs& attrs);

  std::string_view name() const override { return "latent_attention"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kQ, kRows, kKeyMatrix, kValueMatrix, kQueryStart, kKvLength, kBlockTable, kPromptLength };
  kernels::LatentAttentionAttrs attrs_;
};

}  // namespace eadem::ops
