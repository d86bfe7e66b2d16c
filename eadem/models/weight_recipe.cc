// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/weight_recipe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/core/error.h"

namespace eadem::models {

namespace {

using Kind = WeightRecipe::Kind;

WeightRecipe recipe_of(Kind kind, std::vector<WeightRecipe> parts) {
  WeightRecipe recipe;
  recipe.kind = kind;
  recipe.parts = std::move(parts);
  return recipe;
}

bool has_contiguous_rows(const WeightType& type) {
  return type.encoding == nullptr || BlockEncoding::of(type.encoding) != nullptr;
}

// Whether [begin, end) of `rows` rows begins or ends within blocks of rows that share scales.
bool cuts_blocks(const WeightType& type, int64_t begin, int64_t end, int64_t rows) {
  const Fp8Encoding* fp8 = Fp8Encoding::of(type.encoding);
  const int64_t block = fp8 == nullptr ? 0 : fp8->format().block_rows;
  return block > 0 && (begin % block != 0 || (end % block != 0 && end != rows));
}

// Bytes of a run along the last axis.
int64_t row_bytes(const WeightType& type, int64_t columns) {
  const BlockEncoding* blocks = BlockEncoding::of(type.encoding);
  return blocks != nullptr ? blocks->row_bytes(columns) : columns * static_cast<int64_t>(dtype_size(type.dtype));
}

// A tensor as [outer, extent of an axis, bytes of what lies within].
struct Grid {
  Grid(const WeightType& type, const Shape& shape, int axis) : extent(shape[axis]) {
    for (int i = 0; i < axis; ++i) outer *= shape[i];
    if (axis == shape.rank() - 1) {
      inner = static_cast<int64_t>(dtype_size(type.dtype));
      return;
    }
    inner = row_bytes(type, shape.back());
    for (int i = axis + 1; i < shape.rank() - 1; ++i) inner *= shape[i];
  }
  int64_t outer = 1, extent, inner = 0;
};

Tensor new_tensor(const RecipeType& made) {
  return made.type.encoding == nullptr ? Tensor::on_host(made.type.dtype, made.shape)
                                       : Tensor::in_one_piece(made.type.dtype, made.shape, *made.type.encoding);
}

RecipeType type_of(const Tensor& tensor) { return {{tensor.dtype(), tensor.view.encoding}, tensor.shape()}; }

std::string first_name_of(const WeightRecipe& recipe) { return recipe.names().front(); }

// The type of a stack whose parts cannot be moved as bytes: matrices of one encoding keep it, all else is decoded.
WeightType stacked_type(const std::vector<RecipeType>& parts) {
  const RecipeType& first = parts.front();
  const bool alike = std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return part.type == first.type; });
  if (!alike || first.type.encoding == nullptr || first.shape.rank() != 2) return DType::f32;
  return {first.type.dtype, stack_encoding(first.type.encoding)};
}

// Whether the shapes are equal but for extents of 1 in front, which programs that write GGUF files drop.
bool has_axes_of(const Shape& shape, const Shape& expected) {
  const auto axes = [](const Shape& all) {
    auto dims = all.dims();
    while (!dims.empty() && dims.front() == 1) dims = dims.subspan(1);
    return dims;
  };
  return std::ranges::equal(axes(shape), axes(expected));
}

// The type of a tensor seen in another shape. Rows of blocks stay as they are. Matrices in 8-bit floats that lie one
// below another are a stack of them where none shares scales with the next, and decoded where one does. Nothing for
// what has no such shape.
std::optional<WeightType> reshaped_type(const RecipeType& from, const Shape& shape) {
  if (from.type.encoding == nullptr) return from.type;
  if (BlockEncoding::of(from.type.encoding) != nullptr && from.shape.back() == shape.back()) return from.type;
  const Encoding* matrix = matrix_encoding(from.type.encoding);
  const Fp8Encoding* fp8 = Fp8Encoding::of(matrix);
  const bool joins = from.shape.rank() == 3 && shape.rank() == 2, parts = from.shape.rank() == 2 && shape.rank() == 3;
  if (fp8 == nullptr || !(joins || parts) || from.shape.back() != shape.back()) return std::nullopt;
  const int64_t block = fp8->format().block_rows, rows = parts ? shape[1] : from.shape[1];
  if (block == 0 || rows % block != 0) return DType::f32;
  return WeightType(from.type.dtype, parts ? stack_encoding(matrix) : matrix);
}

