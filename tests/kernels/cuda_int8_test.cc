// SPDX-License-Identifier: Apache-2.0
//
// Products of K-quants, and of codes of four bits in groups, with rows of 8-bit codes on a CUDA device: rows are
// rounded as the encoding says, products are those of the definition (integer_products.cuh), for few rows and for many,
// alone and fused, and norms and gated products that round have the bits of their parts.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/cuda/linear/int8_chunks.h"
#include "eadem/kernels/fusions.h"
#include "eadem/kernels/linear.h"
#include "eadem/kernels/quantize.h"
#include "tests/kernels/cuda_operands.h"

namespace eadem::kernels {
namespace {

using cuda::FragmentBlocks;
using cuda::Int8Chunks;
using cuda::kIntegerChunk;
using test::bytes_of;
using test::random_on;

Tensor weights_of_all_sizes(const Shape& shape, uint64_t seed) {
  const Tensor values = test::random_tensor(DType::f32, shape, seed);
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    float& value = values.view.as<float>()[i];
    const int64_t row = i / shape[1];
    value = std::ldexp(row % 3 == 0 ? value + 0.7f : value, static_cast<int>(row % 7) - 5);
  }
  return values;
}
// Rows of almost one value, whose minimums are up to millions of times what their codes add, of one value, and of
// zeros.
Tensor weights_of_almost_one_value(const Shape& shape, uint64_t seed) {
  const Tensor values = test::random_tensor(DType::f32, shape, seed);
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    float& value = values.view.as<float>()[i];
    const auto row = static_cast<int>(i / shape[1] % 8);
    if (row < 5) value = -1.0f + std::ldexp(value, -4 * row - 4);
    if (row == 5) value = -1.0f;
    if (row == 6) value = 0.0f;
  }
  return values;
}

// A weight as it is stored, and as the device reads it.
struct Weight {
  Weight(const std::shared_ptr<Device>& device, const char* type, const Tensor& values)
      : encoding(encoding_named(type)), stored(Tensor::in_one_piece(DType::f32, values.view.shape, encoding)) {
    encoding.encode(stored.view, values.view);
    const Tensor packed = Tensor::in_one_piece(DType::f32, values.view.shape, *FragmentBlocks::of(&encoding));
    packed.view.encoding->encode(packed.view, stored.view);
    view = test::encoded_on(device, packed.view, memory);
  }
  Weight(const std::shared_ptr<Device>& device, const char* type, const Shape& shape, uint64_t seed)
      : Weight(device, type, weights_of_all_sizes(shape, seed)) {}

  static const Encoding& encoding_named(std::string_view type) {
    if (const BlockEncoding* blocks = BlockEncoding::find(type)) return *blocks;
    return *GroupEncoding::find(type);
  }

  const BlockEncoding& blocks() const { return *BlockEncoding::of(&encoding); }
  BlockParts block(int64_t row, int64_t chunk) const {
    BlockParts parts{};
    blocks().unpack(parts, static_cast<const uint8_t*>(stored.view.data) +
                               row * blocks().row_bytes(stored.view.shape[1]) + chunk * blocks().format().block_bytes);
    return parts;
  }

  const Encoding& encoding;
  Tensor stored, memory;
  TensorView view;
};

// Values of all sizes, a chunk of zeros, and one so small that it is taken as such.
Tensor rows_of_all_sizes(int64_t rows, int64_t columns) {
  const Tensor values = test::random_tensor(DType::f32, {rows, columns}, 1);
  for (int64_t i = 0; i < rows * columns; ++i) {
    float& value = values.view.as<float>()[i];
    const int64_t row = i / columns, chunk = i % columns / kIntegerChunk;
    value = std::ldexp(value, static_cast<int>((row + 3 * chunk) % 11) - 6);
    if (row % 5 == 1 && chunk == 0) value = 0.0f;
    if (row % 5 == 2 && chunk == 0) value = std::ldexp(value, -118);
  }
  return values;
}

// Rows whose values are almost as large as their largest, so that codes have 63 levels, beside others.
Tensor rows_of_one_size(int64_t rows, int64_t columns) {
  const Tensor values = test::random_tensor(DType::f32, {rows, columns}, 1);
  for (int64_t i = 0; i < rows * columns; ++i) {
    float& value = values.view.as<float>()[i];
    if (i / columns % 2 == 0) value = std::copysign(1.0f + value / 16, i / columns % 4 == 0 ? 1.0f : value);
  }
  return values;
}

