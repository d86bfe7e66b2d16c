// SPDX-License-Identifier: Apache-2.0
//
// Encoded weights on a CUDA device: their packing keeps every value, the device decodes what the definition says, and
// products have the bits of products with the weight rounded to bf16, for few rows and for many, alone and fused.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <tuple>
#include <vector>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/embedding.h"
#include "eadem/kernels/fusions.h"
#include "eadem/kernels/linear.h"
#include "tests/kernels/cuda_operands.h"

namespace eadem::kernels {
namespace {

using cuda::FragmentBlocks;
using test::bytes_of;
using test::random_on;

// Every kind of codes and scales.
std::vector<const Encoding*> encodings() {
  std::vector<const Encoding*> all(BlockEncoding::writable().begin(), BlockEncoding::writable().end());
  for (const GroupEncoding& groups : GroupEncoding::all())
    if (groups.format().group_size != 32) all.push_back(&groups);
  for (const Fp8Encoding& floats : Fp8Encoding::all()) all.push_back(&floats);
  return all;
}

bool keeps_values(const Encoding* encoding) {
  const GroupEncoding* groups = GroupEncoding::of(encoding);
  return BlockEncoding::of(encoding) != nullptr || (groups != nullptr && !groups->format().has_order);
}

// A random weight, as it is stored and as the device reads it.
struct Weight {
  Weight(const Encoding* encoding, const Shape& shape, uint64_t seed)
      : stored(Tensor::in_one_piece(DType::f32, shape, *encoding)),
        packed(Tensor::in_one_piece(DType::f32, shape, *FragmentBlocks::of(encoding))) {
    Tensor values = test::random_tensor(DType::f32, shape, seed);
    // Rows of different size, some of one sign.
    for (int64_t i = 0; i < shape.num_elements(); ++i) {
      float& value = values.view.as<float>()[i];
      const int64_t row = i / shape[1];
      value = std::ldexp(row % 3 == 0 ? value + 0.7f : value, static_cast<int>(row % 7) - 5);
    }
    if (const GroupEncoding* groups = GroupEncoding::of(encoding); groups != nullptr && groups->format().has_order)
      for (int64_t j = 0; j < shape[1]; ++j)
        static_cast<int32_t*>(stored.view.plane(groups->format().has_zeros ? 3 : 2))[j] =
            static_cast<int32_t>((j * 37 + 11) % shape[1]);
    encoding->encode(stored.view, values.view);
    packed.view.encoding->encode(packed.view, stored.view);
  }

  std::vector<float> row(const TensorView& view, int64_t index) const {
    std::vector<float> values(static_cast<size_t>(view.shape[1]));
    view.encoding->decode_row(values.data(), view, index);
    return values;
  }

  Tensor stored, packed;
};

TEST(FragmentBlocks, KeepEveryValue) {
  for (const Encoding* encoding : encodings())
    for (const Shape& shape : {Shape{16, 256}, Shape{37, 768}}) {
      const Weight weight(encoding, shape, 1);
      for (int64_t r = 0; r < shape[0]; ++r) {
        std::vector<float> expected = weight.row(weight.stored.view, r);
        if (!keeps_values(encoding))
          for (float& value : expected) value = bf16_t::from_float(value).to_float();
        ASSERT_EQ(weight.row(weight.packed.view, r), expected) << encoding->name() << ", row " << r;
      }
    }
}

TEST(FragmentBlocks, FillUpTheLastColumns) {
  const Weight weight(BlockEncoding::find("q4_0"), {5, 320}, 1);
  for (int64_t r = 0; r < 5; ++r) EXPECT_EQ(weight.row(weight.packed.view, r), weight.row(weight.stored.view, r));
  EXPECT_THROW(FragmentBlocks::of(BlockEncoding::find("q8_0"))->planes({5, 96}), InvalidArgument);
}

class CudaEncoded : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    device_ = open_device("cuda");
    context_.emplace(Context{*device_, alone_});
  }

  void run(const Kernel& kernel, std::string_view op, AttrsRef attrs, const std::vector<TensorView>& inputs,
           const std::vector<TensorView>& outputs) {
    const PlanPtr plan = test::plan_for(kernel, op, attrs, inputs, outputs, *context_);
    const Tensor scratch = allocate_tensor(*device_, DType::u8, {plan->scratch_bytes() + 1});
    plan->run({.inputs = inputs, .outputs = outputs, .scratch = scratch.view, .context = &*context_});
  }

