// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/rope_append_attention.h"

#include <utility>

#include "eadem/fusions/rope_qk_append.h"
#include "eadem/ops/attention/attention.h"
#include "eadem/ops/attention/kv_append.h"
#include "eadem/ops/attention/rope.h"
#include "eadem/ops/quantize.h"
#include "eadem/ops/reshape.h"

namespace eadem::fusions {

namespace {

// The values up to kBlockTable are the inputs, in port order.
enum Value {
  kQ,
  kTable,
  kK,
  kV,
  kSlots,
  kCacheK,
  kCacheV,
  kQueryStart,
  kKvLength,
  kBlockTable,
  kRotatedQ,
  kRotatedK,
  kNewCacheK,
  kNewCacheV,
  kY,
  kFlat,
  kRounded
};

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  const auto &q = matched[0]->attrs().get<kernels::RopeAttrs>(), &k = matched[1]->attrs().get<kernels::RopeAttrs>();
  if (q != k) return nullptr;
  return std::make_shared<RopeAppendAttention>(
      kernels::RopeAppendAttentionAttrs{k, matched[3]->attrs().get<kernels::AttentionAttrs>()});
}

ops::OpPtr make_rounded(std::span<const ops::Op* const> matched) {
  kernels::RopeAppendAttentionAttrs attrs = matched[0]->attrs().get<kernels::RopeAppendAttentionAttrs>();
  attrs.round_to = matched[2]->attrs().get<kernels::QuantizeAttrs>().to;
  return std::make_shared<RopeAppendAttentionQuantize>(attrs);
}

kernels::RopeAppendAttentionAttrs unrounded(kernels::RopeAppendAttentionAttrs attrs) {
  attrs.round_to = nullptr;
  return attrs;
}

}  // namespace

const Fusion& rope_append_attention() {
  static const Fusion fusion{
      .name = "rope_append_attention",
      .nodes = {{"rope", {kQ, kTable}, {kRotatedQ}},
                {"rope", {kK, kTable}, {kRotatedK}},
                {"kv_append", {kRotatedK, kV, kSlots, kCacheK, kCacheV}, {kNewCacheK, kNewCacheV}},
                {"attention", {kRotatedQ, kNewCacheK, kNewCacheV, kQueryStart, kKvLength, kBlockTable}, {kY}}},
      .inputs = {kQ, kTable, kK, kV, kSlots, kCacheK, kCacheV, kQueryStart, kKvLength, kBlockTable},
      .outputs = {kY, kNewCacheK, kNewCacheV},
      .make = make};
  return fusion;
}

const Fusion& rope_append_attention_quantize() {
  static const Fusion fusion{
      .name = "rope_append_attention_quantize",
      .nodes = {{"rope_append_attention",
                 {kQ, kTable, kK, kV, kSlots, kCacheK, kCacheV, kQueryStart, kKvLength, kBlockTable},
                 {kY, kNewCacheK, kNewCacheV}},
                {"reshape", {kY}, {kFlat}},
                {"quantize", {kFlat}, {kRounded}}},
      .inputs = {kQ, kTable, kK, kV, kSlots, kCacheK, kCacheV, kQueryStart, kKvLength, kBlockTable},
      .outputs = {kRounded, kNewCacheK, kNewCacheV},
      .after_rounding = true,
      .make = make_rounded};
  return fusion;
}

RopeAppendAttention::RopeAppendAttention(const kernels::RopeAppendAttentionAttrs& attrs)
    : FusedOp(rope_append_attention(),
              {std::make_shared<ops::Rope>(attrs.rope), std::make_shared<ops::Rope>(attrs.rope),
               std::make_shared<ops::KvAppend>(), std::make_shared<ops::Attention>(attrs.attention)}),
      attrs_(attrs) {}

std::vector<ops::Port> RopeAppendAttention::inputs() const {
  using Role = ops::Port::Role;
  return {{"q"},
          {"table", Role::constant},
          {"k"},
          {"v"},
          {"slots", Role::index},
          {"cache_k", Role::state},
          {"cache_v", Role::state},
          {"query_start", Role::index},
          {"kv_length", Role::index},
          {"block_table", Role::index}};
}

std::vector<ops::Port> RopeAppendAttention::outputs() const {
  std::vector<ops::Port> ports = part(3).outputs();
  for (ops::Port& cache : part(2).outputs()) ports.push_back(std::move(cache));
  return ports;
}

std::string RopeAppendAttention::attrs_text() const { return part(0).attrs_text() + " " + part(3).attrs_text(); }

ops::Cost RopeAppendAttention::cost(ops::Pass /*pass*/, std::span<const TensorType> in,
                                    std::span<const TensorType> /*out*/, const SymbolValues& symbols) const {
  ops::Cost cost = parts_cost(in, symbols);
  cost.bytes -= saved_bytes(in, symbols);
  return cost;
}

void RopeAppendAttention::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                    std::span<ops::RefTensor> out) const {
  ops::RefTensor appended[] = {ref_zeros(in[kQ].shape), std::move(out[1]), std::move(out[2])};
  RopeQkAppend(kernels::RopeKvAppendAttrs{attrs_.rope}).reference(pass, in.first(kQueryStart), appended);
  out[1] = std::move(appended[1]);
  out[2] = std::move(appended[2]);
  const ops::RefTensor attended[] = {appended[0], out[1], out[2], in[kQueryStart], in[kKvLength], in[kBlockTable]};
  part(3).reference(pass, attended, out.first(1));
}

RopeAppendAttentionQuantize::RopeAppendAttentionQuantize(const kernels::RopeAppendAttentionAttrs& attrs)
    : FusedOp(rope_append_attention_quantize(),
              {std::make_shared<RopeAppendAttention>(unrounded(attrs)),
               std::make_shared<ops::Reshape>(std::vector<int64_t>{attrs.attention.heads * attrs.attention.values()}),
               std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{attrs.round_to})}),
      attrs_(attrs) {}

ops::Cost RopeAppendAttentionQuantize::cost(ops::Pass /*pass*/, std::span<const TensorType> in,
                                            std::span<const TensorType> /*out*/, const SymbolValues& symbols) const {
  ops::Cost cost = parts_cost(in, symbols);
  cost.bytes -= saved_bytes(in, symbols);
  return cost;
}

void RopeAppendAttentionQuantize::reference(ops::Pass pass, std::span<const ops::RefTensor> in,
                                            std::span<ops::RefTensor> out) const {
  ops::RefTensor attended[] = {ref_zeros(in[kQ].shape), std::move(out[1]), std::move(out[2])};
  part(0).reference(pass, in, attended);
  out[1] = std::move(attended[1]), out[2] = std::move(attended[2]);
  attended[0].shape = out[0].shape;
  part(2).reference(pass, {&attended[0], 1}, out.first(1));
}

}  // namespace eadem::fusions
