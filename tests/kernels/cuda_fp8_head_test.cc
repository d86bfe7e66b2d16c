// SPDX-License-Identifier: Apache-2.0
//
// The head and its loss in 8-bit floats on a CUDA device: codes of the gradient of logits are those of the encoding,
// along rows and transposed; losses and gradients are those of the definition; chunks of rows change nothing.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/linear/fp8_tensor.h"
#include "eadem/kernels/training/cross_entropy.h"
#include "tests/kernels/cuda_operands.h"
#include "tests/kernels/fp8_head_oracle.h"

namespace eadem::kernels {
namespace {

using HeadKind = Fp8Format::Kind;

class CudaFp8Head : public ::testing::Test {
 protected:
  struct Encoded {
    Tensor host, memory;
    TensorView view;  // on the device
  };

  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    device_ = open_device("cuda");
    EADEM_SKIP_WITHOUT_HOPPER();
    context_.emplace(Context{*device_, alone_});
  }

  cudaStream_t stream() { return static_cast<CudaDevice&>(*device_).stream(); }

  Tensor on_device(DType dtype, const Shape& shape) {
    Tensor tensor = allocate_tensor(*device_, dtype, shape);
    device_->fill_zero(tensor.view.data, tensor.view.size_bytes());
    return tensor;
  }

  // In e4m3 with this scale; `dtype` is that of the values.
  Encoded encoded(const Tensor& values, DType dtype, float scale) {
    const auto& encoding = Fp8TensorEncoding::of(HeadKind::e4m3, true);
    const Shape& shape = values.view.shape;
    Encoded result{.host = Tensor::in_one_piece(dtype, shape, encoding), .memory = {}, .view = {}};
    Fp8TensorEncoding::set_scale(result.host.view, scale);
    encoding.encode_rows(result.host.view, values.view, scale, 0, shape[0]);
    result.memory =
        copy_to_device(device_, TensorView(result.host.view.data, DType::u8, {encoded_bytes(encoding, shape)}));
    result.view = view_of_planes(result.memory.view.data, encoding, dtype, shape);
    return result;
  }

  // The backward pass without a forward pass before it, or after one that left lse; or the passes that make the loss.
  void run(Pass pass, const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs) {
    const LinearCrossEntropyAttrs attrs{.dlogits_in_e5m2 = true};
    for (const Kernel* kernel : cuda::linear_cross_entropy_kernels()) {
      if (kernel->pass != pass || kernel->name != "cuda_fp8_tensor") continue;
      const PlanPtr plan = test::plan_for(*kernel, "linear_cross_entropy", AttrsRef(attrs), inputs, outputs, *context_);
      const Tensor scratch = allocate_tensor(*device_, DType::u8, {plan->scratch_bytes() + 1});
      plan->run({.inputs = inputs, .outputs = outputs, .scratch = scratch.view, .context = &*context_});
      device_->synchronize();
      return;
    }
    FAIL() << "no kernel";
  }

  std::vector<float> floats(const Tensor& tensor) {
    const Tensor host = converted_on_host(copy_to_host(*device_, tensor.view).view, DType::f32);
    return {host.view.as<float>(), host.view.as<float>() + host.view.num_elements()};
  }