// The code of a column of a row, of many rows as its half.
double code_of(const cuda::Int8ChunkPlanes& rows, int64_t row, int64_t column) {
  if (rows.rows > cuda::kIntegerStreamMaxTokens) {
    const int64_t at = column % 16, place = at % 2 * 8 + at % 8 / 2 * 2 + at / 8;
    return rows.halves[row * rows.columns + column - at + place].to_float();
  }
  const int64_t at = column % 64, pair = at % 8 / 2, step = at / 16, half = at % 16 / 8;
  return rows.codes[row * rows.columns + column - at + pair * 16 + step * 4 + half * 2 + at % 2];
}

class CudaInt8 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    device_ = open_device("cuda");
    context_.emplace(Context{*device_, alone_});
  }

  struct Rows {
    Tensor memory;
    TensorView view;
  };
  // What rows have no place for is zero.
  Rows allocated(DType dtype, const Shape& shape) {
    Rows result;
    const int64_t bytes = encoded_bytes(Int8Chunks::instance(), shape);
    result.memory = allocate_tensor(*device_, DType::u8, {bytes});
    device_->fill_zero(result.memory.view.data, bytes);
    result.view = view_of_planes(result.memory.view.data, Int8Chunks::instance(), dtype, shape);
    return result;
  }
  std::vector<char> bytes(const Rows& rows) { return bytes_of(*device_, rows.memory.view); }

  void run(const Kernel& kernel, std::string_view op, AttrsRef attrs, const std::vector<TensorView>& inputs,
           const std::vector<TensorView>& outputs) {
    const PlanPtr plan = test::plan_for(kernel, op, attrs, inputs, outputs, *context_);
    const Tensor scratch = allocate_tensor(*device_, DType::u8, {plan->scratch_bytes() + 1});
    plan->run({.inputs = inputs, .outputs = outputs, .scratch = scratch.view, .context = &*context_});
  }

  Rows rounded(const Tensor& x) {
    Rows y = allocated(x.view.dtype, x.view.shape);
    run(test::named(cuda::quantize_kernels(), "cuda_chunks"), "quantize",
        AttrsRef(QuantizeAttrs{&Int8Chunks::instance()}), {x.view}, {y.view});
    return y;
  }

  Tensor linear(const TensorView& x, const TensorView& weight, const Tensor& bias, DType dtype) {
    Tensor y = allocate_tensor(*device_, dtype, {x.shape[0], weight.shape[0]});
    const LinearAttrs attrs{.has_bias = bias.view.defined(), .out_dtype = dtype};
    run(test::named(cuda::linear_kernels(), "cuda_int8"), "linear", AttrsRef(attrs), {x, weight, bias.view}, {y.view});
    return y;
  }

  std::shared_ptr<Device> device_;
  const Mesh alone_;
  std::optional<Context> context_;
};

TEST(Int8Chunks, AreRowsOfWholeChunks) {
  const Int8Chunks& encoding = Int8Chunks::instance();
  EXPECT_THROW(encoding.planes({3, 320}), InvalidArgument);
  for (const int64_t num_rows : {9, 33}) {
    const Tensor values = rows_of_all_sizes(num_rows, 512),
                 rows = Tensor::in_one_piece(DType::f32, {num_rows, 512}, encoding);
    encoding.encode(rows.view, values.view);
    for (int64_t r = 0; r < num_rows; ++r) {
      std::vector<float> decoded(512);
      encoding.decode_row(decoded.data(), rows.view, r);
      for (int64_t k = 0; k < 512; ++k) {
        float largest = 0;
        for (int64_t i = k / 256 * 256; i < k / 256 * 256 + 256; ++i)
          largest = std::max(largest, std::fabs(values.view.as<float>()[r * 512 + i]));
        ASSERT_NEAR(decoded[static_cast<size_t>(k)], values.view.as<float>()[r * 512 + k],
                    largest * 0x1.03p-8f + 0x1p-119f)
            << num_rows << ": " << r << ", " << k;
      }
    }
  }
}

