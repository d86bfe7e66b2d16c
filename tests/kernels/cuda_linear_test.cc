// SPDX-License-Identifier: Apache-2.0
//
// A row of a matrix product on a CUDA device has the same bits whatever rows are beside it, in every kernel.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "eadem/core/device/cuda_device.h"
#include "eadem/core/device/device.h"
#include "eadem/core/philox.h"
#include "eadem/kernels/backends.h"
#include "eadem/kernels/linear.h"

namespace eadem::kernels {
namespace {

Tensor random_tensor(DType dtype, const Shape& shape, uint64_t seed) {
  const Tensor values = Tensor::on_host(DType::f32, shape);
  float* out = values.view.as<float>();
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    out[i] = 2.0f * uniform_float(philox4x32(seed, static_cast<uint64_t>(i)).words[0]) - 1.0f;
  return converted_on_host(values.view, dtype);
}

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
  const Tensor x = copy_to_device(device, random_tensor(c.x, {kMaxRows, c.in}, 1).view);
  const Tensor weight = copy_to_device(device, random_tensor(c.weight, {c.out, c.in}, 2).view);
  const Tensor bias = c.bias ? copy_to_device(device, random_tensor(c.y, {c.out}, 3).view) : Tensor();
  SingleRank alone;
  Context context{*device, alone};
  const LinearAttrs attrs{.has_bias = c.bias, .out_dtype = c.y};

  const TensorType input_types[] = {TensorType(c.x, {Symbol::tokens, c.in}), TensorType(c.weight, {c.out, c.in}),
                                    c.bias ? TensorType(c.y, {c.out}) : absent_port()};
  const TensorType output_types[] = {TensorType(c.y, {Symbol::tokens, c.out})};
  KernelRequest request{
      .op = "linear", .device = device.get(), .attrs = AttrsRef(attrs), .inputs = input_types, .outputs = output_types};
  request.bounds[Symbol::tokens] = kMaxRows;

  int num_kernels = 0;
  for (const Kernel* kernel : cuda::linear_kernels()) {
    if (!kernel->can_handle(request).accepted) continue;
    ++num_kernels;
    // Rows [begin, begin + count) computed in one call.
    const auto rows = [&](int64_t begin, int64_t count) {
      const Tensor y = allocate_tensor(*device, c.y, {count, c.out});
      device->fill_zero(y.view.data, y.view.size_bytes());
      const TensorView inputs[] = {x.view.rows(begin, count), weight.view, bias.view};
      const TensorView outputs[] = {y.view};
      kernel->run({.inputs = inputs, .outputs = outputs, .attrs = AttrsRef(attrs), .context = &context});
      const Tensor host = copy_to_host(*device, y.view);
      const char* bytes = static_cast<const char*>(host.view.data);
      return std::vector<char>(bytes, bytes + host.view.size_bytes());
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

}  // namespace
}  // namespace eadem::kernels
