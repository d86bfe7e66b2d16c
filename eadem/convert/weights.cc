// SPDX-License-Identifier: Apache-2.0
#include "eadem/convert/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <map>
#include <set>

#include "eadem/convert/layers.h"
#include "eadem/convert/types.h"
#include "eadem/core/encodings/block_encoding.h"
#include "eadem/models/huggingface.h"

namespace eadem::convert {

namespace {

// Bytes of a band in the target: small compared with a model, large compared with the cost of a parallel region.
constexpr int64_t kBandBytes = int64_t{16} << 20;

// A matrix as rows of values and of bytes; a vector is one row.
struct Rows {
  Rows(const WeightType& type, const Shape& shape)
      : columns(shape.rank() == 0 ? 1 : shape.back()), count(columns == 0 ? 0 : shape.num_elements() / columns) {
    if (type.encoding == nullptr)
      bytes = columns * static_cast<int64_t>(dtype_size(type.dtype));
    else if (const BlockEncoding* blocks = BlockEncoding::of(type.encoding))
      bytes = blocks->row_bytes(columns);
  }
  int64_t columns, count;
  int64_t bytes = 0;  // bytes of a row; 0 if rows are not contiguous
};

// Reads one row as f32; values beyond f32 become infinities.
void read_row(float* values, const TensorView& view, const Rows& rows, int64_t row) {
  if (view.encoding != nullptr) return view.encoding->decode_row(values, view, row);
  std::byte* source = static_cast<std::byte*>(view.data) + row * rows.bytes;
  convert_on_host(TensorView(values, DType::f32, Shape{rows.columns}),
                  TensorView(source, view.dtype, Shape{rows.columns}));
}

struct ConvertedRow {
  RoundingSums sums;
  std::exception_ptr exception;
};

// The buffers that a thread needs to convert rows.
struct RowConverter {
  const ConvertedTensor& tensor;
  const TensorView& source;
  Rows from, to;
  std::span<const float> importance;
  std::vector<float> values, rounded;

  // Converts row `row` of the target and writes it to `bytes`.
  ConvertedRow convert(std::byte* bytes, int64_t row) {
    ConvertedRow result;
    read_row(values.data(), source, from, row);
    const TensorView wide(values.data(), DType::f32, Shape{to.columns});
    TensorView stored(bytes, tensor.type.dtype, Shape{to.columns});
    if (tensor.type.encoding == nullptr) {
      convert_on_host(stored, wide);
    } else {
      const BlockEncoding* blocks = BlockEncoding::of(tensor.type.encoding);
      EADEM_CHECK(blocks != nullptr, "{} has no blocks to quantize to", tensor.type.name());
      try {
        blocks->quantize_row(reinterpret_cast<uint8_t*>(bytes), values, importance);
      } catch (const InvalidArgument& error) {
        result.exception = std::make_exception_ptr(InvalidArgument("row {}: {}", row, error.what()));
        return result;
      }
      stored.encoding = blocks;
    }
    read_row(rounded.data(), stored, to, 0);
    result.sums.add_row(values, rounded, importance);
    return result;
  }
};

}  // namespace

void RoundingSums::add_row(std::span<const float> values, std::span<const float> rounded,
                           std::span<const float> importance) {
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i], error = value - rounded[i];
    const double weight = importance.empty() ? 0.0 : importance[i];
    largest = std::isfinite(error) ? std::max(largest, std::abs(error)) : HUGE_VAL;
    squares += error * error;
    total += value * value;
    weighted_squares += weight * error * error;
    weighted_total += weight * value * value;
  }
}

void RoundingSums::add(const RoundingSums& other) {
  largest = std::max(largest, other.largest);
  squares += other.squares;
  total += other.total;
  weighted_squares += other.weighted_squares;
  weighted_total += other.weighted_total;
}

Rounding RoundingSums::rounding() const {
  const auto relative = [](double part, double whole) { return whole > 0 ? std::sqrt(part / whole) : 0.0; };
  return {largest, relative(squares, total), relative(weighted_squares, weighted_total)};
}

int64_t stored_bytes(const WeightType& type, const Shape& shape) {
  if (type.encoding == nullptr) return shape.num_elements() * static_cast<int64_t>(dtype_size(type.dtype));
  int64_t total = 0;
  for (const PlaneSpec& plane : type.encoding->planes(shape)) total += plane.size_bytes();
  return total;
}

bool columns_are_outputs(const models::WeightRecipe& recipe) {
  using Kind = models::WeightRecipe::Kind;
  return recipe.kind == Kind::transpose || (recipe.kind == Kind::concat && recipe.axis == 1);
}

