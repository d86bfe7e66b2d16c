// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/op_cases.h"

#include "eadem/kernels/sample.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/attention_cases.h"
#include "tests/ops/case_list.h"
#include "tests/ops/expert_cases.h"
#include "tests/ops/linear_cases.h"
#include "tests/ops/recurrent_cases.h"
#include "tests/ops/selected_cases.h"
#include "tests/ops/shard_cases.h"
#include "tests/ops/state_space_cases.h"
#include "tests/workloads/quantized_types.h"

namespace eadem::test {

namespace {

using kernels::ActivationKind;
using ops::Workload;

std::string size_name(const std::vector<TensorType>& types, const SymbolValues& symbols) {
  std::string text;
  for (const TensorType& type : types) {
    if (kernels::is_unconnected(type)) {
      text += " absent";
      continue;
    }
    text += fmt::format(" {}{}", WeightType(type.dtype, type.encoding).name(), to_string(type.bind(symbols)));
  }
  return text;
}

std::vector<Workload> embedding() {
  Cases cases;
  for (DType table : {kF32, kBf16, kF16})
    for (DType out : {kF32, kBf16, kF16})
      for (int64_t hidden : {1, 5, 16, 33})
        for (int64_t tokens : {0, 1, 7})
          cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{out, 11}),
                    {TensorType(table, {11, hidden}), TensorType(DType::i32, {Symbol::tokens})}, tokens);
  for (DType table : {kF32, kBf16})
    cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{table, 11, 0, 6.928203f}),
              {TensorType(table, {11, 33}), TensorType(DType::i32, {Symbol::tokens})}, 7);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{kF32, 19, 0, 6.928203f}),
              {TensorType(kF32, {19, unit}, encoding), TensorType(DType::i32, {Symbol::tokens})}, 7);
  // A part of a table: ids 4 to 14, of which some are asked for, with others that the part does not have.
  for (DType table : {kF32, kBf16, kF16})
    cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{kF32, 11, 4}),
              {TensorType(table, {11, 9}), TensorType(DType::i32, {Symbol::tokens})}, 17);
  for (const auto& [encoding, unit, has_order] : workloads::quantized_types())
    for (int64_t units : {1, 3})
      for (int64_t tokens : {0, 1, 7})
        cases.add(std::make_shared<ops::Embedding>(kernels::EmbeddingAttrs{kF32, 19}),
                  {TensorType(kF32, {19, units * unit}, encoding), TensorType(DType::i32, {Symbol::tokens})}, tokens);
  return cases.take();
}

std::vector<Workload> rms_norm() {
  Cases cases;
  const auto op = std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{1e-5f});
  for (DType x : kActivationDtypes)
    for (DType weight : {kF32, kBf16}) {
      if (weight == kBf16 && x == kF32) continue;
      for (int64_t hidden : kEdges)
        cases.add(op, {TensorType(x, {Symbol::tokens, hidden}), TensorType(weight, {hidden})}, 3);
      for (int64_t tokens : {0, 1, 65})
        cases.add(op, {TensorType(x, {Symbol::tokens, 20}), TensorType(weight, {20})}, tokens);
      cases.add(op, {TensorType(x, {Symbol::tokens, 3, 8}), TensorType(weight, {8})}, 5);  // per head
      for (int64_t hidden : {1, 9, 40})
        cases.add(op, {TensorType(x, {Symbol::tokens, 3, hidden}), TensorType(weight, {3, hidden})}, 5);  // per group
    }
  return cases.take();
}

std::vector<Workload> layer_norm() {
  Cases cases;
  const auto op = std::make_shared<ops::LayerNorm>(kernels::LayerNormAttrs{1e-5f});
  for (DType x : kActivationDtypes)
    for (DType weight : {kF32, kBf16}) {
      if (weight == kBf16 && x == kF32) continue;
      for (int64_t hidden : kEdges)
        cases.add(op,
                  {TensorType(x, {Symbol::tokens, hidden}), TensorType(weight, {hidden}),
                   hidden % 2 == 0 ? kernels::unconnected_port() : TensorType(weight, {hidden})},
                  3);
      for (int64_t tokens : {0, 1, 65})
        cases.add(op, {TensorType(x, {Symbol::tokens, 20}), TensorType(weight, {20}), TensorType(weight, {20})},
                  tokens);
    }
  return cases.take();
}

std::vector<Workload> elementwise(const ops::OpPtr& op) {
  Cases cases;
  const size_t operands = op->inputs().size();
  for (DType dtype : kActivationDtypes) {
    for (int64_t width : kEdges)
      cases.add(op, std::vector<TensorType>(operands, TensorType(dtype, {Symbol::tokens, width})), 2);
    for (int64_t tokens : {0, 1, 300})
      cases.add(op, std::vector<TensorType>(operands, TensorType(dtype, {Symbol::tokens, 5, 13})), tokens);
  }
  return cases.take();
}

