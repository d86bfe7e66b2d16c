// SPDX-License-Identifier: Apache-2.0
//
// Traces of a service: when requests came and how long they were, for `eadem bench --trace`. Two formats are known by
// their content:
//
//   CSV          the line TIMESTAMP,ContextTokens,GeneratedTokens, then one like 2023-11-16 18:15:46.6805900,374,44 for
//                each request; the time may end with Z or an offset such as +00:00
//                (Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md)
//   JSON lines   {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]} for each
//                request: milliseconds, and an id for each 512 tokens of the prompt, the last of which may be fewer;
//                equal ids stand for equal tokens (kvcache-ai/Mooncake, FAST25-release/traces)
//
// A trace has no text. Prompts are made of tokens that a hash draws: of the ids where there are any, so that requests
// begin alike where those of the trace did; otherwise of the request's place, so that none begins like another.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace eadem::cli {

struct TraceRequest {
  double seconds = 0;  // after the first request
  int64_t prompt_tokens = 1, generated_tokens = 1;
  std::vector<int64_t> blocks;  // ids of the prompt's blocks of Trace::block_tokens tokens
};

struct Trace {
  int64_t block_tokens = 0;  // 0: prompts have no ids
  std::vector<TraceRequest> requests;
};

// Throws DataCorrupted naming file, line and value: an unknown format, no request, a line of another form, a length
// below 1 or above 2^24, or a time before that of the line above. `file` is for messages only.
Trace parse_trace(std::string_view text, const std::string& file);
// Throws NotFound and IoError as well. At most 1 GiB.
Trace read_trace(const std::string& path);

// How a trace is fitted to a machine and a model.
struct TraceScale {
  int64_t requests = 0;  // the first so many of the trace; 0: all
  double rate = 1;       // they come so many times as fast
  int64_t divide = 1;    // prompts and answers are so many times shorter, rounded up
};

// The requests of a trace that are replayed, in the order in which they come.
class Workload {
 public:
  // Leaves out the requests that, divided, have more than `context` tokens. Throws InvalidArgument if none is left.
  Workload(Trace trace, const TraceScale& scale, int64_t context);

  const std::vector<TraceRequest>& requests() const { return requests_; }
  // Tokens below `vocab`: that at a place of a divided prompt is drawn from the id of the trace's block in which the
  // place lay, and the place.
  std::vector<int32_t> prompt(size_t index, int64_t vocab) const;

  int64_t trace_requests() const { return trace_requests_; }  // that the trace has
  int64_t left_out() const { return left_out_; }
  int64_t longest() const { return longest_; }  // tokens of a request, with its answer
  const TraceScale& scale() const { return scale_; }
  bool has_blocks() const { return block_tokens_ > 0; }

 private:
  TraceScale scale_;
  int64_t block_tokens_;
  int64_t trace_requests_, left_out_ = 0, longest_ = 0;
  std::vector<TraceRequest> requests_;
};

}  // namespace eadem::cli
