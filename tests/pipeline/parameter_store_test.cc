// SPDX-License-Identifier: Apache-2.0
//
// ParameterStore and weights in block types: whatever layout a file has and whatever layout is declared, the values are
// the ones that the blocks mean, on every rank.
#include "eadem/pipeline/parameter_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "eadem/core/device/cpu_device.h"
#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_panels.h"
#include "tests/core/fake_system.h"
#include "tests/support/refusal.h"

namespace eadem::pipeline {
namespace {

using test::refusal;

constexpr int64_t kRows = 34, kColumns = 512;

Tensor random_values(const Shape& shape, double size = 0.02) {
  Tensor values = Tensor::on_host(DType::f32, shape);
  uint32_t state = 1;
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    state = state * 1664525u + 1013904223u;
    values.view.as<float>()[i] = static_cast<float>(size * (static_cast<double>(state >> 8) / (1 << 23) - 1));
  }
  return values;
}

Tensor encoded(const BlockEncoding& encoding, const TensorView& values) {
  const Tensor result = Tensor::in_one_piece(DType::f32, values.shape, encoding);
  encoding.encode(result.view, values);
  return result;
}

Tensor decoded(const TensorView& view) {
  Tensor result = Tensor::on_host(DType::f32, view.shape);
  view.encoding->decode(result.view, view);
  return result;
}

// Rows [row, row + rows) and columns [column, column + columns).
Tensor slice(const TensorView& whole, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  Tensor result = Tensor::on_host(DType::f32, Shape{rows, columns});
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(result.view.as<float>() + r * columns, whole.as<float>() + (row + r) * whole.shape[1] + column,
                static_cast<size_t>(columns) * sizeof(float));
  return result;
}

void expect_same_bits(const TensorView& actual, const TensorView& expected) {
  ASSERT_EQ(actual.shape, expected.shape);
  ASSERT_EQ(actual.dtype, expected.dtype);
  EXPECT_EQ(std::memcmp(actual.data, expected.data, static_cast<size_t>(expected.size_bytes())), 0);
}

void expect_words(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << text << "\nlacks: " << word;
}

class EncodedParameters : public testing::TestWithParam<const BlockEncoding*> {
 protected:
  // Loads `whole` into a store that declares `part` and reads it as `layout`, and returns the stored tensor.
  Tensor loaded(const TensorView& whole, TensorType part, const Encoding* layout = nullptr, int rank = 0,
                int num_ranks = 1) const {
    ParameterStore store(device_, rank, num_ranks);
    store.declare("w", part);
    store.layout("w", layout);
    store.load("w", whole, "test");
    return store.to_host("w");
  }
  TensorType stored_type(int64_t rows = kRows, int64_t columns = kColumns) const {
    return TensorType(DType::f32, {rows, columns}, &encoding_);
  }

