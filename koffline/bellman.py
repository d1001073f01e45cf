"""Bellman residuals, unreduced: (N,) or, with a replica axis, (R, N).

A residual is what the Bellman equation lacks: δ = reward + discount · value of what follows − value.
Terminations enter once, through the discount. No function here detaches: gradients flow through both values.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from koffline.errors import ConfigError, DataError


def discount(
    gamma: float, terminated: Shaped[Tensor, " row"], interval: int | Shaped[Tensor, " row"] = 1
) -> Float[Tensor, " row"]:
    """gamma ** interval where the episode goes on, zero where it terminated; float64.

    `interval` counts the steps between a row and its next row. A time limit is no termination.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma is {gamma}; give a discount factor in [0, 1]")
    going_on = 1.0 - terminated.to(torch.float64)
    power = gamma ** (interval.to(torch.float64) if isinstance(interval, Tensor) else interval)
    return going_on * power


def state_value_residual(
    reward: Float[Tensor, "*rewards row"],
    discount: Float[Tensor, "*discounts row"],
    value: Float[Tensor, "*replica row"],
    next_value: Float[Tensor, "*replica row"],
) -> Float[Tensor, "*replica row"]:
    """δ = r + discount · V(s') − V(s), for logs whose actions are the evaluated policy's.

    (Feng et al. 2019, equ:rg)
    """
    _check_rows(reward=reward, discount=discount, value=value, next_value=next_value)
    return reward + discount * next_value - value


def action_value_residual(
    reward: Float[Tensor, " row"],
    discount: Float[Tensor, " row"],
    action_values: Float[Tensor, "*replica row action"],
    actions: Int[Tensor, " row"],
    next_action_values: Float[Tensor, "*replica row action"],
    next_probabilities: Float[Tensor, "row action"],
) -> Float[Tensor, "*replica row"]:
    """δ = r + discount · Σ_a' π(a'|s') Q(s', a') − Q(s, a), right whatever policy chose the logged actions.

    The expectation is inside the residual, hence exact for discrete actions.
    (Feng et al. 2019, equ:ourloss)
    """
    if actions.ndim != 1 or action_values.shape[-2] != len(actions):
        raise DataError(
            f"action_values has shape {tuple(action_values.shape)}, actions {tuple(actions.shape)}; "
            "give (…, N, n_actions) and (N,)"
        )
    index = actions.long().expand(action_values.shape[:-1]).unsqueeze(-1)
    value = action_values.gather(-1, index).squeeze(-1)  # Q(s_i, a_i), (…, N)
    next_value = (next_probabilities * next_action_values).sum(dim=-1)
    return state_value_residual(reward, discount, value, next_value)


def path_consistency_residual(
    reward: Float[Tensor, "*rewards row"],
    discount: Float[Tensor, "*discounts row"],
    value: Float[Tensor, "*replica row"],
    next_value: Float[Tensor, "*replica row"],
    log_probability: Float[Tensor, "*replica row"],
    entropy_coef: float,
) -> Float[Tensor, "*replica row"]:
    """δ = r + discount · V(s') − entropy_coef · log π(a|s) − V(s), zero at the entropy-smoothed optimum.

    For paths of d steps pass discounted sums of reward and log probability, and discount = γ^d (zero after a
    termination). Gradients flow through V(s), V(s') and log π.
    (Feng et al. 2019, equ:bvsopt)
    """
    _check_rows(value=value, log_probability=log_probability)
    return state_value_residual(reward - entropy_coef * log_probability, discount, value, next_value)


def _check_rows(**columns: Tensor) -> None:
    """Equal row counts and replica counts: (N, 1) against (N,) would broadcast to (N, N) in silence."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    ends = {shape[-1:] for shape in shapes.values()}
    fronts = {shape[:-1] for shape in shapes.values()} - {()}
    if len(ends) != 1 or () in ends or len(fronts) > 1:
        raise DataError(f"residual received shapes {shapes}; give (N,) or (R, N) with equal N and R")
