// SPDX-License-Identifier: Apache-2.0
//
// Names of models, over caches that are made here with the layouts of huggingface_hub 2.4, llama.cpp and Ollama.
#include "eadem/models/locator/model_locator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>

#include "tests/io/test_files.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

namespace fs = std::filesystem;

constexpr const char* kA = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
constexpr const char* kB = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
constexpr const char* kAb = "aabbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

ModelFolders from(const std::map<std::string, std::string>& variables) {
  return ModelFolders::from([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

class ModelLocator : public ::testing::Test {
 protected:
  ModelLocator() { folders_ = from({{"HOME", scratch_.path()}, {"OLLAMA_MODELS", scratch_.file("ollama")}}); }

  void write(const fs::path& path, std::string_view content) const {
    const fs::path whole = root_ / path;
    fs::create_directories(whole.parent_path());
    fs::remove(whole);
    scratch_.write(whole.lexically_relative(root_).string(), content);
  }
  void link(const fs::path& path, const fs::path& target) const {
    fs::create_directories((root_ / path).parent_path());
    fs::create_symlink(target, root_ / path);
  }
  std::string locate(const std::string& name) const { return locate_model(name, folders_).path; }
  // The path below the scratch directory.
  std::string below(const std::string& name) const { return fs::path(locate(name)).lexically_relative(root_).string(); }
  std::string notice(const std::string& name) const { return locate_model(name, folders_).notice; }
  std::string refusal(const std::string& name) const {
    return test::refusal([&] { locate(name); });
  }

  // A file of a snapshot, as huggingface_hub stores it: a blob, and a link to it.
  void hub_file(const std::string& repository, const std::string& commit, const fs::path& file,
                std::string_view content = "x") const {
    const fs::path folder = fs::path(kHub) / repository;
    const std::string blob = commit.substr(0, 8) + fs::path(file).filename().string();
    write(folder / "blobs" / blob, content);
    const fs::path at = folder / "snapshots" / commit / file;
    link(at, fs::relative(root_ / folder / "blobs" / blob, (root_ / at).parent_path()));
  }
  void hub_model(const std::string& repository, const std::string& commit) const {
    for (const char* file : {"config.json", "model.safetensors", "tokenizer.json"}) hub_file(repository, commit, file);
  }
  void hub_ref(const std::string& repository, const std::string& ref, std::string_view commit) const {
    write(fs::path(kHub) / repository / "refs" / ref, commit);
  }
  void set_age(const std::string& repository, const std::string& commit, int hours) const {
    fs::last_write_time(root_ / kHub / repository / "snapshots" / commit,
                        fs::file_time_type::clock::now() - std::chrono::hours(hours));
  }
  static std::string snapshot(const std::string& repository, const std::string& commit) {
    return std::string(kHub) + "/" + repository + "/snapshots/" + commit;
  }

  // A blob of Ollama's store, named by a digest that is made of one digit; returns the digest.
  std::string ollama_blob(char digit, std::string_view content) const {
    write(fs::path("ollama/blobs") / ("sha256-" + std::string(64, digit)), content);
    return "sha256:" + std::string(64, digit);
  }
  static std::string manifest(const std::string& digest, int64_t size = 5,
                              const char* type = "application/vnd.ollama.image.model") {
    return fmt::format(
        R"({{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json",
            "config":{{"mediaType":"application/vnd.docker.container.image.v1+json","digest":"sha256:0","size":1}},
            "layers":[{{"mediaType":"{}","digest":"{}","size":{}}},
                      {{"mediaType":"application/vnd.ollama.image.template","digest":"sha256:1","size":1}}]}})",
        type, digest, size);
  }

  static constexpr const char* kHub = ".cache/huggingface/hub";
  io::ScratchDirectory scratch_;
  fs::path root_ = fs::canonical(scratch_.path());
  ModelFolders folders_;
};

// ---- Where ---------------------------------------------------------------------------------------------------------

