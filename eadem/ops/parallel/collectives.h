// SPDX-License-Identifier: Apache-2.0
//
// Collectives as ops: the sharding step inserts them where an edge's sharding is not the one that its consumer wants.
// Ports: kernels/collectives.h.
//
// Cost is local traffic; `wire_bytes` is what one rank sends. all_reduce passes its gradient through (that of a whole
// value is the same on every rank); that of all_gather is a rank's part of it; send and recv are each other's backward
// pass; the others have none.
#pragma once

#include "eadem/kernels/collectives.h"
#include "eadem/ops/op.h"

namespace eadem::ops {

class Collective : public Op {
 public:
  std::string_view name() const override { return name_; }
  std::vector<Port> inputs() const override { return {{"x"}}; }
  std::vector<Port> outputs() const override { return {{"y"}}; }
  AttrsRef attrs() const override { return AttrsRef(attrs_); }
  std::string attrs_text() const override;
  std::optional<MeshAxis> crosses() const override { return attrs_.over; }
  Sharding wanted_sharding(std::span<const TensorType> inputs, int port) const override;
  int inference_alias(int /*output*/) const override { return -1; }
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  // The reference is that of a single rank, for which a collective changes nothing.
  void reference(Pass pass, std::span<const RefTensor> inputs, std::span<RefTensor> outputs) const override;
  // Bytes that one rank sends in a pass, at least, by the best known algorithm (Patarasu & Yuan 2009 for sums).
  virtual double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const = 0;
  const kernels::CollectiveAttrs& collective() const { return attrs_; }

 protected:
  Collective(std::string_view name, const kernels::CollectiveAttrs& attrs) : name_(name), attrs_(attrs) {}
  // `type` with the extent of `dim` replaced.
  static TensorType with_extent(const TensorType& type, int dim, int64_t extent);
  void expect_sharding(const TensorType& x, Sharding expected) const;
  void expect_extent(const TensorType& x, int dim, int64_t extent) const;
  int64_t own_extent() const { return part_of(attrs_.whole, attrs_.ranks, attrs_.rank).size; }

  std::string_view name_;
  kernels::CollectiveAttrs attrs_;
};

class AllReduce final : public Collective {
 public:
  // `state`: x is a state, which is changed in place.
  explicit AllReduce(MeshAxis over = MeshAxis::tp, int ranks = 1, bool state = false)
      : Collective("all_reduce", {.over = over, .ranks = ranks}),
        role_(state ? Port::Role::state : Port::Role::activation) {}

  std::vector<Port> inputs() const override { return {{"x", role_}}; }
  std::vector<Port> outputs() const override { return {{role_ == Port::Role::state ? "x" : "y", role_}}; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  // Only a partial value may be summed: a replicated one would be multiplied by the number of ranks.
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  bool has_backward() const override { return true; }
  bool passes_gradient_through() const override { return true; }
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
  static std::vector<Workload> workloads();

 private:
  Port::Role role_;
};

class AllGather final : public Collective {
 public:
  // attrs: over, ranks, rank, dim, whole.
  explicit AllGather(const kernels::CollectiveAttrs& attrs) : Collective("all_gather", attrs) {}
  bool has_backward() const override { return true; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  Cost cost(Pass pass, std::span<const TensorType> inputs, std::span<const TensorType> outputs,
            const SymbolValues& symbols) const override;
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
  static std::vector<Workload> workloads();
};

class ReduceScatter final : public Collective {
 public:
  // attrs: over, ranks, rank, dim, whole.
  explicit ReduceScatter(const kernels::CollectiveAttrs& attrs) : Collective("reduce_scatter", attrs) {}
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
};

class AllToAll final : public Collective {
 public:
  // attrs: over, ranks, rank, dim and whole (divided before), other_dim (divided after). Throws InvalidArgument unless
  // `whole` divides.
  explicit AllToAll(const kernels::CollectiveAttrs& attrs);
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
};

class Broadcast final : public Collective {
 public:
  Broadcast(MeshAxis over, int ranks, int root)
      : Collective("broadcast", {.over = over, .ranks = ranks, .peer = root}) {}
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> inputs) const override;
  int inference_alias(int /*output*/) const override { return 0; }
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
};

class Send final : public Collective {
 public:
  Send(MeshAxis over, int to) : Collective("send", {.over = over, .peer = to}) {}
  std::vector<Port> outputs() const override { return {}; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> /*inputs*/) const override { return {}; }
  double wire_bytes(std::span<const TensorType> inputs, const SymbolValues& symbols) const override;
};

class Recv final : public Collective {
 public:
  Recv(MeshAxis over, int from, const TensorType& type)
      : Collective("recv", {.over = over, .peer = from}), type_(type) {}
  std::vector<Port> inputs() const override { return {}; }
  std::vector<TensorType> infer_types(std::span<const TensorType> inputs) const override;
  std::vector<Sharding> infer_sharding(std::span<const TensorType> /*inputs*/) const override {
    return {Sharding::replicated()};
  }
  double wire_bytes(std::span<const TensorType> /*inputs*/, const SymbolValues& /*symbols*/) const override {
    return 0;
  }

 private:
  TensorType type_;
};

}  // namespace eadem::ops
