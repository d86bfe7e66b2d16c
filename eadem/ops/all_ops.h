// SPDX-License-Identifier: Apache-2.0
//
// Every op of this layer, and their workload rows.
#pragma once

#include "eadem/ops/attention/attention.h"
#include "eadem/ops/attention/compress_keys.h"
#include "eadem/ops/attention/compressed_attention.h"
#include "eadem/ops/attention/head_linear.h"
#include "eadem/ops/attention/kv_append.h"
#include "eadem/ops/attention/latent_append.h"
#include "eadem/ops/attention/latent_attention.h"
#include "eadem/ops/attention/pooled/pool_keys.h"
#include "eadem/ops/attention/pooled/pooled_attention.h"
#include "eadem/ops/attention/rope.h"
#include "eadem/ops/attention/scale_by_position.h"
#include "eadem/ops/attention/select_blocks.h"
#include "eadem/ops/attention/select_keys.h"
#include "eadem/ops/attention/selected_attention.h"
#include "eadem/ops/elementwise/add_bias.h"
#include "eadem/ops/elementwise/columns.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/elementwise/scale_by.h"
#include "eadem/ops/elementwise/softmax.h"
#include "eadem/ops/embedding.h"
#include "eadem/ops/experts/clamped_swiglu.h"
#include "eadem/ops/experts/expert_order.h"
#include "eadem/ops/experts/gate_rows.h"
#include "eadem/ops/experts/grouped_linear.h"
#include "eadem/ops/experts/identity_experts.h"
#include "eadem/ops/experts/load_balancing_loss.h"
#include "eadem/ops/experts/permute.h"
#include "eadem/ops/experts/route.h"
#include "eadem/ops/layer_norm.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/parallel/collectives.h"
#include "eadem/ops/parallel/expert_exchange.h"
#include "eadem/ops/parallel/parallel_cross_entropy.h"
#include "eadem/ops/parallel/select_heads.h"
#include "eadem/ops/parallel/virtual_shards.h"
#include "eadem/ops/recurrent/gated_delta_rule.h"
#include "eadem/ops/recurrent/short_convolution.h"
#include "eadem/ops/recurrent/state_space_scan.h"
#include "eadem/ops/reshape.h"
#include "eadem/ops/rms_norm.h"
#include "eadem/ops/sampling/feed_tokens.h"
#include "eadem/ops/sampling/sample.h"
#include "eadem/ops/select_rows.h"
#include "eadem/ops/streams/mix_streams.h"
#include "eadem/ops/streams/stream_weights.h"
#include "eadem/ops/training/cross_entropy.h"
#include "eadem/ops/training/optimizer.h"

namespace eadem::ops {

// The workloads of every op, in the order of the list in all_ops.cc. The rows of large models take gigabytes when
// bound: choose before allocating.
std::vector<Workload> all_workloads();

}  // namespace eadem::ops
