// SPDX-License-Identifier: Apache-2.0
//
// decoder_layer and decoder_layers: one token through layers of a decoder in one launch, on Hopper. The kernel is
// compiled for some shapes (launch.h), and for weights of 4 bits in groups, K-quants, e4m3 with a scale for each row,
// or bf16 (decoder/weights.cuh).
#include "eadem/kernels/decoder_layers.h"

#include <algorithm>
#include <climits>
#include <memory>
#include <string>
#include <vector>

#include <fmt/ranges.h>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

using Ports = DecoderLayerPorts;

constexpr DecoderShape kShapes[] = {kLlama8b, kLlama1b};

constexpr Ports::OfLayer kWeights[] = {Ports::kQWeight,    Ports::kKWeight,  Ports::kVWeight,   Ports::kOWeight,
                                       Ports::kGateWeight, Ports::kUpWeight, Ports::kDownWeight};

DecoderWeight& weight_of(DecoderLayerParams& layer, Ports::OfLayer port) {
  switch (port) {
    case Ports::kQWeight: return layer.q;
    case Ports::kKWeight: return layer.k;
    case Ports::kVWeight: return layer.v;
    case Ports::kOWeight: return layer.o;
    case Ports::kGateWeight: return layer.gate;
    case Ports::kUpWeight: return layer.up;
    case Ports::kDownWeight: return layer.down;
    default: EADEM_UNREACHABLE("port {} is no weight", static_cast<int>(port));
  }
}

bool is_weight(size_t port) {
  if (port < Ports::kSharedInputs) return false;
  const size_t of_layer = (port - Ports::kSharedInputs) % Ports::kLayerInputs;
  return std::find(std::begin(kWeights), std::end(kWeights), of_layer) != std::end(kWeights);
}

const TensorType& input(const KernelRequest& request, size_t layer, Ports::OfLayer port) {
  return request.inputs[Ports::input(layer, port)];
}

bool is_k_quant(const FragmentLayout& layout) {
  const IntegerCodes codes = integer_codes_of(layout);
  return codes == IntegerCodes::four || codes == IntegerCodes::six;
}

// The layout of a weight that the kernel can read, or null.
const FragmentLayout* readable_layout(const TensorType& weight) {
  const FragmentBlocks* blocks = FragmentBlocks::of(weight.encoding);
  if (blocks == nullptr || blocks->layout().scale_type == FragmentLayout::Scale::f32) return nullptr;
  const FragmentLayout& layout = blocks->layout();
  if (is_k_quant(layout)) return &layout;
  FragmentLayout known = kKnownLayouts[layout.has_zeros ? kZeroGroupLayout : kGroupLayout];
  known.scale_type = layout.scale_type, known.known = layout.known;
  return layout == known ? &layout : nullptr;
}

bool has_float_rows(const TensorType& weight) {
  const Fp8Encoding* fp8 = Fp8Encoding::of(weight.encoding);
  return fp8 != nullptr && fp8->format() == Fp8Format{Fp8Format::Kind::e4m3, 1, 0};
}

bool is_bf16(const TensorType& weight) { return weight.encoding == nullptr && weight.dtype == DType::bf16; }

// Whether both are weights of one type, which the kernel can read. K-quants are one type.
bool are_alike(const TensorType& a, const TensorType& b) {
  if (has_float_rows(a) || has_float_rows(b)) return a.encoding == b.encoding;
  if (is_bf16(a) || is_bf16(b)) return is_bf16(a) && is_bf16(b);
  const FragmentLayout *of_a = readable_layout(a), *of_b = readable_layout(b);
  if (of_a == nullptr || of_b == nullptr) return false;
  return is_k_quant(*of_a) ? is_k_quant(*of_b) : *of_a == *of_b;
}

// The shape of the first layer, whether the kernel is compiled for it or not.
DecoderShape shape_of(const KernelRequest& request) {
  const AttentionAttrs& attention = request.attrs.get<DecoderLayerAttrs>().attention.attention;
  const auto to_int = [](int64_t size) { return static_cast<int>(std::min<int64_t>(size, INT_MAX)); };
  return {.hidden = to_int(input(request, 0, Ports::kQWeight).fixed(1)),
          .ffn = to_int(input(request, 0, Ports::kGateWeight).fixed(0)),
          .heads = to_int(attention.heads),
          .kv_heads = to_int(attention.kv_heads),
          .head_dim = to_int(attention.head_dim)};
}

std::string shapes_text() {
  std::vector<std::string> texts;
  for (const DecoderShape& shape : kShapes)
    texts.push_back(fmt::format("hidden {}, intermediate {}, {} heads of {} and {} of keys", shape.hidden, shape.ffn,
                                shape.heads, shape.head_dim, shape.kv_heads));
  return fmt::format("{}", fmt::join(texts, "; or "));
}

