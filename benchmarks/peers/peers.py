#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the same models through Eadem and others, turn by turn, and writes what came out.

    peers.py MODEL [MODEL ...] --eadem build/release/bin/eadem --ceilings build/release/bin/eadem_ceilings
             [--rounds 3] [--prompt 512] [--gen 64] [--depth 0] [--batch 1] [--threads N] [--out RECORD.json]
             [--types bf16,f32,int8] [--engines NAME,NAME,...] [--made FOLDER]

A MODEL is a .gguf file, for Eadem and llama.cpp (requirements.txt), or a directory in Hugging Face layout, for Eadem,
PyTorch and OpenVINO (requirements-frameworks.txt; --frameworks-python names the interpreter that has it). Of a directory
each of --types is run: Eadem on what `eadem convert --type` made of it, in --made (default: beside the directory),
PyTorch on the same in 16 and 32 bits, OpenVINO on its own export of that. Of int8, PyTorch and OpenVINO quantize the
directory themselves, with their own methods: the same number of bits, not the same weights.

A round is: the machine's ceilings, then one process of each engine (in alternating order); each process loads the file,
warms up, and is timed once. Medians over rounds, the lowest and highest, the ratio to Eadem round by round, and the
share of the ceiling: bytes of weights and of the cached keys and values per token over the read bandwidth for decode; 2
operations per matrix element and token, attention, and the head for one token over a peak for prefill: of 8-bit dot
products (quantized), of tiles (bf16 and int8 of directories, where there are any) or of f32. Losses are published as they are. What an engine cannot run is recorded with what it said.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCHEMA = "eadem_peers/2"
TYPES = ("bf16", "f32", "int8")


# --- What a step must do, counted from the file


def count(path):
    return count_directory(path) if path.is_dir() else count_gguf(path)


