# SPDX-License-Identifier: Apache-2.0
"""The lines that docs/performance.md begins with, and the chart of README.md: what matters most in the records, computed
from them by performance_page.py."""

import json

# Background and text follow the reader's colour scheme; the rectangle keeps the text legible where a page has another.
STYLE = """<style>
text { font-family: sans-serif; fill: #1f2328 } .back { fill: #ffffff } .eadem { fill: #2166ac } .peer { fill: #b2b2b2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .back { fill: #0d1117 } .eadem { fill: #58a6ff } .peer { fill: #6e7681 }
}
</style>"""
CSS_CLASS = {"eadem": "eadem", "llama.cpp": "peer"}
PANELS = (("prefill", "A prompt of 512"), ("decode", "Generating"))


def gguf_type(file, shape):
    return file.removesuffix(".gguf").removeprefix(shape).strip("-") or "f16"


def is_gguf(model):
    return model.get("type", "gguf") == "gguf"


def models_of(record, shape, **settings):
    """The models of a shape that were run with these settings, batch 1 and nothing in the cache, and how."""
    wanted = {"depth": 0, "batch": 1} | settings
    for peers in record.get("peers", []):
        if all(peers["settings"][key] == value for key, value in wanted.items()):
            yield from (model for model in peers["models"] if model["file"].startswith(shape))


def gguf_of(record, shape, **settings):
    return {gguf_type(model["file"], shape): model["summary"]
            for model in models_of(record, shape, **settings) if is_gguf(model)}


def span(values, text="{:.2f}"):
    """The smallest and the largest of {name: value} with their names."""
    low, high = min(values, key=values.get), max(values, key=values.get)
    return f"{text.format(values[low])} ({low}) to {text.format(values[high])} ({high})"


def ratios(summaries, test, engine="llama.cpp"):
    return {name: summary[test]["ratios"][engine]["median"] for name, summary in summaries.items() if test in summary}


def shares(summaries, test, engine="eadem"):
    return {name: 100 * summary[test][engine]["share"] for name, summary in summaries.items() if test in summary}


# --- The chart


def chart(record, shape, title):
    """Two panels of bars, tokens/s of prompts and of generation, for each type of GGUF file in the first run."""
    first = next(peers for peers in record["peers"] if any(map(is_gguf, peers["models"])))
    rows = [(gguf_type(model["file"], shape), model["summary"]) for model in first["models"]]
    left, panel, gap, bar = 70, 300, 60, 14
    height = 84 + len(rows) * (2 * bar + 12)
    width = left + 2 * panel + 2 * gap
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
             f'font-size="12" role="img"><title>{title}</title>', STYLE,
             f'<rect class="back" width="{width}" height="{height}" rx="6"/>',
             f'<text x="{left}" y="22" font-size="14">{title}</text>']
    for index, name in enumerate(CSS_CLASS):
        x = left + 90 * index
        lines.append(f'<rect class="{CSS_CLASS[name]}" x="{x}" y="33" width="11" height="11"/>'
                     f'<text x="{x + 16}" y="43">{"Eadem" if name == "eadem" else name}</text>')
    for column, (test, heading) in enumerate(PANELS):
        x = left + column * (panel + gap)
        most = max(summary[test][engine]["median"] for _, summary in rows for engine in CSS_CLASS)
        lines.append(f'<text x="{x}" y="66">{heading}, tokens/s</text>')
        y = 76
        for name, summary in rows:
            if column == 0:
                lines.append(f'<text x="{left - 8}" y="{y + bar + 4}" text-anchor="end">{name}</text>')
            for engine, css in CSS_CLASS.items():
                value = summary[test][engine]["median"]
                length = (panel - 20) * value / most
                text = f"{value:,.0f}" if most >= 100 else f"{value:.1f}"
                lines.append(f'<rect class="{css}" x="{x}" y="{y}" width="{length:.1f}" height="{bar - 2}"/>'
                             f'<text x="{x + length + 5:.1f}" y="{y + bar - 4}" font-size="11">{text}</text>')
                y += bar
            y += 12
    return "\n".join(lines + ["</svg>"]) + "\n"


def loads(peers):
    return [turn["load_average"] for model in peers["models"] for turn in model["rounds"]]


def is_busy(peers):
    """Whether others used the machine in every round."""
    return min(loads(peers)) > 1.5 * peers["settings"]["threads"]