// Whether a layer's weights have this shape, and a type that the kernel reads, which is that of the first weight.
bool fits(const KernelRequest& request, const DecoderShape& shape, size_t layer) {
  const TensorType& first = input(request, 0, Ports::kQWeight);
  const auto has = [&](Ports::OfLayer port, int64_t out, int64_t in) {
    const TensorType& weight = input(request, layer, port);
    return weight.fixed(0) == out && weight.fixed(1) == in && are_alike(first, weight);
  };
  const int64_t q_rows = shape.heads * shape.head_dim, kv_rows = shape.kv_heads * shape.head_dim;
  return has(Ports::kQWeight, q_rows, shape.hidden) && has(Ports::kKWeight, kv_rows, shape.hidden) &&
         has(Ports::kVWeight, kv_rows, shape.hidden) && has(Ports::kOWeight, shape.hidden, q_rows) &&
         has(Ports::kGateWeight, shape.ffn, shape.hidden) && has(Ports::kUpWeight, shape.ffn, shape.hidden) &&
         has(Ports::kDownWeight, shape.hidden, shape.ffn);
}

Verdict can_run_layers(const KernelRequest& request) {
  const auto& attrs = request.attrs.get<DecoderLayerAttrs>();
  const AttentionAttrs& attention = attrs.attention.attention;
  const RopeAttrs& rope = attrs.attention.rope;
  const size_t layers = Ports::layers(request.inputs.size());
  const auto bound = [&](Ports::Shared port) { return request.inputs[port].dim(0).bind(request.bounds); };
  std::vector<size_t> weights;
  for (size_t port = 0; port < request.inputs.size(); ++port)
    if (is_weight(port)) weights.push_back(port);
  const DecoderShape shape = shape_of(request);
  Requirements requirements(request, weights, {});
  requirements.hopper()
      .require(static_cast<const CudaDevice*>(request.device)->multiprocessors() >= kDecoderMultiprocessors,
               fmt::format("needs {} multiprocessors; there are {}", kDecoderMultiprocessors,
                           static_cast<const CudaDevice*>(request.device)->multiprocessors()))
      .require(bound(Ports::kX) == 1 && bound(Ports::kKvLength) == 1, "is for steps of one token")
      .at_most("layers", static_cast<int64_t>(layers), kMostDecoderLayers)
      .require(std::find(std::begin(kShapes), std::end(kShapes), shape) != std::end(kShapes) &&
                   attention.values() == attention.head_dim,
               fmt::format("is compiled for layers of {}", shapes_text()))
      .require(attention.source == KvSource::cached && attention.window == 0 && attention.chunk == 0 &&
                   attention.softcap == 0.0f && !attention.sinks && attention.scale > 0.0f,
               "takes attention to a cache without windows, chunks, soft caps and sinks")
      .require(rope.style == RopeStyle::rotate_half && rope.rotary_dim == attention.head_dim && !rope.last,
               "rotates whole heads, by halves")
      .require(attrs.gated.kind == ActivationKind::silu, "has silu alone")
      .require(attrs.qkv.matmul_input == MatmulInput::int8 && attrs.o.matmul_input == MatmulInput::int8 &&
                   attrs.down.matmul_input == MatmulInput::int8 && attrs.gated.matmul_input == MatmulInput::int8,
               "rounds what products read to 8 bits; matmul_input is another")
      .require(attrs.qkv.out_dtype == DType::bf16 && attrs.gated.out_dtype == DType::bf16,
               "rounds results of products to bf16; out_dtype is another")
      .dtype("x", request.inputs[Ports::kX], {DType::bf16})
      .same_dtype("y", request.outputs[0], "x", request.inputs[Ports::kX])
      .dtype("table", request.inputs[Ports::kTable], {DType::f32});
  for (size_t layer = 0; layer < layers; ++layer) {
    const TensorType& cache = input(request, layer, Ports::kCacheK);
    requirements
        .require(!is_bf16(input(request, layer, Ports::kQWeight)) || shape == kLlama1b,
                 fmt::format("takes weights in bf16 with hidden {} alone", kLlama1b.hidden))
        .require(fits(request, shape, layer),
                 fmt::format("takes layers of one shape, and weights in q4_k and q6_k, of 4 bits in groups of {} with "
                             "scales of 16 bits, in fp8_e4m3 with a scale for each row, or in bf16, all of one type",
                             kIntegerGroup))
        .dtype("norm", input(request, layer, Ports::kNorm), {DType::f32})
        .dtype("mlp_norm", input(request, layer, Ports::kMlpNorm), {DType::f32})
        .dtype("cache_k", cache, {DType::bf16})
        .require(cache.fixed(2) % kDecoderBlockMultiple == 0,
                 fmt::format("takes a cache in blocks of a multiple of {} tokens", kDecoderBlockMultiple))
        .require(cache == input(request, 0, Ports::kCacheK) && cache == input(request, layer, Ports::kCacheV),
                 "takes caches of one type");
  }
  return requirements.verdict({.reason = "all layers in one launch"});
}

