// SPDX-License-Identifier: Apache-2.0
//
// 8-bit floats with one scale on a CUDA device: tensors are rounded as their encoding says, along rows and transposed,
// with current and with delayed scales, and the three products of a training step are those of the definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/fusions.h"
#include "eadem/kernels/linear.h"
#include "eadem/kernels/quantize.h"
#include "tests/kernels/cuda_operands.h"

namespace eadem::kernels {
namespace {

using TensorKind = Fp8Format::Kind;

const Kernel& tensor_kernel_of(const KernelList& list, std::string_view name, Pass pass) {
  for (const Kernel* kernel : list)
    if (kernel->name == name && kernel->pass == pass) return *kernel;
  EADEM_UNREACHABLE("no kernel {}", name);
}

// A tensor in an encoding, on the device: the planes lie one after another.
struct EncodedTensor {
  Tensor memory;
  TensorView view;
};

class CudaFp8Tensor : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    device_ = open_device("cuda");
    EADEM_SKIP_WITHOUT_HOPPER();
    context_.emplace(Context{*device_, alone_});
  }

  void run(const Kernel& kernel, std::string_view op, AttrsRef attrs, const std::vector<TensorView>& inputs,
           const std::vector<TensorView>& outputs) {
    const PlanPtr plan = test::plan_for(kernel, op, attrs, inputs, outputs, *context_);
    const Tensor scratch = allocate_tensor(*device_, DType::u8, {plan->scratch_bytes() + 1});
    plan->run({.inputs = inputs, .outputs = outputs, .scratch = scratch.view, .context = &*context_});
  }

  // `scaling` on the device, of a delayed encoding.
  EncodedTensor rounded(const Tensor& x, const Fp8TensorEncoding& encoding, Pass pass, const TensorView& scaling = {}) {
    EncodedTensor y;
    y.memory = allocate_tensor(*device_, DType::u8, {encoded_bytes(encoding, x.view.shape)});
    device_->fill_zero(y.memory.view.data, y.memory.view.size_bytes());
    y.view = view_of_planes(y.memory.view.data, encoding, x.view.dtype, x.view.shape);
    std::vector<TensorView> inputs = {x.view}, outputs = {y.view};
    if (encoding.is_delayed()) inputs.push_back(scaling), outputs.push_back(scaling);
    run(tensor_kernel_of(cuda::quantize_kernels(), "cuda_tensor", pass), "quantize", AttrsRef(QuantizeAttrs{&encoding}),
        inputs, outputs);
    return y;
  }
  EncodedTensor rounded(const Tensor& x, TensorKind kind) {
    return rounded(x, Fp8TensorEncoding::of(kind, false), Pass::forward);
  }
  Tensor on_host(const EncodedTensor& encoded) {
    Tensor host = Tensor::in_one_piece(DType::f32, encoded.view.shape, *encoded.view.encoding);
    device_->copy_to_host(host.view.data, encoded.memory.view.data, encoded.memory.view.size_bytes());
    return host;
  }
  std::vector<float> decoded(const EncodedTensor& encoded) {
    const Tensor host = on_host(encoded), values = Tensor::on_host(DType::f32, encoded.view.shape);
    encoded.view.encoding->decode(values.view, host.view);
    return {values.view.as<float>(), values.view.as<float>() + values.view.num_elements()};
  }

  std::shared_ptr<Device> device_;
  const Mesh alone_;
  std::optional<Context> context_;
};

// Values of all sizes, subnormal codes among them.
Tensor tensor_of_many_sizes(DType dtype, const Shape& shape, int exponents) {
  const Tensor values = test::random_tensor(DType::f32, shape, 1);
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    values.view.as<float>()[i] =
        std::ldexp(values.view.as<float>()[i], static_cast<int>(i % exponents) - exponents * 3 / 4);
  return converted_on_host(values.view, dtype);
}

