"""The two policy kinds, their output checks, the built-ins, callables, and
`package.module:name`.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from koffline.data.transitions import Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies import ContinuousPolicy, DiscretePolicy
from koffline.policy_specs import as_policy, load_policy
from tests.refusals import one_line


def rows(n: int, width: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, width))


def greedy(observations: np.ndarray) -> np.ndarray:
    return observations.argmax(axis=1)


def push(observations: np.ndarray) -> np.ndarray:
    return np.tanh(observations[:, :2])


def discrete(output: object) -> DiscretePolicy:
    return DiscretePolicy(3, lambda observations: output, "test")


def test_probabilities_are_renormalised_in_float64():
    raw = np.array([[0.2, 0.3, 0.50005], [0.0, -5e-7, 1.0]], np.float32)
    result = discrete(raw).probabilities(rows(2))
    assert result.dtype == np.float64
    np.testing.assert_allclose(result.sum(axis=1), 1.0, atol=1e-15)
    np.testing.assert_allclose(result[0], raw[0] / raw[0].sum(dtype=float), rtol=1e-6)
    np.testing.assert_array_equal(result[1], [0, 0, 1])
    for indices in ([2, 0], np.array([2.0, 0.0], np.float32), torch.tensor([2, 0])):
        np.testing.assert_array_equal(
            discrete(indices).probabilities(rows(2)), [[0, 0, 1], [1, 0, 0]]
        )


@pytest.mark.parametrize(
    "as_output", [lambda p: p, lambda p: p.float(), lambda p: p.double().numpy()]
)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_probabilities_of_half_precision_are_rescaled(kind, as_output):
    """Their sums are off by what the type rounds, also where they were converted after
    the softmax.
    """
    logits = torch.randn((500, 3), generator=torch.Generator().manual_seed(0))
    half = torch.softmax(logits.to(kind), dim=-1)
    assert (
        half.double().sum(dim=1) - 1.0
    ).abs().max() > 1e-4  # a float32 softmax is ten times as near
    result = discrete(as_output(half)).probabilities(rows(500))
    np.testing.assert_allclose(result.sum(axis=1), 1.0, atol=1e-15)
    np.testing.assert_allclose(
        result, torch.softmax(logits.double(), dim=-1), rtol=0.05
    )


@pytest.mark.parametrize(
    ("is_discrete", "output", "words"),
    [
        (
            True,
            np.array([[2.0, -1.0, 0.3]]),
            ["row 0", "sums to 1.3", "softmax(logits)", "argmax"],
        ),
        (True, np.array([[0.7, 0.4, -0.1]]), ["contains -0.1", "softmax"]),
        (True, np.array([[0.5, 0.5, np.nan]]), ["row 0", "not finite", "weights"]),
        (True, np.array([3]), ["row 0", "is 3", "0..2"]),
        (True, np.array([0.5]), ["is 0.5", "whole numbers"]),
        (True, np.array([[0.5, 0.5]]), ["shape (1, 2)", "3 actions", "(1, 3)"]),
        (True, None, ["shape ()", "return probabilities"]),
        (False, np.zeros((1, 2)), ["(1, 3)"]),
        (False, np.array([[0.0, np.inf, 0.0]]), ["not finite"]),
        (False, np.full((1, 3), 0.5 + 1j), ["complex numbers"]),
        (
            True,
            np.ma.masked_array(np.full((1, 3), 1 / 3), mask=True),
            ["masked", "3 of its 3 values"],
        ),
        (
            False,
            np.ma.masked_array(np.zeros((1, 3)), mask=[[1, 0, 0]]),
            ["masked", "1 of its 3 values"],
        ),
        (
            True,
            np.array([[0.3, 0.4, 0.301]]),
            ["sums to 1.001", "divide them by their sum"],
        ),
    ],
)
def test_bad_output_is_one_line_with_the_remedy(is_discrete, output, words):
    continuous = ContinuousPolicy(3, lambda observations: output, name="test")
    with one_line(PolicyError, "test", *words):
        (discrete(output).probabilities if is_discrete else continuous.mean)(rows(1))


def test_what_is_no_policy_or_fails_is_named():
    with pytest.raises(PolicyError, match="is not a policy; give a d3rlpy"):
        as_policy({"a": 1}, Discrete(2), (3,))

    def broken(observations):
        raise ValueError("first\nsecond")

    with pytest.raises(
        PolicyError, match=r"^broken: .*\(4, 3\) \(ValueError: first second\); check"
    ):
        as_policy(broken, Discrete(2), (3,)).probabilities(rows(4))


def test_samples_follow_the_probabilities_and_never_take_an_impossible_action():
    probabilities = np.array([0.0, 0.2, 0.0, 0.8, 0.0])
    policy = DiscretePolicy(
        5, lambda observations: np.tile(probabilities, (len(observations), 1))
    )
    observations = rows(20_000, 1)
    draws = policy.sample(observations, np.random.default_rng(0))
    counts = np.bincount(draws, minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    # five standard errors of a binomial proportion
    assert abs(counts[1] / 20_000 - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 20_000)
    np.testing.assert_array_equal(
        draws, policy.sample(observations, np.random.default_rng(0))
    )


@pytest.mark.parametrize(
    "spec", ["uniform", "epsilon:0.2:tests.test_policies_base:push"]
)
def test_uniform_parts_need_a_finite_box(spec):
    with pytest.raises(
        PolicyError, match=r"finite bounds.*declare them \(--continuous"
    ):
        load_policy(spec, Continuous(2), (3,))


def test_epsilon_mixes_discrete_probabilities_exactly():
    policy = load_policy(
        "epsilon:0.3:tests.test_policies_base:greedy", Discrete(3), (3,)
    )
    observations = rows(7)
    expected = np.full((7, 3), 0.1)
    expected[np.arange(7), observations.argmax(axis=1)] += 0.7
    np.testing.assert_allclose(policy.probabilities(observations), expected, atol=1e-15)
    assert policy.name == "epsilon:0.3:tests.test_policies_base:greedy"


def test_a_callable_with_a_generator_is_stochastic():
    def noisy(observations, generator):
        return observations[:, :2] + generator.normal(size=(len(observations), 2))

    policy = as_policy(noisy, Continuous(2), (3,))
    observations = rows(2000)
    assert not policy.deterministic
    draws = policy.sample(observations, np.random.default_rng(5))
    np.testing.assert_array_equal(
        draws, policy.sample(observations, np.random.default_rng(5))
    )
    assert (draws != policy.sample(observations, np.random.default_rng(6))).all()
    with pytest.raises(PolicyError, match="draw actions by sample"):
        policy.mean(observations)


def test_a_torch_module_is_called_without_gradients_in_evaluation_mode():
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.Dropout(0.9), torch.nn.Softmax(dim=1)
    ).double()
    policy = as_policy(net, Discrete(2), (3,))
    observations = rows(50)
    observations.flags.writeable = False
    result = policy.probabilities(observations)
    assert net.training, "the user's net is left as it was"
    with torch.no_grad():
        expected = torch.softmax(net[0](torch.tensor(observations)), dim=1).numpy()
    np.testing.assert_allclose(result, expected, atol=1e-12)


def test_what_a_policy_writes_into_its_input_is_not_written_into_the_log():
    log = rows(50)
    before = rows(50)
    policy = as_policy(lambda x: torch.as_tensor(x).zero_()[:, 0], Discrete(2), (3,))
    assert policy.probabilities(log)[:, 0].all()
    np.testing.assert_array_equal(log, before)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder that is the current directory and not on sys.path; its modules are
    forgotten afterwards.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    )
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def test_a_function_in_the_current_directory(project):
    (project / "mine_for_test.py").write_text(
        "def act(s):\n    return (s[:, 0] > 0).astype(int)\n"
    )
    path_before = list(sys.path)
    policy = load_policy("mine_for_test:act", Discrete(2), (1,))
    assert sys.path == path_before
    np.testing.assert_array_equal(
        policy.probabilities(np.array([[1.0], [-1.0]])), [[0, 1], [1, 0]]
    )


@pytest.mark.parametrize(
    ("text", "spec", "words"),
    [
        (
            "",
            "no_such_module_here:act",
            "no_such_module_here.*install it or run from the folder",
        ),
        ("", "mine_for_test.py:act", "named without .py"),
        (
            "def act(x): pass",
            "mine_for_test:atc",
            r"has no 'atc'; did you mean 'act'\?",
        ),
        ("class Act: pass", "mine_for_test:Act", "this is a class.*give an instance"),
        (
            "raise RuntimeError('two\\nlines')",
            "mine_for_test:act",
            "RuntimeError: two lines.*importable",
        ),
        (
            "",
            "missing.d3",
            r"there is no such file; a policy is a d3rlpy \.d3.*uniform",
        ),
        ("", "", "there is no such file"),
        ("", Path("uniform"), "no such file"),
        ("", "unifrom", "a policy is .*'uniform'"),
        ("", Path(), "this is a folder"),
        ("", "epsilon:1.5:uniform", "epsilon"),
        (
            "",
            "epsilon:0.1:" * 10_000 + "uniform",
            "names more than 3 layers of epsilon",
        ),
    ],
)
def test_what_gives_no_policy_is_refused_in_one_line(project, text, spec, words):
    (project / "mine_for_test.py").write_text(text)
    path_before = list(sys.path)
    with one_line(PolicyError, match=words) as caught:
        load_policy(spec, Discrete(2), (1,))
    assert len(str(caught.value)) < 1000
    assert sys.path == path_before