// The parameters that are the same in all calls.
DecoderLayersParams fixed_params(const KernelRequest& request, int64_t max_splits, void* exchange) {
  const auto& attrs = request.attrs.get<DecoderLayerAttrs>();
  const TensorType& cache = input(request, 0, Ports::kCacheK);
  const FragmentLayout* first = readable_layout(input(request, 0, Ports::kQWeight));
  DecoderLayersParams params{
      .shape = shape_of(request),
      .exchange = exchange,
      .num_layers = static_cast<int>(Ports::layers(request.inputs.size())),
      .block_size = cache.fixed(2),
      .max_splits = max_splits,
      .eps = attrs.norm.eps,
      .mlp_eps = attrs.mlp_norm.eps,
      .scale = attrs.attention.attention.scale,
      .bytes_per_second = static_cast<const CudaDevice*>(request.device)->rates().bytes_per_second};
  if (first == nullptr) return params;  // rows
  params.scale_type = first->scale_type, params.has_zeros = first->has_zeros;
  for (size_t layer = 0; layer < Ports::layers(request.inputs.size()); ++layer)
    for (const Ports::OfLayer port : kWeights)
      weight_of(params.layers[layer], port).codes = integer_codes_of(*readable_layout(input(request, layer, port)));
  return params;
}

// `has_scales`: a weight has a scale for each row.
void set_layer(DecoderLayerParams& params, const KernelCall& call, size_t layer, bool has_scales) {
  const auto data = [&](Ports::OfLayer port) { return call.inputs[Ports::input(layer, port)].data; };
  params.norm = static_cast<const float*>(data(Ports::kNorm));
  params.mlp_norm = static_cast<const float*>(data(Ports::kMlpNorm));
  for (const Ports::OfLayer port : kWeights) {
    DecoderWeight& weight = weight_of(params, port);
    weight.blocks = data(port);
    if (has_scales) weight.scales = static_cast<const float*>(call.inputs[Ports::input(layer, port)].more_planes[0]);
  }
  params.cache_k = call.outputs[Ports::output(layer, Ports::kCacheK)].data;
  params.cache_v = call.outputs[Ports::output(layer, Ports::kCacheV)].data;
}

PlanPtr prepare_layers(const KernelRequest& request, Context& context) {
  const int64_t keys =
      request.inputs[Ports::kBlockTable].dim(1).bind(request.bounds) * input(request, 0, Ports::kCacheK).fixed(2);
  const int64_t max_splits = keys / kAttentionSplitKeys + 1;
  // Launches find what the ones before left there, so it cannot be scratch memory.
  const auto exchange =
      std::make_shared<Buffer>(context.device.allocate(decoder_exchange_bytes(shape_of(request), max_splits)));
  context.device.fill_zero(exchange->data(), exchange->size_bytes());
  return make_plan([exchange, fixed = fixed_params(request, max_splits, exchange->data()),
                    has_scales = has_float_rows(input(request, 0, Ports::kQWeight))](const KernelCall& call) {
    if (call.inputs[Ports::kX].shape[0] == 0) return;
    DecoderLayersParams params = fixed;
    params.x = elements(call.inputs[Ports::kX]);
    params.y = elements(call.outputs[0]);
    params.table = elements<const float>(call.inputs[Ports::kTable]);
    params.slots = elements<const int64_t>(call.inputs[Ports::kSlots]);
    params.kv_length = elements<const int32_t>(call.inputs[Ports::kKvLength]);
    params.block_table = elements<const int32_t>(call.inputs[Ports::kBlockTable]);
    params.cache_rows = call.inputs[Ports::input(0, Ports::kCacheK)].num_elements() / fixed.shape.head_dim;
    for (int layer = 0; layer < params.num_layers; ++layer)
      set_layer(params.layers[layer], call, static_cast<size_t>(layer), has_scales);
    EADEM_CUDA_CALL(launch_decoder_layers(params, stream_of(call)));
  });
}

const Encoding* layers_packing(const KernelRequest& request, int port) {
  const TensorType& type = request.inputs[static_cast<size_t>(port)];
  return is_weight(static_cast<size_t>(port)) && !has_float_rows(type) ? FragmentBlocks::of(type.encoding) : nullptr;
}

constexpr Kernel kLayers{.name = "cuda_persistent",
                         .pass = Pass::inference,
                         .can_handle = can_run_layers,
                         .prepare = prepare_layers,
                         .packing = layers_packing,
                         .alignment_bytes = 32};

}  // namespace

KernelList decoder_layers_kernels() { return {&kLayers}; }

}  // namespace eadem::kernels::cuda
