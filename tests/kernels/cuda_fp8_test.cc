// SPDX-License-Identifier: Apache-2.0
//
// 8-bit floats on a CUDA device: rows are rounded as their encoding says, products are those of the definition within
// what the tensor core keeps, and a row has the same bits beside any number of others, alone and fused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "eadem/core/e4m3.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/elementwise.h"
#include "eadem/kernels/fusions.h"
#include "eadem/kernels/linear.h"
#include "eadem/kernels/quantize.h"
#include "tests/kernels/cuda_operands.h"

namespace eadem::kernels {
namespace {

using test::bytes_of;
using test::random_on;

// A tensor in an encoding, on the device: the planes lie one after another.
struct Encoded {
  Tensor memory;
  TensorView view;
};

// Whose scales are those of rows, of the whole matrix, and of blocks.
std::vector<const Encoding*> weight_encodings() {
  return {Fp8Encoding::find("fp8_e4m3_channel"), Fp8Encoding::find("fp8_e4m3_tensor"),
          Fp8Encoding::find("fp8_e4m3_block128")};
}

class CudaFp8 : public ::testing::Test {
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

  Encoded allocated(const Encoding& encoding, DType dtype, const Shape& shape) {
    Encoded result;
    result.memory = allocate_tensor(*device_, DType::u8, {encoded_bytes(encoding, shape)});
    result.view = view_of_planes(result.memory.view.data, encoding, dtype, shape);
    return result;
  }
  Encoded on_device(const TensorView& host) {
    Encoded result = allocated(*host.encoding, host.dtype, host.shape);
    device_->copy_from_host(result.memory.view.data, host.data, encoded_bytes(*host.encoding, host.shape));
    return result;
  }
  std::vector<char> bytes(const Encoded& encoded) { return bytes_of(*device_, encoded.memory.view); }

  // Random weights. Rows and blocks differ by powers of two and otherwise, so that their scales do.
  Tensor random_weight(const Encoding& encoding, const Shape& shape, uint64_t seed) {
    const Tensor values = test::random_tensor(DType::f32, shape, seed);
    for (int64_t i = 0; i < shape.num_elements(); ++i) {
      float& value = values.view.as<float>()[i];
      value = std::ldexp(value, static_cast<int>(i / shape[1] % 7 + i % shape[1] / 128 % 3) - 6);
    }
    Tensor encoded = Tensor::in_one_piece(DType::f32, shape, encoding);
    encoding.encode(encoded.view, values.view);
    return encoded;
  }

  Encoded rounded(const Tensor& x) {
    Encoded y = allocated(RowEncoding::fp8_e4m3(), x.view.dtype, x.view.shape);
    run(*cuda::quantize_kernels()[0], "quantize", AttrsRef(QuantizeAttrs{&RowEncoding::fp8_e4m3()}), {x.view},
        {y.view});
    return y;
  }

  Tensor linear(const TensorView& x, const TensorView& weight, const Tensor& bias, DType dtype) {
    Tensor y = allocate_tensor(*device_, dtype, {x.shape[0], weight.shape[0]});
    const LinearAttrs attrs{.has_bias = bias.view.defined(), .out_dtype = dtype};
    run(test::named(cuda::linear_kernels(), "cuda_fp8"), "linear", AttrsRef(attrs), {x, weight, bias.view}, {y.view});
    return y;
  }

