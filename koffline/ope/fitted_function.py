"""koffline's own fitted networks as a value function of any observations and actions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.errors import KofflineError
from koffline.fitting import Progress, threads
from koffline.ope.ensemble import draw_ensemble
from koffline.ope.fitted import FittedValues, fit_value_functions
from koffline.ope.problem import EvaluationProblem, prepare_problem
from koffline.ope.provenance import Provenance
from koffline.ope.value_functions import ACTION, ValueFunction
from koffline.policies import Policy
from koffline.replicas import StackedMLP

HEADS = ("kloss", "fqe", "lstd")


@dataclass(frozen=True, eq=False)
class NetworkValues:
    """Mean of Q(s, a) over a stack of networks, within the bounds of any discounted return of its log."""

    network: StackedMLP
    problem: EvaluationProblem  # only its units: the rows are left out

    @torch.no_grad()
    def __call__(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """(M,) in units of the return."""
        flat = self.network.flat
        inputs = torch.as_tensor(self.problem.standardise(observations, actions))
        outputs = self.network.forward(inputs.to(flat)).mean(dim=0).cpu().double().numpy()  # (M, n)
        if self.problem.n_actions is None:
            values = outputs[:, 0]
        else:
            values = np.take_along_axis(outputs, np.asarray(actions)[:, None], axis=1)[:, 0]
        return np.clip(values, *self.problem.value_bounds) * self.problem.reward_scale


def fitted_value_function(
    fitted: FittedValues, transitions: Transitions, head: str | None = None
) -> ValueFunction:
    """The mean network of a head (the chosen one when None), fitted to ``transitions``."""
    name = head or fitted.head
    kept = np.flatnonzero(fitted.alive[: fitted.ensemble.full]).tolist()
    if not kept:
        raise KofflineError(f"{fitted.describe_diverged()}; lower learning_rate or look for outliers")
    network = fitted.heads[name].select(kept)
    return ValueFunction(
        name=name,
        kind=ACTION,
        function=NetworkValues(network, fitted.problem.without_rows()),
        action_space=transitions.action_space,
        observation_shape=transitions.observation_shape,
        trained_on=Provenance.of(transitions),
    )


def fit_value_function(
    transitions: Transitions,
    policy: Policy,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> ValueFunction:
    """Q^π by the estimator of the settings, kloss or fqe, from the whole log; no replicas are resampled."""
    with torch.no_grad(), threads(settings.threads):
        generator = np.random.default_rng(settings.seed)
        problem = prepare_problem(transitions, policy, settings.gamma, settings.action_draws, generator)
        ensemble = draw_ensemble(problem, settings.full_replicas, 0, settings.seed)
        fitted = fit_value_functions(problem, ensemble, settings, progress)
        return fitted_value_function(fitted, transitions)
