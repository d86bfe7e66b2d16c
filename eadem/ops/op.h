// SPDX-License-Identifier: Apache-2.0
//
// Op: what is computed. An op knows its ports, its type rule, its three passes and their cost, what its backward pass
// needs saved, and a slow, obvious, double-precision reference of each pass. It holds no device code and dispatches
// nothing; the list of the kernels that can serve it stands in its source.
//
// The port order of each pass is laid down in kernels/<op>.h. Ops are immutable after construction and may be shared
// between graphs and threads.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/tensor_type.h"
#include "eadem/kernels/backend.h"

namespace eadem::ops {

using kernels::AttrsRef;
using kernels::Cost;
using kernels::KernelList;
using kernels::Pass;
using kernels::RefTensor;

struct Port {
  enum class Role : uint8_t {
    activation,  // has a gradient when the op has a backward pass
    parameter,   // trained: gradients accumulate into it
    index,       // integers that steer: ids, rows, lengths. No gradient
    constant,    // numbers that are not trained: rope frequencies, sampling parameters. No gradient
    state,       // lives between steps and is changed in place: caches, optimizer moments
  };
  std::string_view name;
  Role role = Role::activation;
  // An optional input may be unconnected. The gradient of an optional output may be unconnected in the backward pass:
  // no other op has read the output.
  bool optional = false;
};

// One tensor that the forward pass keeps for the backward pass.
struct Saved {
  enum class Kind : uint8_t { input, output, extra };
  Kind kind;
  int index;  // into inputs, outputs, or the extra tensors
};

class Op : public kernels::Definition {
 public:
  // The field's standard name, snake_case; also the name of its kernel contract.
  virtual std::string_view name() const = 0;
  virtual std::vector<Port> inputs() const = 0;
  virtual std::vector<Port> outputs() const = 0;
  // The attributes as kernels take them, and for people ("eps=1e-05").
  virtual AttrsRef attrs() const = 0;
  virtual std::string attrs_text() const { return {}; }

  // The type rule. `inputs` is in port order with unconnected_port() for unconnected optional ports. Throws
  // InvalidArgument naming the op, the port and both values. Sharding is handled by `infer_sharding`.
  virtual std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const = 0;

  // The dtype in which input `port` should arrive, given the types as connected; the precision step inserts a cast
  // where the edge has another. Default: as it is.
  virtual DType wanted_dtype(std::span<const TensorType> inputs, int port) const;

  // The sharding of outputs over one axis of the mesh, given that of inputs over the same. Default: elementwise, all
  // activations alike. Throws InvalidArgument where the combination has no meaning.
  virtual std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const;

  // The sharding in which input `port` should arrive, given the types as connected; the sharding step inserts a
  // collective where the edge has another. Like `infer_sharding` it is asked for one axis of the mesh at a time.
  // Default: whole where the edge has partial sums, else as it is.
  virtual Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const;

  // The axis of the mesh along which a collective moves values. Along the others its output is divided as its input,
  // and `infer_sharding` is not asked.
  virtual std::optional<MeshAxis> crosses() const { return std::nullopt; }

  // Output `output` of the inference pass may be written over this input, or -1. State outputs always alias their port.
  virtual int inference_alias(int output) const;

  // The output is the first input's bytes under another shape: no kernel runs in any pass.
  virtual bool is_view() const { return false; }

