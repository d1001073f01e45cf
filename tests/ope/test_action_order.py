"""The order of named actions: natural, said for every policy that returns an array, and
doubted if wrong.
"""

import json
import warnings

import numpy as np
import polars as pl
import pytest
import torch
from scipy.special import softmax

import koffline
from koffline.data.columns import in_natural_order
from koffline.data.sources import convert_to_shards, open_transitions, write_transitions
from koffline.errors import chance
from koffline.ope.assumptions.action_order import find_other_order
from koffline.policies import DiscretePolicy, save_mlp_policy
from koffline.policy_specs import as_policy, load_policy
from tests.ope.problems import QUICK
from tests.refusals import succeed

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

COUNT = 12
BANNERS = [f"banner_{number}" for number in range(COUNT)]
WEIGHTS = np.random.default_rng(1).normal(size=(2, COUNT))
MAPPING = {"observations": "x_*", "action": "a", "reward": "r", "one_step": True}


def logger(states: np.ndarray) -> np.ndarray:
    return softmax(states @ WEIGHTS, axis=1)


def by_letters(states: np.ndarray) -> np.ndarray:
    """The same policy, its columns in the order of letters."""
    return logger(states)[:, [BANNERS.index(name) for name in sorted(BANNERS)]]


def table(path, rows: int = 3000, names=BANNERS, seed: int = 0):
    """A log of banners; each has its own chance of a click."""
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(rows, 2))
    actions = (
        generator.random((rows, 1)) >= logger(states).cumsum(axis=1)[:, :-1]
    ).sum(axis=1)
    clicks = generator.random(rows) < np.linspace(0.05, 0.95, COUNT)[actions]
    columns = {
        "x_0": states[:, 0],
        "x_1": states[:, 1],
        "a": [names[a] for a in actions],
        "r": clicks * 1,
    }
    frame = pl.DataFrame(columns)
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["b_10", "b_2", "b_1"], ["b_1", "b_2", "b_10"]),
        (["10", "9", "-1", "0.5"], ["-1", "0.5", "9", "10"]),
        (["a1", "a01", "a001"], ["a001", "a01", "a1"]),
        (["right", "left"], ["left", "right"]),
        (["x", "x2", "x10y", "x10"], ["x", "x2", "x10", "x10y"]),
        (["1e3", "nan", "20"], in_natural_order(["20", "nan", "1e3"])),
    ],
)
def test_natural_order_is_that_of_numbers_and_does_not_depend_on_the_order_given(
    given, expected
) -> None:
    assert in_natural_order(given) == in_natural_order(reversed(given)) == expected


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_tables_files_and_shards_number_actions_in_natural_order(
    name, tmp_path
) -> None:
    path = table(tmp_path / name)
    log = open_transitions(path, mapping=MAPPING)
    assert log.metadata.extra["action_names"] == BANNERS
    assert any("natural order" in note for note in log.metadata.notes)
    for target in ("copy.hdf5", "copy.npz", "copy.parquet"):
        write_transitions(log, tmp_path / target)
        assert (
            open_transitions(tmp_path / target).metadata.extra["action_names"]
            == BANNERS
        )
    shards = convert_to_shards(path, tmp_path / "shards", 500, mapping=MAPPING)
    assert shards.metadata.extra["action_names"] == BANNERS
    np.testing.assert_array_equal(shards.load().actions, log.actions)


def test_several_files_share_one_natural_order(tmp_path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    table(folder / "part_2.parquet", rows=40, seed=2)
    table(folder / "part_10.parquet", rows=400, seed=3)
    assert (
        open_transitions(folder, mapping=MAPPING).metadata.extra["action_names"]
        == BANNERS
    )


def test_an_order_that_a_mapping_or_a_file_fixes_is_kept(tmp_path) -> None:
    path = table(tmp_path / "log.csv")
    letters = sorted(BANNERS)
    log = open_transitions(path, mapping={**MAPPING, "action_names": letters})
    write_transitions(log, tmp_path / "kept.hdf5")
    for source in (log, open_transitions(tmp_path / "kept.hdf5")):
        assert source.metadata.extra["action_names"] == letters
        assert not any("natural order" in note for note in source.metadata.notes)


def test_inspect_lists_actions_in_natural_order(tmp_path) -> None:
    result = json.loads(
        succeed("data", "inspect", table(tmp_path / "log.csv", rows=400), "--json")
    )
    assert result["mapping"]["action_names"] == BANNERS


class Net(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.softmax(states.repeat(1, 6), dim=1)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return open_transitions(
        table(tmp_path_factory.mktemp("log") / "log.csv"), mapping=MAPPING
    )


def _torchscript(folder):
    with warnings.catch_warnings():  # torch's own
        warnings.filterwarnings(
            "ignore", message=".*torch.jit.*", category=DeprecationWarning
        )
        torch.jit.script(Net()).save(str(folder / "net.pt"))
    return folder / "net.pt"


def _npz(folder):
    weights = np.zeros((2, COUNT))
    save_mlp_policy(folder / "net.npz", [(weights, np.zeros(COUNT))], "softmax")
    return folder / "net.npz"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: logger,
        lambda folder: DiscretePolicy(COUNT, logger),
        lambda folder: Net(),
        _npz,
        _torchscript,
    ],
)
def test_a_note_says_the_order_for_every_policy_that_returns_an_array(
    make, log, tmp_path
) -> None:
    policy = make(tmp_path)
    policy = as_policy(
        policy, log.action_space, log.observation_shape, features=log.metadata.features
    )
    note = f"array columns are read as: {', '.join(BANNERS)}"
    assert policy.notes.count(note) == 1
    again = as_policy(
        policy, log.action_space, log.observation_shape, features=log.metadata.features
    )
    assert again.notes == policy.notes
    uniform = load_policy(
        "uniform", log.action_space, log.observation_shape, log.metadata.features
    )
    assert note not in uniform.notes


