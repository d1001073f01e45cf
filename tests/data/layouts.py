"""One log of a chain with a value in closed form, written as other tools write logs."""

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import polars as pl

STATES = 4
GAMMA = 0.9
_UP = 0.8  # chance that action 1 goes up, and action 0 down
_END = 0.06  # chance that a step ends the world
_LIMIT = 12  # steps of an episode
TARGET = np.array([0.3, 0.7])  # probabilities of the policy to be evaluated
FEATURES = np.stack([np.linspace(-1, 1, STATES), np.arange(STATES) % 2], 1)


def policy(observations):
    """The policy whose value is `exact_value`."""
    return np.tile(TARGET, (len(observations), 1))


def exact_value() -> float:
    """The value of `policy` from the first three states, by the Bellman equation."""
    states = np.arange(STATES)
    moves = np.zeros((STATES, 2, STATES))
    for state in states:
        for action, up in ((0, 1 - _UP), (1, _UP)):
            moves[state, action, min(state + 1, STATES - 1)] += up
            moves[state, action, max(state - 1, 0)] += 1 - up
    rewards = states[:, None] / (STATES - 1) - 0.2 * np.arange(2)
    chain = np.einsum("a,sat->st", TARGET, moves)
    values = np.linalg.solve(
        np.eye(STATES) - GAMMA * (1 - _END) * chain, rewards @ TARGET
    )
    return float(values[:3].mean())


def _episode(generator):
    states = [int(generator.integers(3))]
    actions = []
    rewards = []
    is_over = False
    while len(actions) < _LIMIT and not is_over:
        action = int(generator.integers(2))
        goes_up = (generator.random() < _UP) == (action == 1)
        noise = 0.1 * generator.standard_normal()
        rewards.append(states[-1] / (STATES - 1) - 0.2 * action + noise)
        actions.append(action)
        step = 2 * int(goes_up) - 1
        states.append(int(np.clip(states[-1] + step, 0, STATES - 1)))
        is_over = generator.random() < _END
    return states, actions, rewards, is_over


