// SPDX-License-Identifier: Apache-2.0
//
// From what a user calls a model to its files on this machine. Nothing is ever downloaded: what is missing is answered
// with the command that would fetch it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace eadem::models {

// The folders in which models are looked for, in this order. An empty name is a place that there is not.
struct ModelFolders {
  std::vector<std::string> bundled;  // each holds models that came with the program, as folders
  std::string own;                   // a folder of models of the user's: EADEM_MODELS
  std::vector<std::string> hub;      // caches of Hugging Face's layout: models--ORG--NAME
  std::string llama_cpp;             // llama.cpp's flat cache: ORG_NAME_FILE.gguf
  std::vector<std::string> ollama;   // Ollama's stores: blobs and manifests

  // The places that the programs themselves use, from the environment variables that they read. `variable` returns the
  // value of one; an empty value counts as none.
  using Variable = std::function<std::optional<std::string>(const char* name)>;
  static ModelFolders from(const Variable& variable);
  static ModelFolders from_environment();  // does not fill `bundled`
};

struct LocatedModel {
  std::string path;    // for open_checkpoint
  std::string notice;  // what was taken, for a user to read; empty for a path and for a bundled model
};

// The path of the bundled model of that name, if there is one.
std::optional<std::string> find_bundled(const std::string& name, const ModelFolders& folders);

// Finds a model. `text` is the first of these that is there:
//
//   a path                              is returned as it is
//   NAME                                of a bundled model
//   a path below the user's folder      without "..", and without or with its ending .gguf or -00001-of-0000N.gguf
//   [HOST/][ORG/]NAME[:TAG][@REVISION]  in the caches
//
// In a hub cache, REVISION is a branch, a tag or the start of a commit; without one, the snapshot of `main` is taken,
// or else the newest that is complete. A TAG chooses among several GGUF files as `llama-cli -hf` does: by the word at
// the end of their names, or by the whole name. In Ollama's store it is the model's tag, by default `latest`.
//
// Throws NotFound, saying where it looked, what is incomplete and what would fetch the model; InvalidArgument with the
// choices when several files fit; DataCorrupted for a cache that contradicts its layout or leads out of itself;
// Unsupported for a model that is there in a form that Eadem cannot run. Any thread may call it.
LocatedModel locate_model(const std::string& text, const ModelFolders& folders);

}  // namespace eadem::models
