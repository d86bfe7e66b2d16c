#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`eadem chat` on a terminal and on pipes, and `eadem run --chat`.

    chat_test.py PROGRAM SOURCE_DIR [UNITTEST ARGUMENTS]
"""

import json
import re

from chat_model import SPECIAL, TEMPLATE, write_chat_model
from program import GGUF_STORIES, STORIES, ProgramTest, Terminal, eadem, main
from terminal_test import EVIL, EVIL_SHOWN, steering

DIM, PLAIN = b"\x1b[2m", b"\x1b[0m"


def tokens_of(*parts):
    """The tokens of a prompt: special ones count one, other text its bytes."""
    return sum(1 if part in SPECIAL or part in ("Hello", " there") else len(part.encode()) for part in parts)


class ChatTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = write_chat_model(self.folder / "model")

    def chat(self, lines, *options, model=None):
        """The answers to lines on a pipe, and what was said beside them."""
        result = eadem("chat", model or self.model, *options, stdin="".join(line + "\n" for line in lines).encode())
        self.assertEqual(result.code, 0, result.err)
        return result

    def messages(self, lines, *options):
        """The conversation after these lines, as /save writes it."""
        file = self.folder / "saved.json"
        file.unlink(missing_ok=True)
        self.chat([*lines, f"/save {file}"], *options)
        return json.loads(file.read_text())["messages"]


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


HELLO = {"role": "assistant", "content": "Hello there"}


class Pipes(ChatTest):
    def test_each_line_is_a_turn_that_reads_what_is_new(self):
        result = self.chat(["hi", "and you?"])
        self.assertEqual(result.out, "Hello there\nHello there\n")
        read = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+) tokens read and (\d+) from the cache", result.err)]
        first = tokens_of("<|bos|>", "<|user|>", "hi", "<|end|>", "<|assistant|>")
        # The answer's two tokens are cached, its end is not.
        second = tokens_of("<|end|>", "<|user|>", "and you?", "<|end|>", "<|assistant|>")
        self.assertEqual(read, [(first, 0), (second, first + 2)])

    def test_messages(self):
        self.assertEqual(self.messages(["hi"]), [user("hi"), HELLO])
        self.assertEqual(self.messages(["hi"], "--system", "Be kind."), [system("Be kind."), user("hi"), HELLO])
        self.assertEqual(self.messages([]), [])

    def test_reasoning_is_kept_apart(self):
        answer = {"role": "assistant", "content": "Yes", "reasoning_content": "well"}
        for question in ["why", "how"]:  # the model begins it, or the template
            with self.subTest(question):
                self.assertEqual(self.messages([question]), [user(question), answer])
                result = self.chat([question])
                self.assertEqual(result.out, "Yes\n")
                self.assertIn("well\n\n", result.err)
        # The template says whether it is sent back: it takes five tokens more, "well/".
        counts = [re.findall(r"context (\d+) of", self.chat(["why", "hi", "/stats"], *option).err)[-1]
                  for option in ([], ["--template-arg", "show_reasoning=true"])]
        self.assertEqual(int(counts[1]) - int(counts[0]), 5)

    def test_lines_that_belong_together(self):
        self.assertEqual(self.messages(['"""a', "b", '', 'c"""', "d\\", "e\\", "f", '"""one"""', "//x"]), [
            message for text in ["a\nb\n\nc", "d\ne\nf", "one", "/x"] for message in (user(text), HELLO)])
        result = self.chat(["hi", '"""never', "closed"])
        self.assertEqual(result.out, "Hello there\n")
        self.assertIn("the last input has no end", result.err)
        self.assertEqual(self.messages(['"""', "/bye", '"""']), [user("\n/bye\n"), HELLO])

    def test_undo_retry_clear(self):
        self.assertEqual(self.messages(["a", "b", "/undo"]), [user("a"), HELLO])
        self.assertEqual(self.messages(["a", "/undo", "c"]), [user("c"), HELLO])
        self.assertEqual(self.messages(["a", "/retry"]), [user("a"), HELLO])
        self.assertEqual(self.chat(["a", "/retry"]).out, "Hello there\n" * 2)
        self.assertEqual(self.messages(["a", "/clear"], "--system", "S"), [system("S")])
        self.assertEqual(self.messages(["a", "/clear", "b"]), [user("b"), HELLO])
        for command, words in [("/undo", "no message to take back"), ("/retry", "no message to answer again")]:
            self.assertIn(words, self.chat([command]).err)
        # A question that is asked again is in the cache; only its last token is computed.
        self.assertIn("[1 tokens read and 4 from the cache", self.chat(["a", "/retry"]).err)

    def test_system(self):
        self.assertEqual(self.messages(["a", "/system Be brief."]), [system("Be brief."), user("a"), HELLO])
        self.assertEqual(self.messages(["/system A", "/system B"]), [system("B")])
        self.assertEqual(self.messages(['/system ""', "a"], "--system", "A"), [user("a"), HELLO])
        self.assertIn("(no system message)", self.chat(["/system"]).err)
        self.assertIn("Be brief.", self.chat(["/system Be brief.", "/system"]).err)
        # A template that knows no system message says so, and the conversation stays as it was.
        strict = write_chat_model(self.folder / "strict", template=TEMPLATE.replace("'system', ", ""))
        result = self.chat(["a", "/system A", "b"], model=strict)
        self.assertIn("no role system", result.err)
        self.assertEqual(result.out, "Hello there\n" * 2)
        self.refused(1, "no role system", "chat", strict, "--system", "A")

    def test_set(self):
        result = self.chat(["/set temperature 0.5", "/set top-k 7", "/set", "/set presence_penalty -1", "/set seed 9"])
        self.assertIn("temperature 0.5, top_k 7, top_p 1", result.err)
        self.assertIn("presence_penalty -1", result.err)
        self.assertIn("seed 9", result.err)
        for setting, words in [("temperature -1", "temperature is -1; expected 0 (greedy) to 1e6"),
                               ("temperature hot", "temperature is 'hot'; expected a number"),
                               ("temperature", "temperature needs a value"), ("top_p 2", "top_p is 2"),
                               ("temperatur3 1", "did you mean 'temperature'"), ("help", "/set temperature 0.7"),
                               ("--temperature 1", "/set temperature 0.7"), ("max_tokens 0", "max_tokens is 0")]:
            result = self.chat([f"/set {setting}", "hi"], "--quiet")
            self.assertIn(words, result.err)
            self.assertEqual(result.out, "Hello there\n")
        result = self.chat(["/set max_tokens 1", "hi", "/set max_tokens -1", "hi", "/set stop ere", "hi"])
        self.assertEqual(result.out, "Hello\nHello there\nHello th\n")
        self.assertIn("the answer was cut: --max-tokens 1", result.err)

    def test_a_conversation_has_one_answer(self):
        model = write_chat_model(self.folder / "several")
        (model / "generation_config.json").write_text('{"num_return_sequences": 3}')
        self.assertEqual(self.chat(["hi", "/retry"], model=model).out, "Hello there\n" * 2)
        self.assertEqual(self.done("run", model, "--chat", "-p", "hi", "--quiet").out, "Hello there\n")
        scored = json.loads(self.done("run", model, "--chat", "-p", "hi", "--json", "--prompt-logprobs", "0").out)
        self.assertEqual((len(scored["prompt_logprobs"]), scored["text"]), (scored["prompt_tokens"], "Hello there"))
        result = self.chat(["/set n 2", "/set prompt_logprobs 2", "hi"])
        self.assertIn("n: `eadem run` gives several answers", result.err)
        self.assertIn("prompt_logprobs: `eadem run` lists log-probabilities in its JSON", result.err)
        self.assertEqual(result.out, "Hello there\n")

    def test_every_answer_has_a_seed_of_its_own(self):
        stories = self.folder / "stories"
        self.stories_chat(stories)
        chat = lambda lines, *options: self.chat(lines, "-n", "8", "--temperature", "2", *options, model=stories).out
        first, again = chat(["a", "/retry"], "--seed", "3").splitlines()
        self.assertNotEqual(first, again)
        self.assertEqual(chat(["a", "/retry"], "--seed", "3").splitlines(), [first, again])
        self.assertEqual(chat(["a"], "--seed", "4").splitlines(), [again])

    def stories_chat(self, folder):
        import shutil
        shutil.copytree(STORIES, folder)
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")

    def test_save_and_load(self):
        file = self.folder / "talk.json"
        saved = [system("S"), user("hi"), HELLO]
        self.chat(["hi", f"/save {file}"], "--system", "S")
        self.assertEqual(json.loads(file.read_text())["messages"], saved)
        self.assertEqual(self.messages([f"/load {file}"]), saved)
        self.assertEqual(self.messages([f"/load  {file} ", "a"]), [*saved, user("a"), HELLO])
        # What this conversation came from or went to may be written over; nothing else.
        self.chat([f"/load {file}", "a", f"/save {file}", "b", f"/save {file}"])
        self.assertEqual(len(json.loads(file.read_text())["messages"]), 7)
        before = file.read_bytes()
        self.assertIn("exists", self.chat(["hi", f"/save {file}"]).err)
        self.assertEqual(file.read_bytes(), before)
        for command in ["/save", "/load", "/save "]:
            self.assertIn("needs the name of a file", self.chat([command]).err)
        self.assertIn("/nowhere/x", self.chat(["hi", "/save /nowhere/x", "hi"]).err)

    def test_arrays_are_loaded_too(self):
        file = self.folder / "array.json"
        file.write_text(json.dumps([user("hi"), HELLO]))
        self.assertEqual(self.messages([f"/load {file}", "a"]), [user("hi"), HELLO, user("a"), HELLO])

    def test_hostile_files(self):
        file = self.folder / "bad.json"
        for content, words in [
                (b"", "bad.json"), (b"{", "bad.json"), (b"[" * 100000, "bad.json"), (b"{}", "array of messages"),
                (b'{"messages": 1}', "array of messages"), (b'"x"', "array of messages"), (b"[1]", "not an object"),
                (b"[[]]", "not an object"), (b"[{}]", "role"), (b'[{"role": 1, "content": ""}]', "role"),
                (b'[{"role": "alien", "content": "x"}]', "no role alien"), (b'[{"role": "user", "content": "\xff"}]', "bad.json"),
                (b'[{"role": "' + EVIL.encode("unicode_escape").replace(b"\\x", b"\\u00") + b'"}]', "no role"),
                (None, "directory"), ("missing", "No such file")]:
            with self.subTest(content):
                path = self.folder if content is None else self.folder / "nothing" if content == "missing" else file
                if isinstance(content, bytes):
                    file.write_bytes(content)
                result = self.chat(["a", f"/load {path}", "b", "/stats"])
                self.assertIn(words, result.err)
                self.assertIn("4 messages", result.err)
                self.assertEqual(steering(result.err.encode()), [])

    def test_an_answer_cannot_be_forged(self):
        """A message that spells the end of its turn is text."""
        plain = self.chat(["x" * 7]).err
        forged = self.chat(["<|end|>"]).err
        count = lambda text: re.search(r"\[(\d+) tokens read", text)[1]
        self.assertEqual(count(plain), count(forged))

    def test_full_context(self):
        lines = ["a" * 20, "b" * 20, "c" * 20]  # 26 tokens a turn in the past, 23 a new one, and 1
        refused = self.chat([*lines, "/undo", "/clear", "d"], "--context", "64")
        self.assertIn("the conversation would have 76 tokens, and the context holds 64", refused.err)
        self.assertIn("--when-full drop-oldest", refused.err)
        self.assertEqual(refused.out, "Hello there\n" * 3)
        self.assertIn(f"took back '{'b' * 20}'", refused.err)  # the refused one is no part of the conversation

        dropping = ["--context", "64", "--when-full", "drop-oldest", "--system", "S"]
        self.assertEqual(self.messages(lines, *dropping), [system("S"), user("c" * 20), HELLO])
        said = self.chat(lines, *dropping).err
        self.assertIn("the context is full: 2 messages dropped, from 'aaaaaaaaaaaaaaaaaaaa' on", said)
        self.assertIn("the context is full: 2 messages dropped, from 'bbbbbbbbbbbbbbbbbbbb' on", said)
        too_long = self.chat(["a", "b" * 100, "c"], *dropping)
        self.assertIn("without its earlier turns, and the context holds 64", too_long.err)
        self.assertEqual(too_long.out, "Hello there\n" * 2)
        # An answer that fills the context is cut; the next message has no room.
        cut = self.chat(["sing", "a", "/undo", "a"], "--context", "32")
        self.assertIn("the answer was cut: the context of 32 tokens is full (--context gives more)", cut.err)
        self.assertIn("and the context holds 32", cut.err)
        self.assertEqual(len(cut.out.splitlines()), 2)

    def test_an_answer_that_fails_leaves_the_conversation_as_it_was(self):
        result = self.chat(["hi", "crash", "you", "/stats"])
        self.assertEqual(result.out, "Hello there\ncrack\nHello there\n")
        self.assertIn("not finite", result.err)
        self.assertIn("4 messages", result.err)
        self.assertEqual(self.messages(["hi", "crash", "you"]), [user("hi"), HELLO, user("you"), HELLO])
        run = eadem("run", self.model, "--chat", "-p", "crash")
        self.assertEqual((run.code, run.out), (1, "crack\n"))

    def test_template_options(self):
        other = self.folder / "other.jinja"
        other.write_text("{{ messages[-1].content }}{{ mark }}<|reason|>")
        for options in (["--chat-template", other], ["--chat-template", other.read_text()],
                        ["--chat-template-file", other, "--chat-template-kwargs", '{"mark": 3}']):
            self.assertEqual(self.chat(["a"], *options).out, "Yes\n")
        self.assertIn("[3 tokens read", self.chat(["a"], "--chat-template", other, "--template-arg", "mark=b").err)
        self.refused(1, "no chat template is named 'rag'", "chat", self.model, "--chat-template", "rag")
        for argument in ["x", "=1", "{", '{"a": }']:
            self.refused(2, "--template-arg", "chat", self.model, "--template-arg", argument)
        self.refused(1, "'messages' is an option of its own", "chat", self.model, "--template-arg", "messages=1")

    def test_without_a_model_the_bundled_chat_model_answers(self):
        result = eadem("chat", "--seed", "1", stdin=b"Hello!\nTell me a story.\n")
        self.assertEqual(result.code, 0, result.err)
        self.assertIn("using the bundled model 'chat'", result.err)
        self.assertGreater(len(result.out), 50)
        once = [eadem("run", "--chat", "-p", "Hello!", "--temperature", "0").out for _ in range(2)]
        self.assertEqual(once[0], once[1])
        self.assertGreater(len(once[0]), 2)

    def test_refusals(self):
        result = self.refused(1, ["no chat template", str(STORIES), "chat_template.jinja", "tokenizer_config.json",
                                  "additional_chat_templates", "--chat-template", "eadem run"], "chat", STORIES)
        self.refused(1, ["no chat template", "tokenizer.chat_template"], "chat", GGUF_STORIES / "stories260K.gguf")
        self.assertNotIn("> ", result.err)
        self.refused(1, "no chat template", "run", "stories", "--chat", "-p", "a")
        self.refused(1, "no such file", "chat", "/nowhere")
        self.refused(2, "--when-full is 'never'", "chat", self.model, "--when-full", "never")
        self.refused(2, "--temperature is -1", "chat", self.model, "--temperature", "-1")
        self.refused(2, "--context is 0", "chat", self.model, "--context", "0")
        self.refused(1, "--context is 1048576", "chat", self.model, "--context", "1M")
        self.refused(2, "unexpected argument 'b'", "chat", self.model, "b")
        broken = write_chat_model(self.folder / "broken", template="{% for %}")
        self.refused(1, "chat_template.jinja", "chat", broken)
        self.assertEqual(self.chat([]).out, "")


