// SPDX-License-Identifier: Apache-2.0
//
// The packed layout of weights, and the promise of the matrix product over it: every output is one chain of
// additions over k, whatever the rows, the blocking and the threads.
#include "eadem/kernels/cpu/linear/packed_panels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "eadem/core/device/cpu_device.h"
#include "tests/kernels/run_product.h"
#include "tests/support/thread_counts.h"

namespace eadem::kernels::cpu {
namespace {

using Side = PackedPanels::Side;

constexpr DType kDtypes[] = {DType::f32, DType::bf16, DType::f16};

Tensor random_tensor(const Shape& shape, DType dtype, uint32_t seed) {
  Tensor values = Tensor::on_host(DType::f32, shape);
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (int64_t i = 0; i < shape.num_elements(); ++i) values.view.as<float>()[i] = uniform(random);
  return converted_on_host(values.view, dtype);
}

// A tensor that holds the encoding's only plane; the view has the logical shape.
Tensor packed(const PackedPanels& encoding, const TensorView& plain) {
  const PlaneSpec plane = encoding.planes(plain.shape)[0];
  Tensor result = Tensor::on_host(plane.dtype, plane.shape);
  result.view.shape = plain.shape;
  result.view.encoding = &encoding;
  encoding.encode(result.view, plain);
  return result;
}

TEST(PackedPanels, OneForEachDtypeAndSide) {
  for (DType dtype : kDtypes)
    for (Side side : {Side::normal, Side::transposed}) {
      const PackedPanels* encoding = PackedPanels::of(dtype, side);
      ASSERT_NE(encoding, nullptr);
      EXPECT_EQ(encoding, PackedPanels::of(dtype, side));  // equal encodings are equal pointers
      EXPECT_EQ(encoding->dtype(), dtype);
      EXPECT_EQ(encoding->side(), side);
    }
  for (DType dtype : {DType::f64, DType::i32, DType::i64, DType::u8})
    EXPECT_EQ(PackedPanels::of(dtype, Side::normal), nullptr);
}

TEST(PackedPanels, PairsAreOfBf16) {
  EXPECT_NE(PackedPanels::of(DType::bf16, Side::vnni), nullptr);
  EXPECT_EQ(PackedPanels::of(DType::bf16, Side::vnni)->side(), Side::vnni);
  EXPECT_EQ(PackedPanels::of(DType::f32, Side::vnni), nullptr);
  EXPECT_EQ(PackedPanels::of(DType::f16, Side::vnni), nullptr);
  EXPECT_EQ(PackedPanels::of(DType::f32, Side::vnni_transposed), nullptr);
}

TEST(PackedPanels, LayoutInPairs) {
  const PackedPanels& encoding = *PackedPanels::of(DType::bf16, Side::vnni);
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{1, 1}, {15, 31}, {16, 32}, {17, 33}, {33, 97}}) {
    const Tensor weight = random_tensor({out, in}, DType::bf16, 1);
    const Tensor panels = packed(encoding, weight.view);
    const int64_t filled = (in + 31) / 32 * 32;
    ASSERT_EQ(encoding.planes({out, in})[0].shape, (Shape{(out + 15) / 16, filled / 2, 16, 2}));
    const auto* data = panels.view.as<bf16_t>();
    for (int64_t p = 0; p < (out + 15) / 16; ++p)
      for (int64_t k = 0; k < filled; ++k)
        for (int64_t lane = 0; lane < 16; ++lane) {
          const int64_t n = 16 * p + lane;
          const float expected = n < out && k < in ? weight.view.as<bf16_t>()[n * in + k].to_float() : 0.0f;
          ASSERT_EQ(data[p * filled * 16 + (k / 2 * 16 + lane) * 2 + k % 2].to_float(), expected)
              << out << " x " << in << ": " << p << " " << k;
        }
    std::vector<float> row(static_cast<size_t>(in));
    for (int64_t n = 0; n < out; ++n) {
      encoding.decode_row(row.data(), panels.view, n);
      for (int64_t k = 0; k < in; ++k)
        ASSERT_EQ(row[static_cast<size_t>(k)], weight.view.as<bf16_t>()[n * in + k].to_float());
    }
  }
}

