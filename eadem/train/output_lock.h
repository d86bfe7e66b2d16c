// SPDX-License-Identifier: Apache-2.0
//
// One run at a time writes an output directory.
#pragma once

#include <string>

#include "eadem/core/log.h"

namespace eadem::train {

// Holds `directory`/lock for as long as the object lives. The system releases the lock when the process ends in any
// way. The file stays and names the process that held the lock last.
class OutputLock {
 public:
  // Throws IoError naming the process that holds the lock. On a file system without locks, it warns and the run
  // continues.
  OutputLock(const std::string& directory, const Logger& log);
  ~OutputLock();
  OutputLock(const OutputLock&) = delete;
  OutputLock& operator=(const OutputLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace eadem::train
