"""Mixtures of networks: probabilities, files, and exports that agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import koffline
from koffline.errors import PolicyError
from koffline.improvement.exports import export_mixture
from koffline.policies import (
    Mixture,
    MixturePart,
    read_mixture,
    save_mixture_policy,
)
from koffline.policies.builtin import Mlp, softmax
from koffline.policies.mixtures import mixture_policy

STATES = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
BOX = {"action_low": np.array([-2.0, -1.0]), "action_high": np.array([2.0, 1.0])}


def network(seed: int, output: str, outputs: int = 2, **settings: object) -> Mlp:
    generator = np.random.default_rng(seed)
    return Mlp(
        weights=(generator.normal(size=(3, 8)), generator.normal(size=(8, outputs))),
        biases=(generator.normal(size=8), generator.normal(size=outputs)),
        output=output,
        observation_mean=np.array([0.1, 0.2, 0.3]),
        observation_std=np.array([1.0, 2.0, 0.5]),
        **settings,
    )


CLONE = MixturePart(network(1, "softmax", 4))
GREEDY = MixturePart(network(2, "argmax", 4))
GATED = MixturePart(network(2, "argmax", 4), network(3, "softmax", 4), 0.5)
SOFT = MixturePart(network(4, "softmax", 4, temperature=0.3))
NOISY = MixturePart(network(5, "gaussian", std=np.array([0.3, 0.2]), **BOX))
SQUASHED = MixturePart(network(6, "tanh", **BOX))
CLIPPED = MixturePart(network(7, "identity", **BOX))


def space_of(mixture: Mixture) -> koffline.Discrete | koffline.Continuous:
    if mixture.is_discrete:
        return koffline.Discrete(4)
    return koffline.Continuous(2, -2.0, 2.0)


def policy_of(mixture: Mixture) -> koffline.policies.Policy:
    return mixture_policy(mixture, "mixture", space_of(mixture), (3,))


@pytest.mark.parametrize("part", [GREEDY, GATED, SOFT])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_probabilities_are_the_shares_of_both(part: MixturePart, share: float) -> None:
    mixture = Mixture((CLONE, part), (1.0 - share, share))
    clone = softmax(CLONE.network.last_layer(STATES))
    expected = (1.0 - share) * clone + share * part.probabilities(STATES)
    np.testing.assert_allclose(policy_of(mixture).probabilities(STATES), expected)


def test_a_gate_leaves_out_unlikely_actions() -> None:
    likeliness = softmax(GATED.gate.last_layer(STATES))
    chosen = GATED.probabilities(STATES).argmax(axis=1)
    taken = likeliness[np.arange(len(STATES)), chosen]
    assert (taken >= 0.5 * likeliness.max(axis=1)).all()
    ungated = GREEDY.probabilities(STATES).argmax(axis=1)
    assert (chosen != ungated).any()


@pytest.mark.parametrize("part", [SQUASHED, CLIPPED])
def test_continuous_draws_are_each_part_s_in_its_share(part: MixturePart) -> None:
    mixture = Mixture((NOISY, part), (0.4, 0.6))
    states = np.repeat(STATES[:1], 4000, axis=0)
    actions = mixture.sample(states, np.random.default_rng(0))
    is_of_part = np.isclose(actions, part.network.mean(STATES[:1])).all(axis=1)
    assert is_of_part.mean() == pytest.approx(0.6, abs=0.04)  # five standard errors
    rest = actions[~is_of_part].mean(axis=0)
    np.testing.assert_allclose(rest, NOISY.network.mean(STATES[:1])[0], atol=0.1)
    again = mixture.sample(states, np.random.default_rng(0))
    np.testing.assert_array_equal(actions, again)


MIXTURES = {
    "discrete": Mixture((CLONE, GATED), (0.5, 0.5)),
    "soft": Mixture((CLONE, SOFT), (0.75, 0.25)),
    "alone": Mixture((GREEDY,), (1.0,)),
    "continuous": Mixture((NOISY, SQUASHED), (0.5, 0.5)),
    "deterministic": Mixture((CLIPPED,), (1.0,)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_file_holds_the_mixture(name: str, tmp_path: Path) -> None:
    mixture = MIXTURES[name]
    path = tmp_path / "policy.npz"
    save_mixture_policy(path, mixture)
    first = path.read_bytes()
    save_mixture_policy(path, read_mixture(path))
    assert path.read_bytes() == first
    space = space_of(mixture)
    policy = koffline.load_policy(path, space, (3,))
    if mixture.is_discrete:
        np.testing.assert_array_equal(
            policy.probabilities(STATES), policy_of(mixture).probabilities(STATES)
        )
    else:
        drawn = [
            p.sample(STATES, np.random.default_rng(1))
            for p in (policy, policy_of(mixture))
        ]
        np.testing.assert_array_equal(drawn[0], drawn[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["discrete", "soft", "alone", "deterministic"])
def test_exports_act_as_the_mixture(name: str, tmp_path: Path) -> None:
    mixture = MIXTURES[name]
    for path in export_mixture(mixture, tmp_path):
        if path.suffix == ".onnx":
            pytest.importorskip("onnxruntime")
        space = space_of(mixture)
        policy = koffline.load_policy(path, space, (3,))
        if mixture.is_discrete:
            values = policy.probabilities(STATES)
            expected = mixture.discrete(STATES)
        else:
            values = policy.mean(STATES)
            expected = mixture.mean(STATES)
        np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1, 1)])
def test_exports_take_observations_as_the_log_has_them(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    mixture = MIXTURES["discrete"]
    states = STATES.reshape((-1, *shape))
    expected = mixture.discrete(STATES)
    for path in export_mixture(mixture, tmp_path, shape):
        if path.suffix == ".onnx":
            pytest.importorskip("onnxruntime")
        policy = koffline.load_policy(path, space_of(mixture), shape)
        np.testing.assert_allclose(policy.probabilities(states), expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_an_exported_continuous_mixture_draws(tmp_path: Path) -> None:
    import torch

    mixture = MIXTURES["continuous"]
    path = next(p for p in export_mixture(mixture, tmp_path) if p.suffix == ".pt")
    module = torch.jit.load(str(path))
    states = torch.as_tensor(np.repeat(STATES[:1], 4000, axis=0))
    torch.manual_seed(0)
    actions = module(states).numpy()
    mean = SQUASHED.network.mean(STATES[:1])
    is_of_part = np.isclose(actions, mean, atol=1e-5).all(axis=1)
    assert is_of_part.mean() == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shares": (0.5,)}, "shares are"),
        ({"shares": (0.9, 0.2)}, "with sum 1"),
        ({"shares": (-0.5, 1.5)}, "shares are"),
        ({"parts": (CLONE, SQUASHED)}, "differ in inputs"),
        ({"parts": (CLONE, MixturePart(network(1, "argmax", 3)))}, "differ in inputs"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(change: dict, words: str) -> None:
    mixture = Mixture((CLONE, GREEDY), (0.5, 0.5))
    with pytest.raises(PolicyError, match=words):
        dataclasses.replace(mixture, **change)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "shares missing"),
        ({"shares": np.array([1.0])}, "output missing"),
        ({"shares": np.array([1.0]), "surplus": np.zeros(2)}, "missing"),
        ({"shares": np.full(100, 0.01)}, "at most 64"),
    ],
)
def test_damaged_files_are_refused(arrays: dict, words: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.npz"
    np.savez(path, format="koffline-mixture-policy", version=1, **arrays)
    with pytest.raises(PolicyError, match=words):
        koffline.load_policy(path, koffline.Discrete(4), (3,))


def test_a_gate_of_another_size_is_refused() -> None:
    with pytest.raises(PolicyError, match="gate"):
        MixturePart(network(1, "argmax", 4), network(1, "softmax", 3), 0.3)
    with pytest.raises(PolicyError, match="gate"):
        MixturePart(network(1, "tanh", 2, **BOX), network(1, "softmax", 2), 0.3)
    with pytest.raises(PolicyError, match="gate_ratio"):
        MixturePart(network(1, "argmax", 4), network(1, "softmax", 4), 1.3)