  const BlockEncoding& encoding_ = *GetParam();
  std::shared_ptr<Device> device_ = open_device("cpu", {.num_threads = 2});
  Tensor values_ = random_values({kRows, kColumns});
  Tensor stored_ = encoded(encoding_, values_.view);
  Tensor meant_ = decoded(stored_.view);
};

INSTANTIATE_TEST_SUITE_P(All, EncodedParameters, testing::ValuesIn(BlockEncoding::writable()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(EncodedParameters, EncodedStaysAsItIs) {
  ParameterStore store(device_);
  store.declare("w", stored_type());
  const TensorView layout = store.layout("w", nullptr);
  store.load("w", stored_.view, "test");
  const int64_t bytes = encoded_bytes(encoding_, stored_.shape());
  EXPECT_EQ(std::memcmp(layout.data, stored_.view.data, static_cast<size_t>(bytes)), 0);
  EXPECT_EQ(store.size_bytes(), bytes);
  expect_same_bits(store.to_host("w").view, meant_.view);
}

TEST_P(EncodedParameters, EncodedDeclaredPlainIsDecoded) {
  expect_same_bits(loaded(stored_.view, TensorType(DType::f32, {kRows, kColumns})).view, meant_.view);
  expect_same_bits(loaded(stored_.view, TensorType(DType::bf16, {kRows, kColumns})).view,
                   converted_on_host(meant_.view, DType::bf16).view);
}

TEST_P(EncodedParameters, PlainDeclaredEncodedIsQuantized) {
  expect_same_bits(loaded(values_.view, stored_type()).view, meant_.view);
  // From 16 bits the quantizer sees what 16 bits hold.
  const Tensor rounded = converted_on_host(values_.view, DType::bf16);
  const Tensor again = encoded(encoding_, rounded.view);
  expect_same_bits(loaded(rounded.view, stored_type()).view, decoded(again.view).view);
}

TEST_P(EncodedParameters, AnotherEncodingIsDecodedAndQuantized) {
  const BlockEncoding& other = *BlockEncoding::find(encoding_.name() == "q8_0" ? "q5_1" : "q8_0");
  const Tensor source = encoded(other, values_.view);
  const Tensor expected = encoded(encoding_, decoded(source.view).view);
  expect_same_bits(loaded(source.view, stored_type()).view, decoded(expected.view).view);
}

TEST_P(EncodedParameters, PackedDecodesExactly) {
  const Encoding* packing = kernels::cpu::QuantizedPanels::of(&encoding_);
  ASSERT_NE(packing, nullptr);
  expect_same_bits(loaded(stored_.view, stored_type(), packing).view, meant_.view);
  expect_same_bits(loaded(values_.view, stored_type(), packing).view, meant_.view);
}

TEST_P(EncodedParameters, EachRankHasItsSlice) {
  const Encoding* packing = kernels::cpu::QuantizedPanels::of(&encoding_);
  for (int rank : {0, 1}) {
    TensorType rows = stored_type(kRows / 2, kColumns), columns = stored_type(kRows, kColumns / 2);
    rows.sharding = Sharding::along(0);
    columns.sharding = Sharding::along(1);
    const Tensor row_slice = slice(meant_.view, rank * kRows / 2, kRows / 2, 0, kColumns);
    const Tensor column_slice = slice(meant_.view, 0, kRows, rank * kColumns / 2, kColumns / 2);
    for (const Encoding* layout : {static_cast<const Encoding*>(nullptr), packing}) {
      expect_same_bits(loaded(stored_.view, rows, layout, rank, 2).view, row_slice.view);
      expect_same_bits(loaded(stored_.view, columns, layout, rank, 2).view, column_slice.view);
    }
    // Declared plain, blocks do not hinder a cut.
    TensorType plain(DType::f32, {kRows, kColumns / 2});
    plain.sharding = Sharding::along(1);
    expect_same_bits(loaded(stored_.view, plain, nullptr, rank, 2).view, column_slice.view);
  }
}

TEST_P(EncodedParameters, ACutThroughABlockIsRefused) {
  const int64_t block = encoding_.format().block_size;
  const Tensor whole = encoded(encoding_, random_values({2, 3 * block}).view);
  TensorType half = stored_type(2, 3 * block / 2);
  half.sharding = Sharding::along(1);
  expect_words(refusal([&] { loaded(whole.view, half, nullptr, 0, 2); }),
               {"InvalidArgument", std::string(encoding_.name()).c_str(), std::to_string(3 * block / 2).c_str(),
                std::to_string(block).c_str()});
}

// Decoding makes infinities where a scale is not finite, or where it is and a level times it is not.
TEST_P(EncodedParameters, BlocksThatAreNotFiniteAreRefusedAtTheirPlace) {
  const BlockFormat& format = encoding_.format();
  const int64_t blocks_before = kColumns / format.block_size * 3 + 1;  // the second block of row 3
  const auto spoil = [&](const std::function<void(BlockParts&)>& change) {
    Tensor spoiled = encoded(encoding_, values_.view);
    uint8_t* block = static_cast<uint8_t*>(spoiled.view.data) + blocks_before * format.block_bytes;
    BlockParts parts;
    encoding_.unpack(parts, block);
    change(parts);
    encoding_.pack(block, parts);
    const std::string place = fmt::format("index {}", blocks_before * format.block_size);
    for (const Encoding* declared : {static_cast<const Encoding*>(&encoding_), static_cast<const Encoding*>(nullptr)})
      expect_words(refusal([&] {
                     loaded(spoiled.view, TensorType(DType::f32, {kRows, kColumns}, declared));
                   }),
                   {"InvalidArgument: test: 'w'", "not finite", place.c_str()});
    // Where the values are looked at while they are packed.
    expect_words(refusal([&] { loaded(spoiled.view, stored_type(), kernels::cpu::QuantizedPanels::of(&encoding_)); }),
                 {"InvalidArgument: test: 'w'", "not finite", place.c_str()});
  };
  if (format.scale == BlockFormat::Scale::f16) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity()}) {
      spoil([&](BlockParts& parts) { parts.scale = bad; });
      if (format.has_min) spoil([&](BlockParts& parts) { parts.min = bad; });
    }
  } else {
    spoil([&](BlockParts& parts) {
      parts.scale = 0x1p126f;  // finite, but twelve times it is not
      parts.codes[0] = 7;
    });
  }
}

