"""Observations that hold labels: encoded for networks, handed to policies as the file
holds them.
"""

import json
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import koffline
from koffline.data.labels import (
    CODE_WIDTH,
    LAYOUT,
    Layout,
    ObservationPart,
    make_layout,
)
from koffline.data.sources import convert_to_shards, open_transitions, write_transitions
from koffline.data.spaces import Features
from koffline.errors import DataError, PolicyError
from koffline.policies import DiscretePolicy, save_mlp_policy
from koffline.policy_specs import as_policy, load_policy
from tests.algos.makers import d3rlpy, with_small_networks
from tests.ope.problems import QUICK
from tests.refusals import assert_refused, one_line, run_cli, succeed

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

COUNT = 9
BOX = spaces.Box(-9.0, 9.0, (2,), np.float32)
SPACES = {
    "Discrete": spaces.Discrete(COUNT),
    "Discrete from 5": spaces.Discrete(4, start=5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 1, 4]),
    "MultiDiscrete table": spaces.MultiDiscrete([[3, 2], [5, 2]]),
    "Dict": spaces.Dict({"where": BOX, "kind": spaces.Discrete(6)}),
    "Tuple": spaces.Tuple(
        [spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)]
    ),
    "nested": spaces.Dict(
        {"a": spaces.Dict({"b": spaces.Discrete(3, start=-1)}), "c": BOX}
    ),
}


