// SPDX-License-Identifier: Apache-2.0
//
// Bit for bit, for every kernel on every instruction set (or on --device): forward = inference; a batch = its rows; a
// sequence alone = the sequence in a batch = the sequence in chunks = over a contiguous or paged cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/op_cases.h"
#include "tests/ops/pass_calls.h"
#include "tests/support/thread_counts.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace {

using kernels::Kernel;
using kernels::Pass;

// The kernel that a device takes for a call when all its kernels agree to compete, or null.
const Kernel* chosen(const PassCall& call, const Device& device) {
  const Kernel* best = nullptr;
  double cost = 0;
  for (const Kernel* kernel : call.op->kernels(kernels::backend_of(device))) {
    if (kernel->pass != call.pass) continue;
    const Verdict verdict = kernel->can_handle(call.request(device));
    if (!verdict.accepted || (best != nullptr && verdict.cost_us >= cost)) continue;
    best = kernel;
    cost = verdict.cost_us;
  }
  return best;
}

// The cases of an op that are tried here. Products with one scale for a tensor are not: rows share it, and their
// kernels take rounded operands alone.
std::vector<ops::Workload> property_cases(std::string_view op) {
  std::vector<ops::Workload> rows = op_cases(op);
  int64_t cases = 0;
  std::erase_if(rows, [&](const ops::Workload& row) {
    return !tries_case(cases++) || std::ranges::any_of(row.inputs, [](const TensorType& type) {
      return Fp8TensorEncoding::of(type.encoding) != nullptr;
    });
  });
  return rows;
}

std::vector<Tensor> run_chosen(Device& device, const PassCall& call, const std::string& label) {
  const Kernel* kernel = chosen(call, device);
  if (kernel == nullptr) return {};
  return run_kernel(device, *kernel, call, {}, label);
}

class Properties : public testing::TestWithParam<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(Ops, Properties, testing::ValuesIn(op_names()),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Properties, ForwardIsInference) {
  for (const ops::Workload& row : property_cases(GetParam())) {
    if (!row.op->has_backward()) continue;
    const PassCall forward = straight_call(row, Pass::forward, 5), inference = straight_call(row, Pass::inference, 5);
    for (const DeviceGroup& group : device_groups()) {
      const std::vector<Tensor> trained = run_chosen(*group.devices[0], forward, row.name),
                                served = run_chosen(*group.devices[0], inference, row.name);
      if (trained.empty() || served.empty()) continue;
      for (size_t i = 0; i < served.size(); ++i) {
        EXPECT_TRUE(same_bits(trained[i].view, served[i].view)) << row.name << " on " << group.name;
      }
    }
    if (HasFailure()) return;
  }
}

bool is_rows(const TensorType& type) {
  return type.rank() > 0 && (type.dim(0) == Dim(Symbol::tokens) || type.dim(0) == Dim(Symbol::logit_rows));
}

TEST_P(Properties, BatchEqualsItsRows) {
  // These ops use several rows by design: attention (tested below), caches, selection of rows, sums for parameters,
  // the order of experts (experts_test.cc) and their load, and recurrences (recurrent_test.cc).
  for (std::string_view crossing : {"attention",           "kv_append",         "latent_append",
                                    "select_rows",         "grad_norm",         "adamw",
                                    "expert_order",        "permute",           "grouped_linear",
                                    "unpermute",           "expert_dispatch",   "expert_combine",
                                    "load_balancing_loss", "short_convolution", "state_space_scan",
                                    "gated_delta_rule",    "select_keys",       "selected_attention",
                                    "latent_attention",    "compress_keys",     "compressed_attention",
                                    "select_blocks",       "pool_keys",         "pooled_attention"})
    if (GetParam() == crossing) return;
  for (const ops::Workload& row : property_cases(GetParam())) {
    const int64_t rows = std::max(row.symbols[Symbol::tokens], row.symbols[Symbol::logit_rows]);
    if (rows < 2) continue;
    const PassCall batch = straight_call(row, Pass::inference, 6);
    ops::Workload single = row;
    for (Symbol symbol : {Symbol::tokens, Symbol::logit_rows}) single.symbols[symbol] = 1;
    for (const DeviceGroup& group : device_groups()) {
      Device& device = *group.devices[0];
      const std::vector<Tensor> together = run_chosen(device, batch, row.name);
      if (together.empty()) continue;
      for (int64_t r : {int64_t{0}, rows / 2, rows - 1}) {
        std::vector<Tensor> inputs = batch.inputs;
        for (size_t i = 0; i < inputs.size(); ++i)
          if (is_rows(row.inputs[i])) inputs[i].view = inputs[i].view.rows(r, 1);
        const std::vector<Tensor> alone = run_chosen(device, straight_call(single, Pass::inference, inputs), row.name);
        for (size_t i = 0; i < together.size(); ++i) {
          EXPECT_TRUE(same_bits(together[i].view.rows(r, 1), alone[i].view))
              << row.name << " row " << r << " on " << group.name;
        }
      }
    }
    if (HasFailure()) return;
  }
}

