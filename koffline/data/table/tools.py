"""Tables that known tools write: how each is recognised, and what its columns are where
names alone would mislead.

Most loggers need no line here: their columns are guessed from names and tested on the
rows (`guesses`). A tool stands here if its columns would be misread, or if something
about them is known that no row shows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from koffline.data.array_layouts import ENVIRONMENTS, GROUPS, RING
from koffline.data.table.json_records import AVAILABLE, BATCHES, DECISIONS, EPISODES
from koffline.errors import DataError

_AFTER = "measured after the action"
_OUTCOME = "it says how the stay ended, which is not known before"
# RLlib's columns. Its workers cut episodes into unrolls of a fixed number of steps, and
# store what the learner computed beside what happened.
_RLLIB_ROLES = {
    "episode": ["eps_id"],
    "time": ["t"],
    "observations": ["obs"],
    "action": ["actions"],
    "reward": ["rewards"],
}
_LEARNER = "computed by the learner, not observed"
_RLLIB_LEFT_OUT = {
    "unroll_id": "it counts pieces of episodes",
    "agent_index": "it counts agents",
    "batch_id": "it counts batches",
    "seq_lens": "it counts rows of a batch",
    "action_dist_inputs": "the outputs of the network that took the action",
    "q_values": "the outputs of the network that took the action",
    "vf_preds": _LEARNER,
    "values_bootstrapped": _LEARNER,
    "advantages": _LEARNER,
    "value_targets": _LEARNER,
    "prev_actions": "the action of the row above",
    "prev_rewards": "the reward of the row above",
}


@dataclass(frozen=True)
class Tool:
    """A tool whose tables are recognised.

    ``name``: for `--format`. ``title``: what `data info` calls its tables. ``columns``:
    all of these are there; none where the layout of the file tells the tool (``file``).
    In what follows, columns may be patterns with ``*``: ``roles``: columns by role.
    ``formulas``: how a mapping writes a column. ``left_out``: reasons, by column.
    ``doubtful``: reasons to ask about observations, by column.
    ``one_step``: every row is a decision of its own. ``is_numbered``: the observations
    of a mapping are in the order of the numbers in their names. ``last_flags``: flags that are set
    in last rows of episodes by convention, and say nothing of why these ended;
    ``successes``: flags that might say it.
    """

    name: str
    title: str
    columns: frozenset[str] = frozenset()
    file: str = ""
    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    formulas: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    doubtful: Mapping[str, str] = field(default_factory=dict)
    one_step: bool = False
    is_numbered: bool = False
    last_flags: Sequence[str] = ()
    successes: Sequence[str] = ()

    def known_roles(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The columns of a table by role, without roles that it has no column for."""
        known = {}
        for role, patterns in self.roles.items():
            columns = tuple(name for name in names if _fits(name, patterns))
            if columns:
                known[role] = columns
        return known

    def reason_to_leave_out(self, name: str) -> str:
        """Why a column is left out; empty if it is not."""
        for pattern, reason in self.left_out.items():
            if fnmatchcase(name, pattern):
                return reason
        return ""


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