// Sides beside those of tiles, of padding, and of what a block looks through for the largest.
const Shape kTensorShapes[] = {{1, 16}, {15, 32}, {16, 128}, {127, 112}, {128, 144}, {300, 1024}, {2049, 272}};

TEST_F(CudaFp8Tensor, TensorsAreRoundedAsTheEncodingSays) {
  for (const TensorKind kind : {TensorKind::e4m3, TensorKind::e5m2})
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const Shape& shape : kTensorShapes)
        for (const int exponents : {23, 40}) {
          const Fp8TensorEncoding& encoding = Fp8TensorEncoding::of(kind, false);
          const Tensor host = tensor_of_many_sizes(dtype, shape, exponents);
          const Tensor expected = Tensor::in_one_piece(dtype, shape, encoding);
          encoding.encode(expected.view, host.view);
          const Tensor actual = on_host(rounded(copy_to_device(device_, host.view), kind));
          EXPECT_EQ(
              std::memcmp(actual.view.data, expected.view.data, static_cast<size_t>(encoded_bytes(encoding, shape))), 0)
              << encoding.name() << " " << dtype_name(dtype) << " " << to_string(shape);
          // Inference has no transposed codes.
          const Tensor alone = on_host(rounded(copy_to_device(device_, host.view), encoding, Pass::inference));
          EXPECT_EQ(std::memcmp(alone.view.data, expected.view.data, static_cast<size_t>(shape.num_elements())), 0);
          EXPECT_EQ(Fp8TensorEncoding::scale(alone.view), Fp8TensorEncoding::scale(expected.view));
        }
}

TEST_F(CudaFp8Tensor, WhatIsNotFiniteShows) {
  const Shape shape{40, 48};
  for (const float wrong : {std::numeric_limits<float>::infinity(), std::nanf("")})
    for (const bool delayed : {false, true}) {
      const Fp8TensorEncoding& encoding = Fp8TensorEncoding::of(TensorKind::e4m3, delayed);
      const Tensor host = test::random_tensor(DType::f32, shape, 1);
      host.view.as<float>()[40 * 48 - 5] = wrong;
      const Tensor given = Tensor::on_host(DType::f32, {2});
      given.view.as<float>()[0] = 3.0f, given.view.as<float>()[1] = 0.0f;
      const Tensor scaling = copy_to_device(device_, given.view);
      const EncodedTensor y = rounded(copy_to_device(device_, host.view), encoding, Pass::forward, scaling.view);
      EXPECT_TRUE(std::isnan(decoded(y)[40 * 48 - 5]));
      const float shows = delayed ? copy_to_host(*device_, scaling.view).view.as<float>()[1]
                                  : Fp8TensorEncoding::scale(on_host(y).view);
      EXPECT_TRUE(std::isnan(shows)) << shows;
    }
}

// The scale of a magnitude that is given, or that of the values where there is none; the forward pass says what it saw.
TEST_F(CudaFp8Tensor, DelayedScalesAreThoseOfTheState) {
  for (const TensorKind kind : {TensorKind::e4m3, TensorKind::e5m2})
    for (const Shape& shape : kTensorShapes)
      for (const float given : {0.0f, 0.001f, 1.7f, 1e30f})
        for (const float before : {0.0f, 1e20f})
          for (const Pass pass : {Pass::forward, Pass::inference}) {
            const Fp8TensorEncoding& encoding = Fp8TensorEncoding::of(kind, true);
            const Tensor host = tensor_of_many_sizes(DType::bf16, shape, 23), state = Tensor::on_host(DType::f32, {2});
            state.view.as<float>()[0] = given, state.view.as<float>()[1] = before;
            const Tensor scaling = copy_to_device(device_, state.view);
            const Tensor actual = on_host(rounded(copy_to_device(device_, host.view), encoding, pass, scaling.view));
            const float seen = Fp8TensorEncoding::largest_magnitude(host.view, 0, shape[0]);
            const float scale = encoding.scale_of(given > 0 ? given : seen);
            const Tensor expected = Tensor::in_one_piece(DType::bf16, shape, encoding);
            Fp8TensorEncoding::set_scale(expected.view, scale);
            encoding.encode_rows(expected.view, host.view, scale, 0, shape[0]);
            const int64_t size = pass == Pass::forward ? encoded_bytes(encoding, shape) : shape.num_elements();
            EXPECT_EQ(std::memcmp(actual.view.data, expected.view.data, static_cast<size_t>(size)), 0)
                << encoding.name() << " " << to_string(shape) << " " << given;
            EXPECT_EQ(Fp8TensorEncoding::scale(actual.view), scale);
            const Tensor after = copy_to_host(*device_, scaling.view);
            EXPECT_EQ(after.view.as<float>()[0], given);
            EXPECT_EQ(after.view.as<float>()[1], pass == Pass::forward ? std::max(before, seen) : before);
          }
}