std::vector<Workload> scale() {
  std::vector<Workload> all = elementwise(std::make_shared<ops::Scale>(kernels::ScaleAttrs{-0.22f}));
  for (const kernels::ScaleAttrs& attrs : {kernels::ScaleAttrs{1.5f, 0.7f}, {.factor = -1.5f, .limit = 0.6f}})
    for (Workload& row : elementwise(std::make_shared<ops::Scale>(attrs))) all.push_back(std::move(row));
  return all;
}

std::vector<Workload> scale_by() {
  Cases cases;
  const auto one = std::make_shared<ops::ScaleBy>(kernels::ScaleByAttrs{}),
             chosen = std::make_shared<ops::ScaleBy>(kernels::ScaleByAttrs{.indexed = true});
  for (DType dtype : kActivationDtypes) {
    for (int64_t width : kEdges)
      cases.add(one, {TensorType(dtype, {Symbol::tokens, width}), TensorType(DType::f32, {1})}, 2);
    for (int64_t tokens : {0, 1, 300})
      cases.add(one, {TensorType(dtype, {Symbol::tokens, 5, 13}), TensorType(DType::f32, {1})}, tokens);
    for (int64_t scales : {1, 3, 64})
      for (int64_t tokens : {0, 1, 9}) {
        const TensorType x(dtype, {Symbol::tokens, 4}), index(DType::i32, {Symbol::tokens, 4});
        cases.add(chosen, {x, TensorType(DType::f32, {scales}), index}, tokens);
      }
  }
  return cases.take();
}

std::vector<Workload> activations(bool gated) {
  std::vector<Workload> all;
  for (ActivationKind kind : {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                              ActivationKind::relu, ActivationKind::relu2, ActivationKind::sigmoid}) {
    const kernels::ActivationAttrs attrs{kind};
    std::vector<Workload> cases = elementwise(gated ? ops::OpPtr(std::make_shared<ops::GatedActivation>(attrs))
                                                    : ops::OpPtr(std::make_shared<ops::Activation>(attrs)));
    all.insert(all.end(), std::make_move_iterator(cases.begin()), std::make_move_iterator(cases.end()));
  }
  return all;
}

std::vector<Workload> cast() {
  Cases cases;
  for (DType from : {kF32, kBf16, kF16})
    for (DType to : {kF32, kBf16, kF16}) {
      const auto op = std::make_shared<ops::Cast>(kernels::CastAttrs{to});
      for (int64_t width : kEdges) cases.add(op, {TensorType(from, {Symbol::tokens, width})}, 2);
      cases.add(op, {TensorType(from, {Symbol::tokens, 7})}, 0);
    }
  return cases.take();
}

std::vector<Workload> rope_table() {
  Cases cases;
  for (float scale : {1.0f, 1.3f})
    for (int64_t half : {1, 3, 4, 8, 17, 64})
      for (int64_t tokens : {0, 1, 6})
        for (int64_t stride : {1, 4})
          cases.add(std::make_shared<ops::RopeTable>(kernels::RopeTableAttrs{scale, stride}),
                    {TensorType(DType::i32, {Symbol::tokens}), TensorType(kF32, {half})}, tokens);
  return cases.take();
}

std::vector<Workload> rope() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (kernels::RopeStyle style : {kernels::RopeStyle::rotate_half, kernels::RopeStyle::interleaved})
      for (int64_t rotary : {2, 6, 8, 16, 34, 64})
        for (int64_t rest : {0, 1, 16})  // partial rotation
          for (int64_t tokens : {0, 1, 3})
            for (bool last : {false, true})
              cases.add(
                  std::make_shared<ops::Rope>(kernels::RopeAttrs{style, rotary, last}),
                  {TensorType(dtype, {Symbol::tokens, 3, rotary + rest}), TensorType(kF32, {Symbol::tokens, rotary})},
                  tokens);
  return cases.take();
}

std::vector<Workload> scale_by_position() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (const kernels::ScaleByPositionAttrs& attrs :
         {kernels::ScaleByPositionAttrs{}, {-0.7f, 1, true}, {0.4f, 5, false}})
      for (int64_t head_dim : {1, 7, 16, 33})
        for (int64_t tokens : {0, 1, 9})
          cases.add(std::make_shared<ops::ScaleByPosition>(attrs),
                    {TensorType(dtype, {Symbol::tokens, 3, head_dim}), TensorType(DType::i32, {Symbol::tokens})},
                    tokens);
  return cases.take();
}