// The rules of types and shapes, for one operation over parts that are known.
RecipeType combine(const WeightRecipe& recipe, const std::vector<RecipeType>& parts, const std::string& source) {
  const RecipeType& first = parts.front();
  const int rank = first.shape.rank();
  const auto fail = [&](const std::string& expected) {
    throw DataCorrupted("{}: '{}' is {}; expected {}", source, first_name_of(recipe), to_string(first.shape), expected);
  };
  const auto refuse_encoding = [&](const char* what) {
    if (first.type.encoding != nullptr)
      throw Unsupported("{}: '{}' is stored in {}, which cannot be {}", source, first_name_of(recipe),
                        first.type.name(), what);
  };
  const auto require_one_shape = [&] {
    for (size_t i = 0; i < parts.size(); ++i)
      if (!(parts[i].shape == first.shape))
        throw DataCorrupted("{}: '{}' is {}; '{}' is {}", source, first_name_of(recipe.parts[i]),
                            to_string(parts[i].shape), first_name_of(recipe), to_string(first.shape));
  };
  RecipeType result = first;
  // Whether rows can be moved as bytes.
  const bool as_bytes =
      has_contiguous_rows(first.type) &&
      std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return part.type == first.type; });
  switch (recipe.kind) {
    case Kind::name: break;
    case Kind::slice:
      if (rank <= recipe.axis || first.shape[recipe.axis] != recipe.sizes[1])
        fail(fmt::format("{} along axis {}, of which [{}, {}) are taken", recipe.sizes[1], recipe.axis, recipe.begin,
                         recipe.begin + recipe.step * recipe.sizes[0]));
      if (recipe.axis == rank - 1) refuse_encoding("cut within a row");
      result.shape[recipe.axis] = recipe.sizes[0];
      if ((recipe.step > 1 && !as_bytes) ||
          (recipe.axis == 0 && cuts_blocks(first.type, recipe.begin, recipe.begin + recipe.sizes[0], first.shape[0])))
        result.type = DType::f32;
      break;
    case Kind::interleave:
      if (rank <= recipe.axis) fail("more axes");
      require_one_shape();
      if (recipe.axis == rank - 1) refuse_encoding("joined within rows");
      result.shape[recipe.axis] *= static_cast<int64_t>(parts.size());
      if (!as_bytes) result.type = DType::f32;
      break;
    case Kind::select: {
      if (rank < 2 || recipe.begin >= first.shape[0]) fail(fmt::format("more than {} along axis 0", recipe.begin));
      if (!recipe.sizes.empty() && first.shape[0] != recipe.sizes[0])
        fail(fmt::format("{} along axis 0", recipe.sizes[0]));
      std::vector<int64_t> dims(first.shape.dims().begin() + 1, first.shape.dims().end());
      result.shape = Shape(dims);
      if (StackedEncoding::of(first.type.encoding) != nullptr)
        result.type.encoding = matrix_encoding(first.type.encoding);
      else if (!as_bytes)
        result.type = DType::f32;
      break;
    }
    case Kind::concat: {
      int64_t total = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        Shape expected = first.shape;
        if (rank <= recipe.axis) fail("more axes");
        expected[recipe.axis] = recipe.sizes[i];
        if (!(parts[i].shape == expected))
          throw DataCorrupted("{}: '{}' is {}; expected {}", source, first_name_of(recipe.parts[i]),
                              to_string(parts[i].shape), to_string(expected));
        total += recipe.sizes[i];
      }
      if (recipe.axis == rank - 1 && rank > 1) refuse_encoding("joined within rows");
      result.shape[recipe.axis] = total;
      if (!as_bytes) result.type = DType::f32;
      break;
    }
    case Kind::stack: {
      require_one_shape();
      std::vector<int64_t> dims = {static_cast<int64_t>(parts.size())};
      dims.insert(dims.end(), first.shape.dims().begin(), first.shape.dims().end());
      result.shape = Shape(dims);
      if (!as_bytes) result.type = stacked_type(parts);
      break;
    }
    case Kind::transpose:
      if (rank < 2) fail("a matrix");
      std::swap(result.shape[rank - 2], result.shape[rank - 1]);
      if (first.type.encoding != nullptr) result.type = DType::f32;
      break;
    case Kind::reorder:
      if (rank < 1 || first.shape[0] % recipe.begin != 0) fail(fmt::format("heads of {} rows", recipe.begin));
      if (rank == 1) refuse_encoding("put in another order");
      if (!as_bytes) result.type = DType::f32;
      break;
    case Kind::reshape:
      if (!has_axes_of(first.shape, recipe.from)) fail(to_string(recipe.from));
      result.shape = recipe.shape;
      if (const auto type = reshaped_type(first, recipe.shape))
        result.type = *type;
      else
        refuse_encoding("seen in another shape");
      break;
    case Kind::whole_numbers:
      if (!(first.type == WeightType(DType::i32)) && !(first.type == WeightType(DType::i64)))
        throw DataCorrupted("{}: '{}' is {}; expected i32 or i64", source, first_name_of(recipe), first.type.name());
      result.type = DType::f32;
      break;
    case Kind::integers: result.type = recipe.dtype; break;
    case Kind::add:
    case Kind::scale:
    case Kind::log_of_negative:
    case Kind::negative_exp: result.type = DType::f32; break;
  }
  return result;
}