TEST(PackedPanels, TransposedPairsAreThoseOfTheTransposedMatrix) {
  const PackedPanels &transposed = *PackedPanels::of(DType::bf16, Side::vnni_transposed),
                     &encoding = *PackedPanels::of(DType::bf16, Side::vnni);
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{1, 1}, {31, 15}, {32, 16}, {33, 17}, {97, 33}}) {
    const Tensor weight = random_tensor({out, in}, DType::bf16, 1), turned = Tensor::on_host(DType::bf16, {in, out});
    for (int64_t n = 0; n < out; ++n)
      for (int64_t k = 0; k < in; ++k) turned.view.as<bf16_t>()[k * out + n] = weight.view.as<bf16_t>()[n * in + k];
    const Tensor panels = packed(transposed, weight.view), expected = packed(encoding, turned.view);
    ASSERT_EQ(transposed.planes({out, in})[0].shape, encoding.planes({in, out})[0].shape);
    EXPECT_EQ(
        std::memcmp(panels.view.data, expected.view.data, static_cast<size_t>(encoded_bytes(encoding, {in, out}))), 0)
        << out << " x " << in;
    std::vector<float> row(static_cast<size_t>(in));
    for (int64_t n = 0; n < out; ++n) {
      transposed.decode_row(row.data(), panels.view, n);
      for (int64_t k = 0; k < in; ++k)
        ASSERT_EQ(row[static_cast<size_t>(k)], weight.view.as<bf16_t>()[n * in + k].to_float());
    }
  }
}

// Rows of whole lines, of less than one and of some values more, in panels that are full or not.
TEST(PackedPanels, LayoutInEveryDtype) {
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{16, 31}, {16, 32}, {33, 97}, {48, 128}, {31, 75}})
    for (DType dtype : kDtypes) {
      const Tensor weight = random_tensor({out, in}, dtype, 5), wide = converted_on_host(weight.view, DType::f32);
      const Tensor panels = packed(*PackedPanels::of(dtype, Side::normal), weight.view);
      const Tensor data = converted_on_host(TensorView(panels.view.data, dtype, {(out + 15) / 16, in, 16}), DType::f32);
      for (int64_t p = 0; p < (out + 15) / 16; ++p)
        for (int64_t k = 0; k < in; ++k)
          for (int64_t n = 16 * p; n < 16 * p + 16; ++n)
            ASSERT_EQ(data.view.as<float>()[(p * in + k) * 16 + n % 16],
                      n < out ? wide.view.as<float>()[n * in + k] : 0.0f)
                << dtype_name(dtype) << " " << out << " x " << in << ": " << n << " " << k;
    }
}

// rows_of_piece: other rows than those that it names may hold anything.
TEST(PackedPanels, APieceReadsItsRowsAlone) {
  for (DType dtype : kDtypes)
    for (Side side : {Side::normal, Side::vnni}) {
      const PackedPanels* encoding = PackedPanels::of(dtype, side);
      if (encoding == nullptr) continue;
      const Shape shape{40, 70};
      const int64_t rows = encoding->rows_of_piece(shape);
      ASSERT_EQ(rows, 16);
      const Tensor weight = random_tensor(shape, dtype, 6), whole = packed(*encoding, weight.view);
      const int64_t row_bytes = 70 * static_cast<int64_t>(dtype_size(dtype));
      const int64_t bytes = encoded_bytes(*encoding, shape), piece_bytes = bytes / 3;
      for (int64_t piece = 0; piece < 3; ++piece) {
        const Tensor other = random_tensor(shape, dtype, 7), some = packed(*encoding, other.view);
        const TensorView own = other.view.rows(16 * piece, std::min<int64_t>(16, 40 - 16 * piece));
        std::memcpy(own.data, weight.view.rows(16 * piece, 1).data, static_cast<size_t>(own.shape[0] * row_bytes));
        encoding->encode_pieces(some.view, other.view, piece, piece + 1);
        EXPECT_EQ(std::memcmp(static_cast<const char*>(some.view.data) + piece * piece_bytes,
                              static_cast<const char*>(whole.view.data) + piece * piece_bytes,
                              static_cast<size_t>(piece_bytes)),
                  0)
            << encoding->name() << " " << piece;
      }
    }
  EXPECT_EQ(PackedPanels::of(DType::f32, Side::transposed)->rows_of_piece({40, 70}), 0);
}