def stacked(space: gymnasium.Space, samples: list):
    """Samples of an episode in the form in which Minari stores them."""
    if isinstance(space, spaces.Dict):
        return {
            key: stacked(part, [sample[key] for sample in samples])
            for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(
            stacked(part, [sample[i] for sample in samples])
            for i, part in enumerate(space.spaces)
        )
    return np.stack([np.asarray(sample) for sample in samples])


def record(
    folder, space: gymnasium.Space, episodes: int = 12, length: int = 8, seed: int = 0
):
    """A Minari dataset of random observations, and the samples of each row and its next
    one.
    """
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    space.seed(seed)
    generator = np.random.default_rng(seed)
    folder.mkdir()
    actions = spaces.Discrete(3)
    storage = MinariStorage.new(
        folder / "data", observation_space=space, action_space=actions
    )
    storage.update_metadata({"dataset_id": "labels/test-v0", "minari_version": "0.5.4"})
    now = []
    later = []
    for _ in range(episodes):
        samples = [space.sample() for _ in range(length + 1)]
        now += samples[:-1]
        later += samples[1:]
        buffer = EpisodeBuffer(
            observations=stacked(space, samples),
            actions=generator.integers(3, size=length),
            rewards=generator.normal(size=length),
            terminations=np.arange(length) == length - 1,
            truncations=np.zeros(length, bool),
        )
        storage.update_episodes([buffer])
    return folder, now, later


def flat(space: gymnasium.Space, samples: list) -> np.ndarray:
    """Samples as numbers in a row, labels as they are."""
    if isinstance(space, spaces.Dict):
        return np.concatenate(
            [flat(p, [s[k] for s in samples]) for k, p in space.spaces.items()], axis=1
        )
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return np.concatenate(
            [flat(part, [sample[i] for sample in samples]) for i, part in parts], axis=1
        )
    return np.stack([np.ravel(sample) for sample in samples])


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_labels_are_encoded_as_gymnasium_flattens_them_and_decoded_as_the_file_holds_them(
    space, tmp_path
) -> None:
    folder, now, later = record(tmp_path / "log", space)
    log = open_transitions(folder)
    expected = np.stack([spaces.flatten(space, observation) for observation in now])
    np.testing.assert_array_equal(log.observations, expected)
    np.testing.assert_array_equal(
        log.next_observations,
        [spaces.flatten(space, observation) for observation in later],
    )
    assert log.observations.dtype == np.float32
    layout = log.metadata.features.layout
    decoded = layout.decode(log.observations)
    np.testing.assert_array_equal(decoded.reshape(len(log), -1), flat(space, now))
    np.testing.assert_array_equal(layout.encode(decoded), log.observations)
    assert any(
        note.startswith("observations hold labels") for note in log.metadata.notes
    )
    assert len(log.feature_names) == log.observation_shape[0]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder, now, _ = record(
        tmp_path_factory.mktemp("minari") / "log", SPACES["Discrete"], episodes=40
    )
    return folder, np.array(now)


@pytest.fixture(scope="module")
def log(recorded):
    return open_transitions(recorded[0])


@pytest.mark.parametrize(
    "name", ["a.hdf5", "a.npz", "a.parquet", "a.arrow", "a.d3rlpy", "again", "shards"]
)
def test_every_format_keeps_labels(name, recorded, log, tmp_path) -> None:
    target = tmp_path / name
    if name == "shards":
        convert_to_shards(recorded[0], target, 50)
    else:
        formats = {"a.d3rlpy": "d3rlpy", "again": "minari"}
        write_transitions(log, target, formats.get(name))
    again = open_transitions(target)
    np.testing.assert_array_equal(again.observations, log.observations)
    assert again.metadata.features == log.metadata.features
    labels = again.metadata.features.layout.decode(again.observations)
    np.testing.assert_array_equal(labels[:, 0], recorded[1])


WEIGHTS = np.random.default_rng(5).dirichlet(np.ones(3), size=COUNT)


def of_labels(states: np.ndarray) -> np.ndarray:
    """Probabilities by label; the label must be a whole number to be an index."""
    assert states.shape[1:] == (1,)
    return WEIGHTS[states[:, 0]]


def test_memory_shards_and_one_hot_arrays_give_the_same_value_to_ten_digits(
    recorded, log, tmp_path
) -> None:
    options = {**QUICK, "hidden_units": (8,), "instruments": 40}
    value = koffline.evaluate(log, of_labels, 0.9, **options)
    assert "of_labels gets observations as the file holds them, (N, 1)" in value.notes
    lazy = convert_to_shards(recorded[0], tmp_path / "shards", 50)
    in_shards = koffline.evaluate(lazy, of_labels, 0.9, **options)
    arrays = {"observations": np.eye(COUNT, dtype=np.float32)[recorded[1]]}
    arrays["next_observations"] = log.next_observations
    plain = log.replace(**arrays, metadata=type(log.metadata)())
    one_hot = koffline.evaluate(plain, lambda states: states @ WEIGHTS, 0.9, **options)
    assert in_shards.value == pytest.approx(value.value, rel=1e-10)
    # the policies round differently
    assert one_hot.value == pytest.approx(value.value, rel=1e-6)
    assert one_hot.interval.low == pytest.approx(value.interval.low, rel=1e-5)
    table = koffline.ope.evaluation.estimate_all(
        log, of_labels, 0.9, names=("wis", "dr", "lstd"), **options
    )
    assert [row.reason for row in table.rows] == [None, None, None]


class OfIndex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(COUNT, 3)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.table(states[:, 0]), dim=1)


class Net(torch.nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, 3)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layer(states), dim=1)


def _npz(inputs):
    def make(folder):
        weights = np.random.default_rng(1).normal(size=(inputs, 3))
        save_mlp_policy(folder / "net.npz", [(weights, np.zeros(3))], "softmax")
        return folder / "net.npz"

    return make


def _torchscript(inputs):
    def make(folder):
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*torch.jit.*", category=DeprecationWarning
            )
            torch.jit.script(Net(inputs)).save(str(folder / "net.pt"))
        return folder / "net.pt"

    return make


def _d3(inputs):
    def make(folder):
        algo = with_small_networks(d3rlpy.algos.DQNConfig).create()
        algo.create_impl((inputs,), 3)
        return algo

    return make


def of_table(table):
    """A function of named columns gets categories."""
    numbers = table["observation"].cast(int).to_numpy()
    return WEIGHTS[numbers]