// Copies runs of `count` along the axis of a grid to [begin, …) along that of another.
void copy_runs(std::byte* to, const Grid& to_grid, int64_t to_begin, const std::byte* from, const Grid& from_grid,
               int64_t from_begin, int64_t count) {
  for (int64_t o = 0; o < to_grid.outer; ++o)
    std::memcpy(to + (o * to_grid.extent + to_begin) * to_grid.inner,
                from + (o * from_grid.extent + from_begin) * from_grid.inner,
                static_cast<size_t>(count * to_grid.inner));
}

const std::byte* bytes_of(const Tensor& tensor) { return static_cast<const std::byte*>(tensor.view.data); }
std::byte* bytes_of(Tensor& tensor) { return static_cast<std::byte*>(tensor.view.data); }

Tensor as_type(const Tensor& tensor, const WeightType& type) {
  return WeightType(tensor.dtype(), tensor.view.encoding) == type ? tensor : values_in_f32(tensor.view);
}

// Copies to_begin, to_begin + to_step, … along the axis of a grid from those of another.
void copy_every(std::byte* to, const Grid& to_grid, int64_t to_begin, int64_t to_step, const std::byte* from,
                const Grid& from_grid, int64_t from_begin, int64_t from_step, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    copy_runs(to, to_grid, to_begin + i * to_step, from, from_grid, from_begin + i * from_step, 1);
}

Tensor every(const Tensor& part, const RecipeType& made, int axis, int64_t begin, int64_t step) {
  const Tensor whole = as_type(part, made.type);
  Tensor result = new_tensor(made);
  copy_every(bytes_of(result), Grid(made.type, made.shape, axis), 0, 1, bytes_of(whole),
             Grid(made.type, whole.shape(), axis), begin, step, made.shape[axis]);
  return result;
}

Tensor interleaved(const std::vector<Tensor>& parts, const RecipeType& made, int axis) {
  Tensor result = new_tensor(made);
  const auto step = static_cast<int64_t>(parts.size());
  for (int64_t i = 0; i < step; ++i) {
    const Tensor own = as_type(parts[static_cast<size_t>(i)], made.type);
    const Grid from(made.type, own.shape(), axis);
    copy_every(bytes_of(result), Grid(made.type, made.shape, axis), i, step, bytes_of(own), from, 0, 1, from.extent);
  }
  return result;
}