TEST(ModelFolders, VariablesInTheOrderInWhichTheirProgramsReadThem) {
  using List = std::vector<std::string>;
  std::map<std::string, std::string> variables;
  EXPECT_EQ(from(variables).hub, List{});
  EXPECT_EQ(from(variables).own, "");
  EXPECT_EQ(from(variables).llama_cpp, "");
  EXPECT_EQ(from(variables).ollama, List{"/usr/share/ollama/.ollama/models"});
  variables["HOME"] = "/home/ada";
  EXPECT_EQ(from(variables).hub, List{"/home/ada/.cache/huggingface/hub"});
  EXPECT_EQ(from(variables).llama_cpp, "/home/ada/.cache/llama.cpp");
  EXPECT_EQ(from(variables).ollama, (List{"/home/ada/.ollama/models", "/usr/share/ollama/.ollama/models"}));
  variables["XDG_CACHE_HOME"] = "/xdg";
  EXPECT_EQ(from(variables).hub, List{"/xdg/huggingface/hub"});
  EXPECT_EQ(from(variables).llama_cpp, "/xdg/llama.cpp");
  variables["HF_HOME"] = "~/hf";
  EXPECT_EQ(from(variables).hub, List{"/home/ada/hf/hub"});
  variables["HUGGINGFACE_HUB_CACHE"] = "/old";
  EXPECT_EQ(from(variables).hub, List{"/old"});
  variables["HF_HUB_CACHE"] = "/new";
  EXPECT_EQ(from(variables).hub, List{"/new"});
  variables["HF_HUB_CACHE"] = "";
  EXPECT_EQ(from(variables).hub, List{"/old"});
  variables["LLAMA_CACHE"] = "/llama";
  EXPECT_EQ(from(variables).hub, (List{"/old", "/llama"}));
  EXPECT_EQ(from(variables).llama_cpp, "/llama");
  variables["OLLAMA_MODELS"] = "/ollama";
  EXPECT_EQ(from(variables).ollama, List{"/ollama"});
  variables["EADEM_MODELS"] = "/mine";
  EXPECT_EQ(from(variables).own, "/mine");
}

TEST_F(ModelLocator, APathWinsThenABundledModelThenTheUsersFolder) {
  hub_model("models--thing", kA);
  EXPECT_EQ(below("thing"), snapshot("models--thing", kA));
  write("mine/thing/config.json", "{}");
  folders_.own = scratch_.file("mine");
  EXPECT_EQ(below("thing"), "mine/thing");
  EXPECT_HAS(notice("thing"), "EADEM_MODELS");
  write("bundled/thing/config.json", "{}");
  folders_.bundled = {scratch_.file("nowhere"), scratch_.file("bundled")};
  EXPECT_EQ(below("thing"), "bundled/thing");
  EXPECT_EQ(notice("thing"), "");
  write("here/thing", "");
  const fs::path before = fs::current_path();
  fs::current_path(root_ / "here");
  EXPECT_EQ(locate("thing"), "thing");
  EXPECT_EQ(notice("thing"), "");
  fs::current_path(before);
  EXPECT_EQ(locate(scratch_.file("here")), scratch_.file("here"));
}

TEST_F(ModelLocator, TheUsersFolderMayHaveFoldersAndFiles) {
  write("mine/org/name/config.json", "{}");
  write("mine/small.gguf", "GGUF");
  write("outside.gguf", "GGUF");
  folders_.own = scratch_.file("mine");
  EXPECT_EQ(below("org/name"), "mine/org/name");
  EXPECT_EQ(below("small"), "mine/small.gguf");
  EXPECT_EQ(below("small.gguf"), "mine/small.gguf");
  EXPECT_HAS(refusal("../outside"), "NotFound: ../outside: no such file");
  EXPECT_HAS(refusal("org/../../outside"), "NotFound");
  EXPECT_HAS(refusal(""), "NotFound");
}

