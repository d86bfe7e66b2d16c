// SPDX-License-Identifier: Apache-2.0
//
// Kernel: how one device computes one pass of one op, or of a pattern of ops, in one sweep.
//
// A kernel states what it can take and at what cost (`can_handle`). The one that is chosen when a program compiles is
// then asked for a plan (`prepare`): everything that follows from types, attributes, bounds and the device, such as the
// routine for an instruction set and a dtype, the layout of a weight, or a library's algorithm. A step calls the plan
// with views that already satisfy what the kernel stated. It looks nothing up, allocates nothing, validates no user
// input and reads no globals; memory that it needs beyond its ports is planned like any other buffer.
//
// The ports of an op's passes are laid down in kernels/<op>.h, which also holds its attributes: that header is the
// contract between the op and every backend. By convention
//   forward    inputs: the op's inputs.   outputs: the op's outputs, then the extra tensors it saves.
//   inference  inputs: the op's inputs.   outputs: the op's outputs; may alias inputs where the op says so.
//   backward   inputs: the saved tensors in the op's order, then the gradient of each output that is no index.
//              outputs: the gradient of each input that has one. A view with null data is not wanted.
//              Gradients of parameters accumulate (+=), gradients of activations are written (=).
// Optional ports that are not connected are views with null data.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/candidate.h"
#include "eadem/core/mesh/mesh.h"
#include "eadem/core/tensor.h"
#include "eadem/core/tensor_type.h"

namespace eadem::kernels {

enum class Pass : uint8_t { forward, backward, inference };

std::string_view pass_name(Pass pass);

// An op's attributes, passed to kernels without their type: `get<RmsNormAttrs>()`. The op owns them; a plan copies
// what it needs. The tag makes a wrong type an internal error instead of garbage.
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

// The work of one pass of an op, as the op states it.
struct Cost {
  double flops = 0;
  double bytes = 0;  // least traffic: each input read once, each output written once
  Cost& operator+=(const Cost& other) {
    flops += other.flops;
    bytes += other.bytes;
    return *this;
  }
};

// A tensor of the definition of an op: every dtype widened to double (integers up to 2^53 are exact).
struct RefTensor {
  Shape shape;
  std::vector<double> data;
};

// The definition of an op: a slow and obvious computation in double precision.
class Definition {
 public:
  virtual ~Definition() = default;
  // `inputs` and `outputs` are the ports of the pass in contract order; outputs arrive allocated with the right shapes.
  // Outputs that accumulate arrive with what they accumulate into. State outputs arrive as copies of the state inputs.
  // An undesired output has an empty shape and no data.
  virtual void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const = 0;
};

// The request that a kernel answers when a pipeline compiles.
struct KernelRequest {
  std::string_view op;
  Pass pass = Pass::inference;
  const Device* device = nullptr;
  AttrsRef attrs;
  std::span<const TensorType> inputs;      // types in port order; see unconnected_port
  std::span<const TensorType> outputs;     // likewise
  SymbolValues bounds;                     // upper bounds of the symbols in this shape bucket
  Cost cost;                               // the op's, at the bounds
  const Definition* definition = nullptr;  // the op's; it outlives every plan of the request
};

// The type of an optional port that is not connected.
inline TensorType unconnected_port() { return TensorType(DType::u8, {}); }
inline bool is_unconnected(const TensorType& type) { return type.rank() == 0 && type.dtype == DType::u8; }

// How well a kernel would do the work that the op's cost states. Shares are of the device's nominal rates; a kernel
// that knows no better leaves them at 1.
struct Estimate {
  double flops_share = 1.0;      // of the arithmetic that it reaches
  double bandwidth_share = 1.0;  // of the memory bandwidth that it reaches
  double extra_bytes = 0.0;      // traffic beyond the op's least
  int launches = 1;
  std::string reason = {};  // where the numbers come from, for `explain`
};

// Accepts `request` at the modelled time of its cost under `estimate`: the slower of arithmetic and memory traffic,
// plus the launches.
Verdict accept(const KernelRequest& request, const Estimate& estimate = {});

// One call of a plan. Views are bound to this step's symbol values.
struct KernelCall {
  std::span<const TensorView> inputs;
  std::span<const TensorView> outputs;
  TensorView scratch;  // u8 [Plan::scratch_bytes], or undefined when none was asked for
  Context* context = nullptr;
};

// The decisions of a kernel for one request, and the routine that runs them. Immutable; it belongs to one step of a
// program, which one thread at a time runs. It may hold what lives as long as the device and the communicator it was
// prepared with.
class Plan {
 public:
  explicit Plan(int64_t scratch_bytes) : scratch_bytes_(scratch_bytes) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  virtual ~Plan() = default;

  virtual void run(const KernelCall& call) const = 0;
  // Bytes that a call needs beyond its ports, for any values of the symbols up to the bounds.
  int64_t scratch_bytes() const { return scratch_bytes_; }

 private:
  int64_t scratch_bytes_;
};
using PlanPtr = std::unique_ptr<const Plan>;

// A plan that runs `run(call)`: a lambda that has captured what was prepared, or an object with operator().
template <typename Run>
PlanPtr make_plan(Run run, int64_t scratch_bytes = 0) {
  class Made final : public Plan {
   public:
    Made(Run run, int64_t scratch_bytes) : Plan(scratch_bytes), run_(std::move(run)) {}
    void run(const KernelCall& call) const override { run_(call); }

   private:
    Run run_;
  };
  return std::make_unique<const Made>(std::move(run), scratch_bytes);
}

struct Kernel {
  std::string_view name;  // "cpu_online_softmax": unique among an op's kernels of a pass
  Pass pass;
  Verdict (*can_handle)(const KernelRequest& request);
  // Called for requests that can_handle accepts. `context` is that of later calls: a kernel may measure or test on its
  // device, and keep a handle of its communicator.
  PlanPtr (*prepare)(const KernelRequest& request, Context& context);
  // The encoding in which the kernel wants input `input` (a parameter) prepared, or null to take it as it is. The
  // pipeline prepares it once per change of the parameter. Null function: takes everything as it is.
  const Encoding* (*packing)(const KernelRequest& request, int input) = nullptr;
  // Ports begin at multiples of this many bytes; a range of rows at multiples of the largest power of two, up to this,
  // that divides the row. 1: elements may begin anywhere. What a pipeline plans is aligned to 64.
  int64_t alignment_bytes = 1;
  // The encoding to which input `input` (an activation) should be rounded before the kernel reads it, or null to take
  // it as it is. The pipeline rounds a value once for all kernels that want the same (precision.h). Null function:
  // takes everything as it is.
  const Encoding* (*wanted_encoding)(const KernelRequest& request, int input) = nullptr;
  // Parameters that it wants packed may also arrive as they are stored: plain, or in a BlockEncoding. The bits are the
  // same; each call then takes the time of packing them.
  bool reads_stored = false;
};

using KernelList = std::vector<const Kernel*>;

}  // namespace eadem::kernels