POLICIES = {
    "function": (lambda folder: of_labels, True),
    "policy of any shape": (lambda folder: DiscretePolicy(3, of_labels), True),
    "policy of labels": (
        lambda folder: DiscretePolicy(3, of_labels, observation_shape=(1,)),
        True,
    ),
    "policy of columns": (
        lambda folder: DiscretePolicy(
            3, lambda s: s @ WEIGHTS, observation_shape=(COUNT,)
        ),
        False,
    ),
    "embedding": (lambda folder: OfIndex(), True),
    "network of labels": (lambda folder: Net(1), True),
    "network of columns": (lambda folder: Net(COUNT), False),
    "torchscript of labels": (_torchscript(1), True),
    "torchscript of columns": (_torchscript(COUNT), False),
    "npz of labels": (_npz(1), True),
    "npz of columns": (_npz(COUNT), False),
    "d3 of labels": (_d3(1), True),
    "d3 of columns": (_d3(COUNT), False),
    "table": (lambda folder: of_table, False),
}


@pytest.mark.parametrize(("make", "gets_labels"), POLICIES.values(), ids=POLICIES)
def test_every_kind_of_policy_gets_what_it_was_made_for(
    make, gets_labels, log, tmp_path
) -> None:
    about = log.action_space, log.observation_shape
    features = log.metadata.features
    policy = as_policy(make(tmp_path), *about, features=features)
    answers = policy.probabilities(log.observations)
    assert policy.observation_shape == log.observation_shape
    labels = features.layout.decode(log.observations)[:, 0]
    for label in range(COUNT):  # the answer depends on the label alone
        of_label = answers[labels == label]
        np.testing.assert_allclose(
            of_label, np.broadcast_to(of_label[0], of_label.shape), atol=1e-6
        )
    is_noted = any("as the file holds them, (N, 1)" in note for note in policy.notes)
    assert is_noted == gets_labels
    again = as_policy(policy, *about, features=features)
    np.testing.assert_array_equal(again.probabilities(log.observations), answers)


def test_a_mixture_and_a_wrong_network_are_read_like_their_parts(
    log, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "label_policies.py").write_text(
        "import numpy as np\ndef first(states):\n    return np.eye(3)[states[:, 0] %"
        " 3]\n"
    )
    about = log.action_space, log.observation_shape, log.metadata.features
    mixed = load_policy("epsilon:0.3:label_policies:first", *about)
    labels = log.metadata.features.layout.decode(log.observations)[:, 0]
    expected = 0.1 + 0.7 * np.eye(3)[labels % 3]
    np.testing.assert_allclose(mixed.probabilities(log.observations), expected)
    with one_line(PolicyError, match="failed on observations"):
        as_policy(Net(4), *about[:2], features=about[2]).probabilities(log.observations)


def test_a_continuous_policy_draws_from_labels_and_has_its_density(tmp_path) -> None:
    layout = make_layout([ObservationPart("kind", labels=range(4))], (1,), "x")
    features = Features.of_layout(layout)

    def drawn(states, generator):
        return states * 1.0 + generator.normal(size=(len(states), 1))

    drawn.log_density = lambda states, actions: -0.5 * ((actions - states) ** 2)[:, 0]
    space = koffline.Continuous(1)
    policy = as_policy(drawn, space, (4,), features=features)
    states = layout.encode(np.arange(4)[:, None])
    draws = policy.sample(states, np.random.default_rng(0))
    expected = np.arange(4)[:, None] + np.random.default_rng(0).normal(size=(4, 1))
    np.testing.assert_allclose(draws, expected)
    np.testing.assert_allclose(
        policy.log_density(states, np.zeros((4, 1))), -0.5 * np.arange(4) ** 2
    )


@pytest.mark.parametrize("shape", [(COUNT,), (COUNT, 1)])
def test_start_states_may_be_labels(shape, log) -> None:
    options = {**QUICK, "hidden_units": (8,), "instruments": 40}
    starts = np.arange(COUNT)
    by_label = koffline.evaluate(
        log, of_labels, 0.9, initial_observations=starts.reshape(shape), **options
    )
    encoded = np.eye(COUNT, dtype=np.float32)
    assert (
        by_label.value
        == koffline.evaluate(
            log, of_labels, 0.9, initial_observations=encoded, **options
        ).value
    )
    with one_line(
        DataError, match="observation observation is 9 in row 0, no label of 0 … 8"
    ):
        koffline.evaluate(
            log, of_labels, 0.9, initial_observations=np.array([[9]]), **options
        )


