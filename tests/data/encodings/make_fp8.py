# SPDX-License-Identifier: Apache-2.0
"""Makes fp8.f32 for tests/core/group_encodings_test.cc with PyTorch, which knows nothing of Eadem.

    pip install torch numpy
    python tests/data/encodings/make_fp8.py     writes fp8.f32 beside this script

The value of each code of e4m3fn, of each code of e5m2; then 1024 values, and what each becomes when it is rounded to
e4m3fn, and to e5m2. Values are of all magnitudes that both hold, half of them exactly between two codes.
"""
import pathlib

import torch

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]


def main():
    torch.manual_seed(5)
    codes = torch.arange(256, dtype=torch.uint8)
    tables = [codes.view(kind).to(torch.float32) for kind in KINDS]
    values = torch.randn(512).sign() * torch.exp2(torch.rand(512) * 28 - 20)
    ties = []
    for table in tables:
        finite = table[:127][table[:127].isfinite()]
        ties.append((finite[1:] + finite[:-1])[torch.randint(len(finite) - 1, (256,))] / 2)
    values = torch.cat([values] + ties)
    values = values.where(values.abs() < 440, values / 256)
    parts = tables + [values] + [values.to(kind).to(torch.float32) for kind in KINDS]
    data = torch.cat(parts).numpy().astype("<f4").tobytes()
    (pathlib.Path(__file__).parent / "fp8.f32").write_bytes(data)


if __name__ == "__main__":
    main()
