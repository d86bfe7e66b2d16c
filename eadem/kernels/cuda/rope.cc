// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/attention/rope.h"

#include "eadem/kernels/attention/kv_append.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

constexpr const char* kOneWidth = "takes keys and values of one width";
constexpr const char* kFirstElements = "rotates the first elements of a head, not the last";

Verdict can_make_table(const KernelRequest& request) {
  return Requirements(request)
      .dtype("positions", request.inputs[0], {DType::i32})
      .dtype("inv_freq", request.inputs[1], {DType::f32})
      .dtype("table", request.outputs[0], {DType::f32})
      .require(request.attrs.get<RopeTableAttrs>().stride == 1, "makes a row for each position")
      .verdict();
}

PlanPtr prepare_rope_table(const KernelRequest& request, Context&) {
  return make_plan([scale = request.attrs.get<RopeTableAttrs>().scale](const KernelCall& call) {
    const TensorView &positions = call.inputs[0], &inv_freq = call.inputs[1], &table = call.outputs[0];
    EADEM_CUDA_CALL(launch_rope_table({.positions = elements<const int32_t>(positions),
                                       .inv_freq = elements<const float>(inv_freq),
                                       .table = elements<float>(table),
                                       .tokens = positions.shape[0],
                                       .half = inv_freq.shape[0],
                                       .scale = scale},
                                      stream_of(call)));
  });
}

Verdict can_rotate(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("table", request.inputs[1], {DType::f32})
      .same_dtype("y", request.outputs[0], "x", request.inputs[0])
      .require(!request.attrs.get<RopeAttrs>().last, kFirstElements)
      .at_most("rotary_dim", request.attrs.get<RopeAttrs>().rotary_dim, request.inputs[0].fixed(2))
      .verdict();
}

// Rotates input kX by the table in the other input.
template <size_t kX, bool kInverse>
PlanPtr prepare_rope(const KernelRequest& request, Context&) {
  return make_plan([attrs = request.attrs.get<RopeAttrs>()](const KernelCall& call) {
    const TensorView &x = call.inputs[kX], &table = call.inputs[1 - kX], &y = call.outputs[0];
    EADEM_CUDA_CALL(launch_rope({.x = elements(x),
                                 .table = elements<const float>(table),
                                 .y = elements(y),
                                 .tokens = x.shape[0],
                                 .heads = x.shape[1],
                                 .head_dim = x.shape[2],
                                 .rotary_dim = attrs.rotary_dim,
                                 .style = attrs.style,
                                 .dtype = x.dtype,
                                 .inverse = kInverse},
                                stream_of(call)));
  });
}

Verdict can_rotate_back(const KernelRequest& request) {
  return Requirements(request)
      .dtype("table", request.inputs[0], {DType::f32})
      .dtype("dy", request.inputs[1], kActivationDTypes)
      .same_dtype("dx", request.outputs[0], "dy", request.inputs[1])
      .require(!request.attrs.get<RopeAttrs>().last, kFirstElements)
      .at_most("rotary_dim", request.attrs.get<RopeAttrs>().rotary_dim, request.inputs[1].fixed(2))
      .verdict();
}

Verdict can_append(const KernelRequest& request) {
  return Requirements(request, {3, 4}, {0, 1})
      .dtype("k", request.inputs[0], kActivationDTypes)
      .same_dtype("v", request.inputs[1], "k", request.inputs[0])
      .require(request.inputs[1].dim(2) == request.inputs[0].dim(2), kOneWidth)
      .dtype("slots", request.inputs[2], {DType::i64})
      .kv_cache("cache_k", request.inputs[3])
      .same_dtype("cache_v", request.inputs[4], "cache_k", request.inputs[3])
      .verdict();
}

PlanPtr prepare_kv_append(const KernelRequest& request, Context&) {
  return make_plan([code = kv_code_of(request.inputs[3])](const KernelCall& call) {
    const TensorView &k = call.inputs[0], &v = call.inputs[1], &slots = call.inputs[2];
    const TensorView &cache_k = call.outputs[0], &cache_v = call.outputs[1];
    EADEM_CUDA_CALL(launch_kv_append({.k = elements(k),
                                      .table = nullptr,
                                      .v = elements(v),
                                      .slots = elements<const int64_t>(slots),
                                      .cache_k = cache_rows(cache_k),
                                      .cache_v = cache_rows(cache_v),
                                      .tokens = k.shape[0],
                                      .kv_heads = k.shape[1],
                                      .head_dim = k.shape[2],
                                      .rotary_dim = 0,
                                      .block_size = cache_k.shape[2],
                                      .style = RopeStyle::rotate_half,
                                      .dtype = k.dtype,
                                      .cache_dtype = cache_k.dtype,
                                      .code = code,
                                      .k_scales = cache_scales(cache_k),
                                      .v_scales = cache_scales(cache_v)},
                                     stream_of(call)));
  });
}

// The ports of rope_kv_append, and those of rope_qk_append with kQueries.
template <bool kQueries>
struct AppendPorts {
  static constexpr size_t kQ = 0, kTable = 1, kK = kQueries ? 2 : 0, kV = kK + (kQueries ? 1 : 2), kSlots = kV + 1,
                          kCacheK = kV + 2, kCacheV = kV + 3;
};

