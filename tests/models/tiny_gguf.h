// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "eadem/core/tensor.h"
#include "eadem/io/gguf.h"

namespace eadem::test {

// A Llama of one layer whose matrices are all stored as `type`.
inline void write_model(const std::filesystem::path& file, const WeightType& type, uint32_t seed = 1,
                        uint32_t context = 64) {
  constexpr int64_t kHidden = 256, kVocab = 48;
  std::vector<Tensor> kept;
  std::vector<io::NamedTensor> tensors;
  uint32_t state = seed;
  const auto matrix = [&](const std::string& name, int64_t rows) {
    const Tensor values = Tensor::on_host(DType::f32, Shape{rows, kHidden});
    for (int64_t i = 0; i < rows * kHidden; ++i) {
      state = state * 1664525u + 1013904223u;
      values.view.as<float>()[i] = static_cast<float>(0.05 * (static_cast<double>(state >> 8) / (1 << 23) - 1));
    }
    if (type.encoding == nullptr) {
      kept.push_back(converted_on_host(values.view, type.dtype));
    } else {
      kept.push_back(Tensor::on_host(DType::f32, values.shape(), *type.encoding));
      type.encoding->encode(kept.back().view, values.view);
    }
    tensors.push_back({name + ".weight", kept.back().view});
  };
  const auto norm = [&](const std::string& name) {
    kept.push_back(Tensor::on_host(DType::f32, Shape{kHidden}));
    std::fill_n(kept.back().view.as<float>(), kHidden, 1.0f);
    tensors.push_back({name + ".weight", kept.back().view});
  };
  matrix("token_embd", kVocab);
  norm("blk.0.attn_norm");
  for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output"}) matrix(std::string("blk.0.") + name, kHidden);
  norm("blk.0.ffn_norm");
  for (const char* name : {"ffn_gate", "ffn_up", "ffn_down"}) matrix(std::string("blk.0.") + name, kHidden);
  norm("output_norm");
  const auto number = [](uint32_t value) { return io::GgufValue::scalar(value); };
  io::write_gguf(file.string(),
                 {{"general.architecture", io::GgufValue::string("llama")},
                  {"llama.attention.layer_norm_rms_epsilon", io::GgufValue::scalar(1e-5f)},
                  {"llama.block_count", number(1)},
                  {"llama.embedding_length", number(kHidden)},
                  {"llama.feed_forward_length", number(kHidden)},
                  {"llama.attention.head_count", number(4)},
                  {"llama.context_length", number(context)},
                  {"llama.vocab_size", number(kVocab)}},
                 tensors);
}

}  // namespace eadem::test