TEST(PackedPanels, RefusesWhatIsNoMatrix) {
  try {
    PackedPanels::of(DType::f32, Side::normal)->planes(Shape{2, 3, 4});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "packed_panels_f32 packs matrices [out, in]; the tensor is [2, 3, 4]");
  }
}

TEST(PackedPanels, Layout) {
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{1, 1}, {15, 17}, {16, 16}, {17, 5}, {33, 40}, {48, 1}}) {
    const Tensor weight = random_tensor({out, in}, DType::f32, 1);
    for (Side side : {Side::normal, Side::transposed}) {
      const Tensor panels = packed(*PackedPanels::of(DType::f32, side), weight.view);
      const int64_t outputs = side == Side::normal ? out : in, k_size = side == Side::normal ? in : out;
      const float* data = panels.view.as<float>();
      for (int64_t p = 0; p < (outputs + 15) / 16; ++p)
        for (int64_t k = 0; k < k_size; ++k)
          for (int64_t lane = 0; lane < 16; ++lane) {
            const int64_t n = 16 * p + lane;
            const float expected = n >= outputs           ? 0.0f
                                   : side == Side::normal ? weight.view.as<float>()[n * in + k]
                                                          : weight.view.as<float>()[k * in + n];
            ASSERT_EQ(data[(p * k_size + k) * 16 + lane], expected) << out << " x " << in << ": " << p << " " << k;
          }
    }
  }
}

TEST(PackedPanels, DecodeGivesTheWeightBack) {
  for (DType dtype : kDtypes)
    for (Side side : {Side::normal, Side::transposed}) {
      const Tensor weight = random_tensor({35, 50}, dtype, 2);
      const Tensor panels = packed(*PackedPanels::of(dtype, side), weight.view);
      Tensor plain = Tensor::on_host(DType::f32, {35, 50});
      PackedPanels::of(dtype, side)->decode(plain.view, panels.view);
      const Tensor expected = converted_on_host(weight.view, DType::f32);
      EXPECT_EQ(std::memcmp(plain.view.data, expected.view.data, static_cast<size_t>(plain.view.size_bytes())), 0);
    }
}

TEST(PackedPanels, RoundsOnceWhenTheWeightIsWider) {
  const Tensor weight = random_tensor({20, 30}, DType::f32, 3);
  for (DType dtype : {DType::bf16, DType::f16}) {
    const PackedPanels& encoding = *PackedPanels::of(dtype, Side::normal);
    const Tensor from_f32 = packed(encoding, weight.view);
    const Tensor from_rounded = packed(encoding, converted_on_host(weight.view, dtype).view);
    EXPECT_EQ(std::memcmp(from_f32.view.data, from_rounded.view.data,
                          static_cast<size_t>(encoding.planes({20, 30})[0].size_bytes())),
              0);
  }
}

TEST(PackedPanels, IsEncodedInPieces) {
  const Tensor weight = random_tensor({200, 130}, DType::f32, 4);
  for (Side side : {Side::normal, Side::transposed}) {
    const PackedPanels& encoding = *PackedPanels::of(DType::f32, side);
    const Tensor expected = packed(encoding, weight.view);
    Tensor actual = Tensor::on_host(DType::f32, encoding.planes({200, 130})[0].shape);
    const int64_t pieces = encoding.num_pieces({200, 130});
    EXPECT_EQ(pieces, side == Side::normal ? 13 : 9);
    for (int64_t end = pieces; end > 0; --end) encoding.encode_pieces(actual.view, weight.view, end - 1, end);
    EXPECT_EQ(std::memcmp(actual.view.data, expected.view.data, static_cast<size_t>(actual.view.size_bytes())), 0);
  }
}

TEST(PackedPanels, GivesSingleRows) {
  const Tensor weight = random_tensor({40, 33}, DType::f32, 5);
  for (Side side : {Side::normal, Side::transposed}) {
    const PackedPanels& encoding = *PackedPanels::of(DType::f32, side);
    const Tensor panels = packed(encoding, weight.view);
    std::vector<float> row(33);
    for (int64_t n = 0; n < 40; ++n) {
      encoding.decode_row(row.data(), panels.view, n);
      EXPECT_EQ(std::memcmp(row.data(), weight.view.as<float>() + n * 33, 33 * sizeof(float)), 0);
    }
  }
}

