# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eadem._eadem import InvalidArgument, NotFound


def load_all(target: Any, state: Any) -> None:
    """Every parameter of `target` from `state`, by name; nothing is loaded unless the names agree."""
    if not isinstance(state, Mapping):
        raise InvalidArgument(f"a state is a mapping of names to arrays; this is a {type(state).__name__}")
    names = set(target.parameter_names())
    missing, unknown = sorted(names - set(state)), sorted(map(str, set(state) - names))
    if missing or unknown:
        parts = [f"{len(found)} {what} ({', '.join(found[:3])}{', …' if len(found) > 3 else ''})"
                 for what, found in (("lacking", missing), ("that the model does not have", unknown)) if found]
        raise NotFound(f"the state has {len(state)} parameters, the model {len(names)}: {' and '.join(parts)}")
    for name, array in state.items():
        target.load_param(name, array)
