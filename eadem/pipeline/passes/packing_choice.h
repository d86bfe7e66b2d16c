// SPDX-License-Identifier: Apache-2.0
//
// Packings of parameters, chosen jointly for all programs that read them: a parameter is kept in one layout, so that no
// model is kept twice. Training keeps several layouts (a weight and its transposed packing) and does not take part.
#pragma once

#include "eadem/pipeline/parameter_store.h"
#include "eadem/pipeline/passes/kernel_cover.h"

namespace eadem::pipeline {

// A program whose kernels were each chosen alone.
struct PackingReader {
  const Graph* graph;
  const Device* device;
  SymbolValues bounds;
  std::vector<KernelChoice>* choices;  // one per node; may change
};

// Changes choices so that each parameter is read in one layout by all readers, where its kernels allow that: the layout
// that takes the least modelled time of all programs, or the one that `parameters` already holds for earlier programs.
// Decisions say of kernels that would need another layout that they read one that is not kept. A parameter of which no
// layout serves all its readers is kept in several.
void agree_on_packings(std::span<const PackingReader> readers, const ParameterStore& parameters);

}  // namespace eadem::pipeline
