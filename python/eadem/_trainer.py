# SPDX-License-Identifier: Apache-2.0
"""Trainer: a model, its gradients and its optimizer, one step at a time."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Mapping, Optional, Sequence, Union

import numpy as np

from eadem import _arguments, _arrays, _eadem
from eadem._eadem import DistConfig, InvalidArgument, ModelConfig
from eadem._models import located
from eadem._state import load_all


class Trainer:
    """Trains a model with AdamW. Threads may share one; their calls run one at a time.

    model          a configuration such as LlamaConfig, whose parameters are unset (load_random or load_param), or the path
                   or name of a checkpoint to start from (as in LLM)
    weights        "f32", or "bf16" with f32 master copies
    products       what linear layers multiply: "plain", the weights as they are; "fp8_block128", weights and rows of
                   activations rounded to 8-bit floats; "fp8_tensor", all operands of all products, with a scale for
                   each tensor; "fp8_tensor_delayed", likewise, with scales from earlier steps
    head_products  likewise of the output layer: "plain", "fp8_tensor" or "fp8_tensor_delayed"
    amax_history   how many earlier steps "fp8_tensor_delayed" takes scales from
    recompute      "layers": the backward pass computes the values of each layer again instead of keeping them, which
                   takes less memory, more time, and gives the same bits. "none": it does not
    batch_tokens   most tokens of one step
    weight_decay   decoupled, on parameters of two or more dimensions
    frozen         names of parameters that keep their values, without gradients and optimizer states; in them * stands
                   for any characters
    max_grad_norm  gradients are scaled down to this norm; 0: not
    router_aux_loss_coef  what the load-balancing loss of experts is multiplied with before it is added to the loss; 0: off.
                   None: what the model's config.json asks for
    distributed_config
                   DistConfig: the ranks of a mesh. Ranks of dp and ep divide the passes of a step, of tp the matrices, of pp
                   the layers and of ep the experts. Each but this process is one of its own, which ends with this one;
                   `threads` are those of all. None: one rank
    device, threads, isa, disabled_fusions: as in LLM

    Parameters, gradients and checkpoints are whole, whatever ranks there are.
    """

    @dataclasses.dataclass
    class Batch:
        """A pass of a step of several; the fields are the arguments of Trainer.step."""

        input_ids: Any
        labels: Any = None
        lengths: Any = None

    def __init__(self, model: Union[ModelConfig, str, os.PathLike[str]], *, device: str = "cpu", threads: int = 0,
                 isa: str = "", weights: str = "f32", products: str = "plain", head_products: str = "plain",
                 amax_history: int = 16, recompute: str = "none", batch_tokens: int = 4096, beta1: float = 0.9,
                 beta2: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.1, max_grad_norm: float = 1.0,
                 disabled_fusions: Sequence[str] = (), frozen: Sequence[str] = (),
                 router_aux_loss_coef: Optional[float] = None, distributed_config: Optional[DistConfig] = None) -> None:
        config = model if isinstance(model, ModelConfig) else None
        ranks = _arguments.ranks("distributed_config", distributed_config)
        arguments = {
            "path": os.path.abspath(located("model", model)) if not isinstance(model, ModelConfig) else "",
            "config": _eadem.config_text(config) if config is not None and ranks.num_ranks > 1 else "",
            "device": _arguments.string("device", device), "threads": _arguments.integer("threads", threads),
            "isa": _arguments.string("isa", isa), "weights": _arguments.string("weights", weights),
            "products": _arguments.string("products", products),
            "head_products": _arguments.string("head_products", head_products),
            "amax_history": _arguments.integer("amax_history", amax_history),
            "recompute": _arguments.string("recompute", recompute),
            "batch_tokens": _arguments.integer("batch_tokens", batch_tokens), "beta1": _arguments.real("beta1", beta1),
            "beta2": _arguments.real("beta2", beta2), "eps": _arguments.real("eps", eps),
            "weight_decay": _arguments.real("weight_decay", weight_decay),
            "max_grad_norm": _arguments.real("max_grad_norm", max_grad_norm),
            "disabled_fusions": _arguments.strings("disabled_fusions", disabled_fusions),
            "frozen": _arguments.strings("frozen", frozen),
            "router_aux_loss_coef": None if router_aux_loss_coef is None else
            _arguments.real("router_aux_loss_coef", router_aux_loss_coef), **_arguments.dist(ranks)}
        self._trainer = _eadem.NativeTrainer(
            config, rank_program=_arguments.rank_program(arguments, ranks.num_ranks, "follow_trainer"), **arguments)

    def load_param(self, name: str, param: Any) -> None:
        """As InferEngine.load_param; before the first step."""
        self._trainer.load_param(name, _arrays.parameter(param))

    def load_random(self, seed: int, stddev: float = 0.02) -> None:
        """Matrices normal with this deviation, norms one, biases zero; before the first step."""
        self._trainer.load_random(seed, stddev)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As InferEngine.load_state_dict. Moments and step count stay as they are: load_checkpoint restores those too."""
        load_all(self, state)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the weights by name, whole, in the dtype that the passes read."""
        return self._trainer.state_dict()

    def save(self, path: Union[str, os.PathLike[str]], tokenizer: Optional[Union[str, os.PathLike[str]]] = None) -> None:
        """Writes the model into the directory `path` in Hugging Face layout; as InferEngine.save_pretrained."""
        self._trainer.save(os.fspath(path), None if tokenizer is None else os.fspath(tokenizer))

    def save_checkpoint(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes all that load_checkpoint needs as the directory `path`, which appears whole or not at all.

        An earlier checkpoint of that name is replaced; anything else there raises InvalidArgument. The directory is a
        model in Hugging Face layout, too.
        """
        self._trainer.save_checkpoint(os.fspath(path))

    def load_checkpoint(self, path: Union[str, os.PathLike[str]]) -> None:
        """Restores weights, moments and step count, so that the next steps have the same bits as without the break.

        Takes what save_checkpoint or `eadem train` wrote. Raises DataCorrupted for files that are not what was written,
        InvalidArgument for another model or weights in another dtype; nothing has changed then.
        """
        self._trainer.load_checkpoint(os.fspath(path))

    def parameter_names(self) -> list[str]:
        return self._trainer.parameter_names()

    def step(self, input_ids: Union[Any, Sequence[Trainer.Batch]], labels: Any = None, *, learning_rate: float,
             lengths: Any = None) -> tuple[float, float]:
        """One optimizer step; returns (loss, grad_norm): mean loss in nats over the labels, gradient norm before clipping.

        input_ids  [batch, seq] or packed [tokens]; each row is a document of its own, no longer than the model's context
        labels     like input_ids: labels[i] is the token to predict after input_ids[i], negative: ignored. None: the
                   next token of the row; its last token has none
        lengths    [batch] tokens that count of each row, or the lengths of the packed documents

        A list of Trainer.Batch instead is a step over all of them, one pass after another: gradients are added, and the loss
        is the mean over all their labels. Ranks of dp and ep need as many each.

        Releases the GIL. Raises InvalidArgument for a batch that does not fit, DataCorrupted when loss or gradient is
        not finite; parameters are unchanged then.
        """
        if isinstance(input_ids, (list, tuple)) and any(isinstance(each, Trainer.Batch) for each in input_ids):
            if labels is not None or lengths is not None:
                raise InvalidArgument("labels and lengths are in the batches of a step of several")
            passes = [self._batch(each.input_ids, each.labels, each.lengths) for each in
                      (_arguments.expect(f"batch {index}", each, Trainer.Batch, "a Trainer.Batch")
                       for index, each in enumerate(input_ids))]
        else:
            passes = [self._batch(input_ids, labels, lengths)]
        return self._trainer.step(passes, learning_rate)

    def evaluate(self, input_ids: Any, labels: Any = None, *, lengths: Any = None) -> tuple[float, int]:
        """Mean loss of a batch and the number of its labels; changes nothing."""
        return self._trainer.evaluate(self._batch(input_ids, labels, lengths))

    def gradient(self, name: str) -> np.ndarray:
        """float32 gradient of a parameter in the last step, whole."""
        return self._trainer.gradient(name)

    @property
    def num_steps(self) -> int:
        return self._trainer.num_steps

    @staticmethod
    def _batch(input_ids: Any, labels: Any, lengths: Optional[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, counts = _arrays.rows("input_ids", input_ids, lengths)
        if labels is not None:
            if np.shape(labels) != np.shape(input_ids):
                raise InvalidArgument(f"labels has shape {list(np.shape(labels))}; input_ids has "
                                      f"{list(np.shape(input_ids))}")
            return ids, _arrays.rows("labels", labels, lengths)[0], counts
        following = np.full(ids.shape, -1, np.int32)
        following[:-1] = ids[1:]
        ends = np.cumsum(counts) - 1
        following[ends[(ends >= 0) & (ends < len(ids))]] = -1
        return ids, following, counts
