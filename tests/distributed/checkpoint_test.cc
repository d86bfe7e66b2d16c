// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of trainers on a mesh: the files are those of one rank with the same state, and any mesh goes on from
// them with the same bits.
#include "eadem/train/checkpoint.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <mutex>

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/safetensors.h"
#include "tests/distributed/training_batches.h"
#include "tests/support/refusal.h"

namespace eadem::test {
namespace checkpoint_test {

namespace fs = std::filesystem;
using distributed::run_mesh;
using train::Trainer;

class MeshCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_mesh_checkpoint_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string path(const std::string& name) const { return (root_ / name).string(); }

  fs::path root_;
};

std::unique_ptr<Trainer> make_trainer(const models::Model& model, const Mesh& mesh, DType weights,
                                      const Encoding* products = nullptr) {
  return std::make_unique<Trainer>(
      std::shared_ptr<const models::Model>(std::shared_ptr<void>(), &model), open_device("cpu", {.num_threads = 1}),
      train::TrainerOptions{.weights = weights, .products = products, .batch_tokens = 64, .router_aux_loss_coef = 0.0},
      mesh);
}

train::Batch batch_of_rank(const models::Model& model, const Mesh& mesh) {
  return make_batch(model.info().vocab, 3, 1 + mesh.rank(MeshAxis::dp) * 2 + mesh.rank(MeshAxis::ep));
}

void step(Trainer& trainer) {
  const train::Batch batch = batch_of_rank(trainer.model(), trainer.mesh());
  trainer.step({&batch, 1}, 1e-2);
}

std::string content(const std::string& directory, const char* file) {
  return io::read_file((fs::path(directory) / file).string(), 1 << 28);
}

void expect_same_files(const std::string& a, const std::string& b) {
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "config.json", "trainer.json"})
    EXPECT_TRUE(content(a, file) == content(b, file)) << file;
}

std::string name_of(const MeshShape& shape) {
  return fmt::format("dp{}tp{}pp{}ep{}", shape.dp, shape.tp, shape.pp, shape.ep);
}

// Each mesh trains two steps and writes; every mesh reads that and writes it again, with the same bytes.
void compare_meshes(const models::Model& model, const std::vector<MeshShape>& shapes, DType weights,
                    const fs::path& root, const Encoding* products = nullptr) {
  for (const MeshShape& writer : shapes) {
    const std::string written = (root / fmt::format("{}_{}", name_of(writer), dtype_name(weights))).string();
    run_mesh(writer, [&](const Mesh& mesh) {
      const auto trainer = make_trainer(model, mesh, weights, products);
      trainer->load_random(7, 0.15);
      step(*trainer);
      step(*trainer);
      write_checkpoint(*trainer, {.step = trainer->num_steps()}, {}, written);
      step(*trainer);  // it goes on
    });
    const train::RunState state = train::verify_checkpoint(written);
    EXPECT_EQ(state.step, 2);
    for (const MeshShape& reader : shapes) {
      SCOPED_TRACE(fmt::format("{} -> {} {}", name_of(writer), name_of(reader), dtype_name(weights)));
      const std::string again = written + "_by_" + name_of(reader);
      run_mesh(reader, [&](const Mesh& mesh) {
        const auto trainer = make_trainer(model, mesh, weights, products);
        load_checkpoint(*trainer, written, state);
        EXPECT_EQ(trainer->num_steps(), 2);
        write_checkpoint(*trainer, state, {}, again);
        step(*trainer);
      });
      expect_same_files(written, again);
      fs::remove_all(again);
    }
  }
}

TEST_F(MeshCheckpoint, AnyMeshReadsWhatAnyMeshWrote) {
  const auto model = SmallModel{}.make();
  compare_meshes(*model, {{}, {.dp = 2}, {.tp = 2}, {.dp = 2, .tp = 3}, {.pp = 2}}, DType::f32, root_);
  compare_meshes(*model, {{}, {.dp = 2}, {.dp = 2, .tp = 2, .pp = 2}}, DType::bf16, root_);
  // Norms of 1 + w, whose sums a checkpoint keeps beside w; tied weights.
  compare_meshes(*models::model_from_config(golden("gemma3") + "/config.json"), {{}, {.dp = 2}, {.tp = 2}, {.pp = 2}},
                 DType::f32, root_);
}

// A tied weight, which the first and the last stage have, is in a checkpoint once.
TEST_F(MeshCheckpoint, TiedWeightsAreReadByBothStages) {
  const auto model = SmallModel{.tied = true}.make();
  compare_meshes(*model, {{}, {.pp = 2}, {.dp = 2, .tp = 2, .pp = 2}}, DType::bf16, root_);
  compare_meshes(*model, {{}, {.dp = 2, .pp = 2}}, DType::f32, root_);
  // Both stages go on with it alike.
  const std::string written = (root_ / "dp1tp1pp1ep1_bf16").string();
  const train::RunState state = train::verify_checkpoint(written);
  std::array<Tensor, 2> tied;
  run_mesh({.pp = 2}, [&](const Mesh& mesh) {
    const auto trainer = make_trainer(*model, mesh, DType::bf16);
    load_checkpoint(*trainer, written, state);
    step(*trainer);
    for (const auto& [name, tensor] : trainer->state_dict())
      if (name == "model.embed_tokens.weight") tied[static_cast<size_t>(mesh.rank(MeshAxis::pp))] = tensor;
  });
  EXPECT_EQ(std::memcmp(tied[0].view.data, tied[1].view.data, static_cast<size_t>(tied[0].view.size_bytes())), 0);
}

