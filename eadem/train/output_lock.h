// SPDX-License-Identifier: Apache-2.0
//
// One run at a time writes an output directory.
#pragma once

#include <string>

#include "eadem/core/log.h"

namespace eadem::train {

// Holds `directory`/lock for as long as it lives. The system lets go of it when the process ends, however it ends; the
// file stays, and says who held it last.
class OutputLock {
 public:
  // Throws IoError naming the process that holds it. On a file system without locks the run goes on with a warning.
  OutputLock(const std::string& directory, const Logger& log);
  ~OutputLock();
  OutputLock(const OutputLock&) = delete;
  OutputLock& operator=(const OutputLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace eadem::train