Tensor sliced(const Tensor& whole, const RecipeType& made, int axis, int64_t begin) {
  const Tensor part = as_type(whole, made.type);
  if (!has_contiguous_rows(made.type)) {
    Tensor result = new_tensor(made);
    made.type.encoding->slice(result.view, part.view, axis, begin);
    return result;
  }
  const Grid from(made.type, part.shape(), axis), to(made.type, made.shape, axis);
  if (from.outer == 1) {  // one run: no copy
    TensorView view(static_cast<std::byte*>(part.view.data) + begin * from.inner, made.type.dtype, made.shape);
    view.encoding = made.type.encoding;
    return Tensor(view, part.storage);
  }
  Tensor result = new_tensor(made);
  copy_runs(bytes_of(result), to, 0, bytes_of(part), from, begin, to.extent);
  return result;
}

Tensor selected(const Tensor& part, const RecipeType& made, int64_t index) {
  if (StackedEncoding::of(part.view.encoding) != nullptr)
    return Tensor(MatrixStack(part.view).matrix(part.view, index), part.storage);
  const Tensor whole = as_type(part, made.type);
  const int64_t bytes = Grid(made.type, whole.shape(), 0).inner;
  TensorView view(static_cast<std::byte*>(whole.view.data) + index * bytes, made.type.dtype, made.shape);
  view.encoding = made.type.encoding;
  return Tensor(view, whole.storage);
}

Tensor joined(const std::vector<Tensor>& parts, const RecipeType& made, int axis) {
  Tensor result = new_tensor(made);
  const Grid to(made.type, made.shape, axis);
  int64_t begin = 0;
  for (const Tensor& part : parts) {
    const Tensor own = as_type(part, made.type);
    const Grid from(made.type, own.shape(), axis);
    copy_runs(bytes_of(result), to, begin, bytes_of(own), from, 0, from.extent);
    begin += from.extent;
  }
  return result;
}

// Copies the planes of encoded matrices.
Tensor stacked_planes(const std::vector<Tensor>& parts, const RecipeType& made) {
  Tensor result = new_tensor(made);
  const MatrixStack stack(result.view);
  const std::vector<PlaneSpec> planes = matrix_encoding(made.type.encoding)->planes(parts.front().shape());
  for (size_t i = 0; i < parts.size(); ++i) {
    const TensorView to = stack.matrix(result.view, static_cast<int64_t>(i));
    for (int plane = 0; plane < static_cast<int>(planes.size()); ++plane)
      std::memcpy(to.plane(plane), parts[i].view.plane(plane),
                  static_cast<size_t>(planes[static_cast<size_t>(plane)].size_bytes()));
  }
  return result;
}

Tensor stacked(const std::vector<Tensor>& parts, const RecipeType& made) {
  if (StackedEncoding::of(made.type.encoding) != nullptr) return stacked_planes(parts, made);
  Tensor result = new_tensor(made);
  const int64_t bytes = Grid(made.type, made.shape, 0).inner;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor own = as_type(parts[i], made.type);
    std::memcpy(bytes_of(result) + static_cast<int64_t>(i) * bytes, bytes_of(own), static_cast<size_t>(bytes));
  }
  return result;
}

Tensor transposed(const Tensor& part, const RecipeType& made) {
  const Tensor own = as_type(part, made.type);
  Tensor result = new_tensor(made);
  const int rank = made.shape.rank();
  const int64_t rows = made.shape[rank - 2], columns = made.shape[rank - 1], matrix = rows * columns;
  const auto size = static_cast<int64_t>(dtype_size(made.type.dtype));
  for (int64_t i = 0; i < made.shape.num_elements(); ++i) {
    const int64_t first = i / matrix * matrix, r = i % matrix / columns, c = i % columns;
    std::memcpy(bytes_of(result) + i * size, bytes_of(own) + (first + c * rows + r) * size, static_cast<size_t>(size));
  }
  return result;
}

