// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/quantized/quantized_layouts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/io/text.h"

namespace eadem::io {

namespace {

using Layout = QuantizationScheme::Layout;
using Scope = QuantizationScheme::Scope;

// The tensor that is a part of a layer.
std::string part_name(Layout layout, std::string_view layer, std::string_view part) {
  return fmt::format("{}{}{}", layer, layout == Layout::mxfp4 ? "_" : ".", part);
}

std::string described(const WeightInfo& info) {
  return fmt::format("{} is {} {}", quote(info.name), info.type_name, to_string(info.shape));
}

// The parts of a layer in a file, and the checks that they are what they should be.
class Parts {
 public:
  Parts(const WeightSource& files, const QuantizationScheme& config, const std::string& layer)
      : files_(files), config_(config), layer_(layer) {}

  bool has(std::string_view part) const { return files_.find(name(part)) != nullptr; }

  const WeightInfo& require(std::string_view part, const std::vector<std::string_view>& types) {
    const WeightInfo* info = files_.find(name(part));
    if (info == nullptr)
      throw NotFound("{}: the layer {} is quantized ({}), but {} is missing", files_.path(), quote(layer_),
                     config_.method, quote(name(part)));
    if (std::find(types.begin(), types.end(), info->type_name) == types.end())
      throw DataCorrupted("{}: {}; {} has {} there", files_.path(), described(*info), config_.method,
                          fmt::join(types, " or "));
    used_.push_back(info->name);
    return *info;
  }

  // Requires a part with one of `shapes`, which `from` implies.
  const WeightInfo& require(std::string_view part, const std::vector<std::string_view>& types,
                            std::initializer_list<Shape> shapes, const WeightInfo& from) {
    const WeightInfo& info = require(part, types);
    if (std::find(shapes.begin(), shapes.end(), info.shape) != shapes.end()) return info;
    std::string expected;
    for (const Shape& shape : shapes) expected += (expected.empty() ? "" : " or ") + to_string(shape);
    fail(fmt::format("{}; {} and {}{} imply {}", described(info), described(from), config_.method,
                     config_.scope == Scope::group ? fmt::format(" with groups of {}", config_.group_size) : "",
                     expected));
  }

  const WeightInfo& matrix(std::string_view part, const std::vector<std::string_view>& types) {
    const WeightInfo& info = require(part, types);
    if (info.shape.rank() != 2 || info.shape.num_elements() == 0)
      fail(described(info) + "; expected a matrix that is not empty");
    return info;
  }

  [[noreturn]] void fail(const std::string& problem) const { throw DataCorrupted("{}: {}", files_.path(), problem); }

  std::vector<std::string> used() { return std::move(used_); }

 private:
  std::string name(std::string_view part) const { return part_name(config_.layout, layer_, part); }