TEST_F(ModelLocator, TheUsersFolderMayHaveSplitModels) {
  folders_.own = scratch_.file("mine");
  EXPECT_HAS(refusal("large"), "NotFound");  // nor is there a folder
  write("mine/large-00002-of-00002.gguf", "GGUF");
  EXPECT_HAS(refusal("large"), "NotFound");  // nor a first part
  write("mine/large-00001-of-00002.gguf", "GGUF");
  write("mine/larger-00001-of-00002.gguf", "GGUF");
  write("mine/org/deep-00001-of-00012.gguf", "GGUF");
  EXPECT_EQ(below("large"), "mine/large-00001-of-00002.gguf");
  EXPECT_HAS(notice("large"), "EADEM_MODELS");
  EXPECT_EQ(below("org/deep"), "mine/org/deep-00001-of-00012.gguf");
  EXPECT_EQ(below("large-00002-of-00002"), "mine/large-00002-of-00002.gguf");
  EXPECT_HAS(refusal("../mine/large"), "NotFound");
  EXPECT_HAS(refusal("lar"), "NotFound");
  EXPECT_HAS(refusal("nowhere/large"), "NotFound");
  write("mine/large-00001-of-00003.gguf", "GGUF");
  const std::string words = refusal("large");
  EXPECT_HAS(words, "InvalidArgument: large may be any of 2 split models; name the path of one: ");
  EXPECT_HAS(words, "large-00001-of-00002.gguf, ");
  EXPECT_HAS(words, "large-00001-of-00003.gguf");
  write("mine/large.gguf", "GGUF");
  EXPECT_EQ(below("large"), "mine/large.gguf");
}

// ---- Missing -------------------------------------------------------------------------------------------------------

TEST_F(ModelLocator, WhatIsMissingIsAnsweredWithTheCommandThatFetchesIt) {
  folders_.bundled = {"/bundled"};
  folders_.own = "/mine";
  for (const char* place : {"/mine", kHub, ".cache/llama.cpp", "ollama", "no model of that name"})
    EXPECT_HAS(refusal("org/name"), place);
  EXPECT_HAS(refusal("org/name"), "`hf download org/name` fetches it");
  EXPECT_HAS(refusal("org/name@v1"), "`hf download org/name --revision v1`");
  EXPECT_HAS(refusal("org/name:Q4_K_M"), "`hf download org/name --include '*Q4_K_M*'`");
  EXPECT_HAS(refusal("llama3.2:1b"), "`ollama pull llama3.2:1b` fetches it");
  EXPECT_HAS(refusal("hf.co/org/name:Q8_0"), "`ollama pull hf.co/org/name:Q8_0`");
  EXPECT_HAS(refusal("llama3.2"), "no bundled model of that name (/bundled)");
}

TEST_F(ModelLocator, WhatIsNoNameIsNotLookedFor) {
  for (const char* text : {"Once upon a time", "./name", "../name", "/nowhere/name", "org/..", "a/b/c/d", "org//name",
                           "org/name@", "org/name:", "-m", ".hidden", "org/na..me", "org/name/", "a@b@c/d e"}) {
    EXPECT_HAS(refusal(text), "NotFound: ") << text;
    EXPECT_HAS(refusal(text), ": no such file or directory") << text;
    EXPECT_EQ(refusal(text).find("fetches it"), std::string::npos) << refusal(text);
  }
}

// ---- Hugging Face --------------------------------------------------------------------------------------------------

TEST_F(ModelLocator, HubTakesMainAndSaysSo) {
  hub_model("models--org--name", kA);
  hub_model("models--org--name", kB);
  hub_ref("models--org--name", "main", kA);
  set_age("models--org--name", kA, 5);
  EXPECT_EQ(below("org/name"), snapshot("models--org--name", kA));
  EXPECT_HAS(notice("org/name"), "using org/name from the Hugging Face cache, main at aaaaaaa (");
  fs::remove(root_ / kHub / "models--org--name/refs/main");
  EXPECT_EQ(below("org/name"), snapshot("models--org--name", kB)) << "the newest";
  set_age("models--org--name", kB, 9);
  EXPECT_EQ(below("org/name"), snapshot("models--org--name", kA));
}

