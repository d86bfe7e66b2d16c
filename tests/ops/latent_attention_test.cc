// SPDX-License-Identifier: Apache-2.0
//
// The two forms of latent attention: how far they are apart, and that in each a token's bits depend neither on how its
// prompt is cut into steps, nor on what else a step holds, nor on where rows lie, nor on threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "eadem/core/device/cpu_device.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/attention/attention.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/kernel_runner.h"
#include "tests/ops/latent_bounds.h"
#include "tests/support/compare.h"
#include "tests/support/values.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace latent_test {

using kernels::Pass;

struct Sequence {
  Tensor q, rows;  // [length, heads, head_dim], [length, row_dim]
  int64_t prompt = 0;

  int64_t length() const { return q.shape()[0]; }
};

// The last `queries` of the first `length` tokens of a sequence.
struct Part {
  const Sequence* sequence;
  int64_t length, queries;
};

// An op with matrices of its heads.
struct Layer {
  kernels::LatentAttentionAttrs attrs;
  Tensor k_b, v_b;

  explicit Layer(const kernels::LatentAttentionAttrs& own)
      : attrs(own),
        k_b(workloads::random_tensor(DType::f32, Shape{own.heads, own.latent_dim, own.nope_dim}, 1)),
        v_b(workloads::random_tensor(DType::f32, Shape{own.heads, own.value_dim, own.latent_dim}, 2)) {}

  Sequence sequence(int64_t length, int64_t prompt) const {
    const auto seed = static_cast<uint64_t>(length);
    return {workloads::random_tensor(DType::f32, Shape{length, attrs.heads, attrs.head_dim()}, seed),
            workloads::random_tensor(DType::f32, Shape{length, attrs.row_dim()}, seed + 1), prompt};
  }
};

Tensor integers(const std::vector<int64_t>& values, const Shape& shape) {
  Tensor result = Tensor::on_host(DType::i32, shape);
  for (size_t i = 0; i < values.size(); ++i) result.view.as<int32_t>()[i] = static_cast<int32_t>(values[i]);
  return result;
}

// The call of a step of some parts. Blocks lie in falling order, and what was not written is NaN.
PassCall call_of(const Layer& layer, const std::vector<Part>& parts, int64_t block_size,
                 const WeightType& stored = DType::f32) {
  const kernels::LatentAttentionAttrs& z = layer.attrs;
  const auto sequences = static_cast<int64_t>(parts.size());
  std::vector<int64_t> starts = {0}, lengths, prompts, table;
  int64_t longest = 0;
  for (const Part& part : parts) {
    starts.push_back(starts.back() + part.queries);
    lengths.push_back(part.length);
    prompts.push_back(part.sequence->prompt);
    longest = std::max(longest, part.length);
  }
  const int64_t max_blocks = (longest + block_size - 1) / block_size, num_blocks = sequences * max_blocks;
  for (int64_t i = 0; i < num_blocks; ++i) table.push_back(num_blocks - 1 - i);
  Tensor q = Tensor::on_host(DType::f32, Shape{starts.back(), z.heads, z.head_dim()});
  const Shape shape{num_blocks, 1, block_size, z.row_dim()};
  Tensor rows = Tensor::on_host(DType::f32, shape);
  std::memset(rows.view.data, stored.encoding == nullptr ? 0xff : 0, static_cast<size_t>(rows.view.size_bytes()));
  for (int64_t s = 0; s < sequences; ++s) {
    const Part& part = parts[static_cast<size_t>(s)];
    const TensorView own = part.sequence->q.view.rows(part.length - part.queries, part.queries);
    std::memcpy(q.view.rows(starts[static_cast<size_t>(s)], part.queries).data, own.data,
                static_cast<size_t>(own.size_bytes()));
    for (int64_t j = 0; j < part.length; ++j) {
      const int64_t at = (num_blocks - 1 - (s * max_blocks + j / block_size)) * block_size + j % block_size;
      std::memcpy(rows.view.as<float>() + at * z.row_dim(), part.sequence->rows.view.as<float>() + j * z.row_dim(),
                  static_cast<size_t>(z.row_dim()) * sizeof(float));
    }
  }
  Tensor cache = stored.encoding == nullptr ? converted_on_host(rows.view, stored.dtype)
                                            : Tensor::on_host(stored.dtype, shape, *stored.encoding);
  if (stored.encoding != nullptr) stored.encoding->encode(cache.view, rows.view);

  PassCall call;
  call.op = std::make_shared<ops::LatentAttention>(layer.attrs);
  call.symbols[Symbol::tokens] = starts.back();
  call.symbols[Symbol::sequences] = sequences;
  call.symbols[Symbol::max_blocks] = max_blocks;
  call.inputs = {q,
                 cache,
                 layer.k_b,
                 layer.v_b,
                 integers(starts, Shape{sequences + 1}),
                 integers(lengths, Shape{sequences}),
                 integers(table, Shape{sequences, max_blocks}),
                 integers(prompts, Shape{sequences})};
  const TensorType per_sequence(DType::i32, {Symbol::sequences});
  call.input_types = {TensorType(DType::f32, {Symbol::tokens, z.heads, z.head_dim()}),
                      TensorType(stored.dtype, {num_blocks, 1, block_size, z.row_dim()}, stored.encoding),
                      TensorType(DType::f32, {z.heads, z.latent_dim, z.nope_dim}),
                      TensorType(DType::f32, {z.heads, z.value_dim, z.latent_dim}),
                      TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                      per_sequence,
                      TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks}),
                      per_sequence};
  call.output_types = call.op->infer_types(call.input_types);
  call.outputs = {Tensor::on_host(DType::f32, Shape{starts.back(), z.heads, z.value_dim})};
  call.output_alias = {-1};
  return call;
}