WeightType most_common_type(const std::vector<ConvertedTensor>& tensors) {
  std::map<std::string_view, int64_t> bytes;
  WeightType best;
  int64_t most = 0;
  for (const ConvertedTensor& tensor : tensors) {
    if (tensor.shape.rank() < 2 || !is_floating(tensor.type.dtype)) continue;
    const int64_t total = bytes[tensor.type.name()] += stored_bytes(tensor.type, tensor.shape);
    if (total > most) most = total, best = tensor.type;
  }
  return best;
}

namespace {

// The type with the most bits that the parameters of a tensor are to have.
WeightType chosen_type(const std::string& type_name, const models::ModelInfo& model,
                       const std::vector<std::string>& parameters, int64_t columns) {
  WeightType best;
  int64_t most = 0;
  for (const std::string& parameter : parameters) {
    const WeightType type = convert_type_of(type_name, model, parameter, columns);
    const int64_t bytes = stored_bytes(type, Shape{1, columns});
    if (bytes > most) most = bytes, best = type;
  }
  return best;
}

// The type of a tensor of `before` in the target.
WeightType target_type(const ConvertedTensor& tensor, const models::ModelInfo& model, const ConvertPlan& plan) {
  // An encoding that the target cannot store is decoded to a plain dtype.
  WeightType type = tensor.before;
  if (type.encoding != nullptr && BlockEncoding::of(type.encoding) == nullptr) type = DType::f32;
  // Norms and biases are few bytes: they keep what they have, and are f32 in GGUF, where readers expect that, as they
  // do of convolutions and of numbers for each head, which are columns there.
  const bool is_kept = tensor.shape.rank() < 2 || is_vector(tensor.parameter) ||
                       (plan.target_gguf && (tensor.shape.back() == 1 || is_convolution(tensor.parameter)));
  if (is_kept)
    type = plan.target_gguf ? DType::f32 : tensor.before;
  else if (is_layer_type(plan.type))
    type = layer_type_of(plan.type, tensor).value_or(type.encoding == nullptr ? type : DType::bf16);
  else if (plan.type != "as-is")
    type = chosen_type(plan.type, model, tensor.recipe.names(), tensor.shape.back());
  return type.dtype == DType::f64 ? DType::f32 : type;
}

}  // namespace

std::vector<ConvertedTensor> plan_weights(const models::Checkpoint& checkpoint, const ConvertPlan& plan) {
  const io::WeightSource& weights = *checkpoint.weights;
  const models::ParameterReader reader(checkpoint);
  const auto format = plan.target_gguf ? models::CheckpointFormat::gguf : models::CheckpointFormat::huggingface;
  std::vector<ConvertedTensor> result;
  std::set<std::string> used;
  std::map<std::string, Shape> shapes;
  for (const models::ParameterInfo& parameter : checkpoint.model->parameters())
    shapes.emplace(parameter.name, parameter.shape);
  for (auto& [to, recipe] : models::tensors_of(*checkpoint.model, format)) {
    std::string from;
    for (const std::string& parameter : recipe.names()) {
      reader.require_one_value(parameter);
      const std::optional<models::RecipeType> type = reader.type(parameter);
      if (!type) reader.read(parameter);  // throws with the reason
      if (const auto whole = shapes.find(parameter); whole != shapes.end() && type && type->shape != whole->second)
        throw DataCorrupted("{}: '{}' is {}; the model's config implies {}", weights.path(), parameter,
                            to_string(type->shape), to_string(whole->second));
      used.merge(reader.tensors_of(parameter));
      for (const std::string& name : reader.recipe(parameter)->names())
        if (("+" + from + "+").find("+" + name + "+") == std::string::npos) from += (from.empty() ? "" : "+") + name;
    }
    const std::optional<models::RecipeType> made = models::describe(
        recipe, [&](const std::string& parameter) { return reader.type(parameter); }, weights.path());
    EADEM_CHECK(made.has_value(), "'{}' was read but is not known", from);
    const bool is_table = recipe.kind == models::WeightRecipe::Kind::integers;
    if (!is_floating(made->type.dtype) && !is_table)
      throw Unsupported("{}: '{}' is {}; only floating-point tensors are converted", weights.path(), from,
                        dtype_name(made->type.dtype));
    ConvertedTensor converted{.from = from,
                              .to = to,
                              .parameter = recipe.names().front(),
                              .recipe = std::move(recipe),
                              .before = made->type,
                              .shape = made->shape};
    converted.type = is_table ? converted.before : target_type(converted, checkpoint.model->info(), plan);
    result.push_back(std::move(converted));
  }
  reader.require_no_other(used);
  return result;
}