// The activation and its gradients, rounded as they are made, have the bits of kernels apart: codes, scales, and what
// was seen. Without a scale from earlier steps, with one that is too small for the values, and beside values that are
// not finite.
TEST_F(CudaFp8Tensor, GatedActivationsAreRoundedAsTheirPartsAre) {
  const auto scaling_of = [&](float given) {
    const Tensor state = Tensor::on_host(DType::f32, {2});
    state.view.as<float>()[0] = given, state.view.as<float>()[1] = 0.0f;
    return copy_to_device(device_, state.view);
  };
  const auto expect_same = [&](const EncodedTensor& actual, const Tensor& seen, const EncodedTensor& expected,
                               const Tensor& expected_seen, const char* what) {
    EXPECT_EQ(test::bytes_of(*device_, actual.memory.view), test::bytes_of(*device_, expected.memory.view)) << what;
    EXPECT_EQ(test::bytes_of(*device_, seen.view), test::bytes_of(*device_, expected_seen.view)) << what;
  };
  for (const ActivationKind kind : {ActivationKind::silu, ActivationKind::gelu_tanh, ActivationKind::relu2})
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const Shape& shape : kTensorShapes)
        for (const float given : {0.0f, 0.001f, 3.0f}) {
          SCOPED_TRACE(fmt::format("{} {} given {}", dtype_name(dtype), to_string(shape), given));
          const Tensor values = test::random_tensor(DType::f32, shape, 1);
          for (int64_t i = 0; i < shape.num_elements(); ++i) values.view.as<float>()[i] *= 6;
          if (given == 3.0f)
            values.view.as<float>()[shape.num_elements() / 2] = -std::numeric_limits<float>::infinity();
          const Tensor gate = copy_to_device(device_, converted_on_host(values.view, dtype).view),
                       up = test::random_on(device_, dtype, shape, 2), dy = test::random_on(device_, dtype, shape, 3);
          const Tensor y = allocate_tensor(*device_, dtype, shape), dgate = allocate_tensor(*device_, dtype, shape),
                       dup = allocate_tensor(*device_, dtype, shape);
          const ActivationAttrs activation{kind};
          const KernelList parts = cuda::gated_activation_kernels();
          run(tensor_kernel_of(parts, "cuda_elements", Pass::inference), "gated_activation", AttrsRef(activation),
              {gate.view, up.view}, {y.view});
          run(tensor_kernel_of(parts, "cuda_elements", Pass::backward), "gated_activation", AttrsRef(activation),
              {gate.view, up.view, dy.view}, {dgate.view, dup.view});
          const auto part = [&](const Tensor& x, TensorKind to, const Tensor& scaling) {
            return rounded(x, Fp8TensorEncoding::of(to, true), Pass::forward, scaling.view);
          };
          const auto empty = [&](TensorKind to) {
            return part(allocate_tensor(*device_, dtype, shape), to, scaling_of(1.0f));  // other codes
          };
          {
            const Tensor seen = scaling_of(given), expected_seen = scaling_of(given);
            const EncodedTensor codes = empty(TensorKind::e4m3), expected = part(y, TensorKind::e4m3, expected_seen);
            const GatedQuantizeAttrs attrs{kind, codes.view.encoding};
            run(tensor_kernel_of(cuda::gated_activation_quantize_kernels(), "cuda_tensor", Pass::forward),
                "gated_activation_quantize", AttrsRef(attrs), {gate.view, up.view, seen.view}, {codes.view, seen.view});
            expect_same(codes, seen, expected, expected_seen, "y");
          }
          const Tensor gate_seen = scaling_of(given), up_seen = scaling_of(given),
                       expected_gate_seen = scaling_of(given), expected_up_seen = scaling_of(given);
          const EncodedTensor gate_codes = empty(TensorKind::e5m2), up_codes = empty(TensorKind::e5m2),
                              expected_gate = part(dgate, TensorKind::e5m2, expected_gate_seen),
                              expected_up = part(dup, TensorKind::e5m2, expected_up_seen);
          const GatedQuantizeAttrs attrs{kind, gate_codes.view.encoding};
          run(tensor_kernel_of(cuda::gated_gradients_quantize_kernels(), "cuda_tensor", Pass::forward),
              "gated_gradients_quantize", AttrsRef(attrs), {gate.view, up.view, dy.view, gate_seen.view, up_seen.view},
              {gate_codes.view, gate_seen.view, up_codes.view, up_seen.view});
          expect_same(gate_codes, gate_seen, expected_gate, expected_gate_seen, "dgate");
          expect_same(up_codes, up_seen, expected_up, expected_up_seen, "dup");
        }
}

