// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/shape.h"

#include <fmt/ranges.h>

namespace eadem {

std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape.dims(), ", ")); }

}  // namespace eadem
