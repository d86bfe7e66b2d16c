// SPDX-License-Identifier: Apache-2.0
//
// The reference ring: every kernel of every op, on every instruction set (or on the device named by --device), against
// the double-precision reference, on the cases of op_cases.h. Besides the values it holds each kernel to its contract:
// guard bytes stay, inputs stay, bits do not depend on the thread count, on alignment, on writing in place, or on
// which gradients are wanted; gradients of parameters add to what is there; every kernel in a list is reached.
//
// No contract in kernels/ lets rows be strided, so every view here is contiguous.
//
//   ops_reference_test [--device cpu|cuda|cuda:1] [GoogleTest options]
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "eadem/core/device/cpu_device.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/core/philox.h"
#include "eadem/kernels/sample.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/error_bounds.h"
#include "tests/ops/op_cases.h"
#include "tests/ops/pass_calls.h"
#include "tests/support/compare.h"
#include "tests/support/thread_counts.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace {

using kernels::Kernel;
using kernels::Pass;

void expect_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b, const std::string& label) {
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].defined() && b[i].defined()) {
      EXPECT_TRUE(same_bits(a[i].view, b[i].view)) << label << ": output " << i;
    }
}

// The weight of a linear or grouped_linear op, or the cache of an attention, where it is encoded.
TensorView encoded_input(const PassCall& call) {
  if (call.inputs.size() < 2 || call.inputs[1].view.encoding == nullptr) return {};
  return call.inputs[1].view;
}

// How far rows may be from `expected` when they are written in `encoding`; what was there before stays exactly. The
// scale, largest / 127 or / 448, is rounded, and so is each value's quotient by it, which then becomes a level: the
// nearest integer, half of one away at most, or the nearest e4m3 number, within 2^-4 of it, or 2^-7 near zero.
std::vector<double> rounding_to_rows(const RowEncoding& encoding, const RefTensor& expected, const RefTensor& initial) {
  std::vector<double> bounds(expected.data.size(), 0.0);
  const auto columns = static_cast<size_t>(expected.shape.back());
  for (size_t row = 0; row < bounds.size(); row += columns) {
    double most = 0;
    bool written = false;
    for (size_t i = row; i < row + columns; ++i) {
      most = std::max(most, std::fabs(expected.data[i]));
      written = written || expected.data[i] != initial.data[i];
    }
    if (!written) continue;
    const double scale = most / static_cast<double>(encoding.largest());
    const double rounding = 4 * 0x1p-24 * most;  // of the scale, the quotient and the decoded product
    for (size_t i = row; i < row + columns; ++i)
      bounds[i] = rounding + (encoding.code() == RowEncoding::Code::int8
                                  ? scale / 2
                                  : std::max(0x1p-4 * std::fabs(expected.data[i]), 0x1p-7 * scale));
  }
  return bounds;
}

// Whether `kernel` rounds to bf16 what it multiplies: linear its x and dy for products of bf16, attention its
// exponentials on a GPU, and in its backward pass all factors. Gradients of experts and of heads are products of f32.
bool rounds_to_bf16(const PassCall& call, const Kernel& kernel, const Device& device) {
  if (call.op->name() == "attention")
    return kernel.name == "cuda_mma" || kernel.name == "cuda_wgmma" || kernel.name == "cpu_bf16_recompute";
  const auto* cpu = dynamic_cast<const CpuDevice*>(&device);
  if (cpu == nullptr || !has_bf16_products(cpu->isa())) return false;
  MatmulInput x;
  if (call.op->name() != "linear" && call.pass == Pass::backward) return false;
  if (call.op->name() == "linear")
    x = call.op->attrs().get<kernels::LinearAttrs>().matmul_input;
  else if (call.op->name() == "grouped_linear")
    x = call.op->attrs().get<kernels::GroupedLinearAttrs>().matmul_input;
  else if (call.op->name() == "head_linear")
    x = call.op->attrs().get<kernels::HeadLinearAttrs>().matmul_input;
  else if (call.op->name() == "latent_attention")
    return call.inputs[2].dtype() == DType::bf16 &&
           may_round_to(MatmulInput::bf16, call.op->attrs().get<kernels::LatentAttentionAttrs>().matmul_input);
  else
    return false;
  return call.inputs[1].dtype() == DType::bf16 && may_round_to(MatmulInput::bf16, x);
}

