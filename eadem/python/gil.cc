// SPDX-License-Identifier: Apache-2.0
#include "eadem/python/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "eadem/core/error.h"

namespace nb = nanobind;

namespace eadem::python {

namespace {

constexpr auto kLookInterval = std::chrono::milliseconds(5);

std::atomic<bool> ending{false};
std::atomic<std::thread::id> ending_thread{};  // the thread that ends the interpreter
std::atomic<int> calls_under_way{0};

// Stops a thread of an interpreter that does not need it any more. The thread keeps all objects on its stack alive.
[[noreturn]] void stop_for_good() {
  nb::set_leak_warnings(false);  // this thread still holds objects
  while (true) ::pause();
}

bool is_abandoned() { return ending.load() && std::this_thread::get_id() != ending_thread.load(); }

// Called by atexit, with the GIL.
void end_calls() {
  // Daemon threads stop wherever they are, with the objects of their frames.
  if (nb::cast<int>(nb::module_::import_("threading").attr("active_count")()) > 1) nb::set_leak_warnings(false);
  ending_thread = std::this_thread::get_id();
  ending = true;
  while (calls_under_way.load() > 0) {
    PyThreadState* const state = PyEval_SaveThread();
    std::this_thread::sleep_for(kLookInterval);
    PyEval_RestoreThread(state);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

}  // namespace

const std::atomic<bool>* call_cancel() {
  return std::this_thread::get_id() == ending_thread.load() ? nullptr : &ending;
}

void stop_if_abandoned() {
  if (is_abandoned()) throw Cancelled("the interpreter ends");
}

GilRelease::GilRelease() {
  calls_under_way.fetch_add(1);
  state_ = PyEval_SaveThread();
  if (is_abandoned()) {  // a daemon thread that calls while the interpreter ends
    calls_under_way.fetch_sub(1);
    stop_for_good();
  }
}

GilRelease::~GilRelease() {
  const bool abandoned = is_abandoned();
  calls_under_way.fetch_sub(1);
  if (abandoned) stop_for_good();
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {  // CPython ends this thread
    stop_for_good();
  }
}

GilAcquire::GilAcquire() {
  try {
    state_ = PyGILState_Ensure();
  } catch (...) {  // CPython ends this thread
    stop_for_good();
  }
}

GilAcquire::~GilAcquire() { PyGILState_Release(state_); }

void wait_for_calls_at_exit() {
  // The child of a fork has none of its parent's other threads, but all locks that they held.
  pthread_atfork(nullptr, nullptr, [] {
    if (calls_under_way.exchange(0) > 0) nb::set_leak_warnings(false);
  });
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&end_calls));
}

}  // namespace eadem::python