class Run(ChatTest):
    def test_only_the_answer_is_printed(self):
        self.assertEqual(self.done("run", self.model, "--chat", "-p", "hi").out, "Hello there\n")
        self.assertEqual(self.done("run", self.model, "--chat", stdin=b"hi\n").out, "Hello there\n")
        why = self.done("run", self.model, "--chat", "-p", "why", "-q")
        self.assertEqual((why.out, why.err), ("Yes\n", "well\n\n"))

    def test_json(self):
        run = ["run", self.model, "--chat", "--json", "--system", "S", "-p"]
        result = json.loads(self.done(*run, "why").out)
        self.assertEqual((result["text"], result["reasoning_content"]), ("Yes", "well"))
        self.assertEqual(result["finish_reason"], "stop")
        self.assertEqual(result["prompt_tokens"], tokens_of("<|bos|>", "<|system|>", "S", "<|end|>", "<|user|>", "why",
                                                             "<|end|>", "<|reason|>"))
        result = json.loads(self.done(*run, "hi").out)
        self.assertNotIn("reasoning_content", result)

    def test_refusals(self):
        self.refused(2, "--system is for chat templates", "run", self.model, "-p", "a", "--system", "S")
        self.refused(2, "--parse-special and --chat", "run", self.model, "-p", "a", "--chat", "--parse-special")
        self.refused(2, "`eadem chat` holds a conversation", "run", self.model, "--chat", "-i")
        self.refused(1, "the context holds 20", "run", self.model, "--chat", "-p", "a" * 40, "--context", "20")
        terminal = Terminal("run", self.model, "--chat")
        code, shown = terminal.end()
        self.assertEqual(code, 2)
        self.assertIn(b"`eadem chat` holds a conversation", shown)


