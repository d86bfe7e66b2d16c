// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "eadem/core/machine/isa.h"
#include "eadem/python/binding.h"

NB_MODULE(_eadem, m) {
  namespace nb = nanobind;
  m.doc() = "The C++ engine. Use the package `eadem`; what is here may change with any version.";
  m.attr("VERSION") = EADEM_VERSION;  // the stub has no names with underscores
  eadem::python::wait_for_calls_at_exit();
  eadem::python::bind_errors(m);
  m.def("list_devices", &eadem::list_devices, nb::call_guard<eadem::python::GilRelease>(),
        "Names of the devices that this build can open here, the best last.");
  m.def(
      "available_isas",
      [] {
        std::vector<std::string> names;
        for (eadem::Isa isa : eadem::available_isas()) names.emplace_back(eadem::isa_name(isa));
        return names;
      },
      "CPU instruction sets that this machine can run and this build contains, the best first.");
  eadem::python::bind_config(m);
  eadem::python::bind_engine(m);
  eadem::python::bind_ranks(m);
  eadem::python::bind_llm(m);
  eadem::python::bind_sequential(m);
  eadem::python::bind_trainer(m);
  eadem::python::bind_convert(m);
}
