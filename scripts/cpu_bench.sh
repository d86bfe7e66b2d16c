#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/cpu_bench.sh [--busy] [--peer-python PYTHON] [--frameworks-python PYTHON] [--models DIR] [--prompts N,...]
# [--large] [--keep DIR] [SECTION ...]: measures this machine's CPU and writes the record
# benchmarks/results/<processor>/<commit>.json. Sections, by default all but frameworks:
#   ceilings  what the machine can do (eadem_ceilings)
#   ops       every op and kernel on the shapes of Llama-3.2-1B and Qwen2.5-0.5B (eadem_op_bench)
#   models    `eadem bench`: the bundled model, and every config in benchmarks/models
#   peers     Eadem and llama.cpp on the same GGUF files, turn by turn (benchmarks/peers). Needs --peer-python, the
#             interpreter of an environment with benchmarks/peers/requirements.txt; files are made in --models
#             (default: build/peer-models), about 4 GB a model. --prompts 512,2048: a record for each length of the
#             prompt (default: 512). --large: benchmarks/models/large, too, in q4_k_m, with 32 GB of disk for each.
#   frameworks  Eadem, PyTorch and OpenVINO on the same directories (benchmarks/peers). Needs --frameworks-python, the
#             interpreter of an environment with benchmarks/peers/requirements-frameworks.txt, and the files of peers.
# Refuses to measure on a machine that others are using, unless --busy says that ratios are all that is wanted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "cpu_bench.sh: $*" >&2
  exit 2
}

busy=false large=false peer_python="" frameworks_python="" models=build/peer-models parts="" prompts=512
sections=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --busy) busy=true ;;
    --large) large=true ;;
    --peer-python | --frameworks-python | --models | --prompts | --keep)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      case "$1" in
        --peer-python) peer_python=$2 ;;
        --frameworks-python) frameworks_python=$2 ;;
        --models) models=$2 ;;
        --prompts)
          [[ $2 =~ ^[0-9]+(,[0-9]+)*$ ]] || fail "--prompts is '$2'; expected numbers, separated by commas"
          prompts=$2
          ;;
        --keep) parts=$2 ;;
      esac
      shift
      ;;
    ceilings | ops | models | peers | frameworks) sections+=("$1") ;;
    *) fail "no option or section '$1'; see the head of this file" ;;
  esac
  shift
done
[[ ${#sections[@]} -gt 0 ]] || sections=(ceilings ops models peers)
if [[ -z "$peer_python" && " ${sections[*]} " == *" peers "* ]]; then
  fail "section peers needs --peer-python; or name the sections to run"
fi
if [[ -z "$frameworks_python" && " ${sections[*]} " == *" frameworks "* ]]; then
  fail "section frameworks needs --frameworks-python"
fi

scripts/install.sh bench
scripts/build.sh release eadem -DEADEM_BENCHMARKS=ON
scripts/build.sh release eadem_ceilings -DEADEM_BENCHMARKS=ON
scripts/build.sh release eadem_op_bench -DEADEM_BENCHMARKS=ON
bin=build/release/bin

load=$(cut -d ' ' -f 1 /proc/loadavg)
if ! $busy && awk -v load="$load" -v processors="$(nproc)" 'BEGIN { exit !(load > 0.3 * processors) }'; then
  sleep 60 # what was just built counts, too
  load=$(cut -d ' ' -f 1 /proc/loadavg)
  awk -v load="$load" -v processors="$(nproc)" 'BEGIN { exit !(load > 0.5 * processors) }' &&
    fail "the load average is $load: others use this machine. Wait, or say --busy"
fi

# --keep: where the sections' own outputs go; those of sections that do not run now are taken from there.
if [[ -z "$parts" ]]; then
  parts=$(mktemp -d)
  trap 'rm -rf "$parts"' EXIT
fi
mkdir -p "$parts"

section_ceilings() {
  "$bin/eadem_ceilings" --json > "$parts/ceilings.json"
}

section_ops() {
  for model in llama-3.2-1b qwen2.5-0.5b; do
    for step in decode-1 decode-8 prefill-512; do
      "$bin/eadem_op_bench" --filter "$model" "$step" --passes inference --seconds 0.2 --out "$parts/ops-$model-$step.json"
    done
  done
}

section_models() {
  local config
  local arguments
  rm -f "$parts/models.txt"
  for config in bundled benchmarks/models/*.json; do
    arguments=(bench --json)
    [[ $config == bundled ]] || arguments+=(--random "$config" --prompt 256 --gen 32 --repeat 3)
    echo "eadem ${arguments[*]}" >> "$parts/models.txt"
    "$bin/eadem" "${arguments[@]}" | python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)))' \
      >> "$parts/models.txt"
  done
}

# peers_of CONFIG TYPE...: the model in 16 bits, unless it is large, and in each type.
peers_of() {
  local config=$1 name prompt type files=()
  shift
  name=$(basename "$config" .json)
  "$peer_python" benchmarks/peers/random_gguf.py "$config" "$models/$name.gguf" --quantize "$@"
  [[ $config == */large/* ]] || files+=("$models/$name.gguf")
  for type in "$@"; do files+=("$models/$name-$type.gguf"); done
  for prompt in ${prompts//,/ }; do
    "$peer_python" benchmarks/peers/peers.py "${files[@]}" --prompt "$prompt" --eadem "$bin/eadem" \
      --ceilings "$bin/eadem_ceilings" --out "$parts/peers-$name-$prompt.json"
  done
}

section_peers() {
  local config
  for config in benchmarks/models/{llama-3.2-1b,qwen2.5-0.5b}.json; do peers_of "$config" q4_k_m q4_0 q6_k q8_0; done
  peers_of benchmarks/models/qwen3-30b-a3b-4-layers.json q4_k_m
  if $large; then
    for config in benchmarks/models/large/*.json; do peers_of "$config" q4_k_m; done
  fi
}

section_frameworks() {
  local config name
  for config in benchmarks/models/{llama-3.2-1b,qwen2.5-0.5b}.json; do
    name=$(basename "$config" .json)
    [[ -e "$models/$name.gguf" ]] || fail "$models/$name.gguf is missing; section peers makes it"
    [[ -e "$models/$name" ]] || "$bin/eadem" convert "$models/$name.gguf" "$models/$name" --type bf16
    "$frameworks_python" benchmarks/peers/peers.py "$models/$name" --eadem "$bin/eadem" \
      --ceilings "$bin/eadem_ceilings" --out "$parts/peers-$name-frameworks.json"
  done
}

for section in "${sections[@]}"; do
  echo "=== $section" >&2
  "section_$section"
done
python3 benchmarks/compose_record.py "$parts" benchmarks/results
python3 scripts/performance_page.py
