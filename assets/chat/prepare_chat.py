#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the conversations and the tokenizer that the bundled chat model is tuned on.

    prepare_chat.py STORIES_DIRECTORY OUTPUT_DIRECTORY

Reads train.txt and eval.txt, which assets/stories/prepare_corpus.py wrote into STORIES_DIRECTORY, and writes train.jsonl
and eval.jsonl: somebody asks for a story, gets one of the corpus, and asks about it. Requests, questions and answers
follow from what patterns find in the story (names, animals, things, places, feelings); a question whose answer no
pattern finds is not asked. Also writes tokenizer/, the bundled model's tokenizer in which the last two pieces, which no
other piece is made of, have made room for <|user|> and <|assistant|>, and the chat template. A turn of the assistant
ends with <|endoftext|>.
"""

import collections
import json
import pathlib
import random
import re
import shutil
import sys

STORIES = pathlib.Path(__file__).resolve().parents[1] / "stories"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|endoftext|>"
LONGEST_STORY = 160  # words; the context of 512 tokens must hold the questions, too
VARIANTS = 3  # conversations about one story
MOST_EVALUATED = 120  # conversations that are enough to measure on

BEINGS = """girl boy dog cat bird rabbit bunny bear mouse fish frog duck fox lion elephant monkey turtle squirrel horse
cow pig puppy kitten man woman bee butterfly dragon owl wolf giraffe tiger sheep goat hen chicken ant spider snake
princess prince king queen fairy robot""".split()
THINGS = """ball car doll toy book tree flower cake kite boat train truck bike hat apple cookie rock stick box balloon
puzzle blanket drum key shell star moon rainbow bed bowl picture pencil shoe coat umbrella bell bucket ladder carrot
banana pie egg swing slide""".split()
PLACES = """park garden forest beach store shop house kitchen school yard backyard woods farm zoo lake river pond sea
ocean field playground sky cave castle library hill mountain street room barn jungle""".split()
FEELINGS = "happy sad scared excited angry proud tired hungry curious surprised lonely worried brave".split()
NO_NAMES = set("""The One Once They He She It But And Then Mom Mommy Mum Dad Daddy When There His Her Every Suddenly
After At In So You Yes No We What Now As Let From Do Can This That Why Where How Who My Your Their If On To For All
Look Wow Thank Please Hello Hi Oh Maybe First Next Finally Soon Later Everyone Grandma Grandpa Mama Papa Just Not
Inside Outside Mr Mrs Miss Big Tiny True Dependable University Red Blue Circle Will Rude Skip Don Stop Come Help Sorry
God Jesus Santa English Christmas Halloween Monday Sunday Saturday TV""".split())


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def names_of(stories):
    """{name: pronoun}, of the names that stories introduce or use often."""
    introduced, used = collections.Counter(), collections.Counter()
    pronouns = collections.defaultdict(collections.Counter)
    for story in stories:
        introduced.update(set(re.findall(r"\b(?:named|called) ([A-Z][a-z]{1,9})\b", story)))
        used.update(set(re.findall(r"(?:and|said|asked|,) ([A-Z][a-z]{1,9})\b", story)))
        first = re.search(r"\b(?:named|called) ([A-Z][a-z]{1,9})\b", story)
        if first:
            pronouns[first[1]].update(re.findall(r"\b(he|she)\b", story.lower()))
    names = {name for name in introduced | used if introduced[name] or used[name] >= 8} - NO_NAMES
    return {name: max(("he", "she"), key=lambda pronoun: pronouns[name][pronoun]) for name in sorted(names)}


def renamed(story, facts, names, draw):
    """The story with another name for the one whom it is about, so that names are read and not guessed."""
    if not facts.names:
        return story
    old = facts.names[0]
    new = draw.choice([name for name, pronoun in names.items() if pronoun == names[old] and name not in story])
    return re.sub(rf"\b{old}\b", new, story)


class Facts:
    """What the patterns find in a story."""

    def __init__(self, story, known_names):
        self.story = story
        words = re.findall(r"[A-Za-z]+", story)
        counts = collections.Counter(words)
        self.names = [word for word in dict.fromkeys(words) if word in known_names and counts[word] >= 2][:3]
        lower = collections.Counter(word.lower() for word in words)
        self.beings = [word for word in BEINGS if lower[word] >= 2]
        self.things = [word for word in THINGS if lower[word] >= 2]
        self.mentioned = set(lower)
        place = re.search(r"\b(?:to|in|at|into) the (?:big |little |nearby |local )?(%s)\b" % "|".join(PLACES), story)
        self.place = place and place[1]
        self.kind = {}  # name: being
        for name in self.names:
            found = re.search(r"\b(%s) (?:named|called) %s\b" % ("|".join(BEINGS), name), story)
            found = found or re.search(r"\b%s was an? (?:\w+ ){0,2}(%s)\b" % (name, "|".join(BEINGS)), story)
            if found:
                self.kind[name] = found[1]
        self.feelings = collections.defaultdict(list)  # name: feelings, in order
        for name in self.names:
            felt = r"\b%s (?:was|felt) (?:very |so |really )?(%s)\b" % (name, "|".join(FEELINGS))
            for found in re.finditer(felt, story):
                self.feelings[name].append(found[1])


def request(facts, draw):
    """What somebody asks for who gets this story, from the particular to the general."""
    abouts = []
    for name in facts.names[:2]:
        if name in facts.kind:
            abouts += [f"{article(facts.kind[name])} named {name}", f"{article(facts.kind[name])} called {name}"] * 2
        else:
            abouts.append(name)
    if len(facts.names) >= 2:
        abouts.append(f"{facts.names[0]} and {facts.names[1]}")
    abouts += [article(word) for word in facts.beings[:2] + facts.things[:2]]
    if facts.beings and facts.things:
        abouts.append(f"{article(facts.beings[0])} and {article(facts.things[0])}")
    if not abouts or draw.random() < 0.08:
        return draw.choice(["Tell me a story.", "Tell me a story, please.", "Can you tell me a story?",
                            "I want to hear a story."])
    form = draw.choice(["Tell me a story about {}.", "Tell me a story about {}.", "Tell me a story about {}",
                          "Please tell me a story about {}.", "Can you tell me a story about {}?",
                          "I want a story about {}.", "A story about {}, please."])
    return form.format(draw.choice(abouts))


def questions(facts, names, draw):
    """Questions about the story, each with its answer."""
    found = []
    if facts.names:
        first = facts.names[0]
        everyone = " and ".join(facts.names[:2])
        found.append((draw.choice(["Who was in the story?", "Who is the story about?", "Who was it about?"]),
                      f"The story was about {everyone}."))
        other = draw.choice([name for name in names if name not in facts.mentioned and name not in facts.names
                               and name.lower() not in facts.mentioned])
        name = draw.choice(facts.names)
        found.append(draw.choice([(f"Was there somebody named {name}?", f"Yes, {name} was in the story."),
                                    (f"Was there somebody named {other}?", f"No, there was no {other} in the story.")]))
        if first in facts.kind:
            kind = facts.kind[first]
            found.append((f"What was the name of the {kind}?", f"The {kind} was named {first}."))
            found.append((f"Who was {first}?", f"{first} was {article(kind)}."))
        for name, feelings in list(facts.feelings.items())[:1]:
            found.append((f"How did {name} feel?", f"{name} was {feelings[-1]}."))
            unfelt = draw.choice([feeling for feeling in FEELINGS[:6] if feeling not in feelings])
            found.append(draw.choice([(f"Was {name} {feelings[0]}?", f"Yes, {name} was {feelings[0]}."),
                                        (f"Was {name} {unfelt}?", f"No, {name} was {feelings[-1]}.")]))
    absent = draw.choice([being for being in BEINGS if being not in facts.mentioned])
    if facts.beings and draw.random() < 0.5:
        being = article(facts.beings[0])
        found.append((f"Was there {being} in the story?", f"Yes, there was {being}."))
    else:
        found.append((f"Was there {article(absent)} in the story?", f"No, there was no {absent} in the story."))
    if facts.place:
        found.append((draw.choice(["Where were they?", "Where did they go?", "Where did they play?", "Where was it?"]),
                      f"They were in the {facts.place}." if facts.place not in ("beach", "lake", "pond", "sea", "zoo")
                      else f"They were at the {facts.place}."))
    draw.shuffle(found)
    return found[:draw.choice([3, 4, 5])]


SMALL_TALK = [
    (["Hello!", "Hello", "Hi!", "Hi", "Hi there!", "Good morning!", "Hey"],
     "Hello! What should I tell you a story about?"),
    (["How are you?", "How do you do?"], "I am fine, thank you! Do you want to hear a story?"),
    (["Who are you?", "What are you?", "What is your name?"],
     "I am a very small model. I only know how to tell stories."),
    (["What can you do?", "Can you help me?", "What do you know?"],
     "I can tell you a short story and answer simple questions about it."),
    (["What is the capital of France?", "What is two plus two?", "How is the weather today?", "Write a program.",
      "Who is the president?", "What time is it?", "How far away is the moon?", "Translate this, please.",
      "What is the meaning of life?", "How do I cook rice?", "What is 3 times 4?", "When did the war end?"],
     "I do not know that. I only know how to tell stories."),
]
THANKS = [(["Thank you!", "Thanks!", "That was nice.", "I like that story."],
           "You are welcome! Do you want another story?"),
          (["Bye!", "Goodbye!", "Good night!", "Bye"], "Goodbye!")]


def small_talk(turns, draw):
    asked, answer = draw.choice(turns)
    return draw.choice(asked), answer


def conversation(turns):
    """Each turn of the assistant ends with <|endoftext|>; training puts the last one."""
    return END.join(f"{USER}{asked}{ASSISTANT}{answer}" for asked, answer in turns)


def conversations(stories, names, draw):
    for original in stories:
        for variant in range(VARIANTS):
            story = original if variant == 0 else renamed(original, Facts(original, names), names, draw)
            facts = Facts(story, names)
            turns = [small_talk(SMALL_TALK, draw)] if draw.random() < 0.15 else []
            turns.append((request(facts, draw), story))
            turns += questions(facts, list(names), draw)
            if draw.random() < 0.1:
                turns.append(small_talk(THANKS, draw))
            yield conversation(turns)
        if draw.random() < 0.3:
            yield conversation([small_talk(SMALL_TALK, draw) for _ in range(draw.choice([1, 2, 3]))])


def read_stories(path):
    for story in path.read_text(encoding="utf-8").split(END):
        story = " ".join(story.split())
        if len(story.split()) <= LONGEST_STORY:
            yield story


def write_tokenizer(folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(STORIES / "tokenizer_config.json", folder / "tokenizer_config.json")
    shutil.copyfile(pathlib.Path(__file__).parent / "chat_template.jinja", folder / "chat_template.jinja")
    tokenizer = json.loads((STORIES / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    size = len(model["vocab"])
    for token in (ASSISTANT, USER):
        size -= 1
        [piece] = [piece for piece, number in model["vocab"].items() if number == size]
        last = model["merges"].pop()
        assert "".join(last if isinstance(last, list) else last.split(" ")) == piece
        del model["vocab"][piece]
        model["vocab"][token] = size
        tokenizer["added_tokens"].insert(2, {**tokenizer["added_tokens"][0], "id": size, "content": token})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1), encoding="utf-8")


def main():
    source, output = map(pathlib.Path, sys.argv[1:3])
    output.mkdir(parents=True, exist_ok=True)
    stories = {name: list(read_stories(source / f"{name}.txt")) for name in ("train", "eval")}
    names = names_of(stories["train"])
    for name, texts in stories.items():
        lines = list(conversations(texts, names, random.Random(f"{name} 1")))
        if name == "eval":
            del lines[MOST_EVALUATED:]
        with open(output / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": line}) + "\n" for line in lines)
        print(f"{name}.jsonl: {len(texts)} stories, {len(lines)} conversations, {sum(map(len, lines))} characters")
    print(f"{len(names)} names")
    write_tokenizer(output / "tokenizer")


if __name__ == "__main__":
    main()
