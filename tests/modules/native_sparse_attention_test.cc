// SPDX-License-Identifier: Apache-2.0
//
// Native sparse attention as a module, against PyTorch (tests/data/golden/make_sparse_goldens.py): what training
// computes, with every gradient, and what serving computes from a contiguous or a paged cache with windows, in steps
// cut anywhere, which has the bits of training.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "eadem/core/device/cpu_device.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"
#include "eadem/modules/auto_hardware_config.h"
#include "eadem/modules/hybrid/sparse/native_sparse_attention.h"
#include "eadem/pipeline/program.h"
#include "tests/support/f32_error.h"

namespace eadem::modules {
namespace native_sparse_attention_test {

using pipeline::Mode;
using pipeline::Program;
using test::expect_f32_error;

std::vector<float> floats_of(const TensorView& view) {
  return {view.as<float>(), view.as<float>() + view.num_elements()};
}

// The golden on one device.
class Golden {
 public:
  explicit Golden(std::shared_ptr<Device> device, const WeightType& kv_cache = DType::f32)
      : device_(std::move(device)),
        weights_(open("model.safetensors")),
        expected_(open("expected.safetensors")),
        hardware_(AutoHardwareConfig::from_model_spec(
            {.layers = 1}, *device_, HardwareMode::accuracy,
            {.weights = DType::f32, .activations = DType::f32, .kv_cache = kv_cache}, "the test")) {
    const io::JsonReader json = io::JsonReader::read((folder() / "config.json").string());
    const auto size = [&](const char* key) { return json.integer(key, 0); };
    config_ = {.hidden = size("hidden"),
               .heads = size("heads"),
               .kv_heads = size("kv_heads"),
               .head_dim = size("head_dim"),
               .value_dim = size("value_dim"),
               .scale = json.number("scale"),
               .grid = {size("length"), size("stride")},
               .span = size("span"),
               .top_n = size("top_n"),
               .first_blocks = size("first_blocks"),
               .local_blocks = size("local_blocks"),
               .window = size("window"),
               .rope = {.theta = json.number("rope_theta"), .rotary_dim = size("head_dim")}};
    lengths_ = json.integers("lengths", 1);
  }