def count_directory(path):
    """The same facts as of a GGUF file, of a directory with one model.safetensors."""
    config = json.loads((path / "config.json").read_text())
    with open(path / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    head = "lm_head.weight" if "lm_head.weight" in header else "model.embed_tokens.weight"
    groups = config.get("quantization_config", {}).get("config_groups", {})
    bits = next((group["weights"]["num_bits"] for group in groups.values()), None)
    weight_bytes, matrix_elements, head_elements, types = 0, 0, 0, {}
    for name, tensor in header.items():
        size = tensor["data_offsets"][1] - tensor["data_offsets"][0]
        is_packed = name.endswith(".weight_packed")  # integers in words
        dtype = f"I{bits}" if is_packed else tensor["dtype"]
        types[dtype] = types.get(dtype, 0) + size
        if name == "model.embed_tokens.weight" and head != name:
            continue
        weight_bytes += size
        if is_packed:
            matrix_elements += size * 8 // bits
        elif name.endswith(".weight") and len(tensor["shape"]) == 2:
            elements = tensor["shape"][0] * tensor["shape"][1]
            if name == head:
                head_elements = elements
            else:
                matrix_elements += elements
    heads = config["num_attention_heads"]
    return {"weight_bytes": weight_bytes, "matrix_elements": matrix_elements, "head_elements": head_elements,
            "layers": config["num_hidden_layers"], "heads": heads,
            "kv_heads": config.get("num_key_value_heads", heads),
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads, "bytes_by_type": types}


def count_gguf(path):
    """Facts of a GGUF file: bytes and elements that each token reads, the shape of its attention, its types."""
    import gguf

    reader = gguf.GGUFReader(path)

    def number(key, default=None):
        field = reader.fields.get(f"{family}.{key}")
        return default if field is None else int(field.parts[field.data[0]][0])

    field = reader.fields["general.architecture"]
    family = bytes(field.parts[field.data[0]]).decode()
    heads, hidden = number("attention.head_count"), number("embedding_length")
    names = {tensor.name for tensor in reader.tensors}
    head = "output.weight" if "output.weight" in names else "token_embd.weight"
    weight_bytes, matrix_elements, expert_bytes, types = 0, 0, 0, {}
    num_experts, chosen = number("expert_count", 0), number("expert_used_count", 0)
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
        if tensor.name == "token_embd.weight" and head != tensor.name:
            continue
        weight_bytes += int(tensor.n_bytes)
        experts_of_layer = "_exps." in tensor.name
        if len(tensor.shape) in (2, 3) and tensor.name != head and not experts_of_layer:  # of 3: a matrix for each head
            matrix_elements += int(tensor.n_elements)
        elif len(tensor.shape) == 3:
            matrix_elements += int(tensor.n_elements) * chosen // num_experts
            expert_bytes += int(tensor.n_bytes)
    head_elements = next(int(tensor.n_elements) for tensor in reader.tensors if tensor.name == head)
    return {"weight_bytes": weight_bytes, "matrix_elements": matrix_elements, "head_elements": head_elements,
            "layers": number("block_count"), "heads": heads, "kv_heads": number("attention.head_count_kv", heads),
            "head_dim": number("attention.key_length", hidden // heads), "bytes_by_type": types,
            **latent_facts(number),
            **({"expert_bytes": expert_bytes, "experts": num_experts, "chosen_experts": chosen} if num_experts else {})}


def latent_facts(number):
    """Of attention over latents: the values of a cached token, which keys and values share, and widths of heads."""
    if not number("attention.kv_lora_rank"):
        return {}
    return {"latent_values": number("attention.key_length"),
            "head_widths": number("attention.key_length_mla") + number("attention.value_length_mla")}


def is_quantized(facts):
    """By what prefill multiplies: the head, of which one token is enough, and the embedding count little."""
    types = facts["bytes_by_type"]
    return sum(size for name, size in types.items() if name not in ("F32", "F16", "BF16")) > sum(types.values()) / 3


def prefill_peak(facts, ceiling):
    """The name of the arithmetic that the machine has for what prefill multiplies most of."""
    types = facts["bytes_by_type"]
    if is_quantized(facts):  # tiles multiply int8 with one scale an output, which is that of directories
        return "amx_int8" if "I8" in types and "amx_int8" in ceiling else "int8"
    if types.get("BF16", 0) > sum(types.values()) / 2:
        return next((name for name in ("amx_bf16", "bf16") if name in ceiling), "f32")
    return "f32"


def decode_bytes_per_token(facts, depth, gen, batch, kv_value_bytes):
    mean_length = depth + (gen + 1) / 2
    values = facts.get("latent_values", 2 * facts["kv_heads"] * facts["head_dim"])
    kv = facts["layers"] * values * kv_value_bytes * mean_length
    return step_weight_bytes(facts, batch) / batch + kv


def step_weight_bytes(facts, batch):
    """Of experts, as many as the tokens of a step can choose."""
    if "experts" not in facts:
        return facts["weight_bytes"]
    unread = 1 - min(1, facts["chosen_experts"] * batch / facts["experts"])
    return facts["weight_bytes"] - unread * facts["expert_bytes"]


def prefill_operations_per_token(facts, depth, prompt):
    widths = facts.get("head_widths", 2 * facts["head_dim"])
    attention = 2 * facts["layers"] * facts["heads"] * widths * (depth + (prompt + 1) / 2)
    return 2 * facts["matrix_elements"] + attention + 2 * facts["head_elements"] / prompt


# --- Running


class EngineError(Exception):
    """An engine that ended without a result; the text says what it said."""


def run(command, **environment):
    """What a command prints, and its wall time."""
    start = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | environment)
    out, err = process.communicate()
    seconds = time.perf_counter() - start
    if process.returncode != 0:
        raise EngineError(f"{shown(command)}: exit status {process.returncode}: {last_words(err)}")
    return out, seconds


def seconds_to_first_output(command):
    """From the start of a process to the first byte that it prints."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = process.stdout.read(1)
    seconds = time.perf_counter() - start
    _, err = process.communicate()
    if process.returncode != 0 or not first:
        sys.exit(f"peers.py: {' '.join(command)} failed:\n{err.decode(errors='replace')[-2000:]}")
    return seconds


def last_words(text):
    """The end of what a program wrote: the error, not the way there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-2:])[-600:] or "no message"


def shown(command):
    """A command for the record: without the folders of this machine."""
    return " ".join(Path(word).name if "/" in word else word for word in map(str, command))