// A load that packs plain values names the first value that is not finite, on any number of threads. The parameter then
// counts as missing until a load succeeds.
TEST(PackedParameter, ValuesThatAreNotFiniteAreRefusedAtTheFirst) {
  const Encoding* packing = kernels::cpu::PackedPanels::of(DType::bf16, kernels::cpu::PackedPanels::Side::normal);
  const Tensor good = converted_on_host(random_values({kRows, kColumns}).view, DType::bf16);
  for (int threads : {1, 2, 3})
    for (const bool also_plain : {false, true}) {
      ParameterStore store(open_device("cpu", {.num_threads = threads}));
      store.declare("w", TensorType(DType::bf16, {kRows, kColumns}));
      store.layout("w", packing);
      if (also_plain) store.layout("w", nullptr);
      for (const int64_t row : {int64_t{0}, int64_t{15}, int64_t{16}, int64_t{33}}) {
        Tensor bad = converted_on_host(good.view, DType::bf16);
        for (const int64_t r : {row, kRows - 1}) bad.view.as<bf16_t>()[r * kColumns + 7] = bf16_t{0x7f80};
        expect_words(refusal([&] { store.load("w", bad.view, "f.safetensors"); }),
                     {"InvalidArgument: f.safetensors: 'w'", "not finite",
                      fmt::format("index {} of", row * kColumns + 7).c_str()});
        expect_words(refusal([&] { store.require_all_loaded("f.safetensors"); }), {"NotFound", "'w'"});
      }
      EXPECT_EQ(refusal([&] { store.load("w", good.view, "f.safetensors"); }), "");
      EXPECT_EQ(refusal([&] { store.require_all_loaded("f.safetensors"); }), "");
      const Tensor kept = store.to_host("w");
      EXPECT_EQ(std::memcmp(kept.view.data, good.view.data, static_cast<size_t>(good.view.size_bytes())), 0);
      // A refused load leaves the values of an earlier one.
      Tensor bad = converted_on_host(good.view, DType::bf16);
      bad.view.as<bf16_t>()[kRows * kColumns - 1] = bf16_t{0xffff};
      expect_words(refusal([&] { store.load("w", bad.view, "f.safetensors"); }), {"not finite"});
      const Tensor again = store.to_host("w");
      EXPECT_EQ(std::memcmp(again.view.data, good.view.data, static_cast<size_t>(good.view.size_bytes())), 0);
    }
}