# --- The lines


def gguf_lines(record):
    llama, qwen = (gguf_of(record, shape, prompt=512, threads=2) for shape in ("llama-3.2-1b", "qwen2.5-0.5b"))
    long = gguf_of(record, "llama-3.2-1b", prompt=2048, threads=2)
    yield (f"**{record['device']}, 2 threads, Llama-3.2-1B's shape, {len(llama)} types of GGUF, prompt of 512**: Eadem takes "
           f"prompts {span(ratios(llama, 'prefill'))} times as fast as llama.cpp and generates "
           f"{span(ratios(llama, 'decode'))} times as fast.")
    text = "{:.0f} %"
    yield (f"It generates at {span(shares(llama, 'decode'), text)} of what reading the weights at the measured speed of memory "
           f"would allow, llama.cpp at {span(shares(llama, 'decode', 'llama.cpp'), text)}. Prompts run at "
           f"{span(shares(llama, 'prefill'), text)} of the measured speed of arithmetic.")
    yield f"A prompt of 2048 there: {span(ratios(long, 'prefill'))} times llama.cpp's speed."
    yield (f"Qwen2.5-0.5B's shape: {span(ratios(qwen, 'prefill'))} times in prompts, {span(ratios(qwen, 'decode'))} times in "
           "generation.")
    seconds = {name: (summary["first_token_seconds"]["eadem"]["median"], summary["first_token_seconds"]["llama.cpp"]["median"])
               for name, summary in llama.items()}
    slower = [name for name, (ours, theirs) in seconds.items() if ours > theirs]
    packed = {name: summary["first_token_from_pack_seconds"]["median"] for name, summary in llama.items()
              if "first_token_from_pack_seconds" in summary}
    worst = max(seconds, key=lambda name: seconds[name][0] / seconds[name][1])
    yield (f"The first token after loading is where llama.cpp is faster, for {len(slower)} of the {len(seconds)} types: at worst "
           f"{seconds[worst][0]:.2f} s against {seconds[worst][1]:.2f} ({worst}). From a pack file it takes "
           f"{span(packed, '{:.2f} s')}.")


def directory_line(record):
    models = {model["file"].removeprefix("qwen2.5-0.5b "): model["summary"]
              for model in models_of(record, "qwen2.5-0.5b", prompt=512) if not is_gguf(model)}
    parts = [f"{span(ratios(models, 'prefill', engine))} times the speed of {name} in prompts and "
             f"{span(ratios(models, 'decode', engine))} times in generation"
             for engine, name in (("openvino", "OpenVINO"), ("torch", "PyTorch"))]
    return f"From a directory in Hugging Face layout, that shape runs at {'; at '.join(parts)}."


def benchmark(record, *words):
    """The output of the first `eadem bench` whose command has all the words."""
    for row in record["benchmarks"]:
        if row["result"] == "passed" and all(word in row["command"] for word in words):
            return row["output"]
    raise KeyError(f"no record of {record['device']} has a benchmark with {', '.join(words)}, which the summary needs")


def speed(output, test, **wanted):
    return next(row for row in output["results"]
                if row["test"] == test and all(row[key] == value for key, value in wanted.items()))


def depth_cost(output, depth):
    """Time that a depth adds to a step over the time that reading its keys and values takes."""
    far, near = speed(output, "decode", depth=depth), speed(output, "decode", depth=0)
    added = 1 / far["tokens_per_second"] - 1 / near["tokens_per_second"]
    read = output["kv_cache_bytes"] * (depth + far["tokens"] / 2) / (depth + far["tokens"]) / output["read_bytes_per_second"]
    return added / read


def batch_and_depth_line(record):
    batch = benchmark(record, "--batch 1,8")
    gain = speed(batch, "decode", batch=8)["tokens_per_second"] / speed(batch, "decode", batch=1)["tokens_per_second"]
    costs = {dtype: depth_cost(benchmark(record, "--depth 0,8192", f"--kv-dtype {dtype}"), 8192) for dtype in ("f16", "int8")}
    return (f"Eight sequences at once generate {gain:.1f} times the tokens of one (q4_k). A depth of 8192 adds {costs['f16']:.2f} "
            f"(f16 cache) and {costs['int8']:.2f} (int8) times what reading its keys and values takes.")