  const NativeSparseAttention::Config& config() const { return config_; }
  const std::vector<int64_t>& lengths() const { return lengths_; }
  const AutoHardwareConfig& hardware() const { return hardware_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  int64_t tokens() const {
    int64_t sum = 0;
    for (const int64_t length : lengths_) sum += length;
    return sum;
  }
  Tensor tensor(const std::string& name) const { return expected_->get(name); }
  std::vector<float> x() const { return floats_of(tensor("x").view); }

  // Our values against the exact ones, as far off as PyTorch's are in f32.
  void expect(const std::string& name, const std::vector<float>& ours) const {
    const Tensor exact = tensor("f64." + name), other = tensor("f32." + name);
    ASSERT_EQ(std::ssize(ours), exact.view.num_elements()) << name;
    const auto* at = exact.view.as<double>();
    expect_f32_error(
        test::deviation(
            ours.size(), [&](size_t i) { return ours[i]; }, [&](size_t i) { return at[i]; }),
        test::deviation(
            ours.size(), [&](size_t i) { return other.view.as<float>()[i]; }, [&](size_t i) { return at[i]; }),
        name);
  }

  // Compiles the module between the input "x" and the output "y".
  std::unique_ptr<Program> compile(const CacheSpec& cache, Mode mode, const SymbolValues& bounds,
                                   std::vector<StateSpec>* states = nullptr) const {
    pipeline::Graph graph;
    BuildContext context{.graph = graph, .device = *device_, .hardware = hardware_, .cache = cache};
    const auto input = [&](const std::string& name, DType dtype, std::initializer_list<Dim> dims) {
      return graph.add_input(name, TensorType(dtype, dims));
    };
    context.step.positions = input("positions", DType::i32, {Symbol::tokens});
    context.step.query_start = input("query_start", DType::i32, {Dim(Symbol::sequences, 1)});
    context.step.kv_length = input("kv_length", DType::i32, {Symbol::sequences});
    for (size_t group = 0; group < cache.num_groups() && cache.layout != CacheLayout::none; ++group)
      context.step.groups.push_back({.block_table = input(group_input(cache, group, "block_table"), DType::i32,
                                                          {Symbol::sequences, Symbol::max_blocks}),
                                     .slots = input(group_input(cache, group, "slots"), DType::i64, {Symbol::tokens})});
    Rope(config_.rope).build_table(context);
    const ValueId x = input("x", DType::f32, {Symbol::tokens, config_.hidden});
    graph.mark_output("y", NativeSparseAttention(config_, 0).build(context, x));
    if (states != nullptr) *states = context.states;
    pipeline::Environment environment{.device = device_, .mode = mode, .bounds = bounds};
    if (mode == Mode::training) environment.input_gradients = {"x"};
    const auto parameters = std::make_shared<pipeline::ParameterStore>(device_);
    auto program = std::make_unique<Program>(std::move(graph), environment, parameters);
    program->require_complete();
    for (const auto& [name, shape] : config_.parameters()) {
      EXPECT_EQ(parameters->whole_shape(name), shape) << name;
      parameters->load(name, weights_->get(name).view, "the golden");
    }
    EXPECT_EQ(parameters->names().size(), config_.parameters().size());
    return program;
  }

 private:
  static std::filesystem::path folder() {
    return std::filesystem::path(EADEM_SOURCE_DIR) / "tests/data/golden/native_sparse_attention";
  }
  static std::shared_ptr<const io::SafetensorsFile> open(const char* name) {
    return io::SafetensorsFile::open((folder() / name).string());
  }

  std::shared_ptr<Device> device_;
  std::shared_ptr<const io::SafetensorsFile> weights_, expected_;
  AutoHardwareConfig hardware_;
  NativeSparseAttention::Config config_;
  std::vector<int64_t> lengths_;
};

template <typename T>
void set_input(Program& program, const std::string& name, const std::vector<T>& values) {
  program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(T)));
}

std::vector<float> output_of(const Program& program, const char* name) {
  const ValueId id = program.output(name);
  std::vector<float> result(static_cast<size_t>(program.view(id).num_elements()));
  program.read(id, result.data());
  return result;
}

SymbolValues step_of(int64_t tokens, int64_t sequences, int64_t max_blocks = 0) {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tokens;
  symbols[Symbol::sequences] = sequences;
  symbols[Symbol::max_blocks] = max_blocks;
  return symbols;
}

// All sequences in one training step: y, dx and the gradients of the parameters, by name.
std::map<std::string, std::vector<float>> train(const Golden& golden) {
  const SymbolValues bounds = step_of(golden.tokens(), std::ssize(golden.lengths()));
  const auto program = golden.compile({}, Mode::training, bounds);
  std::map<std::string, Tensor> gradients;
  for (const auto& [name, id] : program->states()) {
    Tensor& gradient = gradients[name] = allocate_tensor(*golden.device(), program->graph().value(id).type, {});
    fill_zero(*golden.device(), gradient.view);
    program->bind_state(name, gradient.view);
  }
  std::vector<int32_t> positions, start = {0}, length;
  for (const int64_t own : golden.lengths()) {
    for (int32_t p = 0; p < own; ++p) positions.push_back(p);
    start.push_back(static_cast<int32_t>(std::ssize(positions)));
    length.push_back(static_cast<int32_t>(own));
  }
  set_input(*program, "positions", positions);
  set_input(*program, "query_start", start);
  set_input(*program, "kv_length", length);
  set_input(*program, "x", golden.x());
  program->run_forward(bounds);
  std::map<std::string, std::vector<float>> result;
  result["y"] = output_of(*program, "y");
  set_input(*program, "d.y", floats_of(golden.tensor("dy").view));
  program->run_backward(bounds);
  result["dx"] = output_of(*program, "d.x");
  for (const auto& [name, gradient] : gradients) result[name] = floats_of(gradient.view);
  return result;
}

// One sequence, served in steps of `chunk` tokens. Blocks that a window has passed are given back, to a block of zeros.
std::vector<float> serve(const Golden& golden, const CacheSpec& cache, const std::vector<float>& x, int64_t chunk) {
  const int64_t hidden = golden.config().hidden, length = std::ssize(x) / hidden;
  const int64_t max_blocks = (length + cache.block_size - 1) / cache.block_size;
  const auto program = golden.compile(cache, Mode::inference, step_of(chunk, 1, max_blocks));
  std::vector<Tensor> states;
  for (const auto& [name, id] : program->states()) {
    Tensor& state = states.emplace_back(allocate_tensor(*golden.device(), program->graph().value(id).type, {}));
    fill_zero(*golden.device(), state.view);
    program->bind_state(name, state.view);
  }
  std::vector<float> result;
  for (int64_t begin = 0; begin < length; begin += chunk) {
    const int64_t end = std::min(length, begin + chunk);
    std::vector<int32_t> positions;
    for (int64_t p = begin; p < end; ++p) positions.push_back(static_cast<int32_t>(p));
    set_input(*program, "positions", positions);
    set_input(*program, "query_start", std::vector<int32_t>{0, static_cast<int32_t>(end - begin)});
    set_input(*program, "kv_length", std::vector<int32_t>{static_cast<int32_t>(end)});
    set_input(*program, "x", std::vector<float>(x.begin() + begin * hidden, x.begin() + end * hidden));
    for (size_t group = 0; group < cache.num_groups(); ++group) {
      std::vector<int32_t> table;
      std::vector<int64_t> slots;
      for (int64_t i = 0; i < max_blocks; ++i) table.push_back(static_cast<int32_t>(max_blocks - 1 - i));
      for (int64_t p = begin; p < end; ++p)
        slots.push_back(table[static_cast<size_t>(p / cache.block_size)] * cache.block_size + p % cache.block_size);
      if (group > 0) {
        const WindowGroup& window = cache.windows[group - 1];
        const int64_t first = std::max<int64_t>(0, begin - window.window + 1) / cache.block_size;
        std::fill_n(table.begin(), first, static_cast<int32_t>(window.null_block()));
      }
      set_input(*program, group_input(cache, group, "block_table"), table);
      set_input(*program, group_input(cache, group, "slots"), slots);
    }
    program->run(step_of(end - begin, 1, max_blocks));
    const std::vector<float> y = output_of(*program, "y");
    result.insert(result.end(), y.begin(), y.end());
  }
  return result;
}

// Contiguous, paged without groups, and paged with the windows of the module.
std::vector<CacheSpec> caches(const NativeSparseAttention::Config& config) {
  std::vector<CacheSpec> result = {{.layout = CacheLayout::contiguous, .num_blocks = 1, .block_size = 101},
                                   {.layout = CacheLayout::paged, .num_blocks = 30, .block_size = 8}};
  for (const int64_t block_size : {4, 16})
    result.push_back({.layout = CacheLayout::paged,
                      .num_blocks = 30,
                      .block_size = block_size,
                      .windows = {{config.window, 30}, {config.grid.length, 30}}});
  return result;
}

TEST(NativeSparseAttention, TrainsAsPyTorchAndServesTheSameBits) {
  for (const Isa isa : available_isas()) {
    SCOPED_TRACE(isa_name(isa));
    const Golden golden(open_device("cpu", {.num_threads = 2, .isa = isa_name(isa)}));
    const auto trained = train(golden);
    EXPECT_EQ(trained.size(), 2 + golden.config().parameters().size());
    for (const auto& [name, values] : trained) golden.expect(name, values);
    const std::vector<float> x = golden.x();
    const int64_t hidden = golden.config().hidden;
    for (const CacheSpec& cache : caches(golden.config())) {
      int64_t begin = 0;
      for (const int64_t length : golden.lengths()) {
        const std::vector<float> own(x.begin() + begin * hidden, x.begin() + (begin + length) * hidden),
            expected(trained.at("y").begin() + begin * hidden, trained.at("y").begin() + (begin + length) * hidden);
        for (const int64_t chunk : {length, int64_t{1}, int64_t{5}, int64_t{16}}) {
          EXPECT_EQ(serve(golden, cache, own, chunk), expected)
              << length << " tokens in steps of " << chunk << ", blocks of " << cache.block_size;
        }
        begin += length;
      }
    }
  }
}

// Rows are made of what a cache holds, rounded once, and are kept in its type, or in bf16 beside encoded rows.
TEST(NativeSparseAttention, RoundedCachesDoNotShowHowAPromptWasCut) {
  for (const WeightType& kv :
       {WeightType(DType::bf16), WeightType(DType::f16), WeightType{DType::f32, &RowEncoding::int8()},
        WeightType{DType::f32, &RowEncoding::fp8_e4m3()}}) {
    const Golden golden(open_device("cpu", {.num_threads = 2}), kv);
    const int64_t hidden = golden.config().hidden, length = golden.lengths()[0];
    const std::vector<float> x = golden.x(), own(x.begin(), x.begin() + length * hidden);
    const std::vector<float> expected = serve(golden, caches(golden.config())[0], own, length);
    for (const CacheSpec& cache : caches(golden.config()))
      for (const int64_t chunk : {1, 5, 16})
        EXPECT_EQ(serve(golden, cache, own, chunk), expected) << kv.name() << ", steps of " << chunk;
  }
}

TEST(NativeSparseAttention, TheDefinitionsAgreeWithPyTorch) {
  const Golden golden(open_device("reference"));
  for (const auto& [name, values] : train(golden)) golden.expect(name, values);
}

// Rows of several tokens, the keys they are made of, a window, and what is kept for all tokens.
TEST(NativeSparseAttention, DeclaresItsStates) {
  const Golden golden(open_device("cpu", {.num_threads = 1}));
  std::vector<StateSpec> states;
  golden.compile(caches(golden.config())[2], Mode::inference, step_of(1, 1, 1), &states);
  std::map<std::string, std::pair<int64_t, int64_t>> windows_and_strides;
  for (const StateSpec& state : states) windows_and_strides[state.name] = {state.window, state.stride};
  const std::map<std::string, std::pair<int64_t, int64_t>> expected = {
      {"compressed.k_cache", {8, 1}}, {"compressed.v_cache", {8, 1}}, {"compressed.k_rows", {0, 4}},
      {"compressed.v_rows", {0, 4}},  {"selected.k_cache", {0, 1}},   {"selected.v_cache", {0, 1}},
      {"window.k_cache", {7, 1}},     {"window.v_cache", {7, 1}}};
  EXPECT_EQ(windows_and_strides, expected);
}

TEST(NativeSparseAttention, IsNotDividedOverRanks) {
  const Golden golden(open_device("cpu", {.num_threads = 1}));
  pipeline::Graph graph;
  BuildContext context{
      .graph = graph, .device = *golden.device(), .hardware = golden.hardware(), .cache = {}, .num_ranks = 2};
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::tokens, golden.config().hidden}));
  EXPECT_THROW(NativeSparseAttention(golden.config(), 0).build(context, x), Unsupported);
}

}  // namespace native_sparse_attention_test
}  // namespace eadem::modules