// A value beyond the largest scale is an error like any other, on whatever thread it is met: the first one is told, and
// the store can be used afterwards.
TEST(EncodedParameter, WhatCannotBeQuantizedIsRefusedByName) {
  const Tensor good = random_values({kRows, kColumns});
  for (int threads : {1, 2, 3}) {
    ParameterStore store(open_device("cpu", {.num_threads = threads}));
    store.declare("w", TensorType(DType::f32, {kRows, kColumns}, BlockEncoding::find("q4_0")));
    store.layout("w", nullptr);
    for (int64_t row = 0; row < kRows; ++row) {
      const Tensor bad = slice(good.view, 0, kRows, 0, kColumns);
      for (int64_t r : {row, kRows - 1}) bad.view.as<float>()[r * kColumns + 7] = 3e38f;
      expect_words(refusal([&] { store.load("w", bad.view, "f.safetensors"); }),
                   {"InvalidArgument: f.safetensors: 'w'", fmt::format("row {}:", row).c_str(), "column 7"});
    }
    EXPECT_EQ(refusal([&] { store.load("w", good.view, "f.safetensors"); }), "");
  }
}

// A packing of rows that notes which thread wrote each of them.
class NotingRows final : public Encoding {
 public:
  std::string_view name() const override { return "noting_rows"; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override { return {{"data", DType::f32, shape}}; }
  int64_t num_pieces(const Shape& shape) const override { return shape[0]; }
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override {
    const int64_t columns = values.shape[1];
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(values.as<float>() + row * columns, columns, encoded.as<float>() + row * columns);
      written_by[static_cast<size_t>(row)] = std::this_thread::get_id();
    }
  }
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override {
    std::copy_n(encoded.as<float>() + index * encoded.shape[1], encoded.shape[1], row);
  }
  void slice(const TensorView&, const TensorView&, int, int64_t) const override {}

  mutable std::vector<std::thread::id> written_by;
};

// On a machine of two nodes the panels of a weight are first written by the threads of decode, each a contiguous share:
// the share that parallel_shares gives it first in every product.
TEST(PackedParameter, IsFirstWrittenByTheThreadThatReadsIt) {
  constexpr int kThreads = 4;
  const auto device =
      std::make_shared<CpuDevice>(DeviceOptions{.num_threads = kThreads, .prefill_threads = 8}, two_node_topology());
  std::vector<std::thread::id> worker_ids(kThreads);
  device->pool().parallel_own(kThreads, kThreads, [&](int64_t, int worker) {
    worker_ids[static_cast<size_t>(worker)] = std::this_thread::get_id();
  });
  for (int64_t rows : {1, 3, 64, 100, 1000}) {
    NotingRows packing;
    packing.written_by.resize(static_cast<size_t>(rows));
    ParameterStore store(device);
    store.declare("w", TensorType(DType::f32, {rows, 8}));
    store.layout("w", &packing);
    store.layout("w", nullptr);
    const Tensor values = random_values({rows, 8});
    store.load("w", values.view, "test");
    expect_same_bits(store.to_host("w").view, values.view);
    // Rows are written in up to 256 tasks of rows that lie together.
    const int64_t tasks = std::min<int64_t>(rows, 256);
    for (int64_t task = 0; task < tasks; ++task) {
      int owner = 0;
      while (task >= ThreadPool::share_begin(tasks, kThreads, owner + 1)) ++owner;
      for (int64_t row = task * rows / tasks; row < (task + 1) * rows / tasks; ++row)
        EXPECT_EQ(packing.written_by[static_cast<size_t>(row)], worker_ids[static_cast<size_t>(owner)])
            << "row " << row << " of " << rows;
    }
  }
}

// ---- Values that stay where they are -----------------------------------------------------------------------------