  std::shared_ptr<Device> device_;
  const Mesh alone_;
  std::optional<Context> context_;
};

std::vector<int32_t> labels_of_rows(int64_t rows, int64_t vocab) {
  std::vector<int32_t> labels;
  for (int64_t r = 0; r < rows; ++r) labels.push_back(r % 7 == 3 ? -1 : static_cast<int32_t>(r * 101 % vocab));
  return labels;
}

// 409,600 columns are the most that a cluster of blocks keeps; from 65,537 to 131,072 it keeps them in registers.
TEST_F(CudaFp8Head, CodesAreThoseOfThePlainGradient) {
  for (const auto& [rows, vocab] : {std::pair<int64_t, int64_t>{1, 16},
                                    {5, 48},
                                    {16, 4096},
                                    {130, 4112},
                                    {129, 8176},
                                    {20, 32000},
                                    {40, 70016},
                                    {3, 131072},
                                    {3, 409616}})
    for (const float seed_of_all : {0.0f, 1.0f, 1e-3f}) {
      SCOPED_TRACE(fmt::format("{} x {}, dloss {}", rows, vocab, seed_of_all));
      const Tensor small = test::random_tensor(DType::f32, {rows, vocab}, 1);
      for (int64_t i = 0; i < rows * vocab; ++i) small.view.as<float>()[i] *= 12;
      const Tensor logits = copy_to_device(device_, small.view),
                   labels = test::integers_on(device_, labels_of_rows(rows, vocab));
      const Tensor weights = test::random_tensor(DType::f32, {rows}, 2);
      for (int64_t r = 0; r < rows; ++r) weights.view.as<float>()[r] *= seed_of_all;
      const Tensor dloss = copy_to_device(device_, weights.view);
      const Tensor loss = on_device(DType::f32, {rows}), loss8 = on_device(DType::f32, {rows}),
                   plain = on_device(DType::f32, {rows, vocab}), codes = on_device(DType::u8, {rows, vocab}),
                   transposed = on_device(DType::u8, {vocab, Fp8TensorEncoding::padded_rows(rows)}),
                   scale = on_device(DType::f32, {1});
      cuda::CrossEntropyParams params{.logits = logits.view.data,
                                      .labels = labels.view.as<int32_t>(),
                                      .loss = loss.view.as<float>(),
                                      .lse = nullptr,
                                      .rows = rows,
                                      .vocab = vocab,
                                      .dtype = DType::f32,
                                      .dloss = dloss.view.as<float>(),
                                      .dlogits = plain.view.data};
      ASSERT_EQ(launch_cross_entropy(params, stream()), cudaSuccess);
      params.dlogits = nullptr, params.loss = loss8.view.as<float>();
      ASSERT_EQ(cuda::launch_e5m2_scale({.x = dloss.view.as<float>(), .size = rows, .scale = scale.view.as<float>()},
                                        stream()),
                cudaSuccess);
      ASSERT_EQ(cuda::launch_cross_entropy_codes(
                    {.loss = params, .scale = scale.view.as<float>(), .codes = codes.view.as<uint8_t>()}, stream()),
                cudaSuccess);
      ASSERT_EQ(cuda::launch_transpose_codes({.codes = codes.view.as<uint8_t>(),
                                              .transposed = transposed.view.as<uint8_t>(),
                                              .rows = rows,
                                              .columns = vocab,
                                              .pitch = Fp8TensorEncoding::padded_rows(rows)},
                                             stream()),
                cudaSuccess);
      EXPECT_EQ(floats(loss8), floats(loss));
      const auto& encoding = Fp8TensorEncoding::of(HeadKind::e5m2, false);
      const float expected_scale = encoding.scale_of(
          Fp8TensorEncoding::largest_magnitude(TensorView(weights.view.data, DType::f32, {1, rows}), 0, 1));
      ASSERT_EQ(floats(scale)[0], expected_scale);
      const Tensor gradient = copy_to_host(*device_, plain.view);
      const Tensor expected = Tensor::in_one_piece(DType::f32, {rows, vocab}, encoding);
      encoding.encode_rows(expected.view, gradient.view, expected_scale, 0, rows);
      const auto same = [&](const Tensor& actual, int plane) {
        const Tensor host = copy_to_host(*device_, actual.view);
        return std::memcmp(host.view.data, expected.view.plane(plane), static_cast<size_t>(host.view.size_bytes())) ==
               0;
      };
      EXPECT_TRUE(same(codes, 0));
      EXPECT_TRUE(same(transposed, 1));
    }
}

TEST_F(CudaFp8Head, WhatIsNotFiniteShows) {
  constexpr int64_t kRows = 3, kVocab = 48;
  const Tensor values = test::random_tensor(DType::f32, {kRows, kVocab}, 1);
  values.view.as<float>()[kVocab + 5] = std::nanf("");
  const Tensor logits = copy_to_device(device_, values.view), labels = test::integers_on(device_, {1, 2, 3}),
               dloss = copy_to_device(device_, test::random_tensor(DType::f32, {kRows}, 2).view),
               codes = on_device(DType::u8, {kRows, kVocab}), scale = on_device(DType::f32, {1});
  ASSERT_EQ(
      cuda::launch_e5m2_scale({.x = dloss.view.as<float>(), .size = kRows, .scale = scale.view.as<float>()}, stream()),
      cudaSuccess);
  ASSERT_EQ(cuda::launch_cross_entropy_codes({.loss = {.logits = logits.view.data,
                                                       .labels = labels.view.as<int32_t>(),
                                                       .loss = nullptr,
                                                       .lse = nullptr,
                                                       .rows = kRows,
                                                       .vocab = kVocab,
                                                       .dtype = DType::f32,
                                                       .dloss = dloss.view.as<float>()},
                                              .scale = scale.view.as<float>(),
                                              .codes = codes.view.as<uint8_t>()},
                                             stream()),
            cudaSuccess);
  const Tensor host = copy_to_host(*device_, codes.view);
  for (int64_t i = 0; i < kRows * kVocab; ++i)
    EXPECT_EQ(std::isnan(fp8_to_float(HeadKind::e5m2, host.view.as<uint8_t>()[i])), i / kVocab == 1) << i;
}

// A wgmma adds 32 products to a sum, after it aligned all to the largest of them and cut them; it keeps 13 bits behind
// that one's first (cuda_fp8_test.cc). So each of the 33 terms is off by at most 2^-13 of the largest, which is at most
// the sum of the magnitudes so far. The library moves such sums to f32 at least every 128 terms.
double wgmma_bound(const std::vector<double>& magnitudes) {
  double bound = 0, chain = 0, all = 0;
  for (size_t k = 0; k < magnitudes.size(); ++k) {
    chain = (k % 128 == 0 ? 0 : chain) + magnitudes[k];
    all += magnitudes[k];
    if (k % 32 == 31 || k + 1 == magnitudes.size()) bound += 33 * 0x1p-13 * chain;
  }
  return bound + all * (static_cast<double>(magnitudes.size()) / 128 + 4) * 0x1p-24;
}

// x and weight are integers of up to 3 beside scales of powers of two: of 128 products no sum exceeds 2^11, so that
// logits are exact, and almost every gradient of them has one code.
TEST_F(CudaFp8Head, IsThatOfTheDefinition) {
  for (const auto& [rows, hidden, vocab] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 16, 16}, {5, 16, 48}, {33, 128, 272}, {200, 64, 1008}})
    for (const DType dtype : {DType::bf16, DType::f32}) {
      SCOPED_TRACE(fmt::format("{} x {} x {} {}", rows, hidden, vocab, dtype_name(dtype)));
      const auto integers = [](const Shape& shape, uint64_t seed, float scale) {
        const Tensor values = test::random_tensor(DType::f32, shape, seed);
        for (int64_t i = 0; i < shape.num_elements(); ++i)
          values.view.as<float>()[i] = scale * std::round(3.4f * values.view.as<float>()[i]);
        return values;
      };
      constexpr float kScale = 0x1p-3f;
      const Tensor x_values = integers({rows, hidden}, 1, kScale), weight_values = integers({vocab, hidden}, 2, kScale);
      const Encoded x = encoded(x_values, dtype, kScale), weight = encoded(weight_values, dtype, kScale);
      const auto values_of = [](const Tensor& tensor) {
        return std::vector<float>(tensor.view.as<float>(), tensor.view.as<float>() + tensor.view.num_elements());
      };
      test::HeadOperands operands{.rows = rows,
                                  .hidden = hidden,
                                  .vocab = vocab,
                                  .x = values_of(x_values),
                                  .weight = values_of(weight_values),
                                  .labels = labels_of_rows(rows, vocab),
                                  .dloss = values_of(test::random_tensor(DType::f32, {rows}, 3)),
                                  .before = values_of(test::random_tensor(DType::f32, {vocab, hidden}, 4))};
      const test::HeadResults expected = test::head_oracle(
          operands, dtype_unit_roundoff(dtype), [](const std::vector<double>&) { return 0.0; }, wgmma_bound);
      EXPECT_LE(expected.open_codes, 1 + rows * vocab / 1000) << "borders between codes are rare";

      const Tensor labels = test::integers_on(device_, operands.labels),
                   dloss = copy_to_device(device_, TensorView(operands.dloss.data(), DType::f32, {rows}));
      const TensorView before(operands.before.data(), DType::f32, {vocab, hidden});
      const Tensor loss = on_device(DType::f32, {rows}), lse = on_device(DType::f32, {rows}),
                   joint_loss = on_device(DType::f32, {rows}), scored = on_device(DType::f32, {rows}),
                   dx = on_device(dtype, {rows, hidden}), joint_dx = on_device(dtype, {rows, hidden}),
                   dweight = copy_to_device(device_, before), joint_dweight = copy_to_device(device_, before);
      run(Pass::inference, {x.view, weight.view, labels.view}, {scored.view});
      run(Pass::forward, {x.view, weight.view, labels.view}, {loss.view, lse.view});
      run(Pass::backward, {x.view, weight.view, labels.view, lse.view, dloss.view}, {dx.view, {}});
      run(Pass::backward, {x.view, weight.view, labels.view, lse.view, dloss.view}, {{}, dweight.view});
      run(Pass::backward, {x.view, weight.view, labels.view, {}, dloss.view},
          {joint_dx.view, joint_dweight.view, joint_loss.view});
      EXPECT_EQ(floats(scored), floats(loss));
      EXPECT_EQ(floats(joint_loss), floats(loss));
      EXPECT_EQ(floats(joint_dx), floats(dx));
      EXPECT_EQ(floats(joint_dweight), floats(dweight));
      const auto expect = [](const std::vector<test::Bounded>& want, const std::vector<float>& got, const char* what) {
        for (size_t i = 0; i < want.size(); ++i)
          ASSERT_NEAR(static_cast<double>(got[i]), want[i].value, want[i].bound) << what << " " << i;
      };
      expect(expected.loss, floats(loss), "loss");
      expect(expected.dx, floats(dx), "dx");
      expect(expected.dweight, floats(dweight), "dweight");
    }
}