TEST_F(MeshCheckpoint, ExpertsAreWhole) {
  const auto model = models::model_from_config(golden("qwen3_moe") + "/config.json");
  compare_meshes(*model, {{}, {.ep = 2}, {.dp = 2}, {.tp = 2, .ep = 2}}, DType::f32, root_);
  compare_meshes(*model, {{}, {.ep = 3}, {.pp = 2, .ep = 2}}, DType::bf16, root_);
}

// Magnitudes of earlier steps, which every stage has of its own layers, and ranks of dp and tp have alike.
TEST_F(MeshCheckpoint, HistoriesOfAllStages) {
  const auto model = SmallModel{}.make();
  compare_meshes(*model, {{}, {.pp = 2}, {.tp = 2}, {.dp = 2, .tp = 2, .pp = 2}}, DType::f32, root_,
                 train::products_from_name("fp8_tensor_delayed"));
}

// The tensors of a checkpoint of a mesh are those that its ranks have.
TEST_F(MeshCheckpoint, HoldsWhatTheRanksHave) {
  const auto model = SmallModel{}.make();
  std::map<std::string, std::vector<Tensor>> parts;  // of each rank of tp
  std::mutex mutex;
  run_mesh({.dp = 2, .tp = 2}, [&](const Mesh& mesh) {
    const auto trainer = make_trainer(*model, mesh, DType::f32);
    trainer->load_random(7, 0.15);
    step(*trainer);
    write_checkpoint(*trainer, {.step = 1}, {}, path("c"));
    const auto states = trainer->optimizer_state();
    const auto weights = trainer->state_dict();
    const std::scoped_lock lock(mutex);
    if (mesh.rank(MeshAxis::dp) != 1) return;
    for (const auto& list : {states, weights})
      for (const auto& [name, tensor] : list) {
        parts[name].resize(2);
        parts[name][static_cast<size_t>(mesh.rank(MeshAxis::tp))] = tensor;
      }
  });
  const auto optimizer = io::open_weights(path("c") + "/optimizer.safetensors"),
             weights = io::open_weights(path("c") + "/model.safetensors");
  for (const auto& [name, ranks] : parts) {
    const bool is_state = name.starts_with("m.") || name.starts_with("v.");
    const Tensor whole = (is_state ? optimizer : weights)->get(name);
    ASSERT_EQ(whole.shape().rank(), ranks[0].shape().rank()) << name;
    // Element by element: [i, j] of the whole is in the rank whose part has it.
    const bool vector = whole.shape().rank() == 1;
    const int64_t rows = whole.shape()[0], columns = vector ? 1 : whole.shape()[1];
    const Shape& first = ranks[0].shape();
    const int64_t first_rows = first[0], first_columns = vector ? 1 : first[1];
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const size_t rank = i >= first_rows || j >= first_columns ? 1 : 0;
        const Tensor& part = ranks[rank];
        const int64_t part_columns = vector ? 1 : part.shape()[1];
        const int64_t row = rank == 1 && first_rows < rows ? i - first_rows : i,
                      column = rank == 1 && first_columns < columns ? j - first_columns : j;
        ASSERT_EQ(whole.view.as<float>()[i * columns + j], part.view.as<float>()[row * part_columns + column])
            << name << " " << i << ", " << j;
      }
  }
}

// A mesh that goes on from a checkpoint of one rank takes the steps that the rank would have taken.
TEST_F(MeshCheckpoint, ResumedRanksAccumulateAsOneRankWould) {
  const auto model = SmallModel{.bias = false}.make();
  std::vector<train::Batch> passes = {make_batch(512, 3, 1), make_batch(512, 3, 2)};
  for (size_t i = 0; i < passes[0].token_ids.size(); ++i)  // no token stands in both (training_test.cc)
    for (size_t pass : {size_t{0}, size_t{1}}) passes[pass].token_ids[i] = static_cast<int32_t>(2 * i + pass);
  const auto one = make_trainer(*model, {}, DType::bf16);
  one->load_random(7, 0.15);
  one->step(passes, 1e-2);
  write_checkpoint(*one, {.step = 1}, {}, path("one"));
  const train::StepResult expected = one->step(passes, 1e-2);
  write_checkpoint(*one, {.step = 2}, {}, path("one_2"));
  run_mesh({.dp = 2}, [&](const Mesh& mesh) {
    const auto own = make_trainer(*model, mesh, DType::bf16);
    load_checkpoint(*own, path("one"), train::verify_checkpoint(path("one")));
    const train::StepResult result = own->step({&passes[static_cast<size_t>(mesh.rank(MeshAxis::dp))], 1}, 1e-2);
    EXPECT_EQ(result.loss, expected.loss);
    EXPECT_EQ(result.grad_norm, expected.grad_norm);
    write_checkpoint(*own, {.step = 2}, {}, path("two_2"));
  });
  expect_same_files(path("one_2"), path("two_2"));
}

