// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/linear/fragment_blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/lookups.h"
#include "eadem/core/tensor.h"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

using Code = FragmentLayout::Code;
using Scale = FragmentLayout::Scale;
constexpr int64_t kRows = kFragmentBlockRows, kColumns = kFragmentBlockColumns;

uint8_t log2_of(int64_t columns) { return static_cast<uint8_t>(std::countr_zero(static_cast<uint64_t>(columns))); }

FragmentLayout layout_of(const BlockFormat& format) {
  FragmentLayout layout;
  layout.code = format.codebook != nullptr ? Code::codebook4
                : format.code_bits <= 4    ? Code::bits4
                : format.code_bits <= 6    ? Code::bits6
                                           : Code::bits8;
  layout.scale_type = format.scale == BlockFormat::Scale::f16 ? Scale::f16 : Scale::bf16;
  layout.has_min = format.has_min;
  layout.zero = static_cast<int16_t>(format.zero);
  layout.scale_shift = log2_of(format.block_size);
  if (format.num_groups() > 1) layout.sub_shift = log2_of(format.group_size);
  if (format.codebook != nullptr) {
    layout.zero = 128;
    for (int i = 0; i < 16; ++i) layout.levels[i / 4] |= static_cast<uint32_t>(format.codebook[i] + 128) << (i % 4 * 8);
  }
  return layout;
}

FragmentLayout layout_of(const GroupFormat& format) {
  FragmentLayout layout;
  layout.code = format.bits == 4 ? Code::bits4 : Code::bits8;
  layout.scale_type = format.scale == DType::f16 ? Scale::f16 : format.scale == DType::bf16 ? Scale::bf16 : Scale::f32;
  layout.has_zeros = format.has_zeros;
  layout.zero = static_cast<int16_t>(format.has_zeros ? 0 : format.middle());
  layout.scale_shift = log2_of(format.group_size == 0 ? kColumns : format.group_size);
  return layout;
}

// Where the code of a row and a column stands in a block.
struct CodePlace {
  int64_t lane, step, piece;
  int byte, r;
  CodePlace(int64_t row, int64_t column)
      : lane(row % 8 * 4 + column % 8 / 2),
        step(column % kFragmentPieceColumns / 16),
        piece(column / kFragmentPieceColumns),
        byte(static_cast<int>(column % 16 / 8 * 2 + column % 2)),
        r(static_cast<int>(row / 8)) {}

  int64_t bits4() const { return ((piece * 32 + lane) * 4 + step) * 4 + byte; }
  int64_t high2() const { return ((piece * 32 + lane) * 2 + step / 2) * 4 + byte; }
  int high2_shift() const { return static_cast<int>(step % 2 * 4) + 2 * r; }
  int64_t bits8() const { return (((piece * 2 + step / 2) * 32 + lane) * 4 + step % 2 * 2 + r) * 4 + byte; }
  int64_t bf16() const { return (((piece * 4 + step) * 32 + lane) * 4 + r + byte / 2 * 2) * 4 + byte % 2 * 2; }
};

constexpr int64_t kStep = 16;  // columns that a warp multiplies at once

void add_bits(uint8_t* to, uint32_t bits) {
  uint32_t word;
  std::memcpy(&word, to, sizeof word);
  word |= bits;
  std::memcpy(to, &word, sizeof word);
}

// Writes the codes of kStep columns of a row, the first of which is `column`, to a block whose codes were 0 there.
void add_step(uint8_t* block, const FragmentLayout& layout, int64_t row, int64_t column, const uint8_t* codes) {
  for (int64_t pair = 0; pair < kStep / 2; pair += 2) {  // a lane has this pair of columns and the one 8 columns later
    uint16_t pairs[2];
    std::memcpy(&pairs[0], codes + pair, sizeof pairs[0]);
    std::memcpy(&pairs[1], codes + pair + kStep / 2, sizeof pairs[1]);
    const uint32_t word = pairs[0] | uint32_t{pairs[1]} << 16;
    const CodePlace place(row, column + pair);
    if (layout.code == Code::bits8) {
      add_bits(block + place.bits8(), word);
      continue;
    }
    add_bits(block + place.bits4(), (word & 0x0f0f0f0fu) << (4 * place.r));
    if (layout.code == Code::bits6)
      add_bits(block + layout.high + place.high2(), (word >> 4 & 0x03030303u) << place.high2_shift());
  }
}

int load_code(const uint8_t* block, const FragmentLayout& layout, int64_t row, int64_t column) {
  const CodePlace place(row, column);
  if (layout.code == Code::bits8) return block[place.bits8()];
  const int low = block[place.bits4()] >> (4 * place.r) & 15;
  if (layout.code == Code::codebook4) return static_cast<int>(layout.levels[low / 4] >> (low % 4 * 8) & 255);
  if (layout.code == Code::bits4) return low;
  return low | (block[layout.high + place.high2()] >> place.high2_shift() & 3) << 4;
}