  // The rows of a weight as the device decodes them.
  Tensor decoded(const TensorView& weight, DType dtype) {
    std::vector<int32_t> ids;
    for (int64_t r = 0; r < weight.shape[0]; ++r) ids.push_back(static_cast<int32_t>(r));
    const Tensor rows = test::integers_on(device_, ids), y = allocate_tensor(*device_, dtype, weight.shape);
    run(*cuda::embedding_kernels()[1], "embedding", AttrsRef(EmbeddingAttrs{.out_dtype = dtype}), {weight, rows.view},
        {y.view});
    return y;
  }

  Tensor linear(const Tensor& x, const TensorView& weight, const Tensor& bias, DType dtype) {
    Tensor y = allocate_tensor(*device_, dtype, {x.view.shape[0], weight.shape[0]});
    const LinearAttrs attrs{.has_bias = bias.view.defined(), .out_dtype = dtype};
    const char* kernel = test::hopper_refusal().empty() ? "cuda_mma_chain"
                         : weight.encoding != nullptr   ? "cuda_decoded"
                                                        : "cublaslt";
    run(test::named(cuda::linear_kernels(), kernel), "linear", AttrsRef(attrs), {x.view, weight, bias.view}, {y.view});
    return y;
  }

  std::shared_ptr<Device> device_;
  const Mesh alone_;
  std::optional<Context> context_;
};

TEST_F(CudaEncoded, RowsAreWhatTheDefinitionSays) {
  for (const Encoding* encoding : encodings()) {
    const Shape shape{37, 768};
    const Weight weight(encoding, shape, 1);
    Tensor memory;
    const Tensor y =
        copy_to_host(*device_, decoded(test::encoded_on(device_, weight.packed.view, memory), DType::f32).view);
    for (int64_t r = 0; r < shape[0]; ++r) {
      const std::vector<float> expected = weight.row(weight.packed.view, r);
      float largest = 0;
      for (const float value : expected) largest = std::max(largest, std::fabs(value));
      // Scale and offset of a group are rounded to f32; they are at most some 100 times the largest value.
      for (size_t k = 0; k < expected.size(); ++k)
        ASSERT_NEAR(y.view.as<float>()[static_cast<size_t>(r * shape[1]) + k], expected[k], 2e-5f * largest)
            << encoding->name() << ", row " << r << ", column " << k;
    }
  }
}

TEST_F(CudaEncoded, ProductsHaveTheBitsOfDecodedWeights) {
  for (const Encoding* encoding : encodings())
    for (const Shape& shape : {Shape{37, 768}, Shape{560, 256}}) {
      const Weight weight(encoding, shape, 1);
      Tensor memory;
      const TensorView encoded = test::encoded_on(device_, weight.packed.view, memory);
      const Tensor plain = decoded(encoded, DType::bf16), bias = random_on(device_, DType::bf16, {shape[0]}, 2);
      for (const int64_t rows : {1, 8, 9, 16, 17, 32, 33, 64, 65, 130}) {
        const Tensor x = random_on(device_, DType::bf16, {rows, shape[1]}, 3);
        ASSERT_EQ(bytes_of(*device_, linear(x, encoded, bias, DType::bf16).view),
                  bytes_of(*device_, linear(x, plain.view, bias, DType::bf16).view))
            << encoding->name() << " " << to_string(shape) << ", rows " << rows;
      }
    }
}

// One product of each number of token warps, small enough for compute-sanitizer.
TEST_F(CudaEncoded, FewRowsHaveTheBitsOfDecodedWeights) {
  const Weight weight(BlockEncoding::find("q4_k"), {40, 1280}, 1);
  Tensor memory;
  const TensorView encoded = test::encoded_on(device_, weight.packed.view, memory);
  const Tensor plain = decoded(encoded, DType::bf16);
  for (const int64_t rows : {1, 10, 20, 40}) {
    const Tensor x = random_on(device_, DType::bf16, {rows, 1280}, 3);
    EXPECT_EQ(bytes_of(*device_, linear(x, encoded, {}, DType::bf16).view),
              bytes_of(*device_, linear(x, plain.view, {}, DType::bf16).view))
        << "rows " << rows;
  }
}

