// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/all_ops.h"

namespace eadem::ops {

namespace {

template <typename... Ops>
std::vector<Workload> workloads_of() {
  std::vector<Workload> rows;
  const auto append = [&](std::vector<Workload> more) {
    rows.insert(rows.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  (append(Ops::workloads()), ...);
  return rows;
}

}  // namespace

std::vector<Workload> all_workloads() {
  return workloads_of<Embedding, Linear, RmsNorm, LayerNorm, Add, Scale, Mul, RopeTable, Rope, Attention, Activation,
                      GatedActivation, Softmax, CrossEntropy, Cast, KvAppend, SelectRows, FeedTokens, Sample, AddBias,
                      SelectHeads, SoftmaxState, ParallelCrossEntropy, AllReduce, AllGather, CutColumns, ShardSum,
                      GradNorm, AdamW, Route, ExpertOrder, Permute, GroupedLinear, Unpermute, ClampedSwiglu, GateRows,
                      IdentityExperts, LoadBalancingLoss, ExpertDispatch, ExpertCombine, LatentAppend, HeadLinear,
                      LatentAttention, SelectKeys, SelectedAttention, CompressKeys, CompressedAttention, SelectBlocks,
                      PoolKeys, PooledAttention, SplitColumns, ConcatColumns, ShortConvolution, StateSpaceScan,
                      GatedDeltaRule, ScaleByPosition, ScaleBy, StreamWeights, CollapseStreams, ExpandStreams>();
}

}  // namespace eadem::ops
