// SPDX-License-Identifier: Apache-2.0
//
// Every kernel of every fused op, on every instruction set of the CPU, against the kernels of the parts that it
// replaces: the same bits, since in f32 no rounding is removed. Also whatever the thread count and the alignment, over
// its inputs where the op allows it, without a byte written beyond its ports.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "eadem/core/device/device.h"
#include "eadem/ops/training/cross_entropy.h"
#include "tests/fusions/fusion_cases.h"
#include "tests/ops/pass_calls.h"
#include "tests/support/compare.h"
#include "tests/support/thread_counts.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace {

using kernels::Kernel;
using ops::Pass;

std::vector<std::shared_ptr<Device>> devices_of(Isa isa) {
  std::vector<std::shared_ptr<Device>> devices;
  for (const int threads : {1, 3})
    devices.push_back(open_device("cpu", {.num_threads = threads, .isa = isa_name(isa)}));
  return devices;
}

std::vector<const Kernel*> kernels_of(const ops::Op& op, Pass pass) {
  std::vector<const Kernel*> result;
  for (const Kernel* kernel : op.kernels(*kernels::backends().front()))
    if (kernel->pass == pass) result.push_back(kernel);
  return result;
}

// The first kernel that takes the call.
const Kernel* taker(const PassCall& call, const Device& device) {
  for (const Kernel* kernel : kernels_of(*call.op, call.pass))
    if (kernel->can_handle(call.request(device)).accepted) return kernel;
  return nullptr;
}

// Computes each pattern value with the kernels of the parts. In the forward pass the extra tensors of the last part
// follow. Returns nothing if some part has no kernel.
std::vector<Tensor> run_parts(Device& device, const FusionCase& c, Pass pass, const std::vector<Tensor>& inputs) {
  std::vector<Tensor> values(num_values(*c.fusion));
  for (size_t i = 0; i < inputs.size(); ++i) values[static_cast<size_t>(c.fusion->inputs[i])] = inputs[i];
  bool complete = true;
  for_each_part(c, [&](const PartPorts& part) {
    std::vector<Tensor> in;
    for (int id : part.input_values) in.push_back(id < 0 ? Tensor() : values[static_cast<size_t>(id)]);
    const ops::Workload row{c.name, c.parts[part.node], part.inputs, c.symbols};
    const PassCall call = straight_call(row, pass, std::move(in));
    const Kernel* kernel = taker(call, device);
    complete = complete && kernel != nullptr;
    if (!complete) return;
    std::vector<Tensor> results = run_kernel(device, *kernel, call, {}, c.name);
    for (size_t i = 0; i < part.output_values.size(); ++i)
      values[static_cast<size_t>(part.output_values[i])] = results[i];
    if (part.node + 1 == c.parts.size())
      for (size_t i = part.output_values.size(); i < results.size(); ++i) values.push_back(results[i]);
  });
  return complete ? values : std::vector<Tensor>{};
}

void expect_outputs(const FusionCase& c, const std::vector<Tensor>& outputs, const std::vector<Tensor>& values,
                    const std::string& label) {
  const size_t num_outputs = c.fusion->outputs.size();
  for (size_t i = 0; i < outputs.size(); ++i) {
    const size_t value =
        i < num_outputs ? static_cast<size_t>(c.fusion->outputs[i]) : num_values(*c.fusion) + i - num_outputs;
    EXPECT_TRUE(same_bits(outputs[i].view, values[value].view)) << label << ": output " << i;
  }
}

// Outputs over the inputs that the op names.
PassCall in_place(PassCall call) {
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const int alias = call.op->inference_alias(static_cast<int>(i));
    if (alias < 0) continue;
    call.output_alias[i] = alias;
    call.outputs[i] = call.inputs[static_cast<size_t>(alias)];
  }
  return call;
}

class FusedKernels : public testing::TestWithParam<Isa> {};

TEST_P(FusedKernels, HaveTheBitsOfTheKernelsTheyReplace) {
  const std::vector<std::shared_ptr<Device>> devices = devices_of(GetParam());
  std::set<std::string> reached, known;
  int64_t cases = 0;
  for (const FusionCase& c : fusion_cases()) {
    if (!test::tries_case(cases++)) continue;
    const ops::Workload row{c.name, c.fused, c.inputs, c.symbols};
    const std::vector<Tensor> inputs = make_inputs(c, 7);
    for (const Pass pass : {Pass::inference, Pass::forward}) {
      const std::vector<const Kernel*> kernels = kernels_of(*c.fused, pass);
      if (kernels.empty()) continue;
      const PassCall call = straight_call(row, pass, inputs);
      const std::vector<Tensor> values = run_parts(*devices[0], c, pass, inputs);
      ASSERT_FALSE(values.empty()) << c.name;
      for (const Kernel* kernel : kernels) {
        const std::string key = fmt::format("{} {} {}", c.fused->name(), kernels::pass_name(pass), kernel->name);
        known.insert(key);
        for (const auto& device : devices) {
          const std::string label = fmt::format("{}: {} on {}", c.name, key, device->description());
          if (!kernel->can_handle(call.request(*device)).accepted) continue;
          reached.insert(key);
          expect_outputs(c, run_kernel(*device, *kernel, call, {}, label), values, label);
          expect_outputs(c, run_kernel(*device, *kernel, call, {.element_aligned = true}, label), values,
                         label + ", element aligned");
          if (pass == Pass::inference)
            expect_outputs(c, run_kernel(*device, *kernel, in_place(call), {}, label), values, label + ", in place");
        }
      }
    }
  }
  // Kernels of other devices in this build refuse these.
  if (test::kEveryCase > 1) return;
  for (const std::string& key : known)
    EXPECT_TRUE(reached.contains(key) || key.find(" cpu_") == std::string::npos) << key << " took no case";
  EXPECT_GE(reached.size(), 5u);
}

