#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/test.sh [SECTION ...]: installs what is missing, builds, and runs every test; with arguments only the named
# sections. A failing section does not stop the others. The last line is `N passed, N failed, N skipped`: test cases
# where a section has them (ctest, pytest), else the section as one. Exits 1 if anything failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
jobs=$(nproc)
logs="$root/build/logs"
venv="$root/build/venv"

# --- What a section uses ---

# Ends the section as skipped (one), saying why.
skip() {
  echo "SKIPPED: $*"
  exit 77
}

# Adds the cases of a JUnit file, of ctest or pytest, to the section's counts. A ctest test that ran several cases of
# GoogleTest counts as these.
count_junit() {
  python3 - "$1" >> "$counts" << 'PYTHON'
import re
import sys
import xml.etree.ElementTree as xml

total = failed = skipped = 0
for suite in xml.parse(sys.argv[1]).getroot().iter("testsuite"):
    number = lambda name: int(suite.get(name, 0))
    total += number("tests")
    failed += number("failures") + number("errors")
    skipped += number("skipped") + number("disabled")
    for case in suite.iter("testcase"):
        output = case.findtext("system-out") or ""
        cases = {word: int(n) for word, n in re.findall(r"^\[  (PASSED |SKIPPED|FAILED ) \] (\d+) tests?[.,]", output, re.M)}
        if not cases:
            continue
        total += sum(cases.values()) - 1
        skipped += cases.get("SKIPPED", 0)
        failed += max(0, cases.get("FAILED ", 0) - 1)
print(total - failed - skipped, failed, skipped)
PYTHON
}

# run_ctest PRESET [ctest arguments]: runs the tests of build/PRESET.
run_ctest() {
  local preset=$1 status=0 report
  shift
  report="$logs/ctest-$preset.xml"
  rm -f "$report"
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --timeout 900 -j "$jobs" \
    --test-output-size-passed 100000 --output-junit "$report" "$@" > "$logs/ctest-$preset.log" 2>&1 || status=$?
  # The summary is enough for tests that passed; the rest is in the log.
  grep -Ev '^ *Start +[0-9]+:|^ *[0-9]+/[0-9]+ Test .* Passed +[0-9.]+ sec$' "$logs/ctest-$preset.log" || true
  [[ ! -f "$report" ]] || count_junit "$report"
  return "$status"
}

# A virtual environment with what the Python tests import.
make_venv() {
  local packages=(numpy pytest nanobind scikit-build-core tokenizers safetensors mypy)
  local stamp="$venv/installed"
  if [[ "$(cat "$stamp" 2> /dev/null)" != "${packages[*]}" ]]; then
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check "${packages[@]}"
    echo "${packages[*]}" > "$stamp"
  fi
}

# --- The sections, cheap ones first ---

section_format() {
  scripts/format.sh --check
}

section_include_graph() {
  python3 tests/include_graph/check_include_graph.py
  python3 tests/include_graph/check_include_graph_test.py
}

section_documents() {
  [[ -f tests/docs/check_documents.py ]] || skip "there is no tests/docs/check_documents.py"
  python3 tests/docs/check_documents.py
}

section_cpp() {
  scripts/build.sh release all -DEADEM_TESTS=ON -DEADEM_BENCHMARKS=ON
  run_ctest release -E '^include_graph/'  # Has a section of its own, which needs no build.
}

section_python() {
  [[ -f pyproject.toml ]] || skip "there is no Python package (pyproject.toml)"
  [[ -d tests/python ]] || skip "there are no tests/python"
  make_venv
  echo "installing the package into build/venv"
  # The compiler by the name that the other builds have for it: ccache then knows all but the bindings.
  if ! CXX=c++ "$venv/bin/python" -m pip install --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
    --config-settings=build-dir="$root/build/python" . > "$logs/pip.log" 2>&1; then
    tail -n 60 "$logs/pip.log"
    return 1
  fi
  local status=0
  rm -f "$logs/pytest.xml"
  # From another directory, so that the installed package is imported and not the sources.
  (cd build && "$venv/bin/python" -m pytest -q -rs -p no:cacheprovider --junitxml "$logs/pytest.xml" ../tests/python) ||
    status=$?
  [[ ! -f "$logs/pytest.xml" ]] || count_junit "$logs/pytest.xml"
  return "$status"
}