TOOLS = (
    Tool(
        name=DECISIONS,
        title="decisions of VowpalWabbit (dsjson)",
        file=DECISIONS,
        roles={
            "action": ["action"],
            "reward": ["cost"],
            "behavior_probability": ["probability"],
            "weight": ["weight"],
            "action_mask": [AVAILABLE],
        },
        # VowpalWabbit makes the cost small
        formulas={"cost": "-cost"},
        left_out={"EventId": "it counts the decisions"},
        one_step=True,
    ),
    Tool(
        name="open-bandit",
        title="Open Bandit Dataset",
        columns=frozenset(("item_id", "position", "click")),
        roles={
            "action": ["item_id"],
            "reward": ["click"],
            "behavior_probability": ["propensity_score"],
        },
        one_step=True,
    ),
    Tool(
        name="rllib",
        title="batches of rows, as RLlib writes them (JSON)",
        file=BATCHES,
        roles=_RLLIB_ROLES,
        left_out=_RLLIB_LEFT_OUT,
        last_flags=["dones"],
    ),
    Tool(
        name="rllib",
        title="RLlib sample batches",
        columns=frozenset(("eps_id", "obs", "actions", "rewards")),
        roles=_RLLIB_ROLES,
        left_out=_RLLIB_LEFT_OUT,
        last_flags=["dones"],
    ),
    Tool(
        name="rlds",
        title="RLDS episodes of steps",
        file=EPISODES,
    ),
    Tool(
        name="rlds",
        title="RLDS steps",
        columns=frozenset(("is_first", "is_last", "is_terminal")),
    ),
    Tool(
        name="robomimic",
        title="group of arrays for each episode (robomimic and others)",
        file=GROUPS,
        roles={
            "observations": ["obs/*"],
            "episode": ["episode_ids"],
        },
        left_out={
            "states": "the simulator's state; the observations are obs/…",
        },
        last_flags=["dones"],
    ),
    Tool(
        name=ENVIRONMENTS,
        title="replay buffer of Stable-Baselines3 (steps × environments)",
        file=ENVIRONMENTS,
    ),
    Tool(
        name=RING,
        title="replay buffer of Tianshou",
        file=RING,
    ),
    Tool(
        name=RING,
        title="Tianshou's buffer keys",
        columns=frozenset(("obs", "act", "rew", "obs_next")),
    ),
    Tool(
        name="lerobot",
        title="LeRobot dataset",
        columns=frozenset(("episode_index", "frame_index", "action")),
        left_out={"index": "it counts the rows", "task_index": "an id by its name"},
        last_flags=["next.done"],
        successes=["next.success"],
    ),
    Tool(
        name="reagent",
        title="ReAgent's logged decisions",
        columns=frozenset(("mdp_id", "sequence_number")),
        left_out={
            "metrics.*": _AFTER,
            "metrics": _AFTER,
            "ds": "the day of the export",
        },
    ),
    Tool(
        name="coach",
        title="Coach's CSV",
        columns=frozenset(("episode_id", "transition_number", "action", "reward")),
        roles={
            "episode": ["episode_id"],
            "time": ["transition_number"],
            "observations": ["state_feature_*"],
        },
        is_numbered=True,
        left_out={"episode_name": "the episode's name; episode_id tells episodes"},
    ),
    Tool(
        name="ai-clinician",
        title="AI Clinician's table of stays",
        columns=frozenset(("icustayid", "bloc")),
        roles={
            "episode": ["icustayid"],
            "time": ["bloc"],
            "action": ["input_4hourly", "max_dose_vaso"],
        },
        left_out={
            "charttime": "bloc orders the rows; dates are shifted by patient",
            "died_*": _OUTCOME,
            "mort*": _OUTCOME,
            "hospmort*": _OUTCOME,
            "delay_end_of_record*": _OUTCOME,
            "median_dose_vaso": "given in the same hours as the action",
        },
        doubtful={
            "input_total": "a sum that may hold the input of the row, an action",
            "cumulated_balance": "a sum that may hold the input of the row, an action",
        },
    ),
)


def find_tool(names: Collection[str], layout: str, wanted: str | None) -> Tool | None:
    """The tool that wrote a table; None if none is known.

    names: of all columns. layout: what the layout of the file tells (`Reader.layout`).
    wanted: the name of the tool, if the user says it. Raises DataError for unknown
    names.
    """
    if wanted is not None:
        check_name(wanted)
    for tool in TOOLS:
        if wanted is not None and tool.name != wanted:
            continue
        is_by_file = bool(tool.file) and tool.file == layout
        is_by_columns = bool(tool.columns) and tool.columns <= set(names)
        if is_by_file or is_by_columns:
            return tool
    if wanted is None:
        return None
    needed = " or ".join(
        ", ".join(sorted(tool.columns)) or "its own layout of files"
        for tool in TOOLS
        if tool.name == wanted
    )
    raise DataError(f"this is no table of {wanted}, which has {needed}; leave it out")


def tool_names() -> list[str]:
    """All names, in alphabetical order."""
    return sorted({tool.name for tool in TOOLS})


def check_name(name: str) -> None:
    """Raise DataError for names that no tool has."""
    if name not in tool_names():
        raise DataError(
            f"format {name!r} is unknown; known are {', '.join(tool_names())}"
        )