std::vector<Workload> softmax() {
  Cases cases;
  const auto op = std::make_shared<ops::Softmax>();
  for (int64_t n : kEdges) cases.add(op, {TensorType(kF32, {Symbol::tokens, n})}, 3);
  for (int64_t tokens : {0, 1, 70}) cases.add(op, {TensorType(kF32, {Symbol::tokens, 2, 10})}, tokens);
  cases.add(op, {TensorType(kF32, {Symbol::tokens, 1000})}, 2);
  return cases.take();
}

std::vector<Workload> cross_entropy() {
  Cases cases;
  const auto op = std::make_shared<ops::CrossEntropy>();
  for (DType dtype : kActivationDtypes) {
    for (int64_t vocab : kEdges)
      cases.add(op, {TensorType(dtype, {Symbol::tokens, vocab}), TensorType(DType::i32, {Symbol::tokens})}, 6);
    for (int64_t tokens : {0, 1, 70})
      cases.add(op, {TensorType(dtype, {Symbol::tokens, 21}), TensorType(DType::i32, {Symbol::tokens})}, tokens);
  }
  return cases.take();
}

std::vector<Workload> columns(bool split) {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (const auto& [first, second] : {std::pair<int64_t, int64_t>{1, 1}, {20, 8}, {3, 130}, {64, 5}})
      for (int64_t tokens : {0, 1, 70}) {
        const auto rows = [&](int64_t width) { return TensorType(dtype, {Symbol::tokens, 3, width}); };
        const kernels::ColumnsAttrs attrs{first};
        if (split)
          cases.add(std::make_shared<ops::SplitColumns>(attrs), {rows(first + second)}, tokens);
        else
          cases.add(std::make_shared<ops::ConcatColumns>(attrs), {rows(first), rows(second)}, tokens);
      }
  return cases.take();
}

std::vector<Workload> select_rows() {
  Cases cases;
  const auto op = std::make_shared<ops::SelectRows>();
  for (DType dtype : kActivationDtypes)
    for (int64_t hidden : {1, 5, 16, 33})
      for (int64_t rows : {0, 1, 4})
        cases.add(op, {TensorType(dtype, {6, hidden}), TensorType(DType::i32, {Symbol::logit_rows})}, rows);
  return cases.take();
}

std::vector<Workload> feed_tokens() {
  Cases cases;
  const auto op = std::make_shared<ops::FeedTokens>();
  for (int64_t tokens : {0, 1, 5, 300})
    cases.add(op, {TensorType(DType::i32, {Symbol::tokens}), TensorType(DType::i32, {4})}, tokens);
  return cases.take();
}

std::vector<Workload> sample() {
  Cases cases;
  const auto op = std::make_shared<ops::Sample>();
  const Dim n = Symbol::logit_rows;
  for (int64_t rows : {0, 1, 48})
    for (int64_t vocab : {1, 2, 7, 33, 300})
      for (int64_t penalties : {int64_t{0}, rows / 2 * std::min<int64_t>(vocab, 40)}) {
        SymbolValues symbols;
        symbols[Symbol::logit_rows] = rows;
        symbols[Symbol::penalties] = penalties;
        cases.add(op,
                  {TensorType(kF32, {n, vocab}), TensorType(DType::i32, {n, kernels::kSampleRowWords}),
                   TensorType(DType::i32, {Symbol::penalties, 2})},
                  symbols);
      }
  return cases.take();
}

std::vector<Workload> add_bias() {
  Cases cases;
  const auto op = std::make_shared<ops::AddBias>();
  for (DType x : kActivationDtypes)
    for (DType bias : {kF32, kBf16, kF16}) {
      for (int64_t n : kEdges) cases.add(op, {TensorType(x, {Symbol::tokens, n}), TensorType(bias, {n})}, 3);
      for (int64_t tokens : {0, 1, 70})
        cases.add(op, {TensorType(x, {Symbol::tokens, 9}), TensorType(bias, {9})}, tokens);
    }
  return cases.take();
}

std::vector<Workload> select_heads() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (const kernels::SelectHeadsAttrs& attrs :
         {kernels::SelectHeadsAttrs{.heads = 2, .own_heads = 1, .first_query = 3, .run = 3, .group = 3},
          kernels::SelectHeadsAttrs{.heads = 2, .own_heads = 4, .first_query = 1, .run = 1, .group = 3},
          kernels::SelectHeadsAttrs{.heads = 1, .own_heads = 1, .first_query = 0, .run = 1, .group = 1}})
      for (int64_t tokens : {0, 1, 70})
        for (int64_t width : {1, 24, 33})
          cases.add(std::make_shared<ops::SelectHeads>(attrs),
                    {TensorType(dtype, {Symbol::tokens, attrs.heads, width})}, tokens);
  return cases.take();
}

