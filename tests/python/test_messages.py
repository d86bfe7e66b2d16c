# SPDX-License-Identifier: Apache-2.0
"""Error messages quote files: they are readable whatever bytes those hold, and cannot steer a terminal."""

import struct

import pytest

import eadem


def gguf(architecture):
    text = lambda string: struct.pack("<Q", len(string)) + string
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"general.architecture") + struct.pack("<I", 8) + text(architecture)


def test_bytes_of_a_file(tmp_path):
    path = tmp_path / "evil.gguf"
    path.write_bytes(gguf(b"caf\xe9 \x1b]0;owned\x07 \xc2\x9b2J"))
    with pytest.raises(eadem.Unsupported) as error:
        eadem.LLM(str(path))
    assert r"caf\xe9 \x1b]0;owned\x07 \u009b2J" in str(error.value)


def test_names_of_files(tmp_path):
    with pytest.raises(eadem.Error) as error:
        eadem.LLM(str(tmp_path / "evil\x1b[2J\x07"))
    assert r"evil\x1b[2J\x07" in str(error.value)
    assert "\x1b" not in str(error.value)