# With sanitizers, and emulated, the largest inputs are left out, whose code smaller ones run as well: long sequences,
# vocabularies and templates of real models, and what only shows that time is linear.
large_inputs='AttentionProperties.LongSequences*:LatentForms.LongPrompts*:*Real*:EveryTemplate.*:Bpe.TooManyMergesAreRefused'
large_inputs+=':*LinearTime*:*LinearithmicTime*:*LinearWork:Patterns.LongRunsAreLinear:DepthController.NeverCosts*'

# Sanitizer builds have the scalar kernels and those of this machine's widest vectors.
left_out_isas() {
  if grep -qw avx512f /proc/cpuinfo; then echo "SSE4;AVX2"; else echo "SSE4;AVX3"; fi
}

section_asan() {
  # Bits of models on other numbers of threads and of encoded weights on ranks are compared by other builds, and other
  # vocabularies run the code of those that are left out, as other meshes do. Programs whose tests mostly start them
  # anew, hundreds of times, are left to the section cpp: other tests run what these parse and print.
  local started='^cli/(arguments|convert|explain|help|models|ranks|run|tokenizer)$|^train/program$'
  local left_out='*EveryModel.ThreadsOfDecodeAndPrefill*:*EveryModel.ThreadsDoNotChangeBits*'
  left_out+=':*EveryModel.OpByOp*/??:*EveryModel.SixtyFourThreads*/??:*EveryModel.Paged*/??'
  left_out+=':DeterministicAcrossTp.EncodedWeights:GgmlGoldens.*:HuggingFaceGoldens.Qwen2'
  left_out+=':DeterministicAcrossTp.GoldenModels:ExpertParallel.GoldenModels*:MeshCheckpoint.AnyMesh*'
  left_out+=':PipelineTraining.TiedWeights*:PipelineTraining.ProductsIn8BitFloats*:PipelineTraining.HasTheBitsOfOneRank'
  left_out+=':MeshCheckpoint.ExpertsAreWhole:DividedOptimizer.HasTheBitsOfWholeStatesOverExpertRanks'
  left_out+=':*EveryModel.TrainingScores*/?:*EveryModel.TrainingForward*/??:*Families.NoSequence*'
  left_out+=':*MtpAnswers.*/qwen3*:*MtpAnswers.*/longcat*'
  left_out+=':LatentForms*:*LatentRows*:*LatentCaches.OfWideLatents*:PackCaches.EveryBlockType*:TokenizerFiles.OfAGguf*'
  left_out+=':HuggingFaceGoldens.Llama2*:SharedTokenizers.RolesAndTemplates'
  # Chains of floating-point products have the same code with VNNI, which is for integers, as with AVX-512 alone.
  left_out+=':*MatmulChain.*/avx512_vnni'
  scripts/build.sh asan all "-DEADEM_LEFT_OUT_ISAS=$(left_out_isas)"
  UBSAN_OPTIONS=print_stacktrace=1 GTEST_FILTER="-$left_out:$large_inputs" \
    run_ctest asan -E "^include_graph/|$started" -LE slow
}

section_tsan() {
  # The property tests run the same kernels on several threads as the longest tests left out here, which take minutes; of
  # the models, ten do. What compares bits alone is compared by other builds. Ranks meet at the same communicator in the
  # tests of their kind that stay, and one kind of checkpoint and of packed block stands for the others.
  local left_out='*ReferenceRing.EveryKernelMatches/linear*:*ReferenceRing.EveryKernelMatches/attention*'
  left_out+=':*EveryModel.ThreadsOfDecodeAndPrefill*/??'
  left_out+=':DeterministicAcrossTp.GoldenModels:DeterministicAcrossTp.EncodedWeights:DeterministicAcrossTp.StateSpaceLayers'
  left_out+=':*EveryModel.ThreadsDoNotChangeBits*/??:Transformers/Families.ConvertsToGgufAndBack*:CompressedAttention.*'
  left_out+=':MeshCheckpoint.AnyMesh*:MeshCheckpoint.ExpertsAreWhole:MeshCheckpoint.HistoriesOfAllStages'
  left_out+=':ExpertParallel.GoldenModels*:PipelineTraining.TiedWeights*:PipelineTraining.ProductsIn8BitFloats*'
  left_out+=':DividedOptimizer.HasTheBitsOfWholeStatesOverExpertRanks:PackCaches.EveryBlockType*'
  left_out+=':*LatentModels.Bits*/0:*LatentModels.Bits*/1'
  left_out+=':CpuDevice.NewMemoryIsWrittenByWhoWillReadIt'
  left_out+=':LatentForms*:*EveryModel.OpByOp*:*EveryModel.TrainingForward*:*EveryModel.Paged*/??'
  left_out+=':SpeculatingLlm.CompletionsAreThoseWithoutIt:TensorParallel.HeadsOfStateSpaceLayersDivide'
  left_out+=':PipelineTraining.HasTheBitsOfOneRank'
  left_out+=':*EveryModel.SixtyFourThreads*/3?:*EveryModel.SixtyFourThreads*/4?:*EveryModel.Chunking*/??'
  left_out+=':*EveryModel.Threads*/6:FirstSteps.EveryTypeGivesTheSameBits:*Families.NoSequence*:*Families.NoCache*'
  left_out+=':*Families.Configurations*:*Families.TensorsOf*:PackCaches.EveryKindOf*:PackCaches.A*'
  scripts/build.sh tsan threaded_tests "-DEADEM_LEFT_OUT_ISAS=$(left_out_isas)"
  GTEST_FILTER="-$left_out:$large_inputs" run_ctest tsan -L threaded -LE slow
}