  std::shared_ptr<Device> device_;
  const Mesh alone_;
  std::optional<Context> context_;
};

// Values of all sizes, zeros of both signs; a row of zeros, one with an infinity, one with NaN, and one whose scale is
// subnormal.
Tensor awkward_rows(DType dtype, int64_t rows, int64_t columns) {
  const Tensor values = test::random_tensor(DType::f32, {rows, columns}, 1);
  for (int64_t i = 0; i < rows * columns; ++i) {
    float& value = values.view.as<float>()[i];
    value = std::ldexp(value, static_cast<int>(i % 23) - 17);
    const int64_t row = i / columns, column = i % columns;
    if (column % 11 == 3) value = row % 2 == 0 ? -0.0f : 0.0f;
    if (row == 1) value = column % 3 == 0 ? -0.0f : 0.0f;
    if (row == 2 && column == columns / 2) value = std::numeric_limits<float>::infinity();
    if (row == 3 && column == columns - 1) value = std::numeric_limits<float>::quiet_NaN();
    if (row == 4) value = std::ldexp(value, -120);
  }
  return converted_on_host(values.view, dtype);
}

TEST_F(CudaFp8, RowsAreRoundedAsTheEncodingSays) {
  const RowEncoding& encoding = RowEncoding::fp8_e4m3();
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{7, 8},
                                        {7, 136},
                                        {7, 4096},
                                        {7, 14336},
                                        {7, 24584},
                                        {301, 8},
                                        {301, 2048},
                                        {301, 3072},
                                        {301, 8192},
                                        {301, 14336},
                                        {301, 24584}}) {
      const Tensor host = awkward_rows(dtype, rows, columns);
      const Tensor expected = Tensor::in_one_piece(dtype, host.view.shape, encoding);
      encoding.encode(expected.view, host.view);
      const std::vector<char> actual = bytes(rounded(copy_to_device(device_, host.view)));
      const char* begin = static_cast<const char*>(expected.view.data);
      const size_t codes = static_cast<size_t>(rows * columns);
      EXPECT_TRUE(std::equal(actual.begin(), actual.begin() + static_cast<int64_t>(codes), begin))
          << rows << " x " << columns;
      for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
        float scale, wanted;
        std::memcpy(&scale, actual.data() + codes + row * sizeof(float), sizeof(float));
        std::memcpy(&wanted, begin + codes + row * sizeof(float), sizeof(float));
        EXPECT_TRUE(scale == wanted || (std::isnan(scale) && std::isnan(wanted))) << "row " << row;
      }
    }
}

TEST_F(CudaFp8, BlocksAreRoundedAsTheEncodingSays) {
  const Fp8Encoding& encoding = *Fp8Encoding::find("fp8_e4m3_block128");
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 8}, {128, 128}, {200, 136}, {384, 1024}}) {
      // Values of all sizes, subnormal codes among them; a block of zeros, one whose scale is subnormal.
      const Tensor values = test::random_tensor(DType::f32, {rows, columns}, 1);
      for (int64_t i = 0; i < rows * columns; ++i) {
        float& value = values.view.as<float>()[i];
        value = std::ldexp(value, static_cast<int>(i % 23) - 17);
        if (rows > 300 && i % columns < 128) value = i / columns < 128 ? 0.0f : std::ldexp(value, -120);
      }
      const Tensor host = converted_on_host(values.view, dtype);
      const Tensor expected = Tensor::in_one_piece(dtype, host.view.shape, encoding);
      encoding.encode(expected.view, host.view);
      const Encoded y = allocated(encoding, dtype, host.view.shape);
      run(test::named(cuda::quantize_kernels(), "cuda_blocks"), "quantize", AttrsRef(QuantizeAttrs{&encoding}),
          {copy_to_device(device_, host.view).view}, {y.view});
      const std::vector<char> actual = bytes(y);
      EXPECT_TRUE(std::equal(actual.begin(), actual.end(), static_cast<const char*>(expected.view.data)))
          << rows << " x " << columns;
    }
}