// Whether a kernel of attention multiplies queries and exponentials as sums of two bf16 numbers: by its contract
// (kernels/attention/attention.h) where keys are in bf16, widths are multiples of 32, and many heads share keys or
// values are the first columns of keys.
bool has_bf16_parts(const PassCall& call, const Device& device) {
  const auto* cpu = dynamic_cast<const CpuDevice*>(&device);
  if (cpu == nullptr || cpu->isa() != Isa::amx || call.pass == Pass::backward) return false;
  int64_t key_dim, value_dim;
  bool wanted = true;
  if (call.op->name() == "attention") {
    const auto attrs = call.op->attrs().get<kernels::AttentionAttrs>();
    key_dim = attrs.head_dim, value_dim = attrs.values();
    wanted = attrs.sharing_heads() >= kernels::kTiledSharing ||
             (call.inputs[2].shape().back() == key_dim && value_dim < key_dim);
  } else if (call.op->name() == "latent_attention") {
    const auto attrs = call.op->attrs().get<kernels::LatentAttentionAttrs>();
    key_dim = attrs.row_dim(), value_dim = attrs.latent_dim;
  } else {
    return false;
  }
  return wanted && call.inputs[1].dtype() == DType::bf16 && key_dim % 32 == 0 && value_dim % 32 == 0;
}

// How far products may be whose x is rounded to rows of e4m3, and that add as Hopper's tensor cores do: each x within
// 2^-4 of itself, or 2^-7 of its row's scale near zero; a chain over 128 columns has four steps, each of which cuts 33
// terms at 2^-13 of the largest, which is at most the chain's sum of magnitudes. Scales and sums are rounded to f32.
std::vector<double> rounding_of_fp8_products(std::span<const RefTensor> in) {
  const auto columns = static_cast<size_t>(in[0].shape.back());
  const size_t rows = in[0].data.size() / columns, outputs = in[1].data.size() / columns;
  std::vector<double> bounds(rows * outputs);
  for (size_t t = 0; t < rows; ++t) {
    double most = 0;
    for (size_t k = 0; k < columns; ++k) most = std::max(most, std::fabs(in[0].data[t * columns + k]));
    const double near_zero = 0x1p-7 * most / static_cast<double>(RowEncoding::fp8_e4m3().largest());
    for (size_t n = 0; n < outputs; ++n)
      for (size_t k = 0; k < columns; ++k) {
        const double weight = std::fabs(in[1].data[n * columns + k]);
        const double term = weight * std::fabs(in[0].data[t * columns + k]);
        bounds[t * outputs + n] += term * (0x1p-4 + 4 * 33 * 0x1.1p-13 + 0x1p-20) + weight * near_zero;
      }
  }
  return bounds;
}

// The same for dx = dy weight, given x, weight and dy.
std::vector<double> rounding_of_fp8_gradient(std::span<const RefTensor> in) {
  const int64_t outputs = in[1].shape[0], width = in[1].shape[1];
  RefTensor transposed{{width, outputs}, std::vector<double>(in[1].data.size())};
  for (size_t n = 0; n < static_cast<size_t>(outputs); ++n)
    for (size_t k = 0; k < static_cast<size_t>(width); ++k)
      transposed.data[k * static_cast<size_t>(outputs) + n] = in[1].data[n * static_cast<size_t>(width) + k];
  const RefTensor operands[] = {in[2], transposed};
  return rounding_of_fp8_products(operands);
}

// The same for weights of 8-bit floats that are rounded to bf16.
std::vector<double> rounding_of_bf16_weights(std::span<const RefTensor> in) {
  const auto columns = static_cast<size_t>(in[0].shape.back());
  const size_t rows = in[0].data.size() / columns, outputs = in[1].data.size() / columns;
  std::vector<double> bounds(rows * outputs);
  for (size_t t = 0; t < rows; ++t)
    for (size_t n = 0; n < outputs; ++n)
      for (size_t k = 0; k < columns; ++k)
        bounds[t * outputs + n] += 0x1p-8 * std::fabs(in[0].data[t * columns + k] * in[1].data[n * columns + k]);
  return bounds;
}

void expect_expected(const ExpectedCall& want, const Kernel& kernel, const Device& device,
                     const std::vector<Tensor>& results, const std::string& label) {
  std::vector<std::vector<double>> bounds =
      error_bounds(*want.call.op, want.call.pass, want.inputs, want.expected, want.initial, encoded_input(want.call),
                   rounds_to_bf16(want.call, kernel, device), has_bf16_parts(want.call, device));
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    if (kernel.name == "cuda_fp8" || kernel.name == "cpu_fp8_rows")
      bounds[i] = want.call.pass == Pass::backward ? rounding_of_fp8_gradient(want.inputs)
                                                   : rounding_of_fp8_products(want.inputs);
    if (kernel.name == "cuda_int8") bounds[i] = bounds_of_chunked_linear(want.inputs, encoded_input(want.call));
    if (const TensorView weight = encoded_input(want.call);
        (kernel.name == "cuda_mma_chain" || kernel.name == "cuda_decoded") && weight.defined() &&
        Fp8Encoding::of(weight.encoding) != nullptr)
      bounds[i] = rounding_of_bf16_weights(want.inputs);
    if (const RowEncoding* encoding = RowEncoding::of(results[i].view.encoding))
      bounds[i] = rounding_to_rows(*encoding, want.expected[i], want.initial[i]);
    const Tolerance rounding = Tolerance::exact().then_round(results[i].dtype());
    EXPECT_TRUE(is_within(widen(results[i].view), want.expected[i], bounds[i], rounding)) << label << ": output " << i;
  }
}