def sizes(arguments):
    return ["--threads", str(arguments.threads), "--prompt", str(arguments.prompt), "--gen", str(arguments.gen),
            "--depth", str(arguments.depth)]


def eadem_run(arguments, model):
    command = [arguments.eadem, "bench", model["path"], "--json", *sizes(arguments), "--batch", str(arguments.batch),
               "--repeat", "1"]
    output = json.loads(run(command)[0])
    result = {"command": shown(command), "read_bytes_per_second": output["read_bytes_per_second"],
              "peak_memory_bytes": output["peak_memory_bytes"]}
    for row in output["results"]:
        result[row["test"]] = row["tokens_per_second"]
    # From the start of the process, after a prompt of 32 bytes, which is printed with the first token.
    command = [arguments.eadem, "run", model["path"], "--threads", str(arguments.threads), "-q", "-n", "1", "-p",
               "a prompt of just thirty-two bytes"[:32]]
    result["first_token_seconds"] = seconds_to_first_output(command)
    if arguments.pack_cache:
        command += ["--pack-cache", arguments.pack_cache]
        for _ in range(2):  # writes the pack where there is none, and compares what is new
            run(command)
        result["first_token_from_pack_seconds"] = seconds_to_first_output(command)
    return result


def one_wait(command, policy, **environment):
    return json.loads(run(command, OMP_WAIT_POLICY=policy, **environment)[0].splitlines()[-1]) | {"command": shown(command)}


def better_wait(command, **environment):
    """The better, test by test, of OpenMP's two ways to wait: spinning is faster on a quiet machine, and slower by any
    factor on one whose processors others use as well."""
    results = {policy: one_wait(command, policy, **environment) for policy in ("active", "passive")}
    best = dict(results["active"])
    for test in ("prefill", "decode"):
        if test in best:
            best[test] = max(result[test] for result in results.values())
            best[test + "_by_wait_policy"] = {policy: result[test] for policy, result in results.items()}
    best["first_token_seconds"] = min(result["first_token_seconds"] for result in results.values())
    return best


def llama_cpp_run(arguments, model):
    return better_wait([sys.executable, HERE / "llama_cpp_worker.py", model["path"], *sizes(arguments), "--batch",
                        str(arguments.batch)])


def framework_command(worker, path, arguments, *options):
    return [arguments.frameworks_python, HERE / worker, path, *options, *sizes(arguments)]


def torch_run(*options):
    def work(arguments, model):
        path = model["directory"] if model["type"] == "int8" else model["path"]
        type_options = () if "--type" in options else ("--type", model["type"])
        command = framework_command("torch_worker.py", path, arguments, *type_options, *options)
        return better_wait(command, OMP_NUM_THREADS=str(arguments.threads))
    return work


def openvino_run(arguments, model):
    target = model["made"].with_name(f"{model['directory'].name}-openvino-{model['type']}")
    if not target.exists():
        source = model["directory"] if model["type"] == "int8" else model["path"]
        run([arguments.frameworks_python, HERE / "openvino_worker.py", target, "--type", model["type"], "--threads",
             str(arguments.threads), "--export", source])
    return one_wait(framework_command("openvino_worker.py", target, arguments, "--type", model["type"]), "passive")


# By name: what runs it, and of which models (GGUF files, or types of directories).
ENGINES = {
    "eadem": (eadem_run, ("gguf", "bf16", "f32", "int8")),
    "llama.cpp": (llama_cpp_run, ("gguf",)),
    "torch": (torch_run(), ("bf16", "f32", "int8")),
    "torch dynamic": (torch_run("--type", "int8_dynamic"), ("int8",)),
    "torch compiled": (torch_run("--compile"), ("bf16", "f32", "int8")),
    "torch dynamic compiled": (torch_run("--type", "int8_dynamic", "--compile"), ("int8",)),
    "openvino": (openvino_run, ("bf16", "f32", "int8")),
}


def engines_for(kind, wanted):
    """Names of those that run models of this kind, Eadem first."""
    return [name for name, (_, kinds) in ENGINES.items() if kind in kinds and (name in wanted or not wanted)]


