// SPDX-License-Identifier: Apache-2.0
//
// Fused ops against the composition of their parts: types, sharding, costs, references, gradients.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "eadem/fusions/add_rms_norm.h"
#include "eadem/fusions/linear_add.h"
#include "eadem/fusions/linear_cross_entropy.h"
#include "eadem/fusions/linear_gated_activation.h"
#include "eadem/fusions/rope_kv_append.h"
#include "eadem/ops/all_ops.h"
#include "tests/fusions/fusion_cases.h"
#include "tests/support/compare.h"
#include "tests/support/values.h"

namespace eadem::test {
namespace {

using ops::Pass;

// Computes every pattern value with the parts' references. State outputs start from the state inputs.
std::vector<RefTensor> compose(const FusionCase& c, std::span<const RefTensor> inputs) {
  std::vector<RefTensor> values(num_values(*c.fusion));
  for (size_t i = 0; i < inputs.size(); ++i) values[static_cast<size_t>(c.fusion->inputs[i])] = inputs[i];
  for_each_part(c, [&](const PartPorts& part) {
    std::vector<RefTensor> in, out;
    for (int id : part.input_values) in.push_back(id < 0 ? RefTensor{} : values[static_cast<size_t>(id)]);
    const std::vector<ops::Port> ports = part.op.outputs();
    for (size_t i = 0; i < part.outputs.size(); ++i) {
      const bool state = ports[i].role == ops::Port::Role::state;
      out.push_back(state ? in[static_cast<size_t>(part.op.inference_alias(static_cast<int>(i)))]
                          : zeros(part.outputs[i].bind(c.symbols)));
    }
    part.op.reference(Pass::inference, in, out);
    for (size_t i = 0; i < out.size(); ++i) values[static_cast<size_t>(part.output_values[i])] = out[i];
  });
  return values;
}

TEST(FusedOps, ReferenceIsTheComposition) {
  for (const FusionCase& c : fusion_cases()) {
    SCOPED_TRACE(c.name);
    const std::vector<RefTensor> inputs = widen(make_inputs(c, 3));
    const std::vector<RefTensor> values = compose(c, inputs);
    std::vector<RefTensor> outputs;
    for (size_t i = 0; i < c.fusion->outputs.size(); ++i) {
      const RefTensor& expected = values[static_cast<size_t>(c.fusion->outputs[i])];
      const int alias = c.fused->inference_alias(static_cast<int>(i));
      const bool state = c.fused->outputs()[i].role == ops::Port::Role::state;
      outputs.push_back(state ? inputs[static_cast<size_t>(alias)] : zeros(expected.shape));
    }
    c.fused->reference(Pass::inference, inputs, outputs);
    for (size_t i = 0; i < outputs.size(); ++i)
      EXPECT_CLOSE(outputs[i], values[static_cast<size_t>(c.fusion->outputs[i])], Tolerance::exact());
  }
}

TEST(FusedOps, EveryFusionHasCasesAndItsPortsMatchItsPattern) {
  std::set<std::string_view> seen;
  for (const FusionCase& c : fusion_cases()) {
    seen.insert(c.fusion->name);
    ASSERT_EQ(c.fused->name(), c.fusion->name);
    ASSERT_EQ(c.fused->inputs().size(), c.fusion->inputs.size());
    ASSERT_EQ(c.fused->outputs().size(), c.fusion->outputs.size());
    // A port has the role that its value has where a part reads it first, and is optional where the pattern says so.
    std::vector<bool> checked(c.fusion->inputs.size());
    for_each_part(c, [&](const PartPorts& part) {
      const std::vector<ops::Port> ports = part.op.inputs();
      for (size_t i = 0; i < ports.size(); ++i)
        for (size_t port = 0; port < checked.size(); ++port) {
          const int value = c.fusion->inputs[port];
          if (value != part.input_values[i] || checked[port]) continue;
          checked[port] = true;
          EXPECT_EQ(c.fused->inputs()[port].role, ports[i].role) << c.name << " " << port;
          const auto& optional = c.fusion->optional_inputs;
          EXPECT_EQ(c.fused->inputs()[port].optional,
                    std::find(optional.begin(), optional.end(), value) != optional.end());
        }
    });
  }
  EXPECT_EQ(seen.size(), fusions::all_fusions().size());
}

TEST(FusedOps, TypesAndWantedDtypesAreThoseOfTheParts) {
  for (const FusionCase& c : fusion_cases()) {
    SCOPED_TRACE(c.name);
    std::vector<TensorType> values(num_values(*c.fusion));
    for_each_part(c, [&](const PartPorts& part) {
      for (size_t i = 0; i < part.outputs.size(); ++i)
        values[static_cast<size_t>(part.output_values[i])] = part.outputs[i];
    });
    const std::vector<TensorType> types = c.fused->infer_types(c.inputs);
    ASSERT_EQ(types.size(), c.fusion->outputs.size());
    for (size_t i = 0; i < types.size(); ++i)
      EXPECT_EQ(types[i], values[static_cast<size_t>(c.fusion->outputs[i])]) << to_string(types[i]);
    for (size_t port = 0; port < c.inputs.size(); ++port) {
      if (kernels::is_unconnected(c.inputs[port])) continue;
      EXPECT_EQ(c.fused->wanted_dtype(c.inputs, static_cast<int>(port)), c.inputs[port].dtype) << port;
    }
  }
}

TEST(FusedOps, WantedDtypesFollowTheParts) {
  // rms_norm takes its weight in f32 or the dtype of x; add takes its second operand like the first.
  const fusions::AddRmsNorm norm(kernels::RmsNormAttrs{});
  const TensorType types[] = {TensorType(DType::bf16, {4, 8}), TensorType(DType::f32, {4, 8}),
                              TensorType(DType::f16, {8})};
  EXPECT_EQ(norm.wanted_dtype(types, 1), DType::bf16);
  EXPECT_EQ(norm.wanted_dtype(types, 2), DType::f32);
}

TEST(FusedOps, ATypeErrorNamesThePartAndBothValues) {
  const fusions::LinearAdd op(kernels::LinearAttrs{});
  const TensorType types[] = {TensorType(DType::f32, {4, 8}), TensorType(DType::f32, {3, 8}),
                              kernels::unconnected_port(), TensorType(DType::f32, {4, 5})};
  try {
    (void)op.infer_types(types);
    FAIL() << "a residual of another width was accepted";
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("[4, 5]"), std::string::npos) << message;
    EXPECT_NE(message.find("[4, 3]"), std::string::npos) << message;
  }
}

TEST(FusedOps, ShardingComposes) {
  const auto sharded = [](TensorType type, const Sharding& sharding) {
    type.sharding = sharding;
    return type;
  };
  const TensorType x(DType::f32, {4, 8}), w(DType::f32, {6, 8});
  const fusions::LinearGatedActivation gated(kernels::LinearGatedActivationAttrs{});
  const TensorType column[] = {x, sharded(w, Sharding::along(0)), sharded(w, Sharding::along(0))};
  EXPECT_EQ(gated.infer_sharding(column), std::vector{Sharding::along(1)});
  const TensorType mixed[] = {x, sharded(w, Sharding::along(0)), w};
  EXPECT_THROW((void)gated.infer_sharding(mixed), InvalidArgument);

  // A partial sum must be reduced before a residual is added to it.
  const fusions::LinearAdd add(kernels::LinearAttrs{});
  const TensorType row[] = {sharded(x, Sharding::along(1)), sharded(w, Sharding::along(1)), kernels::unconnected_port(),
                            TensorType(DType::f32, {4, 6})};
  EXPECT_THROW((void)add.infer_sharding(row), InvalidArgument);

  const TensorType kv(DType::f32, {4, 2, 8}), cache(DType::f32, {3, 2, 4, 8});
  const Sharding heads = Sharding::along(1);
  const fusions::RopeKvAppend append(kernels::RopeKvAppendAttrs{{kernels::RopeStyle::rotate_half, 8}});
  const TensorType types[] = {sharded(kv, heads),          TensorType(DType::f32, {4, 8}), sharded(kv, heads),
                              TensorType(DType::i64, {4}), sharded(cache, heads),          sharded(cache, heads)};
  EXPECT_EQ(append.infer_sharding(types), (std::vector{heads, heads}));
}

TEST(FusedOps, CostIsThePartsFlopsAndTheTrafficWithoutWhatStaysInside) {
  for (const FusionCase& c : fusion_cases()) {
    SCOPED_TRACE(c.name);
    ops::Cost parts;
    std::vector<TensorType> values(num_values(*c.fusion));
    std::vector<int> reads(values.size(), 0), writes(values.size(), 0);
    // A part counts the rows of a state that it uses, not the whole state. The fused op uses the same rows, so that
    // states are left out of what it saves.
    std::vector<bool> is_state(values.size());
    for_each_part(c, [&](const PartPorts& part) {
      parts += part.op.cost(Pass::inference, part.inputs, part.outputs, c.symbols);
      if (part.op.is_view()) return;  // moves no bytes
      const std::vector<ops::Port> ports = part.op.inputs();
      for (size_t i = 0; i < part.inputs.size(); ++i)
        if (part.input_values[i] >= 0) {
          if (ports[i].role == ops::Port::Role::state) is_state[static_cast<size_t>(part.input_values[i])] = true;
          values[static_cast<size_t>(part.input_values[i])] = part.inputs[i];
          ++reads[static_cast<size_t>(part.input_values[i])];
        }
      for (size_t i = 0; i < part.outputs.size(); ++i) {
        values[static_cast<size_t>(part.output_values[i])] = part.outputs[i];
        ++writes[static_cast<size_t>(part.output_values[i])];
      }
    });
    // An input is read once however many parts want it; a value from inside is read by none and written if it leaves.
    for (int id : c.fusion->inputs) --reads[static_cast<size_t>(id)];
    for (int id : c.fusion->outputs) --writes[static_cast<size_t>(id)];
    double saved = 0;
    for (size_t v = 0; v < values.size(); ++v)
      if (!is_state[v] && reads[v] + writes[v] > 0)
        saved += (reads[v] + writes[v]) * static_cast<double>(values[v].size_bytes(c.symbols));
    const ops::Cost fused = c.fused->cost(Pass::inference, c.inputs, c.fused->infer_types(c.inputs), c.symbols);
    EXPECT_DOUBLE_EQ(fused.flops, parts.flops);
    EXPECT_DOUBLE_EQ(fused.bytes, parts.bytes - saved);
  }
}

TEST(FusedOps, ResultsGoOverInputsOnlyWhereTheContractSaysSo) {
  const fusions::AddRmsNorm norm(kernels::RmsNormAttrs{});
  EXPECT_EQ(norm.inference_alias(0), 0);                                        // sum over a
  EXPECT_EQ(norm.inference_alias(1), -1);                                       // y
  EXPECT_EQ(fusions::LinearAdd(kernels::LinearAttrs{}).inference_alias(0), 3);  // y over residual
  EXPECT_EQ(fusions::LinearGatedActivation(kernels::LinearGatedActivationAttrs{}).inference_alias(0), -1);
  const fusions::RopeKvAppend append(kernels::RopeKvAppendAttrs{{kernels::RopeStyle::rotate_half, 8}});
  EXPECT_EQ(append.inference_alias(0), 4);  // cache_k
  EXPECT_EQ(append.inference_alias(1), 5);  // cache_v
  EXPECT_EQ(fusions::LinearCrossEntropy().inference_alias(0), -1);
}

TEST(FusedOps, OnlyTheLossAndANormOfASumCanBeTrainedThrough) {
  for (const FusionCase& c : fusion_cases()) {
    EXPECT_EQ(c.fused->has_backward(), c.fusion->in_training) << c.name;
    EXPECT_EQ(c.fusion->in_training, c.fusion->name == "linear_cross_entropy" || c.fusion->name == "add_rms_norm")
        << c.name;
  }
}

// The forward reference of linear_cross_entropy, weighted by dloss and added up.
double weighted_loss(const FusionCase& c, const std::vector<RefTensor>& inputs, const RefTensor& dloss) {
  std::vector<RefTensor> outputs = {zeros(dloss.shape), zeros(dloss.shape)};
  c.fused->reference(Pass::forward, inputs, outputs);
  double total = 0;
  for (size_t r = 0; r < dloss.data.size(); ++r) total += dloss.data[r] * outputs[0].data[r];
  return total;
}

TEST(FusedOps, GradientsOfTheLossMatchFiniteDifferences) {
  for (const FusionCase& c : fusion_cases()) {
    if (c.fusion->name != "linear_cross_entropy" || c.symbols[Symbol::tokens] > 10) continue;
    SCOPED_TRACE(c.name);
    std::vector<RefTensor> inputs = widen(make_inputs(c, 5));
    RefTensor dloss = zeros(inputs[2].shape);
    for (size_t r = 0; r < dloss.data.size(); ++r) dloss.data[r] = 0.5 + 0.25 * static_cast<double>(r);
    std::vector<RefTensor> forward = {zeros(dloss.shape), zeros(dloss.shape)};
    c.fused->reference(Pass::forward, inputs, forward);

    const std::vector<RefTensor> saved = {inputs[0], inputs[1], inputs[2], forward[1], dloss};
    std::vector<RefTensor> gradients = {zeros(inputs[0].shape), zeros(inputs[1].shape)};
    for (double& value : gradients[1].data) value = 2;  // dweight adds to what is there
    c.fused->reference(Pass::backward, saved, gradients);
    // Without a forward pass before it: the loss as well.
    const std::vector<RefTensor> known = {inputs[0], inputs[1], inputs[2], {}, dloss};
    std::vector<RefTensor> joint = {zeros(inputs[0].shape), zeros(inputs[1].shape), zeros(dloss.shape)};
    for (double& value : joint[1].data) value = 2;
    c.fused->reference(Pass::backward, known, joint);
    for (size_t i = 0; i < 2; ++i) EXPECT_CLOSE(joint[i], gradients[i], Tolerance::exact());
    EXPECT_CLOSE(joint[2], forward[0], Tolerance::exact());
    for (double& value : gradients[1].data) value -= 2;

    // Central differences are off by step^2 / 6 times a third derivative: a third cumulant under the softmax of numbers
    // in [-1, 1] (< 0.8), times the sum of dloss (< 9): 1.2e-8. Rounding adds at most 100 roundings of a loss < 9 * 40,
    // over the step: 4e-8.
    constexpr double kStep = 1e-4;
    const Tolerance tolerance = Tolerance::absolute(1.2e-8 + 4e-8);
    for (const size_t input : {size_t{0}, size_t{1}}) {
      RefTensor numeric = zeros(inputs[input].shape);
      for (size_t i = 0; i < numeric.data.size(); ++i) {
        const double old = inputs[input].data[i];
        inputs[input].data[i] = old + kStep;
        const double above = weighted_loss(c, inputs, dloss);
        inputs[input].data[i] = old - kStep;
        const double below = weighted_loss(c, inputs, dloss);
        inputs[input].data[i] = old;
        numeric.data[i] = (above - below) / (2 * kStep);
      }
      EXPECT_CLOSE(gradients[input], numeric, tolerance);
    }
  }
}

// The forward reference of add_rms_norm: its outputs, weighted by their gradients and added up.
double weighted_norm(const FusionCase& c, const std::vector<RefTensor>& inputs, const RefTensor& dsum,
                     const RefTensor& dy) {
  std::vector<RefTensor> outputs = {zeros(dy.shape), zeros(dy.shape), zeros(Shape{dy.shape[0]})};
  c.fused->reference(Pass::forward, inputs, outputs);
  double total = 0;
  for (size_t i = 0; i < dy.data.size(); ++i) total += dy.data[i] * outputs[1].data[i];
  for (size_t i = 0; i < dsum.data.size(); ++i) total += dsum.data[i] * outputs[0].data[i];
  return total;
}

TEST(FusedOps, GradientsOfANormOfASumMatchFiniteDifferences) {
  int checked = 0;
  for (const FusionCase& c : fusion_cases()) {
    if (c.fusion->name != "add_rms_norm" || c.symbols[Symbol::tokens] != 5 || c.inputs[2].fixed(0) != 17) continue;
    for (const bool sum_is_read : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, sum read: {}", c.name, sum_is_read));
      ++checked;
      std::vector<RefTensor> inputs = widen(make_inputs(c, 5));
      RefTensor dy = zeros(inputs[0].shape), dsum = sum_is_read ? zeros(inputs[0].shape) : RefTensor{};
      for (size_t i = 0; i < dy.data.size(); ++i) dy.data[i] = 0.5 + 0.01 * static_cast<double>(i);
      for (size_t i = 0; i < dsum.data.size(); ++i) dsum.data[i] = 0.25 - 0.02 * static_cast<double>(i);
      std::vector<RefTensor> forward = {zeros(dy.shape), zeros(dy.shape), zeros(Shape{dy.shape[0]})};
      c.fused->reference(Pass::forward, inputs, forward);
      std::vector<RefTensor> gradients = {zeros(dy.shape), zeros(inputs[2].shape)};
      for (double& value : gradients[1].data) value = 2;  // dweight adds to what is there
      c.fused->reference(Pass::backward, std::vector{forward[0], inputs[2], forward[2], dsum, dy}, gradients);
      for (double& value : gradients[1].data) value -= 2;

      // The bound of tests/ops/gradient_test.cc: third derivatives below 2^10, losses below 2^6 of at most 2^8 terms.
      constexpr double kStep = 0x1p-17;
      for (size_t input = 0; input < 3; ++input) {
        EXPECT_EQ(c.fused->shares_gradient_with(static_cast<int>(input)), input == 2 ? 2 : 0);
        RefTensor numeric = zeros(inputs[input].shape);
        for (size_t i = 0; i < numeric.data.size(); ++i) {
          const double old = inputs[input].data[i];
          inputs[input].data[i] = old + kStep;
          const double above = weighted_norm(c, inputs, dsum, dy);
          inputs[input].data[i] = old - kStep;
          const double below = weighted_norm(c, inputs, dsum, dy);
          inputs[input].data[i] = old;
          numeric.data[i] = (above - below) / (2 * kStep);
        }
        EXPECT_CLOSE(gradients[input == 2 ? 1 : 0], numeric, Tolerance::absolute(0x1p-22));
      }
    }
  }
  EXPECT_EQ(checked, 2);
}

TEST(FusedOps, AnUnwantedGradientIsNotWritten) {
  for (const FusionCase& c : fusion_cases()) {
    if (c.fusion->name != "linear_cross_entropy" || c.symbols[Symbol::tokens] != 7) continue;
    const std::vector<RefTensor> inputs = widen(make_inputs(c, 5));
    std::vector<RefTensor> forward = {zeros(inputs[2].shape), zeros(inputs[2].shape)};
    c.fused->reference(Pass::forward, inputs, forward);
    const std::vector<RefTensor> saved = {inputs[0], inputs[1], inputs[2], forward[1], forward[1]};
    std::vector<RefTensor> both = {zeros(inputs[0].shape), zeros(inputs[1].shape)};
    c.fused->reference(Pass::backward, saved, both);
    std::vector<RefTensor> only_weight = {RefTensor{}, zeros(inputs[1].shape)};
    c.fused->reference(Pass::backward, saved, only_weight);
    EXPECT_TRUE(only_weight[0].data.empty());
    EXPECT_CLOSE(only_weight[1], both[1], Tolerance::exact());
  }
}

}  // namespace
}  // namespace eadem::test
