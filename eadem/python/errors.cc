// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include <new>
#include <system_error>

#include "eadem/core/printable.h"
#include "eadem/python/binding.h"

namespace eadem::python {

namespace {

// Each kind of C++ error, the built-in class that its Python class also derives from, and its meaning.
struct Kind {
  const char* name;
  PyObject* builtin;  // null: none
  const char* doc;
};

std::vector<Kind> kinds() {
  return {{"InvalidArgument", PyExc_ValueError, "A value that the caller passed is out of its range."},
          {"NotFound", PyExc_FileNotFoundError, "A file, tensor, parameter or device that is not there."},
          {"Unsupported", PyExc_NotImplementedError, "Valid, but nothing here can do it."},
          {"DataCorrupted", PyExc_ValueError, "A file that contradicts its format or itself."},
          {"OutOfMemory", PyExc_MemoryError, "Host, device or cache memory ran out."},
          {"IoError", PyExc_OSError, "The operating system refused a read or a write."},
          {"DeviceError", PyExc_RuntimeError, "A device reported a failure."},
          {"Cancelled", nullptr, "The user asked to stop."},
          {"RankFailed", PyExc_RuntimeError, "Another rank of the mesh failed, so this one cannot go on."}};
}

// The only place that turns C++ errors into Python exceptions. `classes` is a dict from kind to class.
void raise_as_python(const std::exception_ptr& thrown, void* classes) {
  const auto raise = [classes](const char* kind, const char* message) {
    PyObject* type = PyDict_GetItemString(static_cast<PyObject*>(classes), kind);
    if (type == nullptr) type = PyDict_GetItemString(static_cast<PyObject*>(classes), "Error");
    // A message may quote bytes of a file, but Python takes only UTF-8, and tracebacks go to terminals.
    PyErr_SetString(type, printable(message).c_str());
  };
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    raise(error.kind(), error.what());
  } catch (const std::system_error& error) {  // also of std::filesystem
    raise("IoError", error.what());
  } catch (const std::bad_alloc&) {
    raise("OutOfMemory", "the host has no memory left");
  }
}

}  // namespace

void bind_errors(nb::module_& m) {
  nb::dict classes;
  // The classes are members of this module, so that its stub lists them; the package exports them as its own.
  const auto module_name = nb::cast<std::string>(m.attr("__name__"));
  const auto add = [&](const char* name, nb::handle bases, const char* doc) {
    const std::string path = module_name + "." + name;
    const nb::object type = nb::steal(PyErr_NewExceptionWithDoc(path.c_str(), doc, bases.ptr(), nullptr));
    if (!type.is_valid()) throw nb::python_error();
    m.attr(name) = type;
    classes[name] = type;
    return type;
  };
  const nb::object root = add("Error", PyExc_Exception, "The root of everything that Eadem raises.");
  for (const Kind& kind : kinds())
    add(kind.name,
        kind.builtin == nullptr ? nb::object(nb::make_tuple(root))
                                : nb::object(nb::make_tuple(root, nb::borrow(kind.builtin))),
        kind.doc);
  // The dict lives as long as the interpreter, because the translator does.
  nb::register_exception_translator(raise_as_python, classes.release().ptr());
}

}  // namespace eadem::python