def test_models_train_on_the_encoded_columns_and_are_evaluated_on_the_log(log) -> None:
    from koffline.data.replay import ColumnarReplayBuffer

    algo = with_small_networks(d3rlpy.algos.DQNConfig).create()
    algo.build_with_dataset(ColumnarReplayBuffer(log, seed=0))
    assert algo.observation_shape == (COUNT,)
    policy = as_policy(
        algo, log.action_space, log.observation_shape, features=log.metadata.features
    )
    np.testing.assert_array_equal(
        policy.probabilities(log.observations).argmax(axis=1),
        algo.predict(log.observations),
    )


class TestManyLabels:
    def test_they_are_coded_and_found_again(self):
        layout = make_layout(
            [ObservationPart("s", labels=range(5, 5005)), ObservationPart("x", size=2)],
            (3,),
            "x",
        )
        assert layout.width == CODE_WIDTH + 2
        logged = np.column_stack(
            [np.arange(5, 5005), np.linspace(-1, 1, 5000), np.zeros(5000)]
        )
        encoded = layout.encode(logged, np.float64)
        assert set(np.unique(encoded[:, :CODE_WIDTH])) == {-1.0, 1.0}
        np.testing.assert_allclose(layout.decode(encoded), logged)
        again = Layout.from_extra(json.loads(json.dumps(layout.to_extra())))
        np.testing.assert_array_equal(again.encode(logged, np.float64), encoded)

    def test_codes_are_about_equally_far_apart_and_do_not_depend_on_their_number(self):
        few, many = (
            make_layout([ObservationPart("s", labels=range(n))], (1,), "x")
            for n in (2000, 4000)
        )
        signs = few.encode(np.arange(2000)[:, None])
        np.testing.assert_array_equal(signs, many.encode(np.arange(2000)[:, None]))
        products = signs @ signs.T / CODE_WIDTH
        # 1 would be the same code
        assert np.abs(products[~np.eye(2000, dtype=bool)]).max() < 0.8
        assert abs(products[~np.eye(2000, dtype=bool)].mean()) < 0.01

    def test_small_parts_stay_one_hot(self):
        layout = make_layout(
            [
                ObservationPart("s", labels=range(1500)),
                ObservationPart("t", labels=range(60)),
            ],
            (2,),
            "x",
        )
        assert [part.is_coded for part in layout.parts] == [True, False]

    def test_too_many_columns_are_refused(self):
        with one_line(DataError, "5000 labels", "as a Box"):
            make_layout(
                [ObservationPart(f"p{i}", labels=range(3)) for i in range(5000)],
                (5000,),
                "x",
            )

    def test_a_space_that_no_memory_holds_is_refused(self, tmp_path):
        folder, _, _ = record(tmp_path / "log", spaces.Discrete(2**40), episodes=1)
        with one_line(
            DataError,
            "observation is a label with 1099511627776 values",
            "record quantities",
        ):
            open_transitions(folder)


@pytest.mark.parametrize(
    "layout",
    [
        [],
        {"parts": [{"name": "s", "first": 0, "count": 2**60}], "shape": [1]},
        {"parts": [{"name": "s", "first": 0, "count": 9}], "shape": [2]},
        {"parts": [{"name": "s", "labels": [3, 1]}], "shape": [1]},
        {"parts": [{"name": "s", "size": 1}], "shape": [1]},
        {"parts": [{"name": "s", "first": True, "count": 9}], "shape": [1]},
        {"parts": [{"name": "s", "count": 9}], "shape": [1]},
    ],
)
def test_a_damaged_layout_is_none(layout) -> None:
    assert Layout.from_extra({LAYOUT: layout}) is None


