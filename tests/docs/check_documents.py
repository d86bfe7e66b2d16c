#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the documents agree with the tree: README.md, CONTRIBUTING.md and docs/**/*.md.

    check_documents.py [ROOT]

  * A link to a file of this repository leads to one, and what follows `#` is a heading of it.
  * A code block below the line `<!-- file: PATH -->` stands in that file, line by line and in one piece, so that what
    a document shows is what CI compiles and tests.
  * The table of docs/models.md is the one that models_table.py makes of the tests' lists.

Prints `file:line: what is wrong` and exits 1 if anything is.
"""

import re
import sys
from pathlib import Path

import models_table

LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
BLOCK = re.compile(r"^<!-- file: (\S+) -->\n+```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"^<!-- file:", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(FENCED.pattern + r"|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def anchors(document):
    """What a link can name after `#`, made of each heading as GitHub makes it."""
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", title).lower()).replace(" ", "-") for title in HEADING.findall(text)}


def wrong_in(root, document):
    text = document.read_text(encoding="utf-8")
    prose = CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in LINK.finditer(prose):
        target = document.parent / match[1] if match[1] else document
        if not target.exists():
            yield line_of(text, match.start()), f"the link to {match[1]} leads nowhere"
        elif match[2] and target.suffix == ".md" and match[2] not in anchors(target):
            yield line_of(text, match.start()), f"{target.name} has no heading for #{match[2]}"
    blocks = list(BLOCK.finditer(text))
    if len(blocks) != len(MARKER.findall(text)):
        yield 1, "a `<!-- file: PATH -->` line without a code block below it"
    for match in blocks:
        line, source = line_of(text, match.start()), root / match[1]
        if not source.is_file():
            yield line, f"shows {match[1]}, which does not exist"
        elif "\n" + match[2] not in "\n" + source.read_text(encoding="utf-8"):
            yield line, f"the code block is not (any more) what stands in {match[1]}"


def main(arguments):
    root = Path(arguments[0] if arguments else Path(__file__).resolve().parents[2])
    documents = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    wrong = [f"{document.relative_to(root)}:{line}: {text}"
             for document in documents if document.is_file() for line, text in wrong_in(root, document)]
    if models_page := models_table.problem(root) if (root / "docs/models.md").is_file() else None:
        wrong.append(models_page)
    print("\n".join(wrong) if wrong else f"documents: {sum(d.is_file() for d in documents)} read, nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