// dx = dy weight has the bits of the product with the transposed weight.
TEST_F(CudaFp8, GradientsAreProductsWithTheTransposedWeight) {
  EADEM_SKIP_WITHOUT_HOPPER();
  const Fp8Encoding& encoding = *Fp8Encoding::find("fp8_e4m3_block128");
  const KernelList kernels = cuda::linear_fp8_backward_kernels();
  for (const auto& [rows, outputs, width] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 128, 128}, {33, 384, 256}, {300, 256, 640}}) {
    const Tensor values = test::random_tensor(DType::f32, {outputs, width}, 1),
                 turned = Tensor::on_host(DType::f32, {width, outputs});
    for (int64_t i = 0; i < outputs; ++i)
      for (int64_t k = 0; k < width; ++k)
        turned.view.as<float>()[k * outputs + i] = values.view.as<float>()[i * width + k];
    const auto on_device_as = [&](const Tensor& plain) {
      const Tensor encoded = Tensor::in_one_piece(DType::f32, plain.view.shape, encoding);
      encoding.encode(encoded.view, plain.view);
      return on_device(encoded.view);
    };
    const Encoded weight = on_device_as(values), transposed = on_device_as(turned);
    const Tensor x = random_on(device_, DType::bf16, {rows, width}, 2),
                 dy = random_on(device_, DType::bf16, {rows, outputs}, 3),
                 dx = allocate_tensor(*device_, DType::bf16, {rows, width});
    run(*kernels[0], "linear", AttrsRef(LinearAttrs{.out_dtype = DType::bf16}), {x.view, weight.view, dy.view},
        {dx.view, {}, {}});
    const Encoded codes = rounded(dy);
    const Tensor expected = linear(codes.view, transposed.view, {}, DType::bf16);
    EXPECT_TRUE(bytes_of(*device_, dx.view) == bytes_of(*device_, expected.view)) << rows;
    // Rows of dy that were rounded before give the same bits.
    const Tensor again = allocate_tensor(*device_, DType::bf16, {rows, width});
    run(*kernels[0], "linear", AttrsRef(LinearAttrs{.out_dtype = DType::bf16}), {x.view, weight.view, codes.view},
        {again.view, {}, {}});
    EXPECT_TRUE(bytes_of(*device_, again.view) == bytes_of(*device_, expected.view)) << rows;
  }
}

TEST_F(CudaFp8, NormsThatRoundHaveTheBitsOfTheirParts) {
  for (const int64_t hidden : {64, 2048, 4096, 8192}) {
    const Tensor a = random_on(device_, DType::bf16, {5, hidden}, 1),
                 b = random_on(device_, DType::bf16, {5, hidden}, 2),
                 weight = random_on(device_, DType::bf16, {hidden}, 3);
    const RmsNormAttrs norm{.eps = 1e-5f};
    const RmsNormQuantizeAttrs attrs{norm, &RowEncoding::fp8_e4m3()};
    const Tensor normed = allocate_tensor(*device_, DType::bf16, {5, hidden}),
                 sum = allocate_tensor(*device_, DType::bf16, {5, hidden}),
                 fused_sum = allocate_tensor(*device_, DType::bf16, {5, hidden});
    const Encoded fused = allocated(RowEncoding::fp8_e4m3(), DType::bf16, {5, hidden});
    run(*cuda::rms_norm_kernels()[0], "rms_norm", AttrsRef(norm), {a.view, weight.view}, {normed.view});
    run(*cuda::rms_norm_quantize_kernels()[0], "rms_norm_quantize", AttrsRef(attrs), {a.view, weight.view},
        {fused.view});
    EXPECT_EQ(bytes(fused), bytes(rounded(normed))) << hidden;
    run(*cuda::add_rms_norm_kernels()[0], "add_rms_norm", AttrsRef(norm), {a.view, b.view, weight.view},
        {sum.view, normed.view});
    run(*cuda::add_rms_norm_quantize_kernels()[0], "add_rms_norm_quantize", AttrsRef(attrs),
        {a.view, b.view, weight.view}, {fused_sum.view, fused.view});
    EXPECT_EQ(bytes(fused), bytes(rounded(normed))) << hidden;
    EXPECT_EQ(bytes_of(*device_, fused_sum.view), bytes_of(*device_, sum.view)) << hidden;
  }
}