// The part of the vocabulary begins at 5: some labels are words of another rank.
std::vector<Workload> softmax_state() {
  Cases cases;
  const auto op = std::make_shared<ops::SoftmaxState>(kernels::VocabularyPart{5});
  for (int64_t part : kEdges)
    cases.add(op, {TensorType(kF32, {Symbol::tokens, part}), TensorType(DType::i32, {Symbol::tokens})}, 6);
  for (int64_t tokens : {0, 1, 70})
    cases.add(op, {TensorType(kF32, {Symbol::tokens, 21}), TensorType(DType::i32, {Symbol::tokens})}, tokens);
  return cases.take();
}

std::vector<Workload> parallel_cross_entropy() {
  Cases cases;
  for (int ranks : {1, 2, 3}) {
    const auto op = std::make_shared<ops::ParallelCrossEntropy>(kernels::VocabularyPart{5}, ranks);
    const auto add = [&](int64_t part, int64_t tokens) {
      cases.add(op,
                {TensorType(kF32, {Symbol::tokens, part}), TensorType(DType::i32, {Symbol::tokens}),
                 TensorType(kF32, {Symbol::tokens, 3 * ranks})},
                tokens);
    };
    for (int64_t part : kEdges) add(part, 6);
    for (int64_t tokens : {0, 1, 70}) add(21, tokens);
  }
  return cases.take();
}

std::vector<Workload> all_gather() {
  Cases cases;
  for (DType dtype : kActivationDtypes)
    for (int dim : {0, 1})
      cases.add(std::make_shared<ops::AllGather>(kernels::CollectiveAttrs{.dim = dim, .whole = 7}),
                {TensorType(dtype, {7, 7, 3})});
  return cases.take();
}

std::vector<Workload> grad_norm() {
  Cases cases;
  for (int64_t size : {1, 7, 4095, 4096, 4097, 9000})
    for (int inputs : {1, 3}) {
      std::vector<TensorType> types(static_cast<size_t>(inputs), TensorType(kF32, {size}));
      types[0] = TensorType(kF32, {3, 5});
      cases.add(std::make_shared<ops::GradNorm>(inputs), types);
    }
  return cases.take();
}

std::vector<Workload> adamw() {
  Cases cases;
  for (bool decay : {false, true})
    for (int64_t size : kEdges)
      for (std::optional<DType> weight : {std::optional<DType>(), std::optional(kBf16), std::optional(kF16)}) {
        const TensorType f32(kF32, {3, size});
        cases.add(std::make_shared<ops::AdamW>(kernels::AdamWAttrs{decay}),
                  {f32, TensorType(kF32, {1}), TensorType(kF32, {8}), f32, f32, f32,
                   weight ? f32.with_dtype(*weight) : kernels::unconnected_port()});
      }
  return cases.take();
}

// A few divisions of rows and columns: the bound of their gradients doubles with each.
std::vector<Workload> stream_weights() {
  Cases cases;
  for (const bool merges : {false, true})
    for (const int64_t streams : {1, 2, 4, 5})
      for (const int64_t iterations : {1, 2, 3})
        for (const float eps : {0.0f, 1e-6f, 0.1f})
          for (const int64_t tokens : {0, 1, 3, 70}) {
            if (merges && iterations > 1) continue;
            const kernels::StreamWeightsAttrs attrs{streams, iterations, eps, merges};
            cases.add(std::make_shared<ops::StreamWeights>(attrs),
                      {TensorType(kF32, {Symbol::tokens, attrs.width()}), TensorType(kF32, {attrs.width()}),
                       TensorType(kF32, {attrs.scales()})},
                      tokens);
          }
  return cases.take();
}

std::vector<Workload> mixed_streams(bool expand) {
  Cases cases;
  for (const DType dtype : kActivationDtypes)
    for (const int64_t streams : {1, 2, 4, 5})
      for (const int64_t hidden : {1, 7, 16, 33, 130})
        for (const int64_t tokens : {0, 1, 9}) {
          const TensorType x(dtype, {Symbol::tokens, streams, hidden}),
              weights(kF32, {Symbol::tokens, streams * (streams + 2)});
          if (expand)
            cases.add(std::make_shared<ops::ExpandStreams>(), {x, TensorType(dtype, {Symbol::tokens, hidden}), weights},
                      tokens);
          else
            cases.add(std::make_shared<ops::CollapseStreams>(), {x, weights}, tokens);
        }
  // What ends the streams has no more weights than they are.
  cases.add(
      expand ? ops::OpPtr(std::make_shared<ops::ExpandStreams>()) : std::make_shared<ops::CollapseStreams>(),
      expand
          ? std::vector<TensorType>{TensorType(kF32, {Symbol::tokens, 3, 20}), TensorType(kF32, {Symbol::tokens, 20}),
                                    TensorType(kF32, {Symbol::tokens, 15})}
          : std::vector<TensorType>{TensorType(kF32, {Symbol::tokens, 3, 20}), TensorType(kF32, {Symbol::tokens, 3})},
      5);
  return cases.take();
}

}  // namespace