def turn(name, arguments, model):
    try:
        return ENGINES[name][0](arguments, model)
    except EngineError as error:
        if name == "eadem":
            sys.exit(f"peers.py: {error}")
        return {"error": str(error)}


def prepare(arguments, path):
    """The models that one operand stands for: {file, type, path, directory, made}."""
    path = Path(path)
    if not path.is_dir():
        return [{"file": path.name, "type": "gguf", "path": path}]
    models = []
    for type_name in arguments.types:
        made = (arguments.made or path.parent) / f"{path.name}-{type_name}"
        if not made.exists():
            run([arguments.eadem, "convert", path, made, "--type", type_name])
        models.append({"file": f"{path.name} {type_name}", "type": type_name, "path": made, "directory": path, "made": made})
    return models


def ceilings_run(arguments):
    """The best figure of each kind: other users of the machine can only lower it."""
    command = [arguments.ceilings, "--json", "--threads", str(arguments.threads), "--seconds", "0.1", "--groups",
               "compute,tensor_core,bandwidth"]
    best = {}
    for row in json.loads(run(command)[0])["rows"]:
        best[row["name"]] = max(best.get(row["name"], 0), row["value"])
    return {"read_bytes_per_second": max(best["read"], best["read_streams"]), "f32": best["f32"], "int8": best["int8"],
            **{name: best[name] for name in ("bf16", "amx_int8", "amx_bf16") if name in best}}


# --- Summaries


def spread(values):
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def summarize(facts, rounds, settings):
    """Of each test: the engines' speeds and shares, and Eadem's ratio to each. An engine that failed is its error."""
    ceiling = {name: statistics.median(r["ceilings"][name] for r in rounds)
               for name in rounds[0]["ceilings"] if all(name in r["ceilings"] for r in rounds)}
    peak = prefill_peak(facts, ceiling)
    names = [name for name in ENGINES if name in rounds[0]]
    failed = {name: next(r[name]["error"] for r in rounds if "error" in r[name])
              for name in names if any("error" in r[name] for r in rounds)}
    names = [name for name in names if name not in failed]

    def cost(test, name):
        if test == "prefill":
            return prefill_operations_per_token(facts, settings["depth"], max(settings["prompt"], 1)) / ceiling[peak]
        own = facts | {key: rounds[0][name][key] for key in ("weight_bytes",) if key in rounds[0][name]}
        return decode_bytes_per_token(own, settings["depth"], settings["gen"], settings["batch"],
                                      2) / ceiling["read_bytes_per_second"]

    summary = {"ceilings": ceiling, "prefill_peak": peak, "failed": failed}
    for test in ("prefill", "decode"):
        if test not in rounds[0]["eadem"]:
            continue
        row = {}
        for name in names:
            row[name] = spread([r[name][test] for r in rounds])
            row[name]["share"] = row[name]["median"] * cost(test, name)
        row["ratios"] = {name: spread([r["eadem"][test] / r[name][test] for r in rounds])
                         for name in names if name != "eadem"}
        summary[test] = row
    for fact in ("first_token_seconds", "peak_memory_bytes"):
        summary[fact] = {name: spread([r[name][fact] for r in rounds])
                         for name in names if all(fact in r[name] for r in rounds)}
    if all("first_token_from_pack_seconds" in r["eadem"] for r in rounds):
        summary["first_token_from_pack_seconds"] = spread([r["eadem"]["first_token_from_pack_seconds"] for r in rounds])
    return summary


def table(models):
    lines = [f"{'model':<34} {'test':<8} {'engine':<22} {'t/s':>10} {'share':>6} {'eadem is':>8}"]
    for model in models:
        summary = model["summary"]
        for test in ("prefill", "decode"):
            row = summary.get(test, {"ratios": {}})
            for name in (name for name in ENGINES if name in row):
                ratio = f"{row['ratios'][name]['median']:>7.2f}x" if name in row["ratios"] else ""
                lines.append(f"{model['file']:<34} {test:<8} {name:<22} {row[name]['median']:>10.1f} "
                             f"{row[name]['share']:>6.0%} {ratio:>8}")
        lines += [f"{model['file']:<34} {name}: {error}" for name, error in summary["failed"].items()]
    return "\n".join(lines)


