// SPDX-License-Identifier: Apache-2.0
//
// A quantization_config, a byte of 0 and a safetensors file: either refused by an eadem::Error, or a checkpoint whose
// tensors can be read, decoded to their last column and cut.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string_view>

#include "eadem/io/quantized/quantized_checkpoint.h"
#include "eadem/io/safetensors.h"

namespace {

using namespace eadem;

void require(bool condition) {
  if (!condition) std::abort();
}

void read_encoded(const TensorView& view) {
  const int64_t rows = view.shape[0], columns = view.shape[1];
  const bool is_finite = view.encoding->first_not_finite(view, 0, view.shape.num_rows()) == -1;
  std::vector<float> row(static_cast<size_t>(columns));
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(row.begin(), row.end(), std::numeric_limits<float>::quiet_NaN());
    view.encoding->decode_row(row.data(), view, r);
    for (float value : row) require(!is_finite || std::isfinite(value));
  }
  for (int axis : {0, 1}) {
    Shape half = view.shape;
    half[axis] /= 2;
    try {
      view.encoding->slice(Tensor::in_one_piece(view.dtype, half, *view.encoding).view, view, axis, half[axis]);
    } catch (const InvalidArgument&) {
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.find('\0');
  if (end == std::string_view::npos) return 0;
  // Borrowed: the data outlives the file.
  const std::shared_ptr<const void> owner(data, [](const void*) {});
  try {
    const auto config = io::QuantizationConfig::from_json(io::JsonReader::parse(input.substr(0, end), "config.json"));
    if (!config) return 0;
    const auto bytes = std::as_bytes(std::span(input.substr(end + 1)));
    const auto source = io::open_quantized(io::SafetensorsFile::parse("input", bytes, owner), *config);
    for (const io::WeightInfo& info : source->tensors()) {
      if (!info.type) continue;
      try {
        const Tensor tensor = source->get(info.name);
        require(tensor.shape() == info.shape && tensor.view.encoding == info.type->encoding);
        if (tensor.view.encoding != nullptr) read_encoded(tensor.view);
      } catch (const Error&) {
      }
    }
  } catch (const Error&) {
  }
  return 0;
}
