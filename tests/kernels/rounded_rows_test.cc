// SPDX-License-Identifier: Apache-2.0
//
// The rounding of activations: what the kernel of quantize writes on any instruction set, for any threads, is what the
// encoding defines, for numbers of every kind.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/linear/bf16_tile_rows.h"
#include "eadem/kernels/cpu/linear/int8_rows.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_rows.h"
#include "eadem/ops/quantize.h"

namespace eadem::kernels::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// Rows of random numbers of very different sizes. Of each row, one step has something special.
Tensor rows_of(int64_t rows, int64_t columns) {
  const Tensor x = Tensor::on_host(DType::f32, Shape{rows, columns});
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1, 1);
  const float special[] = {0.0f,       -0.0f, 1e-40f, 0x1p-119f, 0x1.8p-119f, kInfinity,
                           -kInfinity, kNan,  3e38f,  127.0f,    0.5f};
  for (int64_t r = 0; r < rows; ++r) {
    float* row = x.view.as<float>() + r * columns;
    for (int64_t i = 0; i < columns; ++i) row[i] = std::ldexp(uniform(random), static_cast<int>(i / 32 % 50) * 5 - 125);
    if (columns < 32) continue;
    float* step = row + r * 32 % (columns / 32 * 32);
    const float value = special[static_cast<size_t>(r) % std::size(special)];
    if (std::fabs(value) < 1) std::fill_n(step, 32, value);
    step[r % 32] = value;
    if (value == 127.0f)  // ties: codes are the values
      for (int64_t i = 0; i < 16; ++i) step[(r + 1 + i) % 32] = static_cast<float>(i) - 7.5f;
  }
  return x;
}

// Rounds x with the kernel for `to`. Memory that it does not write is filled with `filler`.
Tensor quantized(const std::shared_ptr<Device>& device, const TensorView& x, const Encoding& to, uint8_t filler) {
  const ops::Quantize op({&to});
  const TensorType inputs[] = {TensorType(DType::f32, {x.shape[0], x.shape[1]})};
  const std::vector<TensorType> outputs = op.infer_types(inputs);
  const KernelRequest request{.op = op.name(),
                              .pass = Pass::inference,
                              .device = device.get(),
                              .attrs = op.attrs(),
                              .inputs = inputs,
                              .outputs = outputs,
                              .definition = &op};
  const KernelList kernels = quantize_kernels();
  const auto found = std::find_if(kernels.begin(), kernels.end(), [&](const Kernel* kernel) {
    return kernel->pass == Pass::inference && kernel->can_handle(request).accepted;
  });
  EADEM_CHECK(found != kernels.end(), "no kernel rounds to {}", to.name());
  const Kernel& kernel = **found;
  const Tensor y = Tensor::on_host(DType::f32, x.shape, to);
  const std::vector<PlaneSpec> planes = to.planes(x.shape);
  for (size_t i = 0; i < planes.size(); ++i)
    std::memset(y.view.plane(static_cast<int>(i)), filler, static_cast<size_t>(planes[i].size_bytes()));
  const Mesh alone;
  Context context{*device, alone};
  kernel.prepare(request, context)
      ->run({.inputs = {&x, 1}, .outputs = {&y.view, 1}, .scratch = {}, .context = &context});
  return y;
}

Tensor encoded(const TensorView& x, const Encoding& to, uint8_t filler) {
  const Tensor y = Tensor::on_host(DType::f32, x.shape, to);
  const std::vector<PlaneSpec> planes = to.planes(x.shape);
  for (size_t i = 0; i < planes.size(); ++i)
    std::memset(y.view.plane(static_cast<int>(i)), filler, static_cast<size_t>(planes[i].size_bytes()));
  to.encode(y.view, x);
  return y;
}

// Every byte of every plane; any NaN is as good as another.
void expect_same_planes(const TensorView& a, const TensorView& b, const std::string& label) {
  const std::vector<PlaneSpec> planes = a.encoding->planes(a.shape);
  for (size_t p = 0; p < planes.size(); ++p) {
    const auto* x = static_cast<const uint8_t*>(a.plane(static_cast<int>(p)));
    const auto* y = static_cast<const uint8_t*>(b.plane(static_cast<int>(p)));
    const bool is_f32 = planes[p].dtype == DType::f32;
    const int64_t size = is_f32 ? 4 : 1;
    for (int64_t i = 0; i < planes[p].size_bytes(); i += size) {
      if (std::memcmp(x + i, y + i, static_cast<size_t>(size)) == 0) continue;
      float u = 0, v = 0;
      if (is_f32) std::memcpy(&u, x + i, 4), std::memcpy(&v, y + i, 4);
      ASSERT_TRUE(std::isnan(u) && std::isnan(v)) << label << ": byte " << i << " of plane " << planes[p].name;
    }
  }
}

TEST(RoundedRows, KernelsHaveTheBitsOfTheEncoding) {
  for (Isa isa : available_isas())
    for (int threads : {1, 3}) {
      const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = threads, .isa = isa_name(isa)});
      for (const Int8Rows* to : {&Int8Rows::with_scale_per_step(), &Int8Rows::with_scale_per_chunk()})
        for (int64_t rows : {0, 1, 2, 15, 33})
          for (int64_t columns : {32, 256, 288, 2080}) {
            const Tensor x = rows_of(rows, columns);
            const std::string label = fmt::format("{} [{}, {}] {}", to->name(), rows, columns, isa_name(isa));
            expect_same_planes(quantized(device, x.view, *to, 0xa5).view, encoded(x.view, *to, 0xa5).view, label);
          }
      if (!has_bf16_products(isa)) continue;
      for (int64_t rows : {0, 1, 31, 33, 70})
        for (int64_t columns : {1, 31, 32, 33, 255, 256, 300, 2080}) {
          const Tensor x = rows_of(rows, columns);
          const Encoding& to = Bf16TileRows::instance();
          expect_same_planes(quantized(device, x.view, to, 0xa5).view, encoded(x.view, to, 0xa5).view,
                             fmt::format("{} [{}, {}]", to.name(), rows, columns));
        }
    }
}

