// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/quantized/quantized_panels.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>

#include "eadem/core/lookups.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"
#include "eadem/kernels/cpu/linear/transpose.h"

namespace eadem::kernels::cpu {

namespace {

using Scales = QuantizedLayout::Scales;

// A word holds four codes of one output, k = 4 i … 4 i + 3; vector i holds the words of 16 outputs.
using StepCodes = std::array<std::array<uint32_t, kPanelWidth>, kStepVectors>;

// While a panel is packed, its rows in the file are prefetched this many bytes ahead.
constexpr int64_t kFetchFileRow = 512;

constexpr uint32_t splat(uint32_t byte) { return byte * 0x01010101u; }

// Writes bits [kShift, kShift + kBits) of every code, packing 8 / kBits codes into a byte: kBits vectors in all. The
// innermost loop runs over outputs and the shifts are constant, so that compilers vectorize it.
template <int kShift, int kBits>
uint8_t* pack_field(uint8_t* out, const StepCodes& codes) {
  constexpr uint32_t kMask = splat((1u << kBits) - 1);
  for (size_t i = 0; i < kBits; ++i, out += 64) {
    uint32_t words[kPanelWidth];
    for (size_t n = 0; n < kPanelWidth; ++n) words[n] = codes[i][n] >> kShift & kMask;
#pragma GCC unroll 8
    for (size_t j = 1; j * kBits < kStepVectors; ++j)
      for (size_t n = 0; n < kPanelWidth; ++n) words[n] |= (codes[i + j * kBits][n] >> kShift & kMask) << (j * kBits);
    std::memcpy(out, words, 64);
  }
  return out;
}

template <int kCodeBits>
void pack_step(uint8_t* quants, const StepCodes& codes) {
  constexpr int kLow = low_bits(kCodeBits);
  quants = pack_field<0, kLow>(quants, codes);
  if constexpr (kCodeBits > kLow) pack_field<kLow, kCodeBits - kLow>(quants, codes);
}

void pack_step(uint8_t* quants, const StepCodes& codes, int code_bits) {
  switch (code_bits) {
    case 2: return pack_step<2>(quants, codes);
    case 3: return pack_step<3>(quants, codes);
    case 4: return pack_step<4>(quants, codes);
    case 5: return pack_step<5>(quants, codes);
    case 6: return pack_step<6>(quants, codes);
    default: return pack_step<8>(quants, codes);
  }
}

// The code of output `lane` at value k of a step.
int code_at(const uint8_t* quants, int code_bits, int64_t lane, int64_t k) {
  const auto field = [&](const uint8_t* base, int bits) {
    const int64_t vector = k / 4 % bits, slot = k / 4 / bits;
    return base[(vector * kPanelWidth + lane) * 4 + k % 4] >> (slot * bits) & ((1 << bits) - 1);
  };
  const int low = low_bits(code_bits);
  const int value = field(quants, low);
  return code_bits == low ? value : value | field(quants + 64 * low, code_bits - low) << low;
}

QuantizedLayout layout_of(const BlockFormat& format) {
  QuantizedLayout layout{};
  layout.code_bits = format.code_bits;
  layout.group_size = format.group_size;
  layout.block_size = format.block_size;
  layout.has_min = format.has_min;
  layout.scale_unit = format.scale_unit;
  layout.has_table = format.codebook != nullptr;
  layout.folded = layout.format().folded();
  if (format.sub_scale_max == 1 && !layout.folded)
    layout.scales = format.scale == BlockFormat::Scale::f16 ? Scales::f16 : Scales::exponents;
  else
    layout.scales =
        format.has_min && format.sub_scale_max <= 15 && format.sub_min_max <= 15 ? Scales::nibbles : Scales::bytes;
  layout.zero = format.zero;
  const auto is_known = [&] {
    return std::find(std::begin(kQuantizedFormats), std::end(kQuantizedFormats), layout.format()) !=
           std::end(kQuantizedFormats);
  };
  if (layout.has_table) {
    // The fewer bits an entry has, the more products of it fit 16 bits.
    const auto [least, most] = std::minmax_element(format.codebook, format.codebook + (1 << format.code_bits));
    layout.zero = -*least;
    layout.table_bits = std::bit_width(static_cast<unsigned>(*most - *least));
    while (layout.table_bits < 8 && !is_known()) ++layout.table_bits;
    if (layout.table_bits == 8) layout.zero = 128;
    for (size_t i = 0; i < size_t{1} << format.code_bits; ++i)
      layout.table[i] = static_cast<uint8_t>(format.codebook[i] + layout.zero);
  }
  EADEM_CHECK(is_known() && layout.group_size * layout.groups() == kStep, "{}: no product for such blocks",
              format.name);
  // Products use one super-scale for a whole chunk, so a chunk must be one block.
  EADEM_CHECK(!layout.has_super_scales() || layout.block_size == kChunkSteps * kStep, "{}: blocks of {}", format.name,
              layout.block_size);
  return layout;
}

// One block of each output of a panel.
using PanelParts = std::array<BlockParts, kPanelWidth>;

// Writes the codes of one step of all outputs, one byte each, to `to` [kStepVectors, 16, 4]: output n has them at
// codes[n] + k.
void gather_step(uint8_t* to, const std::array<const uint8_t*, kPanelWidth>& codes, int64_t k, uint32_t flips) {
  for (size_t n = 0; n < kPanelWidth; n += 4)
    for (int64_t i = 0; i < kStepVectors; i += 4)
      transpose_words(to + i * 64 + n * 4, codes.data() + n, k + 4 * i, flips);
}

// Pointers to the planes of one panel.
struct Panel {
  uint8_t* quants;
  uint8_t* scales;
  f16_t* super_scales;
};

Panel panel_of(const TensorView& encoded, const QuantizedLayout& layout, int64_t p) {
  const int64_t k_size = encoded.shape[1];
  return {static_cast<uint8_t*>(encoded.plane(0)) + p * (k_size / kStep) * layout.quant_bytes(),
          static_cast<uint8_t*>(encoded.plane(1)) + p * (k_size / kStep) * layout.scale_bytes(),
          layout.has_super_scales() ? static_cast<f16_t*>(encoded.plane(2)) +
                                          p * (k_size / layout.block_size) * layout.super_columns() * kPanelWidth
                                    : nullptr};
}

// Whether a block is its scale in f16 and then each code - zero as a signed byte, as in q8_0.
bool has_plain_bytes(const BlockFormat& format) {
  return format.code_bits == 8 && format.block_bytes == format.block_size + static_cast<int>(sizeof(f16_t));
}

// Packs a panel from such blocks, straight from the rows of the file. Processors do not prefetch 16 streams by
// themselves.
void copy_plain_bytes(const Panel& panel, const uint8_t* rows, int64_t row_bytes, int64_t blocks,
                      const BlockFormat& format) {
  constexpr int64_t kScaleBytes = sizeof(f16_t);
  const uint32_t flips = splat(static_cast<uint32_t>(format.zero));
  const int64_t block_steps = format.block_size / kStep;
  auto* scales = reinterpret_cast<f16_t*>(panel.scales);
  for (int64_t b = 0; b < blocks; ++b, rows += format.block_bytes) {
    std::array<const uint8_t*, kPanelWidth> codes;
    for (size_t n = 0; n < kPanelWidth; ++n) {
      const uint8_t* block = rows + static_cast<int64_t>(n) * row_bytes;
      fetch_near(block + kFetchFileRow);
      std::memcpy(&scales[b * kPanelWidth + static_cast<int64_t>(n)], block, kScaleBytes);
      codes[n] = block + kScaleBytes;
    }
    for (int64_t s = 0; s < block_steps; ++s)
      gather_step(panel.quants + (b * block_steps + s) * kStepBytes, codes, s * kStep, flips);
  }
}

// The power of two 2^(e - 128) as e, and back. It is subnormal where e is 0 or 1. The 0 of outputs that are not there
// becomes some power.
uint8_t exponent_of(float power) {
  const uint32_t bits = std::bit_cast<uint32_t>(power);
  return static_cast<uint8_t>(bits < 0x00800000u ? bits >> 22 : (bits >> 23) + 1);
}
float power_of(uint8_t e) { return std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1u) << 23); }

