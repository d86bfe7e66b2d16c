// SPDX-License-Identifier: Apache-2.0
//
// Whole layers of a dense decoder, for decode steps of one sequence, where kernels of some microseconds each would wait
// for one another. decoder_layer is a fusion; decoder_layers are several of them, one after another
// (pipeline/passes/join_layers.h). Ports, dtypes: kernels/decoder_layers.h. Inference only, without biases.
#pragma once

#include <string>

#include "eadem/fusions/fused_op.h"
#include "eadem/kernels/decoder_layers.h"

namespace eadem::fusions {

const Fusion& decoder_layer();

class DecoderLayer final : public FusedOp {
 public:
  explicit DecoderLayer(const kernels::DecoderLayerAttrs& attrs);

  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override;
  ops::AttrsRef attrs() const override { return ops::AttrsRef(attrs_); }
  std::string attrs_text() const override;
  ops::Cost cost(ops::Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                 const SymbolValues& symbols) const override;
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  kernels::DecoderLayerAttrs attrs_;
};

inline constexpr std::string_view kDecoderLayers = "decoder_layers";

// Two or more layers with the same attributes: each reads what the one before it makes.
class DecoderLayers final : public ops::Op {
 public:
  DecoderLayers(const kernels::DecoderLayerAttrs& attrs, size_t layers);

  size_t layers() const { return layers_; }

  std::string_view name() const override { return kDecoderLayers; }
  std::vector<ops::Port> inputs() const override;
  std::vector<ops::Port> outputs() const override;
  ops::AttrsRef attrs() const override { return layer_.attrs(); }
  std::string attrs_text() const override;
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  DType wanted_dtype(std::span<const TensorType> inputs, int port) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  // Counts the inputs that layers share once, and no traffic between layers.
  ops::Cost cost(ops::Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                 const SymbolValues& symbols) const override;
  void reference(ops::Pass pass, std::span<const ops::RefTensor> inputs,
                 std::span<ops::RefTensor> outputs) const override;

 private:
  // The types of one layer's inputs; that of its x is the x of all layers.
  std::vector<TensorType> types_of_layer(std::span<const TensorType> inputs, size_t layer) const;

  DecoderLayer layer_;
  size_t layers_;
  std::vector<std::string> input_names_, output_names_;  // "q_weight.3": of the fourth layer
};

// The op that does the work of `first` and then that of `second`, which are a decoder_layer or decoder_layers each.
// Null for other ops, and for layers with other attributes.
ops::OpPtr join_decoder_layers(const ops::Op& first, const ops::Op& second);

}  // namespace eadem::fusions
