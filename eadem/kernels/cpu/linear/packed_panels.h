// SPDX-License-Identifier: Apache-2.0
//
// PackedPanels: the layout in which the CPU's matrix products read a weight [out, in].
//
//   data [ceil(out / 16), in, 16]: panel p, row k holds weight[16 p, k] … weight[16 p + 15, k]; outputs that the last
//   panel lacks are zero. The dtype is the weight's.
//
// Sixteen outputs side by side fill one vector of AVX-512, two of AVX2, four of SSE and NEON, so every instruction
// set reads the same bytes, and the lanes of a vector are outputs: each output is one chain of additions over k.
// The transposed variant packs weight^T, whose outputs are the weight's inputs, for gradients of activations:
//   data [ceil(in / 16), out, 16].
// The VNNI-interleaved variant, for bf16 only, is read by products of bf16 (amx.h, bf16_dots.h). A word holds two
// neighbouring k of one output. k is padded with zeros to a multiple of 32, so that 1024 bytes form one tile:
//   data [ceil(out / 16), ceil(in / 32) * 16, 16, 2].
// Its transposed variant packs weight^T: data [ceil(in / 16), ceil(out / 32) * 16, 16, 2].
#pragma once

#include "eadem/core/encoding.h"
#include "eadem/core/machine/isa.h"
#include "eadem/core/machine/matmul_input.h"
#include "eadem/core/tensor.h"

namespace eadem::kernels::cpu {

inline constexpr int64_t kPanelWidth = 16;
inline constexpr int64_t kVnniTile = 32;  // values of k that a tile of interleaved values holds

class PackedPanels final : public Encoding {
 public:
  enum class Side : uint8_t { normal, transposed, vnni, vnni_transposed };

  // Returns the encoding of weights of `dtype` (f32, bf16 or f16; interleaved bf16), or null for any other dtype.
  static const PackedPanels* of(DType dtype, Side side);

  // Returns the packing that forward products on `isa` read for a plain weight of `dtype`, if they may round their
  // activations to `x`: VNNI-interleaved where there are products of bf16.
  static const PackedPanels* of_forward(DType dtype, Isa isa, MatmulInput x) {
    return of(dtype, multiplies_in_bf16(dtype, isa, x) ? Side::vnni : Side::normal);
  }
  // The packing that gradients of activations read.
  static const PackedPanels* of_backward(DType dtype, Isa isa, MatmulInput x) {
    return of(dtype, multiplies_in_bf16(dtype, isa, x) ? Side::vnni_transposed : Side::transposed);
  }
  // Whether products on `isa` with a plain weight of `dtype` are products of bf16, if they may round to `x`.
  static bool multiplies_in_bf16(DType dtype, Isa isa, MatmulInput x) {
    return dtype == DType::bf16 && has_bf16_products(isa) && may_round_to(MatmulInput::bf16, x);
  }

  static bool is_transposed(Side side) { return side == Side::transposed || side == Side::vnni_transposed; }
  static bool is_interleaved(Side side) { return side == Side::vnni || side == Side::vnni_transposed; }

  std::string_view name() const override { return name_; }
  DType dtype() const { return dtype_; }
  Side side() const { return side_; }

  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // panels
  int64_t rows_of_piece(const Shape&) const override { return is_transposed(side_) ? 0 : kPanelWidth; }
  void encode_pieces(const TensorView& encoded, const TensorView& plain, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  PackedPanels(DType dtype, Side side, std::string_view name) : dtype_(dtype), side_(side), name_(name) {}

  DType dtype_;
  Side side_;
  std::string_view name_;
};

}  // namespace eadem::kernels::cpu
