#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/gpu_check.sh [--commit SHA] [--results DIR] [--build DIR | --bin DIR] [--part tests|sanitizer|bench|generic]...:
# on a machine with an NVIDIA GPU, builds with the CUDA backend, runs every test that can run on the device, tests of
# kernels under compute-sanitizer, then the benchmarks, and writes the record DIR/<device>/<commit>.json (DIR:
# benchmarks/results; of the part generic DIR/<device>/generic/<commit>.json). Exits 1 if anything failed; the record says
# what.
#
#   --commit   the commit that this tree is, for a copy without .git
#   --build    the build directory (build/gpu); a second run in it builds only what changed
#   --bin      a directory of programs that were built elsewhere: nothing is built here
#   --part     only this part; may be repeated. `generic`, which is left out unless asked for: the tests of `tests` with
#              programs that have PTX of compute_80 alone, so that a Hopper device runs what devices of 8.x run. They are
#              built in a directory of their own, DIR-generic; --bin names that of such programs
#
# Libraries that the machine lacks are taken from .deps/ (scripts/gpu_deps.sh) when it is there.
#
# The record: {commit, dirty, generic, date, device, driver, cuda, tests: [{program, name, result, seconds, message?}], benchmarks:
# [{command, result, seconds, output | message}], kernels: output}; result is passed, failed or skipped. `output` is what
# the benchmark printed as JSON; that of eadem_cuda_bench is `kernels`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

usage() {
  echo "usage: scripts/gpu_check.sh [--commit SHA] [--results DIR] [--build DIR | --bin DIR]" \
    "[--part tests|sanitizer|bench|generic]..." >&2
  exit 2
}
fail() {
  echo "gpu_check.sh: $*" >&2
  exit 1
}

commit='' results=benchmarks/results build=build/gpu bin='' dirty=false parts=()
while [[ $# -gt 0 ]]; do
  [[ $# -ge 2 ]] || usage
  case "$1" in
    --commit) commit=$2 ;;
    --results) results=$2 ;;
    --build) build=$2 ;;
    --bin) bin=$2 ;;
    --part)
      [[ " tests sanitizer bench generic " == *" $2 "* ]] || usage
      parts+=("$2")
      ;;
    *) usage ;;
  esac
  shift 2
done