// The sum of magnitudes is what keeps products exact.
TEST(Int8Chunks, CodesOfAChunkAddUpToAnIntegerOfAProduct) {
  const Int8Chunks& encoding = Int8Chunks::instance();
  const Tensor values = rows_of_one_size(9, 512), rows = Tensor::in_one_piece(DType::f32, {9, 512}, encoding);
  encoding.encode(rows.view, values.view);
  for (int64_t r = 0; r < 9; ++r) {
    std::vector<float> decoded(512);
    encoding.decode_row(decoded.data(), rows.view, r);
    for (int64_t chunk = 0; chunk < 2; ++chunk) {
      int magnitudes = 0, most = 0;
      for (int64_t i = chunk * 256; i < chunk * 256 + 256; ++i) {
        const int code = cuda::int8_chunk_planes(rows.view).codes[r * 512 + i];
        magnitudes += std::abs(code), most = std::max(most, std::abs(code));
        EXPECT_NEAR(decoded[static_cast<size_t>(i)], values.view.as<float>()[r * 512 + i], 0x1.1p-6f);
      }
      EXPECT_LE(magnitudes, cuda::kMostCodeSum);
      EXPECT_EQ(most, r % 2 == 0 ? 63 : 127);
    }
  }
}

TEST_F(CudaInt8, RowsAreRoundedAsTheEncodingSays) {
  const Int8Chunks& encoding = Int8Chunks::instance();
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const auto& [rows, columns] :
         {std::pair<int64_t, int64_t>{1, 256}, {7, 4096}, {32, 768}, {33, 512}, {34, 14336}}) {
      const Tensor values = rows == 33 ? rows_of_one_size(rows, columns) : rows_of_all_sizes(rows, columns);
      if (rows > 5) {
        values.view.as<float>()[3 * columns + 40] = std::numeric_limits<float>::infinity();
        values.view.as<float>()[4 * columns + 300] = std::numeric_limits<float>::quiet_NaN();
      }
      const Tensor host = converted_on_host(values.view, dtype);
      const Tensor expected = Tensor::on_host(dtype, host.view.shape, encoding);
      encoding.encode(expected.view, host.view);
      const Rows actual = rounded(copy_to_device(device_, host.view));
      const Tensor on_host = Tensor::on_host(dtype, host.view.shape, encoding);
      const std::vector<PlaneSpec> planes = encoding.planes(host.view.shape);
      for (int i = 0; i < static_cast<int>(planes.size()); ++i) {
        const PlaneSpec& plane = planes[static_cast<size_t>(i)];
        device_->copy_to_host(on_host.view.plane(i), actual.view.plane(i),
                              plane.shape.num_elements() * static_cast<int64_t>(dtype_size(plane.dtype)));
      }
      const cuda::Int8ChunkPlanes a = cuda::int8_chunk_planes(on_host.view), b = cuda::int8_chunk_planes(expected.view);
      const int64_t padded = (rows + 7) / 8 * 8;
      for (int64_t i = 0; i < rows * columns; ++i) {
        ASSERT_EQ(a.codes[i], b.codes[i]) << rows << " x " << columns << ": " << i;
        if (rows > cuda::kIntegerStreamMaxTokens) {
          ASSERT_EQ(a.halves[i].bits, b.halves[i].bits) << rows << " x " << columns << ": " << i;
        }
      }
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t chunk = 0; chunk < columns / kIntegerChunk; ++chunk) {
          const float got = a.scales[chunk * padded + row], want = b.scales[chunk * padded + row];
          ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << row << ", " << chunk;
          for (int64_t s = 0; s < 16; ++s) {
            const int64_t at = ((chunk * padded / 8 + row / 8) * 2 + s / 8) * 64 + row % 8 * 8 + s % 8;
            ASSERT_EQ(a.sums[at].bits, b.sums[at].bits) << row << ", " << chunk << ", " << s;
          }
        }
    }
}