void store_scale(uint8_t* scales, int64_t index, Scale type, float value) {
  if (type == Scale::f32) {
    std::memcpy(scales + index * 4, &value, 4);
    return;
  }
  const uint16_t bits = type == Scale::f16 ? f16_t::from_float(value).bits : bf16_t::from_float(value).bits;
  std::memcpy(scales + index * 2, &bits, 2);
}

float load_scale(const uint8_t* scales, int64_t index, Scale type) {
  if (type == Scale::f32) {
    float value;
    std::memcpy(&value, scales + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, scales + index * 2, 2);
  return type == Scale::f16 ? f16_t{bits}.to_float() : bf16_t{bits}.to_float();
}

// Whether `encoding` has integer codes that blocks keep as they are.
const GroupEncoding* group_codes(const Encoding& encoding) {
  const GroupEncoding* groups = GroupEncoding::of(&encoding);
  return groups != nullptr && !groups->format().has_order ? groups : nullptr;
}

// Likewise; types that are only read have codebooks and units of their own, and become bf16.
const BlockEncoding* block_codes(const Encoding& encoding) {
  const BlockEncoding* blocks = BlockEncoding::of(&encoding);
  return blocks != nullptr && blocks->is_writable() ? blocks : nullptr;
}

// The blocks of one row of blocks.
struct BlockRow {
  uint8_t* first;
  const FragmentLayout& layout;
  int64_t lane_row;  // the row within the blocks

  uint8_t* of_column(int64_t column) const { return first + column / kColumns * layout.block_bytes; }
  // Writes the codes of `count` columns, the first of which is `column`. Both numbers are multiples of kStep.
  void codes(int64_t column, const uint8_t* codes, int64_t count) const {
    for (int64_t k = 0; k < count; k += kStep)
      add_step(of_column(column + k), layout, lane_row, (column + k) % kColumns, codes + k);
  }
  // The element of the group of 2^shift columns that `column` is in.
  int64_t element(int64_t column, int shift) const { return (column % kColumns >> shift) * kRows + lane_row; }
};

void encode_blocks(const BlockRow& to, const BlockEncoding& stored, const TensorView& values, int64_t row) {
  const FragmentLayout& layout = to.layout;
  const BlockFormat& format = stored.format();
  const auto* bytes = static_cast<const uint8_t*>(values.data) + row * stored.row_bytes(values.shape[1]);
  for (int64_t k = 0; k < values.shape[1]; k += format.block_size, bytes += format.block_bytes) {
    BlockParts parts;
    stored.unpack(parts, bytes);
    uint8_t* block = to.of_column(k);
    const int64_t scale = to.element(k, layout.scale_shift);
    store_scale(block + layout.scales, scale, layout.scale_type, parts.scale);
    if (layout.has_min) store_scale(block + layout.mins, scale, layout.scale_type, parts.min);
    for (int g = 0; layout.sub_shift > 0 && g < format.num_groups(); ++g) {
      const int64_t sub = to.element(k + g * format.group_size, layout.sub_shift);
      block[layout.sub_scales + sub] = static_cast<uint8_t>(parts.sub_scales[static_cast<size_t>(g)]);
      if (layout.has_min) block[layout.sub_mins + sub] = parts.sub_mins[static_cast<size_t>(g)];
    }
    to.codes(k, parts.codes.data(), format.block_size);
  }
}

void encode_groups(const BlockRow& to, const GroupEncoding& stored, const TensorView& values, int64_t row) {
  const FragmentLayout& layout = to.layout;
  const int64_t columns = values.shape[1], group_columns = stored.group_columns(columns);
  std::vector<uint8_t> codes(static_cast<size_t>(columns));
  stored.unpack_codes(codes.data(), values, row, 0, columns);
  for (int64_t k = 0; k < columns; k += int64_t{1} << layout.scale_shift) {
    const int64_t element = to.element(k, layout.scale_shift), group = k / group_columns;
    uint8_t* block = to.of_column(k);
    store_scale(block + layout.scales, element, layout.scale_type, stored.scale(values, row, group));
    if (layout.has_zeros) block[layout.zeros + element] = static_cast<uint8_t>(stored.zero(values, row, group));
  }
  to.codes(0, codes.data(), columns);
}

void encode_bf16(const BlockRow& to, const Encoding& stored, const TensorView& values, int64_t row) {
  std::vector<float> decoded(static_cast<size_t>(values.shape[1]));
  stored.decode_row(decoded.data(), values, row);
  for (int64_t k = 0; k < values.shape[1]; k += 2) {  // pairs stand together
    const uint16_t pair[2] = {bf16_t::from_float(decoded[static_cast<size_t>(k)]).bits,
                              bf16_t::from_float(decoded[static_cast<size_t>(k) + 1]).bits};
    std::memcpy(to.of_column(k) + CodePlace(to.lane_row, k % kColumns).bf16(), pair, sizeof pair);
  }
}

}  // namespace