kernels::KernelList kernels_of(const ops::Op& op, const DeviceGroup& group) {
  return op.kernels(kernels::backend_of(*group.devices[0]));
}

// The call whose activations arrive in the encodings that `kernel` wants; nothing if it takes them as they are.
std::optional<PassCall> rounded_call(const PassCall& call, const Kernel& kernel, const Device& device) {
  if (kernel.wanted_encoding == nullptr) return std::nullopt;
  PassCall result = call;
  bool is_rounded = false;
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const Encoding* encoding = kernel.wanted_encoding(call.request(device), static_cast<int>(i));
    const TensorView& plain = call.inputs[i].view;
    if (encoding == nullptr || plain.encoding == encoding) continue;
    result.inputs[i] = Tensor::on_host(plain.dtype, plain.shape, *encoding);
    encoding->encode(result.inputs[i].view, plain);
    result.input_types[i].encoding = encoding;
    is_rounded = true;
  }
  return is_rounded ? std::optional(std::move(result)) : std::nullopt;
}

// Names of kernels.
struct Reached {
  std::set<std::string> took_a_call;
  // Refused because of the device, whatever the call: the reason says so first.
  std::set<std::string> for_other_devices;
};

void check_call(const ExpectedCall& want, const std::string& case_name, Reached& reached);

// Kernels whose weight has one scale take operands that are rounded alone: the definition is that of what they hold.
void check_rounded_call(const ExpectedCall& want, const Kernel& kernel, const Device& device,
                        const std::string& case_name, Reached& reached) {
  const std::optional<PassCall> call = rounded_call(want.call, kernel, device);
  if (!call) return;
  ExpectedCall rounded = want;
  rounded.call = *call;
  rounded.inputs = widen(call->inputs);
  rounded.expected = rounded.initial;
  call->op->reference(call->pass, rounded.inputs, rounded.expected);
  check_call(rounded, case_name + " rounded", reached);
}

// Runs every kernel that takes the call, everywhere. Adds to `reached`.
void check_call(const ExpectedCall& want, const std::string& case_name, Reached& reached) {
  const PassCall& call = want.call;
  const bool has_one_scale = Fp8TensorEncoding::of(encoded_input(call).encoding) != nullptr;
  for (const DeviceGroup& group : device_groups()) {
    for (const Kernel* kernel : kernels_of(*call.op, group)) {
      if (kernel->pass != call.pass) continue;
      std::vector<Tensor> first;
      for (const auto& device : group.devices) {
        const Verdict verdict = kernel->can_handle(call.request(*device));
        const std::string name = fmt::format("{} {}", kernel->name, pass_name(call.pass));
        if (!verdict.accepted && verdict.reason.starts_with("is for ")) reached.for_other_devices.insert(name);
        if (!verdict.accepted) break;
        if (has_one_scale && call.inputs[0].view.encoding == nullptr && kernel->wanted_encoding != nullptr) {
          check_rounded_call(want, *kernel, *device, case_name, reached);
          break;
        }
        reached.took_a_call.insert(name);
        const std::string label =
            fmt::format("{} {} {} on {}", case_name, pass_name(call.pass), kernel->name, device->description());
        if (!first.empty() || call.outputs.empty()) {
          expect_same_bits(run_kernel(*device, *kernel, call, {}, label), first, label + " against one thread");
          continue;
        }
        first = run_kernel(*device, *kernel, call, {}, label);
        expect_expected(want, *kernel, *device, first, label);
        // What was rounded once for all readers has the bits of what a kernel rounds for itself.
        if (const std::optional<PassCall> rounded = rounded_call(call, *kernel, *device)) {
          EXPECT_TRUE(kernel->can_handle(rounded->request(*device)).accepted) << label;
          expect_same_bits(run_kernel(*device, *kernel, *rounded, {}, label), first, label + " of rounded rows");
        }
        if (kernel->alignment_bytes == 1)
          expect_same_bits(run_kernel(*device, *kernel, call, {.element_aligned = true}, label + " element-aligned"),
                           first, label + " element-aligned");
        if (const int alias = call.op->inference_alias(0);
            call.pass == Pass::inference && alias >= 0 && call.output_alias[0] < 0) {
          PassCall in_place = call;
          in_place.output_alias[0] = alias;
          expect_same_bits(run_kernel(*device, *kernel, in_place, {}, label + " in place"), first, label + " in place");
        }
        if (call.pass == Pass::backward && call.outputs.size() > 1)
          for (size_t wanted = 0; wanted < call.outputs.size(); ++wanted) {
            PassCall one = call;
            for (size_t i = 0; i < one.outputs.size(); ++i)
              if (i != wanted) one.outputs[i] = {};
            if (!one.outputs[wanted].defined()) continue;
            expect_same_bits(run_kernel(*device, *kernel, one, {}, label), first,
                             fmt::format("{} with output {} alone", label, wanted));
          }
      }
    }
    if (testing::Test::HasFailure()) return;  // the first failing case says enough
  }
}

