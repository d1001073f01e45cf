"""Reading a d3rlpy .d3 file as pure data: nothing in the file can run.

The file is a pickle of {torch: bytes, config: str, version: str}. It is read by an unpickler that refuses
every global, so that a pickle can build nothing but numbers, text and containers; the weights inside are
read by torch.load(weights_only=True), and only from its zip layout, because the older layout was once
exploitable. The network is then rebuilt from the JSON text by koffline.algos.d3_policy, the only part that
needs d3rlpy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from koffline.errors import PolicyError
from koffline.policies.base import one_line
from koffline.untrusted.limits import Refused, check_memory, check_regular
from koffline.untrusted.models import WantsImport, load_plain, load_tensors

_SAVE_AGAIN = "save the model again with d3rlpy's algo.save(path)"
_A_HISTORY = (
    "this acts on a history and a target return, not on one observation; give a policy that is a function of "
    "the observation, for instance a Q-learning algorithm"
)
_NO_RULE = "this has nothing to load; give --policy uniform"
_NO_POLICY = {
    "fqe": "this is a saved FQE evaluator, which does not contain its policy; save the algorithm it "
    "evaluates with algo.save(path) and give that file",
    "decision_transformer": _A_HISTORY,
    "discrete_decision_transformer": _A_HISTORY,
    "tacr": _A_HISTORY,
    "random_policy": _NO_RULE,
    "discrete_random_policy": _NO_RULE,
}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class D3File:
    """What a .d3 file holds.

    observation_shape: a tuple of sides, or one such tuple per part; states: weights and the states of the
    optimisers by name.
    """

    name: str
    algorithm: str
    observation_shape: Shape | tuple[Shape, ...]
    action_size: int
    config: str = field(repr=False)
    version: str
    states: dict[str, Any] = field(repr=False)


def read_d3(path: Path) -> D3File:
    """Read a file with a policy as data; what an algorithm's policy is, is said in koffline.algos.d3_policy.

    Raises PolicyError for a file with code in it, a corrupt one, and a model without a policy.
    """
    file = read_d3_model(path)
    if file.algorithm in _NO_POLICY:
        raise PolicyError(f"{file.name}: {_NO_POLICY[file.algorithm]} ({file.algorithm})")
    if not all(isinstance(side, int) for side in file.observation_shape):
        raise PolicyError(
            f"{file.name}: observations of shape {list(file.observation_shape)}; koffline evaluates policies "
            "with one observation array: join the parts into one"
        )
    return file


def read_d3_model(path: Path) -> D3File:
    """Read any model's file as data: algorithms, evaluators, sequence models. Raises PolicyError."""
    name = str(path)
    content = _loaded(lambda: _read_plain(path), f"{name}: its pickle")
    kinds = {"torch": bytes, "config": str, "version": str}
    is_dict = isinstance(content, dict)
    if not (is_dict and all(isinstance(content.get(key), kind) for key, kind in kinds.items())):
        found = f"a {type(content).__name__}"
        if is_dict:
            found += " with " + (", ".join(sorted(str(key)[:20] for key in content)[:5]) or "no keys")
        raise PolicyError(
            f"{name}: the pickle does not hold a d3rlpy model (torch, config, version) but {found}; "
            f"{_SAVE_AGAIN}"
        )
    algorithm, shape, action_size = _read_config(content["config"], name)
    if not content["torch"].startswith(b"PK\x03\x04"):
        raise PolicyError(f"{name}: the weights are not in torch's zip layout; {_SAVE_AGAIN}")
    states = _loaded(lambda: load_tensors(content["torch"]), f"{name}: the archive of its weights")
    if not (isinstance(states, dict) and all(isinstance(key, str) for key in states)):
        raise PolicyError(
            f"{name}: the weights are a {type(states).__name__}, not named modules; {_SAVE_AGAIN}"
        )
    return D3File(name, algorithm, shape, action_size, content["config"], content["version"], states)


def _read_plain(path: Path) -> Any:
    check_regular(path)
    check_memory(path.stat().st_size)
    return load_plain(path.read_bytes())


def _loaded(load: Callable[[], Any], what: str) -> Any:
    try:
        return load()
    except (Refused, OSError) as error:
        raise PolicyError(f"{what} is not read: {error}; {_SAVE_AGAIN}") from None
    except Exception as error:  # a hostile or truncated pickle may fail in any way
        asked = re.search(r"(?:GLOBAL|global:?) +([\w.]+)", str(error))
        wanted = str(error) if isinstance(error, WantsImport) else asked and asked.group(1)
        if wanted:
            raise PolicyError(
                f"{what} asks to import {wanted}, so loading it could run code; it was refused and nothing "
                f"ran: {_SAVE_AGAIN}, which never needs that"
            ) from None
        raise PolicyError(f"{what} is truncated or corrupt ({one_line(error)}); {_SAVE_AGAIN}") from error


def _read_config(text: str, name: str) -> tuple[str, Shape | tuple[Shape, ...], int]:
    try:
        config = json.loads(text)
        algorithm, shape, size = config["config"]["type"], config["observation_shape"], config["action_size"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PolicyError(
            f"{name}: the configuration cannot be read ({one_line(error)}); {_SAVE_AGAIN}"
        ) from error
    if not (isinstance(algorithm, str) and isinstance(size, int) and size > 0):
        raise PolicyError(f"{name}: algorithm {algorithm!r} with action size {size!r}; {_SAVE_AGAIN}")
    if _is_shape(shape):
        return algorithm, tuple(shape), size
    if isinstance(shape, list) and shape and all(map(_is_shape, shape)):
        return algorithm, tuple(map(tuple, shape)), size
    raise PolicyError(f"{name}: observations of shape {shape} make no sense; {_SAVE_AGAIN}")


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(isinstance(side, int) and side > 0 for side in shape)
