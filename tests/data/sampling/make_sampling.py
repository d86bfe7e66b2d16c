# SPDX-License-Identifier: Apache-2.0
"""Writes sampling.json beside this script: what transformers generates with the model tests/data/golden/llama, and what
its filters keep. Run it with transformers and torch: python3 tests/data/sampling/make_sampling.py"""

import json
import pathlib

import torch
import transformers
from transformers import TypicalLogitsWarper

HERE = pathlib.Path(__file__).parent
MODEL = HERE.parent / "golden" / "llama"
NEW_TOKENS = 16


def prompt_of(length: int, vocab: int, seed: int) -> list[int]:
    """tokens_of of tests/engine/engine_helpers.h."""
    return [(7919 * i + 104729 * seed + 13) % vocab for i in range(length)]


def typical() -> list[dict]:
    """The tokens that TypicalLogitsWarper keeps of rows of logits, which no two equal distances stand in."""
    generator = torch.Generator().manual_seed(1)
    cases = []
    for vocab in (5, 12):
        for mass in (0.05, 0.3, 0.6, 0.9, 0.99):
            logits = torch.randn(1, vocab, generator=generator) * 1.2
            kept = torch.isfinite(TypicalLogitsWarper(mass)(None, logits.clone()))[0]
            cases.append({"logits": logits[0].tolist(), "typical_p": mass, "kept": kept.nonzero()[:, 0].tolist()})
    return cases


def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    vocab = model.config.vocab_size

    def generated(prompt: list[int], **options) -> list[list[int]]:
        config = transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, **options)
        texts = [row[len(prompt):] for row in model.generate(torch.tensor([prompt]), generation_config=config).tolist()]
        ends = options.get("eos_token_id") or []  # which padding follows
        return [text[:next((i + 1 for i, token in enumerate(text) if token in ends), None)] for text in texts]

    prompts = [prompt_of(5 + 6 * i, vocab, i) for i in range(3)]
    bad_words = []
    for prompt in prompts:
        plain = generated(prompt)[0]
        # A token, two and three tokens of the text, and two across its beginning.
        words = [[plain[3]], plain[1:3], plain[4:7], [prompt[-1], plain[0]]]
        for some in (words[:1], words[:2], words[1:]):
            tokens = generated(prompt, bad_words_ids=some)[0]
            bad_words.append({"prompt": prompt, "words": some, "plain": plain, "tokens": tokens})
    scores = []
    for prompt in prompts:
        logits = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        top = logits.topk(5)
        scores.append({"prompt": prompt,
                       "logprobs": [logits[i, token].item() for i, token in enumerate(prompt[1:])],
                       "top_tokens": top.indices.tolist(), "top_logprobs": top.values.tolist()})
    beams = []
    for prompt in prompts:
        for options in ({"num_beams": 2}, {"num_beams": 4, "num_return_sequences": 3},
                        {"num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 3, "early_stopping": True},
                        {"num_beams": 3, "length_penalty": -1.0, "early_stopping": "never"}):
            # Frequent tokens end a text, so that beams of several lengths compete.
            ends = sorted({*generated(prompt, num_beams=4)[0][2::5]})
            for eos in ([], ends):
                ids = generated(prompt, **options, eos_token_id=eos or None)
                beams.append({"prompt": prompt, "options": options, "eos": eos, "tokens": ids})
    result = {"typical": typical(), "bad_words": bad_words, "scores": scores, "beams": beams}
    lines = [f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(each) for each in cases) + "\n]"
             for key, cases in result.items()]
    (HERE / "sampling.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