// Sampling has no tolerance: a draw next to a border may fall on either side. Moves the seeds of a row until the draw
// and the filters of that row lie away from every border by more than f32 can blur, so that one answer is right.
// Two exponentials' and a sum's errors, twice: below 2^-14 for rows of up to 300 logits within 12 / 0.5.
constexpr double kDrawMargin = 0x1p-14;

kernels::SampleRow& sample_row(const std::vector<Tensor>& in, int64_t row) {
  return static_cast<kernels::SampleRow*>(in[1].view.data)[row];
}

// The row's logits with its biases and penalties, in double.
std::vector<double> penalized(const std::vector<Tensor>& in, int64_t row) {
  const int64_t vocab = in[0].shape()[1];
  const float* logits = in[0].view.as<float>() + row * vocab;
  const int32_t* pairs = in[2].view.as<int32_t>();
  const auto& [s, position, begin, end, biases_begin, biases_end, allowed_begin, forced] = sample_row(in, row);
  std::vector<double> result(logits, logits + vocab);
  for (int32_t i = biases_begin; i < biases_end; ++i)
    result[static_cast<size_t>(pairs[2 * i])] += static_cast<double>(std::bit_cast<float>(pairs[2 * i + 1]));
  for (int32_t i = begin; i < end; ++i) {
    double& logit = result[static_cast<size_t>(pairs[2 * i])];
    logit *= logit < 0 ? s.repetition_penalty : 1 / static_cast<double>(s.repetition_penalty);
    logit -= static_cast<double>(s.frequency_penalty) * pairs[2 * i + 1];
    if (pairs[2 * i + 1] > 0) logit -= static_cast<double>(s.presence_penalty);
  }
  for (int64_t i = 0; allowed_begin >= 0 && i < vocab; ++i)
    if (!kernels::allows(pairs + 2 * allowed_begin, i)) result[static_cast<size_t>(i)] = -HUGE_VAL;
  return result;
}

