// SPDX-License-Identifier: Apache-2.0
//
// The interpreter's lock, for calls that other threads may make while the interpreter ends.
//
// A thread that takes the lock of an interpreter that is being torn down never gets it: CPython ends it on the spot, by
// unwinding its stack, which C++ answers with std::terminate. These two stop such a thread for good instead, as newer
// versions of CPython (3.14) do by themselves; the process ends around it. And before it comes to that, when the
// interpreter begins to end, calls that are under way are asked to stop and waited for (wait_for_calls_at_exit).
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

namespace eadem::python {

// What this thread's calls look at to be cancelled: set when another thread begins to end the interpreter. Null on that
// thread itself, whose calls run as ever.
const std::atomic<bool>* call_cancel();
// Throws Cancelled then.
void stop_if_abandoned();

// Gives the lock up until the object dies. A call into the engine is under way for so long.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the lock until the object dies.
class GilAcquire {
 public:
  GilAcquire();
  ~GilAcquire();
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

// Registers with Python's atexit. The wait ends early with Ctrl-C.
void wait_for_calls_at_exit();

}  // namespace eadem::python
