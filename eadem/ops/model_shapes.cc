// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

std::span<const ModelShape> model_shapes() {
  static constexpr ModelShape kModels[] = {
      {"tiny", 64, 128, 2, 4, 2, 16, 256, DType::f32},
      {"stories260k", 64, 172, 5, 8, 4, 8, 512, DType::f32},
      {"qwen2.5-0.5b", 896, 4864, 24, 14, 2, 64, 151936, DType::bf16, /*qkv_bias=*/true},
      {"llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128256, DType::bf16},
      {"qwen3-4b", 2560, 9728, 36, 32, 8, 128, 151936, DType::bf16, false, /*qk_norm=*/true},
      {"llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256, DType::bf16},
  };
  return kModels;
}

std::span<const ExpertShape> expert_shapes() {
  static constexpr ExpertShape kModels[] = {
      {"tiny", 64, 32, 8, 2, DType::f32},
      {"qwen3-30b-a3b", 2048, 768, 128, 8, DType::bf16},
      {"gpt-oss-20b", 2880, 2880, 32, 4, DType::bf16, /*bias=*/true},
  };
  return kModels;
}

std::span<const LatentShape> latent_shapes() {
  static constexpr LatentShape kModels[] = {
      {"tiny", 3, 20, 8, 10, 12, DType::f32},
      {"deepseek-v2-lite", 16, 512, 64, 128, 128, DType::bf16},
  };
  return kModels;
}

std::span<const StepShape> step_shapes() {
  static constexpr StepShape kSteps[] = {
      {"decode-1", 1, 1, 512},
      {"decode-8", 8, 8, 512},
      {"prefill-512", 512, 1, 512},
  };
  return kSteps;
}

SymbolValues symbols_of(const StepShape& step) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = step.tokens;
  symbols[Symbol::sequences] = step.sequences;
  symbols[Symbol::logit_rows] = step.sequences;
  symbols[Symbol::max_blocks] = (step.kv_length + kWorkloadBlockSize - 1) / kWorkloadBlockSize;
  return symbols;
}

std::string workload_name(std::string_view model, const StepShape& step, std::string_view part) {
  return fmt::format("{} {} {}", model, step.name, part);
}

}  // namespace eadem::ops
