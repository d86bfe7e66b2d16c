// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/elementwise/columns.h"

#include <algorithm>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

void expect_first(std::string_view op, const kernels::ColumnsAttrs& attrs) {
  if (attrs.first <= 0) throw InvalidArgument("{}: first is {}; expected a positive number", op, attrs.first);
}

void expect_rows(std::string_view op, std::string_view port, const TensorType& type) {
  if (type.rank() < 2) throw InvalidArgument("{}: '{}' is {}; expected rows of columns", op, port, to_string(type));
  expect_dtype(op, port, type, kActivations);
  expect_plain(op, port, type);
}

// Both parts are divided as the whole: not along their columns.
std::vector<Sharding> sharding_of(std::string_view op, std::span<const TensorType> in, size_t outputs) {
  const Sharding& sharding = in[0].sharding;
  for (const TensorType& type : in)
    if (!(type.sharding == sharding) || type.sharding == Sharding::along(type.rank() - 1))
      throw InvalidArgument("{}: an input is {}; expected all divided alike, and not along columns", op,
                            to_string(type));
  return std::vector<Sharding>(outputs, sharding);
}

// Copies between `whole` and its parts; an empty part is left out.
void copy_parts(std::vector<double>* whole, std::vector<double>* first, std::vector<double>* second, size_t n, size_t m,
                bool joins) {
  const auto copy = [&](std::vector<double>& part, size_t width, size_t offset) {
    for (size_t i = 0; i < part.size(); ++i) {
      double& at = (*whole)[i / width * (n + m) + offset + i % width];
      (joins ? at : part[i]) = joins ? part[i] : at;
    }
  };
  copy(*first, n, 0);
  copy(*second, m, n);
}

size_t columns_of(const RefTensor& x) { return static_cast<size_t>(x.shape.back()); }

void split(const RefTensor& x, RefTensor& first, RefTensor& second, size_t n) {
  std::vector<double> whole = x.data;
  copy_parts(&whole, &first.data, &second.data, n, columns_of(x) - n, false);
}

void join(RefTensor& y, const RefTensor& first, const RefTensor& second, size_t n) {
  std::vector<double> a = first.data, b = second.data;
  copy_parts(&y.data, &a, &b, n, columns_of(y) - n, true);
}

}  // namespace

SplitColumns::SplitColumns(const kernels::ColumnsAttrs& attrs) : attrs_(attrs) { expect_first(name(), attrs); }
ConcatColumns::ConcatColumns(const kernels::ColumnsAttrs& attrs) : attrs_(attrs) { expect_first(name(), attrs); }

std::vector<TensorType> SplitColumns::infer_types(std::span<const TensorType> in) const {
  expect_rows(name(), "x", in[0]);
  const int64_t columns = in[0].fixed(in[0].rank() - 1);
  if (columns <= attrs_.first)
    throw InvalidArgument("split_columns: 'x' is {}; expected more than {} columns", to_string(in[0]), attrs_.first);
  TensorType first = plain_type(in[0].dtype, in[0].dims()), second = first;
  first.dim(-1) = attrs_.first;
  second.dim(-1) = columns - attrs_.first;
  return {first, second};
}

std::vector<Sharding> SplitColumns::infer_sharding(std::span<const TensorType> in) const {
  return sharding_of(name(), in, 2);
}

Cost SplitColumns::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                        const SymbolValues& symbols) const {
  return {0, traffic_bytes(*this, pass, in, out, symbols)};
}

void SplitColumns::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto n = static_cast<size_t>(attrs_.first);
  if (pass == Pass::backward)
    join(out[0], in[0], in[1], n);
  else
    split(in[0], out[0], out[1], n);
}

std::vector<TensorType> ConcatColumns::infer_types(std::span<const TensorType> in) const {
  expect_rows(name(), "first", in[0]);
  expect_rows(name(), "second", in[1]);
  expect_dim(name(), "first", in[0], in[0].rank() - 1, Dim(attrs_.first), "attribute first");
  TensorType like_second = in[0];
  like_second.dim(-1) = in[1].dim(-1);
  expect_same_dims(name(), "second", in[1], like_second, "first");
  const DType like_first[] = {in[0].dtype};
  expect_dtype(name(), "second", in[1], like_first);
  TensorType y = plain_type(in[0].dtype, in[0].dims());
  y.dim(-1) = attrs_.first + in[1].fixed(in[1].rank() - 1);
  return {y};
}

DType ConcatColumns::wanted_dtype(std::span<const TensorType> in, int /*port*/) const { return in[0].dtype; }

std::vector<Sharding> ConcatColumns::infer_sharding(std::span<const TensorType> in) const {
  return sharding_of(name(), in, 1);
}

Cost ConcatColumns::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                         const SymbolValues& symbols) const {
  return {0, traffic_bytes(*this, pass, in, out, symbols)};
}

void ConcatColumns::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto n = static_cast<size_t>(attrs_.first);
  if (pass == Pass::backward)
    split(in[0], out[0], out[1], n);
  else
    join(out[0], in[0], in[1], n);
}

std::vector<Workload> SplitColumns::workloads() {
  std::vector<Workload> rows;
  for (const LatentShape& model : latent_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "split_columns of queries"),
                      std::make_shared<SplitColumns>(kernels::ColumnsAttrs{model.nope}),
                      {TensorType(model.dtype, {Symbol::tokens, model.heads, model.nope + model.rope})},
                      symbols_of(step)});
  return rows;
}

std::vector<Workload> ConcatColumns::workloads() {
  std::vector<Workload> rows;
  for (const LatentShape& model : latent_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model.name, step, "concat_columns of queries"),
                      std::make_shared<ConcatColumns>(kernels::ColumnsAttrs{model.latent}),
                      {TensorType(model.dtype, {Symbol::tokens, model.heads, model.latent}),
                       TensorType(model.dtype, {Symbol::tokens, model.heads, model.rope})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