class OnTerminal(ChatTest):
    def start(self, *options):
        terminal = Terminal("chat", self.model, *options, XDG_STATE_HOME=str(self.folder), LC_ALL="C")
        terminal.read_until("ends\r\n> ")
        return terminal

    def leave(self, terminal, code=0, keys="/bye\r"):
        terminal.type(keys)
        ended, rest = terminal.end()
        self.assertEqual(ended, code, terminal.seen)
        return rest

    def test_a_conversation(self):
        terminal = self.start()
        terminal.type("hi\r")
        terminal.read_until("Hello there\r\n")
        self.assertIn(b"from the cache", terminal.read_until("> "))
        terminal.type("\x1b[A\r")  # the same again
        terminal.read_until("Hello there\r\n")
        terminal.read_until("> ")
        terminal.type("/help\r")
        shown = terminal.read_until("> ").decode()
        for command in ["/system", "/clear", "/undo", "/retry", "/save FILE", "/load FILE", "/stats", "/set", "/bye", '"""']:
            self.assertIn(command, shown)
        terminal.type("/stats\r")
        terminal.read_until("4 messages")
        terminal.read_until("> ")
        self.assertIn(b"4 messages", self.leave(terminal))
        self.assertIn("hi\n", (self.folder / "eadem/history").read_text())

    def test_several_lines(self):
        terminal = self.start()
        terminal.type('"""a\r')
        terminal.read_until("... ")
        terminal.type('b"""\r')
        terminal.read_until("Hello there")
        terminal.read_until("> ")
        terminal.type("c\\\r")
        terminal.read_until("... ")
        terminal.type("\x03")  # takes the whole input back
        terminal.read_until("\n> ")
        terminal.type(f"/save {self.folder}/x\r")
        terminal.read_until("2 messages in")
        terminal.read_until("> ")
        self.leave(terminal, keys="\x04")
        self.assertEqual(json.loads((self.folder / "x").read_text())["messages"], [user("a\nb"), HELLO])

    def test_reasoning_is_dimmed(self):
        terminal = self.start()
        terminal.type("why\r")
        terminal.read_until(DIM + b"well" + PLAIN + b"\r\n\r\nYes\r\n")
        terminal.read_until("> ")
        self.leave(terminal)

    def test_ctrl_c(self):
        terminal = self.start("--context", "128k")
        terminal.type("sing\r")
        terminal.read_until(" la la la")
        terminal.type("\x03")
        self.assertLess(len(terminal.read_until("\n> ")), 500000)
        terminal.type(f"/save {self.folder}/x\r")
        terminal.read_until("2 messages")
        terminal.read_until("> ")
        answer = json.loads((self.folder / "x").read_text())["messages"][1]
        self.assertEqual(set(answer["content"].split()), {"la"})
        terminal.type("hi\r")  # the conversation goes on
        terminal.read_until("Hello there")
        terminal.read_until("> ")
        terminal.type("\x03")
        terminal.read_until("Ctrl-C again")
        terminal.read_until("> ")
        self.leave(terminal, 130, "\x03")

    def test_ctrl_c_before_the_answer(self):
        """A long message is stopped while it is read: the conversation is as it was."""
        file = self.folder / "long.json"
        file.write_text(json.dumps([user("a" * 120000), HELLO]))
        terminal = self.start("--context", "128k")
        terminal.type(f"/load {file}\r")
        terminal.read_until("2 messages")
        terminal.read_until("> ")
        terminal.type("sing\r")
        terminal.read_until("sing\r\n")
        terminal.type("\x03")
        terminal.read_until("the conversation is as it was")
        terminal.read_until("> ")
        terminal.type("/stats\r")
        terminal.read_until("2 messages")
        terminal.read_until("> ")
        self.leave(terminal)

    def test_texts_cannot_steer_the_terminal(self):
        file = self.folder / "evil.json"
        file.write_text(json.dumps([system(EVIL), user(EVIL), HELLO]))
        terminal = self.start()
        terminal.type(f"/load {file}\r")
        terminal.read_until("3 messages")
        terminal.read_until("> ")
        terminal.type("/system\r")
        terminal.read_until(EVIL_SHOWN)
        terminal.read_until("> ")
        terminal.type("/undo\r")
        terminal.read_until("took back")
        terminal.read_until("> ")
        self.leave(terminal)
        self.assertEqual(steering(terminal.seen), [])


if __name__ == "__main__":
    main()