[[ ${#parts[@]} -gt 0 ]] || parts=(tests sanitizer bench)
wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }
architectures='80-real;90a-real'
if wants generic; then
  [[ ${#parts[@]} -eq 1 ]] || fail "the part generic has programs of its own; run it alone"
  build="$build-generic" architectures=80-virtual
fi

# --- 1. What this is.
if [[ -z "$commit" ]]; then
  commit=$(git rev-parse HEAD 2> /dev/null) || fail "this tree has no .git; say which commit it is with --commit"
  [[ -z "$(git status --porcelain)" ]] || dirty=true
fi
command -v nvidia-smi > /dev/null || fail "no nvidia-smi: is there an NVIDIA driver?"
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
[[ -n "$device" && -n "$driver" ]] || fail "nvidia-smi names no device"
slug=$(tr '[:upper:] ' '[:lower:]-' <<< "$device" | tr -cd 'a-z0-9-')

# --- 2. Build. Everything that compiles is run, so that one run shows as much as it can.
if [[ -d .deps ]]; then
  export CMAKE_PREFIX_PATH="$root/.deps/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}"
  export PKG_CONFIG_PATH="$root/.deps/usr/lib/x86_64-linux-gnu/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}"
  export CPLUS_INCLUDE_PATH="$root/.deps/usr/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
  export LIBRARY_PATH="$root/.deps/usr/lib/x86_64-linux-gnu${LIBRARY_PATH:+:$LIBRARY_PATH}"
  export LD_LIBRARY_PATH="$root/.deps/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
toolkit=$(scripts/cuda_toolkit.sh)
logs="$build/gpu_check"
rm -rf "$logs"
mkdir -p "$logs"
built=passed
if [[ -z "$bin" ]]; then
  bin="$build/bin"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEADEM_CUDA=ON -DEADEM_TESTS=ON -DEADEM_BENCHMARKS=ON \
    -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc" -DCUDAToolkit_ROOT="$toolkit" \
    -DCMAKE_GTEST_DISCOVER_TESTS_DISCOVERY_MODE=PRE_TEST > "$logs/configure.log" 2>&1 ||
    { tail -n 40 "$logs/configure.log"; fail "CMake failed"; }
  ninja -C "$build" -j "$(nproc)" -k 0 > "$logs/build.log" 2>&1 || built=failed
  if [[ $built == failed ]]; then
    grep -E -A 6 'error|FAILED' "$logs/build.log" | head -n 80 || true
    echo "gpu_check.sh: the build failed (all of it: $logs/build.log); running what there is" >&2
  fi
fi
printf '%s\t%s\n' build "$built" > "$logs/steps.tsv"

# --- 3. Tests. Those of the CUDA backend itself, then the rings, on the device.
# run_tests PROGRAM [arguments]: a GoogleTest program. One that is told a device must fail on a device that is not there:
# if it ignored the option, it would test the CPU and prove nothing.
run_tests() {
  local program=$1 status=0
  shift
  echo "=== $program $*"
  if [[ ! -x "$bin/$program" ]]; then
    printf '%s\tfailed\tnot built\n' "$program" >> "$logs/steps.tsv"
    echo "not built"
    return
  fi
  if [[ " $* " == *" --device "* ]]; then
    timeout 60 "$bin/$program" --device cuda:99 > "$logs/$program.absent.log" 2>&1 || status=$?
    if [[ $status -eq 0 || $status -eq 124 ]] || ! grep -q 'cuda:99' "$logs/$program.absent.log"; then
      printf '%s\tfailed\tdoes not refuse --device cuda:99\n' "$program" >> "$logs/steps.tsv"
      echo "does not refuse --device cuda:99"
      return
    fi
    status=0
  fi
  timeout 400 "$bin/$program" "$@" --gtest_output="xml:$logs/$program.xml" > "$logs/$program.log" 2>&1 || status=$?
  grep -E '^\[  (FAILED|PASSED|SKIPPED)|tests ran|Failure' "$logs/$program.log" | head -n 40 || true
  if [[ ! -f "$logs/$program.xml" ]]; then
    tail -n 15 "$logs/$program.log"
    printf '%s\tfailed\tended with status %s and no report: %s\n' "$program" "$status" \
      "$(tail -n 3 "$logs/$program.log" | tr '\n\t' '  ')" >> "$logs/steps.tsv"
  elif grep -q 'no CUDA device' "$logs/$program.log"; then
    echo "found no device"
    printf '%s\tfailed\tthe CUDA runtime found no device\n' "$program" >> "$logs/steps.tsv"
  else
    printf '%s\t%s\tstatus %s\n' "$program" "$([[ $status -eq 0 ]] && echo passed || echo failed)" "$status" \
      >> "$logs/steps.tsv"
  fi
}

if wants tests || wants generic; then
  run_tests kernels_cuda_device_test
  run_tests kernels_cuda_linear_test
  run_tests kernels_cuda_encoded_test
  run_tests kernels_cuda_fp8_test
  run_tests kernels_cuda_fp8_tensor_test
  run_tests kernels_cuda_fp8_head_test
  run_tests kernels_cuda_int8_test
  run_tests kernels_cuda_attention_test
  run_tests kernels_cuda_cross_entropy_test
  run_tests ops_reference_test --device cuda
  run_tests ops_properties_test --device cuda
  run_tests fusions_decoder_layers_kernels_test --device cuda
  run_tests engine_cuda_engine_test
  run_tests engine_cuda_caches_test
  run_tests engine_cuda_decoder_layers_test
  run_tests engine_cuda_training_test
  run_tests train_training_test --gtest_filter='*Gpu*'
  run_tests engine_golden_test --device cuda
fi

# compute-sanitizer makes a kernel a hundred times as slow: a shape of every kernel. racecheck cannot run cuBLASLt's own
# kernels (it stops at an illegal address in them, which memcheck does not see), so its products have rows that are always streamed.
# run_sanitizer TOOL PROGRAM FILTER
run_sanitizer() {
  local tool=$1 program=$2 filter=$3 status=0 name="compute-sanitizer $1 $2"
  echo "=== $name"
  timeout 120 compute-sanitizer --tool "$tool" --kernel-name-exclude kernel_substring=nvjet --error-exitcode 9 \
    "$bin/$program" --gtest_filter="$filter" \
    > "$logs/$tool-$program.log" 2>&1 || status=$?
  grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|FAILED' "$logs/$tool-$program.log" || tail -n 5 "$logs/$tool-$program.log"
  printf '%s\t%s\tstatus %s\n' "$name" "$([[ $status -eq 0 ]] && echo passed || echo failed)" "$status" \
    >> "$logs/steps.tsv"
}
if wants sanitizer; then
  run_sanitizer memcheck kernels_cuda_linear_test '*bf16_bf16_bf16_1152x896_bias'
  # racecheck does not know that __syncwarp orders what a warp reads and writes before the arrival of its first lane.
  run_sanitizer memcheck kernels_cuda_encoded_test 'CudaEncoded.Few*'
  run_sanitizer memcheck kernels_cuda_int8_test 'CudaInt8.Fused*:CudaInt8.Rows*'
  run_sanitizer memcheck kernels_cuda_fp8_test 'CudaFp8.ProductsAre*:CudaFp8.Blocks*:CudaFp8.Gradients*:CudaFp8Fused.Small*'
  run_sanitizer memcheck kernels_cuda_fp8_tensor_test 'CudaFp8Tensor.WhatIs*:CudaFp8Tensor.Delayed*'
  run_sanitizer memcheck kernels_cuda_fp8_head_test 'CudaFp8Head.WhatIs*:CudaFp8Head.CodesAre*'
  run_sanitizer memcheck kernels_cuda_attention_test '*Gradient*3heads*:*CudaAppend*'
  run_sanitizer memcheck kernels_cuda_attention_test '*Decode*14heads*fp8*'
  run_sanitizer memcheck engine_cuda_decoder_layers_test '*BatchMates*_f16:*BatchMates*1b_bf16'
  for tool in memcheck racecheck; do
    run_sanitizer "$tool" kernels_cuda_linear_test 'CudaLinear.QkvHas*'
    run_sanitizer "$tool" kernels_cuda_attention_test '*Decode*14heads*window0'
  done
fi

# --- 4. Benchmarks: the bundled model, and random weights in the shapes of benchmarks/models.
# run_program NAME PROGRAM [arguments]
run_program() {
  local name=$1 program=$2 status=0 start=$SECONDS
  shift 2
  echo "=== $program $*"
  timeout 300 "$bin/$program" "$@" --device cuda --json > "$logs/bench-$name.json" 2> "$logs/bench-$name.log" ||
    status=$?
  [[ $status -eq 0 ]] || tail -n 10 "$logs/bench-$name.log"
  printf '%s\t%s\t%s\t%s\n' "$name" "$status" $((SECONDS - start)) "$program $* --device cuda --json" \
    >> "$logs/benchmarks.tsv"
}
# run_benchmark NAME [arguments of eadem bench]
run_benchmark() { run_program "$1" eadem bench "${@:2}"; }

: > "$logs/benchmarks.tsv"
if ! wants bench; then
  true
elif [[ -x "$bin/eadem" ]]; then
  run_benchmark bundled
  run_benchmark qwen2.5-0.5b --random benchmarks/models/qwen2.5-0.5b.json
  # One run for many numbers: making the weights of 8B takes most of the time.
  run_benchmark llama-3.2-1b-batch --random benchmarks/models/llama-3.2-1b.json --prompt 1024 --gen 64 --batch 1,32 \
    --depth 0,512
  run_benchmark llama-3.2-1b-q4_k_m --random benchmarks/models/llama-3.2-1b.json --type q4_k_m --prompt 1024 --gen 64 \
    --depth 0,512
  run_benchmark llama-3.1-8b-batch --random benchmarks/models/large/llama-3.1-8b.json --prompt 1024 --gen 64 --batch 1,32 \
    --depth 0,512 --repeat 2
  run_benchmark llama-3.1-8b-prompt-8192 --random benchmarks/models/large/llama-3.1-8b.json --prompt 8192 --gen 0 --repeat 2
  run_benchmark llama-3.1-8b-int4_g128 --random benchmarks/models/large/llama-3.1-8b.json --type int4_g128 --prompt 1024 \
    --gen 64 --depth 0,512 --repeat 3
  run_benchmark llama-3.1-8b-q4_k_m --random benchmarks/models/large/llama-3.1-8b.json --type q4_k_m --prompt 1024 \
    --gen 64 --depth 0,512 --repeat 3
  run_benchmark llama-3.1-8b-fp8 --random benchmarks/models/large/llama-3.1-8b.json --type fp8 --prompt 1024 --gen 64 \
    --batch 1,32 --depth 0,512 --repeat 3
  run_benchmark llama-3.1-8b-fp8_block128 --random benchmarks/models/large/llama-3.1-8b.json --type fp8_block128 \
    --prompt 1024 --gen 64 --repeat 3
  run_program llama-3.2-1b-training eadem_training_bench benchmarks/models/llama-3.2-1b.json --batch 8 --sequence 2048
  run_program llama-3.2-1b-fp8-training eadem_training_bench benchmarks/models/llama-3.2-1b.json --batch 8 --sequence 2048 \
    --products fp8_block128
  for products in fp8_tensor fp8_tensor_delayed; do
    run_program "llama-3.2-1b-$products-training" eadem_training_bench benchmarks/models/llama-3.2-1b.json --batch 8 \
      --sequence 2048 --products "$products"
  done
  run_program llama-3.2-1b-fp8_head-training eadem_training_bench benchmarks/models/llama-3.2-1b.json --batch 8 \
    --sequence 2048 --products fp8_tensor_delayed --head-products fp8_tensor_delayed
  echo "=== eadem_cuda_bench"
  timeout 300 "$bin/eadem_cuda_bench" --json > "$logs/kernels.json" 2> "$logs/kernels.log" ||
    printf 'eadem_cuda_bench\tfailed\t%s\n' "$(tail -n 1 "$logs/kernels.log")" >> "$logs/steps.tsv"
else
  printf 'eadem\tfailed\tnot built\n' >> "$logs/steps.tsv"
fi

# --- 5. The record.
folder="$results/$slug"
! wants generic || folder="$folder/generic"
mkdir -p "$folder"
python3 - "$logs" "$folder/$commit.json" "$commit" "$dirty" "$device" "$driver" \
  "$("$toolkit/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" "$(wants generic && echo true || echo false)" \
  << 'PYTHON'
import datetime
import json
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

logs, target, commit, dirty, device, driver, cuda, generic = sys.argv[1:]
logs = Path(logs)

tests = []
for line in (logs / "steps.tsv").read_text().splitlines():
    program, result, *message = line.split("\t")
    report = logs / f"{program}.xml"
    cases = []
    if report.exists():
        for case in xml.parse(report).getroot().iter("testcase"):
            failures = [failure.get("message", "") for failure in case.findall("failure")]
            skipped = case.find("skipped") is not None or case.get("status") == "notrun"
            cases.append({
                "program": program,
                "name": f"{case.get('classname')}.{case.get('name')}",
                "result": "failed" if failures else "skipped" if skipped else "passed",
                "seconds": float(case.get("time", 0)),
                **({"message": failures[0][:600]} if failures else {}),
            })
    tests += cases
    # The program itself is an entry where its cases do not already say how it ended.
    if not cases or (result == "failed" and all(case["result"] != "failed" for case in cases)):
        tests.append({"program": program, "name": program, "result": result, "seconds": 0.0,
                      **({"message": message[0]} if message and result == "failed" else {})})

benchmarks = []
for line in (logs / "benchmarks.tsv").read_text().splitlines():
    name, status, seconds, command = line.split("\t")
    entry = {"command": command, "result": "passed", "seconds": int(seconds)}
    try:
        if status != "0":
            raise ValueError(f"status {status}: " + (logs / f"bench-{name}.log").read_text()[-600:])
        entry["output"] = json.loads((logs / f"bench-{name}.json").read_text())
    except ValueError as error:
        entry.update(result="failed", message=str(error))
    benchmarks.append(entry)

record = {"commit": commit, "dirty": dirty == "true", "generic": generic == "true",
          "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
          "device": device, "driver": driver, "cuda": cuda,
          "tests": tests, "benchmarks": benchmarks}
if (logs / "kernels.json").exists() and (logs / "kernels.json").stat().st_size > 0:
    record["kernels"] = json.loads((logs / "kernels.json").read_text())
Path(target).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")

everything = tests + benchmarks
count = lambda result: sum(entry["result"] == result for entry in everything)
for entry in everything:
    if entry["result"] == "failed":
        print("FAILED", entry.get("name") or entry["command"], "-", entry.get("message", "")[:200].replace("\n", " "))
print(f"{count('passed')} passed, {count('failed')} failed, {count('skipped')} skipped; record: {target}")
sys.exit(count("failed") > 0)
PYTHON
