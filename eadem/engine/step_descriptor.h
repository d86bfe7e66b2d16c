// SPDX-License-Identifier: Apache-2.0
//
// StepDescriptor: everything that a step reads, laid out in one buffer with one upload a step. Its parts are the inputs
// of a program; each lies where it would lie in a step of the program's largest size, so that neither an address nor a
// stride changes from step to step.
//
//   token_ids    i32 [tokens]              the new tokens of all sequences, packed
//   positions    i32 [tokens]
//   slots        i64 [tokens]              block * block_size + offset
//   query_start  i32 [sequences + 1]       where each sequence begins among the tokens
//   kv_length    i32 [sequences]           tokens in the cache after the step
//   logit_rows   i32 [logit_rows]          the tokens whose logits are wanted
//   sample_rows  SampleRow [logit_rows]    the sampling parameters of each row
//   block_table  i32 [sequences, max_blocks]
//   of each cache group with a window, block_table_window_… and slots_window_… alike, with the group's null block for
//   places that the window has passed
//   state_slots  i32 [sequences], where the model has states per sequence
//   prompt_length  i32 [sequences], where the model's latent attention asks for it
//   previous_hidden  [tokens, hidden], where the model reads hidden states besides tokens
//   penalties    i32 [penalties, 2]        pairs (token, count) and (token, bias), and masks; the rows name their
//   ranges
//
// Where the device's memory is the host's (the CPU), the parts are written where the program reads them and nothing is
// copied. One thread at a time may use a descriptor. Nothing allocates after construction.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/engine/cache/cache_contents.h"
#include "eadem/engine/rank_channel.h"
#include "eadem/engine/step_sequence.h"
#include "eadem/modules/state_spec.h"
#include "eadem/pipeline/program.h"

namespace eadem::engine {

// Where the parts lie in the buffer for one program.
class StepLayout {
 public:
  enum Part : uint8_t {
    token_ids,
    positions,
    slots,
    query_start,
    kv_length,
    logit_rows,
    sample_rows,
    block_table,
    penalties,
    kNumParts,
  };

  StepLayout() = default;
  // `cache`: that of the program's states.
  explicit StepLayout(const pipeline::Program& program, const modules::CacheSpec& cache = {});

  int64_t offset(Part part) const { return offset_[part]; }
  // The places of the window groups, in their order.
  struct WindowPart {
    pipeline::ValueId table_input, slots_input;
    int64_t table_offset, slots_offset;
  };
  std::span<const WindowPart> windows() const { return windows_; }
  // The offset of state_slots; negative: there is none.
  int64_t state_slots_offset() const { return state_slots_offset_; }
  // The offset of prompt_length; negative: there is none.
  int64_t prompt_length_offset() const { return prompt_length_offset_; }
  // The offset of previous_hidden; negative: there is none. And the bytes of one of its rows, 0 then.
  int64_t previous_hidden_offset() const { return previous_hidden_offset_; }
  int64_t hidden_row_bytes() const { return hidden_row_bytes_; }
  int64_t size_bytes() const { return size_; }
  const SymbolValues& bounds() const { return bounds_; }
  // Makes the program read its inputs from `buffer`, which has size_bytes() and must outlive it.
  void bind(pipeline::Program& program, void* buffer) const;

 private:
  int64_t place(const pipeline::Program& program, pipeline::ValueId input);

  std::array<int64_t, kNumParts> offset_{};
  std::vector<WindowPart> windows_;
  int64_t state_slots_offset_ = -1, prompt_length_offset_ = -1, previous_hidden_offset_ = -1;
  int64_t hidden_row_bytes_ = 0;
  int64_t size_ = 0;
  SymbolValues bounds_;
};

class StepDescriptor {
 public:
  // `size_bytes`: of the largest layout.
  StepDescriptor(std::shared_ptr<Device> device, int64_t size_bytes, const modules::CacheSpec& cache, int64_t vocab);

  void* device_data() { return device_buffer_.data(); }
  // Lays out a checked plan. With `all_logits` every token gets a row of logits, else the last one of each sequence
  // that samples, the proposed ones, and those before scored ones. `contents` has the cached tokens, which penalties
  // count. With `fill_up`, sequences of one token that is stored nowhere follow, as many as the layout has room for.
  void fill(const StepLayout& layout, std::span<const StepSequence> plan, bool all_logits,
            const CacheContents& contents, bool fill_up = false);
  // Copies what was laid out to the device, at once.
  void upload();
  // Puts what was laid out into a message of rank 0, and lays it out on another rank, whose programs are alike.
  void put(RankChannel& channel);
  void take(const StepLayout& layout, RankChannel& channel);

  // Returns the extents of the plan that was laid out last. max_blocks and penalties have the values of the layout's
  // bounds, because the strides never change.
  const SymbolValues& symbols() const { return symbols_; }
  int64_t num_uploads() const { return num_uploads_; }

 private:
  template <typename T>
  T* part(StepLayout::Part part) {
    return at<T>(layout_->offset(part));
  }
  template <typename T>
  T* at(int64_t offset) {
    return reinterpret_cast<T*>(host_ + offset);
  }
  // Calls visit(data, size_bytes) for each range of the buffer that the step reads.
  template <typename Visit>
  void each_range(const Visit& visit);
  void set_symbols();
  void add_sequence(const StepSequence& sequence, bool all_logits, const CacheContents& contents);
  void add_nothing();
  void add_windows(const StepSequence& sequence);
  void add_row(const StepSequence& sequence, int32_t token, const CacheContents& contents);
  void add_biases(const StepSequence& sequence, std::span<const int32_t> tokens, kernels::SampleRow& row,
                  const CacheContents& contents);
  void add_bad_words(const StepSequence& sequence, std::span<const int32_t> tokens, const kernels::SampleRow& row,
                     const CacheContents& contents);
  void add_mask(std::span<const int32_t> words, kernels::SampleRow& row);
  void add_penalties(const StepSequence& sequence, std::span<const int32_t> tokens, kernels::SampleRow& row,
                     const CacheContents& contents);

  std::shared_ptr<Device> device_;
  Buffer device_buffer_;
  std::vector<std::byte> host_copy_;  // empty where the host writes to the device's memory
  std::byte* host_;
  int64_t block_size_;
  std::vector<modules::WindowGroup> windows_;
  std::vector<int32_t> pair_of_token_;  // [vocab] index of the row's pair for a token, or -1

  const StepLayout* layout_ = nullptr;
  SymbolValues symbols_;
  int64_t tokens_ = 0, sequences_ = 0, rows_ = 0, pairs_ = 0;  // laid out so far
  int64_t num_uploads_ = 0;
};

}  // namespace eadem::engine