// Rows 0 1 2 3 … of a head in interleaved order are 0 2 4 … 1 3 5 … in halves.
Tensor reordered(const Tensor& part, const RecipeType& made, int64_t head_dim, HeadOrder order) {
  const Tensor own = as_type(part, made.type);
  Tensor result = new_tensor(made);
  const int64_t bytes = Grid(made.type, made.shape, 0).inner, half = head_dim / 2;
  for (int64_t row = 0; row < made.shape[0]; ++row) {
    const int64_t first = row / head_dim * head_dim, i = row % head_dim;
    const int64_t from = first + (order == HeadOrder::halves ? i % half * 2 + i / half : i % 2 * half + i / 2);
    std::memcpy(bytes_of(result) + row * bytes, bytes_of(own) + from * bytes, static_cast<size_t>(bytes));
  }
  return result;
}

Tensor reshaped(const Tensor& part, const RecipeType& made) {
  const Tensor values = as_type(part, made.type.encoding == nullptr ? made.type : type_of(part).type);
  TensorView view(values.view.data, made.type.dtype, made.shape);
  view.encoding = made.type.encoding;
  view.more_planes = values.view.more_planes;
  return Tensor(view, values.storage);
}

// f(x) of every value, in f32.
template <typename Function>
Tensor each_value(const Tensor& part, Function f) {
  const Tensor values = values_in_f32(part.view);
  Tensor result = Tensor::on_host(DType::f32, part.shape());
  std::transform(values.view.as<float>(), values.view.as<float>() + values.view.num_elements(), result.view.as<float>(),
                 f);
  return result;
}

Tensor whole_numbers_of(const Tensor& part, const WeightRecipe& recipe, const std::string& source) {
  const TensorView& view = part.view;
  Tensor result = Tensor::on_host(DType::f32, part.shape());
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    const int64_t value = view.dtype == DType::i64 ? view.as<int64_t>()[i] : view.as<int32_t>()[i];
    if (value < 0 || value >= recipe.begin)
      throw DataCorrupted("{}: number {} of '{}' is {}; expected one of [0, {})", source, i, first_name_of(recipe),
                          value, recipe.begin);
    result.view.as<float>()[i] = static_cast<float>(value);
  }
  return result;
}

Tensor integers_of(const Tensor& part, DType dtype) {
  const Tensor values = values_in_f32(part.view);
  Tensor result = Tensor::on_host(dtype, part.shape());
  for (int64_t i = 0; i < values.view.num_elements(); ++i)
    if (dtype == DType::i64)
      result.view.as<int64_t>()[i] = static_cast<int64_t>(values.view.as<float>()[i]);
    else
      result.view.as<int32_t>()[i] = static_cast<int32_t>(values.view.as<float>()[i]);
  return result;
}

