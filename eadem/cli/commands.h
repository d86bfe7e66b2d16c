// SPDX-License-Identifier: Apache-2.0
//
// The commands of the program, one source file each. Each takes the arguments after its name and returns the exit code.
// It throws UsageError for bad usage and eadem::Error for failures.
#pragma once

#include <span>
#include <string>

namespace eadem::cli {

using CommandLine = std::span<const std::string>;

int run(CommandLine arguments);
int chat(CommandLine arguments);
int inspect(CommandLine arguments);
int explain(CommandLine arguments);
int bench(CommandLine arguments);
int perplexity(CommandLine arguments);
int train(CommandLine arguments);
int tokenizer(CommandLine arguments);
int convert(CommandLine arguments);
int doctor(CommandLine arguments);

}  // namespace eadem::cli
