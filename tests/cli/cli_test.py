#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program as a user meets it: exit codes, messages, what goes to stdout and what to stderr, Ctrl-C.

    cli_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]

Models: the goldens of tests/data (no tokenizer) and the bundled one. A test that needs the bundled model fails without.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import time
import unittest
from pathlib import Path

from program import DATA, GGUF_STORIES, GOLDEN, PROGRAM, STORIES, ProgramTest, eadem, main

COMMANDS = ["run", "perplexity", "inspect", "explain", "bench", "train", "tokenizer", "convert", "doctor"]


class Help(ProgramTest):
    def test_overview_fits_a_screen_and_lists_every_command(self):
        result = self.done("--help")
        self.assertLessEqual(len(result.out.splitlines()), 40)
        self.assertEqual(result.err, "")
        for command in COMMANDS:
            self.assertRegex(result.out, rf"(?m)^  {command} ")

    def test_every_command_has_examples(self):
        for command in COMMANDS:
            for way in [(command, "--help"), (command, "-h"), ("help", command)]:
                result = self.done(*way)
                self.assertIn("Examples:\n  eadem " + command if command not in ("run", "tokenizer") else "Examples:\n",
                              result.out, way)
                self.assertTrue(result.out.startswith(f"Usage: eadem {command}"))
                self.assertLessEqual(max(map(len, result.out.splitlines())), 150)

    def test_version(self):
        self.assertRegex(self.done("--version").out, r"^eadem \d+\.\d+\.\d+\n$")

    def test_nothing_given_is_bad_usage(self):
        result = eadem()
        self.assertEqual((result.code, result.out), (2, ""))
        self.assertIn("Usage:", result.err)


class Usage(ProgramTest):
    def test_did_you_mean(self):
        self.refused(2, "did you mean 'run'?", "rnu")
        self.refused(2, "did you mean '--temperature'?", "run", "--temprature", "1")
        self.refused(2, "did you mean '--temperature'?", "run", "--temprature=1")
        self.refused(2, "did you mean 'encode'?", "tokenizer", "encdoe")
        self.refused(2, "did you mean 'accuracy'?", "explain", "--mode", "acuracy")
        self.assertNotIn("did you mean", self.refused(2, "unknown command 'xyzzyplugh'", "xyzzyplugh").err)

    def test_values(self):
        self.refused(2, "--temperature is 'warm'", "run", "--temperature", "warm")
        self.refused(2, "--seed needs a value", "run", "--seed")
        self.refused(2, "--max-tokens is '5x'", "run", "-n", "5x")
        self.refused(2, "too large", "run", "-n", "9999999999999999999999")
        self.refused(2, "below 2^31", "run", "-p", "a", "-n", "4G")
        self.refused(2, "--top-p is 2", "run", "-p", "a", "--top-p", "2")
        self.refused(2, "--min-p is -1", "run", "-p", "a", "--min-p", "-1")
        self.refused(2, "--repetition-penalty is 0", "run", "-p", "a", "--repetition-penalty", "0")
        self.refused(2, "--presence-penalty is 3", "run", "-p", "a", "--presence-penalty", "3")
        self.refused(2, "--frequency-penalty is -2.5", "run", "-p", "a", "--frequency-penalty", "-2.5")
        self.refused(2, "--max-tokens is 0", "run", "-p", "a", "-n", "0")
        self.refused(2, "'nan'", "run", "-p", "a", "--temperature", "nan")
        self.refused(2, "--context is 0", "run", "-p", "a", "--context", "0")
        self.refused(2, "unexpected argument 'c'", "convert", "a", "b", "c")
        self.refused(2, "OUT is missing", "convert", "a")
        self.refused(2, "give one", "run", "-p", "a", "-f", "b")
        self.refused(2, "--vocab-size is missing", "tokenizer", "train", "a.txt", "-o", "b")

    def test_devices(self):
        self.refused(1, "unknown device", "run", "-p", "a", "--device", "tpu")
        for option in (["--threads", "2"], ["--prefill-threads", "2"], ["--no-pin"]):
            self.refused(2, option[0], "explain", GOLDEN / "llama", "--device", "cuda", *option)
        self.refused(2, "--prefill-threads is 5000; expected 0 to 4096", "explain", GOLDEN / "llama",
                     "--prefill-threads", "5000")


class Models(ProgramTest):
    def test_missing(self):
        self.refused(1, "no such file or directory", "run", self.folder / "nope", "-p", "a")
        self.refused(1, "no bundled model of that name", "inspect", "nope")
        self.refused(1, str(self.folder), "inspect", self.folder)
        self.refused(2, "MODEL is empty", "inspect", "")

    def test_broken(self):
        broken = self.folder / "broken.gguf"
        broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
        self.refused(1, "broken.gguf", "inspect", broken)
        broken.write_bytes(b"")
        self.refused(1, "broken.gguf", "run", broken, "-p", "a")
        if os.getuid() != 0:
            locked = self.folder / "locked"
            locked.mkdir(mode=0)
            self.refused(1, "locked", "inspect", locked)

    def test_without_one_the_bundled_model_is_used_and_said_so(self):
        result = self.done("inspect")
        self.assertIn("using the bundled model 'stories'", result.err)
        self.assertNotIn("bundled", self.done("inspect", "stories").err)