TEST(ParametersInPlace, AFormThatWouldBeACopyRefersToTheValues) {
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 2});
  const Encoding* packing = kernels::cpu::QuantizedPanels::of(BlockEncoding::find("q8_0"));
  const Tensor stored = encoded(*BlockEncoding::find("q8_0"), random_values({kRows, kColumns}).view);
  const auto owner = std::make_shared<int>(0);
  {
    ParameterStore store(device);
    store.declare("w", TensorType(DType::f32, {kRows, kColumns}, stored.view.encoding));
    store.layout("w", nullptr);
    store.layout("w", packing);
    EXPECT_EQ(store.placement(), 0u);
    store.load("w", stored.view, "f", owner);
    EXPECT_EQ(store.layout("w", nullptr).data, stored.view.data);
    EXPECT_NE(store.layout("w", packing).data, stored.view.data);
    EXPECT_EQ(store.placement(), 1u);
    EXPECT_EQ(owner.use_count(), 2);
    expect_same_bits(store.to_host("w").view, decoded(stored.view).view);

    // Other values later: in memory of the store's own.
    const Tensor other = encoded(*BlockEncoding::find("q8_0"), random_values({kRows, kColumns}, 0.5).view);
    const Tensor before = decoded(stored.view);
    store.load("w", other.view, "f");
    EXPECT_NE(store.layout("w", nullptr).data, stored.view.data);
    EXPECT_EQ(store.placement(), 2u);
    EXPECT_EQ(owner.use_count(), 1);
    expect_same_bits(store.to_host("w").view, decoded(other.view).view);
    expect_same_bits(decoded(stored.view).view, before.view);
  }
  EXPECT_EQ(owner.use_count(), 1);
}

// A load that may leave the packing for later: programs read the values where they lie until pack_stored().
TEST(ParametersInPlace, APackingMayBeMadeLater) {
  using kernels::cpu::PackedPanels;
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 2});
  const Encoding* packing = PackedPanels::of(DType::bf16, PackedPanels::Side::normal);
  const Tensor values = converted_on_host(random_values({kRows, kColumns}).view, DType::bf16);
  const auto owner = std::make_shared<int>(0);
  int released = 0;
  const auto load = [&](ParameterStore& store, const std::shared_ptr<const void>& keeps) {
    store.load("w", values.view, "f", keeps, [&] { ++released; });
  };
  const auto declared = [&](ParameterStore& store) {
    store.declare("w", TensorType(DType::bf16, {kRows, kColumns}));
    return store.layout("w", packing).data;
  };
  ParameterStore store(device);
  void* const packed = declared(store);
  load(store, owner);
  EXPECT_EQ(refusal([&] { store.require_all_loaded("f"); }), "");
  EXPECT_TRUE(store.has_stored());
  EXPECT_EQ(store.layout("w", packing).data, values.view.data);
  EXPECT_EQ(store.layout("w", packing).encoding, nullptr);
  EXPECT_EQ(store.placement(), 1u);
  EXPECT_EQ(owner.use_count(), 2);
  EXPECT_EQ(released, 0);
  expect_same_bits(converted_on_host(store.to_host("w").view, DType::f32).view,
                   converted_on_host(values.view, DType::f32).view);
  store.pack_stored();
  EXPECT_FALSE(store.has_stored());
  EXPECT_EQ(store.layout("w", packing).data, packed);
  EXPECT_EQ(store.placement(), 2u);
  EXPECT_EQ(owner.use_count(), 1);
  EXPECT_EQ(released, 2);
  expect_same_bits(decoded(store.layout("w", packing)).view, converted_on_host(values.view, DType::f32).view);
  store.pack_stored();
  EXPECT_EQ(released, 2);

  // Packed at once: without an owner, and where some program needs it.
  for (const bool needed : {false, true}) {
    ParameterStore other(device);
    declared(other);
    if (needed) other.require_packed("w", packing);
    load(other, needed ? owner : nullptr);
    EXPECT_FALSE(other.has_stored());
    EXPECT_EQ(other.layout("w", packing).encoding, packing);
  }
  EXPECT_EQ(released, 4);

  // A program that needs it may also come later, and so may other values.
  ParameterStore third(device), fourth(device);
  declared(third), declared(fourth);
  load(third, owner), load(fourth, owner);
  third.require_packed("w", packing);
  EXPECT_FALSE(third.has_stored());
  EXPECT_EQ(released, 5);
  const Tensor more = converted_on_host(random_values({kRows, kColumns}, 0.5).view, DType::bf16);
  fourth.load("w", more.view, "f");
  EXPECT_FALSE(fourth.has_stored());
  EXPECT_EQ(released, 6);
  expect_same_bits(decoded(fourth.layout("w", packing)).view, converted_on_host(more.view, DType::f32).view);
  EXPECT_EQ(owner.use_count(), 1);
}