Tensor run(Device& device, const PassCall& call) {
  for (const kernels::Kernel* kernel : call.op->kernels(kernels::backend_of(device)))
    if (kernel->can_handle(call.request(device)).accepted) return run_kernel(device, *kernel, call, {}, "step")[0];
  ADD_FAILURE() << "no kernel on " << device.description();
  return {};
}

// y of each part.
std::vector<Tensor> attend(Device& device, const Layer& layer, const std::vector<Part>& parts, int64_t block_size,
                           const WeightType& stored = DType::f32) {
  const Tensor y = run(device, call_of(layer, parts, block_size, stored));
  std::vector<Tensor> result;
  int64_t begin = 0;
  for (const Part& part : parts) {
    result.push_back(y);
    if (y.defined()) result.back().view = y.view.rows(begin, part.queries);
    begin += part.queries;
  }
  return result;
}

// The sizes of DeepSeek's heads, 512 + 64 numbers a row: the forms are no further apart than the sum of both bounds,
// which follow from f32's rounding, and they are not the same computation.
TEST(LatentForms, AreAsCloseAsTheirRoundingsAllow) {
  const Layer layer({.heads = 2, .latent_dim = 512, .nope_dim = 128, .rope_dim = 64, .value_dim = 128, .scale = 0.07f});
  const ops::LatentAttention op(layer.attrs);
  Sequence prompt = layer.sequence(kernels::kAttentionSplit + 40, 1 << 20), generated = prompt;
  generated.prompt = 0;
  for (const DType stored : {DType::f32, DType::bf16}) {
    const PassCall decompressed = call_of(layer, {{&prompt, prompt.length(), 24}}, 16, stored),
                   absorbed = call_of(layer, {{&generated, prompt.length(), 24}}, 16, stored);
    const auto bounds_of = [&](const PassCall& call, bool bf16_parts) {
      std::vector<ops::RefTensor> inputs;
      for (const Tensor& input : call.inputs) inputs.push_back(widen(input.view));
      return latent_bounds(op, inputs, false, false, bf16_parts)[0];
    };
    const std::vector<double> a = bounds_of(decompressed, false);
    for (const DeviceGroup& group : device_groups()) {
      const auto* cpu = dynamic_cast<const CpuDevice*>(group.devices[0].get());
      const std::vector<double> b =
          bounds_of(absorbed, stored == DType::bf16 && cpu != nullptr && cpu->isa() == Isa::amx);
      const Tensor x = run(*group.devices[0], decompressed), y = run(*group.devices[0], absorbed);
      ASSERT_TRUE(x.defined() && y.defined());
      bool differ = false;
      for (size_t i = 0; i < a.size(); ++i) {
        const double distance =
            std::fabs(static_cast<double>(x.view.as<float>()[i]) - static_cast<double>(y.view.as<float>()[i]));
        // Each result is rounded on its way to memory.
        const double rounding = 0x1p-24 * (std::fabs(static_cast<double>(x.view.as<float>()[i])) +
                                           std::fabs(static_cast<double>(y.view.as<float>()[i])));
        ASSERT_LE(distance, a[i] + b[i] + 2 * rounding) << group.name << " element " << i;
        differ = differ || distance > 0;
      }
      EXPECT_TRUE(differ) << group.name;
    }
  }
}