// Codes that are integers from -8 to 8: a chain of 128 products stays below 2^13, so that the tensor core loses
// nothing, and every result is that of integers, scaled and added in f32.
TEST_F(CudaFp8, ProductsOfSmallIntegersAreExact) {
  EADEM_SKIP_WITHOUT_HOPPER();
  const Shape shapes[] = {{48, 128}, {37, 640}, {560, 2048}};
  const auto integers = [](DType dtype, const Encoding& encoding, const Shape& of, uint64_t seed) {
    Tensor tensor = Tensor::in_one_piece(dtype, of, encoding);
    for (int64_t i = 0; i < of.num_elements(); ++i) {
      const int value = static_cast<int>(philox4x32(seed, static_cast<uint64_t>(i)).words[0] % 17) - 8;
      static_cast<e4m3_t*>(tensor.view.plane(0))[i] = e4m3_t::from_float(static_cast<float>(value));
    }
    const int64_t num_scales = encoding.planes(of)[1].shape.num_elements();
    for (int64_t i = 0; i < num_scales; ++i)
      static_cast<float*>(tensor.view.plane(1))[i] =
          0.01f + uniform_float(philox4x32(seed + 1, static_cast<uint64_t>(i)).words[0]);
    return tensor;
  };
  const auto code = [](const Tensor& tensor, int64_t i) {
    return static_cast<int>(static_cast<const e4m3_t*>(tensor.view.plane(0))[i].to_float());
  };
  for (const Encoding* encoding : weight_encodings())
    for (const Shape& shape : shapes)
      for (const int64_t rows : {3, 40, 100, 300}) {
        const Fp8Encoding& fp8 = *Fp8Encoding::of(encoding);
        const Tensor x = integers(DType::bf16, RowEncoding::fp8_e4m3(), {rows, shape[1]}, 1),
                     weight = integers(DType::f32, *encoding, shape, 3);
        const Tensor y =
            copy_to_host(*device_, linear(on_device(x.view).view, on_device(weight.view).view, {}, DType::f32).view);
        for (int64_t t = 0; t < rows; ++t)
          for (int64_t n = 0; n < shape[0]; n += rows < 300 ? 1 : 7) {
            float scaled = 0;
            int sum = 0;
            for (int64_t k = 0; k < shape[1]; ++k) {
              sum += code(x, t * shape[1] + k) * code(weight, n * shape[1] + k);
              if (fp8.format().block_columns == 0 || k % 128 != 127) continue;
              scaled = std::fma(static_cast<float>(sum), fp8.scale(weight.view, n, k), scaled);
              sum = 0;
            }
            if (fp8.format().block_columns == 0) scaled = static_cast<float>(sum) * fp8.scale(weight.view, n, 0);
            ASSERT_EQ(y.view.as<float>()[t * shape[0] + n], scaled * static_cast<const float*>(x.view.plane(1))[t])
                << encoding->name() << " " << to_string(shape) << ", row " << t << " of " << rows << ", output " << n;
          }
      }
}

