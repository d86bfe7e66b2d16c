// SPDX-License-Identifier: Apache-2.0
//
// A row of a matrix product on a CUDA device has the same bits whatever rows are beside it, in every kernel; and the
// fused products have the bits of their parts.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/product_test.h"
#include "eadem/kernels/fusions.h"
#include "eadem/kernels/linear.h"
#include "tests/kernels/cuda_operands.h"

namespace eadem::kernels {
namespace {

using test::bytes_of;
using test::random_on;

struct Case {
  DType x, weight, y;
  int64_t in, out;
  bool bias;
};

class CudaLinearRows : public ::testing::TestWithParam<Case> {};

TEST_P(CudaLinearRows, DoNotDependOnEachOther) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  const Case& c = GetParam();
  constexpr int64_t kMaxRows = 300;
  const std::shared_ptr<Device> device = open_device("cuda");
  const Tensor x = random_on(device, c.x, {kMaxRows, c.in}, 1);
  const Tensor weight = random_on(device, c.weight, {c.out, c.in}, 2);
  const Tensor bias = c.bias ? random_on(device, c.y, {c.out}, 3) : Tensor();
  const Mesh alone;
  Context context{*device, alone};
  const LinearAttrs attrs{.has_bias = c.bias, .out_dtype = c.y};

  const TensorType input_types[] = {TensorType(c.x, {Symbol::tokens, c.in}), TensorType(c.weight, {c.out, c.in}),
                                    c.bias ? TensorType(c.y, {c.out}) : unconnected_port()};
  const TensorType output_types[] = {TensorType(c.y, {Symbol::tokens, c.out})};
  KernelRequest request{
      .op = "linear", .device = device.get(), .attrs = AttrsRef(attrs), .inputs = input_types, .outputs = output_types};
  request.bounds[Symbol::tokens] = kMaxRows;

