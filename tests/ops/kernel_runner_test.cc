// SPDX-License-Identifier: Apache-2.0
//
// The harness on kernels that misbehave: each fault that the reference ring claims to catch is planted and caught.
#include "tests/ops/kernel_runner.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cmath>

#include "eadem/ops/elementwise/elementwise.h"
#include "tests/ops/pass_calls.h"

namespace eadem::test {
namespace {

using kernels::Kernel;
using kernels::KernelCall;
using kernels::KernelRequest;
using kernels::Pass;

// Adds one to f32 [n], with a fault.
enum class Fault { none, past_end, before_begin, changes_input, past_scratch };

template <Fault fault>
void run_add_one(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  const int64_t n = x.num_elements();
  for (int64_t i = 0; i < n; ++i) y.as<float>()[i] = x.as<float>()[i] + 1;
  if constexpr (fault == Fault::past_end) y.as<float>()[n] = 0;
  if constexpr (fault == Fault::before_begin) y.as<float>()[-1] = 0;
  if constexpr (fault == Fault::changes_input) x.as<float>()[0] += 5;
  if constexpr (fault == Fault::past_scratch) static_cast<char*>(call.scratch.data)[call.scratch.num_elements()] = 0;
}

template <Fault fault>
std::vector<Tensor> run_with_fault() {
  static constexpr Kernel kKernel{
      "faulty", Pass::inference, [](const KernelRequest&) { return Verdict::yes(1); },
      [](const KernelRequest&, Context&) { return kernels::make_plan(run_add_one<fault>, 10); }};
  PassCall call;
  call.op = std::make_shared<ops::Activation>(ops::Activation({}));
  call.input_types = call.output_types = {TensorType(DType::f32, {5})};
  call.inputs = {narrow({Shape{5}, {0, 1, 2, 3, 4}}, DType::f32)};
  call.outputs = {Tensor::on_host(DType::f32, Shape{5})};
  call.output_alias = {-1};
  const auto device = open_device("cpu", {.num_threads = 1});
  run_kernel(*device, kKernel, call, {.element_aligned = true}, "element-aligned");
  return run_kernel(*device, kKernel, call, {}, "aligned");
}

TEST(KernelRunner, ReturnsWhatTheKernelWrote) {
  const std::vector<Tensor> y = run_with_fault<Fault::none>();
  EXPECT_TRUE(same_bits(y[0].view, narrow({Shape{5}, {1, 2, 3, 4, 5}}, DType::f32).view));
}

#define EXPECT_CAUGHT(fault, text)                                                                \
  do {                                                                                            \
    testing::TestPartResultArray results;                                                         \
    {                                                                                             \
      testing::ScopedFakeTestPartResultReporter reporter(                                         \
          testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);    \
      run_with_fault<fault>();                                                                    \
    }                                                                                             \
    ASSERT_EQ(results.size(), 2) << "once for each alignment";                                    \
    EXPECT_NE(std::string(results.GetTestPartResult(0).message()).find(text), std::string::npos); \
  } while (false)

TEST(KernelRunner, CatchesWritesOutsideOfOutputs) {
  EXPECT_CAUGHT(Fault::past_end, "wrote beyond output 0");
  EXPECT_CAUGHT(Fault::before_begin, "wrote beyond output 0");
}
TEST(KernelRunner, CatchesChangedInputs) { EXPECT_CAUGHT(Fault::changes_input, "changed input 0"); }
TEST(KernelRunner, CatchesWritesOutsideOfScratch) { EXPECT_CAUGHT(Fault::past_scratch, "wrote beyond its scratch"); }

TEST(PassCalls, OutputsStartAsNanAndParameterGradientsDoNot) {
  ops::Workload row{"",
                    std::make_shared<ops::Mul>(),
                    {TensorType(DType::f32, {Symbol::tokens, 3}), TensorType(DType::f32, {Symbol::tokens, 3})},
                    {}};
  row.symbols[Symbol::tokens] = 2;
  const ExpectedCall call = *expected_call(row, Pass::inference, 1);
  EXPECT_TRUE(std::isnan(call.initial[0].data[0])) << "a kernel that adds instead of writing is caught";
  EXPECT_FALSE(std::isnan(call.expected[0].data[0]));
}

}  // namespace
}  // namespace eadem::test
