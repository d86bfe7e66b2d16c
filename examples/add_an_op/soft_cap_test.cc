// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "eadem/pipeline/sequential.h"
#include "soft_cap.h"

namespace example {
namespace {

using namespace eadem;

constexpr float kCap = 2.0f;

Tensor ramp() {
  Tensor x = Tensor::on_host(DType::f32, {7, 3});
  for (int i = 0; i < 21; ++i) x.view.as<float>()[i] = 0.5f * static_cast<float>(i - 10);
  return x;
}

pipeline::Sequential make() {
  const auto op = std::make_shared<SoftCap>(SoftCapAttrs{kCap});
  return {{std::make_shared<pipeline::OpModule>("cap", op, std::vector<pipeline::OpModule::Parameter>{})},
          {3},
          16,
          open_device("cpu", {.num_threads = 2})};
}

TEST(SoftCap, MatchesItsReference) {
  pipeline::Sequential sequential = make();
  const Tensor x = ramp(), y = sequential.forward(x.view);
  Tensor ones = Tensor::on_host(DType::f32, {7, 3});
  std::fill_n(ones.view.as<float>(), 21, 1.0f);
  const Tensor dx = sequential.backward(ones.view);
  for (int i = 0; i < 21; ++i) {
    const double exact = kCap * std::tanh(static_cast<double>(x.view.as<float>()[i]) / kCap);
    // Three roundings of at most 2^-24 each, and a tanh within 2 units in the last place.
    EXPECT_NEAR(y.view.as<float>()[i], exact, 7 * 0x1p-24 * std::abs(exact));
    const double slope = 1 - exact / kCap * (exact / kCap);
    // 1 - t^2 cancels near the cap: absolute errors of t^2 remain, t being within 7 units.
    EXPECT_NEAR(dx.view.as<float>()[i], slope, 20 * 0x1p-24);
  }
}

TEST(SoftCap, ServesWithTheBitsOfTraining) {
  pipeline::Sequential sequential = make();
  const Tensor x = ramp(), served = sequential.inference(x.view), trained = sequential.forward(x.view);
  for (int i = 0; i < 21; ++i) EXPECT_EQ(served.view.as<float>()[i], trained.view.as<float>()[i]);
}

}  // namespace
}  // namespace example