// Writes the scales of block `b` of all outputs.
void pack_scales(const Panel& panel, const QuantizedLayout& layout, int64_t b, const PanelParts& parts) {
  if (layout.scales == Scales::exponents) {
    for (size_t n = 0; n < kPanelWidth; ++n)
      panel.scales[b * kPanelWidth + static_cast<int64_t>(n)] = exponent_of(parts[n].scale);
    return;
  }
  if (!layout.has_super_scales()) {
    f16_t* out = reinterpret_cast<f16_t*>(panel.scales) + b * layout.scale_columns() * kPanelWidth;
    for (size_t n = 0; n < kPanelWidth; ++n) out[n] = f16_t::from_float(parts[n].scale);
    if (layout.has_min)
      for (size_t n = 0; n < kPanelWidth; ++n) out[kPanelWidth + n] = f16_t::from_float(parts[n].min);
    return;
  }
  const int64_t groups = layout.groups(), steps = layout.block_size / kStep, step_bytes = layout.scale_bytes();
  uint8_t* block = panel.scales + b * steps * step_bytes;
  f16_t* supers = panel.super_scales + b * layout.super_columns() * kPanelWidth;
  for (int64_t n = 0; n < kPanelWidth; ++n) {
    const BlockParts& part = parts[static_cast<size_t>(n)];
    supers[n] = f16_t::from_float(part.scale / layout.scale_unit);
    if (layout.has_min) supers[kPanelWidth + n] = f16_t::from_float(part.min);
    uint8_t* out = block + n * groups;
    size_t i = 0;
    for (int64_t s = 0; s < steps; ++s, out += step_bytes)
      for (int64_t g = 0; g < groups; ++g, ++i) {
        out[g] = static_cast<uint8_t>(part.sub_scales[i]);
        if (layout.scales == Scales::nibbles)
          out[g] = static_cast<uint8_t>(out[g] | part.sub_mins[i] << 4);
        else if (layout.has_min)
          out[g + kPanelWidth] = part.sub_mins[i];
      }
  }
}

}  // namespace

