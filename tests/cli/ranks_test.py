#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model divided over processes with --tp or --ep, as a user meets it.

    ranks_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import array
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from program import PROGRAM, ROOT, STORIES, ProgramTest, main

GREEDY = ["--temperature", "0", "--quiet"]
MPIRUN = shutil.which("mpirun")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def write_expert_model(folder, experts=5):
    """A small Qwen3-MoE with random weights and the bundled chat model's tokenizer."""
    chat = ROOT / "assets/chat"
    folder.mkdir()
    for name in "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json":
        shutil.copy(chat / name, folder)
    bundled = json.loads((chat / "config.json").read_text())
    vocab, hidden, width, layers = bundled["vocab_size"], 32, 16, 2
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
              "intermediate_size": 40, "moe_intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": 3,
              "num_key_value_heads": 1, "head_dim": 8, "num_experts": experts, "num_experts_per_tok": 2,
              "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "max_position_embeddings": 512,
              "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
    config |= {key: bundled[key] for key in ("bos_token_id", "eos_token_id") if key in bundled}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for i in range(layers):
        attention = {"q_proj": [24, hidden], "k_proj": [8, hidden], "v_proj": [8, hidden], "o_proj": [hidden, 24],
                     "q_norm": [8], "k_norm": [8]}
        layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
        layer |= {"input_layernorm": [hidden], "post_attention_layernorm": [hidden], "mlp.gate": [experts, hidden]}
        for e in range(experts):
            layer |= {f"mlp.experts.{e}.gate_proj": [width, hidden], f"mlp.experts.{e}.up_proj": [width, hidden],
                      f"mlp.experts.{e}.down_proj": [hidden, width]}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    draw, header, data = random.Random(1), {}, b""
    for name, shape in shapes.items():
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = array.array("f", (draw.uniform(-1, 1) if len(shape) > 1 else draw.uniform(0.5, 1.5) for _ in range(size)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * size]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


class Session:
    """A session of texts on three ranks, after the first byte of its first answer."""

    def __init__(self, *options):
        self.process = subprocess.Popen([PROGRAM, "run", "-i", *(options or ["-n", "3"]), "--tp", "3", *GREEDY],
                                        start_new_session=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.process.stdin.write(b"Once upon a time\n")
        self.process.stdin.flush()
        assert os.read(self.process.stdout.fileno(), 1)
        self.ranks = children(self.process.pid)


class Ranks(ProgramTest):
    def test_text_is_that_of_one_rank(self):
        text = self.done("run", "-p", "Once upon a time", "-n", "40", *GREEDY).out
        for ranks in 1, 2, 3:
            self.assertEqual(self.done("run", "--tp", ranks, "-p", "Once upon a time", "-n", "40", *GREEDY).out, text)
        result = self.done("run", "--tp=2", "-t", "2", "-p", "Once upon a time", "-n", "40", "--temperature", "0")
        self.assertEqual(result.out, text)
        self.assertIn("1 thread)", result.err)
        self.assertIn("in rank 0 of 2", result.err)

    def test_mpirun_starts_the_ranks(self):
        if MPIRUN is None:
            self.skipTest("there is no mpirun (openmpi-bin)")
        text = self.done("run", "-p", "Once upon a time", "-n", "40", *GREEDY).out.encode()

        def run(*command, stdin=subprocess.DEVNULL):
            return subprocess.run([MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *command],
                                  stdin=stdin, capture_output=True, timeout=120)

        for ranks in "1", "2", "3":
            result = run("-np", ranks, PROGRAM, "run", "-p", "Once upon a time", "-n", "40", *GREEDY)
            self.assertEqual((result.returncode, result.stdout), (0, text), result.stderr)
            self.assertEqual(result.stderr.count(b"eadem:"), 1, result.stderr)  # which model rank 0 takes
        with tempfile.TemporaryFile() as prompt:
            prompt.write(b"Once upon a time\n")
            prompt.seek(0)
            result = run("-np", "2", PROGRAM, "run", "-n", "40", *GREEDY, stdin=prompt)
        self.assertEqual((result.returncode, result.stdout), (0, text), result.stderr)
        # Rank 0 alone reports.
        result = run("-np", "2", PROGRAM, "run", "/no/such/model", "-p", "Once")
        self.assertNotEqual(result.returncode, 0)
        self.assertEqual(result.stderr.count(b"eadem: error:"), 1, result.stderr)
        result = run("-np", "2", PROGRAM, "run", "--tp", "3", "-p", "Once")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(b"--tp is 3; mpirun has started 2 processes", result.stderr)

    def test_conversation_is_that_of_one_rank(self):
        turns = b"Tell me a story.\nGo on.\n"
        one = self.done("chat", "-n", "20", *GREEDY, stdin=turns).out
        self.assertGreater(len(one), 40)
        self.assertEqual(self.done("chat", "--tp", "2", "-n", "20", *GREEDY, stdin=turns).out, one)

    def test_text_is_that_of_one_rank_to_the_bit(self):
        # Sampled, which looks at all logits.
        run = ["run", "-p", "Once upon a time", "-n", "60", "--temperature", "1.2", "--seed", "3",
               "--deterministic-across-tp", "-t", "3"]
        one = self.done(*run).out
        for ranks in 2, 3:
            self.assertEqual(self.done(*run, "--tp", ranks).out, one)
        self.assertEqual(self.done(*run, "--speculate", "lookup", "--tp", "2").out, one)
        turns = b"Tell me a story.\nGo on.\n"
        chat = ["chat", "-n", "20", *GREEDY, "--deterministic-across-tp"]
        self.assertEqual(self.done(*chat, "--tp", "2", stdin=turns).out, self.done(*chat, stdin=turns).out)
        few = ["--prompt", "16", "--gen", "4", "--repeat", "1", "--json", "--deterministic-across-tp"]
        self.assertEqual(json.loads(self.done("bench", "--tp", "3", "-t", "3", *few).out)["ranks"], 3)
        exchanges = json.loads(self.done("explain", "stories", "--tp", "3", "-t", "3", "--json",
                                         "--deterministic-across-tp").out)["ranks"]["exchanges"]
        self.assertEqual(exchanges, {"all_reduce": 1, "shard_sum": 12, "all_gather": 1})

    def test_bench(self):
        few = ["--prompt", "16", "--gen", "4", "--repeat", "1", "--json"]
        result = json.loads(self.done("bench", "--tp", "2", "-t", "3", *few).out)
        self.assertEqual((result["ranks"], result["threads"], len(result["results"])), (2, 2, 2))
        self.assertEqual(result["end_to_end"]["drawn_tokens"], 4)
        random = json.loads(self.done("bench", "--tp", "3", "--random", STORIES / "config.json", "--type", "bf16", *few).out)
        self.assertEqual((random["ranks"], random["threads"]), (3, 1))
        self.assertLess(random["weight_bytes"], result["weight_bytes"])

    def test_refusals(self):
        for command in ["run", "chat", "bench"]:
            self.refused(2, "--tp is 0; expected 1 to 64", command, "--tp", "0")
        self.refused(2, "--tp is 65; expected 1 to 64", "run", "-p", "a", "--tp", "65")
        self.refused(2, "--tp 2 is for the CPU; --device is cuda", "run", "-p", "a", "--tp", "2", "--device", "cuda")
        self.refused(2, "--threads is 1; --tp 2 needs at least one for each rank", "run", "-p", "a", "--tp", "2", "-t", "1")
        for command in ["run", STORIES, "-p", "a"], ["chat", STORIES], ["bench", STORIES]:
            self.refused(1, "--tp is 4; the model's 6 attention heads do not divide by it", *command, "--tp", "4")
            self.refused(1, "the same bits on 1, 2, 3 ranks of a model with 6 attention heads; there are 6", *command,
                         "--tp", "6", "--deterministic-across-tp")
        self.refused(2, "--deterministic-across-tp is for the CPU; --device is cuda", "run", "-p", "a", "--device", "cuda",
                     "--deterministic-across-tp")

    def test_divided_experts(self):
        model = write_expert_model(self.folder / "experts")
        run = "run", model, "-p", "Once upon a time", "-n", "30"
        one = self.done(*run, *GREEDY).out
        self.assertGreater(len(one), 20)
        for ranks in 1, 2, 3, 5:
            self.assertEqual(self.done(*run, "--ep", ranks, *GREEDY).out, one)
        drawn = self.done(*run, "--seed", "3", "--quiet").out
        result = self.done(*run, "--seed", "3", "--ep=2", "-t", "2")
        self.assertEqual(result.out, drawn)
        self.assertIn("in rank 0 of 2", result.err)
        turns = b"Tell me a story.\nGo on.\n"
        chat = "chat", model, "-n", "10", *GREEDY
        self.assertEqual(self.done(*chat, "--ep", "2", stdin=turns).out, self.done(*chat, stdin=turns).out)

        # A GGUF file has the experts of a layer in one tensor.
        file = self.folder / "experts.gguf"
        self.done("convert", model, file, "--type", "q8_0")
        run = "run", file, "-p", "Once upon a time", "-n", "30", *GREEDY
        self.assertEqual(self.done(*run, "--ep", "3").out, self.done(*run).out)

        bench = "bench", model, "--prompt", "16", "--gen", "4", "--repeat", "1", "--json"
        one, two = json.loads(self.done(*bench).out), json.loads(self.done(*bench, "--ep", "2").out)
        self.assertEqual(two["ranks"], 2)
        self.assertLess(two["weight_bytes"], one["weight_bytes"])
        self.assertEqual(two["kv_cache_bytes"], one["kv_cache_bytes"])

    def test_refusals_of_divided_experts(self):
        model = write_expert_model(self.folder / "experts", experts=3)
        for command in ["run", "chat", "bench"]:
            self.refused(2, "--ep is 0; expected 1 to 64", command, "--ep", "0")
        self.refused(2, "--tp is 3 and --ep is 3; the processes divide either", "run", model, "-p", "a", "--tp", "3", "--ep", "3")
        self.refused(2, "--ep 2 is for the CPU; --device is cuda", "run", model, "-p", "a", "--ep", "2", "--device", "cuda")
        self.refused(2, "--threads is 1; --ep 2 needs at least one for each rank", "run", model, "-p", "a", "--ep", "2", "-t", "1")
        self.refused(1, "--ep is 4; the model has 3 experts, and each process needs one", "run", model, "-p", "a", "--ep", "4")
        for command in ["run", "-p", "a"], ["chat"], ["bench"]:
            self.refused(1, "--ep is 2; the model has 0 experts, and each process needs one", *command, "--ep", "2")

    def test_ranks_die_with_a_program_that_is_killed(self):
        session = Session()
        self.assertEqual(len(session.ranks), 2)
        session.process.kill()
        session.process.communicate()
        deadline = time.monotonic() + 60
        while any(map(lives, session.ranks)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(any(map(lives, session.ranks)))

    def test_a_rank_that_is_killed_is_named(self):
        session = Session()
        os.kill(session.ranks[1], signal.SIGKILL)
        _, err = session.process.communicate(b"The dog\n")
        self.assertIn(f"rank 2 (process {session.ranks[1]}) died", err.decode())
        self.assertEqual(session.process.returncode, 1)
        self.assertFalse(any(map(lives, session.ranks)))

    def test_ctrl_c_is_for_the_first_rank(self):
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        try:
            # Ctrl-C comes during the answer, which is long: at the prompt it would end the session.
            session = Session("-n", "450", "--ignore-eos")
        finally:
            signal.signal(signal.SIGINT, inherited)
        os.killpg(session.process.pid, signal.SIGINT)
        out, err = session.process.communicate(b"The dog\n")
        self.assertNotIn(" died", err.decode())
        self.assertIn("The dog", out.decode())
        self.assertEqual(session.process.returncode, 0)
        self.assertFalse(any(map(lives, session.ranks)))


if __name__ == "__main__":
    main()
