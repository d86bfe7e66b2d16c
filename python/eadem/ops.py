# SPDX-License-Identifier: Apache-2.0
"""Operators: what is computed. Put behind each other by :mod:`eadem.modules`; ``reference`` is the slow oracle."""

from ._eadem import Op

linear = Op.linear
rms_norm = Op.rms_norm
activation = Op.activation
softmax = Op.softmax

__all__ = ["Op", "activation", "linear", "rms_norm", "softmax"]
