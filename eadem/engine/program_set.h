// SPDX-License-Identifier: Apache-2.0
//
// ProgramSet: the programs that run a model's steps, one for each shape bucket. They share parameters, states, one
// buffer for what a step reads and one arena for what it computes.
//
//   prefill      any step
//   decode       steps of few tokens; its activations fit the processor's caches
//   decode of n  one new token of each of n sequences, on a device that records: a step of fewer sequences is filled up
//                to n, so that its kernels are launched as they were recorded. Compiled on first use.
//
// One thread at a time may use a set.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "eadem/engine/step_descriptor.h"
#include "eadem/pipeline/program.h"

namespace eadem::engine {

// A program, where its inputs lie, and the handles of its outputs.
struct StepProgram {
  std::unique_ptr<pipeline::Program> program;
  StepLayout layout;
  // mtp_hidden: what a module for multi-token prediction reads; it is `hidden` of most models.
  pipeline::ValueId hidden = pipeline::kNoValue, mtp_hidden = pipeline::kNoValue, logits = pipeline::kNoValue,
                    token = pipeline::kNoValue, logprob = pipeline::kNoValue, top_token = pipeline::kNoValue,
                    top_logprob = pipeline::kNoValue;
  pipeline::ValueId sampled_logits = pipeline::kNoValue;  // what ops::Sample reads
  StepKind kind = StepKind::prefill;
  bool filled_up = false;  // its steps have the extents of the bounds
};

class ProgramSet {
 public:
  struct Options {
    std::function<pipeline::Graph()> make_graph;
    pipeline::Environment environment;  // without bounds
    SymbolValues prefill_bounds, decode_bounds;
    modules::CacheSpec cache;
    // Called with each new program, to bind its states. Not called for programs that cannot run.
    std::function<void(pipeline::Program&)> bind_states = {};
    // Of prefill and decode (Program::compile).
    pipeline::Program::BeforeAllocation before_allocation = {};
  };

  // Compiles prefill and decode together (Program::compile). A program whose device lacks a kernel can be explained but
  // not run.
  ProgramSet(Options options, std::shared_ptr<pipeline::ParameterStore> parameters);

  const StepProgram& prefill() const { return *programs_[0]; }
  const StepProgram& decode() const { return *programs_[1]; }
  // All that are compiled: prefill, decode, and decode of n in the order of their first use.
  const std::vector<std::unique_ptr<StepProgram>>& programs() const { return programs_; }
  // Bytes for what a step reads, with room for the largest program.
  int64_t step_bytes() const;

  // The smallest program that a step fits.
  const StepProgram& program_for(int64_t tokens, int64_t logit_rows) const;
  // The program of n sequences that a step of one new token of each of `sequences` sequences is filled up to, or null
  // where that brings nothing.
  const StepProgram* filled_up_program_for(int64_t sequences);
  // Makes the programs, also later ones, read their inputs from `step_data`, which has step_bytes(), and keep the
  // sampled tokens of the last step in `sampled`, i32 [most logit rows]. Both must outlive the set.
  void bind(void* step_data, void* sampled);

  // The number of sequences that decode of n is compiled for: 1, 2, 4, and multiples of 8, at most `most`.
  static int64_t bucket_of(int64_t sequences, int64_t most);

 private:
  std::unique_ptr<StepProgram> step_program(std::unique_ptr<pipeline::Program> program, StepKind kind) const;
  void bind(StepProgram& program) const;

  Options options_;
  std::shared_ptr<pipeline::ParameterStore> parameters_;
  std::vector<std::unique_ptr<StepProgram>> programs_;
  std::vector<const StepProgram*> filled_up_;  // by number of sequences
  void* step_data_ = nullptr;
  void* sampled_ = nullptr;
};

}  // namespace eadem::engine