// One sequence's queries, keys and values: [length, heads, head_dim]; values may have a width of their own.
struct Sequence {
  Tensor q, k, v;
  int64_t length() const { return q.shape()[0]; }
};

// The earlier tokens that one sees: of a window, of its own chunk, or all.
struct Reach {
  int64_t window = 0, chunk = 0;
  std::string text() const { return fmt::format("window {} and chunk {}", window, chunk); }
};

// A step over some sequences: the last `queries` tokens of the first `length` of each.
struct Part {
  const Sequence* sequence;
  int64_t length, queries;
};

constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 24;  // a whole panel of 16 and a part of one

Tensor concatenated(const std::vector<TensorView>& views, int64_t heads) {
  int64_t rows = 0;
  for (const TensorView& view : views) rows += view.shape[0];
  Tensor result = Tensor::on_host(DType::f32, Shape{rows, heads, views[0].shape[2]});
  char* to = static_cast<char*>(result.view.data);
  for (const TensorView& view : views) {
    std::memcpy(to, view.data, static_cast<size_t>(view.size_bytes()));
    to += view.size_bytes();
  }
  return result;
}

Tensor int_tensor(const Shape& shape, const std::vector<int64_t>& values) {
  Tensor result = Tensor::on_host(DType::i32, shape);
  for (size_t i = 0; i < values.size(); ++i) result.view.as<int32_t>()[i] = static_cast<int32_t>(values[i]);
  return result;
}

// Keys and values are f32 numbers that `kv` holds exactly.
Sequence random_sequence(int64_t length, DType kv = DType::f32, int64_t value_dim = kHeadDim) {
  const auto seed = static_cast<uint64_t>(length);
  const auto rounded = [&](uint64_t s, int64_t dim) {
    return converted_on_host(workloads::random_tensor(kv, Shape{length, kKvHeads, dim}, s).view, DType::f32);
  };
  return {workloads::random_tensor(DType::f32, Shape{length, kHeads, kHeadDim}, seed), rounded(seed + 1, kHeadDim),
          rounded(seed + 2, value_dim)};
}

// Values of another width come with a soft cap and sinks, which only the CPU takes either.
constexpr float kSoftcap = 0.4f;