TEST_F(MeshCheckpoint, WhatDoesNotFitIsRefusedOnEveryRankAndChangesNothing) {
  const auto model = SmallModel{}.make();
  const auto one = make_trainer(*model, {}, DType::f32);
  one->load_random(7, 0.15);
  step(*one);
  write_checkpoint(*one, {.step = 1}, {}, path("c"));
  const train::RunState state = train::verify_checkpoint(path("c"));
  // A tensor is missing, or is a rank's part alone.
  const std::string file = path("c") + "/optimizer.safetensors";
  const auto rewrite = [&](const std::function<bool(io::NamedTensor&)>& keep) {
    fs::copy_file(path("c") + "/optimizer.safetensors", path("whole"), fs::copy_options::overwrite_existing);
    const auto whole = io::open_weights(path("whole"));
    std::vector<io::NamedTensor> tensors;
    std::vector<Tensor> kept;
    for (const io::WeightInfo& info : whole->tensors()) {
      kept.push_back(whole->get(info.name));
      io::NamedTensor tensor{info.name, kept.back().view};
      if (keep(tensor)) tensors.push_back(tensor);
    }
    io::write_safetensors(file, tensors);
  };
  const auto refusals = [&] {
    std::vector<std::string> all(2);
    run_mesh({.dp = 2}, [&](const Mesh& mesh) {
      const auto own = make_trainer(*model, mesh, DType::f32);
      own->load_random(3, 0.15);
      const auto before = own->state_dict();
      all[static_cast<size_t>(mesh.rank(MeshAxis::dp))] = refusal([&] { load_checkpoint(*own, path("c"), state); });
      const auto after = own->state_dict();
      for (size_t i = 0; i < before.size(); ++i)
        EXPECT_EQ(std::memcmp(before[i].second.view.data, after[i].second.view.data,
                              static_cast<size_t>(before[i].second.view.size_bytes())),
                  0)
            << before[i].first;
      step(*own);  // the ranks still meet
    });
    return all;
  };
  const std::string name = "v.model.layers.1.mlp.up_proj.weight";
  rewrite([&](io::NamedTensor& tensor) { return tensor.name != name; });
  for (const std::string& message : refusals()) {
    EXPECT_HAS(message, "NotFound");
    EXPECT_HAS(message, "optimizer.safetensors");
    EXPECT_HAS(message, name);
  }
  EXPECT_HAS(refusal([&] { train::verify_checkpoint(path("c")); }), "optimizer.safetensors has ");
  fs::copy_file(path("whole"), file, fs::copy_options::overwrite_existing);
  rewrite([&](io::NamedTensor& tensor) {
    if (tensor.name == name) tensor.view = tensor.view.rows(0, 20);
    return true;
  });
  for (const std::string& message : refusals()) EXPECT_HAS(message, name + "' is f32 [20, 48]; expected f32 [40, 48]");
}

// The disk of the first rank is full, or what stands there is no checkpoint: all ranks hear of it, and go on.
TEST_F(MeshCheckpoint, AFailedWriteIsReportedOnEveryRank) {
  const auto model = SmallModel{}.make();
  io::write_file_atomically(path("file"), "no directory");
  fs::create_directories(path("other"));
  io::write_file_atomically(path("other") + "/notes.txt", "notes");
  run_mesh({.dp = 2, .tp = 2}, [&](const Mesh& mesh) {
    const auto own = make_trainer(*model, mesh, DType::f32);
    own->load_random(3, 0.15);
    const bool first = mesh.rank(MeshAxis::dp) == 0 && mesh.rank(MeshAxis::tp) == 0;
    EXPECT_HAS(refusal([&] { write_checkpoint(*own, {}, {}, path("file") + "/c"); }),
               first ? "cannot make directory" : "the first rank could not write");
    EXPECT_HAS(refusal([&] { write_checkpoint(*own, {}, {}, path("other")); }),
               first ? "is no checkpoint" : "the first rank could not write");
    EXPECT_HAS(refusal([&] { train::write_model(*own, {}, path("file")); }),
               first ? "cannot make directory" : "the first rank could not write");
    step(*own);
    write_checkpoint(*own, {.step = 1}, {}, path("good"));
  });
  EXPECT_EQ(train::verify_checkpoint(path("good")).step, 1);
  EXPECT_TRUE(fs::exists(path("other") + "/notes.txt"));
}

}  // namespace checkpoint_test
}  // namespace eadem::test