section_neon() {
  [[ "$(uname -m)" != aarch64 ]] || skip "this is a 64-bit ARM: the other sections have run its kernels"
  # Every test of the layers that compute; of the reference ring every fourth case. Death tests start themselves again,
  # which an emulated program cannot.
  scripts/build.sh aarch64 all
  GTEST_FILTER="-*DeathTest*:$large_inputs" run_ctest aarch64 -E '^include_graph/'
}

section_fuzz() {
  [[ -x scripts/fuzz.sh ]] || skip "there is no scripts/fuzz.sh"
  scripts/fuzz.sh 10
}

section_cuda() {
  [[ -d eadem/kernels/cuda ]] || skip "there is no CUDA backend (eadem/kernels/cuda)"
  local toolkit
  toolkit=$(scripts/cuda_toolkit.sh)
  echo "compiling with the CUDA toolkit in $toolkit; without a GPU only the tests of what the host packs are run"
  # The other programs are those of the section cpp.
  scripts/build.sh cuda cuda_programs -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc" -DCUDAToolkit_ROOT="$toolkit" \
    -DEADEM_TESTS=ON -DEADEM_BENCHMARKS=ON
  GTEST_FILTER='FragmentBlocks.*:Int8Chunks.*' run_ctest cuda -R '^kernels/cuda_(encoded|int8)_test'
}

# --- Running them ---

# Sets `processor` to the seconds of processor time, user and system, of all commands that have ended. (A subshell would
# see its own.)
count_processor_time() {
  times > "$logs/times"
  processor=$(awk 'NR == 2 { gsub(/[ms]/, " "); print int($1 * 60 + $2 + $3 * 60 + $4) }' "$logs/times")
}

all=(format include_graph documents cpp python asan tsan neon fuzz cuda)
chosen=("$@")
[[ $# -gt 0 ]] || chosen=("${all[@]}")
for name in "${chosen[@]}"; do
  if [[ " ${all[*]} " != *" $name "* ]]; then
    echo "test.sh: no section '$name'; there are: ${all[*]}" >&2
    exit 2
  fi
done

scripts/install.sh test
mkdir -p "$logs"
total_passed=0 total_failed=0 total_skipped=0
summary=()
for name in "${chosen[@]}"; do
  echo "=== $name"
  start=$SECONDS
  count_processor_time
  processor_before=$processor
  counts=$(mktemp)
  # Not in a condition: bash would ignore `set -e` inside.
  set +e
  (
    set -e
    "section_$name"
  ) 2>&1
  status=$?
  set -e
  passed=0 failed=0 skipped=0 counted=false
  while read -r p f s; do
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s)) counted=true
  done < "$counts"
  rm -f "$counts"
  if [[ $status -eq 77 ]]; then
    skipped=$((skipped + 1))
  elif [[ $status -ne 0 && $failed -eq 0 ]]; then
    failed=1
  elif ! $counted; then
    [[ $status -eq 0 ]] && passed=1 || failed=1
  fi
  count_processor_time
  line="$name: $passed passed, $failed failed, $skipped skipped in $((SECONDS - start)) s"
  line+=" ($((processor - processor_before)) s of processors)"
  echo "--- $line"
  summary+=("$line")
  total_passed=$((total_passed + passed)) total_failed=$((total_failed + failed))
  total_skipped=$((total_skipped + skipped))
done

echo "=== summary"
printf '%s\n' "${summary[@]}"
echo "$SECONDS s, $processor s of processors"
echo "$total_passed passed, $total_failed failed, $total_skipped skipped"
[[ $total_failed -eq 0 ]]
