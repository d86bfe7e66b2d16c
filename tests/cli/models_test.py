#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What every command takes for a model: paths, names in caches, nothing, as a user meets it.

    models_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from program import GGUF_STORIES, STORIES, ProgramTest, main
from split_gguf import split_gguf


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

    def test_split(self):
        whole = GGUF_STORIES / "stories260K.gguf"
        (self.folder / "parts").mkdir()
        parts = split_gguf(whole, self.folder / "parts/stories", 3)
        greedy = ["-p", "Once upon a time", "-n", "20", "--temperature", "0"]
        expected = self.done("run", whole, *greedy).out
        description = self.done("inspect", whole, "--json").out
        for path in [*parts, self.folder / "parts"]:
            self.assertEqual(self.done("run", path, *greedy).out, expected)
            found = self.done("inspect", path, "--json").out
            for name in (parts[0], path):
                found = found.replace(f'"{name}"', f'"{whole}"')
            self.assertEqual(found, description)
        self.done("bench", parts[0], "--prompt", "8", "--gen", "4", "--repeat", "1")
        self.done("convert", parts[1], self.folder / "a.gguf", "--type", "as-is")
        self.done("convert", whole, self.folder / "b.gguf", "--type", "as-is")
        self.assertEqual((self.folder / "a.gguf").read_bytes(), (self.folder / "b.gguf").read_bytes())
        # A pack cache holds what all parts say.
        for path in [parts[0], parts[0]]:
            self.assertEqual(self.done("run", path, *greedy, "--pack-cache", self.folder / "cache").out, expected)
        parts[1].unlink()
        self.refused(1, ["its part 2 of 3", "stories-00002-of-00003.gguf", "is not there"], "inspect", parts[0])
        self.refused(1, "its part 2 of 3", "run", self.folder / "parts", "-p", "a")

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

    def test_a_folder_with_a_split_model(self):
        (self.folder / "mine").mkdir()
        parts = split_gguf(GGUF_STORIES / "stories260K.gguf", self.folder / "mine/tales", 3)
        run = ["-p", "Once", "-n", "4", "--temperature", "0", "--quiet"]
        environment = {**self.home, "EADEM_MODELS": str(self.folder / "mine")}
        result = self.done("run", "tales", *run, env=environment)
        self.assertIn(f"using tales ({self.folder}/mine/tales-00001-of-00003.gguf, of EADEM_MODELS)", result.err)
        self.assertEqual(result.out, self.done("run", GGUF_STORIES / "stories260K.gguf", *run).out)
        parts[1].unlink()
        self.refused(1, "tales-00002-of-00003.gguf", "run", "tales", *run, env=environment)


if __name__ == "__main__":
    main()