// Drops what typical_p drops of (p, index), and returns how far that is from a border: of the sum, in the share that a
// token has, and of the distance from the entropy, where f32 blurs that by some units of 2^-22.
double drop_atypical(std::vector<std::pair<double, int64_t>>& kept, double typical_p) {
  double total = 0, entropy = 0, margin = 1, prefix = 0;
  std::erase_if(kept, [](const auto& entry) { return entry.first == 0; });
  for (const auto& [p, index] : kept) total += p;
  for (const auto& [p, index] : kept) entropy -= p / total * std::log(p / total);
  const auto distance = [&](const auto& entry) { return std::fabs(std::log(entry.first / total) + entropy); };
  std::sort(kept.begin(), kept.end(), [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
  for (size_t i = 0; i < kept.size(); ++i) {
    prefix += kept[i].first;
    margin = std::min(margin, std::fabs(prefix / total - typical_p));
    if (prefix < typical_p * total) continue;
    // The last one that is kept must not change places with its neighbours.
    if (i > 0) margin = std::min(margin, distance(kept[i]) - distance(kept[i - 1]));
    if (i + 1 < kept.size()) margin = std::min(margin, distance(kept[i + 1]) - distance(kept[i]));
    kept.resize(i + 1);
  }
  return margin;
}

double draw_margin(const std::vector<Tensor>& in, int64_t row) {
  const int64_t vocab = in[0].shape()[1];
  const auto& [settings, position, begin, end, biases_begin, biases_end, allowed_begin, forced] = sample_row(in, row);
  if (forced >= 0) return 1;
  const double temperature = static_cast<double>(settings.temperature);
  const std::vector<double> logits = penalized(in, row);
  if (temperature == 0) {  // a tie of unequal logits that rounding makes
    std::vector<double> sorted = logits;
    std::sort(sorted.rbegin(), sorted.rend());
    return vocab == 1 || begin == end ? 1 : sorted[0] - sorted[1];
  }
  std::vector<std::pair<double, int64_t>> kept;  // (p, index)
  double largest = -HUGE_VAL, total = 0;
  for (double logit : logits) largest = std::max(largest, logit);
  for (int64_t i = 0; i < vocab; ++i)
    kept.push_back({std::exp((logits[static_cast<size_t>(i)] - largest) / temperature), i});
  std::sort(kept.begin(), kept.end(), [](auto a, auto b) { return a.first > b.first; });
  const int64_t top_k = settings.top_k;
  if (top_k > 0 && top_k < vocab) kept.resize(static_cast<size_t>(top_k));
  for (const auto& [p, index] : kept) total += p;
  double margin = 1, prefix = 0;
  const double top_p = static_cast<double>(settings.top_p);
  for (size_t i = 0; i < kept.size() && top_p < 1; ++i) {
    prefix += kept[i].first;
    margin = std::min(margin, std::fabs(prefix / total - top_p));
    if (prefix >= top_p * total) kept.resize(i + 1);
  }
  const double min_p = static_cast<double>(settings.min_p);
  for (const auto& [p, index] : kept) margin = std::min(margin, min_p > 0 ? std::fabs(p - min_p) / min_p : 1);
  std::erase_if(kept, [&](const auto& entry) { return entry.first < min_p; });
  if (settings.typical_p < 1) margin = std::min(margin, drop_atypical(kept, static_cast<double>(settings.typical_p)));
  std::sort(kept.begin(), kept.end(), [](auto a, auto b) { return a.second < b.second; });
  total = prefix = 0;
  for (const auto& [p, index] : kept) total += p;
  const double u = static_cast<double>(
      uniform_float(philox4x32(static_cast<uint64_t>(settings.seed), static_cast<uint64_t>(position)).words[0]));
  for (size_t i = 0; i + 1 < kept.size(); ++i) {  // the last border is the whole: nothing lies beyond it
    prefix += kept[i].first;
    margin = std::min(margin, std::fabs(prefix / total - u));
  }
  return margin;
}

// Has some rows ask for what the rows of benchmarks do not: typical_p, the likeliest tokens, a forced token, and a mask
// where the row has penalties whose place it can take.
void ask_for_more(const std::vector<Tensor>& in, uint64_t seed) {
  const int64_t vocab = in[0].shape()[1];
  for (int64_t r = 0; r < in[0].shape()[0]; ++r) {
    kernels::SampleRow& sample = sample_row(in, r);
    const PhiloxBlock random = philox4x32(seed, static_cast<uint64_t>(r));
    if (r / 3 % 2 == 1) sample.settings.typical_p = 0.2f + 0.79f * uniform_float(random.words[0]);
    if (r % 2 == 1)
      sample.settings.top_logprobs = static_cast<int32_t>(random.words[1] % (kernels::kMostTopLogprobs + 1));
    if (r % 11 == 10) sample.forced = static_cast<int32_t>(random.words[2] % vocab);
    const auto pairs = static_cast<int32_t>(kernels::mask_pairs(vocab));
    if (r % 4 != 1 || sample.penalties_end - sample.penalties_begin < pairs) continue;
    sample.allowed_begin = sample.penalties_end -= pairs;
    int32_t* const mask = in[2].view.as<int32_t>() + 2 * sample.allowed_begin;
    for (int32_t i = 0; i < 2 * pairs; ++i)
      mask[i] = static_cast<int32_t>(philox4x32(seed + static_cast<uint64_t>(i), static_cast<uint64_t>(r)).words[3]);
    const int64_t allowed = random.words[3] % vocab;  // one at least
    mask[allowed / 32] |= static_cast<int32_t>(uint32_t{1} << (allowed % 32));
  }
}

std::vector<Tensor> sample_inputs_away_from_borders(const ops::Workload& row, uint64_t seed) {
  std::vector<Tensor> in = workloads::make_inputs(*row.op, row.inputs, row.symbols, seed);
  ask_for_more(in, seed);
  for (int64_t r = 0; r < in[0].shape()[0]; ++r)
    for (int attempt = 0; draw_margin(in, r) < kDrawMargin; ++attempt) {
      EADEM_CHECK(attempt < 200, "row {} of {} is always on a border", r, row.name);
      kernels::SampleRow& sample = sample_row(in, r);
      sample.position += 1;
      if (sample.settings.temperature == 0) sample.settings.presence_penalty += 0.01f;
      if (attempt == 100) sample.settings.typical_p = 1;  // two tokens alone are equally typical
      if (attempt % 5 == 4) {
        if (sample.settings.top_p < 1) sample.settings.top_p *= 0.999f;
        sample.settings.min_p *= 0.999f;
        if (sample.settings.typical_p < 1) sample.settings.typical_p *= 0.999f;
      }
    }
  return in;
}

class ReferenceRing : public testing::TestWithParam<std::string_view> {};

TEST_P(ReferenceRing, EveryKernelMatches) {
  const std::string_view op_name = GetParam();
  std::set<std::string> listed;
  Reached reached;
  int64_t calls = 0, cases = 0;
  for (const ops::Workload& row : op_cases(op_name)) {
    const auto seed = static_cast<uint64_t>(1000 + cases);  // the same whichever other cases are tried
    if (!test::tries_case(cases++)) continue;
    for (const DeviceGroup& group : device_groups())
      for (const Kernel* kernel : kernels_of(*row.op, group))
        listed.insert(fmt::format("{} {}", kernel->name, pass_name(kernel->pass)));
    for (Pass pass : {Pass::forward, Pass::inference, Pass::backward}) {
      const std::optional<ExpectedCall> want =
          op_name == "sample" ? expected_call(row, pass, sample_inputs_away_from_borders(row, seed), seed)
                              : expected_call(row, pass, seed);
      if (!want) continue;
      ++calls;
      for (const ExpectedCall& call : divided(*want, row))
        check_call(call, fmt::format("{} seed {}", row.name, seed), reached);
      if (HasFailure()) return;
    }
  }
  for (const std::string& name : listed)
    EXPECT_TRUE(kEveryCase > 1 || reached.took_a_call.contains(name) || reached.for_other_devices.contains(name))
        << name << " was never reached by a case";
  RecordProperty("calls", static_cast<int>(calls));
  RecordProperty("kernels", static_cast<int>(reached.took_a_call.size()));
}

INSTANTIATE_TEST_SUITE_P(Ops, ReferenceRing, testing::ValuesIn(op_names()),
                         [](const auto& info) { return std::string(info.param); });

// Rows that random numbers never make.
struct SampleRow {
  std::vector<float> logits;
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1, min_p = 0;
  int32_t token;  // -1: refused
};

TEST(SampleContract, TiesFiltersAndBrokenRows) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  const std::vector<SampleRow> rows = {
      {.logits = {1, 3, 3, 2, 0}, .token = 1},                                    // greedy: the smaller index of equals
      {.logits = {3, 3, 3, 3, 3}, .temperature = 1, .top_k = 1, .token = 0},      // likewise
      {.logits = {0, 5, 1, 2, 3}, .temperature = 1, .top_k = 1, .token = 1},      //
      {.logits = {0, 5, 1, 2, 3}, .temperature = 1, .top_p = 1e-6f, .token = 1},  // at least one
      {.logits = {0, 5, 1, 2, 3}, .temperature = 1, .min_p = 1, .token = 1},      //
      {.logits = {0, 5, 1, 2, 3}, .temperature = 1e-6f, .token = 1},              // all but greedy
      {.logits = {-kInf, -kInf, 0, -kInf, -kInf}, .temperature = 1, .token = 2},  // masked tokens
      {.logits = {-kInf, -kInf, 0, -kInf, -kInf}, .token = 2},
      {.logits = {0, 5, kNan, 2, 3}, .token = -1},
      {.logits = {kNan, 5, 1, 2, 3}, .temperature = 1, .token = -1},
      {.logits = {0, 5, 1, 2, kInf}, .token = -1},
      {.logits = {-kInf, -kInf, -kInf, -kInf, -kInf}, .temperature = 1, .token = -1},
  };
  const auto op = std::make_shared<ops::Sample>();
  ops::Workload row = op_cases("sample").front();
  const Dim n = Symbol::logit_rows;
  row.inputs[0] = TensorType(DType::f32, {n, 5});
  row.symbols[Symbol::logit_rows] = static_cast<int64_t>(rows.size());
  std::vector<Tensor> in = workloads::make_inputs(*row.op, row.inputs, row.symbols, 1);
  for (size_t r = 0; r < rows.size(); ++r) {
    std::memcpy(in[0].view.as<float>() + 5 * r, rows[r].logits.data(), 5 * sizeof(float));
    sample_row(in, static_cast<int64_t>(r)) = {.settings = {.temperature = rows[r].temperature,
                                                            .top_k = rows[r].top_k,
                                                            .top_p = rows[r].top_p,
                                                            .min_p = rows[r].min_p}};
  }
  const std::optional<ExpectedCall> want = expected_call(row, Pass::inference, in, 1);
  for (size_t r = 0; r < rows.size(); ++r)
    EXPECT_EQ(static_cast<int32_t>(want->expected[0].data[r]), rows[r].token) << "reference, row " << r;
  for (const DeviceGroup& group : device_groups()) {
    for (const Kernel* kernel : kernels_of(*row.op, group)) {
      if (kernel->pass != Pass::inference) continue;
      if (!kernel->can_handle(want->call.request(*group.devices[0])).accepted) continue;
      const std::vector<Tensor> got = run_kernel(*group.devices[0], *kernel, want->call, {}, group.name);
      for (size_t r = 0; r < rows.size(); ++r)
        EXPECT_EQ(got[0].view.as<int32_t>()[r], rows[r].token) << kernel->name << " on " << group.name << ", row " << r;
    }
  }
}

// The expected logits follow transformers' RepetitionPenaltyLogitsProcessor and vLLM's penalties, worked out by hand.
TEST(SampleContract, PenaltiesChangeWhatIsDrawnAndNotTheLogProbability) {
  struct PenaltyRow {
    kernels::SampleSettings settings;
    std::vector<int32_t> pairs;  // token, count
    int32_t token;
  };
  const std::vector<PenaltyRow> rows = {
      {{}, {}, 1},                                                 // logits 1, 4, 3, -1, -2
      {{.repetition_penalty = 1.5f}, {1, 0}, 2},                   // 4 / 1.5 < 3
      {{.repetition_penalty = 1.3f}, {1, 0}, 1},                   // 4 / 1.3 > 3
      {{.repetition_penalty = 0.2f}, {0, 0, 3, 0, 4, 0}, 0},       // 1 / 0.2 = 5; negative logits rise to -0.2, -0.4
      {{.repetition_penalty = 100}, {0, 0, 1, 0, 2, 0, 3, 0}, 1},  // 0.04 is still the largest: -1 becomes -100
      {{.presence_penalty = 1.5f}, {1, 0}, 1},                     // not of a prompt's token
      {{.presence_penalty = 1.5f}, {1, 1}, 2},                     //
      {{.presence_penalty = 1.5f}, {1, 5, 2, 5}, 1},               // once, however often it was generated
      {{.frequency_penalty = 0.4f}, {1, 2, 2, 0}, 1},              // 4 - 0.8 > 3
      {{.frequency_penalty = 0.4f}, {1, 3, 2, 0}, 2},              // 4 - 1.2 < 3
      {{.frequency_penalty = -0.5f}, {2, 3}, 2},                   // 3 + 1.5 > 4
      {{.repetition_penalty = 2, .presence_penalty = -1.5f}, {1, 1}, 1},  // repetition first: 4 / 2 + 1.5 > 3
  };
  const std::vector<float> logits = {1, 4, 3, -1, -2};
  ops::Workload row = op_cases("sample").front();
  row.inputs[0] = TensorType(DType::f32, {Symbol::logit_rows, 5});
  row.symbols[Symbol::logit_rows] = std::ssize(rows);
  int32_t pairs = 0;
  for (const PenaltyRow& each : rows) pairs += static_cast<int32_t>(each.pairs.size() / 2);
  row.symbols[Symbol::penalties] = pairs;
  std::vector<Tensor> in = workloads::make_inputs(*row.op, row.inputs, row.symbols, 1);
  pairs = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    std::memcpy(in[0].view.as<float>() + 5 * r, logits.data(), 5 * sizeof(float));
    const auto end = pairs + static_cast<int32_t>(rows[r].pairs.size() / 2);
    sample_row(in, static_cast<int64_t>(r)) = {
        .settings = rows[r].settings, .penalties_begin = pairs, .penalties_end = end};
    std::copy(rows[r].pairs.begin(), rows[r].pairs.end(), in[2].view.as<int32_t>() + 2 * pairs);
    pairs = end;
  }
  const std::optional<ExpectedCall> want = expected_call(row, Pass::inference, in, 1);
  double sum = 0;
  for (float logit : logits) sum += std::exp(static_cast<double>(logit));
  const auto check = [&](const RefTensor& tokens, const RefTensor& logprobs, const std::string& label) {
    for (size_t r = 0; r < rows.size(); ++r) {
      EXPECT_EQ(static_cast<int32_t>(tokens.data[r]), rows[r].token) << label << ", row " << r;
      // A difference of logits below 8 and a logarithm of a sum of five, in f32: a few units of 2^-22 each.
      EXPECT_NEAR(logprobs.data[r], logits[static_cast<size_t>(rows[r].token)] - std::log(sum), 0x1p-19) << label;
    }
  };
  check(want->expected[0], want->expected[1], "reference");
  for (const DeviceGroup& group : device_groups())
    for (const Kernel* kernel : kernels_of(*row.op, group)) {
      if (kernel->pass != Pass::inference || !kernel->can_handle(want->call.request(*group.devices[0])).accepted)
        continue;
      const std::vector<Tensor> got = run_kernel(*group.devices[0], *kernel, want->call, {}, group.name);
      check(widen(got[0].view), widen(got[1].view), group.name);
    }
}

