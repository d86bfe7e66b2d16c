// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/tensor.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/core/error.h"

namespace eadem {
namespace {

class TensorDeathTest : public testing::Test {
 protected:
  TensorDeathTest() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST(Shape, CountsAndText) {
  EXPECT_EQ(Shape().num_elements(), 1);
  EXPECT_EQ((Shape{3, 4, 5}).num_elements(), 60);
  EXPECT_EQ((Shape{3, 4, 5}).num_rows(), 12);
  EXPECT_EQ((Shape{3, 0, 5}).num_elements(), 0);
  EXPECT_EQ((Shape{3, 4, 5}).back(), 5);
  EXPECT_EQ(to_string(Shape{4096, 4000}), "[4096, 4000]");
  EXPECT_EQ(to_string(Shape{}), "[]");
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_FALSE((Shape{2, 3}) == (Shape{3, 2}));
  EXPECT_FALSE((Shape{6}) == (Shape{6, 1}));
}

TEST(TensorView, IsContiguousRowMajor) {
  float data[24];
  const TensorView view(data, DType::f32, Shape{2, 3, 4});
  EXPECT_EQ(view.strides, (Shape{12, 4, 1}));
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(view.size_bytes(), 96);
  EXPECT_EQ(to_string(view), "f32 [2, 3, 4]");
  TensorView strided = view;
  strided.strides = Shape{24, 8, 2};
  EXPECT_FALSE(strided.is_contiguous());
  TensorView one_row = view;
  one_row.shape[0] = 1;
  one_row.strides[0] = 1000;  // the stride of a single row does not matter
  EXPECT_TRUE(one_row.is_contiguous());
}

TEST(TensorView, RowsAndReshapeShareTheBytes) {
  std::vector<float> data(24);
  std::iota(data.begin(), data.end(), 0.0f);
  const TensorView view(data.data(), DType::f32, Shape{6, 4});
  const TensorView middle = view.rows(2, 3);
  EXPECT_EQ(middle.shape, (Shape{3, 4}));
  EXPECT_EQ(middle.as<float>()[0], 8);
  EXPECT_EQ(view.rows(6, 0).num_elements(), 0);
  const TensorView cube = middle.reshaped(Shape{3, 2, 2});
  EXPECT_EQ(cube.data, middle.data);
  EXPECT_EQ(cube.strides, (Shape{4, 2, 1}));
}

TEST_F(TensorDeathTest, MisuseIsABug) {
  float data[4];
  const TensorView view(data, DType::f32, Shape{4});
  EXPECT_DEATH((void)view.as<bf16_t>(), "view of f32 read as bf16");
  EXPECT_DEATH((void)view.rows(3, 2), "rows \\[3, 5\\) of \\[4\\]");
  EXPECT_DEATH((void)view.reshaped(Shape{5}), "reshape \\[4\\] to \\[5\\]");
  EXPECT_DEATH((void)Shape({1, 2, 3, 4, 5, 6}), "rank 6 > 5");
}

TEST(Tensor, OnHostIsAlignedAndSharesOwnership) {
  for (int64_t size : {0, 1, 63, 64, 65}) {
    const Tensor tensor = Tensor::on_host(DType::u8, Shape{size});
    EXPECT_TRUE(tensor.defined());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.view.data) % 64, 0u);
    if (size > 0) std::memset(tensor.view.data, 1, static_cast<size_t>(size));
  }
  Tensor copy;
  EXPECT_FALSE(copy.defined());
  {
    const Tensor original = Tensor::on_host(DType::i64, Shape{2});
    original.view.as<int64_t>()[1] = 7;
    copy = original;
  }
  EXPECT_EQ(copy.view.as<int64_t>()[1], 7) << "the bytes outlive the first owner";
}

TEST(Tensor, InOnePieceHasItsPlanesOneAfterAnother) {
  const Encoding& encoding = RowEncoding::int8();
  const Tensor tensor = Tensor::in_one_piece(DType::f32, Shape{2, 3}, encoding);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.view.data) % 64, 0u);
  EXPECT_EQ(tensor.view.plane(1), static_cast<std::byte*>(tensor.view.data) + 6);
  EXPECT_EQ(tensor.view.encoding, &encoding);
  EXPECT_EQ(tensor.shape(), (Shape{2, 3}));
  std::memset(tensor.view.data, 1, static_cast<size_t>(encoded_bytes(encoding, Shape{2, 3})));
}

