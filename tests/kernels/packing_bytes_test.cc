// SPDX-License-Identifier: Apache-2.0
//
// The bytes that packings write, by their hashes: pack files (models/pack_cache.h) hold them from one version of the
// program to another. Whoever changes a layout, or what a packing makes of the same weight, raises kPackingVersion in
// models/pack_cache.cc and writes the new hash here.
#include <gtest/gtest.h>

#include <vector>

#include "eadem/core/tensor.h"
#include "eadem/kernels/cpu/linear/fp8_panels.h"
#include "eadem/kernels/cpu/linear/group_panels.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_panels.h"

namespace eadem::kernels::cpu {
namespace {

const Shape kShape{40, 512};  // the last panel is half empty

// FNV-1a.
void add(uint64_t& hash, const void* data, int64_t size) {
  for (int64_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
}

// Bytes that are finite numbers in every type, codes of 4 bits where `mask` is 15.
void fill(void* data, int64_t size, uint8_t mask) {
  uint32_t state = 1;
  for (int64_t i = 0; i < size; ++i) {
    state = state * 1664525u + 1013904223u;
    static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(state >> 24 & 0x3b & mask);
  }
}

void add_packed(uint64_t& hash, const Encoding& packing, const TensorView& stored) {
  const int64_t size = encoded_bytes(packing, kShape);
  std::vector<uint8_t> packed(static_cast<size_t>(size), 0xa5);  // every byte is written
  packing.encode(view_of_planes(packed.data(), packing, DType::f32, kShape), stored);
  add(hash, packing.name().data(), static_cast<int64_t>(packing.name().size()));
  add(hash, packed.data(), size);
}

// A weight in a stored encoding, whatever its planes.
Tensor stored_as(const Encoding& encoding, uint8_t mask = 0xff) {
  Tensor stored = Tensor::on_host(DType::f32, kShape, encoding);
  const std::vector<PlaneSpec> planes = encoding.planes(kShape);
  for (size_t p = 0; p < planes.size(); ++p) {
    void* data = stored.view.plane(static_cast<int>(p));
    fill(data, planes[p].size_bytes(), planes[p].name == "zeros" ? mask : 0xff);
    if (planes[p].dtype == DType::i32)  // an order of columns
      for (int32_t j = 0; j < kShape[1]; ++j) static_cast<int32_t*>(data)[j] = static_cast<int32_t>(j * 5 % kShape[1]);
  }
  return stored;
}

constexpr uint64_t kStart = 0xcbf29ce484222325u;

TEST(PackingBytes, OfPlainWeights) {
  uint64_t hash = kStart;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const auto side : {PackedPanels::Side::normal, PackedPanels::Side::transposed}) {
      const Tensor plain = Tensor::on_host(dtype, kShape);
      fill(plain.view.data, plain.view.size_bytes(), 0xff);
      add_packed(hash, *PackedPanels::of(dtype, side), plain.view);
    }
  EXPECT_EQ(hash, 0x63a227d4224e8b79u);
}

TEST(PackingBytes, OfBlockTypes) {
  uint64_t hash = kStart;
  for (const BlockEncoding* encoding : BlockEncoding::writable())
    add_packed(hash, *QuantizedPanels::of(encoding), stored_as(*encoding).view);
  EXPECT_EQ(hash, 0xde1258fd922c0975u);
}

TEST(PackingBytes, OfGroups) {
  uint64_t hash = kStart;
  for (const GroupEncoding& encoding : GroupEncoding::all())
    add_packed(hash, *GroupPanels::of(&encoding), stored_as(encoding, 15).view);
  EXPECT_EQ(hash, 0x183b6c8977d03505u);
}

TEST(PackingBytes, OfFloatsOf8Bits) {
  uint64_t hash = kStart;
  for (const Fp8Encoding& encoding : Fp8Encoding::all())
    add_packed(hash, *Fp8Panels::of(&encoding), stored_as(encoding).view);
  EXPECT_EQ(hash, 0xd22e60544df5bb67u);
}

}  // namespace
}  // namespace eadem::kernels::cpu