// The parts of tensors that parameters were found to use.
class Inverter {
 public:
  void walk(const WeightRecipe& recipe, WeightRecipe value) {
    switch (recipe.kind) {
      case Kind::name: return add_piece(recipe.tensor, {0, 0, 1, 0, 0, std::move(value)});
      case Kind::slice:
        return add_piece(recipe.parts[0].tensor,
                         {recipe.axis, recipe.begin, recipe.step, recipe.sizes[0], recipe.sizes[1], std::move(value)});
      case Kind::transpose: return walk(recipe.parts[0], WeightRecipe::transpose(std::move(value)));
      case Kind::reorder:
        return walk(recipe.parts[0], WeightRecipe::reorder(std::move(value), recipe.begin,
                                                           recipe.order == HeadOrder::halves ? HeadOrder::interleaved
                                                                                             : HeadOrder::halves));
      case Kind::add: return walk(recipe.parts[0], WeightRecipe::add(std::move(value), -recipe.addend));
      case Kind::scale: return walk(recipe.parts[0], WeightRecipe::scale(std::move(value), 1 / recipe.factor));
      case Kind::reshape:
        return walk(recipe.parts[0], WeightRecipe::reshape(std::move(value), recipe.shape, recipe.from));
      case Kind::log_of_negative: return walk(recipe.parts[0], WeightRecipe::negative_exp(std::move(value)));
      case Kind::negative_exp: return walk(recipe.parts[0], WeightRecipe::log_of_negative(std::move(value)));
      case Kind::whole_numbers: {
        WeightRecipe inverse = recipe_of(Kind::integers, {std::move(value)});
        inverse.dtype = recipe.dtype;
        return walk(recipe.parts[0], std::move(inverse));
      }
      case Kind::integers: break;  // only inverses are of this kind
      case Kind::stack:
        for (size_t i = 0; i < recipe.parts.size(); ++i) {
          WeightRecipe part = recipe_of(Kind::select, {value});
          part.begin = static_cast<int64_t>(i);
          walk(recipe.parts[i], std::move(part));
        }
        return;
      case Kind::concat: {
        int64_t begin = 0, whole = 0;
        for (int64_t size : recipe.sizes) whole += size;
        for (size_t i = 0; i < recipe.parts.size(); ++i) {
          WeightRecipe part = recipe_of(Kind::slice, {value});
          part.axis = recipe.axis;
          part.begin = begin;
          part.sizes = {recipe.sizes[i], whole};
          begin += recipe.sizes[i];
          walk(recipe.parts[i], std::move(part));
        }
        return;
      }
      case Kind::interleave: break;  // only inverses are of this kind
      case Kind::select:
        if (recipe.sizes.empty()) break;
        return walk(recipe.parts[0], WeightRecipe::stack({std::move(value)}));
    }
    throw InvalidArgument("'{}': this recipe has no inverse", first_name_of(recipe));
  }

  std::vector<NamedRecipe> finish() {
    std::vector<NamedRecipe> result;
    for (const std::string& tensor : order_) result.emplace_back(tensor, assembled(tensor, pieces_.at(tensor)));
    return result;
  }

 private:
  struct Piece {
    int axis;
    int64_t begin, step, size, whole;  // whole 0: all of the tensor
    WeightRecipe value;
  };

  void add_piece(const std::string& tensor, Piece piece) {
    std::vector<Piece>& pieces = pieces_[tensor];
    if (pieces.empty()) order_.push_back(tensor);
    const bool again = std::any_of(pieces.begin(), pieces.end(), [&](const Piece& other) {
      return other.whole == 0 && piece.whole == 0;  // tied
    });
    if (!again) pieces.push_back(std::move(piece));
  }

  static WeightRecipe assembled(const std::string& tensor, std::vector<Piece>& pieces) {
    if (pieces.size() == 1 && pieces[0].whole == 0) return pieces[0].value;
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    std::vector<WeightRecipe> parts;
    std::vector<int64_t> sizes;
    const int64_t step = pieces[0].step;
    int64_t end = 0;
    for (const Piece& piece : pieces) {
      if (piece.whole == 0 || piece.axis != pieces[0].axis || piece.step != step || piece.begin != end)
        throw InvalidArgument("'{}' is used up to {} and from {}", tensor, end, piece.begin);
      end += step > 1 ? 1 : piece.size;
      parts.push_back(piece.value);
      sizes.push_back(piece.size);
    }
    if (step > 1) {
      if (end != step) throw InvalidArgument("'{}': {} of each {} are used", tensor, end, step);
      WeightRecipe recipe = recipe_of(Kind::interleave, std::move(parts));
      recipe.axis = pieces[0].axis;
      return recipe;
    }
    if (end != pieces[0].whole) throw InvalidArgument("'{}' is used up to {} of {}", tensor, end, pieces[0].whole);
    return parts.size() == 1 ? parts[0] : WeightRecipe::concat(std::move(parts), pieces[0].axis, std::move(sizes));
  }

  std::map<std::string, std::vector<Piece>> pieces_;
  std::vector<std::string> order_;
};

}  // namespace

