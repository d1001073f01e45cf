"""Densities of continuous policies: total mass one, and the shares of draws that fall
where they say.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from koffline.data.transitions import Continuous
from koffline.errors import PolicyError
from koffline.policies import ContinuousPolicy, save_mlp_policy
from koffline.policy_specs import as_policy, load_policy
from tests import d3_models
from tests.reference_importance import gaussian_density
from tests.refusals import refused

BOX = Continuous(1, low=-1.0, high=2.0)
STATE = np.array([[0.3, -0.7]])


def mass_between(
    policy: ContinuousPolicy, state: np.ndarray, low: float, high: float
) -> float:
    """∫ density over [low, high] by 4001 midpoints, one action number."""
    edges = np.linspace(low, high, 4002)
    middles = ((edges[1:] + edges[:-1]) / 2.0)[:, None]
    logs = policy.log_density(np.repeat(state, len(middles), axis=0), middles)
    return float(np.exp(logs).sum() * (edges[1] - edges[0]))


def mass_at(policy: ContinuousPolicy, state: np.ndarray, action: float) -> float:
    return float(np.exp(policy.log_density(state, np.array([[float(action)]])))[0])


def check_draws(
    policy: ContinuousPolicy, state: np.ndarray, edges: list[float]
) -> None:
    """Shares of 20,000 draws between and at the edges are those of the density, within
    4 errors.
    """
    draws = policy.sample(np.repeat(state, 20_000, axis=0), np.random.default_rng(0))[
        :, 0
    ]
    inside = draws[(draws > edges[0] + 1e-5) & (draws < edges[-1] - 1e-5)]
    pairs = [
        (
            np.sum((inside >= low) & (inside < high)) / len(draws),
            mass_between(policy, state, low, high),
        )
        for low, high in itertools.pairwise(edges)
    ]
    for edge in (edges[0], edges[-1]):
        pairs.append(
            (np.mean(np.abs(draws - edge) < 1e-5), mass_at(policy, state, edge))
        )
    for share, expected in pairs:
        assert share == pytest.approx(
            expected, abs=4.0 * math.sqrt(max(expected, 1e-3) / len(draws))
        )


CUT_OFF = {"action_low": np.array([-1.0]), "action_high": np.array([2.0])}


def gaussian_file(folder: Path, **settings) -> str:
    """Its mean at STATE is −0.15."""
    path = folder / "policy.npz"
    layers = [(np.array([[0.5], [1.0]]), np.array([0.4]))]
    save_mlp_policy(path, layers, "gaussian", **{"std": np.array([0.9]), **settings})
    return str(path)


@pytest.mark.parametrize(
    "settings", [{"std": 0.9}, {"std": None, "log_std": np.log([0.9])}]
)
def test_gaussian_file_that_is_cut_off(tmp_path: Path, settings: dict) -> None:
    policy = load_policy(gaussian_file(tmp_path, **CUT_OFF, **settings), BOX, (2,))
    assert mass_at(policy, STATE, 0.7) == pytest.approx(
        gaussian_density(0.7, -0.15, 0.9)
    )
    assert mass_at(policy, STATE, -1.0) == pytest.approx(
        stats.norm.cdf(-1.0, -0.15, 0.9)
    )
    assert mass_at(policy, STATE, 2.0) == pytest.approx(stats.norm.sf(2.0, -0.15, 0.9))
    check_draws(policy, STATE, [-1.0, 0.0, 0.5, 1.0, 2.0])


@pytest.mark.parametrize("cut", [False, True])
def test_mixture_with_uniform(tmp_path: Path, cut: bool) -> None:
    box = CUT_OFF if cut else {}
    policy = load_policy(f"epsilon:0.3:{gaussian_file(tmp_path, **box)}", BOX, (2,))
    if cut:
        check_draws(policy, STATE, [-1.0, 0.0, 0.5, 1.0, 2.0])
    base = load_policy(gaussian_file(tmp_path, **box), BOX, (2,))
    inside = 0.3 / 3.0 + 0.7 * mass_at(base, STATE, 0.7)
    assert mass_at(policy, STATE, 0.7) == pytest.approx(inside)
    assert (
        load_policy(
            f"epsilon:1.0:{gaussian_file(tmp_path, **box)}", BOX, (2,)
        ).why_no_density
        == ""
    )


def test_policies_that_are_deterministic_or_choose_among_candidates_have_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "policy.npz"
    save_mlp_policy(path, [(np.ones((2, 1)), np.zeros(1))], "tanh")
    policy = load_policy(path, BOX, (2,))
    assert policy.why_no_density
    assert "deterministic" in policy.why_no_density
    with refused(PolicyError, "deterministic"):
        policy.log_density(STATE, np.zeros((1, 1)))
    assert as_policy(
        d3_models.build("BCQ", 2), d3_models.BOX, d3_models.SHAPE
    ).why_no_density


def noisy(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return observations[:, :1] + generator.standard_normal((len(observations), 1))


def test_functions_may_bring_their_own() -> None:
    assert "log_density" in as_policy(noisy, BOX, (2,)).why_no_density

    def with_density(
        observations: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        return noisy(observations, generator)

    with_density.log_density = lambda s, a: stats.norm.logpdf(a[:, 0], s[:, 0], 1.0)
    policy = as_policy(with_density, Continuous(1), (2,))
    assert mass_at(policy, STATE, 1.0) == pytest.approx(gaussian_density(1.0, 0.3, 1.0))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros((1, 2)), "shape"),
        (np.array([np.nan]), "nan"),
        (np.array([np.inf]), "inf"),
    ],
)
def test_wrong_densities_are_refused(answer: np.ndarray, message: str) -> None:
    policy = ContinuousPolicy(
        1,
        lambda o: o[:, :1],
        lambda o, generator: o[:, :1],
        density_function=lambda o, a: answer,
    )
    with refused(PolicyError, message):
        policy.log_density(STATE, np.zeros((1, 1)))


SQUASHED = ("SAC", "BEAR")
CUT = ("AWAC", "IQL", "CRR")


@pytest.mark.parametrize("algorithm", SQUASHED + CUT)
@pytest.mark.parametrize("scaled", [False, True])
def test_d3rlpy_density_is_that_of_its_draws(algorithm: str, scaled: bool) -> None:
    scalers = {
        "observation_scaler": d3_models.standard_scaler(),
        "action_scaler": d3_models.action_scaler(),
    }
    algo = d3_models.build(algorithm, 2, **(scalers if scaled else {}))
    policy = as_policy(algo, d3_models.BOX, d3_models.SHAPE)
    state = (
        np.array(d3_models.raw_observations()[:1])
        if scaled
        else np.full((1, 4), 0.3, dtype=np.float32)
    )
    states = np.repeat(state, 4000, axis=0)
    draws = policy.sample(states, np.random.default_rng(1))
    logs = policy.log_density(states, draws)
    assert np.isfinite(logs).all()
    assert (policy.cut_to is not None) == (algorithm in CUT)
    # A box around the draws: the mean of 1/density over draws inside it is its volume.
    low, high = np.quantile(draws, [0.3, 0.7], axis=0)
    inside = ((draws > low) & (draws < high)).all(axis=1)
    ratios = np.where(inside, np.exp(-logs), 0.0)
    assert ratios.mean() == pytest.approx(
        np.prod(high - low), abs=5.0 * ratios.std() / math.sqrt(4000)
    )


@pytest.mark.parametrize("squash", [True, False])
def test_trust_pcl_density_is_that_of_its_draws(squash: bool) -> None:
    from koffline.algos.trust_pcl import TrustPCLConfig

    algo = TrustPCLConfig(squash=squash).create()
    algo.create_impl(d3_models.SHAPE, 1)
    policy = as_policy(algo, Continuous(1), d3_models.SHAPE)
    state = np.array([[0.1, -0.2, 0.3, 0.0]], dtype=np.float32)
    check_draws(policy, state, [-1.0, -0.3, 0.3, 1.0])
