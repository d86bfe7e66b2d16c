// SPDX-License-Identifier: Apache-2.0
//
// The head and its loss in 8-bit floats on the CPU: the kernel on every instruction set, and the reference, are those
// of the definition in double precision.
#include <gtest/gtest.h>

#include "eadem/core/device/device.h"
#include "eadem/core/philox.h"
#include "eadem/fusions/linear_cross_entropy.h"
#include "tests/kernels/fp8_head_oracle.h"
#include "tests/ops/kernel_runner.h"
#include "tests/ops/pass_calls.h"
#include "tests/support/tolerance.h"
#include "tests/support/values.h"

namespace eadem::test {
namespace {

using kernels::Pass;

struct HeadShape {
  int64_t rows, hidden, vocab;
};
// 500 rows are more than any chunk of logits.
constexpr HeadShape kHeadShapes[] = {{1, 1, 1}, {1, 16, 33}, {7, 17, 65}, {50, 24, 300}, {500, 8, 20}};

class HeadIn8Bits : public testing::TestWithParam<Isa> {};

Tensor rounded_head_operand(const Shape& shape, uint64_t seed, float size) {
  const Tensor values = Tensor::on_host(DType::f32, shape);
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    values.view.as<float>()[i] =
        size * (2.0f * uniform_float(philox4x32(seed, static_cast<uint64_t>(i)).words[0]) - 1.0f);
  const Encoding& encoding = Fp8TensorEncoding::of(Fp8Format::Kind::e4m3, false);
  Tensor encoded = Tensor::in_one_piece(DType::f32, shape, encoding);
  encoding.encode(encoded.view, values.view);
  return encoded;
}

std::vector<float> decoded_values(const Tensor& encoded) {
  const Tensor values = Tensor::on_host(DType::f32, encoded.view.shape);
  encoded.view.encoding->decode(values.view, encoded.view);
  return {values.view.as<float>(), values.view.as<float>() + values.view.num_elements()};
}

template <typename Value>
void expect_bounded(const std::vector<Bounded>& expected, const Value* actual, const std::string& label) {
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(static_cast<double>(actual[i]), expected[i].value, expected[i].bound) << label << " " << i;
}

TEST_P(HeadIn8Bits, IsThatOfTheDefinition) {
  const auto product_bound = [](const std::vector<double>& magnitudes) {
    double sum = 0;
    for (const double magnitude : magnitudes) sum += magnitude;
    return sum * gamma_f32(static_cast<double>(magnitudes.size()) + 1);
  };
  for (const auto& [rows, hidden, vocab] : kHeadShapes) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", rows, hidden, vocab));
    const Tensor x = rounded_head_operand({rows, hidden}, 1, 1.0f),
                 weight = rounded_head_operand({vocab, hidden}, 2, 2.0f);
    HeadOperands operands{
        .rows = rows, .hidden = hidden, .vocab = vocab, .x = decoded_values(x), .weight = decoded_values(weight)};
    const Tensor labels = Tensor::on_host(DType::i32, {rows}), dloss = Tensor::on_host(DType::f32, {rows});
    for (int64_t r = 0; r < rows; ++r) {
      operands.labels.push_back(labels.view.as<int32_t>()[r] = r % 7 == 3 ? -1 : static_cast<int32_t>(r * 101 % vocab));
      operands.dloss.push_back(dloss.view.as<float>()[r] =
                                   (r % 3 == 0 ? -0.5f : 0.25f) / static_cast<float>(1 + r % 5));
    }
    const Tensor before = Tensor::on_host(DType::f32, {vocab, hidden});
    for (int64_t i = 0; i < before.view.num_elements(); ++i)
      operands.before.push_back(before.view.as<float>()[i] = 0.01f * static_cast<float>(i % 13 - 6));
    const HeadResults expected = head_oracle(operands, 0, product_bound, product_bound);
    EXPECT_LE(expected.open_codes, 1 + rows * vocab / 100) << "borders between codes are rare";

    const auto op =
        std::make_shared<fusions::LinearCrossEntropy>(kernels::LinearCrossEntropyAttrs{.dlogits_in_e5m2 = true});
    const auto call_of = [&](Pass pass, std::vector<Tensor> inputs, std::vector<Tensor> outputs) {
      PassCall call{.op = op, .pass = pass};
      const auto types_of = [](const std::vector<Tensor>& tensors) {
        std::vector<TensorType> types;
        for (const Tensor& tensor : tensors) {
          if (!tensor.defined()) {
            types.push_back(kernels::unconnected_port());
            continue;
          }
          std::vector<Dim> dims;
          for (int i = 0; i < tensor.view.shape.rank(); ++i) dims.emplace_back(tensor.view.shape[i]);
          types.emplace_back(tensor.view.dtype, dims, tensor.view.encoding);
        }
        return types;
      };
      call.input_types = types_of(inputs), call.output_types = types_of(outputs);
      call.inputs = std::move(inputs), call.outputs = std::move(outputs);
      call.output_alias.assign(call.outputs.size(), -1);
      return call;
    };
    const Tensor loss = Tensor::on_host(DType::f32, {rows}), lse = Tensor::on_host(DType::f32, {rows}),
                 dx = Tensor::on_host(DType::f32, {rows, hidden});

    // 1. The reference.
    const auto widened = [](const Tensor& tensor) { return widen(tensor.view); };
    std::vector<RefTensor> gradients = {widened(dx), widened(before), widened(loss)};
    op->reference(Pass::backward,
                  std::vector<RefTensor>{widened(x), widened(weight), widened(labels), {}, widened(dloss)}, gradients);
    expect_bounded(expected.dx, gradients[0].data.data(), "reference dx");
    expect_bounded(expected.dweight, gradients[1].data.data(), "reference dweight");
    expect_bounded(expected.loss, gradients[2].data.data(), "reference loss");

    // 2. The kernels: alone, and the loss with its gradients.
    for (const int threads : {1, 3}) {
      const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = threads, .isa = isa_name(GetParam())});
      const auto run = [&](const PassCall& call) {
        const kernels::Kernel* taker = nullptr;
        for (const kernels::Kernel* kernel : op->kernels(*kernels::backends().front()))
          if (kernel->pass == call.pass && kernel->can_handle(call.request(*device)).accepted) {
            EXPECT_EQ(taker, nullptr) << kernel->name;
            taker = kernel;
          }
        EXPECT_NE(taker, nullptr);
        EXPECT_EQ(taker->name, "cpu_fp8_tensor");
        return run_kernel(*device, *taker, call, {}, "head");
      };
      for (const Pass pass : {Pass::inference, Pass::forward}) {
        std::vector<Tensor> outputs = {loss};
        if (pass == Pass::forward) outputs.push_back(lse);
        const std::vector<Tensor> lost = run(call_of(pass, {x, weight, labels}, outputs));
        expect_bounded(expected.loss, lost[0].view.as<float>(), "loss");
        if (pass == Pass::inference) continue;
        const std::vector<Tensor> apart =
                                      run(call_of(Pass::backward, {x, weight, labels, lost[1], dloss}, {dx, before})),
                                  joint = run(call_of(Pass::backward, {x, weight, labels, Tensor(), dloss},
                                                      {dx, before, loss}));
        expect_bounded(expected.dx, apart[0].view.as<float>(), "dx");
        expect_bounded(expected.dweight, apart[1].view.as<float>(), "dweight");
        EXPECT_TRUE(same_bits(joint[0].view, apart[0].view));
        EXPECT_TRUE(same_bits(joint[1].view, apart[1].view));
        EXPECT_TRUE(same_bits(joint[2].view, lost[0].view));
        // Each alone.
        EXPECT_TRUE(same_bits(run(call_of(Pass::backward, {x, weight, labels, lost[1], dloss}, {dx, Tensor()}))[0].view,
                              apart[0].view));
        EXPECT_TRUE(
            same_bits(run(call_of(Pass::backward, {x, weight, labels, lost[1], dloss}, {Tensor(), before}))[1].view,
                      apart[1].view));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, HeadIn8Bits, testing::ValuesIn(available_isas()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace eadem::test