WeightRecipe WeightRecipe::name(std::string tensor) {
  WeightRecipe recipe;
  recipe.tensor = std::move(tensor);
  return recipe;
}

WeightRecipe WeightRecipe::concat(std::vector<WeightRecipe> parts, int axis, std::vector<int64_t> sizes) {
  WeightRecipe recipe = recipe_of(Kind::concat, std::move(parts));
  recipe.axis = axis;
  recipe.sizes = std::move(sizes);
  return recipe;
}

WeightRecipe WeightRecipe::slice(std::string tensor, int axis, int64_t begin, int64_t size, int64_t whole) {
  WeightRecipe recipe = recipe_of(Kind::slice, {name(std::move(tensor))});
  recipe.axis = axis;
  recipe.begin = begin;
  recipe.sizes = {size, whole};
  return recipe;
}

WeightRecipe WeightRecipe::every(std::string tensor, int axis, int64_t begin, int64_t step, int64_t whole) {
  WeightRecipe recipe = slice(std::move(tensor), axis, begin, whole / step, whole);
  recipe.step = step;
  return recipe;
}

WeightRecipe WeightRecipe::stack(std::vector<WeightRecipe> parts) { return recipe_of(Kind::stack, std::move(parts)); }

WeightRecipe WeightRecipe::only(WeightRecipe part) {
  WeightRecipe recipe = recipe_of(Kind::select, {std::move(part)});
  recipe.sizes = {1};
  return recipe;
}

WeightRecipe WeightRecipe::transpose(WeightRecipe part) { return recipe_of(Kind::transpose, {std::move(part)}); }

WeightRecipe WeightRecipe::reorder(WeightRecipe part, int64_t head_dim, HeadOrder order) {
  WeightRecipe recipe = recipe_of(Kind::reorder, {std::move(part)});
  recipe.begin = head_dim;
  recipe.order = order;
  return recipe;
}

WeightRecipe WeightRecipe::add(WeightRecipe part, float addend) {
  WeightRecipe recipe = recipe_of(Kind::add, {std::move(part)});
  recipe.addend = addend;
  return recipe;
}

WeightRecipe WeightRecipe::scale(WeightRecipe part, double factor) {
  if (factor == 1) return part;
  WeightRecipe recipe = recipe_of(Kind::scale, {std::move(part)});
  recipe.factor = factor;
  return recipe;
}

WeightRecipe WeightRecipe::reshape(WeightRecipe part, const Shape& from, const Shape& shape) {
  EADEM_CHECK(from.num_elements() == shape.num_elements(), "{} as {}", to_string(from), to_string(shape));
  WeightRecipe recipe = recipe_of(Kind::reshape, {std::move(part)});
  recipe.from = from;
  recipe.shape = shape;
  return recipe;
}

WeightRecipe WeightRecipe::log_of_negative(WeightRecipe part) {
  return recipe_of(Kind::log_of_negative, {std::move(part)});
}

WeightRecipe WeightRecipe::negative_exp(WeightRecipe part) { return recipe_of(Kind::negative_exp, {std::move(part)}); }

WeightRecipe WeightRecipe::whole_numbers(WeightRecipe part, int64_t end, DType dtype) {
  EADEM_CHECK(end > 0 && end <= int64_t{1} << 24, "numbers below {} are not exact in f32", end);
  EADEM_CHECK(dtype == DType::i32 || dtype == DType::i64, "whole numbers in {}", dtype_name(dtype));
  WeightRecipe recipe = recipe_of(Kind::whole_numbers, {std::move(part)});
  recipe.begin = end;
  recipe.dtype = dtype;
  return recipe;
}

std::vector<std::string> WeightRecipe::names() const {
  if (is_name()) return {tensor};
  std::vector<std::string> result;
  for (const WeightRecipe& part : parts)
    for (std::string& name : part.names()) result.push_back(std::move(name));
  return result;
}

