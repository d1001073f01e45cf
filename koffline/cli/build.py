"""``koffline build uniform | rollouts | control | policy``: datasets, and policies for
them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import click

from koffline.builders import KINDS, NAME, add_to_manifest, read_manifest
from koffline.cli.options import (
    QUIET,
    SEED,
    Command,
    added,
    gamma_option,
    whole,
    worker_options,
)
from koffline.cli.output import say
from koffline.cli.targets import claim, claim_log, long_part
from koffline.errors import ConfigError, DataError
from koffline.jobs import PassSettings
from koffline.store import locked
from koffline.store.files import check_target
from koffline.store.run_record import full_command

_FORCE = click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
_POSITIVE = click.FloatRange(0.0, min_open=True)
_FORMAT = "Format; default: by TARGET's name."
_TARGET = (
    SEED,
    click.option(
        "--out",
        required=True,
        metavar="TARGET",
        help="An .hdf5 or .npz file, or minari:<id>.",
    ),
    click.option(
        "--format",
        "format_",
        type=click.Choice(["hdf5", "minari", "npz"]),
        help=_FORMAT,
    ),
    whole(
        "--shard-rows",
        metavar="N",
        help="TARGET is a folder of shards of at most N rows each.",
    ),
    _FORCE,
)


class BuildTarget:
    """Output path of a dataset and its manifest entry; checked before the build
    starts.
    """

    def __init__(
        self,
        out: str,
        format_: str | None,
        shard_rows: int | None,
        force: bool,
        seed: int,
    ) -> None:
        self.path, self._format = claim_log(out, format_, shard_rows, force)
        self._out = out
        self.shard_rows = shard_rows
        self._force = force
        self._seed = seed
        self.parts = claim(self.path.with_name(f"{self.path.name}.parts"))
        self._manifest = self.path.parent / NAME
        if self.path.name == NAME:
            raise DataError(
                f"--out {out} is the name of the manifest beside it; choose another"
                " name"
            )
        read_manifest(self._manifest)

    def write(self, logs: Iterable[Any]) -> Any:
        """Write the dataset, which may come in pieces, and return it as one log."""
        from koffline.data.disk.writer import ShardWriter, open_lazy
        from koffline.data.sources import write_transitions

        if self.shard_rows is None:
            (log,) = logs
            write_transitions(log, self._out, self._format, self._force)
            return log
        with ShardWriter(self.path, self.shard_rows, self._force) as writer:
            for log in logs:
                writer.append(log)
                writer.metadata = log.metadata  # the last piece has the metadata of all
        return open_lazy(self.path)

    def record(self, log: Any) -> None:
        """Add the finished dataset to the manifest and print what was written."""
        add_to_manifest(self._manifest, self.path, log, full_command(), self._seed)
        say(f"{self._out}: {log}")
        say(f"sha256 {log.sha256}, entry in {self._manifest}")


def _target_options(command: Command) -> Command:
    """Add options for ``seed`` and ``target``; the target is checked before the
    command's own checks.
    """

    @functools.wraps(command)
    def run(seed: int, **options: Any) -> Any:
        target = BuildTarget(
            out=options.pop("out"),
            format_=options.pop("format_"),
            shard_rows=options.pop("shard_rows"),
            force=options.pop("force"),
            seed=seed,
        )
        return command(seed=seed, target=target, **options)

    return added(_TARGET)(run)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def build() -> None:
    """Make logs, and policies to evaluate."""


@build.command(no_args_is_help=True)
@click.option("--env", required=True, help="koffline/PuddleWorld-v0, … or chain.")
@whole("--n", required=True, help="Number of rows.")
@click.option(
    "--policy", help="The policy that acts: a file or a name; the chain needs none."
)
@_target_options
def uniform(
    env: str, n: int, policy: str | None, seed: int, target: BuildTarget
) -> None:
    """Make independent rows: states uniform over the state space, actions of a policy.

    \b
    Examples:
      koffline build uniform --env koffline/PuddleWorld-v0 --n 5000 --policy policy.npz --out puddle.hdf5
      koffline build uniform --env koffline/NoisyMountainCar-v0 --n 5000 --policy uniform --out car.hdf5
      koffline build uniform --env chain --n 2000 --out chain.hdf5
    """
    import numpy as np

    from koffline.builders.uniform import CHAIN, build_chain, build_uniform

    generator = np.random.default_rng(seed)
    if env == CHAIN and policy is not None:
        raise ConfigError(
            f"--policy is {policy}, but the chain has no actions to choose; leave"
            " it out"
        )
    if env != CHAIN and policy is None:
        raise ConfigError(f"--policy is missing; {env} needs one: a file, or 'uniform'")
    if policy is None:
        log = build_chain(n, generator)
    else:
        log = build_uniform(env, policy, n, generator)
    target.record(target.write([log]))


@build.command(no_args_is_help=True)
@click.option(
    "--env", required=True, help="Any Gymnasium id, or package:id to import it first."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    required=True,
    help="A policy; repeat it for several.",
)
@click.option(
    "--weight",
    "weights",
    multiple=True,
    type=float,
    help="Share of each of several policies.",
)
@click.option("--episodes", type=int, required=True, help="Number of episodes.")
@click.option(
    "--time-limit", type=int, help="Steps until truncation; default: the environment's."
)
@click.option(
    "--num-envs", type=int, help="Copies played side by side; rows do not depend on it."
)
@click.option("--gamma", type=float, help="Discount factor to note in the log.")
@QUIET
@worker_options
@_target_options
def rollouts(
    policies: Any,
    weights: Any,
    quiet: bool,
    workers: int,
    ray: Any,
    target: BuildTarget,
    **options: Any,
) -> None:
    """Play episodes with one or several policies, and log them.

    With several policies each episode is played by one, drawn by weight. The log holds
    this policy's log-probabilities of discrete actions. Continuous actions are clipped
    to the action space. An environment without a time limit of its own may need
    --time-limit to end.

    The rows are the same with --workers or --ray. An interrupted build leaves
    TARGET.parts; the same command continues it, with the same rows.

    \b
    Examples:
      koffline build rollouts --env CartPole-v1 --policy uniform --episodes 100 --out cartpole.hdf5
      koffline build rollouts --env koffline/NoisyPole-v0 --policy policy.npz --episodes 50 --out pole.hdf5
      koffline build rollouts --env CartPole-v1 --policy uniform --weight 1 --policy epsilon:0.2:uniform \\
          --weight 3 --episodes 200 --time-limit 100 --out mixture.hdf5
      koffline build rollouts --env CartPole-v1 --policy uniform --episodes 100000 --out shards \\
          --shard-rows 500000
    """
    from koffline.builders.rollouts import PartsFolder, RolloutPlayer, RolloutSettings
    from koffline.progress import progress_bar

    settings = RolloutSettings(weights=weights or (1.0,) * len(policies), **options)
    with RolloutPlayer(settings, policies, PassSettings(workers, ray)) as player:
        parts = PartsFolder(target.parts, settings, policies)
        title = f"playing {settings.env}"
        kept = (
            f"episodes that were finished are in {parts.folder}: the same command"
            " goes on"
        )
        nothing = "no episodes were finished; the same command begins again"
        with locked(parts.folder):
            ear = long_part(parts.folder, kept, nothing)
            with ear, progress_bar(title, settings.episodes, not quiet) as progress:
                played = parts.batches(player, progress)
                pieces: Iterable[list[Any]]
                if target.shard_rows:
                    pieces = ([part] for part in played)
                else:
                    pieces = [list(played)]
                log = target.write(map(player.join, pieces))
            target.record(log)
            parts.remove()


@build.command(no_args_is_help=True)
@click.option(
    "--env",
    required=True,
    help="CartPole-v1, …, or any id with --policy or --train-steps.",
)
@click.option(
    "--kind", required=True, type=click.Choice(KINDS), help="Who plays; see above."
)
@whole("--n", help="Number of rows; default 10,000, for a replay all.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="Policy instead of ours; medium-expert needs two.",
)
@click.option(
    "--noise",
    type=float,
    help="Share of uniform actions; continuous: noise in half ranges.",
)
@whole(
    "--train-steps",
    help="Train the policies, or the replay's learner, for so many steps.",
)
@QUIET
@_target_options
def control(
    policies: tuple[str, ...], quiet: bool, target: BuildTarget, **options: Any
) -> None:
    """Make logs of known quality, to train from.

    random: uniform actions. expert: the learner's best policy. medium: half-way between
    the two in return. replay: all steps that the learner saw until it was medium.
    medium-expert: episodes of both. The policies play with some noise. Policies for
    CartPole-v1, Pendulum-v1, InvertedPendulum-v5, Hopper-v5, HalfCheetah-v5 and
    Walker2d-v5 are bundled.

    \b
    Examples:
      koffline build control --env Pendulum-v1 --kind medium --n 10000 --out pendulum_medium.hdf5
      koffline build control --env CartPole-v1 --kind replay --out cartpole_replay.hdf5
      koffline build control --env Acrobot-v1 --kind expert --train-steps 20000 --out acrobot_expert.hdf5
    """
    from koffline.builders.control import ControlSettings, build_control

    target.record(
        target.write([build_control(ControlSettings(**options), policies, not quiet)])
    )


@build.command(no_args_is_help=True)
@click.option("--env", required=True, help="koffline/PuddleWorld-v0, …")
@gamma_option("Discount factor.", default=0.98, show_default=True)
@click.option(
    "--temperature",
    type=_POSITIVE,
    help="Temperature of the softmax; default: the environment's.",
)
@click.option("--out", required=True, metavar="FILE", help="The policy file: .npz.")
@_FORCE
def policy(
    env: str, gamma: float, temperature: float | None, out: str, force: bool
) -> None:
    """Make a good policy for one of koffline's environments (stochastic; always the
    same file).

    \b
    Examples:
      koffline build policy --env koffline/PuddleWorld-v0 --out puddle.npz
    """
    from koffline.builders.uniform import learn_grid_policy
    from koffline.envs.boxes import world_name
    from koffline.policies import save_grid_policy

    name = world_name(env)
    path = claim(out)
    check_target(path, force)
    save_grid_policy(path, learn_grid_policy(name, gamma, temperature))
    say(f"{path}: a policy for {env}")