def test_the_order_stands_in_the_report_and_in_the_json(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "banner_policy.py").write_text(
        "import numpy as np\ndef first(states):\n    return"
        " np.eye(12)[np.zeros(len(states), int)]\n"
    )
    options = (
        "--observations=x_*",
        "--action=a",
        "--reward=r",
        "--one-step",
        "--set=steps=20",
    )
    command = (
        "evaluate",
        table(tmp_path / "log.csv"),
        *options,
        "--policy",
        "banner_policy:first",
    )
    printed = json.loads(succeed(*command, "--json", "--out", tmp_path / "out"))
    assert printed["diagnostics"]["action_names"] == BANNERS
    assert f"array columns are read as: {', '.join(BANNERS)}" in printed["notes"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count(", ".join(BANNERS)) >= 2


@pytest.mark.parametrize(
    ("policy", "is_doubted"),
    [
        (by_letters, True),
        (
            lambda states: (
                by_letters(states) ** 2
                / (by_letters(states) ** 2).sum(axis=1, keepdims=True)
            ),
            True,
        ),
        (logger, False),
        (lambda states: np.roll(logger(states), 1, axis=1), False),
        (lambda states: logger(states)[:, ::-1], False),
        (lambda states: softmax(-(states @ WEIGHTS), axis=1), False),
        (lambda states: np.full((len(states), COUNT), 1.0 / COUNT), False),
    ],
)
def test_a_policy_in_the_order_of_letters_is_doubted_and_the_remedy_mends_it(
    policy, is_doubted, tmp_path
) -> None:
    path = table(tmp_path / "log.csv")
    log = open_transitions(path, mapping=MAPPING)
    options = {**QUICK, "hidden_units": (8,), "instruments": 40}
    estimate = koffline.evaluate(log, policy, **options)
    reasons = [
        reason.text for reason in estimate.verdict.reasons if reason.kind == "actions"
    ]
    assert bool(reasons) == is_doubted
    if not is_doubted:
        return
    assert "the order of letters (banner_0, banner_1, banner_10" in reasons[0]
    assert "list that order as action_names" in reasons[0]
    mended = open_transitions(
        path, mapping={**MAPPING, "action_names": sorted(BANNERS)}
    )
    again = koffline.evaluate(mended, policy, **options)
    assert not again.verdict.because("actions")

    def named(states: np.ndarray) -> pl.DataFrame:
        return pl.DataFrame(dict(zip(sorted(BANNERS), policy(states).T, strict=True)))

    assert not koffline.evaluate(log, named, **options).verdict.because("actions")


def test_agreement_is_the_sum_of_covariances_by_hand() -> None:
    """Seven actions in reverse; each row's policy is sure of the logged action,
    misnumbered.
    """
    names = [f"x{number}" for number in (1, 2, 3, 4, 5, 6, 10)]
    letters = sorted(names)  # x1 x10 x2 …: six of seven move
    actions = np.tile(np.arange(7), 50)
    column_of = [letters.index(name) for name in names]
    probabilities = np.eye(7)[np.array(column_of)[actions]]
    other_order = find_other_order(probabilities, actions, np.arange(350), names)
    assert other_order is not None
    assert (other_order.order, list(other_order.names)) == (
        "the order of letters",
        letters,
    )
    assert other_order.agreement == pytest.approx(6 / 7 * (1 - 1 / 7))
    assert other_order.stated_agreement == pytest.approx(-6 / 7 / 7)
    assert other_order.p_value == 0.0 or other_order.p_value < 1e-100
    assert "p < 0.0001" in str(other_order)


@pytest.mark.parametrize(
    ("p_value", "text"),
    [
        (0.0, "p < 0.0001"),
        (3e-7, "p < 0.0001"),
        (0.00021, "p = 0.0002"),
        (1.0, "p = 1"),
    ],
)
def test_no_chance_is_called_zero(p_value: float, text: str) -> None:
    assert chance(p_value) == text