class TestArrays:
    """Columns of arrays that the user declares to be labels."""

    @pytest.fixture
    def arrays(self, tmp_path, log, recorded):
        path = tmp_path / "arrays.npz"
        later = log.metadata.features.layout.decode(log.next_observations)
        np.savez(
            path,
            observations=recorded[1][:, None],
            next_observations=later,
            actions=log.actions,
            rewards=log.rewards,
            terminals=log.terminated,
            timeouts=log.truncated,
            episode_ids=log.episode_ids,
        )
        return path

    @pytest.mark.parametrize("column", ["observations", ""])
    def test_they_are_read_like_a_space_that_says_so(self, column, arrays, log):
        from_arrays = open_transitions(arrays, mapping={"encode": {column: "one-hot"}})
        np.testing.assert_array_equal(from_arrays.observations, log.observations)
        np.testing.assert_array_equal(
            from_arrays.next_observations, log.next_observations
        )
        policy = as_policy(
            of_labels,
            from_arrays.action_space,
            (COUNT,),
            features=from_arrays.metadata.features,
        )
        labels = from_arrays.metadata.features.layout.decode(from_arrays.observations)[
            :, 0
        ]
        np.testing.assert_allclose(
            policy.probabilities(from_arrays.observations), WEIGHTS[labels]
        )

    def test_the_command_line_and_shards(self, arrays, log, tmp_path):
        shards = tmp_path / "shards"
        succeed(
            "data",
            "convert",
            arrays,
            shards,
            "--shard-rows",
            50,
            "--encode",
            "observations=one-hot",
        )
        np.testing.assert_array_equal(
            open_transitions(shards).observations, log.observations
        )
        shown = json.loads(
            succeed(
                "data", "info", arrays, "--encode", "observations=one-hot", "--json"
            )
        )
        assert shown["observation_shape"] == [COUNT]

    def test_all_labels_may_be_declared(self, arrays):
        columns = ",".join(map(str, range(12)))
        log = open_transitions(
            arrays, mapping={"encode": {"observations": f"one-hot:{columns}"}}
        )
        assert log.observation_shape == (12,)

    def test_one_column_of_several(self, tmp_path, log, recorded):
        both = np.column_stack([np.linspace(0, 1, len(log)), recorded[1]])
        path = tmp_path / "two.npz"
        ids = log.episode_ids
        np.savez(
            path,
            observations=both,
            actions=log.actions,
            rewards=log.rewards,
            next_observations=both,
            terminals=log.terminated,
            episode_ids=ids,
        )
        in_one_hot = open_transitions(
            path, mapping={"encode": {"observations[1]": "one-hot"}}
        )
        assert in_one_hot.feature_names[:2] == ("observations[0]", "observations[1]=0")
        np.testing.assert_array_equal(in_one_hot.observations[:, 1:], log.observations)
        np.testing.assert_array_equal(
            in_one_hot.metadata.features.layout.decode(in_one_hot.observations), both
        )

    @pytest.mark.parametrize(
        ("encoding", "words"),
        [
            ("observations=ordinal", "taken as quantities already"),
            ("observations[3]=one-hot", "has no observation 'observations[3]'"),
            ("rewards=one-hot", "has no observation 'rewards'"),
            (
                "observations=one-hot:1,2",
                "holds 0, no label of those declared; list all of them",
            ),
            ("observations=one-hot:a,b", "labels of arrays are whole numbers"),
            ("observations=hashed", "give one-hot or ordinal"),
        ],
    )
    def test_what_cannot_be_is_refused_in_one_line(self, encoding, words, arrays):
        assert_refused(run_cli("data", "validate", arrays, "--encode", encoding), words)

    def test_fractions_and_labels_that_are_encoded_already_are_refused(
        self, tmp_path, arrays, recorded
    ):
        held = dict(np.load(arrays))
        held["observations"] = held["observations"] + 0.5
        np.savez(tmp_path / "half.npz", **held)
        words = "--encode", "observations=one-hot"
        assert_refused(
            run_cli("data", "validate", tmp_path / "half.npz", *words),
            "is no whole number",
        )
        assert_refused(
            run_cli("data", "validate", recorded[0], *words), "encoded already"
        )