const Layer& small_layer() {
  static const Layer kLayer(
      {.heads = 3, .latent_dim = 40, .nope_dim = 17, .rope_dim = 8, .value_dim = 24, .scale = 0.2f});
  return kLayer;
}

// A layer whose widths tiles multiply where rows are bf16.
const Layer& wide_layer() {
  static const Layer kLayer(
      {.heads = 3, .latent_dim = 64, .nope_dim = 17, .rope_dim = 32, .value_dim = 24, .scale = 0.2f});
  return kLayer;
}

class LatentRows : public testing::TestWithParam<bool> {
 protected:
  static const Layer& layer() { return GetParam() ? wide_layer() : small_layer(); }
  static DType stored() { return GetParam() ? DType::bf16 : DType::f32; }
};
INSTANTIATE_TEST_SUITE_P(LatentForms, LatentRows, testing::Bool(),
                         [](const auto& info) { return info.param ? "OnTiles" : "Small"; });

// A prompt in steps of any size, in blocks of any size, beside others that decode: the bits of the prompt at once. What
// follows the prompt has the bits of a step of its own, also where the step holds the end of the prompt.
TEST_P(LatentRows, BitsDependOnWhatATokenIsAlone) {
  const Layer& layer = LatentRows::layer();
  const Sequence sequence = layer.sequence(150, 100), other = layer.sequence(97, 60), young = layer.sequence(64, 64);
  for (const DeviceGroup& group : device_groups()) {
    Device& device = *group.devices.back();
    const Tensor whole = attend(device, layer, {{&sequence, 150, 150}}, 200, stored())[0],
                 beside = attend(device, layer, {{&other, 97, 97}}, 200, stored())[0],
                 prompt = attend(device, layer, {{&young, 64, 64}}, 200, stored())[0];
    for (const int64_t block_size : {200, 16, 7})
      for (const int64_t chunk : {1, 3, 16, 64, 150})
        for (int64_t done = 0; done < sequence.length(); done += chunk) {
          const int64_t queries = std::min(chunk, sequence.length() - done);
          const std::vector<Tensor> y =
              attend(device, layer, {{&other, 97, 2}, {&sequence, done + queries, queries}, {&young, 64, 5}},
                     block_size, stored());
          const std::string what = fmt::format("{}: {} + {} in blocks of {}", group.name, done, queries, block_size);
          ASSERT_TRUE(same_bits(whole.view.rows(done, queries), y[1].view)) << what;
          ASSERT_TRUE(same_bits(beside.view.rows(95, 2), y[0].view)) << what << ", the one that decodes";
          ASSERT_TRUE(same_bits(prompt.view.rows(59, 5), y[2].view)) << what << ", another prompt";
        }
  }
}

// Rows that are stored in any type, several splits of keys, and any number of threads.
TEST(LatentForms, LongPromptsHaveTheSameBitsOnAnyNumberOfThreads) {
  constexpr int64_t kSplit = kernels::kAttentionSplit;
  const std::pair<const Layer&, WeightType> cases[] = {{small_layer(), DType::f32},
                                                       {small_layer(), DType::bf16},
                                                       {wide_layer(), DType::bf16},
                                                       {small_layer(), DType::f16},
                                                       {small_layer(), {DType::f32, &RowEncoding::int8()}},
                                                       {small_layer(), {DType::f32, &RowEncoding::fp8_e4m3()}}};
  for (const auto& [layer, stored] : cases) {
    const Sequence sequence = layer.sequence(2 * kSplit + 70, kSplit + 50);
    const int64_t length = sequence.length();
    for (const DeviceGroup& group : device_groups()) {
      const Tensor whole = attend(*group.devices[0], layer, {{&sequence, length, length}}, 2000, stored)[0];
      for (const auto& device : group.devices)
        for (const auto& [end, queries] : {std::pair<int64_t, int64_t>{length, 300},
                                           {length, 1},
                                           {kSplit + 60, 30},
                                           {kSplit + 1, 250},
                                           {kSplit, 1}}) {
          const Tensor y = attend(*device, layer, {{&sequence, end, queries}}, 7, stored)[0];
          ASSERT_TRUE(same_bits(whole.view.rows(end - queries, queries), y.view))
              << device->description() << ": " << queries << " tokens up to " << end;
        }
    }
  }
}