TEST(Tensor, ConvertsBetweenFloatingDtypes) {
  const Tensor wide = Tensor::on_host(DType::f32, Shape{4});
  const float values[] = {1, -2.5f, 1.00390625f, 1e30f};  // the third is a tie of bf16, to even
  std::memcpy(wide.view.data, values, sizeof(values));
  const Tensor brain = converted_on_host(wide.view, DType::bf16);
  EXPECT_EQ(brain.view.as<bf16_t>()[1].to_float(), -2.5f);
  EXPECT_EQ(brain.view.as<bf16_t>()[2].to_float(), 1.0f);
  const Tensor half = converted_on_host(wide.view, DType::f16);
  EXPECT_EQ(half.view.as<f16_t>()[3].bits, 0x7c00);
  const Tensor twice = converted_on_host(brain.view, DType::f64);
  EXPECT_EQ(twice.view.as<double>()[1], -2.5);
  EXPECT_EQ(converted_on_host(wide.view, DType::f32).view.as<float>()[3], 1e30f);
  EXPECT_EQ(converted_on_host(Tensor::on_host(DType::f32, Shape{0}).view, DType::f16).view.num_elements(), 0);
}

TEST(Buffer, FreesOnceAndMoves) {
  static int freed;
  freed = 0;
  char byte = 0;
  {
    Buffer first(
        &byte, 1, [](void*, int64_t, void*) { ++freed; }, nullptr);
    Buffer second = std::move(first);
    EXPECT_EQ(first.data(), nullptr);  // NOLINT: the state after a move is part of the contract
    EXPECT_EQ(second.data(), &byte);
    second = Buffer();
    EXPECT_EQ(freed, 1);
  }
  EXPECT_EQ(freed, 1);
}

#ifdef __GLIBC__
TEST(Tensor, MemoryOfTensorsOnTheHostIsUsedAgain) {
  constexpr int64_t kBytes = 8 << 20;
  // A block of this size that was freed makes malloc take later ones from the heap.
  std::free(std::malloc(3 * kBytes));
  constexpr size_t kProbe = 64 << 10;
  const size_t used = mallinfo2().uordblks;
  const auto probe = std::make_unique<std::byte[]>(kProbe);
  if (mallinfo2().uordblks < used + kProbe)
    GTEST_SKIP() << "memory is not from the C library's allocator, the only one that says how large its heap is: a "
                    "sanitizer's takes its place";
  const auto heap = [] { return static_cast<int64_t>(mallinfo2().arena); };
  const int64_t before = heap();
  std::vector<std::unique_ptr<std::byte[]>> kept;
  for (size_t i = 0; i < 32; ++i) {
    const Tensor tensor = Tensor::on_host(DType::u8, Shape{kBytes});
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.view.data) % 64, 0U);
    kept.push_back(std::make_unique<std::byte[]>(100 + 40 * i));  // between blocks, so that the heap cannot shrink
  }
  EXPECT_LE(heap() - before, 2 * kBytes);
}
#endif

TEST(Error, KindsAndMessages) {
  const InvalidArgument plain(std::string("braces {} stay"));
  EXPECT_STREQ(plain.what(), "braces {} stay");
  EXPECT_STREQ(plain.kind(), "InvalidArgument");
  try {
    throw DataCorrupted("{}: {} of {}", "file", 1, 2);
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "file: 1 of 2");
    EXPECT_STREQ(error.kind(), "DataCorrupted");
  }
}

}  // namespace
}  // namespace eadem
