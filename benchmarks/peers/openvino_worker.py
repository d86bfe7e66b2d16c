#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One run of OpenVINO, timed, as one line of JSON.

    openvino_worker.py MODEL --type TYPE --export DIRECTORY
    openvino_worker.py MODEL --type TYPE --threads N [--prompt P] [--gen G] [--depth D] [--logits ID,ID,...]

--export makes MODEL, a directory with OpenVINO's files, from one in Hugging Face layout, by optimum-intel: f32 or bf16
as they are, int8 by nncf's compression of weights with its defaults (per channel, with zero points; the embedding and
the head, too). A run then steps through OpenVINO's own interface, with its keys and values inside and its defaults for
the CPU; like OpenVINO GenAI it computes the logits of a step's last token only.
"""

import argparse
import json
import os
import time
from pathlib import Path

import token_steps

TYPES = ("f32", "bf16", "int8")


def export(source, target, type_name):
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    options = ({"quantization_config": OVWeightQuantizationConfig(bits=8)} if type_name == "int8"
               else {"load_in_8bit": False})
    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, **options)
    partial = Path(str(target) + ".partial")
    model.save_pretrained(partial)
    partial.rename(target)


def keep_last_token(model):
    """The head multiplies the last token's hidden state only."""
    from openvino import opset13 as ops

    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    last = ops.slice(node.input_value(0), [-1], [2**31 - 1], [1], [1])
    node.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


class Engine:
    def __init__(self, arguments):
        import numpy
        import openvino

        self.numpy = numpy
        core = openvino.Core()
        model = core.read_model(Path(arguments.model) / "openvino_model.xml")
        if not arguments.logits:
            keep_last_token(model)
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": arguments.threads}
        if arguments.type == "f32":
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        self.compiled = core.compile_model(model, "CPU", settings)
        self.settings = {name: str(self.compiled.get_property(name))
                         for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE",
                                      "INFERENCE_NUM_THREADS")}
        self.request = self.compiled.create_infer_request()
        self.vocab = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
        self.ids = []

    def forget(self, length):
        """OpenVINO forgets all or nothing: what is to stay is read again."""
        if length == len(self.ids):
            return
        kept = self.ids[:length]
        self.ids = []
        self.request.reset_state()
        for first in range(0, len(kept), token_steps.STEP_TOKENS):
            self.step(kept[first:first + token_steps.STEP_TOKENS], first)

    def step(self, ids, position):
        if position != len(self.ids):
            raise SystemExit(f"openvino_worker.py: a step at {position} after {len(self.ids)} tokens")
        self.ids += ids
        numpy = self.numpy
        result = self.request.infer({
            "input_ids": numpy.array([ids], numpy.int64),
            "attention_mask": numpy.ones((1, position + len(ids)), numpy.int64),
            "position_ids": numpy.arange(position, position + len(ids), dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, numpy.int32)}, share_inputs=True, share_outputs=True)
        return result["logits"][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    token_steps.add_arguments(parser)
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("--export", metavar="DIRECTORY")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OPENVINO_TELEMETRY"] = "0"
    if arguments.export:
        export(arguments.export, Path(arguments.model), arguments.type)
        return
    import openvino
    start = time.perf_counter()
    engine = Engine(arguments)
    if arguments.logits:
        logits = engine.step([int(text) for text in arguments.logits.split(",")], 0)
        print(json.dumps({"logits": logits.astype("float64").tolist()}))
        return
    result = {"engine": "openvino", "versions": {"openvino": openvino.__version__}, "threads": arguments.threads,
              "settings": engine.settings,
              "weight_bytes": (Path(arguments.model) / "openvino_model.bin").stat().st_size}
    token_steps.measure(engine, arguments, start, result)


if __name__ == "__main__":
    main()