Workload named_case(ops::OpPtr op, std::vector<TensorType> types, const SymbolValues& symbols) {
  std::string name = fmt::format("{}({}){}", op->name(), op->attrs_text(), size_name(types, symbols));
  return {std::move(name), std::move(op), std::move(types), symbols};
}

std::vector<std::string_view> op_names() {
  return {"embedding",
          "linear",
          "rms_norm",
          "layer_norm",
          "add",
          "scale",
          "mul",
          "rope_table",
          "rope",
          "attention",
          "activation",
          "softmax",
          "cross_entropy",
          "cast",
          "kv_append",
          "select_rows",
          "feed_tokens",
          "sample",
          "gated_activation",
          "all_reduce",
          "grad_norm",
          "adamw",
          "add_bias",
          "select_heads",
          "softmax_state",
          "parallel_cross_entropy",
          "all_gather",
          "cut_columns",
          "shard_sum",
          "route",
          "expert_order",
          "permute",
          "grouped_linear",
          "unpermute",
          "expert_dispatch",
          "expert_combine",
          "clamped_swiglu",
          "gate_rows",
          "identity_experts",
          "load_balancing_loss",
          "latent_append",
          "head_linear",
          "latent_attention",
          "split_columns",
          "concat_columns",
          "short_convolution",
          "state_space_scan",
          "gated_delta_rule",
          "select_keys",
          "selected_attention",
          "compress_keys",
          "compressed_attention",
          "select_blocks",
          "pool_keys",
          "pooled_attention",
          "scale_by_position",
          "scale_by",
          "stream_weights",
          "collapse_streams",
          "expand_streams"};
}

std::vector<Workload> op_cases(std::string_view op) {
  if (op == "embedding") return embedding();
  if (op == "rms_norm") return rms_norm();
  if (op == "layer_norm") return layer_norm();
  if (op == "scale") return scale();
  if (op == "scale_by") return scale_by();
  if (op == "add") return elementwise(std::make_shared<ops::Add>());
  if (op == "mul") return elementwise(std::make_shared<ops::Mul>());
  if (op == "rope_table") return rope_table();
  if (op == "rope") return rope();
  if (op == "scale_by_position") return scale_by_position();
  if (op == "activation") return activations(false);
  if (op == "gated_activation") return activations(true);
  if (op == "softmax") return softmax();
  if (op == "cross_entropy") return cross_entropy();
  if (op == "cast") return cast();
  if (op == "split_columns") return columns(true);
  if (op == "concat_columns") return columns(false);
  if (op == "select_rows") return select_rows();
  if (op == "feed_tokens") return feed_tokens();
  if (op == "sample") return sample();
  if (op == "all_reduce") return elementwise(std::make_shared<ops::AllReduce>());
  if (op == "add_bias") return add_bias();
  if (op == "select_heads") return select_heads();
  if (op == "softmax_state") return softmax_state();
  if (op == "parallel_cross_entropy") return parallel_cross_entropy();
  if (op == "all_gather") return all_gather();
  if (op == "grad_norm") return grad_norm();
  if (op == "adamw") return adamw();
  if (op == "stream_weights") return stream_weights();
  if (op == "collapse_streams") return mixed_streams(false);
  if (op == "expand_streams") return mixed_streams(true);
  if (op == "state_space_scan") return state_space_cases();
  if (std::vector<Workload> cases = linear_cases(op); !cases.empty()) return cases;
  if (std::vector<Workload> cases = attention_cases(op); !cases.empty()) return cases;
  if (std::vector<Workload> cases = expert_cases(op); !cases.empty()) return cases;
  if (std::vector<Workload> cases = recurrent_cases(op); !cases.empty()) return cases;
  if (std::vector<Workload> cases = selected_cases(op); !cases.empty()) return cases;
  if (std::vector<Workload> cases = shard_cases(op); !cases.empty()) return cases;
  EADEM_UNREACHABLE("no cases for op '{}'", op);
}

}  // namespace eadem::test
