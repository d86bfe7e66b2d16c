// SPDX-License-Identifier: Apache-2.0
//
// Kernel: how one device computes one pass of one op, or of a pattern of ops, in one sweep.
//
// A kernel states what it can take (`can_handle`), is chosen once when a pipeline compiles, and is then called with
// views that already satisfy what it stated. It never allocates, validates user input or reads globals; memory that
// it needs beyond its ports is asked for by `scratch_bytes` and planned like any other buffer.
//
// The ports of an op's passes are laid down in kernels/<op>.h, which also holds its attributes: that header is the
// contract between the op and every backend. By convention
//   forward    inputs: the op's inputs.   outputs: the op's outputs, then the extra tensors it saves.
//   inference  inputs: the op's inputs.   outputs: the op's outputs; may alias inputs where the op says so.
//   backward   inputs: the saved tensors in the op's order, then the gradient of each output.
//              outputs: the gradient of each input that has one. A view with null data is not wanted.
//              Gradients of parameters accumulate (+=), gradients of activations are written (=).
// Optional ports that are absent are views with null data.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/candidate.h"
#include "eadem/core/mesh.h"
#include "eadem/core/tensor.h"
#include "eadem/core/tensor_type.h"

namespace eadem::kernels {

enum class Pass : uint8_t { forward, backward, inference };

std::string_view pass_name(Pass pass);

// An op's attributes, passed to kernels without their type: `get<RmsNormAttrs>()`. The op owns them; they outlive
// the call. The tag makes a wrong type an internal error instead of garbage.
class AttrsRef {
 public:
  AttrsRef() = default;
  template <typename Attrs>
  explicit AttrsRef(const Attrs& attrs) : object_(&attrs), tag_(&kTag<Attrs>) {}
  template <typename Attrs>
  const Attrs& get() const {
    EADEM_CHECK(tag_ == &kTag<Attrs>, "kernel reads attributes of another op");
    return *static_cast<const Attrs*>(object_);
  }

 private:
  template <typename>
  static constexpr char kTag = 0;
  const void* object_ = nullptr;
  const void* tag_ = nullptr;
};

// Ops without attributes.
struct NoAttrs {};

// The request that a kernel answers when a pipeline compiles.
struct KernelRequest {
  std::string_view op;
  Pass pass = Pass::inference;
  const Device* device = nullptr;
  AttrsRef attrs;
  std::span<const TensorType> inputs;   // types in port order; see absent_port
  std::span<const TensorType> outputs;  // likewise
  SymbolValues bounds;                  // upper bounds of the symbols in this shape bucket
};

// The type of an optional port that is not connected.
inline TensorType absent_port() { return TensorType(DType::u8, {}); }
inline bool is_absent(const TensorType& type) { return type.rank() == 0 && type.dtype == DType::u8; }

// One call. Views are bound to this step's symbol values.
struct KernelCall {
  std::span<const TensorView> inputs;
  std::span<const TensorView> outputs;
  TensorView scratch;  // u8 [scratch_bytes], or undefined when none was asked for
  AttrsRef attrs;
  Context* context = nullptr;
};

struct Kernel {
  std::string_view name;  // "cpu_online_softmax": unique among an op's kernels
  Pass pass;
  Verdict (*can_handle)(const KernelRequest& request);
  void (*run)(const KernelCall& call);
  // Null: needs none.
  int64_t (*scratch_bytes)(const KernelRequest& request) = nullptr;
  // The encoding in which the kernel wants input `input` (a parameter) prepared, or null to take it as it is. The
  // pipeline prepares it once per change of the parameter. Null function: takes everything as it is.
  const Encoding* (*packing)(const KernelRequest& request, int input) = nullptr;
  // Ports begin at multiples of this many bytes; a range of rows at multiples of the largest power of two, up to this,
  // that divides the row. 1: elements may begin anywhere. What a pipeline plans is aligned to 64.
  int64_t alignment_bytes = 1;
};

using KernelList = std::vector<const Kernel*>;

// Modelled time: the slower of arithmetic and memory traffic at the device's nominal rates, plus its launch.
double modelled_us(const Device& device, double flops, double bytes);

}  // namespace eadem::kernels