  int num_kernels = 0;
  for (const Kernel* kernel : cuda::linear_kernels()) {
    if (kernel->pass != Pass::inference || !kernel->can_handle(request).accepted) continue;
    ++num_kernels;
    const PlanPtr plan = kernel->prepare(request, context);
    // Rows [begin, begin + count) computed in one call.
    const auto rows = [&](int64_t begin, int64_t count) {
      const Tensor y = allocate_tensor(*device, c.y, {count, c.out});
      device->fill_zero(y.view.data, y.view.size_bytes());
      const TensorView inputs[] = {x.view.rows(begin, count), weight.view, bias.view};
      const TensorView outputs[] = {y.view};
      plan->run({.inputs = inputs, .outputs = outputs, .context = &context});
      return bytes_of(*device, y.view);
    };
    const std::vector<char> all = rows(0, kMaxRows);
    const size_t row_bytes = all.size() / kMaxRows;
    ASSERT_NE(all, std::vector<char>(all.size(), 0));
    for (const int64_t count : {1, 2, 3, 8, 17, 63, 64, 65, 128, 255}) {
      for (const int64_t begin : {int64_t{0}, int64_t{5}, kMaxRows - count}) {
        const std::vector<char> part = rows(begin, count);
        EXPECT_EQ(std::memcmp(part.data(), all.data() + static_cast<size_t>(begin) * row_bytes, part.size()), 0)
            << kernel->name << ", rows " << begin << " to " << begin + count - 1;
      }
    }
  }
  EXPECT_GE(num_kernels, 1);
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaLinearRows,
                         ::testing::Values(Case{DType::f32, DType::f32, DType::f32, 64, 64, false},
                                           Case{DType::f32, DType::f32, DType::f32, 2048, 512, true},
                                           Case{DType::bf16, DType::bf16, DType::bf16, 2048, 2048, false},
                                           Case{DType::bf16, DType::bf16, DType::bf16, 896, 1152, true},
                                           Case{DType::bf16, DType::bf16, DType::f32, 2048, 4099, false},
                                           Case{DType::bf16, DType::bf16, DType::bf16, 8192, 2048, false},
                                           Case{DType::f32, DType::bf16, DType::f32, 288, 100, false},
                                           Case{DType::bf16, DType::f16, DType::bf16, 37, 65, true}),
                         [](const ::testing::TestParamInfo<Case>& shape) {
                           const Case& c = shape.param;
                           return fmt::format("{}_{}_{}_{}x{}{}", dtype_name(c.x), dtype_name(c.weight),
                                              dtype_name(c.y), c.out, c.in, c.bias ? "_bias" : "");
                         });

// y = silu(x gate^T) * (x up^T): one kernel against two products and the activation, for few rows and for many.
TEST(CudaLinear, TheGatedActivationHasTheBitsOfItsParts) {
  EADEM_SKIP_WITHOUT_HOPPER();
  const std::shared_ptr<Device> device = open_device("cuda");
  const Mesh alone;
  Context context{*device, alone};
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{2048, 8192}, {896, 4864}, {192, 520}}) {
    const Tensor gate = random_on(device, DType::bf16, {out, in}, 1), up = random_on(device, DType::bf16, {out, in}, 2);
    for (const int64_t rows : {1, 7, 16, 30, 64, 65, 200}) {
      const Tensor x = random_on(device, DType::bf16, {rows, in}, 3);
      const auto allocate = [&] { return allocate_tensor(*device, DType::bf16, {rows, out}); };
      const Tensor fused = allocate(), gate_y = allocate(), up_y = allocate(), parts = allocate(), scratch = allocate();

      const LinearGatedActivationAttrs attrs{.kind = ActivationKind::silu, .out_dtype = DType::bf16};
      const TensorView fused_inputs[] = {x.view, gate.view, up.view}, fused_outputs[] = {fused.view};
      test::plan_for(*cuda::linear_gated_activation_kernels()[0], "linear_gated_activation", AttrsRef(attrs),
                     fused_inputs, fused_outputs, context)
          ->run({.inputs = fused_inputs, .outputs = fused_outputs, .scratch = scratch.view, .context = &context});

      const LinearAttrs linear{.out_dtype = DType::bf16};
      for (const auto& [weight, y] : {std::pair{gate.view, gate_y.view}, {up.view, up_y.view}}) {
        const TensorView inputs[] = {x.view, weight, {}}, outputs[] = {y};
        test::plan_for(*cuda::linear_kernels()[0], "linear", AttrsRef(linear), inputs, outputs, context)
            ->run({.inputs = inputs, .outputs = outputs, .context = &context});
      }
      const ActivationAttrs activation{ActivationKind::silu};
      const TensorView inputs[] = {gate_y.view, up_y.view}, outputs[] = {parts.view};
      test::plan_for(*cuda::gated_activation_kernels()[0], "gated_activation", AttrsRef(activation), inputs, outputs,
                     context)
          ->run({.inputs = inputs, .outputs = outputs, .context = &context});
      EXPECT_EQ(bytes_of(*device, fused.view), bytes_of(*device, parts.view))
          << out << " x " << in << ", rows " << rows;
    }
  }
}

// q, k and v of one x, in one launch and one by one. Few rows go through the kernel of this project alone.
void expect_qkv_has_the_bits_of_three_linears(std::initializer_list<int64_t> some_rows) {
  const std::shared_ptr<Device> device = open_device("cuda");
  const Mesh alone;
  Context context{*device, alone};
  constexpr int64_t kIn = 192;
  for (const auto& widths : {std::array<int64_t, 3>{256, 64, 64}, {129, 17, 40}})
    for (const bool bias : {false, true})
      for (const int64_t rows : some_rows) {
        const Tensor x = random_on(device, DType::bf16, {rows, kIn}, 1);
        std::vector<Tensor> weights, biases, fused, single;
        std::vector<TensorView> inputs = {x.view}, outputs;
        for (uint64_t part = 0; part < 3; ++part) {
          const int64_t out = widths[part];
          weights.push_back(random_on(device, DType::bf16, {out, kIn}, 2 + part));
          biases.push_back(bias ? random_on(device, DType::bf16, {out}, 5 + part) : Tensor());
          fused.push_back(allocate_tensor(*device, DType::bf16, {rows, out}));
          single.push_back(allocate_tensor(*device, DType::bf16, {rows, out}));
          inputs.insert(inputs.end(), {weights[part].view, biases[part].view});
          outputs.push_back(fused[part].view);
        }
        const LinearAttrs attrs{.has_bias = bias, .out_dtype = DType::bf16};
        test::plan_for(*cuda::linear_qkv_kernels()[0], "linear_qkv", AttrsRef(attrs), inputs, outputs, context)
            ->run({.inputs = inputs, .outputs = outputs, .context = &context});
        for (size_t part = 0; part < 3; ++part) {
          const TensorView operands[] = {x.view, weights[part].view, biases[part].view}, y[] = {single[part].view};
          test::plan_for(*cuda::linear_kernels()[0], "linear", AttrsRef(attrs), operands, y, context)
              ->run({.inputs = operands, .outputs = y, .context = &context});
          EXPECT_EQ(bytes_of(*device, fused[part].view), bytes_of(*device, single[part].view))
              << "part " << part << " of " << widths[0] << ", rows " << rows << (bias ? ", bias" : "");
        }
      }
}