// y of each part, over direct keys (block_size 0; all tokens must be queries) or a cache of `kv`, its blocks in falling
// order.
std::vector<Tensor> attend(Device& device, const std::vector<Part>& parts, const Reach& reach, int64_t block_size,
                           const WeightType& kv = DType::f32) {
  const auto sequences = static_cast<int64_t>(parts.size());
  std::vector<TensorView> q, k, v;
  std::vector<int64_t> start = {0}, length;
  int64_t longest = 0;
  for (const Part& part : parts) {
    q.push_back(part.sequence->q.view.rows(part.length - part.queries, part.queries));
    k.push_back(part.sequence->k.view.rows(0, part.length));
    v.push_back(part.sequence->v.view.rows(0, part.length));
    start.push_back(start.back() + part.queries);
    length.push_back(part.length);
    longest = std::max(longest, part.length);
  }
  SymbolValues symbols;
  symbols[Symbol::tokens] = start.back();
  symbols[Symbol::sequences] = sequences;
  const bool cached = block_size > 0;
  const int64_t value_dim = v[0].shape[2];
  const bool sinks = value_dim != kHeadDim;
  PassCall call;
  call.op = std::make_shared<ops::Attention>(kernels::AttentionAttrs{
      kHeads, kKvHeads, kHeadDim, 0.35f, reach.window, cached ? kernels::KvSource::cached : kernels::KvSource::direct,
      value_dim, sinks ? kSoftcap : 0.0f, sinks, reach.chunk});
  call.symbols = symbols;
  std::vector<TensorType> types = {TensorType(DType::f32, {Symbol::tokens, kHeads, kHeadDim})};
  call.inputs.push_back(concatenated(q, kHeads));
  if (!cached) {
    for (const auto& views : {k, v}) {
      types.emplace_back(DType::f32, std::initializer_list<Dim>{Symbol::tokens, kKvHeads, views[0].shape[2]});
      call.inputs.push_back(concatenated(views, kKvHeads));
    }
  } else {
    const int64_t max_blocks = (longest + block_size - 1) / block_size, num_blocks = sequences * max_blocks;
    call.symbols[Symbol::max_blocks] = max_blocks;
    const auto block_of = [&](int64_t s, int64_t i) { return num_blocks - 1 - (s * max_blocks + i); };
    for (const auto& views : {k, v}) {
      const int64_t dim = views[0].shape[2];
      const Shape shape{num_blocks, kKvHeads, block_size, dim};
      types.emplace_back(kv.dtype, std::initializer_list<Dim>{num_blocks, kKvHeads, block_size, dim}, kv.encoding);
      Tensor values = Tensor::on_host(DType::f32, shape);
      std::memset(values.view.data, 0xff, static_cast<size_t>(values.view.size_bytes()));  // unwritten slots are NaN
      for (int64_t s = 0; s < sequences; ++s)
        for (int64_t j = 0; j < length[static_cast<size_t>(s)]; ++j)
          for (int64_t g = 0; g < kKvHeads; ++g) {
            const int64_t row = (block_of(s, j / block_size) * kKvHeads + g) * block_size + j % block_size;
            std::memcpy(values.view.as<float>() + row * dim,
                        views[static_cast<size_t>(s)].as<float>() + (j * kKvHeads + g) * dim,
                        static_cast<size_t>(dim) * sizeof(float));
          }
      Tensor cache = kv.encoding == nullptr ? converted_on_host(values.view, kv.dtype)
                                            : Tensor::on_host(kv.dtype, shape, *kv.encoding);
      if (kv.encoding != nullptr) kv.encoding->encode(cache.view, values.view);
      call.inputs.push_back(cache);
    }
  }
  types.emplace_back(DType::i32, std::initializer_list<Dim>{Dim(Symbol::sequences, 1)});
  types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::sequences});
  call.inputs.push_back(int_tensor(Shape{sequences + 1}, start));
  call.inputs.push_back(int_tensor(Shape{sequences}, length));
  if (cached) {
    const int64_t max_blocks = call.symbols[Symbol::max_blocks];
    std::vector<int64_t> table;
    for (int64_t i = 0; i < sequences * max_blocks; ++i) table.push_back(sequences * max_blocks - 1 - i);
    types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::sequences, Symbol::max_blocks});
    call.inputs.push_back(int_tensor(Shape{sequences, max_blocks}, table));
  } else {
    types.push_back(kernels::unconnected_port());
    call.inputs.emplace_back();
  }
  if (sinks) {
    types.emplace_back(DType::f32, std::initializer_list<Dim>{kHeads});
    call.inputs.push_back(workloads::random_tensor(DType::f32, Shape{kHeads}, 5));
  }
  call.input_types = types;
  call.output_types = call.op->infer_types(types);
  call.outputs = {Tensor::on_host(DType::f32, Shape{start.back(), kHeads, value_dim})};
  call.output_alias = {-1};
  const std::vector<Tensor> y = run_chosen(device, call, "attention");
  EXPECT_FALSE(y.empty()) << "no attention kernel for f32 on " << device.description();
  std::vector<Tensor> result;
  for (size_t s = 0; s < parts.size() && !y.empty(); ++s) {
    result.push_back(y[0]);
    result.back().view = y[0].view.rows(start[s], parts[s].queries);
  }
  return result;
}

