#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of docs/models.md that says what each model type is tested against; with --update, writes it. Checks that
the table above it names the families of the code, their model types and GGUF architectures.

    models_table.py [ROOT] [--update]

Its rows are the model types of eadem/models/families. What stands in them comes from the tests' own lists: the goldens
of tests/engine/golden_families.h, which are compared in tests/models/families_test.cc as well, and those that
tests/engine/golden_test.cc names.
"""

import json
import re
import sys
from pathlib import Path

BEGIN, END = "<!-- made by tests/docs/models_table.py --update -->\n", "<!-- end -->\n"
EXACT, ROUNDED, FOLDED = "the same weights", "numbers rounded once", "multipliers folded into weights"


def families(root):
    """Family -> its model types, each with its GGUF architectures, in the order of files."""
    result = {}
    for file in sorted((root / "eadem/models/families").rglob("*.cc"), key=lambda file: file.name):
        text = file.read_text()
        types = result.setdefault(re.search(r'ModelFamily kFamily = \{\s*\.name = "(\w+)"', text)[1], {})
        for table in re.findall(r"constexpr ModelType k\w+\[\] = (.*?);", text, re.DOTALL):
            for row in re.findall(r"\{([^{}]*)\}", table):
                named = dict(re.findall(r'\.(\w+) = "([^"]*)"', row))
                plain = re.findall(r'"([^"]*)"', row)
                architecture = named.get("gguf_architecture", "") if named else plain[1]
                types.setdefault(named.get("name") or plain[0], []).extend([architecture] if architecture else [])
    return result


def model_types(root):
    """Model type -> its GGUF architectures, of every family in the order of files."""
    return {name: architectures for types in families(root).values() for name, architectures in types.items()}


def wrong_families(root, text):
    """What the table of families, which is written by hand, says otherwise than the code, or None."""
    names = lambda cell: {name.strip() for name in re.sub(r"\([^)]*\)|, with .*|–", "", cell).split(",") if name.strip()}
    rows = {family: (names(types), names(architectures))
            for family, types, architectures in re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", text, re.MULTILINE)}
    known = {family: (set(types), {name for architectures in types.values() for name in architectures})
             for family, types in families(root).items()}
    return next((f"docs/models.md: the row of {family} has {rows.get(family)}; the code has {known.get(family)}"
                 for family in sorted(known.keys() | rows.keys()) if rows.get(family) != known.get(family)), None)


def golden_rows(root):
    """Folder -> (whether a step of training is compared, what a GGUF file has of it)."""
    rows = {}
    table = (root / "tests/engine/golden_families.h").read_text().split("kGoldenFamilies[]", 1)[1]
    for folder, rest in re.findall(r'\{"(\w+)"((?:[^{}"]|"[^"]*")*)\}', table):
        refusal = re.search(r'"([^"]*)"', rest)
        gguf = f"refused: {refusal.group(1)}" if refusal else ROUNDED if "::rounded" in rest else \
            FOLDED if "::folded" in rest else EXACT
        rows[folder] = ("quantized" not in rest, gguf)
    lists = re.findall(r"testing::Values\((.*?)\)", (root / "tests/engine/golden_test.cc").read_text(), re.DOTALL)
    for folder in re.findall(r'"(\w+)"', " ".join(lists)):
        if folder in rows:
            continue
        rows[folder] = (list((root / "tests/data/golden" / folder).glob("train*.json")) != [], None)
    return rows


def type_of(root, folder):
    config = json.loads((root / "tests/data/golden" / folder / "config.json").read_text())
    return config["text_config"]["model_type"] if "text_config" in config else config["model_type"]


def table(root):
    rows = golden_rows(root)
    lines = ["| Model type | GGUF architecture | Logits and greedy tokens of | A step of training of | A GGUF file has |",
             "| --- | --- | --- | --- | --- |"]
    aliases = {"qwen3_vl_text": "qwen3"}
    goldens = {}
    for folder in rows:
        own = type_of(root, folder)
        goldens.setdefault(aliases.get(own, own), []).append(folder)
    for name, architectures in model_types(root).items():
        own = goldens.pop(name, [])
        join = lambda folders: ", ".join(f"`{folder}`" for folder in folders) or "–"
        gguf = dict.fromkeys(rows[folder][1] for folder in own if rows[folder][1])
        lines.append(f"| {name} | {', '.join(architectures) or '–'} | {join(own)} | {join(f for f in own if rows[f][0])} | "
                     f"{'; '.join(gguf) or ('as above' if own else '–')} |")
    assert not goldens, f"goldens of no model type: {goldens}"
    return "\n".join(lines) + "\n"


def problem(root, update=False):
    """What is wrong with the committed page, or None."""
    page = root / "docs/models.md"
    text = page.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    made = text[:begin] + "\n" + table(root) + "\n" + text[end:]
    if update:
        page.write_text(made, encoding="utf-8")
    elif wrong := wrong_families(root, text):
        return wrong
    elif made != text:
        return "docs/models.md is not what the tests' tables say; run tests/docs/models_table.py --update"
    return None


if __name__ == "__main__":
    folders = [argument for argument in sys.argv[1:] if argument != "--update"]
    wrong = problem(Path(folders[0]) if folders else Path(__file__).resolve().parents[2], "--update" in sys.argv)
    sys.exit(wrong)