TEST(CudaLinear, QkvHasTheBitsOfThreeLinears) {
  EADEM_SKIP_WITHOUT_HOPPER();
  expect_qkv_has_the_bits_of_three_linears({1, 7, 16, 30, cuda::kLinearStreamLeast});
}

// With more than kLinearStreamLeast rows a product may go through cuBLASLt.
TEST(CudaLinear, QkvOfSomeRowsHasTheBitsOfThreeLinears) {
  EADEM_SKIP_WITHOUT_HOPPER();
  expect_qkv_has_the_bits_of_three_linears({cuda::kLinearStreamLeast + 1, cuda::kLinearStreamMaxTokens});
}

// An algorithm is chosen by its time, and times differ from run to run.
TEST(CudaLinear, TheFastestAlgorithmOfAGradientHasTheBitsOfTheFirst) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  const std::shared_ptr<Device> opened = open_device("cuda");
  auto& device = static_cast<CudaDevice&>(*opened);
  constexpr int64_t kRows = 2048, kWorkspace = int64_t{32} << 20;
  std::vector<CudaMatmulProblem> problems = {
      {.in = 2048, .out = 512, .operands = DType::bf16, .result = DType::bf16, .form = MatmulForm::input_gradient},
      {.in = 2048, .out = 512, .operands = DType::bf16, .form = MatmulForm::weight_gradient},
      {.in = 2048, .out = 512, .form = MatmulForm::input_gradient}};
  if (device.runs_hopper_kernels()) {
    problems.push_back({.in = 2048, .out = 512, .result = DType::bf16, .e4m3 = true, .one_scale = true});
    problems.push_back({.in = 2048, .out = 512, .e4m3 = true, .one_scale = true, .x_is_e5m2 = true});
    problems.push_back({.in = 2048,
                        .out = 512,
                        .form = MatmulForm::weight_gradient,
                        .e4m3 = true,
                        .one_scale = true,
                        .x_is_e5m2 = true});
  }
  CudaMatmul first(device.allocate(kWorkspace));
  for (const CudaMatmulProblem& problem : problems) {
    SCOPED_TRACE(testing::Message() << &problem - problems.data());
    cuda::ProductTest test(device, problem, kRows);
    first.run(first.plan(problem, kRows), test.expected(), device.stream());
    const CudaMatmul::Plan& fastest = cuda::fastest_plan(device, problem, kRows);
    EXPECT_GT(CudaMatmul::tested_microseconds(fastest), 0.0);
    EXPECT_TRUE(test.time([&](const CudaMatmulCall& call) { device.matmul().run(fastest, call, device.stream()); }));
    // The test can fail.
    std::vector<uint8_t> changed(2, 1);
    device.copy_from_host(test.expected().y, changed.data(), 2);
    EXPECT_FALSE(test.time([&](const CudaMatmulCall& call) { device.matmul().run(fastest, call, device.stream()); }));
  }
}

}  // namespace
}  // namespace eadem::kernels