// Whole sequences, and windows; on the CPU also chunks.
std::vector<Reach> reaches() {
  if (device_name() != "cpu") return {{}, {40}};
  return {{}, {40}, {0, 40}, {0, 64}};
}

// On every device values as wide as keys; on the CPU also wider ones.
std::vector<int64_t> value_dims() {
  if (device_name() != "cpu") return {kHeadDim};
  return {kHeadDim, 41};
}

TEST(AttentionProperties, OneSequenceHasTheSameBitsHoweverItIsServed) {
  int64_t cases = 0;
  for (const int64_t value_dim : value_dims()) {
    std::vector<Sequence> sequences;
    for (int64_t length : {150, 1, 64, 97}) sequences.push_back(random_sequence(length, DType::f32, value_dim));
    for (const DeviceGroup& group : device_groups())
      for (const Reach& reach : reaches()) {
        Device& device = *group.devices.back();
        std::vector<Part> whole;
        std::vector<Tensor> alone;
        for (const Sequence& sequence : sequences) {
          whole.push_back({&sequence, sequence.length(), sequence.length()});
          alone.push_back(attend(device, {whole.back()}, reach, 0)[0]);
        }
        const auto expect_rows = [&](size_t s, const Part& part, const Tensor& y, const std::string& how) {
          EXPECT_TRUE(same_bits(alone[s].view.rows(part.length - part.queries, part.queries), y.view))
              << group.name << " " << reach.text() << ": sequence " << s << " " << how;
        };
        for (int64_t block_size : {0, 200, 16, 7}) {
          const std::vector<Tensor> batch = attend(device, whole, reach, block_size);
          for (size_t s = 0; s < whole.size(); ++s)
            expect_rows(s, whole[s], batch[s], fmt::format("in a batch, blocks of {}", block_size));
          if (block_size == 0) continue;
          // Chunked prefill beside a sequence that decodes.
          for (int64_t chunk : {1, 13, 64})
            for (int64_t done = 0; done < sequences[0].length(); done += chunk) {
              if (!tries_case(cases++)) continue;
              const int64_t queries = std::min(chunk, sequences[0].length() - done);
              const Part part{&sequences[0], done + queries, queries}, beside{&sequences[3], 97, 1};
              const std::vector<Tensor> y = attend(device, {beside, part}, reach, block_size);
              expect_rows(0, part, y[1], fmt::format("tokens {}+{}, blocks of {}", done, queries, block_size));
              expect_rows(3, beside, y[0], "decoding");
              if (HasFailure()) return;
            }
        }
      }
  }
}