TEST(ParametersInPlace, LaterPackingRefusesWhatIsNotFiniteAtOnce) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 2});
    ParameterStore store(device);
    store.declare("w", TensorType(dtype, {kRows, kColumns + 3}));
    store.layout("w", kernels::cpu::PackedPanels::of(dtype, kernels::cpu::PackedPanels::Side::normal));
    // The ends of runs of 512 values, and a run that is not whole.
    for (const int64_t at : {int64_t{0}, int64_t{511}, int64_t{512}, kRows * (kColumns + 3) - 1})
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        Tensor wide = random_values({kRows, kColumns + 3}, 3e4);  // large, so that exponents are nearly full
        wide.view.as<float>()[at] = bad;
        const Tensor values = converted_on_host(wide.view, dtype);
        expect_words(refusal([&] { store.load("w", values.view, "f", std::make_shared<int>(0), [] {}); }),
                     {"not finite", fmt::format("index {} of", at).c_str()});
        EXPECT_FALSE(store.has_stored());
      }
  }
}

TEST(ParametersInPlace, ConvertedAndCutValuesAreCopies) {
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 1});
  const Tensor values = random_values({kRows, kColumns});
  const auto owner = std::make_shared<int>(0);
  ParameterStore rounded(device), half(device, 1, 2);
  rounded.declare("w", TensorType(DType::bf16, {kRows, kColumns}));
  TensorType part(DType::f32, {kRows / 2, kColumns});
  part.sharding = Sharding::along(0);
  half.declare("w", part);
  for (ParameterStore* store : {&rounded, &half}) {
    store->layout("w", nullptr);
    store->load("w", values.view, "f", owner);
    EXPECT_EQ(store->placement(), 0u);
    EXPECT_EQ(owner.use_count(), 1);
  }
}

// What programs read in columns is loaded, listed and given back as the parameter that it is.
TEST(ParameterColumns, AreFilledFromTheWhole) {
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 1});
  const Tensor values = random_values({kRows, kColumns});
  for (const Encoding* encoding :
       {static_cast<const Encoding*>(nullptr), static_cast<const Encoding*>(BlockEncoding::find("q8_0"))})
    for (const int rank : {0, 1}) {
      ParameterStore store(device, rank, 2);
      // The second half of the columns, and of that the first 64 and the others.
      for (const auto& [name, begin, size] : {std::tuple{"w.a", 0, 64}, {"w.b", 64, 192}}) {
        TensorType type(DType::f32, {kRows, size}, encoding);
        type.sharding = Sharding::along(1, kColumns);
        store.declare_columns(name, type, "w", begin, kColumns / 2);
        store.layout(name, nullptr);
      }
      EXPECT_EQ(store.names(), std::vector<std::string>{"w"});
      EXPECT_TRUE(store.contains("w"));
      EXPECT_FALSE(store.contains("w.a"));
      EXPECT_EQ(store.whole_shape("w"), (Shape{kRows, kColumns}));
      EXPECT_EQ(store.num_parameters(), kRows * kColumns / 2);
      EXPECT_EQ(refusal([&] { store.require_all_loaded("f"); }),
                fmt::format("NotFound: f: 1 of the model's 1 tensors are missing: 'w' {}", to_string(store.type("w"))));
      EXPECT_EQ(refusal([&] { store.load("w.a", values.view, "f"); }),
                "NotFound: f: the model has no parameter 'w.a'; the nearest names are 'w'");
      store.load("w", values.view, "f");
      EXPECT_EQ(refusal([&] { store.require_all_loaded("f"); }), "");
      const Tensor expected =
          encoding == nullptr ? values : decoded(encoded(*BlockEncoding::find("q8_0"), values.view).view);
      const int64_t first = rank * kColumns / 2;
      expect_same_bits(store.to_host("w.a").view, slice(expected.view, 0, kRows, first, 64).view);
      expect_same_bits(store.to_host("w.b").view, slice(expected.view, 0, kRows, first + 64, 192).view);
      expect_same_bits(store.to_host("w").view, slice(expected.view, 0, kRows, first, kColumns / 2).view);
      int64_t bytes = 0;
      for (const ParameterStore::LayoutOf& layout : store.layouts()) {
        EXPECT_EQ(layout.parameter, "w");
        bytes += layout.size_bytes;
      }
      EXPECT_EQ(bytes, store.size_bytes());
    }
}