const QuantizedPanels* QuantizedPanels::of(const Encoding* encoding) {
  count_lookup();
  static const auto kAll = [] {
    std::vector<std::unique_ptr<const QuantizedPanels>> all;
    for (const BlockEncoding* stored : BlockEncoding::all())
      all.push_back(std::make_unique<const QuantizedPanels>(*stored));
    return all;
  }();
  for (const auto& panels : kAll)
    if (&panels->stored_ == encoding || panels.get() == encoding) return panels.get();
  return nullptr;
}

QuantizedPanels::QuantizedPanels(const BlockEncoding& stored)
    : stored_(stored),
      layout_(layout_of(stored.format())),
      name_("quantized_panels_" + std::string(stored.format().name)) {}

std::vector<PlaneSpec> QuantizedPanels::planes(const Shape& shape) const {
  if (shape.rank() != 2 || shape[1] % stored_.format().block_size != 0)
    throw InvalidArgument("{} packs matrices [out, in] with in a multiple of {}; the tensor is {}", name_,
                          stored_.format().block_size, to_string(shape));
  const int64_t panels = num_pieces(shape), k_size = shape[1];
  const int64_t steps = k_size / kStep;
  std::vector<PlaneSpec> result = {{"quants", DType::u8, Shape{panels, steps, layout_.quant_bytes()}}};
  if (layout_.has_super_scales()) {
    result.push_back({"scales", DType::u8, Shape{panels, steps, layout_.scale_bytes()}});
    result.push_back(
        {"super_scales", DType::f16, Shape{panels, k_size / layout_.block_size, layout_.super_columns(), kPanelWidth}});
  } else {
    result.push_back({"scales", layout_.scales == Scales::exponents ? DType::u8 : DType::f16,
                      Shape{panels, steps, layout_.scale_columns(), kPanelWidth}});
  }
  return result;
}

int64_t QuantizedPanels::num_pieces(const Shape& shape) const { return (shape[0] + kPanelWidth - 1) / kPanelWidth; }

