// SPDX-License-Identifier: Apache-2.0
//
// Trainer: a model, its gradients and its optimizer on one device. One call of `step` is one optimizer step. Files,
// data order and schedules belong to the layer above (train/train.h).
//
// Weights are f32, or bf16 with f32 master copies that the optimizer updates. The forward pass computes what serving
// computes: its graph, its kernels and its bits.
//
// On a mesh there is one trainer per rank, each used by its own thread or process, and all call the same methods in the
// same order. Over tp they divide the weights; batches are the same. Over dp each has batches of its own, and a step is
// one over the batches of all: losses, labels and gradients are summed in the order of the ranks. The ranks of dp
// divide the optimizer's states (optimizer.h). Over ep batches are each rank's own, too, but that they divide the
// experts, whose gradients come from the tokens of all: there all ranks run as many passes. Over pp each has one stage
// of the layers; batches are the same. Passes go through the stages in groups of as many as there are stages, forward
// one after another and then backward (GPipe), so that gradients are added in the order of the passes. A parameter that
// two stages read (tied weights) is on both: the first of them adds up its gradient, takes a step's sum to the other,
// and both update it alike.
//
// One thread at a time may use a trainer.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eadem/models/auto_model.h"
#include "eadem/models/graphs.h"
#include "eadem/pipeline/program.h"
#include "eadem/train/optimizer.h"
#include "eadem/train/shared_gradients.h"
#include "eadem/train/token_data.h"

namespace eadem::train {

struct TrainerOptions {
  DType weights = DType::f32;  // f32 or bf16
  // The encoding to which the linear layers of attention and MLPs round their weights for each pass; null: none.
  //   fp8_e4m3_block128   rows of x and of dy are rounded to fp8_e4m3, too; the gradient of a weight is that of plain
  //                       values
  //   fp8_e4m3_current,   x is rounded as the weight is and dy to e5m2, each with one scale, and all three products
  //   fp8_e4m3_delayed    multiply 8-bit floats. The scale of what ranks of tp divide is that of all parts
  // Experts' weights are refused.
  const Encoding* products = nullptr;
  // What the output layer multiplies: the weight as it is (null), or x and the weight rounded to fp8_e4m3_current or
  // fp8_e4m3_delayed. The gradient of the logits is rounded to e5m2 with a scale that is known beforehand
  // (kernels/training/cross_entropy.h). The trainer refuses ranks of tp, a head with a bias, and models that do
  // something else with the logits before the loss.
  const Encoding* head_products = nullptr;
  // Delayed scaling: the scale of a tensor is that of its largest magnitude in so many steps before; 1 to 2^16.
  // Without it no other number than the default is taken.
  int64_t amax_history = 16;
  int64_t batch_tokens = 4096;  // most tokens of one pass
  // The backward pass of a layer computes the layer's values again instead of reading what was kept: the same bits with
  // less memory, for the operations of one more forward pass.
  bool recompute_layers = false;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;   // on parameters of two or more dimensions
  double max_grad_norm = 1.0;  // 0: no clipping
  std::vector<std::string> disabled_fusions;
  // Parameters that keep their values and have neither gradients nor optimizer states: names, in which '*' stands for
  // any characters, '?' for one and [abc] for one of those (fnmatch(3)).
  std::vector<std::string> frozen;
  // On the load-balancing loss, which is added to the loss; 0: off. Not set: what the model's config.json asks for.
  std::optional<double> router_aux_loss_coef;
};

// Names of TrainerOptions::products: "plain" first, "fp8_block128", "fp8_tensor", "fp8_tensor_delayed".
std::vector<std::string> product_names();
// Throws InvalidArgument for another name.
const Encoding* products_from_name(std::string_view name);
// The names that a recipe gives TrainerOptions::head_products: "plain", "fp8_tensor", "fp8_tensor_delayed".
std::vector<std::string> head_product_names();
// Throws InvalidArgument for a name that is none of head_product_names.
const Encoding* head_products_from_name(std::string_view name);

struct StepResult {
  double loss;       // what is minimized: the mean over the labelled tokens, and the next one times its coefficient
  double grad_norm;  // before clipping
  std::optional<double> load_balancing_loss = {};  // mean over the passes of the step; not set where it is off
};

class Trainer {
 public:
  // Throws Unsupported, naming the op, when an op has no backward kernel on the device; InvalidArgument for options,
  // also for a pattern of `frozen` that no parameter has, and when nothing is left to train.
  // Also Unsupported for a load-balancing loss of a model that has none, and for weights that more than two stages
  // read; InvalidArgument for ranks of ep and a model without experts, and for more stages than layers.
  Trainer(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device, const TrainerOptions& options,
          const Mesh& mesh = {});

