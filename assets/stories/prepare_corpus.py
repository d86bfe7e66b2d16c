#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the training texts of the bundled model from the TinyStories subsets.

    prepare_corpus.py CORPORA_DIRECTORY OUTPUT_DIRECTORY

Reads tinystories/*.txt below CORPORA_DIRECTORY and writes train.txt and eval.txt: one story per document, documents
separated by <|endoftext|>. The files mark the borders of stories in three different ways; here they are made one. Stories
that occur twice are kept once; stories of the held-out file are never trained on. Typographic quotes and dashes become
ASCII, so that the vocabulary is not spent on them.
"""

import pathlib
import re
import sys

SEPARATOR = "<|endoftext|>"
ASCII = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-",
                       "\u2026": "...", "\u00a0": " ", "\u200b": ""})
OPENINGS = ("Once upon a time", "One day", "Once there was", "Once, ", "There once was", "A long time ago", "There was once",
            "In a ", "On a ")


def tidy(story):
    story = story.translate(ASCII).replace("\r", "")
    lines = [re.sub(r"[ \t]+", " ", line).strip() for line in story.split("\n")]
    return "\n".join(line for line in lines if line)


def split_marked(text):
    """Stories between markers."""
    return text.split(SEPARATOR)


def split_paragraphs(text):
    """Paragraphs of a story stand apart by a blank line; a new story begins right on the next line."""
    return re.split(r"(?<!\n)\n(?!\n)", text)


def split_openings(text):
    """Every paragraph stands apart; a new story is where one begins as stories do. The first, cut off, is dropped."""
    stories = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith(OPENINGS[0]) or not stories:
            stories.append(paragraph)
        else:
            stories[-1] += "\n" + paragraph
    return stories[1:]


def usable(story):
    words = story.split()
    return 40 <= len(words) <= 1000 and story.isascii() and story[-1] in '.!?"' and story[0].isupper()


def main():
    corpora, output = map(pathlib.Path, sys.argv[1:3])
    folder = corpora / "tinystories"
    read = lambda name: (folder / name).read_text(encoding="utf-8", errors="replace")
    held_out = [tidy(s) for s in split_openings(read("tinystories_val.moe-routing-bench.txt"))]
    training = [tidy(s) for s in split_marked(read("tinystories_10k.txt")) + split_marked(read("tinystories.MoRE.txt"))
                + split_paragraphs(read("tiny_stories.smallGPT.txt"))]
    # A story is told apart by its words alone: the files break its lines differently.
    key = lambda story: re.sub(r"\W+", " ", story.lower()).strip()[:200]
    seen = set()

    def unique(stories):
        for story in stories:
            if usable(story) and key(story) not in seen:
                seen.add(key(story))
                yield story

    held_out = list(unique(held_out))
    # A quarter of the held-out file is enough to measure on; the rest joins the training texts.
    evaluation, more = held_out[: len(held_out) // 4], held_out[len(held_out) // 4:]
    for name, stories in (("eval.txt", evaluation), ("train.txt", list(unique(training)) + more)):
        (output / name).write_text(f"\n{SEPARATOR}\n".join(stories) + "\n", encoding="utf-8")
        print(f"{name}: {len(stories)} stories, {sum(map(len, stories))} characters")


if __name__ == "__main__":
    main()