// Widths of models: many tiles for each block, a last chunk that is not whole, f32 results.
TEST_F(CudaEncoded, LargeProductsHaveTheBitsOfDecodedWeights) {
  const std::pair<const char*, Shape> cases[] = {
      {"q4_k", {4096, 4096}}, {"q6_k", {9000, 2048}}, {"q4_0", {2048, 8256}}};
  for (const auto& [name, shape] : cases) {
    const Weight weight(BlockEncoding::find(name), shape, 1);
    Tensor memory;
    const TensorView encoded = test::encoded_on(device_, weight.packed.view, memory);
    const Tensor plain = decoded(encoded, DType::bf16);
    for (const int64_t rows : {1, 16, 32, 64, 200}) {
      const Tensor x = random_on(device_, DType::bf16, {rows, shape[1]}, 3);
      EXPECT_EQ(bytes_of(*device_, linear(x, encoded, {}, DType::f32).view),
                bytes_of(*device_, linear(x, plain.view, {}, DType::f32).view))
          << name << " " << to_string(shape) << ", rows " << rows;
    }
  }
}

// Narrow weights, and those that have rows enough for packed_direct.cuh; codes of four, six, eight and sixteen bits.
TEST_F(CudaEncoded, GatedProductsHaveTheBitsOfTheirParts) {
  EADEM_SKIP_WITHOUT_HOPPER();
  const std::tuple<const char*, const char*, int64_t, int64_t> cases[] = {{"q4_k", "q6_k", 520, 768},
                                                                          {"q4_k", "q6_k", 4300, 768},
                                                                          {"q8_0", "q8_0", 4300, 832},
                                                                          {"q4_0", "iq4_nl", 4300, 832}};
  for (const auto& [gate_name, up_name, out, in] : cases) {
    Tensor gate_memory, up_memory;
    const TensorView gate_weight =
        test::encoded_on(device_, Weight(BlockEncoding::find(gate_name), {out, in}, 1).packed.view, gate_memory);
    const TensorView up_weight =
        test::encoded_on(device_, Weight(BlockEncoding::find(up_name), {out, in}, 2).packed.view, up_memory);
    for (const int64_t rows : {1, 12, 30, 64, 100}) {
      const Tensor x = random_on(device_, DType::bf16, {rows, in}, 3);
      const Tensor fused = allocate_tensor(*device_, DType::bf16, {rows, out});
      const Tensor parts = allocate_tensor(*device_, DType::bf16, {rows, out});
      run(*cuda::linear_gated_activation_kernels()[0], "linear_gated_activation",
          AttrsRef(LinearGatedActivationAttrs{.kind = ActivationKind::silu, .out_dtype = DType::bf16}),
          {x.view, gate_weight, up_weight}, {fused.view});
      const Tensor gate = linear(x, gate_weight, {}, DType::bf16), up = linear(x, up_weight, {}, DType::bf16);
      run(*cuda::gated_activation_kernels()[0], "gated_activation", AttrsRef(ActivationAttrs{ActivationKind::silu}),
          {gate.view, up.view}, {parts.view});
      EXPECT_EQ(bytes_of(*device_, fused.view), bytes_of(*device_, parts.view))
          << gate_name << " " << up_name << " " << out << ", rows " << rows;
    }
  }
}

TEST_F(CudaEncoded, SharedLaunchesHaveTheBitsOfTheirParts) {
  EADEM_SKIP_WITHOUT_HOPPER();
  constexpr int64_t kIn = 512;
  const char* const names[] = {"q4_k", "q6_k", "q8_0"};
  std::array<Tensor, 3> memory;
  std::array<TensorView, 3> weights;
  for (size_t i = 0; i < 3; ++i)
    weights[i] = test::encoded_on(
        device_, Weight(BlockEncoding::find(names[i]), {i == 2 ? 41 : 520, kIn}, 1 + i).packed.view, memory[i]);
  for (const int64_t rows : {1, 12, 30, 64, 100}) {
    const Tensor x = random_on(device_, DType::bf16, {rows, kIn}, 3);
    const auto results = [&](int64_t out) { return allocate_tensor(*device_, DType::bf16, {rows, out}); };
    std::vector<TensorView> inputs = {x.view}, outputs;
    std::vector<Tensor> y;
    for (const TensorView& weight : weights) {
      inputs.insert(inputs.end(), {weight, TensorView{}});
      y.push_back(results(weight.shape[0]));
      outputs.push_back(y.back().view);
    }
    run(*cuda::linear_qkv_kernels()[0], "linear_qkv", AttrsRef(LinearAttrs{.out_dtype = DType::bf16}), inputs, outputs);
    for (size_t i = 0; i < 3; ++i)
      EXPECT_EQ(bytes_of(*device_, y[i].view), bytes_of(*device_, linear(x, weights[i], {}, DType::bf16).view))
          << "part " << i << ", rows " << rows;
  }
}

}  // namespace
}  // namespace eadem::kernels