TEST(ParameterColumns, AParameterIsLoadedWhenAllOfThemArePlaced) {
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 1});
  const Tensor values = random_values({kRows, kColumns});
  ParameterStore store(device);
  for (const auto& [name, begin] : {std::pair{"w.a", 0}, {"w.b", kColumns / 2}}) {
    store.declare_columns(name, TensorType(DType::f32, {kRows, kColumns / 2}), "w", begin, kColumns);
    store.layout(name, nullptr);
  }
  const auto owner = std::make_shared<int>(0);
  store.place("w.b", nullptr, values.view.data, owner);
  EXPECT_NE(refusal([&] { store.require_all_loaded("f"); }), "");
  store.place("w.a", nullptr, values.view.data, owner);
  EXPECT_EQ(refusal([&] { store.require_all_loaded("f"); }), "");
}

// A scale of a whole row is that of one rank where a rank's part is cut afterwards.
TEST(ParameterColumns, AreCutAfterTheyAreEncodedWhereThatIsAsked) {
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 1});
  const GroupEncoding& rows = *GroupEncoding::find("int8_row_f32");
  const Tensor values = random_values({kRows, kColumns});
  Tensor whole = Tensor::in_one_piece(DType::f32, Shape{kRows, kColumns}, rows);
  rows.encode(whole.view, values.view);
  const Tensor expected = slice(decoded(whole.view).view, 0, kRows, kColumns / 2, kColumns / 2);
  for (const bool asked : {false, true}) {
    ParameterStore store(device, 1, 2);
    if (asked) store.encode_before_cutting();
    TensorType type(DType::f32, {kRows, kColumns / 2}, &rows);
    type.sharding = Sharding::along(1);
    store.declare("w", type);
    store.layout("w", nullptr);
    store.load("w", values.view, "f");
    const Tensor own = store.to_host("w");
    EXPECT_EQ(std::memcmp(own.view.data, expected.view.data, static_cast<size_t>(own.view.size_bytes())) == 0, asked);
  }
}

TEST(ParametersInPlace, AParameterIsLoadedWhenEveryFormIsPlaced) {
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 1});
  const Encoding* packing = kernels::cpu::QuantizedPanels::of(BlockEncoding::find("q8_0"));
  const Tensor stored = encoded(*BlockEncoding::find("q8_0"), random_values({kRows, kColumns}).view);
  const TensorType type(DType::f32, {kRows, kColumns}, stored.view.encoding);
  ParameterStore packed(device), store(device);
  for (ParameterStore* each : {&packed, &store}) {
    each->declare("w", type);
    each->layout("w", packing);
    each->layout("w", nullptr);
  }
  packed.load("w", stored.view, "f");
  const std::vector<ParameterStore::LayoutOf> layouts = packed.layouts();
  ASSERT_EQ(layouts.size(), 2u);
  EXPECT_EQ(layouts[0].packing, nullptr);
  EXPECT_EQ(layouts[1].packing, packing);
  EXPECT_EQ(layouts[0].size_bytes + layouts[1].size_bytes, packed.size_bytes());

  const auto owner = std::make_shared<int>(0);
  store.place("w", packing, layouts[1].view.data, owner);
  EXPECT_NE(refusal([&] { store.require_all_loaded("f"); }), "");
  store.place("w", nullptr, layouts[0].view.data, owner);
  EXPECT_EQ(refusal([&] { store.require_all_loaded("f"); }), "");
  EXPECT_EQ(store.layout("w", packing).data, layouts[1].view.data);
  EXPECT_EQ(store.layout("w", packing).plane(1), layouts[1].view.plane(1));
  expect_same_bits(store.to_host("w").view, packed.to_host("w").view);
}

}  // namespace
}  // namespace eadem::pipeline
