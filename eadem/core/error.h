// SPDX-License-Identifier: Apache-2.0
//
// Errors. What a user can cause (a bad file, a long prompt, no memory) throws one of the types below
// at the edge of an operation. What only we can cause is EADEM_CHECK, the one place that may abort.
//
// A message holds both values and the place to look:
//   model.safetensors: 'layers.3.wq' is [4096, 4000]; config.json implies [4096, 4096]
#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace eadem {

// The root of everything this library throws. `kind()` is the stable name that Python and HTTP map from.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual const char* kind() const noexcept { return "Error"; }
};

#define EADEM_DEFINE_ERROR(Name)                                                                 \
  class Name : public Error {                                                                    \
   public:                                                                                       \
    explicit Name(const std::string& message) : Error(message) {}                                \
    template <typename First, typename... Rest>                                                  \
    Name(fmt::format_string<First, Rest...> format, First&& first, Rest&&... rest)               \
        : Error(fmt::format(format, std::forward<First>(first), std::forward<Rest>(rest)...)) {} \
    const char* kind() const noexcept override { return #Name; }                                 \
  }

EADEM_DEFINE_ERROR(InvalidArgument);  // a value the caller passed is out of its range
EADEM_DEFINE_ERROR(NotFound);         // a file, tensor, parameter or device that is not there
EADEM_DEFINE_ERROR(Unsupported);      // valid, but nothing here can do it
EADEM_DEFINE_ERROR(DataCorrupted);    // a file that contradicts its format or itself
EADEM_DEFINE_ERROR(OutOfMemory);      // host, device or cache memory
EADEM_DEFINE_ERROR(IoError);          // the operating system refused a read or a write
EADEM_DEFINE_ERROR(DeviceError);      // a device reported a failure
EADEM_DEFINE_ERROR(Cancelled);        // the user asked to stop
EADEM_DEFINE_ERROR(RankFailed);       // another rank of the mesh failed, so this one cannot go on

#undef EADEM_DEFINE_ERROR

namespace detail {
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);
}  // namespace detail

// An invariant that only a bug in Eadem can break. Prints the condition, the formatted values and the
// place, then aborts.
#define EADEM_CHECK(condition, ...)                                                              \
  do {                                                                                           \
    if (!(condition)) [[unlikely]]                                                               \
      ::eadem::detail::check_failed(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)); \
  } while (false)

// EADEM_CHECK of a place that only a bug in Eadem can reach. The compiler knows that it does not return.
#define EADEM_UNREACHABLE(...) \
  ::eadem::detail::check_failed(__FILE__, __LINE__, "unreachable", ::fmt::format(__VA_ARGS__))

}  // namespace eadem