  // Sets the parameters before the first step. Every parameter must be set.
  void load(const models::Checkpoint& checkpoint);
  void load_random(uint64_t seed, double stddev);
  // Of a mesh over pp, a stage that does not have the parameter does nothing.
  void load_param(const std::string& name, const TensorView& whole);
  // Copies this rank's parts of the weights that the passes read to the host, in their dtype.
  std::vector<std::pair<std::string, Tensor>> state_dict() const;
  // The whole weights on the first rank of the mesh, none on the others; all ranks call it together.
  std::vector<std::pair<std::string, Tensor>> whole_state_dict() const;

  // Runs one optimizer step over the passes of `batches` (gradient accumulation). The loss is the mean over all their
  // labelled tokens, with the coefficient times the mean of their load-balancing losses where that is not 0. Throws
  // NotFound while a parameter is not set, InvalidArgument when a batch does not fit or ranks of ep have other numbers
  // of batches, and DataCorrupted when the loss
  // or the gradient is not finite (the parameters are unchanged then). `observer` is called after each kernel.
  StepResult step(std::span<const Batch> batches, double learning_rate,
                  const pipeline::StepObserver* observer = nullptr);
  // Returns the mean loss of one batch of this rank, without a load-balancing loss, and the number of its labelled
  // tokens, by the serving pass; changes nothing. All ranks of tp, pp and ep call it together.
  std::pair<double, int64_t> evaluate(const Batch& batch);
  // Returns the loss of each token of the last pass of step (or of evaluate), on the host; none on stages of pp before
  // the last one.
  std::vector<float> last_token_losses() const;

  // Throws NotFound naming the parameters that are not set.
  void require_all_loaded() const { parameters_->require_all_loaded("the trainer"); }

  int64_t num_steps() const { return num_steps_; }
  // Bytes of the optimizer's states that this rank keeps.
  int64_t state_bytes() const { return optimizer_->state_bytes(); }
  int64_t num_parameters() const { return parameters_->num_parameters(); }
  std::vector<std::string> parameter_names() const { return parameters_->names(); }
  // Those of all stages.
  std::vector<std::string> whole_parameter_names() const;
  const std::vector<std::string>& trained_names() const { return trained_; }
  // Returns this rank's part of a gradient of the last step, summed over the ranks of dp and ep, on the host, in f32.
  // Throws NotFound for a frozen parameter.
  Tensor gradient(const std::string& parameter) const;
  // The whole gradient on the first rank of the mesh, undefined on the others; all ranks call it together.
  Tensor whole_gradient(const std::string& parameter) const;

  // Throws InvalidArgument for a batch that no pass can take.
  void check(const Batch& batch) const;

  // Everything that a resumed run needs to continue bit for bit: "master.", "m.", "v." + parameter name, f32, and
  // "exact." + the name of each parameter that a checkpoint's tensors give with a rounding (norms of 1 + w). With
  // delayed scaling also "amax." + what is rounded ("LAYER.weight", "LAYER.x" or "LAYER.dy"), f32 [amax_history]: its
  // largest magnitude in each of the last steps, newest first, 0 where there were none. This rank's parts over tp and
  // ep, of its stage; all ranks of dp call it together.
  std::vector<std::pair<std::string, Tensor>> optimizer_state() const;
  // Of each of these tensors the name and the shape over all ranks, in the order of a checkpoint.
  std::vector<std::pair<std::string, Shape>> optimizer_state_shapes() const;
  // One of them, whole, on the first rank of the mesh, undefined on the others; all ranks call it together.
  Tensor whole_optimizer_state(const std::string& name) const;
  // Throws NotFound or InvalidArgument, naming the tensor, unless `source` holds exactly the whole tensors.
  void check_optimizer_state(const io::WeightSource& source) const;
  // Takes this rank's parts of the whole tensors. Throws as check_optimizer_state does; nothing has changed then.
  void load_optimizer_state(const io::WeightSource& source, int64_t num_steps);

