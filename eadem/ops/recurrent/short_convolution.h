// SPDX-License-Identifier: Apache-2.0
//
// A causal convolution of each channel over the last few tokens of its sequence. Ports, math and gradients:
// kernels/recurrent/short_convolution.h. Only what is not cached has a backward pass.
//
// Sharding: along the channels, of every port that has them, or none. Cost counts the states of the step's sequences.
#pragma once

#include "eadem/kernels/recurrent/short_convolution.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class ShortConvolution final : public Op {
 public:
  // Throws InvalidArgument unless 2 <= taps <= kMaxTaps.
  explicit ShortConvolution(const kernels::ShortConvolutionAttrs& attrs);

  std::string_view name() const override { return "short_convolution"; }
  std::vector<Port> inputs() const override;
  std::vector<Port> outputs() const override;
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  bool has_backward() const override { return !attrs_.cached; }
  std::vector<Saved> saved() const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  static std::vector<Workload> workloads();

 private:
  enum In { kX, kWeight, kBias, kQueryStart, kSlots, kState };
  void backward_reference(std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const;
  kernels::ShortConvolutionAttrs attrs_;
};

}  // namespace eadem::ops