const FragmentBlocks* FragmentBlocks::of(const Encoding* encoding) {
  count_lookup();
  if (encoding == nullptr) return nullptr;
  if (const auto* blocks = dynamic_cast<const FragmentBlocks*>(encoding)) return blocks;
  static std::mutex mutex;
  static std::map<const Encoding*, std::unique_ptr<const FragmentBlocks>> all;
  const std::lock_guard lock(mutex);
  std::unique_ptr<const FragmentBlocks>& blocks = all[encoding];
  if (blocks == nullptr) blocks = std::make_unique<const FragmentBlocks>(*encoding);
  return blocks.get();
}

FragmentBlocks::FragmentBlocks(const Encoding& stored)
    : stored_(stored), name_("fragment_blocks_" + std::string(stored.name())) {
  if (const BlockEncoding* blocks = block_codes(stored))
    layout_ = layout_of(blocks->format());
  else if (const GroupEncoding* groups = group_codes(stored))
    layout_ = layout_of(groups->format());
  layout_ = with_offsets(layout_);
  const auto known = std::find(std::begin(kKnownLayouts), std::end(kKnownLayouts), layout_);
  if (known != std::end(kKnownLayouts)) layout_.known = static_cast<int8_t>(known - std::begin(kKnownLayouts));
}

std::vector<PlaneSpec> FragmentBlocks::planes(const Shape& shape) const {
  if (shape.rank() != 2 || shape[1] == 0 || shape[1] % kLinearStreamMultiple != 0)
    throw InvalidArgument("{} packs matrices [out, in] with in a multiple of {}; the tensor is {}", name_,
                          kLinearStreamMultiple, to_string(shape));
  return {{"blocks", DType::u8,
           Shape{num_pieces(shape), (shape[1] + kColumns - 1) / kColumns, static_cast<int64_t>(layout_.block_bytes)}}};
}

int64_t FragmentBlocks::num_pieces(const Shape& shape) const { return (shape[0] + kRows - 1) / kRows; }

void FragmentBlocks::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin,
                                   int64_t end) const {
  EADEM_CHECK(values.encoding == &stored_, "{} from {}", name_, to_string(values));
  const int64_t row_bytes = (values.shape[1] + kColumns - 1) / kColumns * layout_.block_bytes;
  for (int64_t piece = begin; piece < end; ++piece) {
    uint8_t* first = static_cast<uint8_t*>(encoded.plane(0)) + piece * row_bytes;
    std::fill_n(first, row_bytes, uint8_t{0});
    for (int64_t row = piece * kRows; row < std::min((piece + 1) * kRows, values.shape[0]); ++row) {
      const BlockRow to{first, layout_, row % kRows};
      if (const BlockEncoding* blocks = block_codes(stored_))
        encode_blocks(to, *blocks, values, row);
      else if (const GroupEncoding* groups = group_codes(stored_))
        encode_groups(to, *groups, values, row);
      else
        encode_bf16(to, stored_, values, row);
    }
  }
}

void FragmentBlocks::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const int64_t columns = encoded.shape[1], blocks = (columns + kColumns - 1) / kColumns, lane_row = index % kRows;
  const uint8_t* first = static_cast<const uint8_t*>(encoded.plane(0)) + index / kRows * blocks * layout_.block_bytes;
  for (int64_t k = 0; k < columns; ++k) {
    const uint8_t* block = first + k / kColumns * layout_.block_bytes;
    const int64_t column = k % kColumns;
    if (layout_.code == Code::bf16) {
      uint16_t bits;
      std::memcpy(&bits, block + CodePlace(lane_row, column).bf16(), 2);
      row[k] = bf16_t{bits}.to_float();
      continue;
    }
    const int64_t element = (column >> layout_.scale_shift) * kRows + lane_row;
    float scale = load_scale(block + layout_.scales, element, layout_.scale_type);
    float min = layout_.has_min ? load_scale(block + layout_.mins, element, layout_.scale_type) : 0.0f;
    if (layout_.sub_shift > 0) {
      const int64_t sub = (column >> layout_.sub_shift) * kRows + lane_row;
      scale *= static_cast<float>(static_cast<int8_t>(block[layout_.sub_scales + sub]));
      if (layout_.has_min) min *= static_cast<float>(block[layout_.sub_mins + sub]);
    }
    const int zero = layout_.has_zeros ? block[layout_.zeros + element] : layout_.zero;
    row[k] = scale * static_cast<float>(load_code(block, layout_, lane_row, column) - zero) - min;
  }
}

void FragmentBlocks::slice(const TensorView&, const TensorView&, int, int64_t) const {
  EADEM_UNREACHABLE("{}: a rank packs its own part", name_);
}

}  // namespace eadem::kernels::cuda
