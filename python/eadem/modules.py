# SPDX-License-Identifier: Apache-2.0
"""Modules for :class:`eadem.Sequential`: operators with names for their parameters."""

from . import ops
from ._eadem import Module

__all__ = ["Activation", "Linear", "Module", "RMSNorm", "Softmax"]


def Linear(in_features: int, out_features: int, bias: bool = False, *, name: str) -> Module:
    """``y = x @ weight.T + bias``. Parameters ``<name>.weight [out, in]`` and, with bias, ``<name>.bias [out]``."""
    parameters = [("weight", [out_features, in_features])]
    if bias:
        parameters.append(("bias", [out_features]))
    return Module(name, ops.linear(bias), parameters)


def RMSNorm(hidden: int, eps: float = 1e-5, *, name: str) -> Module:
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the last axis. Parameter ``<name>.weight [hidden]``."""
    return Module(name, ops.rms_norm(eps), [("weight", [hidden])])


def Activation(kind: str = "silu") -> Module:
    """``y = f(x)``: silu, gelu, gelu_tanh, relu or relu2."""
    return Module(kind, ops.activation(kind), [])


def Softmax() -> Module:
    """Probabilities over the last axis."""
    return Module("softmax", ops.softmax(), [])