// As OpenAI's logit_bias: added before anything else, for the draw alone.
TEST(SampleContract, BiasesComeBeforePenaltiesAndLeaveTheLogProbability) {
  struct BiasRow {
    kernels::SampleSettings settings;
    std::vector<std::pair<int32_t, float>> biases;
    std::vector<int32_t> pairs;  // token, count
    int32_t token;
  };
  const std::vector<BiasRow> rows = {
      {{}, {{2, 1.5f}}, {}, 2},                                           // 3 + 1.5 > 4; logits 1, 4, 3, -1, -2
      {{}, {{2, 0.5f}}, {}, 1},                                           // 3.5 < 4
      {{}, {{1, -100.0f}}, {}, 2},                                        //
      {{}, {{4, 100.0f}, {0, 50.0f}}, {}, 4},                             //
      {{}, {{0, -1e30f}, {1, -1e30f}, {2, -1e30f}, {4, -1e30f}}, {}, 3},  // all but one are banned
      {{.temperature = 5, .seed = 1}, {{0, -1e30f}, {1, -1e30f}, {2, -1e30f}, {3, -1e30f}}, {}, 4},
      {{.repetition_penalty = 2}, {{1, 4.0f}}, {1, 0}, 1},  // (4 + 4) / 2 > 3
      {{.repetition_penalty = 2}, {{1, 1.5f}}, {1, 0}, 2},  // (4 + 1.5) / 2 < 3
  };
  const std::vector<float> logits = {1, 4, 3, -1, -2};
  ops::Workload row = op_cases("sample").front();
  row.inputs[0] = TensorType(DType::f32, {Symbol::logit_rows, 5});
  row.symbols[Symbol::logit_rows] = std::ssize(rows);
  row.symbols[Symbol::penalties] = 40;
  std::vector<Tensor> in = workloads::make_inputs(*row.op, row.inputs, row.symbols, 1);
  auto* entries = in[2].view.as<int32_t>();
  int32_t used = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    std::memcpy(in[0].view.as<float>() + 5 * r, logits.data(), 5 * sizeof(float));
    kernels::SampleRow& sample = sample_row(in, static_cast<int64_t>(r));
    sample = {.settings = rows[r].settings, .penalties_begin = used};
    std::copy(rows[r].pairs.begin(), rows[r].pairs.end(), entries + 2 * used);
    used += static_cast<int32_t>(rows[r].pairs.size() / 2);
    sample.penalties_end = sample.biases_begin = used;
    for (const auto& [token, bias] : rows[r].biases) {
      entries[2 * used] = token;
      entries[2 * used++ + 1] = std::bit_cast<int32_t>(bias);
    }
    sample.biases_end = used;
  }
  const std::optional<ExpectedCall> want = expected_call(row, Pass::inference, in, 1);
  double sum = 0;
  for (float logit : logits) sum += std::exp(static_cast<double>(logit));
  const auto check = [&](const RefTensor& tokens, const RefTensor& logprobs, const std::string& label) {
    for (size_t r = 0; r < rows.size(); ++r) {
      EXPECT_EQ(static_cast<int32_t>(tokens.data[r]), rows[r].token) << label << ", row " << r;
      // As for penalties: a few units of 2^-22.
      EXPECT_NEAR(logprobs.data[r], logits[static_cast<size_t>(rows[r].token)] - std::log(sum), 0x1p-19) << label;
    }
  };
  check(want->expected[0], want->expected[1], "reference");
  for (const DeviceGroup& group : device_groups())
    for (const Kernel* kernel : kernels_of(*row.op, group)) {
      if (kernel->pass != Pass::inference || !kernel->can_handle(want->call.request(*group.devices[0])).accepted)
        continue;
      const std::vector<Tensor> got = run_kernel(*group.devices[0], *kernel, want->call, {}, group.name);
      check(widen(got[0].view), widen(got[1].view), group.name);
    }
}

