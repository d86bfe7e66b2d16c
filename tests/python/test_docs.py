# SPDX-License-Identifier: Apache-2.0
"""What docs/python.md shows runs, and what the stubs and docstrings promise is there."""
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN, ROOT

import eadem

PACKAGE = Path(eadem.__file__).parent


def test_examples_of_the_document_run(stories, long_model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for what the examples save
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 8
    names = {"text_model": stories, "model": str(GOLDEN / "llama"), "model_path": long_model}
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        exec(compile("\n" * line + block[1], "docs/python.md", "exec"), names)
    assert "model.layers.0" in capsys.readouterr().out


def test_installed_stub_is_what_the_extension_has(tmp_path):
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind is not installed")
    assert (PACKAGE / "py.typed").exists()
    made = tmp_path / "_eadem.pyi"
    # Without the package around it, as the build does.
    [extension] = PACKAGE.glob("_eadem.*.so")
    subprocess.run([sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "_eadem", "-i", str(extension.parent), "-o",
                    str(made)], check=True)
    assert made.read_text() == (PACKAGE / "_eadem.pyi").read_text()


def test_public_names_are_typed_and_documented():
    stub = (PACKAGE / "_eadem.pyi").read_text()
    for name in eadem.__all__:
        value = getattr(eadem, name)
        if name in ("__version__", "CacheConfig"):
            continue
        assert value.__doc__, name
        if getattr(value, "__module__", "") == "_eadem" or value.__module__ == "eadem._eadem":
            assert re.search(rf"^(class|def) {name}\b", stub, re.MULTILINE), name
            continue
        for member, function in inspect.getmembers(value, inspect.isfunction):
            if member.startswith("_") and member != "__init__":
                continue
            signature = inspect.signature(function)
            assert signature.return_annotation is not inspect.Signature.empty, f"{name}.{member}"
            for parameter in list(signature.parameters.values())[1:]:
                assert parameter.annotation is not inspect.Parameter.empty, f"{name}.{member}({parameter.name})"


def test_the_package_passes_a_type_checker(tmp_path):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    user = tmp_path / "user.py"
    user.write_text("""\
import numpy as np
import eadem

def draw(engine: eadem.InferEngine, input: eadem.InferEngine.Input) -> np.ndarray:
    output: eadem.InferEngine.Output = engine.forward(input, return_logits=True)
    return output.output_ids

def text(llm: eadem.LLM) -> str:
    try:
        return llm.generate("Once", eadem.SamplingParams(temperature=0.5, stop="."))[0].text
    except eadem.NotFound as error:
        return str(error)

wrong: int = eadem.LLM().generate("Once")[0].text
""", encoding="utf-8")
    # mypy checks a copy, because it does not report errors in an installed package.
    shutil.copytree(PACKAGE, tmp_path / "eadem", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for checked, wrong in (("eadem", []), ("user.py", ["user.py:14"])):
        run = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", "cache", checked], capture_output=True,
                             text=True, cwd=tmp_path)
        assert re.findall(r"^(\S+:\d+): error", run.stdout, re.MULTILINE) == wrong, run.stdout
        assert run.returncode == (1 if wrong else 0), run.stdout + run.stderr
