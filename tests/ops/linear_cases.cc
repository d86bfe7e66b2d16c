// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/linear_cases.h"

#include <tuple>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/case_list.h"
#include "tests/workloads/quantized_types.h"

namespace eadem::test {

namespace {

using ops::Workload;

std::vector<Workload> linear() {
  Cases cases;
  const auto add = [&](DType x, DType weight, DType out, bool bias, int64_t tokens, int64_t width, int64_t outputs) {
    cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, out}),
              {TensorType(x, {Symbol::tokens, width}), TensorType(weight, {outputs, width}),
               bias ? TensorType(weight, {outputs}) : kernels::unconnected_port()},
              tokens);
  };
  // Dtypes.
  for (DType x : kActivationDtypes)
    for (DType weight : {kF32, kBf16, kF16})
      for (DType out : kActivationDtypes)
        for (bool bias : {false, true})
          for (int64_t tokens : {0, 1, 5}) add(x, weight, out, bias, tokens, 33, 18);
  // Outputs: panels of 16, groups of panels. Rows: tiles of up to 6. Terms: blocks of 256.
  for (int64_t outputs : kEdges) add(kF32, kF32, kF32, outputs % 2 == 1, 3, 9, outputs);
  for (int64_t tokens : {2, 3, 4, 6, 7, 8, 11, 12, 13, 25, 191, 193})
    add(kF32, kF32, kF32, tokens % 2 == 1, tokens, 17, 35);
  for (int64_t width : {1, 2, 15, 16, 17, 64, 255, 256, 257, 513}) {
    add(kF32, kF32, kF32, width % 2 == 1, 2, width, 20);
    add(kBf16, kBf16, kBf16, width % 2 == 1, 7, width, 20);
  }
  // 8-bit floats with an x in bf16, which a GPU rounds to rows of such: chunks of 512 columns, tiles of 16 and 32 rows.
  for (const auto& [tokens, width, outputs] :
       {std::tuple(0, 128, 16), {1, 128, 18}, {5, 384, 40}, {13, 640, 33}, {70, 128, 64}})
    for (const DType out : kActivationDtypes)
      for (const bool bias : {false, true})
        cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, out}),
                  {TensorType(kBf16, {Symbol::tokens, width}),
                   TensorType(kF32, {outputs, width}, Fp8Encoding::find("fp8_e4m3_channel")),
                   bias ? TensorType(out, {outputs}) : kernels::unconnected_port()},
                  tokens);
  // K-quants with an x in bf16, which a GPU rounds to 8-bit codes: few rows, and many in wide and narrow tiles.
  for (const char* type : {"q4_k", "q6_k"})
    for (const auto& [tokens, width, outputs] :
         {std::tuple(0, 256, 16), {1, 256, 18}, {7, 2304, 40}, {29, 512, 33}, {50, 256, 64}, {130, 512, 72}})
      for (const DType out : kActivationDtypes)
        for (const bool bias : {false, true})
          cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, out}),
                    {TensorType(kBf16, {Symbol::tokens, width}),
                     TensorType(kF32, {outputs, width}, BlockEncoding::find(type)),
                     bias ? TensorType(out, {outputs}) : kernels::unconnected_port()},
                    tokens);
  // Weights that training rounds to blocks: of one, part of one, several.
  for (const auto& [x, tokens, width, outputs] : {std::tuple(kF32, 0, 128, 128),
                                                  {kF32, 1, 20, 33},
                                                  {kF32, 7, 300, 150},
                                                  {kBf16, 5, 128, 128},
                                                  {kBf16, 70, 256, 384},
                                                  {kBf16, 200, 384, 128}})
    for (const bool bias : {false, true})
      cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, x}),
                {TensorType(x, {Symbol::tokens, width}),
                 TensorType(x, {outputs, width}, Fp8Encoding::find("fp8_e4m3_block128")),
                 bias ? TensorType(x, {outputs}) : kernels::unconnected_port()},
                tokens);
  // Weights with one scale, in f32 on the CPU; cuda_fp8_tensor_test has those of a GPU.
  for (const auto& [tokens, width, outputs] : {std::tuple(0, 16, 16), {1, 20, 33}, {7, 300, 150}, {40, 16, 5}})
    for (const bool bias : {false, true})
      cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{bias, kF32}),
                {TensorType(kF32, {Symbol::tokens, width}),
                 TensorType(kF32, {outputs, width}, &Fp8TensorEncoding::of(Fp8Format::Kind::e4m3, bias)),
                 bias ? TensorType(kF32, {outputs}) : kernels::unconnected_port()},
                tokens);
  // Quantized weights: panels of 16 in groups of 4, rows in tiles of up to 12, chunks of 256 terms.
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types()) {
    const auto add_quantized = [&, encoding = encoding, unit = unit](DType bias, int64_t tokens, int64_t units,
                                                                     int64_t outputs) {
      const bool has_bias = bias != DType::u8;
      cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{has_bias, kF32}),
                {TensorType(kF32, {Symbol::tokens, units * unit}), TensorType(kF32, {outputs, units * unit}, encoding),
                 has_bias ? TensorType(bias, {outputs}) : kernels::unconnected_port()},
                tokens);
    };
    for (int64_t tokens : {0, 1, 5}) add_quantized(DType::u8, tokens, 3, 18);
    for (DType bias : {kF32, kBf16, kF16}) add_quantized(bias, 2, 1, 17);
    for (int64_t outputs : {1, 16, 65, 100}) add_quantized(DType::u8, outputs % 2 + 1, 1, outputs);
    for (int64_t tokens : {4, 11, 13, 40, 193}) add_quantized(DType::u8, tokens, 1, 20);
    add_quantized(kF32, 3, 9, 5);
    // Weights are decoded for an x that is not rounded: groups of 4 panels, blocks of 256 terms.
    for (const auto& [tokens, units, outputs] :
         {std::tuple(0, 1, 16), {1, 3, 18}, {5, 3, 18}, {13, 1, 65}, {193, 1, 20}})
      cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{false, kF32, MatmulInput::f32}),
                {TensorType(kF32, {Symbol::tokens, units * unit}), TensorType(kF32, {outputs, units * unit}, encoding),
                 kernels::unconnected_port()},
                tokens);
  }
  // bf16 weights for an x that is not rounded: elsewhere than on AMX as ever.
  for (int64_t tokens : {1, 40})
    cases.add(std::make_shared<ops::Linear>(kernels::LinearAttrs{false, kF32, MatmulInput::f32}),
              {TensorType(kF32, {Symbol::tokens, 300}), TensorType(kBf16, {40, 300}), kernels::unconnected_port()},
              tokens);
  return cases.take();
}

