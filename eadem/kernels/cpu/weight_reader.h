// SPDX-License-Identifier: Apache-2.0
//
// How matrix products read a weight in one of the packings of this backend.
#pragma once

#include <algorithm>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/kernels/cpu/linear/fp8_panels.h"
#include "eadem/kernels/cpu/linear/group_panels.h"
#include "eadem/kernels/cpu/linear/matmul.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"

namespace eadem::kernels::cpu {

// Reads matrices in the packing that a kernel asked for.
class WeightReader {
 public:
  WeightReader() = default;
  // For products that may round their activations to `x`.
  WeightReader(const Encoding* packing, MatmulInput x) : packing_(packing) {
    const auto quantized = x == MatmulInput::int8 ? MatmulTypes::Source::quantized : MatmulTypes::Source::decoded;
    if (const QuantizedPanels* blocks = QuantizedPanels::of(packing)) {
      types_.source = quantized;
      types_.layout = &blocks->layout();
      has_super_scales_ = true;
      may_be_stored_ = true;
    } else if (const GroupPanels* groups = GroupPanels::of(packing)) {
      const GroupFormat& format = groups->stored().format();
      types_.source = quantized;
      types_.layout = &groups->layout();
      if (format.has_zeros) zeros_plane_ = 2;
      if (format.has_order) order_plane_ = format.has_zeros ? 3 : 2;
      types_.has_order = format.has_order;
    } else if (const Fp8Panels* floats = Fp8Panels::of(packing)) {
      types_.source = MatmulTypes::Source::fp8;
      types_.is_e5m2 = floats->stored().format().kind == Fp8Format::Kind::e5m2;
      block_columns_ = floats->stored().format().block_columns;
    } else {
      const auto& panels = static_cast<const PackedPanels&>(*packing);
      types_.source = source_of(panels.side());
      types_.b_dtype = panels.dtype();
      may_be_stored_ = panels.rows_of_piece(Shape{}) > 0;
    }
  }

  // The types of a product with the weight, without its finish.
  const MatmulTypes& types() const { return types_; }

  // Bytes of one packed panel of a weight that may arrive as it is stored, in whole cache lines; 0: it may not.
  int64_t panel_bytes(int64_t k_size) const {
    if (!may_be_stored_) return 0;
    return (encoded_bytes(*packing_, Shape{kPanelWidth, k_size}) + 63) / 64 * 64;
  }

  // As `read`, of a weight that may be as it is stored. The reader and the view must outlive the product.
  MatmulWeight read_or_pack(const TensorView& weight) const {
    if (weight.encoding == packing_ || !may_be_stored_) return read(weight);
    MatmulWeight b;
    b.quantized.layout = types_.layout;
    b.stored = &weight;
    b.reader = this;
    return b;
  }

  // Packs some panels of a stored weight to `memory`, which has panel_bytes() for each, and reads them there.
  MatmulWeight pack(void* memory, const TensorView& stored, int64_t panel, int64_t panels) const {
    const int64_t begin = panel * kPanelWidth, rows = std::min(panels * kPanelWidth, stored.shape[0] - begin);
    const BlockEncoding* blocks = BlockEncoding::of(stored.encoding);
    const TensorView some = blocks == nullptr ? stored.rows(begin, rows) : blocks->rows(stored, begin, rows);
    const TensorView packed = view_of_planes(memory, *packing_, stored.dtype, some.shape);
    packing_->encode_pieces(packed, some, 0, panels);
    return read(packed);
  }

  MatmulWeight read(const TensorView& weight) const {
    EADEM_CHECK(weight.encoding == packing_, "weight {} is not packed as was asked", to_string(weight));
    MatmulWeight b;
    switch (types_.source) {
      case MatmulTypes::Source::quantized:
      case MatmulTypes::Source::decoded:
        b.quantized.layout = types_.layout;
        b.quantized.quants = static_cast<const uint8_t*>(weight.plane(0));
        b.quantized.scales = static_cast<const uint8_t*>(weight.plane(1));
        if (has_super_scales_) b.quantized.super_scales = static_cast<const f16_t*>(weight.plane(2));
        if (zeros_plane_ > 0) b.quantized.zeros = static_cast<const uint8_t*>(weight.plane(zeros_plane_));
        if (order_plane_ > 0) b.quantized.order = static_cast<const int32_t*>(weight.plane(order_plane_));
        return b;
      case MatmulTypes::Source::fp8:
        b.fp8 = {static_cast<const uint8_t*>(weight.plane(0)), static_cast<const float*>(weight.plane(1)),
                 block_columns_};
        return b;
      default: b.data = weight.data; return b;
    }
  }

 private:
  const Encoding* packing_ = nullptr;
  MatmulTypes types_;
  bool has_super_scales_ = false, may_be_stored_ = false;
  int zeros_plane_ = 0, order_plane_ = 0;  // 0: the weight has none
  int64_t block_columns_ = 0;
};

}  // namespace eadem::kernels::cpu