// Chunks have 8,192 rows at this vocabulary, and groups, whose gradients of the weight are added one after another,
// four of them. The largest |dloss| is in both parts, so that they have one scale.
TEST_F(CudaFp8Head, ChunksOfRowsChangeNothing) {
  constexpr int64_t kVocab = 65536, kHidden = 256, kGroup = 4 * 8192, kRows = kGroup + 10;
  const Tensor x_values = test::random_tensor(DType::f32, {kRows, kHidden}, 1);
  const Encoded x = encoded(x_values, DType::bf16, 1.0f / 448),
                weight = encoded(test::random_tensor(DType::f32, {kVocab, kHidden}, 2), DType::bf16, 1.0f / 448);
  const Tensor labels = test::integers_on(device_, labels_of_rows(kRows, kVocab));
  const Tensor weights = test::random_tensor(DType::f32, {kRows}, 3);
  weights.view.as<float>()[0] = 1, weights.view.as<float>()[kRows - 1] = -1;
  const Tensor dloss = copy_to_device(device_, weights.view);
  const Tensor loss = on_device(DType::f32, {kRows}), part_loss = on_device(DType::f32, {kRows}),
               dx = on_device(DType::bf16, {kRows, kHidden}), part_dx = on_device(DType::bf16, {kRows, kHidden}),
               dweight = on_device(DType::f32, {kVocab, kHidden}),
               part_dweight = on_device(DType::f32, {kVocab, kHidden});
  run(Pass::backward, {x.view, weight.view, labels.view, {}, dloss.view}, {dx.view, dweight.view, loss.view});
  for (const auto& [row, rows] : {std::pair<int64_t, int64_t>{0, kGroup}, {kGroup, kRows - kGroup}}) {
    const auto part = [&](const Tensor& tensor) { return tensor.view.rows(row, rows); };
    Tensor values = Tensor::on_host(DType::f32, {rows, kHidden});
    std::memcpy(values.view.data, part(x_values).data, static_cast<size_t>(values.view.size_bytes()));
    const Encoded x_part = encoded(values, DType::bf16, 1.0f / 448);
    run(Pass::backward, {x_part.view, weight.view, part(labels), {}, part(dloss)},
        {part(part_dx), part_dweight.view, part(part_loss)});
  }
  EXPECT_EQ(floats(part_loss), floats(loss));
  EXPECT_EQ(floats(part_dx), floats(dx));
  EXPECT_EQ(floats(part_dweight), floats(dweight));
}

}  // namespace
}  // namespace eadem::kernels