TEST_F(ModelLocator, HubPassesOverSnapshotsThatAreNotComplete) {
  const std::string name = "models--org--name";
  hub_model(name, kB);
  set_age(name, kB, 100);
  hub_ref(name, "main", kA);
  // 1. Only a config.json.
  hub_file(name, kA, "config.json", "{}");
  EXPECT_EQ(below("org/name"), snapshot(name, kB));
  EXPECT_HAS(notice("org/name"),
             "bbbbbbb; main at aaaaaaa holds neither a config.json with safetensors nor a GGUF file");
  // 2. One of two shards.
  hub_file(
      name, kA, "model.safetensors.index.json",
      R"({"metadata":{},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}})");
  hub_file(name, kA, "model-00001-of-00002.safetensors");
  EXPECT_HAS(notice("org/name"), "main at aaaaaaa lacks model-00002-of-00002.safetensors");
  // 3. Both, one of which leads nowhere.
  hub_file(name, kA, "model-00002-of-00002.safetensors");
  EXPECT_EQ(below("org/name"), snapshot(name, kA));
  fs::remove(root_ / kHub / name / "blobs/aaaaaaaamodel-00002-of-00002.safetensors");
  EXPECT_HAS(notice("org/name"), "lacks the content of model-00002-of-00002.safetensors");
  // 4. A download that has not ended, and nothing complete.
  fs::remove_all(root_ / kHub / name / "snapshots" / kB);
  write(fs::path(kHub) / name / "blobs/aaaaaaaa.incomplete", "x");
  EXPECT_HAS(refusal("org/name"),
             "NotFound: org/name: no such file or directory, and no complete model of that name in");
  EXPECT_HAS(refusal("org/name"),
             "lacks the content of model-00002-of-00002.safetensors; `hf download org/name` fetches");
  fs::remove(root_ / kHub / name / "snapshots" / kA / "model-00002-of-00002.safetensors");
  link(fs::path(kHub) / name / "snapshots" / kA / "model-00002-of-00002.safetensors",
       "../../blobs/aaaaaaaa.incomplete");
  EXPECT_HAS(refusal("org/name"), "lacks the content of model-00002-of-00002.safetensors");
  hub_file(name, kB, "config.json");
  hub_file(name, kB, "model.safetensors");
  EXPECT_HAS(notice("org/name"), "a download into it has not ended");
  fs::remove_all(root_ / kHub / name / "snapshots");
  EXPECT_HAS(refusal("org/name"), "holds no snapshot");
}

TEST_F(ModelLocator, HubRevisions) {
  const std::string name = "models--org--name";
  for (const char* commit : {kA, kB, kAb}) hub_model(name, commit);
  hub_ref(name, "main", kA);
  hub_ref(name, "v1.0", std::string(kB) + "\n");
  hub_ref(name, "refs/pr/1", kAb);
  hub_ref(name, "gone", std::string(40, 'c'));
  EXPECT_EQ(below("org/name@v1.0"), snapshot(name, kB));
  EXPECT_EQ(below("org/name@refs/pr/1"), snapshot(name, kAb));
  EXPECT_EQ(below(std::string("org/name@") + kB), snapshot(name, kB));
  EXPECT_EQ(below("org/name@bbbb"), snapshot(name, kB));
  EXPECT_EQ(below("org/name@main"), snapshot(name, kA));
  EXPECT_HAS(refusal("org/name@aa"), "InvalidArgument: org/name@aa may be any of 2 commits");
  EXPECT_HAS(refusal("org/name@v2"), "holds no snapshot of the revision v2; `hf download org/name --revision v2`");
  EXPECT_HAS(refusal("org/name@gone"), "holds no snapshot of the revision gone");
  EXPECT_HAS(refusal("org/name@../../x"), "holds no snapshot");
}

TEST_F(ModelLocator, HubSharesContentsBetweenRepositories) {
  hub_model("models--org--name", kA);
  const fs::path blob = root_ / kHub / "models--org--name/blobs/aaaaaaaamodel.safetensors";
  fs::create_directories(root_ / kHub / "blobs/ab");
  fs::rename(blob, root_ / kHub / "blobs/ab/abcd");
  fs::create_symlink("../../blobs/ab/abcd", blob);
  EXPECT_EQ(below("org/name"), snapshot("models--org--name", kA));
}

