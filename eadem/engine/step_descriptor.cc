// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/step_descriptor.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace eadem::engine {

using kernels::SampleRow;

namespace {

constexpr std::array<const char*, StepLayout::kNumParts> kNames = {"token_ids",   "positions",   "slots",
                                                                   "query_start", "kv_length",   "logit_rows",
                                                                   "sample_rows", "block_table", "penalties"};
constexpr int64_t kAlignment = 64;

}  // namespace

StepLayout::StepLayout(const pipeline::Program& program) : bounds_(program.environment().bounds) {
  for (size_t p = 0; p < kNumParts; ++p) {
    offset_[p] = size_;
    const int64_t bytes = program.graph().value(program.input(kNames[p])).type.size_bytes(bounds_);
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
}

void StepLayout::bind(pipeline::Program& program, void* buffer) const {
  for (size_t p = 0; p < kNumParts; ++p)
    program.bind_input(program.input(kNames[p]), static_cast<std::byte*>(buffer) + offset_[p]);
}

StepDescriptor::StepDescriptor(std::shared_ptr<Device> device, int64_t size_bytes, int64_t block_size, int64_t vocab)
    : device_(std::move(device)),
      device_buffer_(device_->allocate(size_bytes)),
      block_size_(block_size),
      pair_of_token_(static_cast<size_t>(vocab), -1) {
  device_->fill_zero(device_buffer_.data(), size_bytes);
  if (!device_->host_accessible()) host_copy_.resize(static_cast<size_t>(size_bytes));
  host_ = host_copy_.empty() ? static_cast<std::byte*>(device_buffer_.data()) : host_copy_.data();
}

void StepDescriptor::fill(const StepLayout& layout, std::span<const StepSequence> plan, bool all_logits,
                          const CacheContents& contents, bool fill_up) {
  layout_ = &layout;
  tokens_ = sequences_ = rows_ = pairs_ = 0;
  part<int32_t>(StepLayout::query_start)[0] = 0;
  for (const StepSequence& sequence : plan) add_sequence(sequence, all_logits, contents);
  while (fill_up && sequences_ < layout.bounds()[Symbol::sequences]) add_nothing();
  symbols_ = layout.bounds();
  symbols_[Symbol::tokens] = tokens_;
  symbols_[Symbol::sequences] = sequences_;
  symbols_[Symbol::logit_rows] = rows_;
}

void StepDescriptor::add_sequence(const StepSequence& sequence, bool all_logits, const CacheContents& contents) {
  const auto first = static_cast<int32_t>(tokens_), length = static_cast<int32_t>(sequence.tokens.size()),
             cached = static_cast<int32_t>(sequence.cached);
  const std::span<const int32_t> blocks = sequence.used_blocks(block_size_);
  std::copy(blocks.begin(), blocks.end(),
            part<int32_t>(StepLayout::block_table) + sequences_ * layout_->bounds()[Symbol::max_blocks]);
  std::copy(sequence.tokens.begin(), sequence.tokens.end(), part<int32_t>(StepLayout::token_ids) + first);
  if (sequence.row >= 0) part<int32_t>(StepLayout::token_ids)[first] = -1 - sequence.row;
  for (int32_t t = 0; t < length; ++t) {
    part<int32_t>(StepLayout::positions)[first + t] = cached + t;
    part<int64_t>(StepLayout::slots)[first + t] = sequence.slot(cached + t, block_size_);
  }
  part<int32_t>(StepLayout::query_start)[sequences_ + 1] = first + length;
  part<int32_t>(StepLayout::kv_length)[sequences_] = cached + length;
  tokens_ += length;
  ++sequences_;
  if (!sequence.samples) return;
  for (int32_t t = all_logits ? 0 : length - 1; t < length; ++t, ++rows_) {
    part<int32_t>(StepLayout::logit_rows)[rows_] = first + t;
    part<SampleRow>(StepLayout::sample_rows)[rows_] = {.settings = sequence.sampling, .position = cached + t + 1};
  }
  SampleRow& last = part<SampleRow>(StepLayout::sample_rows)[rows_ - 1];
  if (!sequence.biases.empty()) add_biases(sequence, last);
  if (sequence.sampling.has_penalties()) add_penalties(sequence, last, contents);
}

// Adds a sequence that looks at one place of the cache, writes nothing, and samples a token that nobody reads.
void StepDescriptor::add_nothing() {
  const auto t = static_cast<int32_t>(tokens_++), s = static_cast<int32_t>(sequences_++),
             row = static_cast<int32_t>(rows_++);
  part<int32_t>(StepLayout::token_ids)[t] = part<int32_t>(StepLayout::positions)[t] = 0;
  part<int64_t>(StepLayout::slots)[t] = -1;
  part<int32_t>(StepLayout::query_start)[s + 1] = t + 1;
  part<int32_t>(StepLayout::kv_length)[s] = 1;
  part<int32_t>(StepLayout::block_table)[s * layout_->bounds()[Symbol::max_blocks]] = 0;
  part<int32_t>(StepLayout::logit_rows)[row] = t;
  part<SampleRow>(StepLayout::sample_rows)[row] = {};
}

// Lists the biases that hold for the token that the row draws.
void StepDescriptor::add_biases(const StepSequence& sequence, SampleRow& row) {
  int32_t* const pairs = part<int32_t>(StepLayout::penalties);
  const int64_t generated = row.position - sequence.sampling.prompt_length;
  row.biases_begin = static_cast<int32_t>(pairs_);
  for (const TokenBias& each : sequence.biases) {
    if (generated < each.begin || generated >= each.end) continue;
    pairs[2 * pairs_] = each.token;
    pairs[2 * pairs_ + 1] = std::bit_cast<int32_t>(each.bias);
    ++pairs_;
  }
  row.biases_end = static_cast<int32_t>(pairs_);
}

// Lists the distinct tokens of a sequence with the number of times that each was generated.
void StepDescriptor::add_penalties(const StepSequence& sequence, SampleRow& row, const CacheContents& contents) {
  int32_t* const pairs = part<int32_t>(StepLayout::penalties);
  row.penalties_begin = static_cast<int32_t>(pairs_);
  const auto count = [&](int32_t token, int64_t position) {
    int32_t& pair = pair_of_token_[static_cast<size_t>(token)];
    if (pair < 0) {
      pair = static_cast<int32_t>(pairs_++);
      pairs[2 * pair] = token;
      pairs[2 * pair + 1] = 0;
    }
    if (position >= row.settings.prompt_length) ++pairs[2 * pair + 1];
  };
  const std::span<const int32_t> blocks = sequence.used_blocks(block_size_);
  for (int64_t position = 0; position < sequence.cached; ++position) count(contents.token(blocks, position), position);
  for (int64_t position = sequence.cached; int32_t token : sequence.tokens) count(token, position++);
  row.penalties_end = static_cast<int32_t>(pairs_);
  for (int32_t pair = row.penalties_begin; pair < row.penalties_end; ++pair)
    pair_of_token_[static_cast<size_t>(pairs[2 * pair])] = -1;
}

void StepDescriptor::upload() {
  ++num_uploads_;
  if (host_copy_.empty()) return;
  // The penalties come last, because there is room for many and mostly there are none.
  const int64_t used = layout_->offset(StepLayout::penalties) + pairs_ * 2 * static_cast<int64_t>(sizeof(int32_t));
  device_->copy_from_host(device_buffer_.data(), host_, used);
}

}  // namespace eadem::engine