def amx_lines(record):
    wide = gguf_of(record, "llama-3.2-1b", prompt=512, threads=16)
    yield (f"**{record['device']}, 16 threads**: prompts {span(ratios_of_any(wide, 'prefill'))} and generation "
           f"{span(ratios_of_any(wide, 'decode'))} times llama.cpp's speed.")
    parts = []
    for dtype in ("bf16", "int8"):
        rows = [speed(benchmark(record, "--isa amx", f"--type {dtype}", f"--threads {threads} "), "prefill", tokens=512)
                for threads in (1, 16)]
        parts.append(f"{rows[0]['tokens_per_second']:,.0f} and {rows[1]['tokens_per_second']:,.0f} tokens/s in {dtype} "
                     f"({rows[0]['share_of_roofline']:.0%} and {rows[1]['share_of_roofline']:.0%} of the tiles' speed)")
    yield f"With AMX there, on 1 and on 16 threads, a prompt of 512: {', '.join(parts)}."


def ratios_of_any(summaries, test):
    return {name: row["ratio"]["median"] if "ratio" in (row := summary[test]) else row["ratios"]["llama.cpp"]["median"]
            for name, summary in summaries.items() if test in summary}


def other_cpu_line(record):
    """A processor of which only some files were run."""
    runs = [peers for peers in record["peers"] if peers["settings"]["prompt"] == 512 and peers["settings"]["depth"] == 0]
    files = {model["file"].removesuffix(".gguf"): model["summary"] for peers in runs for model in peers["models"]}
    threads = {peers["settings"]["threads"] for peers in runs}
    busy = " Others were using the machine." if all(map(is_busy, runs)) else ""
    return (f"**{record['device']}**, {' and '.join(map(str, sorted(threads)))} threads, {len(files)} files: prompts "
            f"{span(ratios_of_any(files, 'prefill'))} and generation {span(ratios_of_any(files, 'decode'))} times llama.cpp's "
            f"speed.{busy}")


def training_line(record):
    plain, rounded = (speed(benchmark(record, "eadem_training_bench", words), "training")
                      for words in ("--sequence 2048 --device", "--head-products fp8_tensor_delayed"))
    return (f"**Training**: a step of Llama-3.2-1B's shape, 8 sequences of 2,048, runs at {plain['tokens_per_second']:,.0f} tokens/s in "
            f"bf16 on the {record['device']}, with products in 8-bit floats at up to {rounded['tokens_per_second']:,.0f} "
            "([gpu.md](gpu.md#training)). On two cores with AMX it is beside PyTorch's in [train.md](train.md#speed-on-a-cpu): "
            "ahead in bf16, not in every turn in f32.")


def gpu_line(record):
    rows = benchmark(record, "llama-3.2-1b", "--batch 1,32")
    prompt = speed(rows, "prefill", depth=0, batch=1)
    one, many = (speed(rows, "decode", depth=512, batch=batch) for batch in (1, 32))
    return (f"**{record['device']}**: Llama-3.2-1B's shape in bf16 takes a prompt of {prompt['tokens']:,} at "
            f"{prompt['tokens_per_second']:,.0f} tokens/s; at a depth of 512 it generates {one['tokens_per_second']:,.0f} for one "
            f"sequence ({one['share_of_roofline']:.0%} of the nominal limit) and {many['tokens_per_second']:,.0f} for 32.")


def memory_line(path):
    rows = json.loads(path.read_text())["rows"]
    peaks = {gguf_type(row["file"], "llama-3.2-1b"): row["peak_memory_ratio"] for row in rows}
    return f"Resident memory is at most {span(peaks)} times weights, KV cache and activations."


NOT_REACHED = ("What was asked and is not reached has a table with what is known of the cause, [for CPUs](cpu.md) and "
               "[for NVIDIA GPUs](gpu.md#what-is-asked-and-not-reached).")


def summary(small, large, others, gpu, memory):
    """Markdown of the lines. `small`, `large` and each of `others` are records of CPUs, `gpu` of a GPU, `memory` a path."""
    lines = [*gguf_lines(small), directory_line(small), batch_and_depth_line(small), *amx_lines(large),
             *map(other_cpu_line, others), gpu_line(gpu), training_line(gpu), memory_line(memory), NOT_REACHED]
    return "\n## In short\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"