TEST_F(ModelLocator, HubGgufFilesAreChosenByTag) {
  const std::string name = "models--org--name-GGUF";
  hub_ref(name, "main", kA);
  hub_file(name, kA, "name-Q4_K_M.gguf");
  hub_file(name, kA, "mmproj-name-f16.gguf");
  hub_file(name, kA, "name.imatrix.gguf");
  const std::string at = snapshot(name, kA) + "/";
  EXPECT_EQ(below("org/name-GGUF"), at + "name-Q4_K_M.gguf");
  hub_file(name, kA, "name-Q8_0.gguf");
  hub_file(name, kA, "name-UD-Q8_0.gguf");
  hub_file(name, kA, "BF16/name-BF16-00001-of-00002.gguf");
  hub_file(name, kA, "BF16/name-BF16-00002-of-00002.gguf");
  EXPECT_EQ(below("org/name-GGUF:Q4_K_M"), at + "name-Q4_K_M.gguf");
  EXPECT_EQ(below("org/name-GGUF:q4_k_m"), at + "name-Q4_K_M.gguf");
  EXPECT_EQ(below("org/name-GGUF:Q4_K_M@main"), at + "name-Q4_K_M.gguf");
  EXPECT_EQ(below("org/name-GGUF:UD-Q8_0"), at + "name-UD-Q8_0.gguf");
  EXPECT_EQ(below("org/name-GGUF:name-Q8_0"), at + "name-Q8_0.gguf");
  EXPECT_EQ(below("org/name-GGUF:name-Q8_0.gguf"), at + "name-Q8_0.gguf");
  EXPECT_EQ(below("org/name-GGUF:BF16"), at + "BF16/name-BF16-00001-of-00002.gguf");
  EXPECT_HAS(refusal("org/name-GGUF:Q8_0"), "InvalidArgument: org/name-GGUF:Q8_0 may be any of 2 GGUF files");
  EXPECT_HAS(refusal("org/name-GGUF:Q8_0"), "org/name-GGUF:name-Q8_0.gguf, org/name-GGUF:name-UD-Q8_0.gguf");
  EXPECT_HAS(refusal("org/name-GGUF"), "may be any of 4 GGUF files");
  EXPECT_HAS(refusal("org/name-GGUF:Q2_K"), "holds no GGUF file of the tag Q2_K");
  EXPECT_HAS(refusal("org/name-GGUF:Q4_K"), "NotFound");
  // A repository with both is a folder, unless a tag says otherwise.
  for (const char* file : {"config.json", "model.safetensors"}) hub_file(name, kA, file);
  EXPECT_EQ(below("org/name-GGUF"), snapshot(name, kA));
  EXPECT_EQ(below("org/name-GGUF:Q4_K_M"), at + "name-Q4_K_M.gguf");
  // A split file is complete with all of its parts.
  fs::remove(root_ / at / "BF16/name-BF16-00002-of-00002.gguf");
  EXPECT_HAS(refusal("org/name-GGUF:BF16"), "lacks BF16/name-BF16-00002-of-00002.gguf; `hf download org/name-GGUF");
}

TEST_F(ModelLocator, HubPicklesAreLeftToTheReaderOfWeights) {
  for (const char* file : {"config.json", "pytorch_model.bin"}) hub_file("models--gpt2", kA, file);
  EXPECT_EQ(below("gpt2"), snapshot("models--gpt2", kA));
}

TEST_F(ModelLocator, HubLinksOutOfTheCacheAreRefused) {
  const std::string name = "models--org--name";
  hub_model(name, kA);
  write("secret", "x");
  const fs::path file = fs::path(kHub) / name / "snapshots" / kA / "generation_config.json";
  link(file, root_ / "secret");
  EXPECT_HAS(refusal("org/name"), "DataCorrupted: ");
  EXPECT_HAS(refusal("org/name"), "generation_config.json leads out of " + (root_ / kHub).string());
  fs::remove(root_ / file);
  link(fs::path(kHub) / name / "refs/main", root_ / "secret");
  EXPECT_HAS(refusal("org/name"), "refs/main leads out of ");
  link(fs::path(kHub) / "models--org--moved", root_ / "elsewhere");
  EXPECT_HAS(refusal("org/moved"), "NotFound: ");
  fs::create_directories(root_ / "elsewhere");
  EXPECT_HAS(refusal("org/moved"), "models--org--moved leads out of ");
  link(fs::path(kHub) / "models--org--loop", "models--org--loop");
  EXPECT_HAS(refusal("org/loop"), "IoError: ");
}