// dx, and dweight while one chunk holds all rows, have the bits of the unfused backward passes; the weight's gradient
// over several chunks adds the chunks' sums, so it is compared with the reference.
TEST_P(FusedKernels, GradientsOfTheLossAreThoseOfTheParts) {
  const std::vector<std::shared_ptr<Device>> devices = devices_of(GetParam());
  for (const FusionCase& c : fusion_cases()) {
    if (c.fusion->name != "linear_cross_entropy" || c.inputs[0].encoding != nullptr) continue;
    SCOPED_TRACE(c.name);
    const std::vector<Tensor> inputs = make_inputs(c, 11);
    const ExpectedCall fused = *expected_call({c.name, c.fused, c.inputs, c.symbols}, Pass::backward, inputs, 11);

    // 1. The unfused passes: logits, their gradient (from the same lse and dloss), then the linear's gradients.
    Device& device = *devices[0];
    const TensorType logits_type =
        c.parts[0]->infer_types(std::vector{c.inputs[0], c.inputs[1], kernels::unconnected_port()})[0];
    const Tensor logits = run_parts(device, c, Pass::forward, inputs)[3];
    PassCall loss = expected_call({c.name, c.parts[1], {logits_type, c.inputs[2]}, c.symbols}, Pass::backward,
                                  {logits, inputs[2]}, 11)
                        ->call;
    loss.inputs[2] = fused.call.inputs[3];
    loss.inputs[3] = fused.call.inputs[4];
    const Tensor dlogits = run_kernel(device, *taker(loss, device), loss, {}, c.name)[0];
    PassCall linear =
        expected_call({c.name, c.parts[0], {c.inputs[0], c.inputs[1], kernels::unconnected_port()}, c.symbols},
                      Pass::backward, {inputs[0], inputs[1], Tensor()}, 11)
            ->call;
    linear.inputs[2] = dlogits;
    linear.outputs[1] = fused.call.outputs[1];  // what dweight adds to
    const std::vector<Tensor> expected = run_kernel(device, *taker(linear, device), linear, {}, c.name);

    // 2. The fused pass, with each gradient wanted or not.
    for (const auto& other : devices) {
      const Kernel* kernel = taker(fused.call, *other);
      ASSERT_NE(kernel, nullptr);
      for (const int unwanted : {-1, 0, 1}) {
        PassCall call = fused.call;
        if (unwanted >= 0) call.outputs[static_cast<size_t>(unwanted)] = Tensor();
        const std::vector<Tensor> results = run_kernel(*other, *kernel, call, {}, c.name);
        EXPECT_TRUE(unwanted == 0 || same_bits(results[0].view, expected[0].view)) << "dx";
        if (unwanted == 1) continue;
        const int64_t rows = c.symbols[Symbol::tokens];
        if (rows <= 192) {
          EXPECT_TRUE(same_bits(results[1].view, expected[1].view)) << "dweight";
          continue;
        }
        // An element adds, over rows, x * dloss * (p - onehot), to what was there. |p - onehot| and its error: p is the
        // exponential (4u) of a logit less lse, whose errors of `hidden` roundings and of one subtraction enter
        // absolutely; the row's terms are then added in at most `rows` + 1 roundings.
        const auto hidden = static_cast<double>(c.inputs[0].fixed(1));
        const double u = dtype_unit_roundoff(DType::f32);
        const bool rounded = has_bf16_products(GetParam()) && c.inputs[1].dtype == DType::bf16;
        const double x_rounding = rounded ? dtype_unit_roundoff(DType::bf16) : 0;
        const double both_roundings = x_rounding * (2 + x_rounding);  // of the product's factors
        std::vector<double> bounds;
        const size_t vocab = static_cast<size_t>(c.inputs[1].fixed(0)), width = static_cast<size_t>(hidden);
        for (size_t n = 0; n < vocab; ++n)
          for (size_t k = 0; k < width; ++k) {
            double sum = std::abs(fused.initial[1].data[n * width + k]);
            double inner = 0;
            for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
              const double term = std::abs(fused.inputs[0].data[r * width + k] * fused.inputs[4].data[r]);
              // |logit| <= sum |x w| < hidden, and |lse| < hidden + log(vocab) < hidden + 8. x may be in bf16.
              const double exponent = (gamma_f32(hidden) + x_rounding) * hidden + u * (2 * hidden + 8);
              const double moved = std::expm1(exponent) + 7 * u;
              inner += term * (moved + both_roundings * (1 + moved));
              sum += term;
            }
            bounds.push_back(inner + gamma_f32(static_cast<double>(rows) + 3) * (sum + inner));
          }
        EXPECT_TRUE(
            is_within(widen(results[1].view), fused.expected[1], bounds, Tolerance::exact().then_round(DType::f32)))
            << "dweight";
      }
    }
  }
}

