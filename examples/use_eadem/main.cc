// SPDX-License-Identifier: Apache-2.0
//
// use_eadem MODEL PROMPT: continues the prompt by its 20 most probable tokens, one after another.
#include <cstdio>

#include "eadem/engine/llm.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: use_eadem MODEL PROMPT\n");
    return 2;
  }
  try {
    eadem::engine::LLM llm(argv[1], eadem::open_device("cpu"), {});
    const auto completions = llm.generate({argv[2]}, {.temperature = 0, .max_tokens = 20});
    std::printf("%s%s\n", argv[2], completions[0].text.c_str());
  } catch (const eadem::Error& error) {
    std::fprintf(stderr, "use_eadem: %s\n", error.what());
    return 1;
  }
}