TEST_F(ModelLocator, HubFilesThatContradictTheLayoutAreRefused) {
  const std::string name = "models--org--name";
  hub_file(name, kA, "config.json");
  hub_ref(name, "main", "../../../secret");
  EXPECT_HAS(refusal("org/name"), "DataCorrupted: ");
  EXPECT_HAS(refusal("org/name"), "refs/main holds '../../../secret', which is no commit");
  hub_ref(name, "main", kA);
  for (const char* index : {"{", "[]", R"({"weight_map":[]})", R"({"weight_map":{"a":1}})", R"({})"}) {
    hub_file(name, kB, "config.json");
    fs::remove_all(root_ / kHub / name / "snapshots" / kA);
    hub_file(name, kA, "config.json");
    hub_file(name, kA, "model.safetensors.index.json", index);
    EXPECT_HAS(refusal("org/name"), "DataCorrupted: ") << index;
    EXPECT_HAS(refusal("org/name"), "model.safetensors.index.json") << index;
    fs::remove_all(root_ / kHub / name / "snapshots" / kB);
  }
  hub_file(name, kB, "config.json");
  fs::remove_all(root_ / kHub / name / "snapshots" / kA);
  hub_file(name, kA, "config.json");
  hub_file(name, kA, "model.safetensors.index.json", R"({"weight_map":{"a":"../../../../../../secret"}})");
  write("secret", "x");
  EXPECT_HAS(refusal("org/name"), "lacks ../../../../../../secret");
  write(fs::path(kHub) / "models--org--file", "no folder");
  EXPECT_HAS(refusal("org/file"), "holds no snapshot");
}

// ---- llama.cpp -----------------------------------------------------------------------------------------------------

TEST_F(ModelLocator, LlamaCppFiles) {
  const fs::path cache = ".cache/llama.cpp";
  write(cache / "org_name_name-Q4_K_M.gguf", "GGUF");
  write(cache / "org_name_name-Q4_K_M.gguf.etag", "x");
  write(cache / "org_name_mmproj-f16.gguf", "GGUF");
  EXPECT_EQ(below("org/name"), cache / "org_name_name-Q4_K_M.gguf");
  EXPECT_EQ(below("org/name:Q4_K_M"), cache / "org_name_name-Q4_K_M.gguf");
  EXPECT_HAS(notice("org/name"), "using org/name from llama.cpp's cache (");
  EXPECT_HAS(refusal("org/name:Q8_0"), "NotFound");
  EXPECT_HAS(refusal("org/name@main"), "NotFound");
  EXPECT_HAS(refusal("org/nam"), "NotFound");
  write(cache / "org_name_name-Q8_0.gguf.downloadInProgress", "x");
  EXPECT_HAS(refusal("org/name:Q8_0"), "the download of org_name_name-Q8_0.gguf in ");
  write(cache / "org_name_sub_name-F16.gguf", "GGUF");
  EXPECT_HAS(refusal("org/name"), "may be any of 2 GGUF files");
  EXPECT_EQ(below("org/name:F16"), cache / "org_name_sub_name-F16.gguf");
}

