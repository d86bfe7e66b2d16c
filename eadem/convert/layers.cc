// SPDX-License-Identifier: Apache-2.0
#include "eadem/convert/layers.h"

#include <algorithm>
#include <cmath>

#include "eadem/convert/types.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/io/quantized/quantized_writer.h"

namespace eadem::convert {

namespace {

struct LayerType {
  std::string_view name, encoding;
};
constexpr LayerType kLayerTypes[] = {{"int8", "int8_row_bf16"},     {"int4_g32", "int4_g32_bf16"},
                                     {"int4_g64", "int4_g64_bf16"}, {"int4_g128", "int4_g128_bf16"},
                                     {"fp8", "fp8_e4m3_channel"},   {"fp8_block128", "fp8_e4m3_block128"}};

const Encoding* encoding_named(std::string_view name) {
  if (const GroupEncoding* groups = GroupEncoding::find(name)) return groups;
  return Fp8Encoding::find(name);
}

std::string layer_of(const ConvertedTensor& tensor) {
  constexpr std::string_view kSuffix = ".weight";
  EADEM_CHECK(tensor.to.ends_with(kSuffix), "'{}' is no layer's weight", tensor.to);
  return tensor.to.substr(0, tensor.to.size() - kSuffix.size());
}

void encode_weighted(const TensorView& encoded, const TensorView& values, std::span<const float> importance,
                     int64_t begin, int64_t end) {
  if (const GroupEncoding* groups = GroupEncoding::of(encoded.encoding))
    return groups->encode_weighted(encoded, values, importance, begin, end);
  const Fp8Encoding* floats = Fp8Encoding::of(encoded.encoding);
  EADEM_CHECK(floats != nullptr, "{} has no scales to weigh", encoded.encoding->name());
  floats->encode_weighted(encoded, values, importance, begin, end);
}

// Whether the parameter is of a linear layer that is stored in fewer bits. A rounded indexer would choose other tokens;
// pooled rows are few; and the groups of an attention's output are matrices that such a layer is not divided into.
bool is_linear(std::string_view parameter) {
  const auto is_of = [&](std::string_view module) { return parameter.find(module) != std::string_view::npos; };
  return parameter.ends_with("_proj.weight") && !is_of(".indexer.") && !is_of(".compressor.") && !is_of(".o_a_proj.");
}

// Whether transformers may have a linear layer of the tensor's name, which it would expect to be quantized as the
// others.
bool may_be_linear(const ConvertedTensor& tensor) {
  return tensor.shape.rank() == 2 && tensor.to.ends_with(".weight") &&
         tensor.parameter.find("embed_") == std::string::npos;
}

}  // namespace

std::vector<std::string> layer_type_names() {
  std::vector<std::string> names;
  for (const LayerType& type : kLayerTypes) names.emplace_back(type.name);
  return names;
}

std::vector<std::string> all_type_names() {
  std::vector<std::string> names = convert_type_names();
  for (std::string& name : layer_type_names()) names.push_back(std::move(name));
  return names;
}

bool is_layer_type(std::string_view type_name) {
  return std::any_of(std::begin(kLayerTypes), std::end(kLayerTypes),
                     [&](const LayerType& type) { return type.name == type_name; });
}

std::optional<WeightType> layer_type_of(std::string_view type_name, const std::string& parameter, int64_t columns) {
  if (!is_linear(parameter)) return std::nullopt;
  for (const LayerType& type : kLayerTypes) {
    if (type.name != type_name) continue;
    const Encoding* encoding = encoding_named(type.encoding);
    EADEM_CHECK(encoding != nullptr, "no encoding '{}'", type.encoding);
    const GroupEncoding* groups = GroupEncoding::of(encoding);
    if (groups != nullptr && columns % groups->group_columns(columns) != 0) return std::nullopt;
    return WeightType(DType::bf16, encoding);
  }
  return std::nullopt;
}

std::optional<WeightType> layer_type_of(std::string_view type_name, const ConvertedTensor& tensor) {
  if (tensor.shape.rank() != 2 || !tensor.to.ends_with(".weight") || columns_are_outputs(tensor.recipe))
    return std::nullopt;
  const std::vector<std::string> parameters = tensor.recipe.names();
  if (!std::all_of(parameters.begin(), parameters.end(), is_linear)) return std::nullopt;
  return layer_type_of(type_name, tensor.parameter, tensor.shape[1]);
}

bool is_layer_encoding(const WeightType& type) {
  return type.encoding != nullptr && io::can_write_layer(*type.encoding);
}

std::vector<io::TensorHeader> headers_of(const std::vector<ConvertedTensor>& tensors) {
  std::vector<io::TensorHeader> headers;
  for (const ConvertedTensor& tensor : tensors) {
    if (!is_layer_encoding(tensor.type)) {
      headers.push_back(tensor.header());
      continue;
    }
    for (io::TensorHeader& part : io::layer_headers(layer_of(tensor), *tensor.type.encoding, tensor.shape))
      headers.push_back(std::move(part));
  }
  return headers;
}

std::optional<io::JsonValue> quantization_config_of(const std::vector<ConvertedTensor>& tensors) {
  const Encoding* encoding = nullptr;
  std::vector<std::string> ignored;
  for (const ConvertedTensor& tensor : tensors) {
    if (is_layer_encoding(tensor.type))
      encoding = tensor.type.encoding;
    else if (may_be_linear(tensor))
      ignored.push_back(layer_of(tensor));
  }
  if (encoding == nullptr) return std::nullopt;
  return io::quantization_config_of(*encoding, ignored);
}

void convert_layer(ConvertedTensor& tensor, const TensorView& source, std::span<const float> importance,
                   ThreadPool& pool, io::WeightWriter& writer) {
  const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
  // 1. Convert to f32 if encodings do not read the rows' type.
  TensorView values = source;
  Tensor moved;
  if (source.dtype == DType::f64) {
    moved = Tensor::on_host(DType::f32, tensor.shape);
    values = moved.view;
    pool.parallel_for(rows, [&](int64_t row, int) { row_as_f32(moved.view.as<float>() + row * columns, source, row); });
  }

  // 2. Quantize.
  const Encoding& encoding = *tensor.type.encoding;
  const Tensor encoded = Tensor::in_one_piece(tensor.type.dtype, tensor.shape, encoding);
  const auto parallel_for = [&](int64_t count, FunctionRef<void(int64_t)> task) {
    pool.parallel_for(count, [&](int64_t index, int) { task(index); });
  };
  if (importance.empty())
    encoding.encode(encoded.view, values, parallel_for);
  else
    parallel_pieces(encoding.num_pieces(tensor.shape), parallel_for,
                    [&](int64_t begin, int64_t end) { encode_weighted(encoded.view, values, importance, begin, end); });

  // 3. Measure the error, and write the file.
  std::vector<RoundingSums> row_sums(static_cast<size_t>(rows));
  pool.parallel_for(rows, [&](int64_t row, int) {
    std::vector<float> before(static_cast<size_t>(columns)), after(before.size());
    row_as_f32(before.data(), source, row);
    encoding.decode_row(after.data(), encoded.view, row);
    row_sums[static_cast<size_t>(row)].add_row(before, after, importance);
  });
  RoundingSums sums;
  for (const RoundingSums& row : row_sums) sums.add(row);
  tensor.rounding = sums.rounding();
  for (const Tensor& part : io::layer_values(encoded)) writer.write(part.view);
}

}  // namespace eadem::convert
