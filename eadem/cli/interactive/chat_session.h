// SPDX-License-Identifier: Apache-2.0
//
// ChatSession: a conversation with a person at a terminal: what is shown, and the commands beside /help and /bye.
#pragma once

#include <string>
#include <vector>

#include "eadem/cli/completion_text.h"
#include "eadem/cli/interactive/conversation.h"
#include "eadem/cli/interactive/session.h"
#include "eadem/cli/options/sampling_options.h"

namespace eadem::cli {

class ChatSession {
 public:
  // `sampling` has a seed: answer i is drawn with seed + i. The other two must outlive this.
  ChatSession(engine::LLM& llm, Conversation& conversation, SamplingOptions sampling, bool quiet);

  // Talks until the user leaves. Returns the exit code of converse().
  int run(const std::string& greeting);
  // The parameters in force: with one answer, whatever number the model's authors recommend.
  engine::SamplingParams params() const {
    engine::SamplingParams params = sampling_.over(llm_.default_params(), conversation_.context());
    params.n = 1;
    return params;
  }

 private:
  std::vector<SessionCommand> commands();
  // `turn` answers: Conversation::ask or retry.
  void show(const std::function<Turn(const engine::SamplingParams& params, const TurnEvents& events)>& turn);
  void report(const Turn& turn, const engine::SamplingParams& params);
  void set(std::string_view argument);
  void system(std::string_view argument);
  void save(std::string_view argument);
  void load(std::string_view argument);
  std::string stats() const;

  engine::LLM& llm_;
  Conversation& conversation_;
  SamplingOptions sampling_;
  bool quiet_;
  uint64_t answers_ = 0;
  SessionStats stats_;
  std::string file_;  // what /save or /load named last: it may be written over
};

}  // namespace eadem::cli