class MatmulChain : public testing::TestWithParam<Isa> {
 protected:
  bool fused() const { return GetParam() != Isa::scalar && GetParam() != Isa::sse4; }
  float step(float x, float w, float sum) const {
    const float product = x * w;  // volatile is not needed: contraction is off
    return fused() ? std::fma(x, w, sum) : product + sum;
  }
  std::vector<std::shared_ptr<CpuDevice>> devices() const {
    std::vector<std::shared_ptr<CpuDevice>> result;
    for (int threads : test::thread_counts({1, 3}))
      result.push_back(std::make_shared<CpuDevice>(DeviceOptions{.num_threads = threads, .isa = isa_name(GetParam())}));
    return result;
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, MatmulChain, testing::ValuesIn(available_isas()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

// Bit for bit, with rows on either side of every tile, of the widening threshold (8) and of a block of rows (192), k on
// either side of a block (256), and panels that are full, ragged, single and grouped.
TEST_P(MatmulChain, EveryOutputIsOneChainOverK) {
  for (const auto& device : devices()) {
    for (DType dtype : kDtypes)
      for (const int64_t k_size : {1, 255, 600})
        for (const int64_t outputs : {5, 64, 145}) {
          const Tensor weight = random_tensor({outputs, k_size}, dtype, 5);
          const Tensor wide = converted_on_host(weight.view, DType::f32);
          const Tensor panels = packed(*PackedPanels::of(dtype, Side::normal), weight.view);
          for (const int64_t rows : {1, 2, 3, 5, 6, 8, 9, 13, 200}) {
            if (rows == 200 && k_size != 600) continue;  // the slow scalar chain below is the cost of this test
            const Tensor x = random_tensor({rows, k_size}, DType::f32, 6);
            const Tensor y = Tensor::on_host(DType::f32, {rows, outputs});
            Matmul m;
            m.rows = rows, m.k_size = k_size, m.outputs = outputs;
            m.a = x.view.as<float>(), m.a_row_stride = k_size;
            m.b.data = panels.view.data;
            m.y = y.view.as<float>();
            run_product(*device, {.b_dtype = dtype}, m);
            const int64_t row_step = rows == 200 ? 37 : 1;
            for (int64_t r = 0; r < rows; r += row_step)
              for (int64_t n = 0; n < outputs; ++n) {
                float sum = 0;
                for (int64_t k = 0; k < k_size; ++k)
                  sum = step(m.a[r * k_size + k], wide.view.as<float>()[n * k_size + k], sum);
                ASSERT_EQ(m.y[r * outputs + n], sum) << dtype_name(dtype) << " " << rows << " x " << k_size << " -> "
                                                     << outputs << " at " << r << ", " << n;
              }
          }
        }
  }
}

// The gradient of a weight: one chain over the tokens, then one addition to what was there.
TEST_P(MatmulChain, ProductsOfMatricesAddOneChain) {
  for (const auto& device : devices()) {
    for (const int64_t tokens : {1, 257, 520})
      for (const auto& [out, in] : {std::pair<int64_t, int64_t>{3, 5}, {14, 64}, {200, 19}, {7, 300}}) {
        const Tensor dy = random_tensor({tokens, out}, DType::f32, 7), x = random_tensor({tokens, in}, DType::f32, 8);
        const Tensor before = random_tensor({out, in}, DType::f32, 9);
        const Tensor y = converted_on_host(before.view, DType::f32);
        Matmul m;
        m.rows = out, m.k_size = tokens, m.outputs = in;
        m.a = dy.view.as<float>(), m.a_row_stride = 1, m.a_k_stride = out;
        m.b.data = x.view.data, m.y = y.view.as<float>();
        run_product(*device, {.source = MatmulTypes::Source::matrix, .finish = MatmulTypes::Finish::accumulate}, m);
        for (int64_t r = 0; r<out; r += out> 100 ? 13 : 1)
          for (int64_t n = 0; n < in; ++n) {
            float sum = 0;
            for (int64_t t = 0; t < tokens; ++t) sum = step(m.a[t * out + r], x.view.as<float>()[t * in + n], sum);
            ASSERT_EQ(m.y[r * in + n], before.view.as<float>()[r * in + n] + sum)
                << tokens << ": " << out << " x " << in << " at " << r << ", " << n;
          }
      }
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu
