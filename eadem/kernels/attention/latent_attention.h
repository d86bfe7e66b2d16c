// SPDX-License-Identifier: Apache-2.0
//
// latent_attention: causal attention whose keys and values are made of one row of a token, row = [latent | key]:
//   y[t, h, :] = sum_j softmax_j(scale * q[t, h, :] . [k_b[h]^T latent_j | key_j]) * v_b[h] latent_j
// over the positions j of the same sequence up to that of token t.
//
//   inputs   q [tokens, heads, nope_dim + rope_dim] f32 or bf16
//            rows [num_blocks, 1, block_size, latent_dim + rope_dim] f32, bf16 or f16, or in a RowEncoding (state,
//                 written by latent_append)
//            k_b [heads, latent_dim, nope_dim], v_b [heads, value_dim, latent_dim] (parameters)
//            query_start, kv_length, block_table: as attention has them (kernels/attention/attention.h)
//            prompt_length [sequences] i32: how many tokens a sequence's prompt has
//   outputs  y [tokens, heads, value_dim], dtype of q. There is no forward or backward pass.
//
// There are two forms of the same sum, and which one a token gets depends on its position alone, so that its bits do
// not depend on how a prompt is cut into steps.
//   decompressed, at positions before prompt_length: keys and values are made of the rows, once a step for all tokens
//     of a sequence, and attended to. A pair of tokens costs nope_dim + rope_dim + value_dim products a head. Products
//     with the latents multiply them as they are stored, by weights that are decoded to f32.
//   absorbed, at the others: k_b takes the query to the space of the latent, attention reads the rows as keys and their
//     first columns as values, and v_b takes the result out. A pair costs 2 latent_dim + rope_dim products a head, and
//     nothing is made of a row. Products with k_b and v_b round as head_linear does, and bits are those of head_linear
//     and attention.
// Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
#pragma once

#include <cstdint>

#include "eadem/core/machine/matmul_input.h"

namespace eadem::kernels {

struct LatentAttentionAttrs {
  int64_t heads = 0;
  int64_t latent_dim = 0;
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t value_dim = 0;
  float scale = 1.0f;
  MatmulInput matmul_input = MatmulInput::int8;  // how far the absorbed form may round what it multiplies with weights

  int64_t head_dim() const { return nope_dim + rope_dim; }
  int64_t row_dim() const { return latent_dim + rope_dim; }
};

}  // namespace eadem::kernels
