// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/recurrent_cases.h"

#include "eadem/ops/all_ops.h"
#include "tests/ops/op_cases.h"

namespace eadem::test {

namespace {

using ops::Workload;

constexpr DType kF32 = DType::f32, kBf16 = DType::bf16;

// Tokens and sequences of a step: none, fewer tokens than taps, decode, chunks, more sequences than tokens.
struct Step {
  int64_t tokens, sequences;
};
constexpr Step kSteps[] = {{0, 0}, {1, 1}, {2, 1}, {3, 3}, {17, 3}, {2, 5}, {40, 2}};

SymbolValues symbols_of(const Step& step) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = step.tokens;
  symbols[Symbol::sequences] = step.sequences;
  return symbols;
}

const TensorType kQueryStart(DType::i32, {Dim(Symbol::sequences, 1)});
const TensorType kStateSlots(DType::i32, {Symbol::sequences});

std::vector<Workload> short_convolution() {
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, const kernels::ShortConvolutionAttrs& attrs, bool bias, int64_t channels,
                       const Step& step) {
    std::vector<TensorType> types = {TensorType(dtype, {Symbol::tokens, channels}),
                                     TensorType(kF32, {attrs.taps, channels}),
                                     bias ? TensorType(kF32, {channels}) : kernels::unconnected_port(), kQueryStart};
    if (attrs.cached) {
      types.push_back(kStateSlots);
      types.emplace_back(kF32, std::initializer_list<Dim>{step.sequences + 2, attrs.taps - 1, channels});
    }
    cases.push_back(named_case(std::make_shared<ops::ShortConvolution>(attrs), std::move(types), symbols_of(step)));
  };
  for (DType dtype : {kF32, kBf16})
    for (bool cached : {false, true})
      for (int64_t taps : {2, 3, 4, 8})
        for (const Step& step : kSteps) add(dtype, {taps, taps % 2 == 0, cached}, step.tokens % 2 == 0, 21, step);
  // Around vectors and blocks of channels.
  for (bool cached : {false, true})
    for (int64_t channels : {1, 7, 8, 16, 127, 128, 129, 300}) add(kF32, {4, true, cached}, true, channels, {9, 2});
  return cases;
}

std::vector<Workload> gated_delta_rule() {
  std::vector<Workload> cases;
  const auto add = [&](DType dtype, const kernels::GatedDeltaRuleAttrs& attrs, const Step& step) {
    const TensorType q(dtype, {Symbol::tokens, attrs.key_heads, attrs.key_dim});
    std::vector<TensorType> types = {q,
                                     q,
                                     TensorType(dtype, {Symbol::tokens, attrs.value_heads, attrs.value_dim}),
                                     TensorType(dtype, {Symbol::tokens, attrs.decays()}),
                                     TensorType(dtype, {Symbol::tokens, attrs.value_heads}),
                                     TensorType(kF32, {attrs.value_heads}),
                                     TensorType(kF32, {attrs.decays()}),
                                     kQueryStart};
    if (attrs.cached) {
      types.push_back(kStateSlots);
      types.emplace_back(kF32, std::initializer_list<Dim>{step.sequences + 2, attrs.value_heads, attrs.state_floats()});
    }
    cases.push_back(named_case(std::make_shared<ops::GatedDeltaRule>(attrs), std::move(types), symbols_of(step)));
  };
  for (bool cached : {false, true})
    for (bool channels : {false, true}) {
      for (DType dtype : {kF32, kBf16})
        for (const Step& step : kSteps) add(dtype, {2, 6, 5, 9, channels, step.tokens % 2 == 0, 1e-6f, cached}, step);
      // Around vectors and blocks of four; more tokens than are normalized at a time.
      for (int64_t columns : {1, 8, 31, 32, 33, 72, 128})
        add(kF32, {1, 2, 17, columns, channels, false, 1e-6f, cached}, {9, 2});
      add(kF32, {2, 2, 1, 40, channels, false, 0.1f, cached}, {5, 1});
      add(kF32, {1, 1, 16, 33, channels, false, 1e-6f, cached}, {70, 1});
    }
  return cases;
}

}  // namespace

std::vector<Workload> recurrent_cases(std::string_view op) {
  if (op == "short_convolution") return short_convolution();
  if (op == "gated_delta_rule") return gated_delta_rule();
  return {};
}

}  // namespace eadem::test
