// SPDX-License-Identifier: Apache-2.0
//
// linear_cross_entropy on a CUDA device has the bits of its parts, also where the rows are more than one chunk.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/elementwise.h"
#include "eadem/kernels/linear.h"
#include "eadem/kernels/training/cross_entropy.h"
#include "tests/kernels/cuda_operands.h"

namespace eadem::kernels {
namespace {

using test::bytes_of;
using test::random_on;

// Runs the first kernel of the list that makes this pass from these ports.
void run_pass(const KernelList& list, std::string_view op, Pass pass, AttrsRef attrs, std::vector<TensorView> inputs,
              std::vector<TensorView> outputs, Context& context, const std::shared_ptr<Device>& device) {
  std::vector<TensorType> types[2];
  for (size_t side : {0, 1})
    for (const TensorView& view : side == 0 ? inputs : outputs) {
      std::vector<Dim> dims;
      for (int i = 0; i < view.shape.rank(); ++i) dims.emplace_back(view.shape[i]);
      types[side].push_back(view.defined() ? TensorType(view.dtype, dims) : unconnected_port());
    }
  const KernelRequest request{
      .op = op, .pass = pass, .device = device.get(), .attrs = attrs, .inputs = types[0], .outputs = types[1]};
  for (const Kernel* kernel : list) {
    if (kernel->pass != pass || !kernel->can_handle(request).accepted) continue;
    const PlanPtr plan = kernel->prepare(request, context);
    const Tensor scratch = allocate_tensor(*device, DType::u8, {std::max<int64_t>(plan->scratch_bytes(), 1)});
    plan->run({.inputs = inputs, .outputs = outputs, .scratch = scratch.view, .context = &context});
    device->synchronize();
    return;
  }
  FAIL() << "no kernel for " << op;
}

struct Case {
  DType dtype;
  int64_t rows, hidden, vocab;
  int64_t chunk;  // rows of one
};

class CudaLinearCrossEntropy : public testing::TestWithParam<Case> {};

TEST_P(CudaLinearCrossEntropy, HasTheBitsOfItsParts) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  const auto& [dtype, rows, hidden, vocab, chunk] = GetParam();
  const std::shared_ptr<Device> device = open_device("cuda");
  const Mesh alone;
  Context context{*device, alone};
  const auto make = [&](DType type, Shape shape) {
    Tensor tensor = allocate_tensor(*device, type, shape);
    device->fill_zero(tensor.view.data, tensor.view.size_bytes());
    return tensor;
  };
  const Tensor x = random_on(device, dtype, {rows, hidden}, 1), weight = random_on(device, dtype, {vocab, hidden}, 2);
  const Tensor dloss = random_on(device, DType::f32, {rows}, 3);
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < rows; ++r) ids.push_back(r % 7 == 3 ? -1 : static_cast<int32_t>(r * 101 % vocab));
  const Tensor labels = test::integers_on(device, ids);

  const LinearCrossEntropyAttrs attrs;
  const Tensor loss = make(DType::f32, {rows}), lse = make(DType::f32, {rows}), dx = make(dtype, {rows, hidden}),
               dweight = make(DType::f32, {vocab, hidden});
  const KernelList fused = cuda::linear_cross_entropy_kernels();
  run_pass(fused, "linear_cross_entropy", Pass::forward, AttrsRef(attrs), {x.view, weight.view, labels.view},
           {loss.view, lse.view}, context, device);
  run_pass(fused, "linear_cross_entropy", Pass::backward, AttrsRef(attrs),
           {x.view, weight.view, labels.view, lse.view, dloss.view}, {dx.view, dweight.view}, context, device);

  // Without a forward pass before it, the backward pass makes the loss, too.
  const Tensor joint_loss = make(DType::f32, {rows}), joint_dx = make(dtype, {rows, hidden}),
               joint_dweight = make(DType::f32, {vocab, hidden});
  run_pass(fused, "linear_cross_entropy", Pass::backward, AttrsRef(attrs),
           {x.view, weight.view, labels.view, {}, dloss.view}, {joint_dx.view, joint_dweight.view, joint_loss.view},
           context, device);
  EXPECT_EQ(bytes_of(*device, joint_loss.view), bytes_of(*device, loss.view));
  EXPECT_EQ(bytes_of(*device, joint_dx.view), bytes_of(*device, dx.view));
  EXPECT_EQ(bytes_of(*device, joint_dweight.view), bytes_of(*device, dweight.view));

  const Tensor part_loss = make(DType::f32, {rows}), part_lse = make(DType::f32, {rows}),
               part_dx = make(dtype, {rows, hidden}), part_dweight = make(DType::f32, {vocab, hidden});
  const LinearAttrs linear;
  const CastAttrs cast{dtype};
  const CrossEntropyAttrs plain;
  for (int64_t row = 0; row < rows; row += chunk) {
    const int64_t count = std::min(chunk, rows - row);
    const auto part = [&](const Tensor& tensor) { return tensor.view.rows(row, count); };
    const Tensor logits = make(DType::f32, {count, vocab}), dlogits = make(DType::f32, {count, vocab}),
                 rounded = make(dtype, {count, vocab});
    run_pass(cuda::linear_kernels(), "linear", Pass::forward, AttrsRef(linear), {part(x), weight.view, {}},
             {logits.view}, context, device);
    run_pass(cuda::cross_entropy_kernels(), "cross_entropy", Pass::forward, AttrsRef(plain),
             {logits.view, part(labels)}, {part(part_loss), part(part_lse)}, context, device);
    run_pass(cuda::cross_entropy_kernels(), "cross_entropy", Pass::backward, AttrsRef(plain),
             {logits.view, part(labels), part(part_lse), part(dloss)}, {dlogits.view}, context, device);
    run_pass(cuda::cast_kernels(), "cast", Pass::inference, AttrsRef(cast), {dlogits.view}, {rounded.view}, context,
             device);
    run_pass(cuda::linear_kernels(), "linear", Pass::backward, AttrsRef(linear), {part(x), weight.view, rounded.view},
             {part(part_dx), part_dweight.view, {}}, context, device);
  }
  EXPECT_EQ(bytes_of(*device, loss.view), bytes_of(*device, part_loss.view));
  EXPECT_EQ(bytes_of(*device, lse.view), bytes_of(*device, part_lse.view));
  EXPECT_EQ(bytes_of(*device, dx.view), bytes_of(*device, part_dx.view));
  EXPECT_EQ(bytes_of(*device, dweight.view), bytes_of(*device, part_dweight.view));
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaLinearCrossEntropy,
                         testing::Values(Case{DType::bf16, 70, 128, 264, 70}, Case{DType::f32, 70, 36, 132, 70},
                                         Case{DType::bf16, 4160, 64, int64_t{1} << 17, 4096},
                                         // Kept in registers, and a row that is no multiple of 16.
                                         Case{DType::bf16, 40, 64, 70016, 40}, Case{DType::bf16, 40, 64, 70008, 40},
                                         Case{DType::bf16, 9, 64, 450000, 9}));

}  // namespace
}  // namespace eadem::kernels
