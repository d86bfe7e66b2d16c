// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/embedding.h"
#include "eadem/kernels/feed_tokens.h"

namespace eadem::kernels::cuda {

namespace {

Verdict can_embed(const KernelRequest& request) {
  return Requirements(request)
      .dtype("table", request.inputs[0], kStorageDTypes)
      .dtype("ids", request.inputs[1], {DType::i32})
      .dtype("y", request.outputs[0], kStorageDTypes)
      .verdict();
}

EmbeddingParams embedding_params(const KernelCall& call, const EmbeddingAttrs& attrs, const void* table) {
  const TensorView &ids = call.inputs[1], &y = call.outputs[0];
  return {.table = table,
          .ids = elements<const int32_t>(ids),
          .y = elements(y),
          .tokens = y.shape[0],
          .hidden = y.shape[1],
          .vocab = call.inputs[0].shape[0],
          .first = attrs.first,
          .scale = attrs.scale,
          .table_dtype = call.inputs[0].dtype,
          .y_dtype = y.dtype};
}

PlanPtr prepare_embedding(const KernelRequest& request, Context&) {
  return make_plan([attrs = request.attrs.get<EmbeddingAttrs>()](const KernelCall& call) {
    EADEM_CUDA_CALL(launch_embedding(embedding_params(call, attrs, elements(call.inputs[0])), stream_of(call)));
  });
}

Verdict can_differentiate_table(const KernelRequest& request) {
  return Requirements(request)
      .dtype("ids", request.inputs[0], {DType::i32})
      .dtype("dy", request.inputs[1], kStorageDTypes)
      .dtype("dtable", request.outputs[0], {DType::f32})
      .verdict();
}

PlanPtr prepare_embedding_backward(const KernelRequest& request, Context&) {
  return make_plan([attrs = request.attrs.get<EmbeddingAttrs>()](const KernelCall& call) {
    const TensorView &ids = call.inputs[0], &dy = call.inputs[1], &dtable = call.outputs[0];
    EADEM_CUDA_CALL(launch_embedding_backward({.ids = elements<const int32_t>(ids),
                                               .dy = elements(dy),
                                               .dtable = elements<float>(dtable),
                                               .tokens = ids.shape[0],
                                               .hidden = dtable.shape[1],
                                               .vocab = dtable.shape[0],
                                               .first = attrs.first,
                                               .scale = attrs.scale,
                                               .dtype = dy.dtype},
                                              stream_of(call)));
  });
}

// --- A table that is encoded, in the layout of the matrix products, so that a tied head reads the same copy.

bool keeps_values(const Encoding* encoding) {
  const FragmentBlocks* blocks = FragmentBlocks::of(encoding);
  return blocks == nullptr || blocks->layout().code != FragmentLayout::Code::bf16;
}

Verdict can_embed_encoded(const KernelRequest& request) {
  return Requirements(request, {0})
      .require(request.inputs[0].encoding != nullptr, "the table is plain")
      .require(keeps_values(request.inputs[0].encoding), "the table would be rounded to bf16")
      .require(
          request.inputs[0].fixed(1) % kLinearStreamMultiple == 0,
          fmt::format("a row has {} columns, not a multiple of {}", request.inputs[0].fixed(1), kLinearStreamMultiple))
      .dtype("ids", request.inputs[1], {DType::i32})
      .dtype("y", request.outputs[0], kStorageDTypes)
      .verdict();
}

const Encoding* table_packing(const KernelRequest& request, int input) {
  return input == 0 ? FragmentBlocks::of(request.inputs[0].encoding) : nullptr;
}

PlanPtr prepare_encoded_embedding(const KernelRequest& request, Context&) {
  return make_plan([attrs = request.attrs.get<EmbeddingAttrs>(),
                    layout = FragmentBlocks::of(request.inputs[0].encoding)->layout()](const KernelCall& call) {
    EADEM_CUDA_CALL(
        launch_packed_embedding(embedding_params(call, attrs, call.inputs[0].plane(0)), layout, stream_of(call)));
  });
}

Verdict can_select_rows(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("rows", request.inputs[1], {DType::i32})
      .same_dtype("y", request.outputs[0], "x", request.inputs[0])
      .verdict();
}

void run_select_rows(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &rows = call.inputs[1], &y = call.outputs[0];
  EADEM_CUDA_CALL(launch_select_rows({.x = elements(x),
                                      .rows = elements<const int32_t>(rows),
                                      .y = elements(y),
                                      .tokens = x.shape[0],
                                      .num_rows = y.shape[0],
                                      .hidden = y.shape[1],
                                      .dtype = x.dtype},
                                     stream_of(call)));
}

Verdict can_feed(const KernelRequest& request) {
  return Requirements(request)
      .dtype("ids", request.inputs[0], {DType::i32})
      .dtype("sampled", request.inputs[1], {DType::i32})
      .dtype("y", request.outputs[0], {DType::i32})
      .verdict();
}

void run_feed(const KernelCall& call) {
  EADEM_CUDA_CALL(launch_feed_tokens({.ids = elements<const int32_t>(call.inputs[0]),
                                      .sampled = elements<const int32_t>(call.inputs[1]),
                                      .y = elements<int32_t>(call.outputs[0]),
                                      .tokens = call.outputs[0].shape[0]},
                                     stream_of(call)));
}

constexpr Kernel kEmbedding{"cuda_rows", Pass::inference, can_embed, prepare_embedding};
constexpr Kernel kEmbeddingForward = in_forward(kEmbedding);
constexpr Kernel kEmbeddingBackward{"cuda_rows_of_ids", Pass::backward, can_differentiate_table,
                                    prepare_embedding_backward};
constexpr Kernel kEncodedEmbedding{.name = "cuda_fragment_blocks",
                                   .pass = Pass::inference,
                                   .can_handle = can_embed_encoded,
                                   .prepare = prepare_encoded_embedding,
                                   .packing = table_packing};
constexpr Kernel kSelectRows{"cuda_rows", Pass::inference, can_select_rows, prepare_nothing<run_select_rows>};
constexpr Kernel kFeedTokens{"cuda_feed_tokens", Pass::inference, can_feed, prepare_nothing<run_feed>};

}  // namespace

KernelList embedding_kernels() { return {&kEmbedding, &kEncodedEmbedding, &kEmbeddingForward, &kEmbeddingBackward}; }
KernelList select_rows_kernels() { return {&kSelectRows}; }
KernelList feed_tokens_kernels() { return {&kFeedTokens}; }

}  // namespace eadem::kernels::cuda
