// SPDX-License-Identifier: Apache-2.0
//
// Shows an answer while it comes: the answer proper on stdout, the reasoning before it, dimmed, on stderr.
#pragma once

#include <string_view>
#include <utility>

#include "eadem/cli/terminal.h"
#include "eadem/core/error.h"
#include "eadem/engine/text/reasoning.h"

namespace eadem::cli {

class AnswerPrinter {
 public:
  AnswerPrinter() = default;
  ~AnswerPrinter() {  // an answer that failed
    try {
      end();
    } catch (const Error&) {  // stdout is gone, which the failure said or the end of the program will say
    }
  }
  AnswerPrinter(const AnswerPrinter&) = delete;
  AnswerPrinter& operator=(const AnswerPrinter&) = delete;

  void show(const engine::ReasoningSplitter::Piece& piece) {
    if (!piece.reasoning.empty()) {
      print_error(dim_error(piece.reasoning));
      in_reasoning_ = true;
    }
    if (piece.content.empty()) return;
    end_reasoning("\n\n");
    print(piece.content, true);
    has_content_ = true;
  }
  // Ends the answer's last line, if there is one.
  void end() {
    end_reasoning("\n");
    if (std::exchange(has_content_, false)) print("\n", true);
  }

 private:
  void end_reasoning(std::string_view line_ends) {
    if (std::exchange(in_reasoning_, false)) print_error(line_ends);
  }

  bool in_reasoning_ = false, has_content_ = false;
};

}  // namespace eadem::cli
