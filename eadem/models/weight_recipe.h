// SPDX-License-Identifier: Apache-2.0
//
// WeightRecipe: how a parameter is made of tensors of a checkpoint, or a tensor of a checkpoint of parameters. A recipe
// is an expression whose leaves are names; every operation moves values or changes each by a function with an inverse,
// so that recipes can be inverted. Loading runs them forwards, saving and converting backwards.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eadem/core/mesh/mesh_axis.h"
#include "eadem/core/tensor.h"

namespace eadem::models {

// Names of tensors, and the order of their values, differ between the formats of checkpoints.
enum class CheckpointFormat : uint8_t { huggingface, gguf };

// Rows of each head rotate in pairs: (i, i + n/2) or (2i, 2i + 1).
enum class HeadOrder : uint8_t { halves, interleaved };

struct WeightRecipe {
  enum class Kind : uint8_t {
    name,        // the tensor itself
    concat,      // parts one after another along `axis`; `sizes` has their extents
    slice,       // begin, begin + step, … along `axis`, sizes[0] of them, of a tensor with sizes[1]; of a name only
    interleave,  // of parts of one shape in turn along `axis`: the first of each, then the second …
    stack,       // parts of one shape as the slices of a new first axis
    select,      // slice `begin` of the first axis, which is dropped; with sizes[0], of so many slices
    transpose,   // of the last two axes
    reorder,     // rows of each head of `begin` rows in `order`; they are in the other one
    add,         // `addend` added to every value, in f32
    scale,       // `factor` times every value, in f32
    reshape,     // values of the shape `from`, extents of 1 in front aside, as those of the shape `shape`; plain,
                 // whole rows of blocks, or matrices in 8-bit floats as a stack of them or back
    log_of_negative,  // log(-x) of every value, in f32
    negative_exp,     // -exp(x) of every value, in f32: its inverse
    whole_numbers,    // i32 or i64 numbers of [0, begin) in f32; begin is at most 2^24
    integers,         // whole numbers in f32 as those of `dtype`: its inverse
  };
  Kind kind = Kind::name;
  std::string tensor;
  std::vector<WeightRecipe> parts;
  int axis = 0;
  int64_t begin = 0, step = 1;
  std::vector<int64_t> sizes;
  HeadOrder order = HeadOrder::halves;
  float addend = 0;
  double factor = 1;
  DType dtype = DType::i64;
  Shape from, shape;

  static WeightRecipe name(std::string tensor);
  static WeightRecipe concat(std::vector<WeightRecipe> parts, int axis, std::vector<int64_t> sizes);
  static WeightRecipe slice(std::string tensor, int axis, int64_t begin, int64_t size, int64_t whole);
  // Every step-th along an axis of `whole`, beginning with `begin`.
  static WeightRecipe every(std::string tensor, int axis, int64_t begin, int64_t step, int64_t whole);
  static WeightRecipe stack(std::vector<WeightRecipe> parts);
  // The one slice of the first axis, which is dropped.
  static WeightRecipe only(WeightRecipe part);
  static WeightRecipe transpose(WeightRecipe part);
  static WeightRecipe reorder(WeightRecipe part, int64_t head_dim, HeadOrder order);
  static WeightRecipe add(WeightRecipe part, float addend);
  static WeightRecipe scale(WeightRecipe part, double factor);
  static WeightRecipe reshape(WeightRecipe part, const Shape& from, const Shape& shape);
  static WeightRecipe log_of_negative(WeightRecipe part);
  static WeightRecipe negative_exp(WeightRecipe part);
  // Its inverse makes numbers of `dtype`, i32 or i64.
  static WeightRecipe whole_numbers(WeightRecipe part, int64_t end, DType dtype = DType::i64);

  bool is_name() const { return kind == Kind::name; }
  // The names at the leaves, in order; a name may occur twice.
  std::vector<std::string> names() const;
};

// The shape and type that a recipe makes, known before anything is read.
struct RecipeType {
  WeightType type;
  Shape shape;
};

// Type and shape of the tensor of a name; nothing where there is none.
using DescribeName = std::function<std::optional<RecipeType>(const std::string& name)>;
using ReadName = std::function<Tensor(const std::string& name)>;

// Nothing when a name is not there. An encoding stays where the operation moves whole rows of it, or whole matrices
// into a stack and out of it (core/encodings/stacked_encoding.h); a sum, a transpose, rows cut out of
// blocks that share scales, and what else moves rows of an encoding of several planes, are decoded to f32. Throws
// DataCorrupted for shapes that do not fit together and for numbers that are no integers, and Unsupported for what has
// no meaning in an encoding (cutting through its rows), naming `source`, the tensor and both shapes or types.
std::optional<RecipeType> describe(const WeightRecipe& recipe, const DescribeName& tensors, const std::string& source);

// The tensor, on the host. A name, and rows cut out of one, share the memory of what `read` returned. Throws as
// `describe` does.
// Throws DataCorrupted, too, for a whole number outside of its range.
Tensor evaluate(const WeightRecipe& recipe, const ReadName& read, const std::string& source);

// A recipe of the slices `range` of the first axis of what `recipe` makes, which has `whole` of them and `rank` axes.
// As far as it can it reads nothing of the others.
WeightRecipe part_of_first_axis(const WeightRecipe& recipe, PartRange range, int64_t whole, int rank);

// A host copy of the values in f32, decoded where they are encoded.
Tensor values_in_f32(const TensorView& view);

// The tensors that the recipes of `parameters` read, each with its own recipe over parameters, in the order of first
// mention. Throws InvalidArgument, naming the tensor, unless the parameters use all of it exactly once; parameters that
// share a tensor as a whole (tied ones) give it once.
using NamedRecipe = std::pair<std::string, WeightRecipe>;
std::vector<NamedRecipe> invert(std::span<const NamedRecipe> parameters);

}  // namespace eadem::models