def cpu_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def git(*arguments):
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def names_in(text, known, what):
    """A list of names, separated by commas. Raises ValueError for one that is not known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"{what}: {', '.join(map(repr, unknown)) or 'nothing'}; expected some of {', '.join(known)}")
    return names


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--eadem", default=str(ROOT / "build/release/bin/eadem"))
    parser.add_argument("--ceilings", default=str(ROOT / "build/release/bin/eadem_ceilings"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pack-cache", help="a folder: eadem's first token also with `eadem run --pack-cache` there")
    parser.add_argument("--types", default=",".join(TYPES), help="of directories")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--made", type=Path, help="where what is made of directories lies")
    parser.add_argument("--frameworks-python", default=sys.executable)
    parser.add_argument("--commit", help="what --eadem was built from (default: the checkout as it is)")
    parser.add_argument("--out", type=Path, help="the record; its folder is made")
    arguments = parser.parse_args(words)
    try:
        arguments.types = names_in(arguments.types, TYPES, "--types")
        arguments.engines = names_in(arguments.engines, ENGINES, "--engines")
    except ValueError as error:
        parser.error(str(error))
    if "eadem" not in arguments.engines:
        parser.error("--engines: the others are compared with eadem, which is missing")
    for name in ("rounds", "batch", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}; expected at least 1")
    for name in ("prompt", "gen", "depth"):
        if getattr(arguments, name) < 0:
            parser.error(f"--{name} is {getattr(arguments, name)}; expected at least 0")
    missing = [model for model in arguments.models if not Path(model).exists()]
    if missing:
        parser.error(f"no file or directory {', '.join(missing)}")
    if arguments.batch > 1 and any(Path(model).is_dir() for model in arguments.models):
        parser.error("--batch is for GGUF files; directories are run one sequence at a time")
    return arguments


def main():
    arguments = parse(sys.argv[1:])
    settings = {name: getattr(arguments, name) for name in ("rounds", "prompt", "gen", "depth", "batch", "threads")}
    models = []
    try:
        for model in [model for path in arguments.models for model in prepare(arguments, path)]:
            facts, rounds = count(model["path"]), []
            names = engines_for(model["type"], arguments.engines)
            failed = {}
            for index in range(arguments.rounds):
                record = {"ceilings": ceilings_run(arguments), "load_average": os.getloadavg()[0]}
                for name in names if index % 2 == 0 else reversed(names):
                    record[name] = failed[name] if name in failed else turn(name, arguments, model)
                    if "error" in record[name]:
                        failed[name] = record[name]  # not tried again
                record["ceilings"]["read_bytes_per_second"] = max(record["ceilings"]["read_bytes_per_second"],
                                                                  record["eadem"]["read_bytes_per_second"])
                rounds.append(record)
            models.append({"file": model["file"], "type": model["type"], "facts": facts, "rounds": rounds,
                           "summary": summarize(facts, rounds, settings)})
            print(table(models[-1:]), flush=True)
            if arguments.out:  # after each model, so that an interrupted run keeps what it has
                write_record(arguments, settings, models)
    except EngineError as error:
        sys.exit(f"peers.py: {error}")
    print("\n" + table(models))


def versions_in(models):
    """What the engines said of themselves."""
    versions = {}
    for turns in (turns for model in models for turns in model["rounds"]):
        if "version" in turns.get("llama.cpp", {}):
            versions |= {"llama-cpp-python": turns["llama.cpp"]["version"],
                         "llama.cpp system": turns["llama.cpp"]["system"]}
        for result in turns.values():
            versions |= result.get("versions", {}) if isinstance(result, dict) else {}
    return versions


def write_record(arguments, settings, models):
    record = {"schema": SCHEMA, "commit": arguments.commit or git("rev-parse", "HEAD"),
              "dirty": not arguments.commit and bool(git("status", "--porcelain", "--untracked-files=no")),
              "cpu": cpu_name(), "settings": settings,
              "versions": versions_in(models) | {"eadem": run([arguments.eadem, "--version"])[0].strip()},
              "command": shown(sys.argv), "models": models}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
