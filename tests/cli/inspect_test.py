#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem inspect, as a user meets it.

    inspect_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import shutil
import struct

from program import GOLDEN, STORIES, ProgramTest, main


class Inspect(ProgramTest):
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

    def test_experts_without_weights_are_counted(self):
        self.assertIn("5 in a layer and 3 identities, 4 for each token, ffn 9",
                      self.done("inspect", GOLDEN / "longcat_flash").out)
        experts = json.loads(self.done("inspect", GOLDEN / "longcat_flash", "--json").out)["experts"]
        self.assertEqual(experts, {"count": 5, "identities": 3, "per_token": 4, "ffn": 9})
        self.assertIn("8 in a layer, 2 for each token", self.done("inspect", GOLDEN / "qwen3_moe").out)

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


if __name__ == "__main__":
    main()