void convert_weights(std::vector<ConvertedTensor>& tensors, const models::Checkpoint& checkpoint,
                     const engine::Calibration* calibration, ThreadPool& pool, io::WeightWriter& writer,
                     const std::function<void(int64_t done, int64_t total, const std::string& name)>& progress) {
  const models::ParameterReader reader(checkpoint);
  int64_t done_bytes = 0, total_bytes = 0;
  for (const ConvertedTensor& tensor : tensors) total_bytes += stored_bytes(tensor.type, tensor.shape);
  std::vector<std::byte> band;
  std::vector<ConvertedRow> converted;
  for (ConvertedTensor& tensor : tensors) {
    if (tensor.constant.defined()) {
      writer.write(tensor.constant.view);
      done_bytes += stored_bytes(tensor.type, tensor.shape);
      continue;
    }
    const auto read = [&](const std::string& parameter) { return reader.read(parameter); };
    const auto release = [&] {
      for (const std::string& parameter : tensor.recipe.names()) reader.release(parameter);
    };
    const Tensor source = models::evaluate(tensor.recipe, read, checkpoint.weights->path());
    const bool unchanged = tensor.type == tensor.before;
    std::vector<float> importance;
    if (calibration != nullptr && tensor.shape.rank() == 2 && !columns_are_outputs(tensor.recipe) && !unchanged)
      importance = calibration->importance(tensor.parameter);
    EADEM_CHECK(importance.empty() || std::ssize(importance) == tensor.shape.back(), "{} importances of '{}' {}",
                importance.size(), tensor.from, to_string(tensor.shape));
    if (is_layer_encoding(tensor.type)) {
      progress(done_bytes, total_bytes, tensor.to);
      try {
        convert_layer(tensor, source.view, importance, pool, writer);
      } catch (const InvalidArgument& error) {
        throw InvalidArgument("{}: '{}': {}", checkpoint.weights->path(), tensor.from, error.what());
      }
      release();
      done_bytes += stored_bytes(tensor.type, tensor.shape);
      continue;
    }
    const Rows from(tensor.before, tensor.shape), to(tensor.type, tensor.shape);
    EADEM_CHECK(to.bytes > 0 || to.columns == 0, "'{}' to {}", tensor.from, tensor.type.name());
    const std::vector<float> row_of_values(static_cast<size_t>(to.columns));
    std::vector<RowConverter> converters(
        static_cast<size_t>(pool.num_threads()),
        RowConverter{tensor, source.view, from, to, importance, row_of_values, row_of_values});
    RoundingSums sums;
    const int64_t band_rows = std::max<int64_t>(1, kBandBytes / std::max<int64_t>(to.bytes, 1));
    for (int64_t begin = 0; begin < to.count; begin += band_rows) {
      progress(done_bytes, total_bytes, tensor.to);
      const int64_t rows = std::min(band_rows, to.count - begin);
      band.resize(static_cast<size_t>(rows * to.bytes));
      if (unchanged) {
        std::memcpy(band.data(), static_cast<const std::byte*>(source.view.data) + begin * from.bytes,
                    static_cast<size_t>(rows * to.bytes));
      } else {
        converted.assign(static_cast<size_t>(rows), {});
        pool.parallel_for(rows, [&](int64_t row, int worker) {
          converted[static_cast<size_t>(row)] =
              converters[static_cast<size_t>(worker)].convert(band.data() + row * to.bytes, begin + row);
        });
        for (const ConvertedRow& row : converted) {
          try {
            if (row.exception) std::rethrow_exception(row.exception);
          } catch (const InvalidArgument& exception) {
            throw InvalidArgument("{}: '{}': {}", checkpoint.weights->path(), tensor.from, exception.what());
          }
          if (!std::isfinite(row.sums.largest))
            throw InvalidArgument("{}: '{}' has values that {} cannot hold", checkpoint.weights->path(), tensor.from,
                                  tensor.type.name());
          sums.add(row.sums);
        }
      }
      TensorView view(band.data(), tensor.type.dtype, Shape{rows, to.columns});
      view.encoding = tensor.type.encoding;
      writer.write(view);
      release();  // frees the pages read so far; pages still needed are read again
      done_bytes += rows * to.bytes;
    }
    tensor.rounding = sums.rounding();
  }
  progress(total_bytes, total_bytes, "");
}

}  // namespace eadem::convert