// Where the definition has integers they are exact. What the tensor core adds, chains of six bits and minimums, loses
// less than 2^-20 of the sum of magnitudes. Minimums are rounded to f16.
TEST_F(CudaInt8, ProductsAreThoseOfTheDefinition) {
  EADEM_SKIP_WITHOUT_HOPPER();
  for (const bool extreme : {false, true})
    for (const char* type : {"q4_k", "q6_k"})
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>{256, 16}, {2304, 149}, {4096, 392}}) {
        const Weight weight(device_, type,
                            extreme ? weights_of_almost_one_value({out, in}, 2) : weights_of_all_sizes({out, in}, 2));
        const bool has_min = weight.blocks().format().has_min;
        for (const int64_t tokens : {1, 3, 8, 13, 32, 33, 150}) {
          const Tensor values = extreme ? rows_of_one_size(tokens, in) : rows_of_all_sizes(tokens, in);
          const Tensor x = copy_to_device(device_, converted_on_host(values.view, DType::bf16).view);
          const Tensor host_x = copy_to_host(*device_, x.view);
          const Tensor codes = Tensor::on_host(DType::bf16, {tokens, in}, Int8Chunks::instance());
          Int8Chunks::instance().encode(codes.view, host_x.view);
          const cuda::Int8ChunkPlanes rows = cuda::int8_chunk_planes(codes.view);
          const int64_t padded = (tokens + 7) / 8 * 8, chunks = in / kIntegerChunk;
          const Tensor y = copy_to_host(*device_, linear(rounded(x).view, weight.view, {}, DType::f32).view);
          for (int64_t n = 0; n < out; n += n % 5 + 1) {
            std::vector<BlockParts> blocks;
            for (int64_t c = 0; c < chunks; ++c) blocks.push_back(weight.block(n, c));
            for (int64_t t = 0; t < tokens; t += t % 3 + 1) {
              double sum = 0, magnitude = 0, rounded_size = 0;
              for (int64_t c = 0; c < chunks; ++c) {
                const BlockParts& b = blocks[static_cast<size_t>(c)];
                const double scale = rows.scales[c * padded + t];
                // Codes that move a value by less than 2^-11 of the minimum's scale are left out.
                const double d = has_min && std::fabs(b.min) > 0x1p21f * std::fabs(b.scale) ? 0 : b.scale;
                for (size_t g = 0; g < 256 / static_cast<size_t>(weight.blocks().format().group_size); ++g) {
                  const auto size = static_cast<size_t>(weight.blocks().format().group_size);
                  for (size_t i = g * size; i < g * size + size; ++i) {
                    const int weighted = (b.codes[i] - (has_min ? 0 : 32)) * b.sub_scales[g];
                    const double product = f16_t::from_float(static_cast<float>(weighted)).to_float() * d * scale *
                                           code_of(rows, t, c * kIntegerChunk + static_cast<int64_t>(i));
                    sum += product, magnitude += std::fabs(product);
                  }
                  if (!has_min) continue;
                  const auto at = ((c * padded / 8 + t / 8) * 2 + static_cast<int64_t>(g) / 4) * 64 + t % 8 * 8;
                  for (int64_t half = 0; half < 2; ++half) {
                    const double subtracted = static_cast<double>(b.min) * b.sub_mins[g] * scale *
                                              rows.sums[at + static_cast<int64_t>(g) % 4 * 2 + half].to_float() *
                                              0x1p12;
                    sum -= subtracted, magnitude += std::fabs(subtracted), rounded_size += std::fabs(subtracted);
                  }
                }
              }
              ASSERT_NEAR(y.view.as<float>()[t * out + n], sum, magnitude * 0x1p-20 + rounded_size * 0x1.01p-11 + 1e-30)
                  << type << " " << in << " x " << out << ": " << t << ", " << n << (extreme ? ", extreme" : "");
            }
          }
        }
      }
}

// Scales of each dtype, with zero points and without, of 128 columns and of a whole row.
constexpr const char* kGroupTypes[] = {"int4_g128_f16", "int4_g128_bf16_zeros", "int4_g128_f32", "int4_row_f32_zeros"};