TEST(RoundedRows, FloatsOf8BitsHaveTheBitsOfTheEncoding) {
  for (int threads : {1, 3}) {
    const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = threads});
    for (int64_t rows : {0, 1, 33, 200})
      for (int64_t columns : {1, 128, 300}) {
        const Tensor x = rows_of(rows, columns);
        const Encoding& in_rows = RowEncoding::fp8_e4m3();
        expect_same_planes(quantized(device, x.view, in_rows, 0xa5).view, encoded(x.view, in_rows, 0xa5).view,
                           fmt::format("rows [{}, {}]", rows, columns));
        // A block has to be finite.
        for (int64_t i = 0; i < rows * columns; ++i)
          if (!std::isfinite(x.view.as<float>()[i])) x.view.as<float>()[i] = 3e38f;
        for (const Fp8Encoding& to : Fp8Encoding::all())
          expect_same_planes(quantized(device, x.view, to, 0xa5).view, encoded(x.view, to, 0xa5).view,
                             fmt::format("{} [{}, {}]", to.name(), rows, columns));
      }
  }
}

// A code is the quotient of its value by the scale, half of one away at most; NaN and infinities spoil their group
// only.
TEST(RoundedRows, DecodeToWhatWasRounded) {
  const int64_t columns = 2080;
  const Tensor x = rows_of(33, columns);
  for (const Int8Rows* to : {&Int8Rows::with_scale_per_step(), &Int8Rows::with_scale_per_chunk()}) {
    const Tensor y = encoded(x.view, *to, 0);
    const int64_t group = to->scale_per_chunk() ? 256 : 32;
    std::vector<float> row(static_cast<size_t>(columns));
    for (int64_t r = 0; r < 33; ++r) {
      to->decode_row(row.data(), y.view, r);
      const float* values = x.view.as<float>() + r * columns;
      for (int64_t g = 0; g < columns; g += group) {
        const int64_t end = std::min(columns, g + group);
        double most = 0;
        bool finite = true;
        for (int64_t i = g; i < end; ++i) {
          finite = finite && std::isfinite(values[i]);
          most = std::max(most, std::fabs(static_cast<double>(values[i])));
        }
        for (int64_t i = g; i < end; ++i) {
          const float value = row[static_cast<size_t>(i)];
          if (!finite) {
            ASSERT_TRUE(std::isnan(value)) << r << ", " << i;
            continue;
          }
          const double bound = most <= 0x1p-119 ? 0x1p-119 : most / 127 * (0.5 + 1e-4);
          ASSERT_NEAR(static_cast<double>(value), static_cast<double>(values[i]), bound) << r << ", " << i;
        }
      }
    }
  }
}

TEST(RoundedRows, SumsAreOfTheCodes) {
  const Tensor x = rows_of(5, 512);
  const Tensor y = encoded(x.view, Int8Rows::with_scale_per_step(), 0);
  const Int8RowPlanes q = int8_row_planes(y.view);
  for (int64_t r = 0; r < 5; ++r)
    for (int64_t s = 0; s < 16; ++s) {
      int32_t sums[2] = {};
      for (int64_t i = 0; i < 32; ++i) sums[i / 16] += q.codes[q.step(r, s) * 32 + i];
      EXPECT_EQ(q.sums[q.step(r, s) * 2], sums[0]);
      EXPECT_EQ(q.sums[q.step(r, s) * 2 + 1], sums[1]);
    }
}

TEST(RoundedRows, Bf16RowsStandWhereTilesReadThem) {
  const Tensor x = rows_of(40, 70);
  const Tensor y = encoded(x.view, Bf16TileRows::instance(), 0);
  const TileRows rows = TileRows::in_order(y.view.data, 40);
  const int64_t r = 37, column = 65;  // row 5 of the first half of the second pair; value 1 of tile 2
  bf16_t value;
  std::memcpy(&value,
              static_cast<const char*>(rows.data) + rows.pair_stride + 2 * rows.tile_stride + 5 * rows.line_stride + 2,
              sizeof(value));
  EXPECT_EQ(value.to_float(), bf16_t::from_float(x.view.as<float>()[r * 70 + column]).to_float());
  std::vector<float> row(70);
  Bf16TileRows::instance().decode_row(row.data(), y.view, r);
  EXPECT_EQ(row[65], value.to_float());
}

TEST(RoundedRows, ShapesThatDoNotFitAreRefused) {
  EXPECT_THROW(Int8Rows::with_scale_per_step().planes(Shape{2, 33}), InvalidArgument);
  EXPECT_THROW(Int8Rows::with_scale_per_step().planes(Shape{2, 3, 32}), InvalidArgument);
  EXPECT_THROW(Bf16TileRows::instance().planes(Shape{32}), InvalidArgument);
  EXPECT_THROW(ops::Quantize({nullptr}), InvalidArgument);
}

}  // namespace
}  // namespace eadem::kernels::cpu
