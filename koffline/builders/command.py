"""``koffline build uniform | rollouts | policy``: make datasets and the policies that they are for."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from koffline.errors import ConfigError, DataError

_OUT = click.option(
    "--out", required=True, metavar="TARGET", help="An .hdf5 or .npz file, or minari:<id>; see koffline data."
)
_FORMAT = click.option(
    "--format", "format_", type=click.Choice(["hdf5", "minari", "npz"]), help="Format; else by TARGET's name."
)
_FORCE = click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
_SEED = click.option("--seed", type=int, default=0, show_default=True, help="Seed of everything random.")
_MANIFEST = click.option(
    "--manifest", metavar="FILE", help="Manifest to add the entry to; default: manifest.json beside a file."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def build() -> None:
    """Build datasets and target policies."""


@build.command(no_args_is_help=True)
@click.option("--env", required=True, help="koffline/PuddleWorld-v0, … or chain.")
@click.option("--n", type=int, required=True, help="Number of independent tuples.")
@click.option("--policy", help="The policy that acts: a file or a name; the chain needs none.")
@_SEED
@_OUT
@_FORMAT
@_FORCE
@_MANIFEST
def uniform(
    env: str,
    n: int,
    policy: str | None,
    seed: int,
    out: str,
    format_: str | None,
    force: bool,
    manifest: str | None,
) -> None:
    """Independent tuples: states uniform over the state space, actions of a policy, one step each.

    \b
    Examples:
      koffline build uniform --env koffline/PuddleWorld-v0 --n 5000 --policy policy.npz --out puddle.hdf5
      koffline build uniform --env koffline/NoisyMountainCar-v0 --n 5000 --policy uniform --out car.hdf5
      koffline build uniform --env chain --n 2000 --out chain.hdf5
    """
    import numpy as np

    from koffline.builders.uniform import CHAIN, build_chain, build_uniform

    if n < 1:
        raise ConfigError(f"--n is {n}; give a positive number of tuples")
    target = _Target(out, format_, force, manifest)
    generator = np.random.default_rng(_checked_seed(seed))
    if env == CHAIN and policy is not None:
        raise ConfigError(f"--policy is {policy}, but the chain has no actions to choose; leave it out")
    if env == CHAIN:
        log = build_chain(n, generator)
    elif policy is None:
        raise ConfigError(f"--policy is missing; {env} needs one: a file, or 'uniform'")
    else:
        log = build_uniform(env, policy, n, generator)
    target.write(log, seed)


@build.command(no_args_is_help=True)
@click.option("--env", required=True, help="Any Gymnasium id, or package:id to import it first.")
@click.option("--policy", "policies", multiple=True, required=True, help="A policy; repeat it for a mixture.")
@click.option("--weight", "weights", multiple=True, type=float, help="Share of each policy of a mixture.")
@click.option("--episodes", type=int, required=True, help="Number of episodes.")
@click.option("--time-limit", type=int, help="Steps until truncation; default: the environment's.")
@click.option("--num-envs", type=int, help="Copies played side by side; rows do not depend on it.")
@click.option("--gamma", type=float, help="Discount to note in the log as a hint.")
@click.option("--resume", is_flag=True, help="Continue a build that was cut.")
@_SEED
@_OUT
@_FORMAT
@_FORCE
@_MANIFEST
def rollouts(
    env: str,
    policies: tuple[str, ...],
    weights: tuple[float, ...],
    episodes: int,
    time_limit: int | None,
    num_envs: int | None,
    gamma: float | None,
    resume: bool,
    seed: int,
    out: str,
    format_: str | None,
    force: bool,
    manifest: str | None,
) -> None:
    """Whole episodes of a policy or a mixture; time limits are truncations, log-probabilities are stored.

    Each episode of a mixture is played by one policy, drawn by weight; the log-probability of an action is
    that policy's. Continuous actions have none; those outside the action space are clipped to it and stored
    as played. An environment without a time limit of its own may need --time-limit to end.

    An episode depends on the seed and its own number alone. A build that is cut leaves TARGET.parts;
    --resume continues it to the same rows.

    \b
    Examples:
      koffline build rollouts --env CartPole-v1 --policy uniform --episodes 100 --out cartpole.hdf5
      koffline build rollouts --env koffline/NoisyPole-v0 --policy policy.npz --episodes 50 --out pole.hdf5
      koffline build rollouts --env CartPole-v1 --policy uniform --weight 1 --policy epsilon:0.2:uniform \\
          --weight 3 --episodes 200 --time-limit 100 --out mixture.hdf5
    """
    from koffline.builders.resumable import PartsFolder, policy_digests
    from koffline.builders.rollouts import RolloutPlayer, RolloutSettings

    shares = weights or (1.0,) * len(policies)
    settings = RolloutSettings(env, episodes, shares, time_limit, num_envs, seed, gamma)
    target = _Target(out, format_, force, manifest)
    with RolloutPlayer(settings, policies) as player:
        parts = PartsFolder(target.parts, settings, policy_digests(policies))
        parts.open(resume, force)
        try:
            with _bar(f"playing {env}", episodes) as progress:
                log = parts.build(player, progress)
            target.write(log, seed)
        except KeyboardInterrupt:
            if not parts.kept:
                raise
            click.echo(f"interrupted; finished episodes are in {parts.folder}: --resume goes on", err=True)
            raise SystemExit(130) from None
    parts.remove()


@build.command(no_args_is_help=True)
@click.option("--env", required=True, help="koffline/PuddleWorld-v0, …")
@click.option("--gamma", type=float, default=0.98, show_default=True, help="Discount factor.")
@click.option("--temperature", type=float, help="Of the softmax; default: the world's.")
@click.option("--source", type=click.Choice(["grid", "dqn"]), default="grid", show_default=True)
@click.option("--steps", type=int, default=10_000, show_default=True, help="Gradient steps of the DQN.")
@_SEED
@click.option("--out", required=True, metavar="FILE", help="The policy file: .npz (grid) or .d3 (DQN).")
@_FORCE
def policy(
    env: str,
    gamma: float,
    temperature: float | None,
    source: str,
    steps: int,
    seed: int,
    out: str,
    force: bool,
) -> None:
    """A good policy of a world, to be evaluated: from a grid (stochastic), or a d3rlpy DQN (greedy).

    The grid's is deterministic in everything; the DQN is trained offline on 20,000 tuples with uniform states
    and actions.

    \b
    Examples:
      koffline build policy --env koffline/PuddleWorld-v0 --out puddle.npz
      koffline build policy --env koffline/NoisyPole-v0 --source dqn --steps 20000 --out pole.d3
    """
    from koffline.builders.target_policy import learn_grid_policy
    from koffline.data.files import atomic_file, check_target
    from koffline.envs.boxes import world_name
    from koffline.policies import save_grid_policy

    if not 0.0 < gamma < 1.0:
        raise ConfigError(f"--gamma is {gamma}; give a discount between 0 and 1")
    name, path = world_name(env), Path(out)
    check_target(path, force)
    if source == "grid":
        learned = learn_grid_policy(name, gamma, temperature)
        with atomic_file(path, force) as temporary:
            save_grid_policy(temporary, learned)
    else:
        import numpy as np

        from koffline.algos.offline_dqn import TUPLES, train_dqn
        from koffline.builders.uniform import build_uniform

        if steps < 1:
            raise ConfigError(f"--steps is {steps}; give a positive number")
        with atomic_file(path, force) as temporary, _bar("training DQN", steps) as progress:
            generator = np.random.default_rng(_checked_seed(seed))
            log = build_uniform(name, "uniform", TUPLES, generator, gamma)
            train_dqn(log, gamma, steps, seed, temporary, progress)
    click.echo(f"{path}: a policy for {env}")


class _Target:
    """Where a dataset goes; whether it may is checked before the long part."""

    def __init__(self, out: str, format_: str | None, force: bool, manifest: str | None) -> None:
        from koffline.builders.manifest import NAME, read_manifest
        from koffline.data.files import check_target
        from koffline.data.minari import PREFIX, data_folder, minari_folder
        from koffline.data.sources import target_format

        self._out, self._force = out, force
        self._format = target_format(out, format_)
        folder = minari_folder(out.removeprefix(PREFIX)) if out.startswith(PREFIX) else Path(out)
        if not out.startswith(PREFIX) or os.path.lexists(folder):  # folders of Minari's are made when written
            check_target(folder, force)
        if folder.is_dir() and self._format != "minari":
            raise DataError(f"{folder} is a folder; give a file name")
        if os.path.lexists(folder) and self._format == "minari" and data_folder(folder) is None:
            raise DataError(f"{folder} holds something else and will not be replaced; choose another name")
        self.path = folder
        self.parts = folder.with_name(f"{folder.name}.parts")
        self._manifest = Path(manifest) if manifest else folder.parent / NAME
        if manifest and not self._manifest.parent.is_dir():
            raise DataError(f"{self._manifest.parent} does not exist; create it or name another --manifest")
        read_manifest(self._manifest)

    def write(self, log: Any, seed: int) -> None:
        """The dataset, then its entry in the manifest; say what was written."""
        from koffline.builders.manifest import add_to_manifest
        from koffline.data.sources import write_transitions

        write_transitions(log, self._out, self._format, self._force)
        command = shlex.join(["koffline", *sys.argv[1:]])
        add_to_manifest(self._manifest, self.path, log, command, seed)
        click.echo(f"{self._out}: {log}")
        click.echo(f"sha256 {log.sha256}, entry in {self._manifest}")


def _checked_seed(seed: int) -> int:
    if seed < 0:
        raise ConfigError(f"--seed is {seed}; give a number that is not negative")
    return seed


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A rich bar on stderr; None where that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