// Spans of keys are computed side by side where there are few rows and threads to spare, and one after the other
// otherwise: neither that, nor whether a row's keys are read in place, shows in its bits.
TEST(AttentionProperties, LongSequencesHaveTheSameBitsOnAnyNumberOfThreads) {
  constexpr int64_t kSplit = kernels::kAttentionSplit;
  std::vector<std::pair<WeightType, Reach>> cases = {{DType::f32, {}},
                                                     {DType::f32, {kSplit + 40}},
                                                     {DType::bf16, {}},
                                                     {DType::f16, {}},
                                                     {{DType::f32, &RowEncoding::int8()}, {}},
                                                     {{DType::f32, &RowEncoding::fp8_e4m3()}, {kSplit + 40}}};
  if (device_name() == "cpu") cases.insert(cases.end(), {{DType::f32, {0, kSplit + 40}}, {DType::bf16, {0, 600}}});
  const std::vector<DeviceGroup>& groups = device_groups();
  for (const DeviceGroup& group : groups)
    for (const auto& [kv, reach] : cases) {
      // On one instruction set every type, on the others one that is plain and one that is encoded.
      if (group.devices[0] != groups[0].devices[0] && (reach.window > 0 || kv.dtype != DType::f32)) continue;
      const int64_t value_dim = reach.window > 0 ? value_dims().back() : kHeadDim;
      const Sequence sequence = random_sequence(2 * kSplit + 70, kv.dtype, value_dim),
                     other = random_sequence(kSplit + 1, kv.dtype, value_dim);
      const Part whole{&sequence, sequence.length(), sequence.length()}, last{&other, other.length(), 1};
      // Direct keys in f32 are what a plain cache holds; an encoded one is compared with itself, read all at once.
      if (kv.encoding != nullptr && device_name() != "cpu") continue;
      const int64_t all_at_once = kv.encoding == nullptr ? 0 : 3000;
      const Tensor expected = attend(*group.devices[0], {whole}, reach, all_at_once, kv)[0];
      const Tensor expected_other =
          attend(*group.devices[0], {{&other, other.length(), other.length()}}, reach, all_at_once, kv)[0];
      for (const auto& device : group.devices)
        for (int64_t block_size : {2000, 7}) {
          for (int64_t length : {int64_t{63}, kSplit, kSplit + 1, 2 * kSplit + 70})
            for (int64_t queries : {1, 20}) {
              if (queries > length) continue;
              const Part part{&sequence, length, queries};
              const std::string label = fmt::format("{}, {}, blocks of {}: {} tokens before {}", device->description(),
                                                    reach.text(), block_size, queries, length);
              const std::vector<Tensor> alone = attend(*device, {part}, reach, block_size, kv);
              EXPECT_TRUE(same_bits(expected.view.rows(length - queries, queries), alone[0].view)) << label;
              const std::vector<Tensor> two = attend(*device, {part, last}, reach, block_size, kv);
              EXPECT_TRUE(same_bits(alone[0].view, two[0].view)) << label << ", beside another";
              EXPECT_TRUE(same_bits(expected_other.view.rows(kSplit, 1), two[1].view)) << label << ", the other";
              if (HasFailure()) return;
            }
        }
    }
}

// Two instruction sets of this machine that differ in 8-bit dot products alone: with them, and without.
std::optional<std::pair<std::string_view, std::string_view>> byte_dot_isas() {
  if (device_name() != "cpu") return std::nullopt;
  for (const auto& [with, without] : {std::pair(Isa::avx512_vnni, Isa::avx512), {Isa::neon_dotprod, Isa::neon}})
    if (std::ranges::count(available_isas(), with) != 0) return std::pair(isa_name(with), isa_name(without));
  return std::nullopt;
}

// Integers are exact and the chain over them is one: 8-bit dot products change no bit.
TEST(LinearProperties, ByteDotsHaveTheBitsOfOtherProducts) {
  const auto isas = byte_dot_isas();
  if (!isas) GTEST_SKIP() << "no instruction set with 8-bit dot products";
  const auto with = open_device("cpu", {.num_threads = 1, .isa = isas->first});
  const auto without = open_device("cpu", {.num_threads = 1, .isa = isas->second});
  int quantized = 0;
  for (const ops::Workload& row : property_cases("linear")) {
    // On the CPU encoded weights multiply an x in f32.
    if (row.inputs[1].encoding == nullptr || row.inputs[0].dtype != DType::f32) continue;
    const PassCall call = straight_call(row, Pass::inference, 8);
    const std::vector<Tensor> expected = run_chosen(*without, call, row.name), y = run_chosen(*with, call, row.name);
    ASSERT_FALSE(expected.empty() || y.empty());
    ASSERT_TRUE(same_bits(expected[0].view, y[0].view)) << row.name;
    ++quantized;
  }
  EXPECT_GT(quantized, 0);
}