  // --- Training. An op without a backward pass returns false and the rest is not asked.
  virtual bool has_backward() const { return false; }
  // Ops such as add hand the gradient of their output to every activation input as it is.
  virtual bool passes_gradient_through() const { return false; }
  // Returns the input whose gradient is also the gradient of input `input`. The two terms of a sum have one gradient,
  // so one tensor serves both. Default: the input itself.
  virtual int shares_gradient_with(int input) const { return input; }
  // The node of the backward pass, from 0, that makes each of gradient_outputs(), so that kernels of several may read
  // the gradient of the output in other types. Empty: one makes all.
  virtual std::vector<int> gradient_nodes(std::span<const TensorType> /*inputs*/) const { return {}; }
  virtual std::vector<Saved> saved() const { return {}; }
  virtual std::vector<TensorType> extra_types(std::span<const TensorType> /*inputs*/) const { return {}; }
  // The backward pass also runs without a forward pass before it: it has no extra tensors then (they are unconnected),
  // and the op's outputs follow the gradients. For a loss, whose gradient is known before it.
  virtual bool backward_makes_outputs() const { return false; }

  // The cost of one pass. `inputs` and `outputs` are the types of the op's own ports whatever the pass; what the pass
  // saves or reads back is added here.
  virtual Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                    const SymbolValues& symbols) const = 0;

  // The kernels that serve this op on the devices of a backend: those that the backend has for its name. An op from
  // outside the project overrides it and brings its own.
  virtual KernelList kernels(const kernels::Backend& backend) const { return backend.kernels(name()); }

  // --- Derived; the same for every op.
  // Indices of inputs that receive a gradient: activations and parameters, in port order.
  std::vector<int> differentiable_inputs() const;
  // The inputs whose gradients are the outputs of the backward pass, in port order: differentiable_inputs() without
  // those that share the gradient of another input.
  std::vector<int> gradient_outputs() const;
  // Types of the ports of the backward pass, in contract order.
  std::vector<TensorType> backward_input_types(std::span<const TensorType> inputs,
                                               std::span<const TensorType> outputs) const;
  std::vector<TensorType> backward_output_types(std::span<const TensorType> inputs) const;
};

using OpPtr = std::shared_ptr<const Op>;

// Bytes of the least traffic of one pass: the plain sum over ports, for ops whose cost is their traffic.
double traffic_bytes(std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                     const SymbolValues& symbols);
// Bytes of the least traffic of a given pass: forward adds the extra tensors; backward reads what was saved and the
// gradients of the outputs and writes the gradients of the inputs, those of parameters (+=) twice.
double traffic_bytes(const Op& op, Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
                     const SymbolValues& symbols);

// A plain, replicated type of the same dims: what type rules return; `infer_sharding` says how it is divided.
TensorType plain_type(DType dtype, std::span<const Dim> dims);

// For type rules. Each throws InvalidArgument as "op: port 'x' is f32 [3]; expected …".
void expect_rank(std::string_view op, std::string_view port, const TensorType& type, int rank);
void expect_dtype(std::string_view op, std::string_view port, const TensorType& type, std::span<const DType> allowed);
void expect_dim(std::string_view op, std::string_view port, const TensorType& type, int axis, const Dim& expected,
                std::string_view because);
// Values as they are, not packed or quantized.
void expect_plain(std::string_view op, std::string_view port, const TensorType& type);
// A KV cache: plain, or in a RowEncoding.
void expect_cache(std::string_view op, std::string_view port, const TensorType& type);
void expect_present(std::string_view op, std::string_view port, const TensorType& type);
// All of it on every rank.
void expect_replicated(std::string_view op, std::string_view port, const TensorType& type, std::string_view because);
void expect_same_dims(std::string_view op, std::string_view port, const TensorType& type, const TensorType& other,
                      std::string_view other_port);

inline constexpr DType kActivations[] = {DType::f32, DType::bf16};
inline constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f16};
inline constexpr DType kF32[] = {DType::f32};
inline constexpr DType kI32[] = {DType::i32};
inline constexpr DType kI64[] = {DType::i64};

// One row of work, named after the model whose shape it is. Tests, benchmarks and docs all draw from these rows.
struct Workload {
  std::string name;  // "llama-3.2-1b decode q_proj"
  OpPtr op;
  std::vector<TensorType> inputs;  // in port order
  SymbolValues symbols;            // the step's extents
};

}  // namespace eadem::ops