  const models::Model& model() const { return *model_; }
  const Mesh& mesh() const { return mesh_; }
  Device& device() const { return *device_; }
  // The compiled program, one of several alike over pp; for `explain`.
  const pipeline::Program& training_program() const { return *training_[0]; }

 private:
  // The largest magnitudes of earlier steps of a tensor that is rounded with delayed scaling.
  struct AmaxHistory {
    std::string name;             // "amax." + what is rounded
    std::vector<float> previous;  // newest first
    float seen = 0;               // in this step, on any rank
    float largest() const { return *std::max_element(previous.begin(), previous.end()); }
  };

  void make_amax_histories();
  Tensor history_tensor(const AmaxHistory& history) const;
  // Gives the passes the magnitudes for their scales and forgets what they saw.
  void set_scalings();
  // Takes what the passes of a step saw, on all ranks of dp. Throws DataCorrupted on every stage when a value of one
  // was not finite.
  void read_scalings();
  // A parameter of the whole model, which may be another stage's.
  struct WholeParameter {
    Shape shape;
    DType dtype;
    bool trained, rounded;
    int stage;  // the first that has it
  };

  // Returns the symbols of a pass, of which no rank of ep has more than `rank_tokens` tokens.
  SymbolValues feed(pipeline::Program& program, const Batch& batch, int64_t rank_tokens) const;
  void compile_programs();
  void list_parameters();  // whole_parameters_

  // Whether the first rank gets it from this stage.
  bool is_here(const WholeParameter& parameter) const { return parameter.stage == mesh_.rank(MeshAxis::pp); }
  // What the first rank of `stage` has, of this dtype and shape, on the first rank of the mesh; undefined elsewhere.
  Tensor from_stage(int stage, const Tensor& own, DType dtype, const Shape& shape) const;
  // Runs passes of a step, as many as there are stages, or fewer. Returns the sums of their losses and of their
  // load-balancing losses; 0 on stages that have none.
  std::pair<double, double> run_passes(std::span<const Batch> batches, int64_t rank_tokens,
                                       std::span<const float> seeds, float balance_seed,
                                       const pipeline::StepObserver* observer);
  bool has_loss() const { return mesh_.rank(MeshAxis::pp) + 1 == mesh_.size(MeshAxis::pp); }
  // The parameters that match options_.frozen.
  std::vector<std::string> find_frozen() const;
  void find_rounded();
  void make_optimizer();
  void copy_weights_to_masters();
  // The coefficient of the load-balancing loss.
  double find_balancing() const;
  // Joins the parts over tp and ep of a tensor that has the division of a parameter. As whole_optimizer_state().
  Tensor joined(const std::string& parameter, const Tensor& part) const;
  // Sums of a step's losses, of the last stage, and of what they are divided by, over the ranks of dp and ep.
  std::pair<double, int64_t> summed_over_ranks(double loss, int64_t count) const;
  // The most tokens of a pass on any rank of ep. Throws InvalidArgument unless all of them run as many passes.
  int64_t most_tokens_of_ranks(std::span<const Batch> batches) const;

  std::shared_ptr<const models::Model> model_;
  std::shared_ptr<Device> device_;
  TrainerOptions options_;
  Mesh mesh_;
  modules::AutoHardwareConfig hardware_;
  std::shared_ptr<pipeline::ParameterStore> parameters_;
  // One for each pass that is under way at once, whose memory keeps what its backward pass needs.
  std::vector<std::unique_ptr<pipeline::Program>> training_;
  std::unique_ptr<pipeline::Program> evaluation_;
  const pipeline::Program* last_ = nullptr;
  std::map<std::string, WholeParameter> whole_parameters_;  // of all stages
  std::vector<std::string> trained_;                        // of this stage
  std::vector<std::string> rounded_;         // trained f32 parameters that a checkpoint does not hold to the bit
  double balancing_ = 0;                     // coefficient of the load-balancing loss
  std::map<std::string, Tensor> gradients_;  // of trained_; on the device
  std::unique_ptr<SharedGradients> shared_gradients_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<AmaxHistory> amax_histories_;     // of this stage
  std::map<std::string, int> whole_histories_;  // the names of those of all stages, and whose they are
  Tensor scalings_;  // [histories, kScalingPitch] on the device: rows begin with what quantize knows as `scaling`
  int64_t num_steps_ = 0;
};

}  // namespace eadem::train
