"""Networks that a file describes are not built larger than the weights that the file holds for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from koffline.errors import PolicyError

# Target networks, and what an algorithm builds beside what it saves.
_COPIES = 8
_SLACK_NUMBERS = 1_000_000
_SLACK_TENSORS = 500


@contextlib.contextmanager
def no_more_parameters_than(states: Any) -> Iterator[None]:
    """Count the parameters that are made inside; PolicyError as soon as the saved ones cannot explain them.

    A configuration may claim layers of any width: the claim is refused while it is carried out, before the
    memory is filled with numbers.
    """
    from torch import nn

    sizes = _sizes(states)
    most, most_tensors = _COPIES * sum(sizes) + _SLACK_NUMBERS, _COPIES * len(sizes) + _SLACK_TENSORS
    made: list[int] = []

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            made.append(parameter.numel())
        if len(made) > most_tensors or sum(made) > most:
            raise PolicyError(
                f"its configuration asks for networks of more than {most} numbers in {most_tensors} arrays, "
                f"its weights are {sum(sizes)} in {len(sizes)}; save the model again"
            )

    handle = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _sizes(states: Any) -> list[int]:
    """How many numbers each tensor of a nested state holds."""
    import torch

    sizes, waiting = [], [states]
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            sizes.append(part.numel())
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, (list, tuple)):
            waiting += part
    return sizes