// Sums of groups are integers, so that every rounding is known.
TEST_F(CudaInt8, ProductsOfGroupsHaveTheBitsOfTheDefinition) {
  EADEM_SKIP_WITHOUT_HOPPER();
  constexpr int64_t kHalf = cuda::kIntegerGroup;
  for (const bool extreme : {false, true})
    for (const char* type : kGroupTypes)
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>{256, 16}, {2304, 149}, {4096, 392}}) {
        const Weight weight(device_, type,
                            extreme ? weights_of_almost_one_value({out, in}, 2) : weights_of_all_sizes({out, in}, 2));
        const GroupEncoding& groups = *GroupEncoding::of(&weight.encoding);
        for (const int64_t tokens : {1, 3, 8, 13, 32, 33, 150}) {
          const Tensor values = extreme ? rows_of_one_size(tokens, in) : rows_of_all_sizes(tokens, in);
          const Tensor x = copy_to_device(device_, converted_on_host(values.view, DType::bf16).view);
          const Tensor codes = Tensor::on_host(DType::bf16, {tokens, in}, Int8Chunks::instance());
          Int8Chunks::instance().encode(codes.view, copy_to_host(*device_, x.view).view);
          const cuda::Int8ChunkPlanes rows = cuda::int8_chunk_planes(codes.view);
          const int64_t padded = (tokens + 7) / 8 * 8;
          const Tensor y = copy_to_host(*device_, linear(rounded(x).view, weight.view, {}, DType::f32).view);
          std::vector<uint8_t> of_row(static_cast<size_t>(in));
          for (int64_t n = 0; n < out; n += n % 5 + 1) {
            groups.unpack_codes(of_row.data(), weight.stored.view, n, 0, in);
            for (int64_t t = 0; t < tokens; t += t % 3 + 1) {
              float sum = 0, of_chunk = 0;
              for (int64_t begin = 0; begin < in; begin += kHalf) {
                const int64_t group = begin / groups.group_columns(in);
                const int zero = groups.zero(weight.stored.view, n, group);
                int dot = 0;
                for (int64_t k = begin; k < begin + kHalf; ++k)
                  dot += (of_row[static_cast<size_t>(k)] - zero) * static_cast<int>(code_of(rows, t, k));
                const float scale = groups.scale(weight.stored.view, n, group);
                if (begin % kIntegerChunk == 0) {
                  of_chunk = static_cast<float>(dot) * scale;
                } else {
                  of_chunk = std::fmaf(static_cast<float>(dot), scale, of_chunk);
                  sum = std::fmaf(of_chunk, rows.scales[begin / kIntegerChunk * padded + t], sum);
                }
              }
              ASSERT_EQ(y.view.as<float>()[t * out + n], sum)
                  << type << " " << in << " x " << out << ": " << t << ", " << n << (extreme ? ", extreme" : "");
            }
          }
        }
      }
}

TEST_F(CudaInt8, GroupsAndKQuantsShareNoLaunch) {
  EADEM_SKIP_WITHOUT_HOPPER();
  const Weight gate(device_, "q4_k", {64, 256}, 1), up(device_, "int4_g128_f16", {64, 256}, 2);
  for (const int64_t rows : {1, 40}) {
    const Tensor x = random_on(device_, DType::bf16, {rows, 256}, 4),
                 y = allocate_tensor(*device_, DType::bf16, {rows, 64});
    EXPECT_THROW(run(test::named(cuda::linear_gated_activation_kernels(), "cuda_int8"), "linear_gated_activation",
                     AttrsRef(LinearGatedActivationAttrs{.kind = ActivationKind::silu, .out_dtype = DType::bf16}),
                     {rounded(x).view, gate.view, up.view}, {y.view}),
                 DeviceError)
        << rows;
  }
}

TEST_F(CudaInt8, RowsDoNotDependOnTheRowsBesideThem) {
  EADEM_SKIP_WITHOUT_HOPPER();
  const int64_t most = 300;
  for (const char* type : {"q4_k", "q6_k", kGroupTypes[0], kGroupTypes[1]})
    // The last two shapes have few tiles of many chunks: integer_stream gives their blocks 16 and 12 warps. Of the
    // first one, more than 32 rows have too many tiles for integer_turns, and of the second one only more than 128.
    for (const auto& [out, in] :
         {std::pair<int64_t, int64_t>{8512, 512}, {4096, 4096}, {72, 4096}, {2000, 2560}, {4000, 5120}})
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const Weight weight(device_, type, {out, in}, 3);
        const Tensor x = random_on(device_, DType::bf16, {most, in}, 4), bias = random_on(device_, dtype, {out}, 5);
        const std::vector<char> all = bytes_of(*device_, linear(x.view, weight.view, bias, dtype).view);
        const int64_t row_bytes = out * static_cast<int64_t>(dtype_size(dtype));
        for (const int64_t count : {1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 257}) {
          const int64_t first = (most - count) / 3;
          const TensorView part(x.view.as<bf16_t>() + first * in, DType::bf16, {count, in});
          const std::vector<char> rows = bytes_of(*device_, linear(part, weight.view, bias, dtype).view);
          EXPECT_TRUE(std::equal(rows.begin(), rows.end(), all.begin() + first * row_bytes))
              << type << " " << out << " outputs, " << count << " rows";
        }
      }
}