// A product that does not round its activations is that of the values which the weight decodes to, on every
// instruction set. Columns with an order of their own are added in that order.
TEST(LinearProperties, UnroundedProductsAreThoseOfDecodedWeights) {
  if (device_name() != "cpu") GTEST_SKIP() << "quantized weights are read on the CPU";
  int decoded = 0;
  for (const ops::Workload& row : property_cases("linear")) {
    const GroupEncoding* groups = GroupEncoding::of(row.inputs[1].encoding);
    if (row.inputs[1].encoding == nullptr || (groups != nullptr && groups->format().has_order)) continue;
    if (row.op->attrs().get<kernels::LinearAttrs>().matmul_input != MatmulInput::f32) continue;
    const PassCall call = straight_call(row, Pass::inference, 8);
    PassCall plain = call;
    plain.inputs[1] = Tensor::on_host(DType::f32, call.inputs[1].shape());
    call.inputs[1].view.encoding->decode(plain.inputs[1].view, call.inputs[1].view);
    plain.input_types[1].encoding = nullptr;
    for (const DeviceGroup& group : device_groups()) {
      const std::vector<Tensor> expected = run_chosen(*group.devices[0], plain, row.name),
                                y = run_chosen(*group.devices[0], call, row.name);
      ASSERT_FALSE(expected.empty() || y.empty());
      ASSERT_TRUE(same_bits(expected[0].view, y[0].view)) << row.name << " on " << group.name;
    }
    ++decoded;
  }
  EXPECT_GT(decoded, 0);
}

