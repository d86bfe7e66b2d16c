// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/step_descriptor.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace eadem::engine {

using kernels::SampleRow;

namespace {

constexpr std::array<const char*, StepLayout::kNumParts> kNames = {"token_ids",   "positions",   "slots",
                                                                   "query_start", "kv_length",   "logit_rows",
                                                                   "sample_rows", "block_table", "penalties"};
constexpr const char* kStateSlots = "state_slots";
constexpr const char* kPromptLength = "prompt_length";
constexpr const char* kPreviousHidden = "previous_hidden";
constexpr int64_t kAlignment = 64;

}  // namespace

// Appends an input and returns its offset.
int64_t StepLayout::place(const pipeline::Program& program, pipeline::ValueId input) {
  const int64_t bytes = program.graph().value(input).type.size_bytes(bounds_);
  return std::exchange(size_, size_ + (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

StepLayout::StepLayout(const pipeline::Program& program, const modules::CacheSpec& cache)
    : bounds_(program.environment().bounds) {
  for (size_t group = 1; group < cache.num_groups(); ++group) {
    WindowPart& part = windows_.emplace_back();
    part.table_input = program.input(modules::group_input(cache, group, "block_table"));
    part.slots_input = program.input(modules::group_input(cache, group, "slots"));
    part.table_offset = place(program, part.table_input);
    part.slots_offset = place(program, part.slots_input);
  }
  if (cache.num_slots > 0) state_slots_offset_ = place(program, program.input(kStateSlots));
  if (const auto input = program.graph().find(kPromptLength)) prompt_length_offset_ = place(program, *input);
  if (const auto input = program.graph().find(kPreviousHidden)) {
    previous_hidden_offset_ = place(program, *input);
    hidden_row_bytes_ = program.graph().value(*input).type.size_bytes(bounds_) / bounds_[Symbol::tokens];
  }
  for (size_t p = 0; p < kNumParts; ++p) offset_[p] = place(program, program.input(kNames[p]));
}

void StepLayout::bind(pipeline::Program& program, void* buffer) const {
  auto* const bytes = static_cast<std::byte*>(buffer);
  for (size_t p = 0; p < kNumParts; ++p) program.bind_input(program.input(kNames[p]), bytes + offset_[p]);
  if (state_slots_offset_ >= 0) program.bind_input(program.input(kStateSlots), bytes + state_slots_offset_);
  if (prompt_length_offset_ >= 0) program.bind_input(program.input(kPromptLength), bytes + prompt_length_offset_);
  if (previous_hidden_offset_ >= 0) program.bind_input(program.input(kPreviousHidden), bytes + previous_hidden_offset_);
  for (const WindowPart& window : windows_) {
    program.bind_input(window.table_input, bytes + window.table_offset);
    program.bind_input(window.slots_input, bytes + window.slots_offset);
  }
}

StepDescriptor::StepDescriptor(std::shared_ptr<Device> device, int64_t size_bytes, const modules::CacheSpec& cache,
                               int64_t vocab)
    : device_(std::move(device)),
      device_buffer_(device_->allocate(size_bytes)),
      block_size_(cache.block_size),
      windows_(cache.windows),
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
  set_symbols();
}

void StepDescriptor::set_symbols() {
  symbols_ = layout_->bounds();
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
    part<int32_t>(StepLayout::positions)[first + t] =
        sequence.positions.empty() ? cached + t : sequence.positions[static_cast<size_t>(t)];
    part<int64_t>(StepLayout::slots)[first + t] = sequence.slot(cached + t, block_size_);
  }
  if (!windows_.empty()) add_windows(sequence);
  if (const int64_t slots = layout_->state_slots_offset(); slots >= 0)
    at<int32_t>(slots)[sequences_] = sequence.state_slot;
  if (const int64_t offset = layout_->prompt_length_offset(); offset >= 0)
    at<int32_t>(offset)[sequences_] = sequence.sampling.prompt_length;
  if (const int64_t offset = layout_->previous_hidden_offset(); offset >= 0)
    std::copy(sequence.hidden.begin(), sequence.hidden.end(), host_ + offset + first * layout_->hidden_row_bytes());
  part<int32_t>(StepLayout::query_start)[sequences_ + 1] = first + length;
  part<int32_t>(StepLayout::kv_length)[sequences_] = cached + length;
  tokens_ += length;
  ++sequences_;
  for (size_t i = 0; i < sequence.scored.size(); ++i) {
    const auto t = static_cast<int32_t>(sequence.scored_begin + static_cast<int64_t>(i));
    part<int32_t>(StepLayout::logit_rows)[rows_] = first + t;
    SampleRow& row = part<SampleRow>(StepLayout::sample_rows)[rows_++];
    row = {.settings = {.top_logprobs = sequence.scored_top_logprobs},
           .position = cached + t + 1,
           .forced = sequence.scored[i]};
  }
  if (!sequence.samples) return;
  const auto sampled = static_cast<int32_t>(length - sequence.num_sampled_rows());
  for (int32_t t = all_logits ? 0 : sampled; t < length; ++t) {
    part<int32_t>(StepLayout::logit_rows)[rows_] = first + t;
    part<SampleRow>(StepLayout::sample_rows)[rows_] = {.settings = sequence.sampling,
                                                       .position = cached + t + 1 + sequence.ahead};
    if (t >= sampled) add_row(sequence, t, contents);
    ++rows_;
  }
}

// Lists what changes the logits behind token `token` of the sequence's new ones.
void StepDescriptor::add_row(const StepSequence& sequence, int32_t token, const CacheContents& contents) {
  SampleRow& row = part<SampleRow>(StepLayout::sample_rows)[rows_];
  const auto tokens = sequence.tokens.first(static_cast<size_t>(token) + 1);
  if (!sequence.biases.empty() || !sequence.bad_words.empty()) add_biases(sequence, tokens, row, contents);
  if (sequence.sampling.has_penalties()) add_penalties(sequence, tokens, row, contents);
  if (!sequence.allowed.empty()) add_mask(sequence.allowed, row);
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
  for (size_t g = 0; g < windows_.size(); ++g) {
    const StepLayout::WindowPart& window = layout_->windows()[g];
    at<int32_t>(window.table_offset)[s * layout_->bounds()[Symbol::max_blocks]] =
        static_cast<int32_t>(windows_[g].null_block());
    at<int64_t>(window.slots_offset)[t] = -1;
  }
  if (const int64_t slots = layout_->state_slots_offset(); slots >= 0) at<int32_t>(slots)[s] = -1;
  if (const int64_t offset = layout_->prompt_length_offset(); offset >= 0) at<int32_t>(offset)[s] = 0;
}

void StepDescriptor::add_windows(const StepSequence& sequence) {
  const int64_t begin = sequence.cached, end = begin + std::ssize(sequence.tokens);
  const int64_t places = (end + block_size_ - 1) / block_size_;
  for (size_t g = 0; g < windows_.size(); ++g) {
    const StepLayout::WindowPart& part = layout_->windows()[g];
    const std::vector<int32_t>& blocks = sequence.windows[g];
    const int64_t first = std::max<int64_t>(0, begin - windows_[g].window + 1) / block_size_;
    int32_t* const table = at<int32_t>(part.table_offset) + sequences_ * layout_->bounds()[Symbol::max_blocks];
    // Kernels may look at whole chunks of positions, so that what the window has passed must exist.
    std::fill(table, table + first, static_cast<int32_t>(windows_[g].null_block()));
    std::copy(blocks.begin() + first, blocks.begin() + places, table + first);
    int64_t* const slots = at<int64_t>(part.slots_offset) + tokens_;
    for (int64_t position = begin; position < end; ++position)
      slots[position - begin] =
          blocks[static_cast<size_t>(position / block_size_)] * block_size_ + position % block_size_;
  }
}

// Lists the biases that hold for the token that the row draws, behind `tokens` of the new ones.
void StepDescriptor::add_biases(const StepSequence& sequence, std::span<const int32_t> tokens, SampleRow& row,
                                const CacheContents& contents) {
  int32_t* const pairs = part<int32_t>(StepLayout::penalties);
  const int64_t generated = row.position - sequence.sampling.prompt_length;
  row.biases_begin = static_cast<int32_t>(pairs_);
  for (const TokenBias& each : sequence.biases) {
    if (generated < each.begin || generated >= each.end) continue;
    pairs[2 * pairs_] = each.token;
    pairs[2 * pairs_ + 1] = std::bit_cast<int32_t>(each.bias);
    ++pairs_;
  }
  if (!sequence.bad_words.empty()) add_bad_words(sequence, tokens, row, contents);
  row.biases_end = static_cast<int32_t>(pairs_);
}

// Bans the tokens that would complete a bad word behind `tokens` of the new ones. A token has one bias.
void StepDescriptor::add_bad_words(const StepSequence& sequence, std::span<const int32_t> tokens, const SampleRow& row,
                                   const CacheContents& contents) {
  int32_t* const pairs = part<int32_t>(StepLayout::penalties);
  const auto begin = static_cast<int64_t>(row.biases_begin);
  for (int64_t pair = begin; pair < pairs_; ++pair)
    pair_of_token_[static_cast<size_t>(pairs[2 * pair])] = static_cast<int32_t>(pair);
  const std::span<const int32_t> blocks = sequence.used_blocks(block_size_);
  const int64_t length = sequence.cached + std::ssize(tokens);
  const auto at = [&](int64_t place) {
    return place < sequence.cached ? contents.token(blocks, place)
                                   : tokens[static_cast<size_t>(place - sequence.cached)];
  };
  for (const std::vector<int32_t>& word : sequence.bad_words) {
    int64_t place = length - (std::ssize(word) - 1);
    if (place < 0) continue;
    const bool begun = std::all_of(word.begin(), word.end() - 1, [&](int32_t token) { return at(place++) == token; });
    if (!begun) continue;
    int32_t& pair = pair_of_token_[static_cast<size_t>(word.back())];
    if (pair < 0) {
      pair = static_cast<int32_t>(pairs_++);
      pairs[2 * pair] = word.back();
    }
    pairs[2 * pair + 1] = std::bit_cast<int32_t>(kNeverSampled);
  }
  for (int64_t pair = begin; pair < pairs_; ++pair) pair_of_token_[static_cast<size_t>(pairs[2 * pair])] = -1;
}

void StepDescriptor::add_mask(std::span<const int32_t> words, SampleRow& row) {
  int32_t* const pairs = part<int32_t>(StepLayout::penalties);
  row.allowed_begin = static_cast<int32_t>(pairs_);
  std::copy(words.begin(), words.end(), pairs + 2 * pairs_);
  pairs_ += kernels::mask_pairs(std::ssize(pair_of_token_));
}

// Lists the distinct tokens of a sequence, `tokens` of the new ones, with the number of times that each was generated.
void StepDescriptor::add_penalties(const StepSequence& sequence, std::span<const int32_t> tokens, SampleRow& row,
                                   const CacheContents& contents) {
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
  for (int64_t position = sequence.cached; int32_t token : tokens) count(token, position++);
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

template <typename Visit>
void StepDescriptor::each_range(const Visit& visit) {
  const int64_t i32 = sizeof(int32_t), i64 = sizeof(int64_t),
                table = sequences_ * layout_->bounds()[Symbol::max_blocks];
  const int64_t sizes[StepLayout::kNumParts] = {tokens_ * i32,
                                                tokens_ * i32,
                                                tokens_ * i64,
                                                (sequences_ + 1) * i32,
                                                sequences_ * i32,
                                                rows_ * i32,
                                                rows_ * static_cast<int64_t>(sizeof(SampleRow)),
                                                table * i32,
                                                pairs_ * 2 * i32};
  for (size_t p = 0; p < StepLayout::kNumParts; ++p)
    visit(host_ + layout_->offset(static_cast<StepLayout::Part>(p)), sizes[p]);
  for (const StepLayout::WindowPart& window : layout_->windows()) {
    visit(host_ + window.table_offset, table * i32);
    visit(host_ + window.slots_offset, tokens_ * i64);
  }
  for (const int64_t offset : {layout_->state_slots_offset(), layout_->prompt_length_offset()})
    if (offset >= 0) visit(host_ + offset, sequences_ * i32);
  if (const int64_t offset = layout_->previous_hidden_offset(); offset >= 0)
    visit(host_ + offset, tokens_ * layout_->hidden_row_bytes());
}

void StepDescriptor::put(RankChannel& channel) {
  for (int64_t count : {tokens_, sequences_, rows_, pairs_}) channel.put(count);
  each_range([&](const std::byte* data, int64_t size_bytes) { channel.put_bytes(data, size_bytes); });
}

void StepDescriptor::take(const StepLayout& layout, RankChannel& channel) {
  layout_ = &layout;
  for (int64_t* count : {&tokens_, &sequences_, &rows_, &pairs_}) *count = channel.take<int64_t>();
  each_range([&](std::byte* data, int64_t size_bytes) { channel.take_bytes(data, size_bytes); });
  set_symbols();
}

}  // namespace eadem::engine
