// SPDX-License-Identifier: Apache-2.0
//
// Kernels of whole layers against their definition: those of the device of --device, else of the device that computes
// by definition, as the CPU has none.
#include <gtest/gtest.h>

#include <cmath>

#include "eadem/core/device/device.h"
#include "tests/fusions/decoder_layer_rows.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/pass_calls.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace {

double rms(const RefTensor& tensor) {
  double sum = 0;
  for (const double value : tensor.data) sum += value * value;
  return std::sqrt(sum / static_cast<double>(std::max<size_t>(1, tensor.data.size())));
}

// The root mean square of the error over that of the expected values.
double relative_error(const TensorView& actual, const RefTensor& expected) {
  RefTensor error = widen(actual);
  for (size_t i = 0; i < error.data.size(); ++i) error.data[i] -= expected.data[i];
  return rms(error) / rms(expected);
}

// How far the kernels may lie from the definition. Inputs of products may be rounded to 8 bits with a scale for 256
// values, the largest of which is 127 steps: of values like a normal distribution it is about three times their root
// mean square, so that the error of half a step at most, a uniform one of a root mean square of step / sqrt(12), is
// 3 / 127 / sqrt(12) = 0.7 % of theirs. Or they are rounded to e4m3, whose steps are an eighth of the power of two
// below a value: a value of 1 to 2 of these, of a root mean square of sqrt(7 / 3), has an error of 1 / 8 /
// sqrt(12), 2.4 %. Both are larger than what rounding to bf16 adds, 2^-9. From x to y a value goes through four
// products whose inputs are rounded; the scores of attention are products of two such values, and weights of attention
// change by as much as the scores, which are of size 1. Errors are independent and add up like random walks: of a layer
// sqrt(8) times as much, 2 % or 6.7 %, and as much of each layer before it.
double most_error(size_t layers, bool is_floats) {
  return (is_floats ? 0.067 : 0.02) * std::sqrt(static_cast<double>(layers));
}

TEST(DecoderLayersKernels, AreNearTheirDefinition) {
  const auto device = open_device(device_name() == "cpu" ? "reference" : device_name());
  int taken = 0;
  for (const auto& [row, layers, is_small, is_floats] : decoder_layer_rows(device->preferred_activations())) {
    if (!is_small && device_name() == "cpu") continue;
    const kernels::KernelList kernels = row.op->kernels(kernels::backend_of(*device));
    // The inputs of a large row and what comes out take seconds: they are made when a kernel takes them.
    std::optional<ExpectedCall> want;
    for (const kernels::Kernel* kernel : kernels) {
      if (kernel->pass != kernels::Pass::inference) continue;
      const std::string label = fmt::format("{}: {}", row.name, kernel->name);
      PassCall types{.op = row.op, .input_types = row.inputs, .symbols = row.symbols};
      types.output_types = row.op->infer_types(row.inputs);
      if (const Verdict verdict = kernel->can_handle(types.request(*device)); !verdict.accepted) {
        fmt::print("{}: no, {}\n", label, verdict.reason);
        continue;
      }
      ++taken;
      if (!want)
        want = expected_call(row, kernels::Pass::inference, workloads::make_inputs(*row.op, row.inputs, row.symbols, 5),
                             5);
      const std::vector<Tensor> outputs = run_kernel(*device, *kernel, want->call, {}, label);
      for (size_t i = 0; i < outputs.size(); ++i)
        EXPECT_LE(relative_error(outputs[i].view, want->expected[i]), most_error(layers, is_floats))
            << label << ": " << row.op->outputs()[i].name;
    }
  }
  // A device for which no kernel is compiled has nothing to compare. The one that computes by definition takes all.
  if (taken == 0 && device_name() != "cpu") GTEST_SKIP() << "no kernel takes a row on " << device_name();
  EXPECT_GT(taken, 0);
}

}  // namespace
}  // namespace eadem::test
