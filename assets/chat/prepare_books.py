#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the training texts of the chat model's base from children's books of the 19th century.

    prepare_books.py CORPORA_DIRECTORY OUTPUT_DIRECTORY

Reads chilit.tar.zst below CORPORA_DIRECTORY (71 books) and writes books.txt: passages of 2,000 to 3,000 characters, made
of whole paragraphs, one passage per document, documents separated by <|endoftext|>. A paragraph becomes one line.
Typographic characters become ASCII, as in assets/stories/prepare_corpus.py; a paragraph with other characters is left
out, and so is what is not prose: headings, verses, tables.
"""

import pathlib
import re
import subprocess
import sys

SEPARATOR = "<|endoftext|>"
ASCII = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": " - ",
                       "\u2026": "...", "\u00a0": " ", "\u200b": "", "_": "", "\u00e6": "ae", "\u00e9": "e", "\ufeff": ""})
PASSAGE = 2000


def paragraphs_of(book):
    for block in re.split(r"\n\s*\n", book.replace("\r", "").translate(ASCII)):
        text = re.sub(r"\s+", " ", block.replace("--", " - ")).strip()
        letters = sum(character.islower() for character in text)
        if len(text) >= 30 and text.isascii() and text[-1] in ".!?\"'" and letters > 0.6 * len(text):
            yield text


def passages_of(book):
    passage = ""
    for paragraph in paragraphs_of(book):
        if len(paragraph) > 2 * PASSAGE:
            continue
        passage += paragraph + "\n"
        if len(passage) >= PASSAGE:
            yield passage.strip()
            passage = ""


def main():
    corpora, output = map(pathlib.Path, sys.argv[1:3])
    subprocess.run(["tar", "--zstd", "-xf", corpora / "chilit.tar.zst", "-C", output], check=True)
    passages = [passage for path in sorted((output / "chilit").glob("**/*.txt"))
                for passage in passages_of(path.read_text(encoding="utf-8", errors="replace"))]
    (output / "books.txt").write_text(f"\n{SEPARATOR}\n".join(passages) + "\n", encoding="utf-8")
    print(f"books.txt: {len(passages)} passages, {sum(map(len, passages))} characters")


if __name__ == "__main__":
    main()