std::vector<Workload> head_linear() {
  Cases cases;
  const auto add = [&](DType x, const TensorType& weight, DType out, int64_t tokens,
                       MatmulInput input = MatmulInput::int8) {
    cases.add(std::make_shared<ops::HeadLinear>(kernels::HeadLinearAttrs{out, input}),
              {TensorType(x, {Symbol::tokens, weight.dim(0), weight.dim(2)}), weight}, tokens);
  };
  for (DType x : kActivationDtypes)
    for (DType weight : {kF32, kBf16, kF16})
      for (DType out : kActivationDtypes)
        for (int64_t tokens : {0, 1, 6}) add(x, TensorType(weight, {3, 18, 33}), out, tokens);
  // One head; more heads than threads; around the rows from which products run one after another.
  add(kF32, TensorType(kF32, {1, 17, 16}), kF32, 4);
  add(kF32, TensorType(kF32, {40, 7, 9}), kF32, 2);
  for (int64_t tokens : {12, 32, 33, 100}) add(kF32, TensorType(kF32, {3, 35, 17}), kF32, tokens);
  for (int64_t outputs : {1, 15, 16, 65}) add(kF32, TensorType(kBf16, {2, outputs, 31}), kF32, 5);
  for (int64_t width : {1, 257, 513}) add(kF32, TensorType(kF32, {2, 20, width}), kF32, 5);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    for (int64_t tokens : {0, 1, 9, 40})
      for (MatmulInput input : {MatmulInput::int8, MatmulInput::f32})
        add(kF32, TensorType(kF32, {3, 20, 2 * unit}, stack_encoding(encoding)), kF32, tokens, input);
  add(kF32, TensorType(kBf16, {3, 20, 70}), kF32, 9, MatmulInput::f32);
  return cases.take();
}

}  // namespace

std::vector<Workload> linear_cases(std::string_view op) {
  if (op == "linear") return linear();
  if (op == "head_linear") return head_linear();
  return {};
}

}  // namespace eadem::test
