# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/data/golden"
BUNDLED = ROOT / "assets/stories"
STORIES = ROOT / "tests/data/stories260K/stories260K.gguf"


def load_safetensors(path):
    """Plain reader, so that nothing under test reads what is compared with."""
    data = Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    dtypes = {"F32": "<f4", "I32": "<i4", "I64": "<i8", "F64": "<f8"}
    result = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            raw = data[8 + size + begin:8 + size + end]
            result[name] = np.frombuffer(raw, dtypes[entry["dtype"]]).reshape(entry["shape"]).copy()
    return result


@pytest.fixture(scope="session")
def long_model(tmp_path_factory):
    """Path of a small model with a context of 4096 tokens."""
    folder = tmp_path_factory.mktemp("long_model")
    config = json.loads((GOLDEN / "llama/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    shutil.copy(GOLDEN / "llama/model.safetensors", folder)
    return str(folder)


@pytest.fixture(scope="session")
def stories():
    """Path of a small model with a tokenizer."""
    return str(STORIES)