def chain(episodes: int = 60, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns of the log: obs, following, action, reward, terminated, truncated,
    episode, step.
    """
    generator = np.random.default_rng(seed)
    rows: dict[str, list] = {
        name: []
        for name in (
            *("obs", "following", "action", "reward"),
            *("terminated", "truncated", "episode", "step"),
        )
    }
    for episode in range(episodes):
        states, actions, rewards, is_over = _episode(generator)
        last = np.arange(len(actions)) == len(actions) - 1
        rows["obs"].append(FEATURES[states[:-1]])
        rows["following"].append(FEATURES[states[1:]])
        rows["action"].append(actions)
        rows["reward"].append(rewards)
        rows["terminated"].append(last & is_over)
        rows["truncated"].append(last & (not is_over))
        rows["episode"].append(np.full(len(actions), episode))
        rows["step"].append(np.arange(len(actions)))
    return {name: np.concatenate(pieces) for name, pieces in rows.items()}


def split_by_episode(log):
    """The columns of each episode."""
    for episode in np.unique(log["episode"]):
        rows = log["episode"] == episode
        yield {name: column[rows] for name, column in log.items()}


def _sb3(log, path):
    np.savez(
        path,
        observations=log["obs"][:, None],
        next_observations=log["following"][:, None],
        actions=log["action"][:, None, None],
        rewards=log["reward"][:, None],
        dones=(log["terminated"] | log["truncated"])[:, None].astype(float),
        timeouts=log["truncated"][:, None].astype(float),
    )


def _sb2(log, path):
    np.savez(
        path,
        obs=log["obs"],
        actions=log["action"][:, None],
        rewards=log["reward"],
        episode_starts=log["step"] == 0,
        episode_returns=np.zeros(60),
    )


def tianshou_columns(log):
    return {
        "obs": log["obs"],
        "act": log["action"],
        "rew": log["reward"],
        "terminated": log["terminated"],
        "truncated": log["truncated"],
        "done": log["terminated"] | log["truncated"],
        "obs_next": log["following"],
    }


def _tianshou_arrays(log, path):
    np.savez(path, **tianshou_columns(log))


def _tianshou_plain(log, path):
    with h5py.File(path, "w") as file:
        for name, column in tianshou_columns(log).items():
            file[name] = column
        file["info/env_id"] = np.zeros(len(log["action"]), int)


def ring(log, path, unfilled=0, first=0):
    """A buffer as `save_hdf5` leaves it: some rows never filled, or the oldest row at
    another place than the first.
    """
    rows = len(log["action"])
    with h5py.File(path, "w") as file:
        file.attrs["maxsize"] = rows + unfilled
        file.attrs["_size"] = rows
        file.attrs["_index"] = (rows + first) % (rows + unfilled)
        group = file.create_group("_meta")
        group.attrs["__data_type__"] = "Batch"
        for name, column in tianshou_columns(log).items():
            padding = np.zeros((unfilled, *column.shape[1:]), column.dtype)
            group[name] = np.concatenate([np.roll(column, first, 0), padding])
            group[name].attrs["__data_type__"] = "ndarray"
        file["_indices"] = np.arange(rows + unfilled)


def _td3(log, path):
    np.savez(
        path,
        state=log["obs"],
        action=log["action"][:, None],
        next_state=log["following"],
        reward=log["reward"][:, None],
        not_done=1.0 - log["terminated"][:, None],
    )


def _iql(log, path):
    np.savez(
        path,
        observations=log["obs"],
        actions=log["action"],
        rewards=log["reward"],
        masks=1.0 - log["terminated"],
        dones_float=(log["terminated"] | log["truncated"]).astype(float),
        next_observations=log["following"],
    )


def rllib_batch(episode, number):
    steps = len(episode["action"])
    return {
        "type": "SampleBatch",
        "obs": episode["obs"].tolist(),
        "new_obs": episode["following"].tolist(),
        "actions": episode["action"].tolist(),
        "rewards": episode["reward"].tolist(),
        "terminateds": episode["terminated"].tolist(),
        "truncateds": episode["truncated"].tolist(),
        "infos": [{}] * steps,
        "eps_id": [77000 + number] * steps,
        "unroll_id": [number] * steps,
        "agent_index": [0] * steps,
        "t": episode["step"].tolist(),
        "action_prob": [0.5] * steps,
        "action_logp": [float(np.log(0.5))] * steps,
    }


def _rllib_json(log, path):
    batches = [
        rllib_batch(episode, number)
        for number, episode in enumerate(split_by_episode(log))
    ]
    path.write_text("\n".join(map(json.dumps, batches)))


def _rllib_parquet(log, path):
    pl.DataFrame(
        {
            "obs": log["obs"].tolist(),
            "new_obs": log["following"].tolist(),
            "actions": log["action"],
            "rewards": log["reward"],
            "terminateds": log["terminated"],
            "truncateds": log["truncated"],
            "eps_id": 77000 + log["episode"],
            "t": log["step"],
            "action_prob": np.full(len(log["action"]), 0.5),
            "action_logp": np.full(len(log["action"]), np.log(0.5)),
        }
    ).write_parquet(path)


def _rlds_steps(log):
    for number, episode in enumerate(split_by_episode(log)):
        for i in range(len(episode["action"])):
            yield (
                number,
                {
                    "observation": episode["obs"][i].tolist(),
                    "action": int(episode["action"][i]),
                    "reward": float(episode["reward"][i]),
                    "discount": 1.0,
                    "is_first": i == 0,
                    "is_last": False,
                    "is_terminal": False,
                },
            )
        yield (
            number,
            {
                "observation": episode["following"][-1].tolist(),
                "action": 0,
                "reward": 0.0,
                "discount": float(episode["truncated"][-1]),
                "is_first": False,
                "is_last": True,
                "is_terminal": bool(episode["terminated"][-1]),
            },
        )


def _rlds_json(log, path):
    episodes: dict[int, list] = {}
    for number, step in _rlds_steps(log):
        episodes.setdefault(number, []).append(step)
    path.write_text("\n".join(json.dumps({"steps": s}) for s in episodes.values()))


def _rlds_parquet(log, path):
    rows = [{"episode_id": number, **step} for number, step in _rlds_steps(log)]
    pl.DataFrame(rows).write_parquet(path)


def robomimic(log, path, done_mode=0):
    """done_mode as in robomimic: 0 for dones at success, 1 at every end of a demo."""
    with h5py.File(path, "w") as file:
        for number, episode in enumerate(split_by_episode(log)):
            dones = episode["terminated"].astype(int)
            if done_mode:
                dones[-1] = 1
            group = file.create_group(f"data/demo_{number}")
            group["actions"] = episode["action"]
            group["rewards"] = episode["reward"]
            group["dones"] = dones
            group["states"] = np.zeros((len(dones), 7))
            for key, states in (("obs", "obs"), ("next_obs", "following")):
                group[f"{key}/a_place"] = episode[states][:, :1]
                group[f"{key}/b_parity"] = episode[states][:, 1]
        file["mask/train"] = np.array([b"demo_0", b"demo_1"])


def _groups_with_final_states(log, path):
    with h5py.File(path, "w") as file:
        for number, episode in enumerate(split_by_episode(log)):
            group = file.create_group(f"traj_{number}")
            group["observations"] = np.concatenate(
                [episode["obs"], episode["following"][-1:]]
            )
            group["actions"] = episode["action"]
            group["rewards"] = episode["reward"]
            group["terminated"] = episode["terminated"]
            group["truncated"] = episode["truncated"]


def lerobot(log, folder, version=3):
    """The root of a dataset of version 2 (a file for each episode) or 3."""
    rows = pl.DataFrame(
        {
            "observation.state": log["obs"].tolist(),
            "action": log["action"],
            "timestamp": log["step"] / 10,
            "frame_index": log["step"],
            "episode_index": log["episode"],
            "index": np.arange(len(log["action"])),
            "task_index": np.zeros(len(log["action"]), int),
            "next.reward": log["reward"],
            "next.done": log["terminated"] | log["truncated"],
            "next.success": log["terminated"],
        }
    )
    chunk = folder / "data" / "chunk-000"
    chunk.mkdir(parents=True)
    meta = folder / "meta" / "episodes" / "chunk-000"
    meta.mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps({"fps": 10}))
    if version == 3:
        rows.write_parquet(chunk / "file-000.parquet")
        pl.DataFrame({"episode_index": [0]}).write_parquet(meta / "file-000.parquet")
    else:
        for (number,), part in rows.partition_by(
            "episode_index", as_dict=True, maintain_order=True
        ).items():
            part.write_parquet(chunk / f"episode_{number:06d}.parquet")
        (folder / "meta" / "tasks.jsonl").write_text('{"task_index": 0}')


def _coach(log, path):
    pl.DataFrame(
        {
            "action": log["action"],
            "all_action_probabilities": [
                f"[{0.4 + i % 3 / 10} {0.6 - i % 3 / 10}]"
                for i in range(len(log["action"]))
            ],
            "episode_id": log["episode"],
            "episode_name": [f"ep_{number}" for number in log["episode"]],
            "reward": log["reward"],
            "transition_number": log["step"],
            "state_feature_0": log["obs"][:, 0],
            "state_feature_1": log["obs"][:, 1],
        }
    ).write_csv(path)


def reagent_rows(log):
    for i in range(len(log["action"])):
        yield {
            "ds": "2019-01-01",
            "mdp_id": str(log["episode"][i]),
            "sequence_number": int(log["step"][i]),
            "state_features": {"0": log["obs"][i, 0], "1": log["obs"][i, 1]},
            "action": str(log["action"][i]),
            "reward": log["reward"][i],
            "action_probability": 0.5,
            "possible_actions": ["0", "1"],
            "metrics": {"reward": log["reward"][i]},
        }


def _reagent(log, path):
    path.write_text("\n".join(map(json.dumps, reagent_rows(log))))


def _lists_as_text(log, path):
    pl.DataFrame(
        {
            "episode": log["episode"],
            "t": log["step"],
            "obs": [str(row) for row in log["obs"].tolist()],
            "next_obs": [str(row) for row in log["following"].tolist()],
            "action": log["action"],
            "reward": log["reward"],
            "terminated": log["terminated"],
        }
    ).write_csv(path)


Writer = Callable[[dict[str, np.ndarray], Path], None]
# File, how it is written, what `data info` calls the layout, answers to what
# `inspect` leaves open.
LAYOUTS: dict[str, tuple[str, Writer, str, dict[str, str]]] = {
    "sb3": ("log.npz", _sb3, "Stable-Baselines3", {}),
    "sb2": ("log.npz", _sb2, "NPZ", {"last_row": "cut"}),
    "tianshou arrays": ("log.npz", _tianshou_arrays, "Tianshou", {}),
    "tianshou hdf5": ("log.hdf5", _tianshou_plain, "Tianshou", {}),
    "tianshou ring": ("log.hdf5", ring, "Tianshou", {}),
    "td3": ("log.npz", _td3, "NPZ", {}),
    "iql": ("log.npz", _iql, "NPZ", {}),
    "rllib json": ("log.json", _rllib_json, "RLlib", {}),
    "rllib parquet": ("log.parquet", _rllib_parquet, "RLlib", {}),
    "rlds json": ("log.json", _rlds_json, "RLDS", {}),
    "rlds parquet": ("log.parquet", _rlds_parquet, "RLDS", {}),
    "robomimic": ("log.hdf5", robomimic, "robomimic", {}),
    "lerobot": ("lerobot", lerobot, "LeRobot", {"terminal": "next.success"}),
    "coach": ("log.csv", _coach, "Coach", {"last_row": "cut"}),
    "reagent": ("log.json", _reagent, "ReAgent", {"last_row": "cut"}),
    "lists as text": ("log.csv", _lists_as_text, "CSV", {}),
}
SELF_DESCRIBED = ("groups.hdf5", _groups_with_final_states)