  const WeightSource& files_;
  const QuantizationScheme& config_;
  const std::string& layer_;
  std::vector<std::string> used_;
};

const std::vector<std::string_view> kScaleTypes = {"F16", "BF16", "F32"};

DType dtype_of_scales(const WeightInfo& scales) { return scales.type->dtype; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- Groups of columns

// The group of each column, read where the file says it; checked to be groups of as many columns each.
struct ColumnGroups {
  bool are_neighbours = true;
  std::vector<int32_t> order;  // columns by group; empty for neighbours
};

ColumnGroups read_groups(const WeightSource& files, const std::string& name, int64_t columns, int64_t size) {
  const Tensor tensor = files.get(name);
  const int32_t* group_of = tensor.view.as<int32_t>();
  const int64_t groups = columns / size;
  std::vector<int64_t> counts(static_cast<size_t>(groups), 0);
  ColumnGroups result;
  for (int64_t k = 0; k < columns; ++k) {
    if (group_of[k] < 0 || group_of[k] >= groups)
      throw DataCorrupted("{}: {}[{}] is {}; there are {} groups", files.path(), quote(name), k, group_of[k], groups);
    ++counts[static_cast<size_t>(group_of[k])];
    result.are_neighbours = result.are_neighbours && group_of[k] == k / size;
  }
  for (int64_t g = 0; g < groups; ++g)
    if (counts[static_cast<size_t>(g)] != size)
      throw DataCorrupted("{}: {} puts {} columns into group {}; groups are of {}", files.path(), quote(name),
                          counts[static_cast<size_t>(g)], g, size);
  if (result.are_neighbours) return result;
  result.order.resize(static_cast<size_t>(columns));
  std::iota(result.order.begin(), result.order.end(), 0);
  std::stable_sort(result.order.begin(), result.order.end(),
                   [&](int32_t a, int32_t b) { return group_of[a] < group_of[b]; });
  return result;
}

// Whether the layer's columns have an order of their own.
bool has_order(const WeightSource& files, const QuantizationScheme& config, Parts& parts, std::string_view part,
               const std::string& name, int64_t columns, int64_t size, const WeightInfo& codes) {
  if (!parts.has(part)) {
    if (config.has_order) parts.require(part, {"I32"});  // refuses
    return false;
  }
  parts.require(part, {"I32"}, {Shape{columns}}, codes);
  const bool ordered = !read_groups(files, name, columns, size).are_neighbours;
  if (ordered && !config.has_order)
    parts.fail(fmt::format("{} makes groups of columns that are no neighbours; {} says there are none", quote(name),
                           config.place));
  return ordered;
}

QuantizedLayer group_layer(const WeightSource& files, const QuantizationScheme& config, Parts& parts,
                           const std::string& name, const Shape& shape, const WeightInfo& scales, bool ordered) {
  const GroupFormat format{config.bits, config.scope == Scope::group ? config.group_size : 0, dtype_of_scales(scales),
                           config.has_zeros, ordered};
  const GroupEncoding* encoding = GroupEncoding::find(format);
  EADEM_CHECK(encoding != nullptr, "{} has no encoding", name);
  try {
    encoding->planes(shape);
  } catch (const InvalidArgument& error) {
    throw Unsupported("{}: {}: {}", files.path(), quote(name), error.what());
  }
  return {name, WeightType(DType::f32, encoding), shape, parts.used()};
}

// Rows of `in` columns are whole groups; the size of one.
int64_t checked_group_size(const QuantizationScheme& config, const Parts& parts, const WeightInfo& codes, int64_t in) {
  const int64_t size = config.scope == Scope::group ? config.group_size : in;
  if (in % size != 0)
    parts.fail(fmt::format("{}: rows of {} columns are no whole number of groups of {}", described(codes), in, size));
  return size;
}

// ---- The planes of a group encoding, while they are written.

struct GroupWriter {
  const GroupEncoding& encoding;
  const Shape shape;
  Tensor result;

  GroupWriter(const QuantizedLayer& layer)
      : encoding(*GroupEncoding::of(layer.type.encoding)),
        shape(layer.shape),
        result(Tensor::in_one_piece(layer.type.dtype, layer.shape, encoding)) {}

  const GroupFormat& format() const { return encoding.format(); }
  int64_t groups() const { return encoding.num_groups(shape[1]); }
  int64_t row_bytes() const { return shape[1] * format().bits / 8; }
  uint8_t* row(int64_t o) const { return static_cast<uint8_t*>(result.view.plane(0)) + o * row_bytes(); }

  // Row `o` from its codes by column, one byte each.
  void write_row(int64_t o, const uint8_t* codes, const std::vector<int32_t>& order) const {
    uint8_t* bytes = row(o);
    const auto code = [&](int64_t j) { return order.empty() ? codes[j] : codes[order[static_cast<size_t>(j)]]; };
    if (format().bits == 8)
      for (int64_t j = 0; j < shape[1]; ++j) bytes[j] = code(j);
    else
      for (int64_t i = 0; i < shape[1] / 2; ++i) bytes[i] = static_cast<uint8_t>(code(2 * i) | code(2 * i + 1) << 4);
  }

  // Scales of [groups, out] (transposed) or [out, groups], or one for all.
  void write_scales(const TensorView& scales, bool transposed) const {
    const auto bytes = static_cast<int64_t>(dtype_size(format().scale));
    auto* to = static_cast<std::byte*>(result.view.plane(1));
    const auto* from = static_cast<const std::byte*>(scales.data);
    const bool one = scales.num_elements() == 1;
    for (int64_t o = 0; o < shape[0]; ++o)
      for (int64_t g = 0; g < groups(); ++g) {
        const int64_t at = one ? 0 : transposed ? g * shape[0] + o : o * groups() + g;
        std::memcpy(to + (o * groups() + g) * bytes, from + at * bytes, static_cast<size_t>(bytes));
      }
  }

  void write_zero(int64_t o, int64_t g, int zero) const {
    static_cast<uint8_t*>(result.view.plane(2))[o * groups() + g] = static_cast<uint8_t>(zero);
  }

  void write_order(const std::vector<int32_t>& order) const {
    if (format().has_order)
      std::memcpy(result.view.plane(format().has_zeros ? 3 : 2), order.data(), order.size() * sizeof(int32_t));
  }
};

// The i-th code of `bits` bits of a run of words.
int code_in(const int32_t* words, int64_t i, int bits) {
  const int64_t per_word = 32 / bits;
  return static_cast<int>(static_cast<uint32_t>(words[i / per_word]) >> (i % per_word * bits) & ((1u << bits) - 1));
}

// Rows are converted in blocks, so that words of many rows that lie side by side are read together.
constexpr int64_t kRowBlock = 64;

// Writes all rows; `unpack(codes, o0, count)` gives codes [count, in] of rows from o0.
template <typename Unpack>
void write_rows(const GroupWriter& writer, const std::vector<int32_t>& order, Unpack unpack) {
  const int64_t out = writer.shape[0], in = writer.shape[1];
  std::vector<uint8_t> codes(static_cast<size_t>(std::min(kRowBlock, out) * in));
  for (int64_t o0 = 0; o0 < out; o0 += kRowBlock) {
    const int64_t count = std::min(kRowBlock, out - o0);
    unpack(codes.data(), o0, count);
    for (int64_t r = 0; r < count; ++r) writer.write_row(o0 + r, codes.data() + r * in, order);
  }
}

std::vector<int32_t> order_of(const WeightSource& files, const GroupWriter& writer, const std::string& name) {
  if (!writer.format().has_order) return {};
  return read_groups(files, name, writer.shape[1], writer.encoding.group_columns(writer.shape[1])).order;
}

// ---- gptq

QuantizedLayer describe_gptq(const WeightSource& files, const QuantizationScheme& config, const std::string& name) {
  Parts parts(files, config, name);
  const WeightInfo& codes = parts.matrix("qweight", {"I32"});
  const int64_t per_word = 32 / config.bits, out = codes.shape[1];
  if (codes.shape[0] > (int64_t{1} << 40)) parts.fail(described(codes) + ": too large");
  const int64_t in = codes.shape[0] * per_word;
  const int64_t size = checked_group_size(config, parts, codes, in), groups = in / size;
  const WeightInfo& scales = parts.require("scales", kScaleTypes, {Shape{groups, out}}, codes);
  parts.require("qzeros", {"I32"}, {Shape{groups, ceil_div(out, per_word)}}, codes);
  const bool ordered = has_order(files, config, parts, "g_idx", name + ".g_idx", in, size, codes);
  return group_layer(files, config, parts, name, {out, in}, scales, ordered);
}

// A symmetric checkpoint writes the zero point 2^(bits - 1) all the same, in one of two ways: some writers leave out
// the "less one" and do not say so.
void check_middle_zeros(const WeightSource& files, const QuantizationScheme& config, const std::string& name,
                        const TensorView& words, int64_t groups, int64_t out) {
  const int middle = 1 << (config.bits - 1);
  const int first = code_in(words.as<int32_t>(), 0, config.bits);
  if (first != middle && !(first == middle - 1 && config.zeros_less_one))
    throw DataCorrupted("{}: {} begins with {}; {} says that zero points are {}", files.path(), quote(name), first,
                        config.place, middle);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t o = 0; o < out; ++o)
      if (const int zero = code_in(words.as<int32_t>() + g * words.shape[1], o, config.bits); zero != first)
        throw DataCorrupted(
            "{}: {} holds {} for group {}, output {}, and {} elsewhere; {} says that zero points are {}", files.path(),
            quote(name), zero, g, o, first, config.place, middle);
}

Tensor load_gptq(const WeightSource& files, const QuantizationScheme& config, const QuantizedLayer& layer) {
  const GroupWriter writer(layer);
  const int64_t out = layer.shape[0], in = layer.shape[1], per_word = 32 / config.bits;
  const Tensor words = files.get(layer.name + ".qweight"), zeros = files.get(layer.name + ".qzeros");
  const auto* word = words.view.as<int32_t>();
  const std::vector<int32_t> order = order_of(files, writer, layer.name + ".g_idx");
  write_rows(writer, order, [&](uint8_t* codes, int64_t o0, int64_t count) {
    for (int64_t k = 0; k < in / per_word; ++k)
      for (int64_t r = 0; r < count; ++r)
        for (int64_t i = 0; i < per_word; ++i)
          codes[r * in + k * per_word + i] = static_cast<uint8_t>(code_in(word + k * out + o0 + r, i, config.bits));
  });
  writer.write_scales(files.get(layer.name + ".scales").view, true);
  writer.write_order(order);
  if (!config.has_zeros) {
    check_middle_zeros(files, config, layer.name + ".qzeros", zeros.view, writer.groups(), out);
    return writer.result;
  }
  // Less one wraps around, so that a zero point of 0 is written as the largest code, or borrows from the next one.
  const int32_t* const stored = zeros.view.as<int32_t>();
  std::vector<int32_t> zero_words(stored, stored + zeros.view.num_elements());
  if (config.borrows_across_zeros)
    for (int32_t& word : zero_words)
      word = static_cast<int32_t>(static_cast<uint32_t>(word) + (config.bits == 4 ? 0x11111111u : 0x01010101u));
  const int plus = config.zeros_less_one && !config.borrows_across_zeros ? 1 : 0;
  for (int64_t g = 0; g < writer.groups(); ++g)
    for (int64_t o = 0; o < out; ++o)
      writer.write_zero(
          o, g,
          (code_in(zero_words.data() + g * zeros.shape()[1], o, config.bits) + plus) & writer.format().max_code());
  return writer.result;
}

// ---- awq

// The places of the codes of eight neighbouring outputs in their word.
constexpr std::array<int64_t, 8> kAwqPlace = {0, 4, 1, 5, 2, 6, 3, 7};

QuantizedLayer describe_awq(const WeightSource& files, const QuantizationScheme& config, const std::string& name) {
  Parts parts(files, config, name);
  const WeightInfo& codes = parts.matrix("qweight", {"I32"});
  if (codes.shape[1] > (int64_t{1} << 40)) parts.fail(described(codes) + ": too large");
  const int64_t in = codes.shape[0], out = codes.shape[1] * 8;
  const int64_t size = checked_group_size(config, parts, codes, in), groups = in / size;
  const WeightInfo& scales = parts.require("scales", kScaleTypes, {Shape{groups, out}}, codes);
  parts.require("qzeros", {"I32"}, {Shape{groups, out / 8}}, codes);
  return group_layer(files, config, parts, name, {out, in}, scales, false);
}

Tensor load_awq(const WeightSource& files, const QuantizationScheme&, const QuantizedLayer& layer) {
  const GroupWriter writer(layer);
  const int64_t out = layer.shape[0], in = layer.shape[1];
  const Tensor words = files.get(layer.name + ".qweight"), zeros = files.get(layer.name + ".qzeros");
  const auto code_of = [&](const Tensor& tensor, int64_t row, int64_t o) {
    return code_in(tensor.view.as<int32_t>() + row * (out / 8) + o / 8, kAwqPlace[static_cast<size_t>(o % 8)], 4);
  };
  write_rows(writer, {}, [&](uint8_t* codes, int64_t o0, int64_t count) {
    for (int64_t k = 0; k < in; ++k)
      for (int64_t r = 0; r < count; ++r) codes[r * in + k] = static_cast<uint8_t>(code_of(words, k, o0 + r));
  });
  writer.write_scales(files.get(layer.name + ".scales").view, true);
  for (int64_t g = 0; g < writer.groups(); ++g)
    for (int64_t o = 0; o < out; ++o) writer.write_zero(o, g, code_of(zeros, g, o));
  return writer.result;
}

// ---- packed

QuantizedLayer describe_packed(const WeightSource& files, const QuantizationScheme& config, const std::string& name) {
  Parts parts(files, config, name);
  const WeightInfo& codes = parts.matrix("weight_packed", {"I32"});
  const int64_t per_word = 32 / config.bits;
  const WeightInfo& stated = parts.require("weight_shape", {"I64", "I32"}, {Shape{2}}, codes);
  const Tensor extents = files.get(stated.name);
  const auto extent = [&](int64_t i) {
    return extents.dtype() == DType::i64 ? extents.view.as<int64_t>()[i] : extents.view.as<int32_t>()[i];
  };
  const int64_t out = extent(0), in = extent(1);
  if (out != codes.shape[0] || in < 1 || in > (int64_t{1} << 40) || ceil_div(in, per_word) != codes.shape[1])
    parts.fail(fmt::format("{}; {} says [{}, {}], which {} bits pack into [{}, {}]", described(codes),
                           quote(stated.name), out, in, config.bits, out, in < 1 ? in : (in - 1) / per_word + 1));
  const int64_t size = checked_group_size(config, parts, codes, in), groups = in / size;
  const Shape rows{out, groups};
  const WeightInfo& scales =
      config.scope == Scope::tensor ? parts.require("weight_scale", kScaleTypes, {Shape{}, Shape{1}}, codes)
      : config.scope == Scope::row  ? parts.require("weight_scale", kScaleTypes, {rows, Shape{out}}, codes)
                                    : parts.require("weight_scale", kScaleTypes, {rows}, codes);
  if (config.has_zeros) parts.require("weight_zero_point", {"I32"}, {Shape{ceil_div(out, per_word), groups}}, codes);
  const bool ordered = has_order(files, config, parts, "weight_g_idx", name + ".weight_g_idx", in, size, codes);
  return group_layer(files, config, parts, name, {out, in}, scales, ordered);
}

Tensor load_packed(const WeightSource& files, const QuantizationScheme& config, const QuantizedLayer& layer) {
  const GroupWriter writer(layer);
  const int64_t out = layer.shape[0], in = layer.shape[1];
  const Tensor words = files.get(layer.name + ".weight_packed");
  const int64_t row_words = words.shape()[1];
  const std::vector<int32_t> order = order_of(files, writer, layer.name + ".weight_g_idx");
  if (order.empty()) {  // The bytes are ours already, but for what fills the last word of a row.
    for (int64_t o = 0; o < out; ++o)
      std::memcpy(writer.row(o), words.view.as<int32_t>() + o * row_words, static_cast<size_t>(writer.row_bytes()));
  } else {
    write_rows(writer, order, [&](uint8_t* codes, int64_t o0, int64_t count) {
      for (int64_t r = 0; r < count; ++r)
        for (int64_t k = 0; k < in; ++k)
          codes[r * in + k] =
              static_cast<uint8_t>(code_in(words.view.as<int32_t>() + (o0 + r) * row_words, k, config.bits));
    });
  }
  writer.write_scales(files.get(layer.name + ".weight_scale").view, false);
  writer.write_order(order);
  if (!config.has_zeros) return writer.result;
  const Tensor zeros = files.get(layer.name + ".weight_zero_point");
  const int64_t per_word = 32 / config.bits;
  for (int64_t o = 0; o < out; ++o)
    for (int64_t g = 0; g < writer.groups(); ++g)
      writer.write_zero(
          o, g, code_in(zeros.view.as<int32_t>() + o / per_word * writer.groups() + g, o % per_word, config.bits));
  return writer.result;
}

// ---- integers

QuantizedLayer describe_integers(const WeightSource& files, const QuantizationScheme& config, const std::string& name) {
  Parts parts(files, config, name);
  const WeightInfo& codes = parts.matrix("weight", {"I8"});
  const int64_t out = codes.shape[0], in = codes.shape[1];
  const int64_t size = checked_group_size(config, parts, codes, in);
  const Shape rows{out, in / size};
  const WeightInfo& scales =
      config.scope == Scope::tensor ? parts.require("weight_scale", kScaleTypes, {Shape{}, Shape{1}}, codes)
      : config.scope == Scope::row  ? parts.require("weight_scale", kScaleTypes, {rows, Shape{out}}, codes)
                                    : parts.require("weight_scale", kScaleTypes, {rows}, codes);
  if (config.has_zeros) parts.require("weight_zero_point", {"I8"}, {rows}, codes);
  const bool ordered = has_order(files, config, parts, "weight_g_idx", name + ".weight_g_idx", in, size, codes);
  return group_layer(files, config, parts, name, codes.shape, scales, ordered);
}

Tensor load_integers(const WeightSource& files, const QuantizationScheme& config, const QuantizedLayer& layer) {
  const GroupWriter writer(layer);
  const int64_t out = layer.shape[0], in = layer.shape[1];
  const Tensor bytes = files.get_bytes(layer.name + ".weight");
  const auto* signed_codes = bytes.view.as<uint8_t>();
  const std::vector<int32_t> order = order_of(files, writer, layer.name + ".weight_g_idx");
  write_rows(writer, order, [&](uint8_t* codes, int64_t o0, int64_t count) {
    for (int64_t i = 0; i < count * in; ++i) codes[i] = signed_codes[o0 * in + i] ^ 0x80;
  });
  writer.write_scales(files.get(layer.name + ".weight_scale").view, false);
  writer.write_order(order);
  if (!config.has_zeros) return writer.result;
  const Tensor zeros = files.get_bytes(layer.name + ".weight_zero_point");
  for (int64_t o = 0; o < out; ++o)
    for (int64_t g = 0; g < writer.groups(); ++g)
      writer.write_zero(o, g, zeros.view.as<uint8_t>()[o * writer.groups() + g] ^ 0x80);
  return writer.result;
}

// ---- floats

// The part with the scales; where there is none, the one that is usual.
std::string_view scale_part(const Parts& parts, const QuantizationScheme& config) {
  std::string_view found;
  for (const std::string_view part : {"weight_scale_inv", "weight_scale", "scale"}) {
    if (!parts.has(part)) continue;
    if (!found.empty()) parts.fail(fmt::format("a layer has both {} and {}", quote(found), quote(part)));
    found = part;
  }
  return !found.empty() ? found : config.method == "fp8" ? "weight_scale_inv" : "weight_scale";
}

const std::vector<std::string_view> kFloatScaleTypes = {"F16", "BF16", "F32", "F8_E8M0"};

// The bytes of scales that are powers of two, 2^(e - 127).
Tensor exponents_of(const WeightSource& files, const std::string& name) {
  const Tensor bytes = files.get_bytes(name);
  const auto* exponents = bytes.view.as<uint8_t>();
  for (int64_t i = 0; i < bytes.view.num_elements(); ++i)
    if (exponents[i] == 255)
      throw DataCorrupted("{}: number {} of {} is 255, which is not a number; a scale of 2^(e - 127) has e in [0, 254]",
                          files.path(), i, quote(name));
  return bytes;
}

float power_of_two(uint8_t exponent) {
  return std::bit_cast<float>(exponent == 0 ? uint32_t{1} << 22 : uint32_t{exponent} << 23);
}

bool are_4_bit_floats(const WeightInfo& codes) { return codes.type_name == "I8" || codes.type_name == "U8"; }

QuantizedLayer describe_4_bit_floats(const WeightSource& files, const QuantizationScheme& config,
                                     const std::string& name) {
  Parts parts(files, config, name);
  const WeightInfo& codes = parts.matrix("weight", {"I8", "U8"});
  if (config.expert_dtype != "fp4")
    parts.fail(fmt::format("{}, as 4-bit floats are; {} says {} of 'expert_dtype'", described(codes), config.place,
                           config.expert_dtype.empty() ? "nothing" : quote(config.expert_dtype)));
  if (codes.shape[1] > (int64_t{1} << 40)) parts.fail(described(codes) + ": too large");
  const int64_t out = codes.shape[0], in = codes.shape[1] * 2;
  if (in % 32 != 0)
    parts.fail(fmt::format("{}: rows of {} values are no whole number of groups of 32", described(codes), in));
  parts.require(scale_part(parts, config), {"F8_E8M0"}, {Shape{out, in / 32}}, codes);
  return {name, WeightType(DType::f32, BlockEncoding::find("mxfp4")), Shape{out, in}, parts.used()};
}

// Blocks of mxfp4 of exponents and of codes 0 1 2 3 …, which are in pairs of neighbours in the file, in pairs (i, i +
// 16) in a block.
Tensor blocks_of_4_bit_floats(const QuantizedLayer& layer, const Tensor& codes, const Tensor& exponents) {
  Tensor result = Tensor::in_one_piece(layer.type.dtype, layer.shape, *layer.type.encoding);
  const auto* from = codes.view.as<uint8_t>();
  const auto* exponent = exponents.view.as<uint8_t>();
  auto* block = static_cast<uint8_t*>(result.view.plane(0));
  const auto code = [&](int i) { return from[i / 2] >> (i % 2 * 4) & 15; };
  for (int64_t b = 0; b < exponents.view.num_elements(); ++b, from += 16, block += 17) {
    block[0] = exponent[b];
    for (int i = 0; i < 16; ++i) block[1 + i] = static_cast<uint8_t>(code(i) | code(i + 16) << 4);
  }
  return result;
}

QuantizedLayer describe_floats(const WeightSource& files, const QuantizationScheme& config, const std::string& name) {
  Parts parts(files, config, name);
  if (are_4_bit_floats(*files.find(name + ".weight"))) return describe_4_bit_floats(files, config, name);
  const WeightInfo& codes = parts.matrix("weight", {"F8_E4M3", "F8_E5M2"});
  const auto kind = codes.type_name == "F8_E4M3" ? Fp8Format::Kind::e4m3 : Fp8Format::Kind::e5m2;
  if (config.floats && *config.floats != kind)
    parts.fail(fmt::format("{}; {} says {}", described(codes), config.place,
                           *config.floats == Fp8Format::Kind::e4m3 ? "e4m3" : "e5m2"));
  const int64_t out = codes.shape[0], in = codes.shape[1];
  const Shape blocks{ceil_div(out, 128), ceil_div(in, 128)};
  std::vector<Shape> expected;
  const std::string_view part = scale_part(parts, config);
  const WeightInfo& scales =
      config.scope == Scope::block    ? parts.require(part, kFloatScaleTypes, {blocks}, codes)
      : config.scope == Scope::tensor ? parts.require(part, kFloatScaleTypes, {Shape{}, Shape{1}, Shape{1, 1}}, codes)
      : config.scope == Scope::row
          ? parts.require(part, kFloatScaleTypes, {Shape{out, 1}, Shape{out}}, codes)
          : parts.require(part, kFloatScaleTypes, {Shape{}, Shape{1}, Shape{1, 1}, Shape{out, 1}, Shape{out}}, codes);
  const bool is_tensor = config.scope != Scope::block && scales.shape.num_elements() == 1;
  const int64_t rows = is_tensor ? 0 : config.scope == Scope::block ? 128 : 1;
  const Fp8Encoding* encoding = Fp8Encoding::find({kind, rows, rows == 128 ? 128 : 0});
  EADEM_CHECK(encoding != nullptr, "{} has no encoding", name);
  return {name, WeightType(DType::bf16, encoding), codes.shape, parts.used()};
}

Tensor load_floats(const WeightSource& files, const QuantizationScheme& config, const QuantizedLayer& layer) {
  const Tensor codes = files.get_bytes(layer.name + ".weight");
  const Parts parts(files, config, layer.name);
  const std::string scale_name = fmt::format("{}.{}", layer.name, scale_part(parts, config));
  if (are_4_bit_floats(*files.find(layer.name + ".weight")))
    return blocks_of_4_bit_floats(layer, codes, exponents_of(files, scale_name));
  Tensor result = Tensor::in_one_piece(layer.type.dtype, layer.shape, *layer.type.encoding);
  std::memcpy(result.view.plane(0), codes.view.data, static_cast<size_t>(codes.view.size_bytes()));
  if (files.find(scale_name)->type_name == "F8_E8M0") {
    const Tensor exponents = exponents_of(files, scale_name);
    auto* to = static_cast<std::byte*>(result.view.plane(1));  // behind the codes: not aligned
    for (int64_t i = 0; i < exponents.view.num_elements(); ++i) {
      const float scale = power_of_two(exponents.view.as<uint8_t>()[i]);
      std::memcpy(to + i * static_cast<int64_t>(sizeof(scale)), &scale, sizeof(scale));
    }
    return result;
  }
  const Tensor scales = converted_on_host(files.get(scale_name).view, DType::f32);
  std::memcpy(result.view.plane(1), scales.view.data, static_cast<size_t>(scales.view.size_bytes()));
  return result;
}

// ---- mxfp4

QuantizedLayer describe_mxfp4(const WeightSource& files, const QuantizationScheme& config, const std::string& name) {
  Parts parts(files, config, name);
  const WeightInfo& codes = parts.require("blocks", {"U8"});
  const int rank = codes.shape.rank();
  if ((rank != 3 && rank != 4) || codes.shape.num_elements() == 0 || codes.shape[rank - 1] != 16)
    parts.fail(described(codes) + "; expected [out, in / 32, 16], with experts before or without");
  std::vector<int64_t> dims(codes.shape.dims().begin(), codes.shape.dims().end() - 1);
  parts.require("scales", {"U8"}, {Shape(dims)}, codes);
  dims.back() *= 32;
  return {name, WeightType(DType::f32, BlockEncoding::find("mxfp4")), Shape(dims), parts.used()};
}

Tensor load_mxfp4(const WeightSource& files, const QuantizationScheme& config, const QuantizedLayer& layer) {
  const auto part = [&](std::string_view name) { return files.get(part_name(config.layout, layer.name, name)); };
  return blocks_of_4_bit_floats(layer, part("blocks"), part("scales"));
}

// ----

struct LayoutCode {
  std::string_view codes;  // the part that holds them
  QuantizedLayer (*describe)(const WeightSource&, const QuantizationScheme&, const std::string&);
  Tensor (*load)(const WeightSource&, const QuantizationScheme&, const QuantizedLayer&);
};

const LayoutCode& code_of(Layout layout) {
  static constexpr LayoutCode kCodes[] = {
      {"qweight", describe_gptq, load_gptq},           {"qweight", describe_awq, load_awq},
      {"weight_packed", describe_packed, load_packed}, {"weight", describe_integers, load_integers},
      {"weight", describe_floats, load_floats},        {"blocks", describe_mxfp4, load_mxfp4}};
  return kCodes[static_cast<size_t>(layout)];
}

}  // namespace

std::string quantized_layer_of(const QuantizationScheme& config, const WeightInfo& tensor) {
  const std::string suffix = part_name(config.layout, "", code_of(config.layout).codes);
  if (!tensor.name.ends_with(suffix) || tensor.name.size() == suffix.size()) return "";
  // Plain layers have a part of this name, too.
  if (config.layout == Layout::integers && tensor.type_name != "I8") return "";
  if (config.layout == Layout::floats && !tensor.type_name.starts_with("F8_") &&
      !(config.method == "fp8" && are_4_bit_floats(tensor)))
    return "";
  return tensor.name.substr(0, tensor.name.size() - suffix.size());
}

QuantizedLayer describe_layer(const WeightSource& files, const QuantizationScheme& config, const std::string& name) {
  return code_of(config.layout).describe(files, config, name);
}

Tensor load_layer(const WeightSource& files, const QuantizationScheme& config, const QuantizedLayer& layer) {
  return code_of(config.layout).load(files, config, layer);
}

}  // namespace eadem::io