TEST_F(CudaInt8, FusedProductsHaveTheBitsOfTheirParts) {
  EADEM_SKIP_WITHOUT_HOPPER();
  struct Size {
    int64_t in, out, rows;
  };
  // Blocks take several tiles of the last two kinds of sizes; for the last one they have a warp for each chunk.
  constexpr Size kSizes[] = {{2304, 512, 1},   {2304, 512, 9},    {2304, 512, 30},  {2304, 512, 64}, {2304, 512, 130},
                             {2304, 512, 300}, {2304, 512, 1500}, {4096, 2304, 1},  {4096, 2304, 8}, {4096, 2304, 16},
                             {4096, 2304, 17}, {4096, 2304, 25},  {4096, 2304, 32}, {4096, 8704, 8}};
  const std::array<const char*, 2> pairs[] = {{"q4_k", "q6_k"}, {"int4_g128_f16", "int4_g128_bf16_zeros"}};
  for (const auto& [first, second] : pairs)
    for (const auto& [in, out, rows] : kSizes) {
      SCOPED_TRACE(fmt::format("{} and {}, {} columns, {} rows", first, second, in, rows));
      const Weight gate(device_, first, {out, in}, 1), up(device_, second, {out, in}, 2),
          k(device_, first, {72, in}, 3);
      const Tensor x = random_on(device_, DType::bf16, {rows, in}, 4);
      const Rows codes = rounded(x);
      const Tensor a = linear(codes.view, gate.view, {}, DType::bf16), b = linear(codes.view, up.view, {}, DType::bf16),
                   c = linear(codes.view, k.view, {}, DType::bf16);
      EXPECT_EQ(bytes_of(*device_, linear(x.view, gate.view, {}, DType::bf16).view), bytes_of(*device_, a.view));
      const Tensor expected = allocate_tensor(*device_, DType::bf16, {rows, out}),
                   gated = allocate_tensor(*device_, DType::bf16, {rows, out});
      run(*cuda::gated_activation_kernels()[0], "gated_activation",
          AttrsRef(ActivationAttrs{.kind = ActivationKind::silu}), {a.view, b.view}, {expected.view});
      run(test::named(cuda::linear_gated_activation_kernels(), "cuda_int8"), "linear_gated_activation",
          AttrsRef(LinearGatedActivationAttrs{.kind = ActivationKind::silu, .out_dtype = DType::bf16}),
          {codes.view, gate.view, up.view}, {gated.view});
      EXPECT_EQ(bytes_of(*device_, gated.view), bytes_of(*device_, expected.view)) << rows;
      const Rows gated_codes = allocated(DType::bf16, {rows, out});
      run(test::named(cuda::linear_gated_activation_quantize_kernels(), "cuda_int8"),
          "linear_gated_activation_quantize",
          AttrsRef(LinearGatedActivationAttrs{
              .kind = ActivationKind::silu, .out_dtype = DType::bf16, .round_to = &Int8Chunks::instance()}),
          {codes.view, gate.view, up.view}, {gated_codes.view});
      EXPECT_EQ(bytes(gated_codes), bytes(rounded(expected))) << rows;
      const Tensor q = allocate_tensor(*device_, DType::bf16, {rows, out}),
                   key = allocate_tensor(*device_, DType::bf16, {rows, 72}),
                   value = allocate_tensor(*device_, DType::bf16, {rows, out});
      run(test::named(cuda::linear_qkv_kernels(), "cuda_int8"), "linear_qkv",
          AttrsRef(LinearAttrs{.out_dtype = DType::bf16}), {codes.view, gate.view, {}, k.view, {}, up.view, {}},
          {q.view, key.view, value.view});
      EXPECT_EQ(bytes_of(*device_, q.view), bytes_of(*device_, a.view)) << rows;
      EXPECT_EQ(bytes_of(*device_, key.view), bytes_of(*device_, c.view)) << rows;
      EXPECT_EQ(bytes_of(*device_, value.view), bytes_of(*device_, b.view)) << rows;
    }
}

TEST_F(CudaInt8, NormsThatRoundHaveTheBitsOfTheirParts) {
  for (const int64_t hidden : {256, 2048, 4096, 7168}) {
    const Tensor a = random_on(device_, DType::bf16, {5, hidden}, 1),
                 b = random_on(device_, DType::bf16, {5, hidden}, 2),
                 weight = random_on(device_, DType::bf16, {hidden}, 3);
    const RmsNormAttrs norm{.eps = 1e-5f};
    const RmsNormQuantizeAttrs attrs{norm, &Int8Chunks::instance()};
    const Tensor normed = allocate_tensor(*device_, DType::bf16, {5, hidden}),
                 sum = allocate_tensor(*device_, DType::bf16, {5, hidden}),
                 fused_sum = allocate_tensor(*device_, DType::bf16, {5, hidden});
    const Rows fused = allocated(DType::bf16, {5, hidden});
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

}  // namespace
}  // namespace eadem::kernels
