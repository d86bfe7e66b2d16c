// SPDX-License-Identifier: Apache-2.0
//
// Ops that carry a state along a sequence, bit for bit on every instruction set and thread count: a sequence alone and
// without a state = in a batch, cut into steps of any size, over states in any slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "eadem/ops/all_ops.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/pass_calls.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace {

using kernels::Kernel;
using kernels::Pass;

constexpr int64_t kSequences = 3;

// The inputs of an op for all sequences, whose first `num_direct` ports are those without a state; the cached op has
// state_slots and a state behind them.
struct RecurrentCase {
  ops::OpPtr direct, cached;
  std::vector<TensorType> direct_types;
  TensorType state_row;  // without slots
};

bool is_of_tokens(const TensorType& type) { return type.rank() > 0 && type.dim(0) == Dim(Symbol::tokens); }

Tensor int32s(const std::vector<int32_t>& values) {
  Tensor result = Tensor::on_host(DType::i32, Shape{std::ssize(values)});
  std::memcpy(result.view.data, values.data(), values.size() * sizeof(int32_t));
  return result;
}

// Tokens [from, from + count) of every sequence of `length`.
Tensor rows_of_step(const Tensor& all, int64_t length, int64_t from, int64_t count) {
  std::vector<int64_t> dims(all.shape().dims().begin(), all.shape().dims().end());
  dims[0] = kSequences * count;
  Tensor result = Tensor::on_host(all.dtype(), Shape(dims));
  const int64_t bytes = count == 0 ? 0 : result.view.size_bytes() / kSequences;
  for (int64_t s = 0; s < kSequences; ++s)
    std::memcpy(static_cast<char*>(result.view.data) + s * bytes, all.view.rows(s * length + from, count).data,
                static_cast<size_t>(bytes));
  return result;
}

std::vector<Tensor> run_first_kernel(Device& device, const PassCall& call, const std::string& label) {
  for (const Kernel* kernel : call.op->kernels(kernels::backend_of(device)))
    if (kernel->pass == call.pass && kernel->can_handle(call.request(device)).accepted)
      return run_kernel(device, *kernel, call, {}, label);
  ADD_FAILURE() << label << ": no kernel";
  return {};
}

SymbolValues step_symbols(int64_t tokens, int64_t sequences) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tokens;
  symbols[Symbol::sequences] = sequences;
  return symbols;
}

// The bytes of y of each sequence, computed alone without a state.
std::vector<std::vector<char>> alone(const RecurrentCase& c, const std::vector<Tensor>& all, int64_t length,
                                     Device& device) {
  std::vector<std::vector<char>> result;
  for (int64_t s = 0; s < kSequences; ++s) {
    std::vector<Tensor> inputs = all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (is_of_tokens(c.direct_types[i])) inputs[i].view = inputs[i].view.rows(s * length, length);
      if (c.direct->inputs()[i].name == "query_start") inputs[i] = int32s({0, static_cast<int32_t>(length)});
    }
    const ops::Workload row{"alone", c.direct, c.direct_types, step_symbols(length, 1)};
    const Tensor y = run_first_kernel(device, straight_call(row, Pass::inference, inputs), "alone")[0];
    const char* bytes = static_cast<const char*>(y.view.data);
    result.emplace_back(bytes, bytes + y.view.size_bytes());
  }
  return result;
}