// A wgmma adds 32 products to a sum, after it aligned all to the largest of them and cut them; it keeps 13 bits behind
// that one's first (DeepSeek-V3 report, section 3.3.2, found about 14). So each of the 33 terms is off by at most 2^-13
// of the largest, which is at most the sum of the magnitudes so far. Sums of chains, and scales, are rounded to f32.
// All terms are positive, so that the bound is small beside the result.
TEST_F(CudaFp8, ProductsAreThoseOfTheDefinition) {
  EADEM_SKIP_WITHOUT_HOPPER();
  const Shape shape{70, 1152};
  const auto positive = [](const Shape& of, uint64_t seed) {
    const Tensor values = test::random_tensor(DType::f32, of, seed);
    for (int64_t i = 0; i < of.num_elements(); ++i)
      values.view.as<float>()[i] = std::ldexp(1.0f + values.view.as<float>()[i], static_cast<int>(i % 11) - 8);
    return converted_on_host(values.view, DType::bf16);
  };
  for (const Encoding* encoding : weight_encodings())
    for (const int64_t rows : {3, 40, 100}) {
      const Tensor weight = Tensor::in_one_piece(DType::f32, shape, *encoding);
      encoding->encode(weight.view, converted_on_host(positive(shape, 1).view, DType::f32).view);
      const Encoded codes = rounded(copy_to_device(device_, positive({rows, shape[1]}, 2).view));
      const Tensor x = Tensor::in_one_piece(DType::bf16, codes.view.shape, RowEncoding::fp8_e4m3());
      device_->copy_to_host(x.view.data, codes.memory.view.data, codes.memory.view.size_bytes());
      const Tensor y = copy_to_host(*device_, linear(codes.view, on_device(weight.view).view, {}, DType::f32).view);
      std::vector<float> a(static_cast<size_t>(shape[1])), b(a.size());
      for (int64_t t = 0; t < rows; ++t) {
        RowEncoding::fp8_e4m3().decode_row(a.data(), x.view, t);
        for (int64_t n = 0; n < shape[0]; ++n) {
          encoding->decode_row(b.data(), weight.view, n);
          double sum = 0, chain = 0, bound = 0;
          for (size_t k = 0; k < a.size(); ++k) {
            const double term = static_cast<double>(a[k]) * static_cast<double>(b[k]);
            chain = (k % 128 == 0 ? 0 : chain) + term;
            sum += term;
            if (k % 32 == 31) bound += 33 * 0x1p-13 * chain;
          }
          bound += sum * (static_cast<double>(shape[1]) / 128 + 2) * 0x1p-24;
          ASSERT_NEAR(y.view.as<float>()[t * shape[0] + n], sum, bound)
              << encoding->name() << ", row " << t << " of " << rows << ", " << n;
        }
      }
    }
}

// Widths for tiles of 16 and of 32 rows, several tiles for each block, a last chunk that is not whole.
TEST_F(CudaFp8, RowsDoNotDependOnTheRowsBesideThem) {
  EADEM_SKIP_WITHOUT_HOPPER();
  for (const Encoding* encoding : weight_encodings())
    for (const Shape& shape : {Shape{40, 128}, Shape{1000, 1152}, Shape{4096, 512}, Shape{6144, 1024}}) {
      const Encoded weight = on_device(random_weight(*encoding, shape, 1).view);
      for (const DType dtype : {DType::bf16, DType::f32}) {
        const Tensor bias = random_on(device_, dtype, {shape[0]}, 2), none;
        const Tensor all = random_on(device_, DType::bf16, {1100, shape[1]}, 3);
        const auto result = [&](int64_t rows, const Tensor& b) {
          Tensor x = allocate_tensor(*device_, DType::bf16, {rows, shape[1]});
          device_->copy(x.view.data, all.view.data, x.view.size_bytes());
          return bytes_of(*device_, linear(rounded(x).view, weight.view, b, dtype).view);
        };
        for (const Tensor* b : {&bias, &none}) {
          const std::vector<char> expected = result(1100, *b);
          for (const int64_t rows : {1, 8, 9, 16, 17, 32, 33, 64, 65, 130, 700}) {
            const std::vector<char> actual = result(rows, *b);
            ASSERT_TRUE(std::equal(actual.begin(), actual.end(), expected.begin()))
                << encoding->name() << " " << to_string(shape) << " " << dtype_name(dtype) << ", rows " << rows
                << (b == &bias ? ", bias" : "");
          }
        }
      }
    }
}