TEST_F(ModelLocator, LlamaCppManifestsSayWhichFileATagMeans) {
  const fs::path cache = ".cache/llama.cpp";
  write(cache / "org_name_sub_one.gguf", "GGUF");
  write(cache / "org_name_two.gguf", "GGUF");
  write(cache / "manifest=org=name=latest.json", R"({"ggufFile":{"rfilename":"sub/one.gguf","size":4}})");
  write(cache / "manifest=org=name=Q8_0.json", R"({"ggufFile":{"rfilename":"two.gguf"},"mmprojFile":null})");
  EXPECT_EQ(below("org/name"), cache / "org_name_sub_one.gguf");
  EXPECT_EQ(below("org/name:Q8_0"), cache / "org_name_two.gguf");
  fs::remove(root_ / cache / "org_name_two.gguf");
  EXPECT_HAS(refusal("org/name:Q8_0"), "manifest=org=name=Q8_0.json names two.gguf, which is not there");
  // The files of org/name_long begin as those of org/name do.
  write(cache / "org_name_long_three.gguf", "GGUF");
  write(cache / "manifest=org=name_long=latest.json", R"({"ggufFile":{"rfilename":"three.gguf"}})");
  fs::remove(root_ / cache / "manifest=org=name=latest.json");
  EXPECT_EQ(below("org/name"), cache / "org_name_sub_one.gguf");
  EXPECT_EQ(below("org/name_long"), cache / "org_name_long_three.gguf");
}

TEST_F(ModelLocator, LlamaCppFilesThatAreSplit) {
  const fs::path cache = ".cache/llama.cpp";
  write(cache / "org_name_a-00001-of-00003.gguf", "GGUF");
  write(cache / "org_name_a-00003-of-00003.gguf", "GGUF");
  EXPECT_HAS(refusal("org/name"), "org_name_a-00002-of-00003.gguf in ");
  write(cache / "org_name_a-00002-of-00003.gguf", "GGUF");
  EXPECT_EQ(below("org/name"), cache / "org_name_a-00001-of-00003.gguf");
  write(cache / "manifest=org=name=latest.json", R"({"ggufFile":{"rfilename":"a-00001-of-00003.gguf"}})");
  EXPECT_EQ(below("org/name"), cache / "org_name_a-00001-of-00003.gguf");
}

TEST_F(ModelLocator, LlamaCppFilesThatContradictTheLayoutAreRefused) {
  const fs::path cache = ".cache/llama.cpp";
  write("secret.gguf", "GGUF");
  link(cache / "org_name_a.gguf", root_ / "secret.gguf");
  EXPECT_HAS(refusal("org/name"), "DataCorrupted: ");
  EXPECT_HAS(refusal("org/name"), "org_name_a.gguf leads out of ");
  write(cache / "x_y_a.gguf", "GGUF");
  for (const char* manifest : {"{", "[]", R"({"ggufFile":"a.gguf"})", R"({"ggufFile":{"rfilename":1}})"}) {
    write(cache / "manifest=x=y=latest.json", manifest);
    EXPECT_HAS(refusal("x/y"), "DataCorrupted: ") << manifest;
    EXPECT_HAS(refusal("x/y"), "manifest=x=y=latest.json") << manifest;
  }
  write(cache / "manifest=x=y=latest.json", R"({"ggufFile":{"rfilename":"../../secret.gguf"}})");
  EXPECT_EQ(below("x/y"), cache / "x_y_a.gguf") << "what a manifest names must be a file of the repository";
}

TEST_F(ModelLocator, LlamaCppMayKeepTheHubsLayout) {
  folders_ = from({{"HOME", "/nowhere"}, {"LLAMA_CACHE", (root_ / kHub).string()}});
  hub_file("models--org--name-GGUF", kA, "name-Q4_K_M.gguf");
  EXPECT_EQ(below("org/name-GGUF"), snapshot("models--org--name-GGUF", kA) + "/name-Q4_K_M.gguf");
}

// ---- Ollama --------------------------------------------------------------------------------------------------------

