// SPDX-License-Identifier: Apache-2.0
//
// The GIL, for calls that other threads may make while the interpreter ends.
//
// A thread that requests the GIL of an interpreter in its teardown never gets it: CPython ends the thread by unwinding
// its stack, which C++ answers with std::terminate. GilRelease and GilAcquire block such a thread for good instead, as
// CPython does itself from 3.14 on, and the process ends around it. Before that, when the interpreter begins to end,
// running calls are cancelled and waited for (wait_for_calls_at_exit).
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

namespace eadem::python {

// The cancel flag of this thread's calls, which is set when another thread begins to end the interpreter. Null on the
// ending thread, whose calls run normally.
const std::atomic<bool>* call_cancel();
// Throws Cancelled if the flag is set.
void stop_if_abandoned();

// Releases the GIL until the object dies. A call into the engine is under way for that time.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the GIL until the object dies.
class GilAcquire {
 public:
  GilAcquire();
  ~GilAcquire();
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

// Registers with Python's atexit. Ctrl-C ends the wait early.
void wait_for_calls_at_exit();

}  // namespace eadem::python
