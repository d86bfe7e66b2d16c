# SPDX-License-Identifier: Apache-2.0
"""The interpreter ends while calls run in other threads: neither the process aborts nor a call is cut into."""
import signal
import subprocess
import sys
import textwrap

import pytest
from conftest import BUNDLED, GOLDEN

# Each sets up `call`, which takes far longer than the rest of the program where nothing stops it.
CALLS = {
    "generate": """
        llm = eadem.LLM(MODEL, threads=1)
        params = eadem.SamplingParams(temperature=0, max_tokens=2**30, ignore_eos=True)
        def call():
            while True:
                llm.generate("Once", params)
    """,
    "generate with callback": """
        llm = eadem.LLM(MODEL, threads=1)
        params = eadem.SamplingParams(temperature=0, max_tokens=2**30, ignore_eos=True)
        def call():
            while True:
                llm.generate("Once", params, on_text=lambda index, piece: None)
    """,
    "forward": """
        config = eadem.LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=64,
                                   num_attention_heads=4, max_position_embeddings=512)
        engine = eadem.InferEngine(config, threads=1)
        engine.load_random(1)
        def call():
            while True:
                engine.forward(eadem.InferEngine.Input([list(range(500))]))
    """,
    "forward with hook": """
        engine = eadem.InferEngine.from_pretrained(LLAMA, threads=1)
        engine.hooks.register_hook("*", lambda name, tensor, layer: None)
        def call():
            while True:
                engine.forward(eadem.InferEngine.Input([list(range(100))]))
    """,
    "LLM": """
        def call():
            while True:
                eadem.LLM(MODEL, threads=1)
    """,
    "encode": """
        tokenizer = eadem.Tokenizer.from_file(MODEL)
        text = "Once upon a time there was a girl. " * 20000
        def call():
            while True:
                tokenizer.encode(text)
    """,
}


def program(call, end):
    return ("import signal, sys, threading, time\nimport eadem\n"
            f"MODEL, LLAMA = {str(BUNDLED)!r}, {str(GOLDEN / 'llama')!r}\n" + textwrap.dedent(CALLS[call])
            + textwrap.dedent(end))


def interrupted(code):
    """Exit status and errors of a program that gets Ctrl-C, every half second, once it has said "ready"."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            for _ in range(60):
                process.send_signal(signal.SIGINT)
                try:
                    return process.wait(timeout=0.5), process.stderr.read()
                except subprocess.TimeoutExpired:
                    pass
            pytest.fail("still there after 60 signals")
        finally:
            process.kill()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_interpreter_ends_beside_daemon_threads(call, threads):
    end = f"""
        for _ in range({threads}):
            threading.Thread(target=call, daemon=True).start()
        time.sleep(0.3)
        print("end", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", program(call, end)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_in_the_main_thread_ends_the_program(call):
    end = """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.3)
        print("ready", flush=True)
        time.sleep(100)
    """
    status, errors = interrupted(program(call, end))
    # Python ends by the signal when nobody catches KeyboardInterrupt.
    assert status == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt"), errors


def test_ctrl_c_while_a_thread_is_waited_for():
    """A thread that is no daemon holds the end up; Ctrl-C then ends that."""
    end = """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=call).start()
        time.sleep(0.3)
        print("ready", flush=True)
    """
    status, errors = interrupted(program("generate", end))
    assert status in (0, 1, -signal.SIGINT) and "terminate" not in errors, errors


def test_exit_handlers_may_still_generate():
    code = f"""
import atexit
llm = None
def last_words():
    print(llm.generate("Once", eadem.SamplingParams(temperature=0, max_tokens=3))[0].finish_reason, flush=True)
atexit.register(last_words)
import eadem
llm = eadem.LLM({str(BUNDLED)!r}, threads=1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "length\n", "")


def test_the_child_of_a_fork_ends_by_itself():
    end = """
        import os
        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.3)
        child = os.fork()
        if child == 0:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program("generate", end)], capture_output=True,
                          text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


def test_threads_that_cannot_be_created():
    """With room for a few threads: fewer, a warning, and the same text. Without any: likewise."""
    code = f"""
import ctypes, resource
import eadem
params = eadem.SamplingParams(temperature=0, max_tokens=20)
expected = eadem.LLM({str(BUNDLED)!r}, threads=1).generate("Once", params)[0].text
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (500 << 20),) * 2)
llm = eadem.LLM({str(BUNDLED)!r}, threads=256)
assert llm.generate("Once", params)[0].text == expected
pieces = []
attributes, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_attr_init(attributes)
libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 46))  # no machine has room for such a stack
assert libc.pthread_setattr_default_np(attributes) == 0
assert llm.generate("Once", params, on_text=lambda index, piece: pieces.append(piece))[0].text == expected
assert "".join(pieces) == expected
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "of 256 threads: the system refuses to create more" in done.stderr
    assert "no thread to generate on" in done.stderr