// Without a forward pass before it, the backward pass makes the loss as well: the bits of the two passes.
TEST_P(FusedKernels, TheLossAndItsGradientsInOnePassAreThoseOfTwo) {
  for (const auto& device : devices_of(GetParam()))
    for (const FusionCase& c : fusion_cases()) {
      if (c.fusion->name != "linear_cross_entropy" || c.inputs[0].encoding != nullptr) continue;
      SCOPED_TRACE(c.name);
      const ops::Workload row{c.name, c.fused, c.inputs, c.symbols};
      const std::vector<Tensor> inputs = make_inputs(c, 13);
      const PassCall forward = straight_call(row, Pass::forward, inputs);
      const std::vector<Tensor> lost = run_kernel(*device, *taker(forward, *device), forward, {}, c.name);
      PassCall backward = expected_call(row, Pass::backward, inputs, 13)->call;
      backward.inputs[3] = lost[1];
      const std::vector<Tensor> gradients = run_kernel(*device, *taker(backward, *device), backward, {}, c.name);

      PassCall joint = backward;
      joint.inputs[3] = Tensor();
      joint.input_types[3] = kernels::unconnected_port();
      joint.output_types.push_back(forward.output_types[0]);
      joint.outputs.push_back(forward.outputs[0]);
      const Kernel* kernel = taker(joint, *device);
      ASSERT_NE(kernel, nullptr);
      const std::vector<Tensor> results = run_kernel(*device, *kernel, joint, {}, c.name);
      EXPECT_TRUE(same_bits(results[0].view, gradients[0].view)) << "dx";
      EXPECT_TRUE(same_bits(results[1].view, gradients[1].view)) << "dweight";
      EXPECT_TRUE(same_bits(results[2].view, lost[0].view)) << "loss";
    }
}

// The gradient of the sum is the norm's, added to the one that the sum's other readers gave it.
TEST_P(FusedKernels, GradientsOfANormOfASumAreThoseOfTheParts) {
  const std::vector<std::shared_ptr<Device>> devices = devices_of(GetParam());
  int checked = 0;
  for (const FusionCase& c : fusion_cases()) {
    if (c.fusion->name != "add_rms_norm") continue;
    SCOPED_TRACE(c.name);
    ++checked;
    const PassCall fused = expected_call({c.name, c.fused, c.inputs, c.symbols}, Pass::backward, 11)->call;

    // 1. The unfused passes: the norm's gradients, then the addition.
    Device& device = *devices[0];
    PassCall norm =
        expected_call({c.name, c.parts[1], {c.inputs[0], c.inputs[2]}, c.symbols}, Pass::backward, 11)->call;
    norm.inputs = {fused.inputs[0], fused.inputs[1], fused.inputs[2], fused.inputs[4]};
    norm.outputs[1] = fused.outputs[1];  // what dweight adds to
    const std::vector<Tensor> alone = run_kernel(device, *taker(norm, device), norm, {}, c.name);
    const PassCall add = straight_call({c.name, c.parts[0], {c.inputs[0], c.inputs[0]}, c.symbols}, Pass::inference,
                                       {fused.inputs[3], alone[0]});
    const Tensor added = run_kernel(device, *taker(add, device), add, {}, c.name)[0];

    // 2. The fused pass, whether something else read the sum or not, with each gradient wanted or not.
    for (const auto& other : devices)
      for (const bool sum_is_read : {true, false})
        for (const int unwanted : {-1, 0, 1}) {
          PassCall call = fused;
          if (!sum_is_read) call.inputs[3] = Tensor();
          if (unwanted >= 0) call.outputs[static_cast<size_t>(unwanted)] = Tensor();
          const std::vector<Tensor> results = run_kernel(*other, *taker(call, *other), call, {}, c.name);
          EXPECT_TRUE(unwanted == 0 || same_bits(results[0].view, (sum_is_read ? added : alone[0]).view)) << "da";
          EXPECT_TRUE(unwanted == 1 || same_bits(results[1].view, alone[1].view)) << "dweight";
        }
  }
  EXPECT_GT(checked, 0);
}

INSTANTIATE_TEST_SUITE_P(Cpu, FusedKernels, testing::ValuesIn(available_isas()),
                         [](const auto& param_info) { return std::string(isa_name(param_info.param)); });

}  // namespace
}  // namespace eadem::test
