// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/sequential.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/rms_norm.h"
#include "eadem/ops/sampling/sample.h"

namespace eadem::pipeline {
namespace {

Tensor values(const Shape& shape, int seed) {
  Tensor tensor = Tensor::on_host(DType::f32, shape);
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    tensor.view.as<float>()[i] = std::sin(static_cast<float>(i * 37 + seed * 101)) * 0.7f;
  return tensor;
}

std::unique_ptr<Sequential> make() {
  std::vector<std::shared_ptr<const Module>> modules = {
      std::make_shared<OpModule>("norm", std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{1e-5f}),
                                 std::vector<OpModule::Parameter>{{"weight", TensorType(DType::f32, {6})}}),
      std::make_shared<OpModule>("up", std::make_shared<ops::Linear>(kernels::LinearAttrs{.has_bias = true}),
                                 std::vector<OpModule::Parameter>{{"weight", TensorType(DType::f32, {10, 6})},
                                                                  {"bias", TensorType(DType::f32, {10})}}),
      std::make_shared<OpModule>("act", std::make_shared<ops::Activation>(kernels::ActivationAttrs{}),
                                 std::vector<OpModule::Parameter>{}),
      std::make_shared<OpModule>("down", std::make_shared<ops::Linear>(kernels::LinearAttrs{}),
                                 std::vector<OpModule::Parameter>{{"weight", TensorType(DType::f32, {4, 10})}})};
  auto sequential =
      std::make_unique<Sequential>(modules, std::vector<int64_t>{6}, 8, open_device("cpu", {.num_threads = 2}));
  int seed = 1;
  for (const std::string& name : sequential->parameters().names())
    sequential->parameters().load(name, values(sequential->parameters().whole_shape(name), seed++).view, "test");
  return sequential;
}

double weighted_sum(const Tensor& y, const Tensor& weights) {
  return std::inner_product(y.view.as<float>(), y.view.as<float>() + y.view.num_elements(), weights.view.as<float>(),
                            0.0);
}

TEST(Sequential, ForwardAndInferenceGiveTheSameBits) {
  const auto sequential = make();
  const Tensor x = values({5, 6}, 9);
  const Tensor a = sequential->inference(x.view), b = sequential->forward(x.view);
  ASSERT_EQ(a.shape(), (Shape{5, 4}));
  EXPECT_EQ(std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.view.size_bytes())), 0);
}

// The gradient of sum(y * c) against central differences of the program itself. With step h the truncation error is
// O(h^2) and the rounding error 2^-24 |y| n / h; h = 2^-8 balances them at about 10^-4 for values of order one.
TEST(Sequential, GradientsMatchFiniteDifferences) {
  const auto sequential = make();
  Tensor x = values({5, 6}, 9);
  const Tensor c = values({5, 4}, 4);
  sequential->forward(x.view);
  const Tensor dx = sequential->backward(c.view);
  constexpr float kStep = 0x1p-8f;
  for (int64_t i = 0; i < x.view.num_elements(); ++i) {
    float& value = x.view.as<float>()[i];
    const float before = value;
    value = before + kStep;
    const double above = weighted_sum(sequential->inference(x.view), c);
    value = before - kStep;
    const double below = weighted_sum(sequential->inference(x.view), c);
    value = before;
    EXPECT_NEAR(dx.view.as<float>()[i], (above - below) / (2 * kStep), 2e-3) << i;
  }
}

TEST(Sequential, ParameterGradientsAccumulateUntilTheyAreCleared) {
  const auto sequential = make();
  const Tensor x = values({5, 6}, 9), c = values({5, 4}, 4);
  sequential->forward(x.view);
  sequential->backward(c.view);
  const Tensor once = sequential->gradient("up.weight");
  sequential->forward(x.view);
  sequential->backward(c.view);
  const Tensor twice = sequential->gradient("up.weight");
  for (int64_t i = 0; i < once.view.num_elements(); ++i)
    EXPECT_FLOAT_EQ(twice.view.as<float>()[i], 2 * once.view.as<float>()[i]);
  sequential->zero_gradients();
  const Tensor zero = sequential->gradient("up.weight");
  for (int64_t i = 0; i < zero.view.num_elements(); ++i) EXPECT_EQ(zero.view.as<float>()[i], 0.0f);
  EXPECT_THROW(sequential->gradient("nothing"), NotFound);
}

TEST(Sequential, RefusesOtherShapes) {
  const auto sequential = make();
  EXPECT_THROW(sequential->inference(values({5, 7}, 1).view), InvalidArgument);
  EXPECT_THROW(sequential->inference(values({9, 6}, 1).view), InvalidArgument);  // more rows than were planned for
  sequential->forward(values({5, 6}, 1).view);
  EXPECT_THROW(sequential->backward(values({4, 4}, 1).view), InvalidArgument);
}

}  // namespace
}  // namespace eadem::pipeline