TEST_F(ModelLocator, OllamaModels) {
  const std::string a = "ollama/blobs/sha256-" + std::string(64, 'a'),
                    b = "ollama/blobs/sha256-" + std::string(64, 'b');
  const std::string digest_a = ollama_blob('a', "GGUF1"), digest_b = ollama_blob('b', "GGUF2");
  write("ollama/manifests/registry.ollama.ai/library/llama3.2/latest", manifest(digest_a));
  write("ollama/manifests/registry.ollama.ai/library/llama3.2/1b", manifest(digest_b));
  write("ollama/manifests/registry.ollama.ai/ada/tales/latest", manifest(digest_a));
  write("ollama/manifests/hf.co/org/name-GGUF/Q4_K_M", manifest(digest_b));
  EXPECT_EQ(below("llama3.2"), a);
  EXPECT_EQ(below("llama3.2:latest"), a);
  EXPECT_EQ(below("llama3.2:1b"), b);
  EXPECT_EQ(below("ada/tales"), a);
  EXPECT_EQ(below("org/name-GGUF:Q4_K_M"), b);
  EXPECT_EQ(below("hf.co/org/name-GGUF:Q4_K_M"), b);
  EXPECT_HAS(notice("llama3.2:1b"), "from Ollama's store, manifests/registry.ollama.ai/library/llama3.2/1b (");
  EXPECT_HAS(refusal("llama3.2:7b"), "`ollama pull llama3.2:7b`");
  EXPECT_HAS(refusal("llama3.2:../../x"), "NotFound");
  EXPECT_HAS(refusal("llama3.2@main"), "NotFound");
}

TEST_F(ModelLocator, OllamaManifestsMayBeLinksToBlobs) {
  const std::string digest = ollama_blob('a', "GGUF1");
  ollama_blob('c', manifest(digest));
  link("ollama/manifests-v2/ollama.com/library/llama3.2/latest", "../../../../blobs/sha256-" + std::string(64, 'c'));
  EXPECT_EQ(below("llama3.2"), "ollama/blobs/sha256-" + std::string(64, 'a'));
}

TEST_F(ModelLocator, OllamaStoresThatContradictThemselvesAreRefused) {
  const std::string path = "ollama/manifests/registry.ollama.ai/library/m/latest";
  const std::string good = ollama_blob('a', "GGUF1");
  const auto refused = [&](const std::string& text) {
    write(path, text);
    return refusal("m");
  };
  for (const char* text : {"", "{", "[]", "{}", R"({"layers":1})", R"({"layers":[1]})", R"({"layers":[{}]})"})
    EXPECT_HAS(refused(text), "DataCorrupted: ") << text;
  for (const std::string& digest :
       {std::string("sha256:../../secret"), std::string("sha256:"), "sha512:" + std::string(64, 'a'),
        "sha256:" + std::string(64, 'A'), "sha256:" + std::string(63, 'a') + "/", std::string("\\u001b[2J")})
    EXPECT_HAS(refused(manifest(digest)), "DataCorrupted: ") << digest;
  EXPECT_HAS(refused(manifest("sha256:../../secret")),
             "the model's digest is 'sha256:../../secret'; expected sha256: and 64 hexadecimal digits");
  EXPECT_HAS(refused(manifest("sha256:" + std::string(64, 'd'))), "which is not there");
  EXPECT_HAS(refused(manifest(good, 6)), " has 5 of 6 bytes; `ollama pull m` fetches it");
  EXPECT_HAS(refused(manifest(good, -1)), "DataCorrupted: ");
  EXPECT_HAS(refused(manifest(good, 5, "application/vnd.ollama.image.tensor")), "Unsupported: ");
  EXPECT_HAS(refused(manifest(good, 5, "application/vnd.ollama.image.adapter")), "adds an adapter");
  EXPECT_HAS(refused(R"({"mediaType":"application/vnd.ollama.manifest.list.v2+json","manifests":[]})"),
             "lists several manifests");
  write(path, manifest(good));
  EXPECT_EQ(refusal("m"), "");
  write("secret", "GGUF1");
  fs::remove(root_ / "ollama/blobs" / ("sha256-" + std::string(64, 'a')));
  link("ollama/blobs/sha256-" + std::string(64, 'a'), root_ / "secret");
  EXPECT_HAS(refusal("m"), "leads out of ");
  write("manifest", manifest(good));
  fs::remove(root_ / path);
  link(path, root_ / "manifest");
  EXPECT_HAS(refusal("m"), "m/latest leads out of ");
}

}  // namespace
}  // namespace eadem::models