// Likewise, all sequences side by side in steps of `chunk` tokens of each.
std::vector<std::vector<char>> in_steps(const RecurrentCase& c, const std::vector<Tensor>& all, int64_t length,
                                        int64_t chunk, Device& device) {
  std::vector<Dim> dims = {kSequences + 2};
  dims.insert(dims.end(), c.state_row.dims().begin(), c.state_row.dims().end());
  std::vector<TensorType> types = c.direct_types;
  types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::sequences});
  types.emplace_back(c.state_row.dtype, dims);
  Tensor state = Tensor::on_host(DType::f32, types.back().bind({}));
  std::memset(state.view.data, 0, static_cast<size_t>(state.view.size_bytes()));
  std::vector<std::vector<char>> result(kSequences);
  for (int64_t from = 0; from < length; from += chunk) {
    const int64_t count = std::min(chunk, length - from);
    std::vector<Tensor> inputs;
    for (size_t i = 0; i < all.size(); ++i) {
      if (is_of_tokens(c.direct_types[i]))
        inputs.push_back(rows_of_step(all[i], length, from, count));
      else if (c.direct->inputs()[i].name == "query_start")
        inputs.push_back(
            int32s({0, static_cast<int32_t>(count), static_cast<int32_t>(2 * count), static_cast<int32_t>(3 * count)}));
      else
        inputs.push_back(all[i]);
    }
    inputs.push_back(int32s({4, 0, 2}));
    inputs.push_back(state);
    const ops::Workload row{"step", c.cached, types, step_symbols(kSequences * count, kSequences)};
    const std::vector<Tensor> out = run_first_kernel(device, straight_call(row, Pass::inference, inputs), "step");
    if (out.empty()) return result;
    const int64_t bytes = out[0].view.size_bytes() / kSequences;
    for (int64_t s = 0; s < kSequences; ++s) {
      const char* y = static_cast<const char*>(out[0].view.data) + s * bytes;
      result[static_cast<size_t>(s)].insert(result[static_cast<size_t>(s)].end(), y, y + bytes);
    }
    state = out[1];
  }
  return result;
}

void expect_same_bits_however_served(const RecurrentCase& c, int64_t length, std::initializer_list<int64_t> chunks) {
  std::vector<Tensor> all =
      workloads::make_inputs(*c.direct, c.direct_types, step_symbols(kSequences * length, kSequences), 9);
  for (const DeviceGroup& group : device_groups()) {
    const std::vector<std::vector<char>> expected = alone(c, all, length, *group.devices[0]);
    for (int64_t chunk : chunks)
      for (const auto& device : group.devices)
        EXPECT_TRUE(in_steps(c, all, length, chunk, *device) == expected)
            << c.direct->name() << "(" << c.direct->attrs_text() << ") in steps of " << chunk << " on "
            << device->description();
  }
}

const TensorType kQueryStart(DType::i32, {Dim(Symbol::sequences, 1)});

TEST(RecurrentProperties, ShortConvolution) {
  for (int64_t taps : {2, 4, 8})
    expect_same_bits_however_served(
        {std::make_shared<ops::ShortConvolution>(kernels::ShortConvolutionAttrs{taps, true, false}),
         std::make_shared<ops::ShortConvolution>(kernels::ShortConvolutionAttrs{taps, true, true}),
         {TensorType(DType::f32, {Symbol::tokens, 37}), TensorType(DType::f32, {taps, 37}),
          TensorType(DType::f32, {37}), kQueryStart},
         TensorType(DType::f32, {taps - 1, 37})},
        20, {20, 1, 2, 7});
}

TEST(RecurrentProperties, StateSpaceScan) {
  const TensorType shared(DType::f32, {Symbol::tokens, 2, 35}), each(DType::f32, {4});
  expect_same_bits_however_served(
      {std::make_shared<ops::StateSpaceScan>(kernels::StateSpaceScanAttrs{}),
       std::make_shared<ops::StateSpaceScan>(kernels::StateSpaceScanAttrs{.cached = true}),
       {TensorType(DType::f32, {Symbol::tokens, 4, 11}), TensorType(DType::f32, {Symbol::tokens, 4}), shared, shared,
        each, each, each, kQueryStart},
       TensorType(DType::f32, {4, 35, 11})},
      100, {100, 1, 33, 64});
}

TEST(RecurrentProperties, GatedDeltaRule) {
  for (bool channels : {false, true}) {
    kernels::GatedDeltaRuleAttrs attrs{
        .key_heads = 2, .value_heads = 4, .key_dim = 11, .value_dim = 41, .channel_decay = channels};
    const auto direct = std::make_shared<ops::GatedDeltaRule>(attrs);
    attrs.cached = true;
    const TensorType q(DType::f32, {Symbol::tokens, 2, 11});
    expect_same_bits_however_served(
        {direct,
         std::make_shared<ops::GatedDeltaRule>(attrs),
         {q, q, TensorType(DType::f32, {Symbol::tokens, 4, 41}),
          TensorType(DType::f32, {Symbol::tokens, attrs.decays()}), TensorType(DType::f32, {Symbol::tokens, 4}),
          TensorType(DType::f32, {4}), TensorType(DType::f32, {attrs.decays()}), kQueryStart},
         TensorType(DType::f32, {4, attrs.state_floats()})},
        70, {70, 1, 2, 3, 9, 33});
  }
}

}  // namespace
}  // namespace eadem::test
