#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`eadem train` as a user meets it: signals, two runs at once, kill -9, what is refused.

    program_test.py PROGRAM [UNITTEST ARGUMENTS]
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

PROGRAM = os.path.abspath(sys.argv[1])
RECIPE = """
[model]
config = "config.json"
[tokenizer]
path = "tokenizer"
[data]
train = ["text.txt"]
[training]
steps = {steps}
batch_tokens = 64
accumulation = {accumulation}
sequence_length = 32
warmup_steps = 1
checkpoint_interval = {checkpoint_interval}
{extra}
[output]
directory = "out"
"""


class Train(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "text.txt").write_text("the cat and the dog and the cat<|endoftext|>" * 50)
        self.eadem("tokenizer", "train", "text.txt", "--vocab-size", "270", "--special", "<|endoftext|>", "--bos",
                   "<|endoftext|>", "--eos", "<|endoftext|>", "-o", "tokenizer", check=True)
        (self.folder / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 270, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}))

    def recipe(self, steps, accumulation=1, checkpoint_interval=100, extra=""):
        (self.folder / "recipe.toml").write_text(
            RECIPE.format(steps=steps, accumulation=accumulation, checkpoint_interval=checkpoint_interval, extra=extra))

    def eadem(self, *arguments, **options):
        return subprocess.run([PROGRAM, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=120, **options)

    def refused(self, *words, arguments=("recipe.toml",)):
        result = self.eadem("train", *arguments)
        self.assertEqual((result.returncode, result.stdout), (1, ""), result.stderr)
        [error] = [line for line in result.stderr.splitlines() if line.startswith("eadem: error: ")]
        for word in words:
            self.assertIn(word, error)

    def start(self, *arguments, **options):
        process = subprocess.Popen([PROGRAM, "train", "recipe.toml", *arguments], cwd=self.folder, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        self.addCleanup(lambda: (process.kill(), process.wait(), process.stdout.close(), process.stderr.close()))
        return process

    def wait_for(self, process, condition):
        while not condition():
            self.assertIsNone(process.poll(), "it ended early")
            time.sleep(0.01)

    def metrics(self):
        """Whole lines of metrics.jsonl."""
        path = self.folder / "out/metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")] if path.exists() else []

    def checkpoints(self):
        return sorted(path.name for path in (self.folder / "out/checkpoints").glob("*"))

    def model_hash(self):
        return hashlib.sha256((self.folder / "out/final/model.safetensors").read_bytes()).hexdigest()

    def test_each_signal_to_stop_saves(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number.name):
                shutil.rmtree(self.folder / "out", ignore_errors=True)
                self.recipe(1000000)
                process = self.start()
                self.wait_for(process, self.metrics)
                process.send_signal(number)
                out, err = process.communicate(timeout=60)
                self.assertEqual((process.returncode, out), (130, ""), err)
                self.assertIn("--resume` goes on", err)
                steps = self.metrics()[-1]["step"]
                self.assertEqual(self.checkpoints()[-1], f"step_{steps:08}")

    def test_a_run_under_nohup_outlives_its_terminal(self):
        self.recipe(1000000)
        process = self.start(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        self.wait_for(process, self.metrics)
        process.send_signal(signal.SIGHUP)
        seen = len(self.metrics())
        self.wait_for(process, lambda: len(self.metrics()) > seen + 3)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(60), 130)

    def test_a_second_signal_still_saves(self):
        self.recipe(1000000, accumulation=2000)  # a step takes long enough to be interrupted twice
        process = self.start()
        self.wait_for(process, lambda: (self.folder / "out/metrics.jsonl").exists())
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
        self.assertEqual((process.returncode, out), (130, ""), err)
        self.assertIn("stopping once the step is saved", err)
        self.assertEqual(self.checkpoints(), ["step_00000001"])

    def test_a_third_signal_says_that_nothing_was_saved(self):
        self.recipe(1000000, accumulation=1 << 20)
        process = self.start()
        self.wait_for(process, lambda: (self.folder / "out/metrics.jsonl").exists())
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (-signal.SIGINT, ""), err)
        self.assertIn("nothing was saved since the last checkpoint", err)

    def test_a_reader_of_messages_that_is_gone_does_not_end_a_run(self):
        self.recipe(1000000)
        process = self.start()
        self.wait_for(process, self.metrics)
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(60), 130)
        self.assertEqual(self.checkpoints()[-1], f"step_{self.metrics()[-1]['step']:08}")
        process.stderr = open(os.devnull)

    def test_two_runs_at_once(self):
        self.recipe(1000000)
        process = self.start()
        self.wait_for(process, self.metrics)
        for arguments in (("recipe.toml",), ("recipe.toml", "--resume")):
            self.refused("out: another run is writing there: process ", str(process.pid), arguments=arguments)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(60), 130)
        steps = [line["step"] for line in self.metrics()]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))

    def test_kill_9_and_resume_end_where_one_run_ends(self):
        self.recipe(30, accumulation=20, checkpoint_interval=4)
        whole = self.eadem("train", "recipe.toml")
        self.assertEqual(whole.returncode, 0, whole.stderr)
        expected = self.model_hash()
        shutil.rmtree(self.folder / "out")
        for step in (2, 9, 10, 23):
            process = self.start("--resume")
            # A resumed run writes the file anew, so that it is read once.
            self.wait_for(process, lambda: any(line["step"] >= step for line in self.metrics()))
            process.kill()
            process.wait()
        result = self.eadem("train", "recipe.toml", "--resume")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.model_hash(), expected)
        self.assertEqual([line["step"] for line in self.metrics()], list(range(1, 31)))

    def test_more_steps(self):
        self.recipe(4)
        self.assertEqual(self.eadem("train", "recipe.toml").returncode, 0)
        self.recipe(6)
        self.refused("'out' holds a run already", "--resume")
        result = self.eadem("train", "recipe.toml", "--resume")
        self.assertEqual((result.returncode, result.stdout), (0, "out/final\n"), result.stderr)
        self.assertIn("going on from out/checkpoints/step_00000004", result.stderr)
        self.assertIn("schedule of the learning rate ends at step 4", result.stderr)
        self.recipe(3)
        self.refused("training.steps is 3", "stands at step 6", arguments=("recipe.toml", "--resume"))

    # Rows of the embedding are added token by token, in another order than one process adds them (parallelism.md).
    FROZEN = 'freeze = ["model.embed_tokens.*"]'

    def files(self):
        """The bytes of what a run has written, but for speeds."""
        names = [path.relative_to(self.folder) for path in sorted((self.folder / "out").rglob("*"))
                 if path.is_file() and path.name not in ("lock", "metrics.jsonl")]
        files = {str(name): (self.folder / name).read_bytes() for name in names}
        metrics = [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in self.metrics()]
        return files, metrics

    def test_processes_write_the_bytes_of_one(self):
        for extra in (self.FROZEN, self.FROZEN + '\nweights = "bf16"'):
            for ranks in (2, 3):
                with self.subTest(extra=extra, ranks=ranks):
                    shutil.rmtree(self.folder / "out", ignore_errors=True)
                    self.recipe(8, accumulation=ranks, checkpoint_interval=3,
                                extra=extra)
                    one = self.eadem("train", "recipe.toml")
                    self.assertEqual(one.returncode, 0, one.stderr)
                    expected = self.files()
                    shutil.rmtree(self.folder / "out")
                    several = self.eadem("train", "recipe.toml", "--dp", str(ranks))
                    self.assertEqual((several.returncode, several.stdout), (0, "out/final\n"), several.stderr)
                    self.assertIn(f"the first of {ranks} processes (dp {ranks} x tp 1 x pp 1)", several.stderr)
                    files, metrics = self.files()
                    self.assertEqual(metrics, expected[1])
                    self.assertEqual(sorted(files), sorted(expected[0]))
                    for name, content in files.items():
                        self.assertTrue(content == expected[0][name], name)

    def test_stages_write_the_bytes_of_one(self):
        config = json.loads((self.folder / "config.json").read_text())
        for tied in (False, True):
            with self.subTest(tied=tied):
                (self.folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
                self.recipe(8, accumulation=3, checkpoint_interval=3, extra="max_grad_norm = 0\nweights = \"bf16\"")
                self.assertEqual(self.eadem("train", "recipe.toml").returncode, 0)
                expected = self.model_hash()
                shutil.rmtree(self.folder / "out")
                result = self.eadem("train", "recipe.toml", "--pp", "2")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(self.model_hash(), expected)
                shutil.rmtree(self.folder / "out")

    def experts(self, **changed):
        (self.folder / "config.json").write_text(json.dumps({
            "model_type": "qwen3_moe", "vocab_size": 270, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, **changed}))

    def test_ranks_of_experts_train_what_one_process_trains(self):
        # Gradients of what every rank has are summed rank by rank, so that their last bits differ from one process's.
        (self.folder / "eval.txt").write_text("the dog and the cat " * 20)  # three passes, which no number divides
        self.experts()
        for arguments, accumulation in ((("--ep", "2"), 4), (("--ep", "3"), 3), (("--dp", "2", "--ep", "2"), 4),
                                        (("--tp", "2", "--ep", "2"), 2), (("--ep", "2", "--pp", "2"), 4)):
            with self.subTest(arguments=arguments):
                self.recipe(6, accumulation=accumulation, checkpoint_interval=3,
                            extra="learning_rate = 1e-3\neval_interval = 2\nrouter_aux_loss_coef = 0.01")
                recipe = self.folder / "recipe.toml"
                recipe.write_text(recipe.read_text().replace("[training]", 'eval = ["eval.txt"]\n[training]'))
                runs = []
                for each in ((), arguments):
                    shutil.rmtree(self.folder / "out", ignore_errors=True)
                    result = self.eadem("train", "recipe.toml", *each)
                    self.assertEqual((result.returncode, result.stdout), (0, "out/final\n"), result.stderr)
                    runs.append(self.metrics())
                one, several = runs
                self.assertEqual([sorted(line) for line in several], [sorted(line) for line in one])
                self.assertEqual(len([line for line in one if "eval_loss" in line]), 3)
                for line, expected in zip(several, one):
                    self.assertEqual(line["step"], expected["step"])
                    for key in ("loss", "eval_loss"):
                        # The bound of tests/distributed/training_test.cc for several steps.
                        self.assertAlmostEqual(line.get(key, 0), expected.get(key, 0), delta=1e-3)

    def test_any_number_of_processes_goes_on_from_a_checkpoint(self):
        self.recipe(1000000, accumulation=2)
        step = 0
        for arguments in (["--dp", "2"], ["--tp", "2"], [], ["--dp", "2", "--tp", "2"], ["--pp", "2"],
                          ["--dp", "2", "--tp", "2", "--pp", "2"], ["--tp", "2"]):
            with self.subTest(arguments=arguments):
                process = self.start("--resume", *arguments)
                self.wait_for(process, lambda: len(self.metrics()) > step + 2)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
                self.assertEqual((process.returncode, out), (130, ""), err)
                self.assertIn("--resume` goes on", err)
                if step:
                    self.assertIn(f"going on from out/checkpoints/step_{step:08}", err)
                step = self.metrics()[-1]["step"]
                self.assertEqual(self.checkpoints()[-1], f"step_{step:08}")
        self.assertEqual([line["step"] for line in self.metrics()], list(range(1, step + 1)))

    def test_resumed_processes_end_where_one_run_ends(self):
        self.recipe(12, accumulation=2, checkpoint_interval=4, extra=self.FROZEN)
        self.assertEqual(self.eadem("train", "recipe.toml").returncode, 0)
        expected = self.model_hash()
        shutil.rmtree(self.folder / "out")
        for ranks, steps in ((1, 3), (2, 7), (1, 9), (2, 12)):
            self.recipe(steps, accumulation=2, checkpoint_interval=4, extra=self.FROZEN + "\ndecay_steps = 12")
            result = self.eadem("train", "recipe.toml", "--resume", "--dp", str(ranks))
            self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.model_hash(), expected)

    def children(self, process):
        path = Path(f"/proc/{process.pid}/task")
        return [int(child) for task in path.iterdir() for child in (task / "children").read_text().split()]

    def test_a_process_that_dies_ends_the_run_with_its_name(self):
        self.recipe(1000000, accumulation=2, checkpoint_interval=3)
        for arguments in (["--dp", "2"], ["--dp", "2", "--tp", "2"]):
            with self.subTest(arguments=arguments):
                shutil.rmtree(self.folder / "out", ignore_errors=True)
                process = self.start(*arguments)
                self.wait_for(process, lambda: len(self.metrics()) > 5)
                victim = max(self.children(process))
                os.kill(victim, signal.SIGKILL)
                out, err = process.communicate(timeout=60)
                self.assertEqual((process.returncode, out), (1, ""), err)
                self.assertIn(f"(process {victim}) died: signal 9", err)
                self.assertTrue(self.checkpoints())
                self.recipe(self.metrics()[-1]["step"] + 1, accumulation=2, checkpoint_interval=3,
                            extra="decay_steps = 1000000")
                result = self.eadem("train", "recipe.toml", "--resume")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.recipe(1000000, accumulation=2, checkpoint_interval=3)

    def test_processes_end_with_the_first(self):
        self.recipe(1000000, accumulation=2)
        process = self.start("--dp", "2")
        self.wait_for(process, self.metrics)
        [child] = self.children(process)
        process.kill()
        process.wait()
        deadline = time.time() + 10
        while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
            self.assertLess(time.time(), deadline, "it lives on")
            time.sleep(0.02)

    def test_what_processes_cannot_divide_is_refused(self):
        self.recipe(3, accumulation=4)
        self.refused("recipe.toml: training.accumulation is 4; 3 ranks of dp", "a multiple of 3",
                     arguments=("recipe.toml", "--dp", "3"))
        self.refused("2 attention heads do not divide into 3", arguments=("recipe.toml", "--tp", "3"))
        self.refused("2 layers for 3 pipeline stages", arguments=("recipe.toml", "--pp", "3"))
        self.refused("2 ranks to divide experts; the model has none", arguments=("recipe.toml", "--ep", "2"))
        self.refused("accumulation is 4; 3 ranks of ep", "a multiple of 3", arguments=("recipe.toml", "--ep", "3"))
        self.refused("accumulation is 4; 4 ranks of dp x 2 of ep", "a multiple of 8",
                     arguments=("recipe.toml", "--dp", "4", "--ep", "2"))
        for arguments, words in ((("--dp", "0"), "--dp is 0; expected 1 to 64"),
                                 (("--dp", "33", "--tp", "2"), "--dp 33 --tp 2 make 66 processes; expected at most 64"),
                                 (("--dp", "2", "--threads", "1"), "--dp 2 needs at least one for each rank"),
                                 (("--dp", "2", "--device", "reference"), "--dp 2 is for the CPU")):
            result = self.eadem("train", "recipe.toml", *arguments)
            self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
            self.assertIn(words, result.stderr)

    def test_a_full_disk_ends_all_processes(self):
        self.recipe(1000000, accumulation=400, checkpoint_interval=1)  # steps take long enough for what follows
        process = self.start("--dp", "2")
        self.wait_for(process, lambda: len(self.checkpoints()) > 1)
        [child] = self.children(process)
        # The output directory becomes one that cannot be written: a file stands where checkpoints go.
        os.rename(self.folder / "out/checkpoints", self.folder / "moved")
        (self.folder / "out/checkpoints").write_text("a file")
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (1, ""), err)
        self.assertIn("out/checkpoints", err)
        self.assertFalse(Path(f"/proc/{child}").exists())
        self.assertTrue(list((self.folder / "moved").glob("step_*/trainer.json")), "the earlier ones stay")

    def test_what_is_no_regular_file_is_refused(self):
        self.recipe(3)
        os.mkfifo(self.folder / "fifo")
        self.refused("fifo: it is not a regular file", arguments=("fifo",))
        self.refused("it is a directory", arguments=(".",))
        self.refused("absent.toml: No such file or directory", arguments=("absent.toml",))
        (self.folder / "out").write_text("a file")
        self.refused("cannot make directory 'out'")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
