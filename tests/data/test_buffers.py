"""Replay buffers that were saved with room to spare, or whose newest rows replaced the
oldest ones.
"""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from koffline.data.sources import open_transitions
from koffline.data.table.inspection import inspect_table
from tests.data.layouts import chain

LOG = chain()
ROWS = len(LOG["action"])
UNFILLED = 30
FIRST = 17


def td3() -> dict[str, np.ndarray]:
    return {
        "state": LOG["obs"],
        "action": LOG["action"][:, None],
        "next_state": LOG["following"],
        "reward": LOG["reward"][:, None],
        "not_done": 1.0 - LOG["terminated"][:, None],
    }


def stable_baselines() -> dict[str, np.ndarray]:
    """One environment."""
    return {
        "observations": LOG["obs"][:, None],
        "next_observations": LOG["following"][:, None],
        "actions": LOG["action"][:, None, None],
        "rewards": LOG["reward"][:, None],
        "dones": (LOG["terminated"] | LOG["truncated"])[:, None].astype(float),
        "timeouts": LOG["truncated"][:, None].astype(float),
    }


def d4rl() -> dict[str, np.ndarray]:
    return {
        "observations": LOG["obs"],
        "actions": LOG["action"],
        "rewards": LOG["reward"],
        "next_observations": LOG["following"],
        "terminals": LOG["terminated"],
        "timeouts": LOG["truncated"],
    }


def masked() -> dict[str, np.ndarray]:
    """D4RL's names with JaxRL's masks, which have as many rows."""
    arrays = d4rl()
    arrays["terminals"] = arrays["terminals"] | arrays.pop("timeouts")
    arrays["masks"] = 1.0 - LOG["terminated"]
    return arrays


MAKERS = {
    "td3": td3,
    "stable-baselines3": stable_baselines,
    "d4rl": d4rl,
    "masks": masked,
}
# Counters of tools in a buffer with room to spare, and in a full one.
COUNTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stable-baselines3": (
        {"pos": ROWS, "full": False},
        {"pos": FIRST, "full": True},
    ),
    "td3": ({"ptr": ROWS, "size": ROWS}, {"ptr": FIRST, "size": ROWS}),
    "corl": ({"_pointer": ROWS, "_size": ROWS}, {"_pointer": FIRST, "_size": ROWS}),
    "arrays of one": (
        {"ptr": np.array([ROWS]), "size": np.array([ROWS])},
        {"ptr": np.array([FIRST]), "size": np.array([ROWS])},
    ),
}


def padded(arrays: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    return {
        key: np.concatenate([array, np.zeros((rows, *array.shape[1:]), array.dtype)])
        for key, array in arrays.items()
    }


def save(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
        return path
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file[key] = array
    return path


def read(path: Path, layout: str) -> Any:
    if layout in ("d4rl", "masks"):
        return open_transitions(path)
    return open_transitions(path, mapping=inspect_table(path).mapping)


def assert_is_the_log(log: Any) -> None:
    np.testing.assert_allclose(log.observations, LOG["obs"])
    np.testing.assert_array_equal(log.actions, LOG["action"])
    np.testing.assert_array_equal(log.terminated, LOG["terminated"])
    np.testing.assert_allclose(log.rewards, LOG["reward"])


@pytest.mark.parametrize("counters", [None, *COUNTERS])
@pytest.mark.parametrize("layout", MAKERS)
@pytest.mark.parametrize("ending", [".npz", ".hdf5"])
def test_rows_that_were_never_filled_are_left_out(
    tmp_path: Path, ending: str, layout: str, counters: str | None
) -> None:
    arrays: dict[str, Any] = padded(MAKERS[layout](), UNFILLED)
    reason = "they are 0 in every array"
    if counters is not None:
        arrays |= COUNTERS[counters][0]
        reason = "its counters say so"
    log = read(save(tmp_path / f"log{ending}", arrays), layout)
    assert_is_the_log(log)
    (note,) = [note for note in log.metadata.notes if "buffer" in note]
    assert f"{UNFILLED} rows at the end were left out" in note
    assert reason in note


@pytest.mark.parametrize("counters", COUNTERS)
@pytest.mark.parametrize("layout", MAKERS)
@pytest.mark.parametrize("ending", [".npz", ".hdf5"])
def test_a_full_buffer_begins_with_its_oldest_row(
    tmp_path: Path, ending: str, layout: str, counters: str
) -> None:
    arrays: dict[str, Any] = {
        key: np.roll(array, FIRST, axis=0) for key, array in MAKERS[layout]().items()
    }
    arrays |= COUNTERS[counters][1]
    log = read(save(tmp_path / f"log{ending}", arrays), layout)
    assert_is_the_log(log)
    assert not [note for note in log.metadata.notes if "buffer" in note]


@pytest.mark.parametrize(
    ("zeros", "beside"),
    [
        (3, {}),  # few may have happened
        (0, {"size": np.arange(ROWS), "ptr": np.arange(ROWS)}),  # columns, no counters
        (0, {"size": 10 * ROWS, "ptr": 5}),  # more than there are
        (0, {"size": 2.5, "ptr": 5}),
        (0, {"size": -1, "ptr": 5}),
        (0, {"size": 7}),
    ],
)
@pytest.mark.parametrize("ending", [".npz", ".hdf5"])
def test_other_rows_stay(
    tmp_path: Path, ending: str, zeros: int, beside: dict[str, Any]
) -> None:
    arrays = {**padded(d4rl(), zeros), **beside}
    log = open_transitions(save(tmp_path / f"log{ending}", arrays))
    assert len(log) == ROWS + zeros


def test_rows_of_zeros_that_occur_elsewhere_are_rows(tmp_path: Path) -> None:
    """As where nothing is known of users, and nearly none of them clicks."""
    arrays = {key: np.roll(array, 5, 0) for key, array in padded(d4rl(), 25).items()}
    assert not arrays["rewards"][-20:].any()
    log = open_transitions(save(tmp_path / "log.npz", arrays))
    assert len(log) == ROWS + 25


def test_a_dict_of_arrays_is_read_alike() -> None:
    log = open_transitions(padded(d4rl(), UNFILLED))
    assert_is_the_log(log)
