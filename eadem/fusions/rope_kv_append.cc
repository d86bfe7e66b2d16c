// SPDX-License-Identifier: Apache-2.0
#include "eadem/fusions/rope_kv_append.h"

#include "eadem/ops/attention/kv_append.h"
#include "eadem/ops/attention/rope.h"

namespace eadem::fusions {

namespace {

// The values up to kCacheV are the inputs, in port order.
enum Value { kK, kTable, kV, kSlots, kCacheK, kCacheV, kRotated, kNewCacheK, kNewCacheV };

ops::OpPtr make(std::span<const ops::Op* const> matched) {
  return std::make_shared<RopeKvAppend>(kernels::RopeKvAppendAttrs{matched[0]->attrs().get<kernels::RopeAttrs>()});
}

}  // namespace

const Fusion& rope_kv_append() {
  static const Fusion fusion{
      .name = "rope_kv_append",
      .nodes = {{"rope", {kK, kTable}, {kRotated}},
                {"kv_append", {kRotated, kV, kSlots, kCacheK, kCacheV}, {kNewCacheK, kNewCacheV}}},
      .inputs = {kK, kTable, kV, kSlots, kCacheK, kCacheV},
      .outputs = {kNewCacheK, kNewCacheV},
      .make = make};
  return fusion;
}

RopeKvAppend::RopeKvAppend(const kernels::RopeKvAppendAttrs& attrs)
    : FusedOp(rope_kv_append(), {std::make_shared<ops::Rope>(attrs.rope), std::make_shared<ops::KvAppend>()}),
      attrs_(attrs) {}

std::vector<ops::Port> RopeKvAppend::inputs() const {
  using Role = ops::Port::Role;
  return {{"k"},
          {"table", Role::constant},
          {"v"},
          {"slots", Role::index},
          {"cache_k", Role::state},
          {"cache_v", Role::state}};
}

std::vector<ops::Port> RopeKvAppend::outputs() const { return part(1).outputs(); }

ops::Cost RopeKvAppend::cost(ops::Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> /*out*/,
                             const SymbolValues& symbols) const {
  ops::Cost cost = parts_cost(in, symbols);
  cost.bytes -= saved_bytes(in, symbols);
  return cost;
}

void RopeKvAppend::reference(ops::Pass pass, std::span<const ops::RefTensor> in, std::span<ops::RefTensor> out) const {
  ops::RefTensor appended[] = {ref_zeros(in[kK].shape), in[kV], in[kSlots], in[kCacheK], in[kCacheV]};
  part(0).reference(pass, in.first(2), {&appended[0], 1});
  part(1).reference(pass, appended, out);
}

}  // namespace eadem::fusions