class BundledChat(ProgramTest):
    """The bundled model that answers; its template is rendered by `inspect`."""

    def answer(self, *turns):
        prompt = "".join(f"<|{role}|>{text}" for role, text in turns) + "<|assistant|>"
        return json.loads(self.done("run", "chat", "-p", prompt, "--parse-special", "--temperature", "0", "-n", "64",
                                    "--json").out)

    def test_template(self):
        sample = json.loads(self.done("inspect", "chat", "--json").out)["tokenizer"]["chat_sample"]
        self.assertEqual(sample["text"], "<|bos|><|user|>Hello!<|assistant|>Hi there.<|endoftext|><|user|>How are you?"
                                         "<|assistant|>")

    def test_answers_and_ends_its_turn(self):
        result = self.answer(("user", "Hello!"))
        self.assertEqual(result["text"], "Hello! What should I tell you a story about?")
        self.assertEqual(result["finish_reason"], "stop")
        result = self.answer(("user", "Hello!"), ("assistant", result["text"] + "<|endoftext|>"),
                             ("user", "What can you do?"))
        self.assertEqual(result["text"], "I can tell you a short story and answer simple questions about it.")
        self.assertEqual(result["finish_reason"], "stop")


class Names(ProgramTest):
    """Models by their names in caches; model_locator_test.cc knows the layouts in detail."""

    def setUp(self):
        super().setUp()
        self.home = {**{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "OLLAMA_"))},
                     "HOME": str(self.folder)}

    def cache_stories(self):
        """The bundled model as huggingface_hub would cache it."""
        repository = self.folder / ".cache/huggingface/hub/models--org--stories"
        snapshot = repository / "snapshots" / ("a" * 40)
        for folder in (repository / "blobs", repository / "refs", snapshot):
            folder.mkdir(parents=True)
        (repository / "refs/main").write_text("a" * 40)
        for file in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(STORIES / file, repository / "blobs" / f"of_{file}")
            (snapshot / file).symlink_to(Path("../../blobs") / f"of_{file}")
        return snapshot

    def pull_stories(self):
        """The small GGUF model as Ollama would store it: without an ending."""
        [model] = GGUF_STORIES.glob("*.gguf")
        store, digest = self.folder / ".ollama/models", hashlib.sha256(model.read_bytes()).hexdigest()
        manifest = store / "manifests/registry.ollama.ai/library/tiny/latest"
        for folder in (store / "blobs", manifest.parent):
            folder.mkdir(parents=True)
        shutil.copy(model, store / "blobs" / f"sha256-{digest}")
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [
            {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": model.stat().st_size}]}))
        return model, store / "blobs" / f"sha256-{digest}"

    def test_every_command_takes_a_name_of_the_hub(self):
        snapshot = self.cache_stories()
        expected = self.done("run", STORIES, "-p", "Once", "-n", "5", "--temperature", "0").out
        result = self.done("run", "org/stories", "-p", "Once", "-n", "5", "--temperature", "0", env=self.home)
        self.assertEqual(result.out, expected)
        self.assertEqual(result.err.count(f"using org/stories from the Hugging Face cache, main at aaaaaaa ({snapshot})"), 1)
        text = self.folder / "text.txt"
        text.write_text("Once upon a time there was a dog.")
        for command in (["inspect", "org/stories"], ["explain", "org/stories@main"],
                        ["perplexity", "org/stories", text, "--context", "8"],
                        ["tokenizer", "encode", "-m", "org/stories", "a"],
                        ["convert", "org/stories", self.folder / "s.gguf"],
                        ["bench", "org/stories", "-p", "8", "-n", "4", "-r", "1"]):
            self.assertIn("using org/stories", self.done(*command, env=self.home).err)

    def test_every_command_takes_a_name_of_ollama(self):
        model, blob = self.pull_stories()
        run = ["-p", "Once", "-n", "5", "--temperature", "0"]
        result = self.done("run", "tiny", *run, env=self.home)
        self.assertEqual(result.out, self.done("run", model, *run).out)
        self.assertIn(f"using tiny from Ollama's store, manifests/registry.ollama.ai/library/tiny/latest ({blob})", result.err)
        self.done("inspect", "tiny:latest", env=self.home)
        self.assertEqual(self.done("tokenizer", "encode", "-m", "tiny", "a dog", env=self.home).out,
                         self.done("tokenizer", "encode", "-m", model, "a dog").out)
        self.done("convert", "tiny", self.folder / "directory", env=self.home)
        self.assertTrue((self.folder / "directory/tokenizer.json").exists())

    def test_what_is_missing_is_answered_with_a_command(self):
        self.refused(1, ["org/name: no such file", "`hf download org/name` fetches it"], "inspect", "org/name", env=self.home)
        self.refused(1, "`ollama pull llama3.2:1b` fetches it", "run", "llama3.2:1b", "-p", "a", env=self.home)

    def test_a_folder_of_models(self):
        shutil.copytree(STORIES, self.folder / "mine/tales")
        result = self.done("inspect", "tales", env={**self.home, "EADEM_MODELS": str(self.folder / "mine")})
        self.assertIn(f"using tales ({self.folder}/mine/tales, of EADEM_MODELS)", result.err)
        self.refused(1, "no such file", "inspect", "tales", env=self.home)


class Run(ProgramTest):
    def test_streams(self):
        result = self.done("run", "-p", "Once upon a time", "-n", "20", "--temperature", "0")
        self.assertTrue(result.out.startswith("Once upon a time"))
        self.assertTrue(result.out.endswith("\n"))
        self.assertNotIn("tokens/s", result.out)
        for words in ["greedy, max_tokens 20", "tokens/s", "first token after", "memory", "limit", "\x1b"]:
            (self.assertNotIn if words == "\x1b" else self.assertIn)(words, result.err)

    def test_prompt_sources_agree(self):
        (self.folder / "prompt.txt").write_text("Once upon a time")
        sampling = ["-n", "10", "--temperature", "0", "--quiet"]
        texts = {
            self.done("run", "-p", "Once upon a time", *sampling).out,
            self.done("run", "-f", self.folder / "prompt.txt", *sampling).out,
            self.done("run", "-f", "-", *sampling, stdin=b"Once upon a time").out,
            self.done("run", *sampling, stdin=b"Once upon a time").out,
        }
        self.assertEqual(len(texts), 1)

    def test_json_and_seed(self):
        runs = [json.loads(self.done("run", "-p", "Once", "-n", "12", "--seed", "7", "--json").out) for _ in range(2)]
        self.assertEqual(runs[0]["text"], runs[1]["text"])
        self.assertEqual(runs[0]["sampling"]["seed"], 7)
        self.assertGreater(runs[0]["decode_tokens_per_second"], 0)
        self.assertEqual(runs[0]["finish_reason"], "length")

    def test_penalties(self):
        sampling = ["run", "-p", "Once upon a time", "-n", "60", "--temperature", "0", "--ignore-eos", "--quiet"]
        penalties = [[], ["--repetition-penalty", "1.3"], ["--presence-penalty", "2"], ["--frequency-penalty", "1"]]
        texts = [self.done(*sampling, *penalty).out for penalty in penalties]
        self.assertEqual(len(set(texts)), 4, texts)
        result = json.loads(self.done(*sampling, "--json", "--repetition-penalty", "1.3").out)
        self.assertEqual(result["sampling"]["repetition_penalty"], 1.3)
        self.assertEqual(result["sampling"]["presence_penalty"], 0)

    def test_special_tokens_in_a_prompt(self):
        special = json.loads((STORIES / "tokenizer.json").read_text())["added_tokens"][0]["content"]
        run = ["run", "-p", f"Once{special} upon", "-n", "1", "--json"]
        as_text, parsed = (json.loads(self.done(*run, *option).out)["prompt_tokens"] for option in ([], ["--parse-special"]))
        self.assertLess(parsed, as_text)

    def test_stop_text(self):
        result = json.loads(self.done("run", "-p", "Once upon a time", "--temperature", "0", "--stop", " there",
                                      "--json").out)
        self.assertNotIn(" there", result["text"])

    def test_threads_and_fusions_do_not_change_the_text(self):
        sampling = ["run", "-p", "The cat", "-n", "30", "--temperature", "0", "--quiet"]
        first = self.done(*sampling, "--threads", "1").out
        self.assertEqual(first, self.done(*sampling, "--threads", "2").out)
        for options in (["-t", "1", "--prefill-threads", "2"], ["-t", "2", "--prefill-threads", "1", "--no-pin"]):
            self.assertEqual(first, self.done(*sampling, *options).out)
        self.refused(1, "no_such_fusion", *sampling, "--disable-fusion", "no_such_fusion")

    def test_bad_prompts(self):
        for name, content, words in [("empty.txt", b"", "is empty"), ("latin.txt", b"caf\xe9", "not UTF-8"),
                                     ("long.txt", b"a b " * 20000, "the context holds")]:
            (self.folder / name).write_bytes(content)
            self.refused(1, words, "run", "-f", self.folder / name)
        self.refused(1, "is empty", "run")
        self.refused(1, "directory", "run", "-f", self.folder)
        self.refused(1, "No such file", "run", "-f", self.folder / "nope.txt")
        self.refused(1, "no chat template", "run", "stories", "-p", "a", "--chat")

    def test_empty_prompt_starts_from_bos(self):
        self.assertGreater(len(self.done("run", "-p", "", "-n", "5").out), 1)

    def test_huge_max_tokens_ends_with_the_context(self):
        result = self.done("run", "-p", "Once", "-n", "1M", "--ignore-eos")
        self.assertIn("the context of 512 tokens is full", result.err)

    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            process = subprocess.run([PROGRAM, "run", "-p", "a", "-n", "2"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(process.returncode, 1)
        self.assertIn(b"cannot write to standard output", process.stderr)

    def test_stops_when_asked(self):
        for request in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(request=request):
                process = subprocess.Popen([PROGRAM, "bench", "--repeat", "10000"], stdout=subprocess.PIPE,
                                           stderr=subprocess.PIPE)
                time.sleep(2)
                process.send_signal(request)
                out, err = process.communicate(timeout=30)
                self.assertEqual(process.returncode, 130, err)
                self.assertIn(b"stopped", err)

    def test_ctrl_c_while_reading_a_prompt(self):
        process = subprocess.Popen([PROGRAM, "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        process.communicate()
        self.assertEqual(process.returncode, 130)

    def test_terminal(self):
        """On a terminal: asks for texts, Ctrl-D ends."""
        controller, terminal = os.openpty()
        process = subprocess.Popen([PROGRAM, "run", "-n", "3", "--temperature", "0"], stdin=terminal,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        os.close(terminal)
        os.write(controller, b"Once upon\n\n\x04")
        out, err = process.communicate(timeout=30)
        os.close(controller)
        self.assertEqual(process.returncode, 0, err)
        self.assertTrue(out.startswith(b"Once upon"))
        self.assertIn(b"> ", err)


class Understand(ProgramTest):
    def test_inspect_renders_the_chat_template(self):
        folder = self.folder / "chat"
        shutil.copytree(STORIES, folder)
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}")
        text = "[user]\nHello!\n[assistant]\nHi there.\n[user]\nHow are you?\n>"
        sample = json.loads(self.done("inspect", folder, "--json").out)["tokenizer"]["chat_sample"]
        self.assertEqual(sample["text"], text)
        self.assertGreater(sample["tokens"], 10)
        shown = self.done("inspect", folder).out
        for line in text.splitlines():
            self.assertIn(line, shown)
        (folder / "chat_template.jinja").write_text("\n{% include 'x' %}")
        self.assertIn("chat_template.jinja:2: tag 'include' is not supported in chat templates",
                      " ".join(self.done("inspect", folder).out.split()))

    def test_inspect_shows_templates_and_stop_tokens(self):
        folder = self.folder / "stops"
        shutil.copytree(STORIES, folder)
        eos = json.loads(self.done("inspect", folder, "--json").out)["tokenizer"]["eos"]
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos["id"], 5, 99999999]}))
        tokenizer = json.loads(self.done("inspect", folder, "--json").out)["tokenizer"]
        self.assertEqual(tokenizer["chat_templates"], ["default", "tool_use"])
        end = "the chat template's end of turn"
        self.assertEqual([(stop["id"], stop["reasons"]) for stop in tokenizer["stop_tokens"]],
                         [(eos["id"], [end, "generation_config.json", "the tokenizer's EOS"]),
                          (5, ["generation_config.json"]), (99999999, ["generation_config.json"])])
        shown = " ".join(self.done("inspect", folder).out.split())
        self.assertIn(f"stop tokens {eos['text']} ({eos['id']}): {end}, generation_config.json, the tokenizer's EOS",
                      shown)
        self.assertIn("99999999 (no token of the tokenizer): generation_config.json", shown)
        self.assertIn("chat templates default, tool_use", shown)

    def test_inspect(self):
        result = json.loads(self.done("inspect", GOLDEN / "qwen3", "--json").out)
        self.assertEqual(result["architecture"], "qwen3")
        self.assertEqual(result["config"]["model_type"], "qwen3")
        self.assertIn("error", result["tokenizer"])
        self.assertIn("model.layers.0.self_attn.q_norm.weight", self.done("inspect", GOLDEN / "qwen3", "--tensors").out)
        self.assertIn("parameters", self.done("inspect", GOLDEN / "llama/config.json").out)
        ignored = {key["key"]: key["reason"] for key in result["ignored_keys"]}
        self.assertIn("use_cache", ignored)
        self.assertNotIn("hidden_size", ignored)
        self.assertIn(f"use_cache: {ignored['use_cache']}", self.done("inspect", GOLDEN / "qwen3").out)
        self.assertIsNone(json.loads(self.done("inspect", "stories", "--json").out)["tokenizer"]["chat_sample"])
        kv_bytes = lambda *options: json.loads(self.done("inspect", GOLDEN / "llama", "--json", *options).out)[
            "memory"][0]["kv_cache_bytes"]
        # 16 codes and a scale for each head of 16, against 64 bytes.
        self.assertEqual(kv_bytes("--kv-dtype", "int8") * 64, kv_bytes("--kv-dtype", "f32") * 20)

    def test_tied_weights_under_the_name_of_the_head(self):
        shutil.copytree(GOLDEN / "qwen2", self.folder / "qwen2")
        data = (GOLDEN / "qwen2/model.safetensors").read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + size])
        header["lm_head.weight"] = header.pop("model.embed_tokens.weight")
        text = json.dumps(header).encode()
        (self.folder / "qwen2/model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])
        for source, out in ((GOLDEN / "qwen2", "a.gguf"), (self.folder / "qwen2", "b.gguf")):
            self.done("convert", source, self.folder / out)
        self.assertEqual((self.folder / "a.gguf").read_bytes(), (self.folder / "b.gguf").read_bytes())

    def test_explain(self):
        text = self.done("explain", GOLDEN / "llama", "--decode").out
        for words in ["hardware configuration", "factories", "decode:", "fusions", "memory plan", "the same)"]:
            self.assertIn(words, text)
        self.assertNotIn("prefill:", text)
        self.assertNotIn("the same)", self.done("explain", GOLDEN / "llama", "--all").out)
        result = json.loads(self.done("explain", GOLDEN / "llama", "--json").out)
        self.assertTrue(result["decode"]["complete"] and result["prefill"]["complete"])
        self.assertTrue(all(step["kernel"] for step in result["decode"]["steps"]))
        off = json.loads(self.done("explain", GOLDEN / "llama", "--json", "--disable-fusion", "all").out)
        self.assertFalse(any(fusion["applied"] for fusion in off["decode"]["fusions"]))

    def test_explain_names_what_a_device_lacks(self):
        text = self.done("explain", GOLDEN / "llama", "--activations", "bf16").out
        self.assertIn("NO KERNEL", text)
        self.assertIn("this device cannot run the model", text)

    def test_bench(self):
        config = GOLDEN / "llama/config.json"
        result = json.loads(self.done("bench", "--random", config, "--type", "bf16", "--prompt", "16", "--gen",
                                      "4", "--depth", "0,8", "--batch", "1,2", "--repeat", "2", "--json").out)
        self.assertEqual(len(result["results"]), 8)
        for row in result["results"]:
            self.assertLessEqual(row["lowest"], row["tokens_per_second"])
            self.assertLessEqual(row["tokens_per_second"], row["highest"])
        weights, cache = result["weight_bytes"], result["kv_cache_bytes"]
        # Two tensors a layer of [2 sequences, 24 tokens, kv heads, head_dim] in f32 or 16 bits.
        shape = json.loads(config.read_text())
        values = 2 * 2 * 24 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        self.assertIn(cache, (2 * values, 4 * values))
        self.assertGreater(result["peak_memory_bytes"], weights + cache)
        self.assertAlmostEqual(result["peak_memory_ratio"],
                               result["peak_memory_bytes"] / (weights + cache + result["activation_bytes"]))
        self.refused(1, "tokens of context", "bench", "--random", config, "--depth", "1M")
        threads = ["-t", "1", "--prefill-threads", "2", "--prompt", "16", "--gen", "2", "--repeat", "1"]
        result = json.loads(self.done("bench", "--random", config, *threads, "--json").out)
        self.assertEqual((result["threads"], result["prefill_threads"]), (1, 2))
        self.assertIn("1 thread, 2 for prefill)", self.done("bench", "--random", config, *threads).out)
        self.refused(2, "give one", "bench", GOLDEN / "llama", "--random", config)

    def test_bench_of_decoding_alone(self):
        result = json.loads(self.done("bench", "stories", "--prompt", "0", "--gen", "4", "--repeat", "1", "--json").out)
        self.assertEqual([row["test"] for row in result["results"]], ["decode"])
        self.assertEqual(result["end_to_end"]["drawn_tokens"], 4)

    def test_bench_takes_every_type_that_convert_writes(self):
        config = STORIES / "config.json"
        listed = self.done("convert", "--help").out
        parameters = None
        for name in ("f16", "q4_k_m", "q8_0", "int8", "int4_g32", "int4_g64", "int4_g128", "fp8", "fp8_block128"):
            with self.subTest(name):
                self.assertIn(name, listed)
                result = json.loads(self.done("bench", "--random", config, "--type", name, "--prompt", "3", "--gen", "2",
                                              "--repeat", "1", "--json").out)
                self.assertEqual(len(result["results"]), 2)
                # The embedding of directories' types stays in 16 bits; nothing takes more than that.
                parameters = parameters or result["parameters"]
                self.assertLess(result["weight_bytes_per_step"], 2.1 * parameters)
        self.refused(2, "int5", "bench", "--random", config, "--type", "int5")

    def test_doctor(self):
        result = json.loads(self.done("doctor", "--json", "--threads", "1").out)
        self.assertEqual((result["threads"], result["prefill_threads"]), (1, 1))
        self.assertGreaterEqual(result["processors"], result["cores"])
        self.assertGreaterEqual(result["cores"], 1)
        self.assertGreaterEqual(result["memory_nodes"], 1)
        self.assertIsInstance(result["topology_notes"], list)
        self.assertGreater(result["read_bytes_per_second"], 0)
        self.assertIn("scalar", result["f32_flops_per_second"])

    def test_perplexity(self):
        text = self.folder / "text.txt"
        text.write_text("Once upon a time there was a little cat. She liked to play in the garden. " * 14)
        result = json.loads(self.done("perplexity", "stories", text, "--context", "64", "--chunks", "3", "--kl",
                                      "stories", "--json").out)
        self.assertEqual((result["chunks"], result["scored_tokens"]), (3, 3 * 31))
        self.assertEqual(result["kl_divergence"], 0)
        self.assertGreater(result["perplexity"], 1)
        (self.folder / "empty.txt").write_text("")
        self.refused(1, "is empty", "perplexity", self.folder / "empty.txt")
        self.refused(1, "less than one chunk", "perplexity", "stories", text, "--context", "512")


class Tokenizer(ProgramTest):
    def test_train_encode_decode(self):
        (self.folder / "text.txt").write_text("the cat and the dog and the cat " * 50)
        made = self.folder / "made"
        arguments = ["tokenizer", "train", self.folder / "text.txt", "--vocab-size", "270", "--special", "<|end|>",
                     "--eos", "<|end|>", "-o", made]
        self.assertEqual(self.done(*arguments).out, "")
        self.refused(1, "--force", *arguments)
        self.done(*arguments, "--force")
        text = "the cat — café <|end|>"
        ids = self.done("tokenizer", "encode", "-m", made, text).out
        self.assertEqual(self.done("tokenizer", "decode", "-m", made, "--special", stdin=ids.encode()).out, text + "\n")
        self.assertEqual(json.loads(self.done("tokenizer", "encode", "-m", made, text, "--json").out)["ids"],
                         [int(word) for word in ids.split()])
        self.refused(1, "not UTF-8", "tokenizer", "encode", "-m", made, stdin=b"\xff")
        self.refused(1, "no token id", "tokenizer", "decode", "-m", made, "x")
        self.refused(1, "999999", "tokenizer", "decode", "-m", made, "999999")
        lists = f"[{', '.join(ids.split())}]\n"
        self.assertEqual(self.done("tokenizer", "decode", "-m", made, "--special", stdin=lists.encode()).out, text + "\n")

    def test_a_path_is_not_taken_for_text(self):
        path = STORIES / "tokenizer.json"
        for text in (path, STORIES):
            self.refused(2, [f"`-m '{text}'`", f"`-f '{text}'`", "standard input"], "tokenizer", "encode", text,
                         stdin=b"Once upon a time")
        self.refused(1, ["no token id", "-m gives the model"], "tokenizer", "decode", path)
        self.assertEqual(self.done("tokenizer", "encode", stdin=str(path).encode()).code, 0)

    def test_standard_input_has_a_limit(self):
        for action, what in (("encode", "text"), ("decode", "ids")):
            source = open("/dev/zero", "rb") if action == "encode" else subprocess.Popen(["yes", "1"], stdout=subprocess.PIPE)
            stream = source if action == "encode" else source.stdout
            process = subprocess.run([PROGRAM, "tokenizer", action], stdin=stream, capture_output=True, timeout=120)
            stream.close()
            if action == "decode":
                source.wait()
            self.assertEqual(process.returncode, 1)
            self.assertIn(f"standard input: more than 268435456 bytes of {what}".encode(), process.stderr)

    def test_encoding_stops_when_asked(self):
        path = self.folder / "text.txt"
        path.write_bytes(b"Once upon a time there was a unique word " * 5_000_000)
        process = subprocess.Popen([PROGRAM, "tokenizer", "encode", "-f", path], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (130, b""), err)
        self.assertIn(b"interrupted", err)

    def test_bad_training(self):
        (self.folder / "bad.txt").write_bytes(b"\xff")
        self.refused(1, ["bad.txt", "not UTF-8"], "tokenizer", "train", self.folder / "bad.txt", "--vocab-size", "300",
                     "-o", self.folder / "out")
        self.assertFalse((self.folder / "out").exists())


def safetensors(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + size])
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], content[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]])
            for name, t in header.items()}


