// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/rope_qk_append.h"

#include "eadem/ops/attention/kv_append.h"
#include "eadem/ops/attention/rope.h"

namespace eadem::fusions {

namespace {

// The values up to kCacheV are the inputs, in port order.
enum Value { kQ, kTable, kK, kV, kSlots, kCacheK, kCacheV, kRotatedQ, kRotatedK, kNewCacheK, kNewCacheV };

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  const auto &q = matched[0]->attrs().get<kernels::RopeAttrs>(), &k = matched[1]->attrs().get<kernels::RopeAttrs>();
  if (q != k) return nullptr;
  return std::make_shared<RopeQkAppend>(kernels::RopeKvAppendAttrs{k});
}

}  // namespace

const Fusion& rope_qk_append() {
  static const Fusion fusion{
      .name = "rope_qk_append",
      .nodes = {{"rope", {kQ, kTable}, {kRotatedQ}},
                {"rope", {kK, kTable}, {kRotatedK}},
                {"kv_append", {kRotatedK, kV, kSlots, kCacheK, kCacheV}, {kNewCacheK, kNewCacheV}}},
      .inputs = {kQ, kTable, kK, kV, kSlots, kCacheK, kCacheV},
      .outputs = {kRotatedQ, kNewCacheK, kNewCacheV},
      .make = make};
  return fusion;
}

RopeQkAppend::RopeQkAppend(const kernels::RopeKvAppendAttrs& attrs)
    : FusedOp(rope_qk_append(), {std::make_shared<ops::Rope>(attrs.rope), std::make_shared<ops::Rope>(attrs.rope),
                                 std::make_shared<ops::KvAppend>()}),
      attrs_(attrs) {}

std::vector<ops::Port> RopeQkAppend::inputs() const {
  using Role = ops::Port::Role;
  return {{"q"},
          {"table", Role::constant},
          {"k"},
          {"v"},
          {"slots", Role::index},
          {"cache_k", Role::state},
          {"cache_v", Role::state}};
}

std::vector<ops::Port> RopeQkAppend::outputs() const {
  std::vector<ops::Port> ports = {{"y"}};
  for (ops::Port& cache : part(2).outputs()) ports.push_back(std::move(cache));
  return ports;
}

ops::Cost RopeQkAppend::cost(ops::Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> /*out*/,
                             const SymbolValues& symbols) const {
  ops::Cost cost = parts_cost(in, symbols);
  cost.bytes -= saved_bytes(in, symbols);
  return cost;
}

void RopeQkAppend::reference(ops::Pass pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const {
  part(0).reference(pass, in.first(2), out.first(1));
  const ops::RefTensor keys[] = {in[kK], in[kTable]};
  ops::RefTensor appended[] = {ref_zeros(in[kK].shape), in[kV], in[kSlots], in[kCacheK], in[kCacheV]};
  part(1).reference(pass, keys, {&appended[0], 1});
  part(2).reference(pass, appended, out.subspan(1));
}

}  // namespace eadem::fusions