// Frequencies of 20000 draws against the probabilities: each count within six standard deviations.
TEST(SampleContract, DrawsFollowTheDistribution) {
  constexpr int64_t kDraws = 20000, kVocab = 5;
  ops::Workload row = op_cases("sample").front();
  row.inputs[0] = TensorType(DType::f32, {Symbol::logit_rows, kVocab});
  row.symbols[Symbol::logit_rows] = kDraws;
  std::vector<Tensor> in = workloads::make_inputs(*row.op, row.inputs, row.symbols, 1);
  const double p[] = {0.4, 0.3, 0.15, 0.1, 0.05};
  for (int64_t r = 0; r < kDraws; ++r) {
    for (int64_t i = 0; i < kVocab; ++i) in[0].view.as<float>()[r * kVocab + i] = static_cast<float>(std::log(p[i]));
    sample_row(in, r) = {.settings = {.temperature = 1, .seed = 42}, .position = r};
  }
  const std::optional<ExpectedCall> want = expected_call(row, Pass::inference, in, 1);
  const auto check = [&](const RefTensor& tokens, const std::string& label) {
    std::vector<int> counts(kVocab, 0);
    for (double token : tokens.data) ++counts[static_cast<size_t>(token)];
    for (size_t i = 0; i < kVocab; ++i)
      EXPECT_NEAR(counts[i], kDraws * p[i], 6 * std::sqrt(kDraws * p[i] * (1 - p[i]))) << label << " token " << i;
  };
  check(want->expected[0], "reference");
  for (const DeviceGroup& group : device_groups())
    for (const Kernel* kernel : kernels_of(*row.op, group)) {
      if (kernel->pass != Pass::inference || !kernel->can_handle(want->call.request(*group.devices[0])).accepted)
        continue;
      check(widen(run_kernel(*group.devices[0], *kernel, want->call, {}, group.name)[0].view), group.name);
    }
}

}  // namespace
}  // namespace eadem::test
