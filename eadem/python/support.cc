// SPDX-License-Identifier: Apache-2.0
//
// Errors, names, threads and signals.
#include <nanobind/stl/string.h>

#include <filesystem>
#include <functional>
#include <new>
#include <system_error>

#include "eadem/core/error.h"
#include "eadem/python/bindings.h"

namespace eadem::python {

namespace {

// The one place where C++ errors become Python's: the class of eadem.errors that is called like the kind.
void set_error(const char* kind, const char* message) {
  try {
    const nb::object type = nb::module_::import_("eadem.errors").attr(kind);
    PyErr_SetString(type.ptr(), message);
  } catch (nb::python_error& error) {
    error.restore();
  }
}

void translate(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    set_error(error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    set_error("OutOfMemory", "the host has no memory left");
  } catch (const std::system_error& error) {  // also of std::filesystem
    set_error("IoError", error.what());
  }
}

}  // namespace

void bind_errors(nb::module_& /*m*/) { nb::register_exception_translator(translate); }

DType dtype_of_name(const std::string& name, std::string_view argument) {
  const std::optional<DType> dtype = dtype_from_name(name);
  if (!dtype || (*dtype != DType::f32 && *dtype != DType::bf16 && *dtype != DType::f16))
    throw InvalidArgument("{} is \"{}\"; expected f32, bf16 or f16", argument, name);
  return *dtype;
}

std::optional<DType> optional_dtype(const std::optional<std::string>& name, std::string_view argument) {
  if (!name) return std::nullopt;
  return dtype_of_name(*name, argument);
}

std::string path_of(nb::handle path) {
  return nb::cast<std::string>(nb::module_::import_("os").attr("fsdecode")(path));
}

std::string resolve_model(nb::handle model) {
  return nb::cast<std::string>(nb::module_::import_("eadem._bundled").attr("resolve")(model));
}

Exclusive::Use::Use(Exclusive& exclusive, const char* what) : exclusive_(exclusive) {
  if (exclusive.user_.load() == std::this_thread::get_id())
    throw InvalidArgument("{} is called from a callback of its own object's call", what);
  if (!exclusive.mutex_.try_lock()) {
    const nb::gil_scoped_release released;
    exclusive.mutex_.lock();
  }
  exclusive.user_.store(std::this_thread::get_id());
}

Exclusive::Use::~Use() {
  exclusive_.user_.store({});
  exclusive_.mutex_.unlock();
}

void SignalPoll::poll() {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_ < std::chrono::milliseconds(50)) return;
  const nb::gil_scoped_acquire acquired;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  last_ = std::chrono::steady_clock::now();
}

std::function<void(int64_t, int64_t)> load_progress(const std::optional<nb::object>& progress) {
  // A raw handle: the function may be copied and destroyed without the GIL. The caller holds the object.
  const nb::handle callback = progress ? nb::handle(*progress) : nb::handle();
  return [callback, poll = std::make_shared<SignalPoll>()](int64_t done, int64_t total) {
    poll->poll();
    if (!callback.is_valid()) return;
    const nb::gil_scoped_acquire acquired;
    callback(done, total);
  };
}

}  // namespace eadem::python
