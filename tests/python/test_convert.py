# SPDX-License-Identifier: Apache-2.0
"""eadem.convert: what `eadem convert` does, with its options."""
import json
import logging

import numpy as np
import pytest
from conftest import BUNDLED, GOLDEN, load_safetensors

import eadem


def test_to_gguf_and_back_is_exact(tmp_path):
    tensors = eadem.convert(GOLDEN / "llama", tmp_path / "llama.gguf", tokenizer=False)
    assert {"token_embd.weight", "output.weight"} < {tensor["name"] for tensor in tensors}
    assert all(tensor["type"] == "f32" and tensor["largest_error"] == 0 for tensor in tensors)
    eadem.convert(tmp_path / "llama.gguf", tmp_path / "llama", tokenizer=False)
    before, after = (load_safetensors(folder / "model.safetensors") for folder in (GOLDEN / "llama", tmp_path / "llama"))
    assert sorted(before) == sorted(after)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_quantized_with_calibration(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. She had a red ball.\n" * 20)
    stages = set()
    tensors = eadem.convert(BUNDLED, tmp_path / "small.gguf", type="q4_k_m", calibrate=text, calibrate_tokens=256,
                            on_progress=lambda stage, done, total, name: stages.add(stage))
    assert {"calibrating", "converting"} <= stages
    quantized = [tensor for tensor in tensors if tensor["type"] in ("q4_k", "q6_k")]
    assert quantized and all(tensor["relative_error"] > 0 for tensor in quantized)
    assert any(tensor.get("relative_output_error", 0) > 0 for tensor in quantized)
    params = eadem.SamplingParams(temperature=0, max_tokens=8)
    assert eadem.LLM(tmp_path / "small.gguf").generate("Once upon a time", params)[0].token_ids


def test_what_is_left_out_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="eadem"):
        eadem.convert(GOLDEN / "gemma3_multimodal", tmp_path / "text", tokenizer=False)
    assert "only the text part of this gemma3 model is read" in caplog.text
    assert json.loads((tmp_path / "text/config.json").read_text())["model_type"] == "gemma3_text"


def test_refusals_leave_nothing(tmp_path):
    source, out = GOLDEN / "llama", tmp_path / "out.gguf"
    for words, arguments in {"'q9_z'": {"type": "q9_z"}, "for directories": {"type": "int8"},
                             "quantized types": {"calibrate": tmp_path / "text"},
                             "calibrate_tokens is 0": {"calibrate_tokens": 0}}.items():
        with pytest.raises(eadem.InvalidArgument, match=words):
            eadem.convert(source, out, **arguments)
    with pytest.raises(eadem.InvalidArgument, match="not written"):
        eadem.convert(source, tmp_path / "out.bin")

    def stop(*_):
        raise KeyError("enough")

    with pytest.raises(KeyError):
        eadem.convert(source, out, tokenizer=False, on_progress=stop)
    assert list(tmp_path.iterdir()) == []
    out.write_text("mine")
    with pytest.raises(eadem.InvalidArgument, match="exists"):
        eadem.convert(source, out)
    assert out.read_text() == "mine"
    eadem.convert(source, out, tokenizer=False, force=True)
