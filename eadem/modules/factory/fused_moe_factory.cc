// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/factory/fused_moe_factory.h"

#include "eadem/ops/parallel/expert_exchange.h"

namespace eadem::modules {

namespace {

ValueId build_grouped(BuildContext&, const MoeRequest&, ValueId rows, ValueId offsets, const BuildExperts& experts) {
  return experts(rows, offsets);
}

ValueId build_exchanged(BuildContext& context, const MoeRequest& request, ValueId rows, ValueId offsets,
                        const BuildExperts& experts) {
  const kernels::ExpertExchangeAttrs attrs{.ranks = request.ranks,
                                           .rank = request.rank,
                                           .experts = request.experts,
                                           .top_k = request.top_k,
                                           .same_tokens = !request.own_tokens};
  const std::vector<ValueId> own = context.graph.add(std::make_shared<ops::ExpertDispatch>(attrs), {rows, offsets});
  const ValueId made = experts(own[0], own[1]);
  return context.graph.add1(std::make_shared<ops::ExpertCombine>(attrs), {made, offsets, own[2]});
}

// The line that `explain` prints for a layer.
std::string experts_of_rank(const MoeRequest& request) {
  const PartRange own = part_of(request.experts, request.ranks, request.rank);
  return fmt::format("{} of {} experts, {} for each token", own.size, request.experts, request.top_k);
}

std::string too_few(const MoeRequest& request) {
  return fmt::format("{} experts for {} ranks", request.experts, request.ranks);
}

Verdict can_group(const MoeRequest& request) {
  if (request.ranks > 1) return Verdict::no(fmt::format("{} ranks divide the experts", request.ranks));
  return Verdict::yes(0.0, experts_of_rank(request));
}

Verdict can_gather(const MoeRequest& request) {
  if (request.ranks == 1) return Verdict::no("one rank has all experts");
  if (request.own_tokens) return Verdict::no("each rank has tokens of its own");
  if (request.experts < request.ranks) return Verdict::no(too_few(request));
  return Verdict::yes(0.0, experts_of_rank(request));
}

Verdict can_send(const MoeRequest& request) {
  if (request.ranks == 1) return Verdict::no("one rank has all experts");
  if (!request.own_tokens) return Verdict::no("every rank has all tokens");
  if (request.experts < request.ranks) return Verdict::no(too_few(request));
  return Verdict::yes(0.0, experts_of_rank(request));
}

constexpr MoeExecutor kGrouped = {"grouped", can_group, build_grouped};
constexpr MoeExecutor kGathered = {"gathered", can_gather, build_exchanged};
constexpr MoeExecutor kAllToAll = {"all_to_all", can_send, build_exchanged};

constexpr const MoeExecutor* kExecutors[] = {&kGrouped, &kGathered, &kAllToAll};

}  // namespace

std::span<const MoeExecutor* const> FusedMoeFactory::strategies() { return kExecutors; }

ValueId FusedMoeFactory::build(BuildContext& context, MoeRequest request, ValueId rows, ValueId offsets,
                               const BuildExperts& experts) {
  request.ranks = context.expert_ranks;
  request.rank = context.expert_rank;
  request.own_tokens = context.own_tokens;
  Decision decision{"experts " + context.graph.scope(), {}, {}};
  const MoeExecutor* strategy = select(strategies(), request, decision);
  if (strategy == nullptr) throw_no_candidate(decision);
  context.decisions.push_back(std::move(decision));
  return strategy->build(context, request, rows, offsets, experts);
}

}  // namespace eadem::modules