// Sums of products of codes are exact: the instruction set without 8-bit dot products finds the same scores in f32. Of
// the values one alone has a scale, which makes its weight the largest of its chunk, and its code of 16 bits exact; so
// the results differ by the roundings of that scale, the sum, and two products. Widths beside the blocks of codes that
// are taken at once, too.
TEST(AttentionProperties, IntegerScoresAreThoseOfTheirFloats) {
  const auto isas = byte_dot_isas();
  if (!isas) GTEST_SKIP() << "no instruction set with 8-bit dot products";
  const auto with = open_device("cpu", {.num_threads = 1, .isa = isas->first});
  const auto without = open_device("cpu", {.num_threads = 1, .isa = isas->second});
  for (int64_t head_dim : {1, 7, 16, 30, 64, 80, 128})
    for (int64_t tokens : {1, 3, 20}) {
      SymbolValues symbols;
      symbols[Symbol::tokens] = tokens;
      symbols[Symbol::sequences] = 1;
      symbols[Symbol::max_blocks] = 9;
      const TensorType cache(DType::f32, {9, 2, 16, head_dim}, &RowEncoding::int8());
      const ops::Workload row{
          "int8",
          std::make_shared<ops::Attention>(
              kernels::AttentionAttrs{14, 2, head_dim, 0.25f, 0, kernels::KvSource::cached}),
          {TensorType(DType::f32, {Symbol::tokens, 14, head_dim}), cache, cache,
           TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
           TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
          symbols};
      const PassCall call = straight_call(row, Pass::inference, 7);
      auto* const scales = static_cast<float*>(call.inputs[2].view.plane(1));
      const auto first_block = static_cast<int64_t>(call.inputs[5].view.as<int32_t>()[0]);
      for (int64_t i = 0; i < 9 * 2 * 16; ++i)
        if (i / (2 * 16) != first_block || i % 16 != 0) scales[i] = 0;  // all but that of position 0
      const std::vector<Tensor> expected = run_chosen(*without, call, "attention"),
                                y = run_chosen(*with, call, "attention");
      ASSERT_FALSE(expected.empty() || y.empty());
      float largest = 0;
      for (int64_t i = 0; i < y[0].view.num_elements(); ++i) {
        const float a = expected[0].view.as<float>()[i], b = y[0].view.as<float>()[i];
        ASSERT_LE(std::fabs(a - b), 6 * 0x1p-24f * std::fabs(a))
            << "head_dim " << head_dim << ", " << tokens << " tokens";
        largest = std::max(largest, std::fabs(a));
      }
      EXPECT_GT(largest, 0);
    }
}

// About as many rows as a panel has are computed by routines of their own, also where values lie in the rows of keys,
// as those of latents do. Their bits are those of half as many rows, and of values that lie elsewhere.
TEST(AttentionProperties, ThirteenToSixteenRowsHaveTheBitsOfEight) {
  constexpr int64_t kBlocks = 40;
  struct Rows {
    WeightType stored;
    int64_t dim, value_dim;
  };
  std::vector<std::pair<Rows, TensorType>> caches;
  for (const int64_t block_size : {16, 7})
    for (const Rows& rows : {Rows{DType::f32, 80, 64}, Rows{DType::bf16, 80, 64}, Rows{DType::f16, 80, 64},
                             Rows{{DType::f32, &RowEncoding::fp8_e4m3()}, 80, 64}, Rows{DType::bf16, 96, 64}})
      if (rows.stored.encoding == nullptr || device_name() == "cpu")
        caches.emplace_back(rows,
                            TensorType(rows.stored.dtype, {kBlocks, 1, block_size, rows.dim}, rows.stored.encoding));
  for (const DeviceGroup& group : device_groups())
    for (const auto& each : caches) {
      const TensorType& cache = each.second;
      const int64_t row_dim = each.first.dim, value_dim = each.first.value_dim;
      Device& device = *group.devices[0];
      const auto row_of = [&](int64_t heads) {
        SymbolValues symbols;
        symbols[Symbol::tokens] = symbols[Symbol::sequences] = 1;
        symbols[Symbol::max_blocks] = kBlocks;
        const kernels::AttentionAttrs attrs{.heads = heads,
                                            .kv_heads = 1,
                                            .head_dim = row_dim,
                                            .scale = 0.25f,
                                            .source = kernels::KvSource::cached,
                                            .value_dim = value_dim};
        return ops::Workload{
            "rows",
            std::make_shared<ops::Attention>(attrs),
            {TensorType(DType::f32, {Symbol::tokens, heads, row_dim}), cache, cache,
             TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
             TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
            symbols};
      };
      const ops::Workload sixteen = row_of(16), eight = row_of(8);
      PassCall shared = straight_call(sixteen, Pass::inference, 7), own = shared,
               half = straight_call(eight, Pass::inference, 7);
      shared.inputs[2] = shared.inputs[1];
      half.inputs[1] = half.inputs[2] = own.inputs[1];
      for (size_t port = 3; port < half.inputs.size(); ++port) half.inputs[port] = own.inputs[port];
      // `own` has a copy of the keys as its values, so that the kernel cannot take one for the other.
      const TensorView& keys = own.inputs[1].view;
      if (cache.encoding == nullptr) {
        own.inputs[2] = Tensor::on_host(cache.dtype, keys.shape);
        convert_on_host(own.inputs[2].view, keys);
      } else {
        own.inputs[2] = shared.inputs[2];
      }
      const std::vector<Tensor> y = run_chosen(device, shared, "attention"),
                                other = run_chosen(device, own, "attention");
      if (y.empty()) continue;  // no kernel for it here
      ASSERT_FALSE(other.empty());
      EXPECT_TRUE(same_bits(y[0].view, other[0].view)) << device.description() << " " << to_string(cache);
      for (int64_t first : {0, 8}) {
        std::copy_n(shared.inputs[0].view.as<float>() + first * row_dim, 8 * row_dim, half.inputs[0].view.as<float>());
        const std::vector<Tensor> part = run_chosen(device, half, "attention");
        ASSERT_FALSE(part.empty());
        EXPECT_EQ(std::memcmp(part[0].view.as<float>(), y[0].view.as<float>() + first * value_dim,
                              8 * value_dim * sizeof(float)),
                  0)
            << device.description() << " " << to_string(cache) << ": heads from " << first;
      }
      for (int64_t heads = 13; heads < 16; ++heads) {
        PassCall fewer = straight_call(row_of(heads), Pass::inference, 7);
        for (size_t port = 1; port < fewer.inputs.size(); ++port) fewer.inputs[port] = shared.inputs[port];
        std::copy_n(shared.inputs[0].view.as<float>(), heads * row_dim, fewer.inputs[0].view.as<float>());
        const std::vector<Tensor> part = run_chosen(device, fewer, "attention");
        ASSERT_FALSE(part.empty());
        EXPECT_EQ(std::memcmp(part[0].view.as<float>(), y[0].view.as<float>(), heads * value_dim * sizeof(float)), 0)
            << device.description() << " " << to_string(cache) << ": " << heads << " heads";
      }
    }
}

// The most spans that a window lets a few tokens see: one more than the last token sees. What they leave in scratch
// must fit; the runner guards its end.
TEST(AttentionProperties, AWindowOfFewTokensMayTouchOneMoreSpan) {
  constexpr int64_t kSplit = kernels::kAttentionSplit;
  const Sequence sequence = random_sequence(3 * kSplit + 1);
  for (const DeviceGroup& group : device_groups()) {
    const int64_t window = 2 * kSplit - 1;
    const Tensor expected =
        attend(*group.devices[0], {{&sequence, sequence.length(), sequence.length()}}, {window}, 0)[0];
    for (const auto& device : group.devices) {
      const Tensor got = attend(*device, {{&sequence, sequence.length(), 4}}, {window}, 2000)[0];
      EXPECT_TRUE(same_bits(expected.view.rows(sequence.length() - 4, 4), got.view)) << device->description();
    }
  }
}

// The encoding is the reference of what kv_append writes: codes and scales, for rows of zeros, of tiny numbers and of
// what is no number too.
TEST(KvAppendProperties, EncodedRowsHaveTheBitsOfTheEncoding) {
  if (device_name() != "cpu") GTEST_SKIP() << "encoded caches are for the CPU";
  constexpr int64_t kTokens = 40, kHeadsHere = 2;
  for (const RowEncoding* encoding : {&RowEncoding::int8(), &RowEncoding::fp8_e4m3()})
    for (int64_t dim : {1, 5, 16, 33, 64, 128}) {
      const Shape rows{kTokens, kHeadsHere, dim}, cache{kTokens, kHeadsHere, 1, dim};  // one block for each token
      std::vector<Tensor> in;
      for (uint64_t seed : {1, 2}) {
        in.push_back(workloads::random_tensor(DType::f32, rows, seed));
        float* x = in.back().view.as<float>();
        for (int64_t t = 0; t < kTokens; ++t)
          for (int64_t i = 0; i < kHeadsHere * dim; ++i) {
            float& value = x[t * kHeadsHere * dim + i];
            value *= std::ldexp(1.0f, static_cast<int>(7 * t - 140));  // from subnormal to 2^133
            if (t == 3) value = 0.0f;
            if (t == 4) value = std::ldexp(static_cast<float>(1 + i % 3), -149);  // the smallest numbers there are
            if (t == 5 && i % dim == dim / 2) value = std::numeric_limits<float>::infinity();
            if (t == 6 && i % dim == dim - 1) value = std::numeric_limits<float>::quiet_NaN();
            if (t >= 20 && t < 30) value = std::ldexp(x[(t - 18) % 20], -(static_cast<int>(i) % 12));  // wide rows
          }
      }
      in.push_back(Tensor::on_host(DType::i64, Shape{kTokens}));
      for (int64_t t = 0; t < kTokens; ++t) in.back().view.as<int64_t>()[t] = t;
      std::vector<Tensor> expected;
      for (int i : {0, 1}) {
        expected.push_back(Tensor::on_host(DType::f32, cache, *encoding));
        encoding->encode(expected.back().view, in[static_cast<size_t>(i)].view.reshaped(cache));
        in.push_back(Tensor::on_host(DType::f32, cache, *encoding));
      }
      PassCall call;
      call.op = std::make_shared<ops::KvAppend>();
      call.symbols[Symbol::tokens] = kTokens;
      const TensorType kv(DType::f32, {Symbol::tokens, kHeadsHere, dim});
      const TensorType stored(DType::f32, {kTokens, kHeadsHere, 1, dim}, encoding);
      call.input_types = {kv, kv, TensorType(DType::i64, {Symbol::tokens}), stored, stored};
      call.output_types = call.op->infer_types(call.input_types);
      call.inputs = in;
      call.outputs = {in[3], in[4]};
      call.output_alias = {3, 4};
      for (const DeviceGroup& group : device_groups()) {
        const std::vector<Tensor> got = run_chosen(*group.devices.back(), call, "kv_append");
        ASSERT_EQ(got.size(), 2u);
        for (size_t i = 0; i < 2; ++i)
          EXPECT_TRUE(same_bits(expected[i].view, got[i].view)) << group.name << " head_dim " << dim;
      }
    }
}

}  // namespace
}  // namespace eadem::test
