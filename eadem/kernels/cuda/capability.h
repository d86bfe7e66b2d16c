// SPDX-License-Identifier: Apache-2.0
//
// Which kernels a card runs. A program has generic kernels, compiled for one or more architectures, and, if it was
// compiled for 9.0a, kernels for Hopper (backend.cmake lists them). Code of an architecture runs on cards of its major
// version and at least its minor one, so that 8.0 serves 8.6 and 8.9; code of 9.0a runs on 9.0 alone.
//
// Capabilities are one number: 90 for compute capability 9.0. Pure functions; no CUDA header is needed.
#pragma once

#include <fmt/format.h>

#include <string>

namespace eadem::kernels::cuda {

inline constexpr int kLeastCapability = 80;  // Ampere: bf16 on tensor cores, asynchronous copies
inline constexpr int kHopperCapability = 90;

struct Capability {
  int card = 0;
  // That the generic kernels were compiled for which the driver takes for this card; 0: it takes none.
  int code = 0;
  bool has_hopper_kernels = false;  // whether the program has them
};

inline std::string capability_name(int capability) { return fmt::format("{}.{}", capability / 10, capability % 10); }

// Why the card runs no kernel of this program; empty if it does.
inline std::string refusal(const Capability& c) {
  if (c.card < kLeastCapability)
    return fmt::format("its compute capability is {}; {} (Ampere) or newer is needed", capability_name(c.card),
                       capability_name(kLeastCapability));
  if (c.code == 0)
    return fmt::format(
        "this program has no code for its compute capability, {}; configure with "
        "-DCMAKE_CUDA_ARCHITECTURES={}-real",
        capability_name(c.card), c.card);
  return {};
}

// Why the card runs none of the kernels for Hopper; empty if it does.
inline std::string hopper_refusal(const Capability& c) {
  if (c.card != kHopperCapability)
    return fmt::format("its compute capability is {}, not 9.0 (Hopper)", capability_name(c.card));
  if (c.code < kHopperCapability)
    return fmt::format("this program's code for it is of compute capability {}", capability_name(c.code));
  if (!c.has_hopper_kernels) return "this program was not compiled for 9.0a";
  return {};
}

}  // namespace eadem::kernels::cuda