int64_t QuantizedPanels::rows_of_piece(const Shape&) const { return kPanelWidth; }

void QuantizedPanels::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin,
                                    int64_t end) const {
  EADEM_CHECK(values.encoding == &stored_, "{} from {}", name_, to_string(values));
  const BlockFormat& format = stored_.format();
  const int64_t blocks = values.shape[1] / format.block_size;
  const int64_t row_bytes = stored_.row_bytes(values.shape[1]);
  const int64_t block_steps = format.block_size / kStep;
  PanelParts parts{};
  for (int64_t p = begin; p < end; ++p) {
    const Panel panel = panel_of(encoded, layout_, p);
    const int64_t outputs = std::min(kPanelWidth, values.shape[0] - p * kPanelWidth);
    const uint8_t* rows = static_cast<const uint8_t*>(values.data) + p * kPanelWidth * row_bytes;
    for (int64_t n = outputs; n < kPanelWidth; ++n) parts[static_cast<size_t>(n)] = {};
    if (has_plain_bytes(format) && outputs == kPanelWidth) {
      copy_plain_bytes(panel, rows, row_bytes, blocks, format);
      continue;
    }
    std::array<const uint8_t*, kPanelWidth> unpacked;
    for (size_t n = 0; n < kPanelWidth; ++n) unpacked[n] = parts[n].codes.data();
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t n = 0; n < outputs; ++n)
        stored_.unpack(parts[static_cast<size_t>(n)], rows + n * row_bytes + b * format.block_bytes);
      pack_scales(panel, layout_, b, parts);
      for (int64_t s = 0; s < block_steps; ++s) {
        StepCodes codes;
        gather_step(reinterpret_cast<uint8_t*>(codes.data()), unpacked, s * kStep, 0);
        pack_step(panel.quants + (b * block_steps + s) * layout_.quant_bytes(), codes, layout_.code_bits);
      }
    }
  }
}

void QuantizedPanels::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const BlockFormat& format = stored_.format();
  const Panel panel = panel_of(encoded, layout_, index / kPanelWidth);
  const int64_t lane = index % kPanelWidth;
  const auto f16_at = [&](const void* base, int64_t i) { return static_cast<const f16_t*>(base)[i].to_float(); };
  for (int64_t g = 0; g < encoded.shape[1] / layout_.group_size; ++g) {
    const int64_t b = g * layout_.group_size / layout_.block_size;
    float scale, min = 0;
    const int64_t s = g / layout_.groups();
    if (layout_.scales == Scales::exponents) {
      scale = power_of(panel.scales[s * kPanelWidth + lane]);
    } else if (!layout_.has_super_scales()) {
      const int64_t at = s * layout_.scale_columns() * kPanelWidth + lane;
      scale = f16_at(panel.scales, at);
      if (layout_.has_min) min = f16_at(panel.scales, at + kPanelWidth);
    } else {
      const uint8_t* sub = panel.scales + s * layout_.scale_bytes() + lane * layout_.groups() + g % layout_.groups();
      const bool nibbles = layout_.scales == Scales::nibbles;
      const int64_t at = b * layout_.super_columns() * kPanelWidth + lane;
      scale = f16_at(panel.super_scales, at) * layout_.scale_unit *
              static_cast<float>(nibbles ? *sub & 15 : static_cast<int>(static_cast<int8_t>(*sub)));
      if (layout_.has_min)
        min = f16_at(panel.super_scales, at + kPanelWidth) * static_cast<float>(nibbles ? *sub >> 4 : sub[kPanelWidth]);
    }
    for (int64_t k = g * layout_.group_size; k < (g + 1) * layout_.group_size; ++k) {
      const int code = code_at(panel.quants + k / kStep * layout_.quant_bytes(), layout_.code_bits, lane, k % kStep);
      row[k] = scale * static_cast<float>(format.level(static_cast<uint8_t>(code))) - min;
    }
  }
}

void QuantizedPanels::slice(const TensorView&, const TensorView&, int, int64_t) const {
  EADEM_UNREACHABLE("{}: a rank packs its own part", name_);
}

}  // namespace eadem::kernels::cpu
