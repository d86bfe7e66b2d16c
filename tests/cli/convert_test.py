#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""eadem convert, as a user meets it.

    convert_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import math
import shutil
import struct

from program import DATA, GGUF_STORIES, GOLDEN, STORIES, ProgramTest, main


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
    folder.mkdir()
    write_zeros(folder, config, shapes)


def write_zeros(folder, config, shapes):
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def gpt2_model(folder, hidden, vocab):
    """A GPT-2 model of zeros of one layer."""
    config = {"model_type": "gpt2", "n_embd": hidden, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": vocab,
              "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "torch_dtype": "float32"}
    shapes = {"transformer.wte.weight": [vocab, hidden], "transformer.wpe.weight": [64, hidden]}
    for name, shape in {"attn.c_attn": [hidden, 3 * hidden], "attn.c_proj": [hidden, hidden],
                        "mlp.c_fc": [hidden, 4 * hidden], "mlp.c_proj": [4 * hidden, hidden]}.items():
        shapes |= {f"transformer.h.0.{name}.weight": shape, f"transformer.h.0.{name}.bias": shape[1:]}
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        shapes |= {f"transformer.{name}.weight": [hidden], f"transformer.{name}.bias": [hidden]}
    write_zeros(folder, config, shapes)


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

    def test_ranks_of_kimi(self):
        source, gguf, back, copy = (self.folder / name for name in ("kimi", "kimi.gguf", "kimi_back", "kimi_copy"))
        zero_model(source, layers=1, hidden=32, ffn=32, heads=1, kv_heads=1, head_dim=32, vocab=1156, tied=True)
        for file in (DATA / "tokenizer/kimi").iterdir():
            shutil.copy(file, source)
        (source / "tokenization_kimi.py").write_text("# read by transformers\n")
        self.done("convert", source, gguf)
        self.done("convert", gguf, back)
        self.done("convert", source, copy)
        for name in ("tiktoken.model", "tokenizer_config.json", "tokenization_kimi.py"):
            self.assertEqual((source / name).read_bytes(), (copy / name).read_bytes())
        text = "<|im_user|>\u4f60\u597d\u3001 HELLOworld's 2024<|tool_call_begin|>[EOS]\n"
        for path in (source, gguf, back, copy):
            tokenizer = json.loads(self.done("inspect", path, "--json").out)["tokenizer"]
            self.assertEqual(tokenizer["vocab_size"], 1156)
            self.assertEqual(tokenizer["bos"], {"id": 900, "text": "[BOS]"})
            ids = self.done("tokenizer", "encode", "-m", path, text).out
            self.assertEqual(ids, self.done("tokenizer", "encode", "-m", source, text).out)
            self.assertEqual(ids.split()[:1], ["903"])
            self.assertEqual(self.done("tokenizer", "decode", "-m", path, *ids.split()).out.rstrip("\n") + "\n",
                             "\u4f60\u597d\u3001 HELLOworld's 2024<|tool_call_begin|>\n")
        # Ranks that nothing says the pattern of are refused, and the model goes without them.
        (source / "tokenizer_config.json").unlink()
        self.refused(1, "tiktoken.model: 900 tiktoken ranks", "convert", source, self.folder / "none.gguf")
        self.done("convert", source, self.folder / "none.gguf", "--no-tokenizer")

    def test_there_and_back_is_exact(self):
        for model in ["llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "yarn", "linear", "gemma4",
                      "gemma4_equal", "gemma4_experts"]:
            with self.subTest(model):
                gguf, back = self.folder / f"{model}.gguf", self.folder / model
                self.done("convert", GOLDEN / model, gguf)
                self.done("convert", gguf, back)
                self.assertEqual(safetensors(GOLDEN / model / "model.safetensors"), safetensors(back / "model.safetensors"))
                configs = [json.loads(self.done("inspect", path, "--json").out)["config"] for path in (GOLDEN / model, back)]
                for config in configs:
                    config.pop("torch_dtype", None)
                self.assertEqual(*configs)

    def test_shapes_other_than_the_configs_are_refused(self):
        model = self.folder / "odd"
        zero_model(model, 1, 32, 48, 2, 1, 16, 64, False)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
        for to in ("out", "out.gguf"):
            self.refused(1, "'model.layers.0.mlp.gate_proj.weight' is [48, 32]; the model's config implies [40, 32]",
                         "convert", model, self.folder / to, "--no-tokenizer")

    # Norms of Gemma 3 are w in a directory and 1 + w in a GGUF file: the sum is what stays.
    def test_sums_stay(self):
        model, gguf, back, again = GOLDEN / "gemma3", self.folder / "a.gguf", self.folder / "gemma", self.folder / "b.gguf"
        self.done("convert", model, gguf)
        self.done("convert", gguf, back)
        self.done("convert", back, again)
        self.assertEqual(gguf.read_bytes()[-60000:], again.read_bytes()[-60000:])
        configs = [json.loads(self.done("inspect", path, "--json").out)["config"] for path in (model, back)]
        for config in configs:
            config.pop("torch_dtype", None)
        self.assertEqual(*configs)
        self.refused(1, "attention windows follow no pattern", "convert", GOLDEN / "gemma3_mixed", self.folder / "mixed.gguf")
        self.done("explain", model)
        self.done("bench", "--random", model, "--type", "q8_0", "-p", "8", "-n", "2", "-r", "1")

    # What rotates in full layers is a tensor of GGUF files, which stays there. Linear layers that are not quantized are
    # named: other programs would look for their scales.
    def test_inputs_of_layers(self):
        model, gguf, made, layers = GOLDEN / "gemma4", self.folder / "a.gguf", self.folder / "b.gguf", self.folder / "int8"
        self.done("convert", model, gguf)
        self.done("convert", gguf, made, "--type", "f16")
        config = lambda path: json.loads(self.done("inspect", path, "--json").out)["config"]["rope_parameters"]
        self.assertEqual(config(made), config(model))
        self.done("convert", model, layers, "--type", "int8")
        self.done("explain", layers)
        ignored = json.loads((layers / "config.json").read_text())["quantization_config"]["ignore"]
        for name in ("per_layer_model_projection", "layers.3.per_layer_input_gate", "layers.3.per_layer_projection"):
            self.assertIn(f"model.{name}", ignored)
        self.done("bench", "--random", model, "--type", "q8_0", "-p", "8", "-n", "2", "-r", "1")

    # Experts are a tensor each in a directory, and one for all in a GGUF file.
    def test_experts(self):
        model, gguf, back = GOLDEN / "qwen3_moe_all", self.folder / "moe.gguf", self.folder / "moe"
        self.done("convert", model, gguf)
        self.done("convert", gguf, back)
        self.assertEqual(safetensors(model / "model.safetensors"), safetensors(back / "model.safetensors"))
        # What the gguf package wrote has these values, rounded.
        made = self.folder / "made.gguf"
        self.done("convert", gguf, made, "--type", "q8_0")
        listed = lambda path: {t["name"]: (t["type"], t["shape"]) for t in
                               json.loads(self.done("inspect", path, "--tensors", "--json").out)["tensors"]}
        self.assertEqual(listed(made), listed(model / "model-q8_0.gguf"))
        self.refused(1, "norm_topk_prob", "convert", GOLDEN / "qwen3_moe", self.folder / "mixed.gguf")
        model, gguf, back = GOLDEN / "qwen2_moe", self.folder / "shared.gguf", self.folder / "shared"
        self.done("convert", model, gguf)
        self.done("convert", gguf, back)
        self.assertEqual(safetensors(model / "model.safetensors"), safetensors(back / "model.safetensors"))
        self.done("convert", gguf, made, "--type", "q8_0", "--force")
        self.assertEqual(listed(made), listed(model / "model-q8_0.gguf"))
        model = GOLDEN / "qwen3_moe_all"
        for kind in ("fp8", "int8"):
            layers = self.folder / kind
            self.done("convert", model, layers, "--type", kind)
            self.done("explain", layers)
            self.done("convert", layers, self.folder / f"{kind}.gguf")
        self.assertIn("8 in a layer, 2 for each token, ffn 20", self.done("inspect", GOLDEN / "qwen3_moe").out)
        text = self.done("explain", GOLDEN / "qwen3_moe").out
        for part in ("route (top_k=2 scoring=softmax renormalize=false", "expert_order (experts=8)", "cpu_expert_panels",
                     "[2*tokens, 20]"):
            self.assertIn(part, text)
        self.done("bench", "--random", GOLDEN / "qwen3_moe", "--type", "q8_0", "-p", "8", "-n", "2", "-r", "1")

    # kv_b_proj is one tensor in a directory, and two in a GGUF file, of which one is transposed head by head.
    def test_latents(self):
        for name, row, index_key in (("deepseek_v2", 20 + 8, 0), ("deepseek_v3", 16 + 6, 0),
                                     ("deepseek_v32", 16 + 6, 10)):
            model, gguf, back = GOLDEN / name, self.folder / f"{name}.gguf", self.folder / name
            self.done("convert", model, gguf)
            self.done("convert", gguf, back)
            self.assertEqual(safetensors(model / "model.safetensors"), safetensors(back / "model.safetensors"))
            # Two layers keep one row of f32 of a token, whatever the number of heads, and where they have an indexer its key.
            for memory in json.loads(self.done("inspect", model, "--json").out)["memory"]:
                self.assertEqual(memory["kv_cache_bytes"], memory["context"] * 2 * (row + index_key) * 4)
            text = self.done("explain", model).out
            for part in ("head_linear", "latent_append", f"latent rows of {row}"):
                self.assertIn(part, text)
            for part in ("select_keys (heads=16 head_dim=10 top_k=13", "the 13 keys that an indexer selects"):
                self.assertEqual(part in text, index_key > 0)
            self.done("bench", "--random", model, "-p", "8", "-n", "2", "-r", "1")

    def test_a_family_of_directories_alone(self):
        """What transformers keeps for experts without weights is not written."""
        model, out = GOLDEN / "longcat_flash", self.folder / "longcat"
        self.refused(1, "models of type longcat_flash are not written to GGUF files", "convert", model,
                     self.folder / "longcat.gguf")
        self.assertFalse((self.folder / "longcat.gguf").exists())
        self.done("convert", model, out)
        before, after = safetensors(model / "model.safetensors"), safetensors(out / "model.safetensors")
        for name in set(before) - set(after):
            self.assertRegex(name, r"\.mlp\.experts\.[567]\.(gate|up)_proj\.weight$")
        self.assertEqual(len(before) - len(after), 2 * 3 * 2)
        self.assertEqual({name: before[name] for name in after}, after)
        self.done("bench", "--random", out, "-p", "8", "-n", "2", "-r", "1")

    def test_longrope(self):
        """Both lists of factors are tensors of a GGUF file; beyond the original context, the longer one is chosen."""
        model, gguf, back = GOLDEN / "phi3", self.folder / "long.gguf", self.folder / "long"
        self.done("convert", model, gguf)
        self.done("convert", gguf, back)
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, back))
        for key in ("short_factor", "long_factor"):
            self.assertEqual(after["rope_scaling"][key], before["rope_parameters"][key])
        self.assertEqual(after["original_max_position_embeddings"], 80)
        self.done("explain", gguf, "--context", "128")
        for path in (model, gguf, back):
            self.refused(1, "--context is 129; the model's context is 128 tokens", "explain", path, "--context", "129")

    def test_text_parts(self):
        """Of a multimodal model, the text model alone is written, and what is left out is said."""
        source, gguf, text = GOLDEN / "mistral3_multimodal", self.folder / "text.gguf", self.folder / "text"
        said = "only the text part of this mistral3 model is read; left out: 36 tensors of multi_modal_projector, vision_tower"
        for out in (gguf, text):
            self.assertIn(said, self.done("convert", source, out).err)
            self.assertNotIn("text part", self.done("inspect", out).out)
        self.assertEqual(json.loads((text / "config.json").read_text())["model_type"], "mistral")
        prefix = "language_model."
        self.assertEqual(safetensors(text / "model.safetensors"),
                         {name.removeprefix(prefix): tensor for name, tensor in
                          safetensors(source / "model.safetensors").items() if name.startswith(prefix)})
        self.assertIn(said, self.done("inspect", source).out)
        self.assertIn(said, json.loads(self.done("inspect", source, "--json").out)["notice"])

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

    # Layers are those of the model, whatever they are called in files. Matrices that stay plain are named: other programs
    # would look for their scales.
    def test_layers_of_other_names(self):
        for name, plain in (("mixtral", "model.layers.0.block_sparse_moe.gate"), ("lfm2", "lm_head"),
                            ("gpt_neox", "embed_out"), ("deepseek_v4", "model.layers.0.ffn.gate")):
            with self.subTest(name):
                out = self.folder / name
                result = json.loads(self.done("convert", GOLDEN / name, out, "--type", "fp8", "--json").out)
                matrices = {t["name"]: t["type"] for t in result["tensors"] if t["name"].endswith(".weight") and
                            len(safetensors(GOLDEN / name / "model.safetensors")[t["name"]][1]) == 2}
                left = {key for key, encoding in matrices.items() if encoding != "fp8_e4m3_channel"}
                ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
                self.assertEqual({key for key in left if "embed_tokens" not in key and "embed_in" not in key},
                                 {f"{layer}.weight" for layer in ignored})
                self.assertTrue(plain in ignored or plain == "lm_head", ignored)
                for key in left:
                    self.assertRegex(key, r"embed|lm_head|head\.weight|gate\.weight|compressor|indexer|wo_a")
                self.done("explain", out)
        # The columns of a transposed matrix are outputs, and an importance matrix weighs inputs.
        out = self.folder / "gpt2"
        self.assertIn("no layer is stored in int8",
                      self.done("convert", GOLDEN / "gpt2", out, "--type", "int8").err)
        self.assertNotIn("quantization_config", json.loads((out / "config.json").read_text()))
        source, gguf, text = self.folder / "zeros", self.folder / "zeros.gguf", self.folder / "text.txt"
        shutil.copytree(STORIES, source, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json"))
        config = json.loads((source / "config.json").read_text())
        gpt2_model(source, 32, config["vocab_size"])
        text.write_text((STORIES / "greedy.txt").read_text())
        self.done("convert", source, gguf, "--type", "q8_0")
        self.done("convert", gguf, self.folder / "calibrated", "--type", "int8", "--calibrate", text)

    # Norms and biases of experts or groups are stored as rows. Other programs read them, and convolutions, in f32 only.
    def test_vectors_are_not_rounded(self):
        for name, parts in (("gpt_oss_mxfp4", ("ffn_gate_exps.bias", "ffn_down_exps.bias")), ("lfm2", ("shortconv.conv.weight",)),
                            ("granitemoehybrid", ("ssm_conv1d.weight", "ssm_norm.weight")),
                            ("nemotron_h_usual", ("ssm_conv1d.weight", "ssm_norm.weight"))):
            for kind in ("q8_0", "bf16"):
                with self.subTest(name, kind=kind):
                    out = self.folder / f"{name}-{kind}.gguf"
                    result = json.loads(self.done("convert", GOLDEN / name, out, "--type", kind, "--json").out)
                    types = {tensor["name"]: tensor["type"] for tensor in result["tensors"]}
                    for part in parts:
                        found = [encoding for key, encoding in types.items() if key.endswith(part)]
                        self.assertEqual(set(found), {"f32"}, part)
        out = self.folder / "gpt_oss"
        result = json.loads(self.done("convert", GOLDEN / "gpt_oss", out, "--type", "bf16", "--json").out)
        biases = [tensor for tensor in result["tensors"] if tensor["name"].endswith("bias")]
        self.assertTrue(biases)
        for tensor in biases:
            self.assertEqual((tensor["type"], tensor["largest_error"]), ("f32", 0), tensor)

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


if __name__ == "__main__":
    main()