// Products that share a launch.
class CudaFp8Fused : public CudaFp8 {
 protected:
  void expect_bits_of_parts(int64_t rows, int64_t in, int64_t out) {
    SCOPED_TRACE(fmt::format("{} rows, {} to {}", rows, in, out));
    for (const Encoding* encoding : weight_encodings()) {
      const Encoded gate = on_device(random_weight(*encoding, {out, in}, 1).view),
                    up = on_device(random_weight(*encoding, {out, in}, 2).view),
                    k = on_device(random_weight(*encoding, {72, in}, 3).view);
      SCOPED_TRACE(encoding->name());
      const Tensor x = copy_to_device(device_, awkward_rows(DType::bf16, rows, in).view);
      const Encoded codes = rounded(x);
      const Tensor a = linear(codes.view, gate.view, {}, DType::bf16), b = linear(codes.view, up.view, {}, DType::bf16),
                   c = linear(codes.view, k.view, {}, DType::bf16);
      const Tensor expected = allocate_tensor(*device_, DType::bf16, {rows, out}),
                   gated = allocate_tensor(*device_, DType::bf16, {rows, out});
      run(*cuda::gated_activation_kernels()[0], "gated_activation",
          AttrsRef(ActivationAttrs{.kind = ActivationKind::silu}), {a.view, b.view}, {expected.view});
      run(test::named(cuda::linear_gated_activation_kernels(), "cuda_fp8"), "linear_gated_activation",
          AttrsRef(LinearGatedActivationAttrs{.kind = ActivationKind::silu, .out_dtype = DType::bf16}),
          {codes.view, gate.view, up.view}, {gated.view});
      EXPECT_EQ(bytes_of(*device_, gated.view), bytes_of(*device_, expected.view));
      if (out % 8 == 0) {  // else no kernel rounds them
        const Encoded gated_codes = allocated(RowEncoding::fp8_e4m3(), DType::bf16, {rows, out});
        run(*cuda::linear_gated_activation_quantize_kernels()[0], "linear_gated_activation_quantize",
            AttrsRef(LinearGatedActivationAttrs{
                .kind = ActivationKind::silu, .out_dtype = DType::bf16, .round_to = &RowEncoding::fp8_e4m3()}),
            {codes.view, gate.view, up.view}, {gated_codes.view});
        EXPECT_EQ(bytes(gated_codes), bytes(rounded(expected)));
      }
      const Tensor q = allocate_tensor(*device_, DType::bf16, {rows, out}),
                   key = allocate_tensor(*device_, DType::bf16, {rows, 72}),
                   value = allocate_tensor(*device_, DType::bf16, {rows, out});
      run(test::named(cuda::linear_qkv_kernels(), "cuda_fp8"), "linear_qkv",
          AttrsRef(LinearAttrs{.out_dtype = DType::bf16}), {codes.view, gate.view, {}, k.view, {}, up.view, {}},
          {q.view, key.view, value.view});
      EXPECT_EQ(bytes_of(*device_, q.view), bytes_of(*device_, a.view));
      EXPECT_EQ(bytes_of(*device_, key.view), bytes_of(*device_, c.view));
      EXPECT_EQ(bytes_of(*device_, value.view), bytes_of(*device_, b.view));
    }
  }
};

TEST_F(CudaFp8Fused, ProductsHaveTheBitsOfTheirParts) {
  EADEM_SKIP_WITHOUT_HOPPER();
  for (const int64_t rows : {1, 9, 30, 64, 100, 130, 200, 300, 450}) expect_bits_of_parts(rows, 768, 520);
  // More tiles than there are multiprocessors, and rows of y that are no multiple of 16 bytes.
  expect_bits_of_parts(740, 256, 2064);
  expect_bits_of_parts(740, 256, 2052);
}

TEST_F(CudaFp8Fused, SmallProductsHaveTheBitsOfTheirParts) {
  EADEM_SKIP_WITHOUT_HOPPER();
  for (const int64_t rows : {9, 70, 200}) expect_bits_of_parts(rows, 256, 136);
}

}  // namespace
}  // namespace eadem::kernels