// A wgmma adds 32 products to a sum, after it aligned all to the largest of them and cut them; it keeps 13 bits behind
// that one's first (cuda_fp8_test.cc). So each of the 33 terms is off by at most 2^-13 of the largest, which is at most
// the sum of the magnitudes so far. The library moves such sums to f32 at least every 128 terms. Then come the scales
// and one rounding to the result.
struct TensorProduct {
  double value = 0, bound = 0;
};
template <typename TermOf>
TensorProduct tensor_product_of(int64_t terms, double result_roundoff, TermOf&& term_of) {
  TensorProduct product;
  double magnitudes = 0, chain = 0;
  for (int64_t k = 0; k < terms; ++k) {
    const double term = term_of(k);
    chain = (k % 128 == 0 ? 0 : chain) + std::fabs(term);
    product.value += term;
    magnitudes += std::fabs(term);
    if (k % 32 == 31 || k + 1 == terms) product.bound += 33 * 0x1p-13 * chain;
  }
  product.bound += magnitudes * (static_cast<double>(terms) / 128 + 3) * 0x1p-24;
  product.bound += (std::fabs(product.value) + product.bound) * result_roundoff;
  return product;
}

TEST_F(CudaFp8Tensor, ProductsOfAStepAreThoseOfTheDefinition) {
  for (const auto& [rows, outputs, width] : {std::tuple<int64_t, int64_t, int64_t>{1, 16, 16},
                                             {7, 48, 128},
                                             {64, 256, 144},
                                             {129, 128, 640},
                                             {1000, 96, 32},
                                             {16384, 256, 640},
                                             {16384, 640, 256},
                                             {16384, 128, 256}})
    for (const DType dtype : {DType::bf16, DType::f32}) {
      SCOPED_TRACE(fmt::format("{} x {} x {} {}", rows, outputs, width, dtype_name(dtype)));
      const bool has_bias = dtype == DType::bf16 && rows % 2 == 1;
      // Where there are many rows, some results are looked at.
      const int64_t next_row = rows > 1000 ? 997 : 1, next_output = rows > 1000 ? 37 : 1,
                    next_column = rows > 1000 ? 41 : 5;
      const Tensor x = test::random_on(device_, dtype, {rows, width}, 1),
                   weight = test::random_on(device_, dtype, {outputs, width}, 2),
                   dy = test::random_on(device_, dtype, {rows, outputs}, 3),
                   bias = has_bias ? test::random_on(device_, dtype, {outputs}, 4) : Tensor();
      const EncodedTensor x8 = rounded(x, TensorKind::e4m3), weight8 = rounded(weight, TensorKind::e4m3),
                          dy8 = rounded(dy, TensorKind::e5m2);
      const std::vector<float> a = decoded(x8), w = decoded(weight8), g = decoded(dy8);
      const Tensor y = allocate_tensor(*device_, dtype, {rows, outputs}),
                   dx = allocate_tensor(*device_, dtype, {rows, width});
      const Tensor before = test::random_tensor(DType::f32, {outputs, width}, 5),
                   dweight = copy_to_device(device_, before.view);
      const LinearAttrs attrs{.has_bias = has_bias, .out_dtype = dtype};
      const KernelList kernels = cuda::linear_fp8_tensor_kernels();
      for (const Pass pass : {Pass::forward, Pass::inference}) {
        run(tensor_kernel_of(kernels, "cuda_fp8_tensor", pass), "linear", AttrsRef(attrs),
            {x8.view, weight8.view, bias.view}, {y.view});
        const Tensor got = converted_on_host(copy_to_host(*device_, y.view).view, DType::f32);
        const Tensor added =
            has_bias ? converted_on_host(copy_to_host(*device_, bias.view).view, DType::f32) : Tensor();
        for (int64_t t = 0; t < rows; t += next_row)
          for (int64_t n = 0; n < outputs; n += 5) {
            TensorProduct want = tensor_product_of(width, dtype_unit_roundoff(dtype), [&](int64_t k) {
              return static_cast<double>(a[static_cast<size_t>(t * width + k)]) *
                     static_cast<double>(w[static_cast<size_t>(n * width + k)]);
            });
            if (has_bias) {
              const double b = static_cast<double>(added.view.as<float>()[n]);
              want.value += b;
              want.bound += 2 * std::fabs(b) * dtype_unit_roundoff(dtype);
            }
            ASSERT_NEAR(static_cast<double>(got.view.as<float>()[t * outputs + n]), want.value, want.bound)
                << "y " << t << " " << n;
          }
      }
      const Kernel& backward = tensor_kernel_of(kernels, "cuda_fp8_tensor", Pass::backward);
      run(backward, "linear", AttrsRef(attrs), {x8.view, weight8.view, dy8.view}, {dx.view, {}, {}});
      run(backward, "linear", AttrsRef(attrs), {x8.view, weight8.view, dy8.view}, {{}, dweight.view, {}});
      const Tensor got_x = converted_on_host(copy_to_host(*device_, dx.view).view, DType::f32),
                   got_weight = copy_to_host(*device_, dweight.view);
      for (int64_t t = 0; t < rows; t += next_row)
        for (int64_t k = 0; k < width; k += next_column) {
          const TensorProduct want = tensor_product_of(outputs, dtype_unit_roundoff(dtype), [&](int64_t n) {
            return static_cast<double>(g[static_cast<size_t>(t * outputs + n)]) *
                   static_cast<double>(w[static_cast<size_t>(n * width + k)]);
          });
          ASSERT_NEAR(static_cast<double>(got_x.view.as<float>()[t * width + k]), want.value, want.bound)
              << "dx " << t << " " << k;
        }
      for (int64_t n = 0; n < outputs; n += next_output)
        for (int64_t k = 0; k < width; k += next_column) {
          TensorProduct want = tensor_product_of(rows, 0x1p-24, [&](int64_t t) {
            return static_cast<double>(g[static_cast<size_t>(t * outputs + n)]) *
                   static_cast<double>(a[static_cast<size_t>(t * width + k)]);
          });
          const double old = static_cast<double>(before.view.as<float>()[n * width + k]);
          want.value += old;
          want.bound += std::fabs(old) * 0x1p-23;
          ASSERT_NEAR(static_cast<double>(got_weight.view.as<float>()[n * width + k]), want.value, want.bound)
              << "dweight " << n << " " << k;
        }
    }
}

}  // namespace
}  // namespace eadem::kernels