template <bool kQueries>
Verdict can_rotate_and_append(const KernelRequest& request) {
  using Ports = AppendPorts<kQueries>;
  const auto& in = request.inputs;
  const RopeAttrs& rope = request.attrs.get<RopeKvAppendAttrs>().rope;
  constexpr size_t kOutput = kQueries ? 1 : 0;
  Requirements requirements(request, {Ports::kCacheK, Ports::kCacheV}, {kOutput, kOutput + 1});
  requirements.dtype("k", in[Ports::kK], kActivationDTypes)
      .dtype("table", in[Ports::kTable], {DType::f32})
      .same_dtype("v", in[Ports::kV], "k", in[Ports::kK])
      .require(in[Ports::kV].dim(2) == in[Ports::kK].dim(2), kOneWidth)
      .dtype("slots", in[Ports::kSlots], {DType::i64})
      .kv_cache("cache_k", in[Ports::kCacheK])
      .same_dtype("cache_v", in[Ports::kCacheV], "cache_k", in[Ports::kCacheK])
      .require(!rope.last, kFirstElements)
      .at_most("rotary_dim", rope.rotary_dim, in[Ports::kK].fixed(2));
  if constexpr (kQueries)
    requirements.same_dtype("q", in[Ports::kQ], "k", in[Ports::kK])
        .same_dtype("y", request.outputs[0], "q", in[Ports::kQ])
        .require(in[Ports::kQ].dim(2) == in[Ports::kK].dim(2), "takes queries and keys of one width");
  return requirements.verdict();
}

template <bool kQueries>
PlanPtr prepare_rope_append(const KernelRequest& request, Context&) {
  using Ports = AppendPorts<kQueries>;
  return make_plan([attrs = request.attrs.get<RopeKvAppendAttrs>().rope,
                    code = kv_code_of(request.inputs[Ports::kCacheK])](const KernelCall& call) {
    const TensorView& k = call.inputs[Ports::kK];
    const TensorView &cache_k = call.outputs[kQueries ? 1 : 0], &cache_v = call.outputs[kQueries ? 2 : 1];
    KvAppendParams p{.k = elements(k),
                     .table = elements<const float>(call.inputs[Ports::kTable]),
                     .v = elements(call.inputs[Ports::kV]),
                     .slots = elements<const int64_t>(call.inputs[Ports::kSlots]),
                     .cache_k = cache_rows(cache_k),
                     .cache_v = cache_rows(cache_v),
                     .tokens = k.shape[0],
                     .kv_heads = k.shape[1],
                     .head_dim = k.shape[2],
                     .rotary_dim = attrs.rotary_dim,
                     .block_size = cache_k.shape[2],
                     .style = attrs.style,
                     .dtype = k.dtype,
                     .cache_dtype = cache_k.dtype,
                     .code = code,
                     .k_scales = cache_scales(cache_k),
                     .v_scales = cache_scales(cache_v)};
    if constexpr (kQueries) {
      p.q = elements(call.inputs[Ports::kQ]);
      p.y = elements(call.outputs[0]);
      p.heads = call.inputs[Ports::kQ].shape[1];
    }
    EADEM_CUDA_CALL(launch_kv_append(p, stream_of(call)));
  });
}

constexpr Kernel kRopeTable{"cuda_elements", Pass::inference, can_make_table, prepare_rope_table};
constexpr Kernel kRope{.name = "cuda_elements",
                       .pass = Pass::inference,
                       .can_handle = can_rotate,
                       .prepare = prepare_rope<0, false>,
                       .alignment_bytes = 32};
constexpr Kernel kRopeForward = in_forward(kRope);
constexpr Kernel kRopeBackward{.name = "cuda_elements",
                               .pass = Pass::backward,
                               .can_handle = can_rotate_back,
                               .prepare = prepare_rope<1, true>,
                               .alignment_bytes = 32};
constexpr Kernel kKvAppend{.name = "cuda_elements",
                           .pass = Pass::inference,
                           .can_handle = can_append,
                           .prepare = prepare_kv_append,
                           .alignment_bytes = 32};
constexpr Kernel kRopeKvAppend{.name = "cuda_elements",
                               .pass = Pass::inference,
                               .can_handle = can_rotate_and_append<false>,
                               .prepare = prepare_rope_append<false>,
                               .alignment_bytes = 32};
constexpr Kernel kRopeQkAppend{.name = "cuda_elements",
                               .pass = Pass::inference,
                               .can_handle = can_rotate_and_append<true>,
                               .prepare = prepare_rope_append<true>,
                               .alignment_bytes = 32};

}  // namespace

KernelList rope_table_kernels() { return {&kRopeTable}; }
KernelList rope_kernels() { return {&kRope, &kRopeForward, &kRopeBackward}; }
KernelList kv_append_kernels() { return {&kKvAppend}; }
KernelList rope_kv_append_kernels() { return {&kRopeKvAppend}; }
KernelList rope_qk_append_kernels() { return {&kRopeQkAppend}; }

}  // namespace eadem::kernels::cuda