// Tokens that are of no prompt have the bits of the ops that the absorbed form is made of elsewhere.
TEST_P(LatentRows, AbsorbedTokensHaveTheBitsOfHeadLinearAndAttention) {
  const Layer& layer = LatentRows::layer();
  const kernels::LatentAttentionAttrs& z = layer.attrs;
  const Sequence sequence = layer.sequence(90, 0);
  const PassCall step = call_of(layer, {{&sequence, 90, 20}}, 16, stored());
  const auto call = [&](const ops::OpPtr& op, std::vector<TensorType> types, std::vector<Tensor> inputs,
                        int64_t width) {
    PassCall result;
    result.op = op;
    result.symbols = step.symbols;
    result.input_types = std::move(types);
    result.inputs = std::move(inputs);
    result.output_types = op->infer_types(result.input_types);
    result.outputs = {Tensor::on_host(DType::f32, Shape{20, z.heads, width})};
    result.output_alias = {-1};
    return result;
  };
  // Columns [first, first + count) of rows of `width` numbers.
  const auto columns = [&](const Tensor& x, int64_t width, int64_t first, int64_t count) {
    Tensor result = Tensor::on_host(DType::f32, Shape{20, z.heads, count});
    for (int64_t r = 0; r < 20 * z.heads; ++r)
      std::copy_n(x.view.as<float>() + r * width + first, count, result.view.as<float>() + r * count);
    return result;
  };
  const auto product = std::make_shared<ops::HeadLinear>(kernels::HeadLinearAttrs{DType::f32});
  const auto attention = std::make_shared<ops::Attention>(kernels::AttentionAttrs{.heads = z.heads,
                                                                                  .kv_heads = 1,
                                                                                  .head_dim = z.row_dim(),
                                                                                  .scale = z.scale,
                                                                                  .source = kernels::KvSource::cached,
                                                                                  .value_dim = z.latent_dim});
  const auto heads = [&](int64_t width) { return TensorType(DType::f32, {Symbol::tokens, z.heads, width}); };
  for (const DeviceGroup& group : device_groups())
    for (const auto& device : group.devices) {
      const Tensor latent =
          run(*device, call(product, {heads(z.nope_dim), step.input_types[2]},
                            {columns(step.inputs[0], z.head_dim(), 0, z.nope_dim), layer.k_b}, z.latent_dim));
      Tensor query = Tensor::on_host(DType::f32, Shape{20, z.heads, z.row_dim()});
      for (int64_t r = 0; r < 20 * z.heads; ++r) {
        float* const to = query.view.as<float>() + r * z.row_dim();
        std::copy_n(latent.view.as<float>() + r * z.latent_dim, z.latent_dim, to);
        std::copy_n(step.inputs[0].view.as<float>() + r * z.head_dim() + z.nope_dim, z.rope_dim, to + z.latent_dim);
      }
      const Tensor mixed =
          run(*device, call(attention,
                            {heads(z.row_dim()), step.input_types[1], step.input_types[1], step.input_types[4],
                             step.input_types[5], step.input_types[6]},
                            {query, step.inputs[1], step.inputs[1], step.inputs[4], step.inputs[5], step.inputs[6]},
                            z.latent_dim));
      const Tensor y =
          run(*device, call(product, {heads(z.latent_dim), step.input_types[3]}, {mixed, layer.v_b}, z.value_dim));
      EXPECT_TRUE(same_bits(y.view, run(*device, step).view)) << device->description();
    }
}

}  // namespace latent_test
}  // namespace eadem::test