def zero_model(folder, layers, hidden, ffn, heads, kv_heads, head_dim, vocab, tied):
    """A Llama model of zeros, in f32."""
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
              "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
              "tie_word_embeddings": tied, "torch_dtype": "float32"}
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    if not tied:
        shapes["lm_head.weight"] = [vocab, hidden]
    for layer in range(layers):
        for name, shape in {"input_layernorm": [hidden], "self_attn.q_proj": [heads * head_dim, hidden],
                            "self_attn.k_proj": [kv_heads * head_dim, hidden],
                            "self_attn.v_proj": [kv_heads * head_dim, hidden],
                            "self_attn.o_proj": [hidden, heads * head_dim], "post_attention_layernorm": [hidden],
                            "mlp.gate_proj": [ffn, hidden], "mlp.up_proj": [ffn, hidden],
                            "mlp.down_proj": [hidden, ffn]}.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


class Convert(ProgramTest):
    def test_chat_templates_go_along(self):
        source, gguf, back, copy = (self.folder / name for name in ("templates", "templates.gguf", "back", "copy"))
        shutil.copytree(STORIES, source)
        (source / "chat_template.jinja").write_text("{{ 'default' }}")
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates/tool_use.jinja").write_text("{{ 'tools' }}")
        self.done("convert", source, gguf)
        self.done("convert", gguf, back)
        self.done("convert", source, copy)
        for path in (source, gguf, back, copy):
            tokenizer = json.loads(self.done("inspect", path, "--json").out)["tokenizer"]
            self.assertEqual(tokenizer["chat_templates"], ["default", "tool_use"], path)
            self.assertEqual(tokenizer["chat_sample"]["text"], "default", path)
        self.assertEqual(json.loads((back / "tokenizer_config.json").read_text())["chat_template"],
                         [{"name": "default", "template": "{{ 'default' }}"},
                          {"name": "tool_use", "template": "{{ 'tools' }}"}])
        self.assertTrue((copy / "additional_chat_templates/tool_use.jinja").exists())

    def test_there_and_back_is_exact(self):
        for model in ["llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "yarn", "linear"]:
            with self.subTest(model):
                gguf, back = self.folder / f"{model}.gguf", self.folder / model
                self.done("convert", GOLDEN / model, gguf)
                self.done("convert", gguf, back)
                self.assertEqual(safetensors(GOLDEN / model / "model.safetensors"), safetensors(back / "model.safetensors"))
                configs = [json.loads(self.done("inspect", path, "--json").out)["config"] for path in (GOLDEN / model, back)]
                for config in configs:
                    config.pop("torch_dtype", None)
                self.assertEqual(*configs)

    def test_the_text_stays(self):
        gguf, back = self.folder / "stories.gguf", self.folder / "back"
        self.done("convert", STORIES, gguf)
        self.done("convert", gguf, back)
        self.assertEqual((STORIES / "tokenizer.json").read_text(), (back / "tokenizer.json").read_text())
        sampling = ["-p", "Once upon a time", "-n", "40", "--temperature", "0", "--quiet"]
        texts = {self.done("run", model, *sampling).out for model in (STORIES, gguf, back)}
        self.assertEqual(len(texts), 1)

    def test_interleaved_gguf(self):
        made = self.folder / "made"
        self.done("convert", GGUF_STORIES / "stories260K.gguf", made)
        text = self.done("run", made, "-p", "", "-n", "200", "--temperature", "0", "--ignore-eos", "--quiet").out
        self.assertEqual(text, (GGUF_STORIES / "expected_t0_n200.txt").read_text() + "\n")

    def test_rounding_is_reported(self):
        result = json.loads(self.done("convert", GOLDEN / "llama", self.folder / "half", "--type", "bf16", "--json").out)
        for tensor in result["tensors"]:
            self.assertEqual(tensor["largest_error"] > 0, tensor["type"] == "bf16", tensor)
            self.assertEqual(tensor["relative_error"] > 0, tensor["type"] == "bf16", tensor)

    def test_quantized_models_are_written_and_run(self):
        expected = (STORIES / "greedy.txt").read_text()[:60]
        for name in ("q8_0", "q4_k_m"):
            out = self.folder / f"{name}.gguf"
            result = json.loads(self.done("convert", STORIES, out, "--type", name, "--json").out)
            quantized = [tensor for tensor in result["tensors"] if tensor["type"].startswith("q")]
            self.assertEqual(len(quantized), 1 + 7 * 6, result)
            for tensor in quantized:
                self.assertLess(tensor["relative_error"], 0.08, tensor)
            text = self.done("run", out, "-p", "", "-n", "40", "--temperature", "0", "--quiet").out
            self.assertTrue(text.startswith(expected), text)
        self.refused(1, "safetensors has no type", "convert", STORIES, self.folder / "directory", "--type", "q8_0")

    def test_quantized_directories_are_written_and_run(self):
        expected = (STORIES / "greedy.txt").read_text()[:60]
        # Half a step of a group's largest value over 127.5 or 7.5, and half a unit in the last place of e4m3.
        for name, encoding, bound in (("int8", "int8_row_bf16", 0.02), ("int4_g32", "int4_g32_bf16", 0.12),
                                      ("fp8", "fp8_e4m3_channel", 0.05), ("fp8_block128", "fp8_e4m3_block128", 0.05)):
            out = self.folder / name
            result = json.loads(self.done("convert", STORIES, out, "--type", name, "--json").out)
            quantized = [tensor for tensor in result["tensors"] if tensor["type"] == encoding]
            self.assertEqual(len(quantized), 7 * 6, result)
            for tensor in quantized:
                self.assertTrue(0 < tensor["relative_error"] < bound, tensor)
            self.assertIn("quantization_config", json.loads((out / "config.json").read_text()))
            self.assertIn(encoding, self.done("inspect", out).out)
            text = self.done("run", out, "-p", "", "-n", "40", "--temperature", "0", "--quiet").out
            if name != "int4_g32":
                self.assertTrue(text.startswith(expected), text)
        # Decoded where a file has no such types.
        gguf = self.folder / "int8.gguf"
        self.done("convert", self.folder / "int8", gguf)
        text = self.done("run", gguf, "-p", "", "-n", "40", "--temperature", "0", "--quiet").out
        self.assertTrue(text.startswith(expected), text)
        self.refused(2, ["--type int8", "for directories"], "convert", STORIES, self.folder / "a.gguf", "--type", "int8")

    def test_calibration(self):
        text = self.folder / "text.txt"
        text.write_text((STORIES / "greedy.txt").read_text())
        plain, once, again = (self.folder / f"{name}.gguf" for name in ("plain", "once", "again"))
        convert = ["convert", STORIES, "--type", "q4_0", "--json"]
        uncalibrated = json.loads(self.done(*convert, plain).out)["tensors"]
        calibrated = json.loads(self.done(*convert, once, "--calibrate", text, "--calibrate-tokens", "200").out)["tensors"]
        self.done(*convert, again, "--calibrate", text, "--calibrate-tokens", "200", "--threads", "1")
        self.assertEqual(once.read_bytes(), again.read_bytes())
        for before, after in zip(uncalibrated, calibrated):
            self.assertNotIn("relative_output_error", before)
            if after["type"] == "q4_0":
                self.assertGreater(after["relative_output_error"], 0, after)
            else:
                self.assertEqual(after.get("relative_output_error", 0), 0, after)
        # Minimizing the weighted error does not minimize the plain one.
        self.assertGreater(*(sum(tensor["relative_error"] for tensor in list) for list in (calibrated, uncalibrated)))
        self.done("perplexity", once, text, "--context", "32")
        # Scales of directories' types.
        for name in ("int8", "int4_g32", "fp8", "fp8_block128"):
            with self.subTest(name):
                plain, weighted = self.folder / f"{name}_plain", self.folder / f"{name}_weighted"
                layers = ["convert", STORIES, "--type", name, "--json"]
                uncalibrated = json.loads(self.done(*layers, plain).out)["tensors"]
                calibrated = json.loads(self.done(*layers, weighted, "--calibrate", text, "--calibrate-tokens", "200").out)
                quantized = [(before, after) for before, after in zip(uncalibrated, calibrated["tensors"])
                             if after["relative_error"] > 0]
                self.assertGreater(len(quantized), 7 * 6 - 1)
                for before, after in quantized:
                    self.assertNotIn("relative_output_error", before)
                    self.assertGreater(after["relative_output_error"], 0, after)
                self.done("run", weighted, "-p", "", "-n", "3", "--temperature", "0", "--quiet")
        out = self.folder / "out.gguf"
        self.refused(2, ["--calibrate is for quantized types", "as-is"], "convert", STORIES, out, "--calibrate", text)
        self.refused(2, "--calibrate-tokens is for --calibrate", *convert, out, "--calibrate-tokens", "5")
        self.refused(2, "expected at least 1", *convert, out, "--calibrate", text, "--calibrate-tokens", "0")
        self.refused(2, "--device and --isa", *convert, out, "--isa", "scalar")
        self.refused(1, "nope.txt", *convert, out, "--calibrate", self.folder / "nope.txt")
        text.write_text("")
        self.refused(1, [str(text), "no tokens"], *convert, out, "--calibrate", text)
        self.assertFalse(out.exists())

    def test_mixtures_store_what_their_names_stand_for(self):
        for name, facts in json.loads((DATA / "quantized/mixtures.json").read_text()).items():
            shape = facts["shape"]
            model = self.folder / name
            zero_model(model, **shape)
            for mixture, expected in facts["mixtures"].items():
                with self.subTest(model=name, mixture=mixture):
                    made = json.loads(self.done("convert", model, self.folder / "made.gguf", "--type", mixture, "--force",
                                                "--json").out)
                    types = {tensor["name"]: tensor["type"] for tensor in made["tensors"] if "norm" not in tensor["name"]}
                    # Where rows are no whole blocks of 256, iq4_nl instead of q4_0 (convert/types.cc).
                    short = {key for key in types if shape["hidden"] % 256 and "ffn_down" not in key}
                    known = {key: "iq4_nl" if key in short and value == "q4_0" else value
                             for key, value in expected["types"].items()}
                    self.assertEqual(types, known)
                    file_type = b"general.file_type" + struct.pack("<II", 4, expected["file_type"])  # 4: a u32
                    self.assertIn(file_type, (self.folder / "made.gguf").read_bytes()[:4096])

    def test_types_where_rows_are_no_whole_blocks(self):
        model = self.folder / "short_rows"
        zero_model(model, layers=1, hidden=96, ffn=256, heads=4, kv_heads=2, head_dim=32, vocab=32, tied=True)
        for name, instead in {"q2_k": "iq4_nl", "q3_k": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
                              "iq4_xs": "iq4_nl", "iq4_nl": "iq4_nl", "mxfp4": "mxfp4", "q4_0": "q4_0"}.items():
            made = json.loads(self.done("convert", model, self.folder / "made.gguf", "--type", name, "--force", "--json").out)
            for tensor in made["tensors"]:
                if "norm" not in tensor["name"]:
                    self.assertEqual(tensor["type"], name if "ffn_down" in tensor["name"] else instead, tensor)
        # 72 columns are no blocks of 32 either.
        made = json.loads(self.done("convert", GOLDEN / "smollm2", self.folder / "f16.gguf", "--type", "iq4_xs", "--json").out)
        self.assertEqual({tensor["type"] for tensor in made["tensors"] if "norm" not in tensor["name"]}, {"f16"})

    def test_what_a_type_cannot_hold(self):
        huge = self.folder / "huge"
        shutil.copytree(STORIES, huge)
        file = bytearray((huge / "model.safetensors").read_bytes())
        header_size = int.from_bytes(file[:8], "little")
        name = "model.layers.1.mlp.up_proj.weight"
        tensor = json.loads(file[8:8 + header_size])[name]
        self.assertEqual(tensor["dtype"], "BF16")
        place = 8 + header_size + tensor["data_offsets"][0] + 2 * (3 * tensor["shape"][1] + 5)  # row 3, column 5
        file[place:place + 2] = b"\x61\x7f"  # 2.99e38
        (huge / "model.safetensors").write_bytes(file)
        out = self.folder / "out.gguf"
        self.refused(1, [name, "row 3", "column 5", "e+38"], "convert", huge, out, "--type", "q8_0")
        self.assertFalse(out.exists())

    def test_overwriting(self):
        out = self.folder / "out.gguf"
        out.write_text("precious")
        self.refused(1, "--force", "convert", GOLDEN / "llama", out)
        self.assertEqual(out.read_text(), "precious")
        self.done("convert", GOLDEN / "llama", out, "--force")
        self.refused(1, "cannot make the directory", "convert", GOLDEN / "llama", "/proc/nope/out")
        self.assertEqual([path.name for path in self.folder.iterdir()], ["out.gguf"])


class Train(ProgramTest):
    RECIPE = """
[model]
config = "config.json"
[tokenizer]
path = "tokenizer"
[data]
train = ["text.txt"]
[training]
steps = {steps}
batch_tokens = 64
sequence_length = 32
warmup_steps = 1
[output]
directory = "out"
"""

    def recipe(self, steps):
        (self.folder / "text.txt").write_text("the cat and the dog and the cat<|endoftext|>" * 50)
        if not (self.folder / "tokenizer").exists():
            self.done("tokenizer", "train", self.folder / "text.txt", "--vocab-size", "270", "--special", "<|endoftext|>",
                      "--bos", "<|endoftext|>", "--eos", "<|endoftext|>", "-o", self.folder / "tokenizer")
        (self.folder / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 270, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}))
        path = self.folder / "recipe.toml"
        path.write_text(self.RECIPE.format(steps=steps))
        return path

    def test_trains(self):
        result = self.done("train", self.recipe(3))
        model = result.out.strip()
        self.assertTrue(Path(model, "model.safetensors").exists())
        self.done("run", model, "-p", "the", "-n", "3")
        self.refused(1, "--resume", "train", self.recipe(3))

    def test_ctrl_c_saves_a_checkpoint(self):
        path = self.recipe(1000000)
        process = subprocess.Popen([PROGRAM, "train", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (130, b""), err)
        self.assertIn(b"--resume` goes on", err)
        self.assertTrue(any((self.folder / "out/checkpoints").iterdir()))

    def test_refusals(self):
        self.refused(1, "nope.toml", "train", self.folder / "nope.toml")
        self.refused(2, "RECIPE.toml is missing", "train")


if __name__ == "__main__":
    main()
