"""Candidates: each is trained and read out, for both kinds of actions; the clone; policy
iteration; the interpolation of shares.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import softmax

import koffline
from koffline.config import EvaluationSettings
from koffline.improvement import kernel_iteration, screening
from koffline.improvement.clone import fit_clone
from koffline.improvement.mixing import mixture_of, policy_of
from koffline.improvement.portfolio import (
    CONTINUOUS,
    DISCRETE,
    CandidateSpec,
    TrainingPart,
    specs_for,
    steps_for,
    train_candidate,
)
from koffline.improvement.scaling import LogScaling
from koffline.ope.networks.systems import systems_of_part
from koffline.ope.workspace import open_workspace
from koffline.policies import Mixture, MixturePart
from koffline.replicas import StackedMLP
from tests.exact_problems import EXACT_PROBLEMS
from tests.improve.worlds import GAMMA, chain_log

EXACT = chain_log(right=0.7, rows=3000)
CONTINUOUS_LOG = EXACT_PROBLEMS["linear_off_plane"](seed=0, n_rows=400).transitions


def part_of(log: koffline.Transitions) -> TrainingPart:
    scaling = LogScaling.of(log, GAMMA)
    clone = fit_clone(log, scaling, seed=0)
    return TrainingPart(log, scaling.scaled_log(log), scaling, clone, GAMMA)


@pytest.fixture(scope="module")
def discrete() -> TrainingPart:
    return part_of(EXACT.log)


@pytest.fixture(scope="module")
def continuous() -> TrainingPart:
    return part_of(CONTINUOUS_LOG)


@pytest.mark.parametrize("spec", DISCRETE, ids=lambda spec: spec.name)
def test_every_discrete_candidate_is_trained(
    spec: CandidateSpec, discrete: TrainingPart
) -> None:
    part = train_candidate(spec, discrete, steps=20, seed=3)
    states = np.asarray(EXACT.log.observations[:50])
    probabilities = part.probabilities(states)
    assert probabilities.shape == (50, 2)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    again = train_candidate(spec, discrete, steps=20, seed=3)
    np.testing.assert_array_equal(again.probabilities(states), probabilities)


@pytest.mark.parametrize("spec", CONTINUOUS, ids=lambda spec: spec.name)
def test_every_continuous_candidate_is_trained(
    spec: CandidateSpec, continuous: TrainingPart
) -> None:
    part = train_candidate(spec, continuous, steps=10, seed=3)
    states = np.asarray(CONTINUOUS_LOG.observations[:50])
    mixture = mixture_of(continuous.clone, part, 0.5)
    actions = mixture.sample(states, np.random.default_rng(0))
    assert actions.shape == (50, 2)
    scaled = continuous.scaling.scaled_actions(actions)
    assert np.abs(scaled).max() <= 1.0 + 1e-6
    assert part.deterministic


def test_the_portfolio_fits_the_actions() -> None:
    assert specs_for(EXACT.log) is DISCRETE
    assert specs_for(CONTINUOUS_LOG) is CONTINUOUS
    for specs in (DISCRETE, CONTINUOUS):
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names)
    assert steps_for(100) == 1000
    assert steps_for(10**6) == 4000


def test_the_clone_acts_as_the_log(
    discrete: TrainingPart, continuous: TrainingPart
) -> None:
    states = EXACT.world.coordinates[1:4].astype(np.float32)
    # two standard errors of a share in 900 rows, and what the network adds
    np.testing.assert_allclose(
        discrete.clone.part.probabilities(states)[:, 1], 0.7, atol=0.08
    )
    assert (discrete.clone.mode.probabilities(states)[:, 1] == 1.0).all()
    logged = np.asarray(CONTINUOUS_LOG.actions)
    drawn = continuous.clone.part.network.sample(
        CONTINUOUS_LOG.observations, np.random.default_rng(0)
    )
    np.testing.assert_allclose(drawn.std(axis=0), logged.std(axis=0), rtol=0.2)


def test_scaled_and_native_units_agree(continuous: TrainingPart) -> None:
    scaling = continuous.scaling
    layers = continuous.clone.layers
    states = CONTINUOUS_LOG.observations
    values = scaling.inputs(states)
    for number, (weight, bias) in enumerate(layers):
        if number:
            values = np.maximum(values, 0.0)
        values = values @ weight + bias
    native = scaling.clipped(scaling.native_layers(layers)).mean(states)
    expected = np.clip(values, -1.0, 1.0) * scaling.half + scaling.centre
    np.testing.assert_allclose(native, expected, atol=1e-9)
    scaled = scaling.scaled_log(CONTINUOUS_LOG)
    sizes = np.square(scaled.returns_to_go(GAMMA))
    assert np.sqrt(sizes.mean()) == pytest.approx(10.0)


def test_a_mean_of_networks_is_one_network() -> None:
    stack = StackedMLP.initialise((3, 5, 4, 2), seeds=(1, 2, 3), dtype=torch.float64)
    rows = np.random.default_rng(0).normal(size=(20, 3))
    expected = stack.forward(torch.as_tensor(rows)).mean(dim=0).numpy()
    values = rows
    for number, (weight, bias) in enumerate(kernel_iteration._mean_layers(stack)):
        if number:
            values = np.maximum(values, 0.0)
        values = values @ weight + bias
    np.testing.assert_allclose(values, expected, atol=1e-12)


def test_tilting_multiplies_the_clone_by_the_exponential_of_values() -> None:
    first = StackedMLP.initialise((3, 5, 4, 2), seeds=(1,), dtype=torch.float64)
    second = StackedMLP.initialise((3, 6, 7, 2), seeds=(2,), dtype=torch.float64)
    rows = np.random.default_rng(0).normal(size=(20, 3))
    logits = first.forward(torch.as_tensor(rows))[0].numpy()
    values = second.forward(torch.as_tensor(rows))[0].numpy()
    tilted = kernel_iteration._tilted(
        kernel_iteration._mean_layers(first), kernel_iteration._mean_layers(second), 0.5
    )
    policy = kernel_iteration._on_scaled(tilted)
    np.testing.assert_allclose(
        policy.probabilities(rows), softmax(logits + values / 0.5, axis=1), atol=1e-12
    )


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_systems_of_a_mixture_are_interpolated_exactly(
    share: float, discrete: TrainingPart
) -> None:
    log = EXACT.log
    clone = policy_of(Mixture((discrete.clone.part,), (1.0,)), "clone", log)
    candidate: MixturePart = discrete.clone.mode
    settings = EvaluationSettings(
        gamma=GAMMA, steps=30, full_replicas=1, resampled_replicas=2
    )
    policy = policy_of(Mixture((candidate,), (1.0,)), "candidate", log)
    mixed = policy_of(mixture_of(discrete.clone, candidate, share), "mixed", log)
    with open_workspace(log, policy, settings) as workspace:
        fitted = workspace.fitted

        def systems(of: koffline.policies.Policy) -> object:
            return systems_of_part(
                fitted.record.network,
                fitted.instruments,
                fitted.resampling,
                GAMMA,
                fitted.cuts_by_step,
                workspace.problem_of(of),
            )

        direct = systems(mixed)
        interpolated = screening._interpolated(systems(clone), fitted.systems, share)
    # probabilities are rounded to single precision in the rows of the problem
    rounded = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(interpolated.system, direct.system, **rounded)
    torch.testing.assert_close(
        interpolated.starts.features, direct.starts.features, **rounded
    )


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_a_weighted_log_is_learnt_from_without_a_warning(actions: str) -> None:
    """The log's own arrays cannot be written to, of which torch warns once."""
    log = chain_log(right=0.6, rows=300).log
    if actions == "continuous":
        moves = np.linspace(-0.9, 0.9, len(log))[:, None]
        log = log.replace(actions=moves, action_space=koffline.Continuous(1, -1.0, 1.0))
    log = log.replace(weights=np.linspace(0.5, 2.0, len(log)))
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        clone = fit_clone(log, LogScaling.of(log, GAMMA), seed=0)
    finally:
        torch.set_warn_always(before)
    assert clone.step_seconds > 0.0
