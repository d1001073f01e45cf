"""Networks that a file describes are not built larger than the weights that the file holds for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from koffline.errors import PolicyError

# Target networks, and what an algorithm builds beside what it saves.
_COPIES = 8
_SLACK = 1_000_000


@contextlib.contextmanager
def no_more_parameters_than(states: Any) -> Iterator[None]:
    """Count the parameters that are made inside; PolicyError as soon as the saved ones cannot explain them.

    A configuration may claim layers of any width: the claim is refused while it is carried out, before the
    memory is filled with numbers.
    """
    from torch import nn

    most = _COPIES * _numbers(states) + _SLACK
    made = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal made
        made += 0 if parameter is None else max(1, parameter.numel())
        if made > most:
            raise PolicyError(
                f"its configuration asks for networks of more than {most} numbers, its weights are "
                f"{_numbers(states)}; save the model again"
            )

    handle = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _numbers(states: Any) -> int:
    """How many numbers the tensors of a nested state hold."""
    import torch

    total, waiting = 0, [states]
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            total += part.numel()
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, (list, tuple)):
            waiting += part
    return total