std::optional<RecipeType> describe(const WeightRecipe& recipe, const DescribeName& tensors, const std::string& source) {
  if (recipe.is_name()) return tensors(recipe.tensor);
  std::vector<RecipeType> parts;
  for (const WeightRecipe& part : recipe.parts) {
    const std::optional<RecipeType> known = describe(part, tensors, source);
    if (!known) return std::nullopt;
    parts.push_back(*known);
  }
  return combine(recipe, parts, source);
}

Tensor evaluate(const WeightRecipe& recipe, const ReadName& read, const std::string& source) {
  if (recipe.is_name()) return read(recipe.tensor);
  std::vector<Tensor> parts;
  std::vector<RecipeType> types;
  for (const WeightRecipe& part : recipe.parts) {
    parts.push_back(evaluate(part, read, source));
    types.push_back(type_of(parts.back()));
  }
  const RecipeType made = combine(recipe, types, source);
  switch (recipe.kind) {
    case Kind::name: break;
    case Kind::slice:
      return recipe.step > 1 ? every(parts[0], made, recipe.axis, recipe.begin, recipe.step)
                             : sliced(parts[0], made, recipe.axis, recipe.begin);
    case Kind::interleave: return interleaved(parts, made, recipe.axis);
    case Kind::select: return selected(parts[0], made, recipe.begin);
    case Kind::concat: return joined(parts, made, recipe.axis);
    case Kind::stack: return stacked(parts, made);
    case Kind::transpose: return transposed(parts[0], made);
    case Kind::reorder: return reordered(parts[0], made, recipe.begin, recipe.order);
    case Kind::add: return each_value(parts[0], [&](float x) { return x + recipe.addend; });
    case Kind::scale:
      return each_value(parts[0], [&](float x) { return static_cast<float>(static_cast<double>(x) * recipe.factor); });
    case Kind::reshape: return reshaped(parts[0], made);
    case Kind::log_of_negative: return each_value(parts[0], [](float x) { return std::log(-x); });
    case Kind::negative_exp: return each_value(parts[0], [](float x) { return -std::exp(x); });
    case Kind::whole_numbers: return whole_numbers_of(parts[0], recipe, source);
    case Kind::integers: return integers_of(parts[0], recipe.dtype);
  }
  return parts[0];
}

WeightRecipe part_of_first_axis(const WeightRecipe& recipe, PartRange range, int64_t whole, int rank) {
  WeightRecipe result = recipe;
  const auto of_each_part = [&] {
    for (WeightRecipe& part : result.parts) part = part_of_first_axis(part, range, whole, rank);
    return result;
  };
  switch (recipe.kind) {
    case Kind::stack: {
      EADEM_CHECK(std::ssize(recipe.parts) == whole, "{} of {} slices", recipe.parts.size(), whole);
      const auto begin = recipe.parts.begin() + range.begin;
      result.parts.assign(begin, begin + range.size);
      return result;
    }
    case Kind::slice:
    case Kind::concat:
    case Kind::interleave:
      if (recipe.axis > 0) return of_each_part();
      break;
    case Kind::transpose:
      if (rank > 2) return of_each_part();
      break;
    case Kind::add:
    case Kind::scale:
    case Kind::log_of_negative:
    case Kind::negative_exp:
    case Kind::whole_numbers:
    case Kind::integers: return of_each_part();
    case Kind::name:
    case Kind::select:
    case Kind::reorder:
    case Kind::reshape: break;
  }
  WeightRecipe part = recipe_of(Kind::slice, {recipe});
  part.begin = range.begin;
  part.sizes = {range.size, whole};
  return part;
}

Tensor values_in_f32(const TensorView& view) {
  if (view.encoding == nullptr) return converted_on_host(view, DType::f32);
  Tensor result = Tensor::on_host(DType::f32, view.shape);
  view.encoding->decode(result.view, view);
  return result;
}

std::vector<NamedRecipe> invert(std::span<const NamedRecipe> parameters) {
  Inverter inverter;
  for (const auto& [parameter, recipe] : parameters) inverter.walk(recipe, WeightRecipe::name(parameter));
  return inverter.finish();
}

}  // namespace eadem::models
