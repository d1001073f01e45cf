"""``koffline build uniform | rollouts | control | policy``: datasets and the policies that they are for."""

from __future__ import annotations

from collections.abc import Callable

import click

from koffline.builders import KINDS
from koffline.cli.build_target import FORCE, BuildTarget, progress_bar, resumable, target_options
from koffline.cli.options import SEED, gamma_option, whole, worker_options
from koffline.cli.targets import claim
from koffline.errors import ConfigError
from koffline.jobs import PassSettings
from koffline.store.files import atomic_file, check_target

_RESUME = click.option("--resume", is_flag=True, help="Continue a build that was cut.")
Claim = Callable[[], BuildTarget]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def build() -> None:
    """Build datasets and target policies."""


@build.command(no_args_is_help=True)
@click.option("--env", required=True, help="koffline/PuddleWorld-v0, … or chain.")
@whole("--n", required=True, help="Number of independent tuples.")
@click.option("--policy", help="The policy that acts: a file or a name; the chain needs none.")
@target_options
def uniform(env: str, n: int, policy: str | None, seed: int, claim_target: Claim) -> None:
    """Independent tuples: states uniform over the state space, actions of a policy, one step each.

    \b
    Examples:
      koffline build uniform --env koffline/PuddleWorld-v0 --n 5000 --policy policy.npz --out puddle.hdf5
      koffline build uniform --env koffline/NoisyMountainCar-v0 --n 5000 --policy uniform --out car.hdf5
      koffline build uniform --env chain --n 2000 --out chain.hdf5
    """
    import numpy as np

    from koffline.builders.uniform import CHAIN, build_chain, build_uniform

    target, generator = claim_target(), np.random.default_rng(seed)
    if env == CHAIN and policy is not None:
        raise ConfigError(f"--policy is {policy}, but the chain has no actions to choose; leave it out")
    if env == CHAIN:
        log = build_chain(n, generator)
    elif policy is None:
        raise ConfigError(f"--policy is missing; {env} needs one: a file, or 'uniform'")
    else:
        log = build_uniform(env, policy, n, generator)
    target.write(log)


@build.command(no_args_is_help=True)
@click.option("--env", required=True, help="Any Gymnasium id, or package:id to import it first.")
@click.option("--policy", "policies", multiple=True, required=True, help="A policy; repeat it for a mixture.")
@click.option("--weight", "weights", multiple=True, type=float, help="Share of each policy of a mixture.")
@click.option("--episodes", type=int, required=True, help="Number of episodes.")
@click.option("--time-limit", type=int, help="Steps until truncation; default: the environment's.")
@click.option("--num-envs", type=int, help="Copies played side by side; rows do not depend on it.")
@click.option("--gamma", type=float, help="Discount to note in the log as a hint.")
@_RESUME
@worker_options
@target_options
def rollouts(
    env: str,
    policies: tuple[str, ...],
    weights: tuple[float, ...],
    episodes: int,
    time_limit: int | None,
    num_envs: int | None,
    gamma: float | None,
    resume: bool,
    workers: int,
    ray: str | None,
    seed: int,
    claim_target: Claim,
) -> None:
    """Whole episodes of a policy or a mixture; time limits are truncations, log-probabilities are stored.

    Each episode of a mixture is played by one policy, drawn by weight; the log-probability of an action is
    that policy's. Continuous actions have none; those outside the action space are clipped to it and stored
    as played. An environment without a time limit of its own may need --time-limit to end.

    An episode depends on the seed and its own number alone: rows are the same with --workers or --ray. A
    build that is cut leaves TARGET.parts; --resume continues it to the same rows.

    \b
    Examples:
      koffline build rollouts --env CartPole-v1 --policy uniform --episodes 100 --out cartpole.hdf5
      koffline build rollouts --env koffline/NoisyPole-v0 --policy policy.npz --episodes 50 --out pole.hdf5
      koffline build rollouts --env CartPole-v1 --policy uniform --weight 1 --policy epsilon:0.2:uniform \\
          --weight 3 --episodes 200 --time-limit 100 --out mixture.hdf5
      koffline build rollouts --env CartPole-v1 --policy uniform --episodes 100000 --out shards \\
          --shard-rows 500000
    """
    from koffline.builders.resumable import PartsFolder, policy_digests
    from koffline.builders.rollouts import RolloutPlayer, RolloutSettings
    from koffline.data.disk.opening import open_lazy

    shares = weights or (1.0,) * len(policies)
    settings = RolloutSettings(env, episodes, shares, time_limit, num_envs, seed, gamma)
    target = claim_target()
    with RolloutPlayer(settings, policies, PassSettings(workers, ray)) as player:
        parts = PartsFolder(target.parts, settings, policy_digests(policies))
        with resumable(parts, resume, target.force):
            with progress_bar(f"playing {env}", episodes) as progress:
                if target.is_shards:
                    parts.build_shards(player, target.shard_writer(), progress)
                else:
                    log = parts.build(player, progress)
            if target.is_shards:
                target.record(open_lazy(target.path))
            else:
                target.write(log)


@build.command(no_args_is_help=True)
@click.option(
    "--env", required=True, help="CartPole-v1, Pendulum-v1, … or any id with --policy, --train-steps."
)
@click.option("--kind", required=True, type=click.Choice(KINDS), help="Who plays.")
@click.option("--n", type=int, help="Rows; default: 10,000, of a replay all.")
@click.option(
    "--policy", "policies", multiple=True, help="Instead of the bundled one; medium-expert has two."
)
@click.option("--noise", type=float, help="Share of uniform actions, or deviation in half action ranges.")
@click.option("--train-steps", type=int, help="Learn the policies, or the replay, in so many steps.")
@_RESUME
@target_options
def control(
    env: str,
    kind: str,
    n: int | None,
    policies: tuple[str, ...],
    noise: float | None,
    train_steps: int | None,
    resume: bool,
    seed: int,
    claim_target: Claim,
) -> None:
    """Logs to learn control from, of uniform actions and of policies learned by playing.

    random: uniform actions. expert: the learner's best policy. medium: half-way between the two in return.
    replay: what the learner saw until it was medium. medium-expert: episodes of both. The policies play with
    some noise. Those of CartPole-v1, Pendulum-v1, InvertedPendulum-v5 and HalfCheetah-v5 are bundled.

    A build that is cut leaves TARGET.parts, the learner included; --resume continues it to the same rows.

    \b
    Examples:
      koffline build control --env Pendulum-v1 --kind medium --n 10000 --out pendulum_medium.hdf5
      koffline build control --env CartPole-v1 --kind replay --out cartpole_replay.hdf5
      koffline build control --env Acrobot-v1 --kind expert --train-steps 20000 --out acrobot_expert.hdf5
    """
    from koffline.builders.control import ControlSettings, build_control, fingerprints
    from koffline.builders.resumable import PartsFolder

    settings = ControlSettings(env, kind, n, seed, noise, train_steps)
    target = claim_target()
    parts = PartsFolder(target.parts, settings, fingerprints(policies, settings))
    with resumable(parts, resume, target.force):
        target.write(build_control(settings, policies, parts, progress_bar))


@build.command(no_args_is_help=True)
@click.option("--env", required=True, help="koffline/PuddleWorld-v0, …")
@gamma_option("Discount factor.", default=0.98, show_default=True)
@click.option("--temperature", type=float, help="Of the softmax; default: the world's.")
@click.option("--source", type=click.Choice(["grid", "dqn"]), default="grid", show_default=True)
@whole("--steps", default=10_000, show_default=True, help="Gradient steps of the DQN.")
@SEED
@click.option("--out", required=True, metavar="FILE", help="The policy file: .npz (grid) or .d3 (DQN).")
@FORCE
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
    from koffline.builders.uniform import build_uniform, learn_grid_policy
    from koffline.envs.boxes import world_name
    from koffline.policies import save_grid_policy

    name = world_name(env)
    path = claim(out, check=lambda path: check_target(path, force))
    if source == "grid":
        learned = learn_grid_policy(name, gamma, temperature)
        with atomic_file(path, force) as temporary:
            save_grid_policy(temporary, learned)
    else:
        import numpy as np

        from koffline.algos.stock_learners import TUPLES, train_dqn

        with atomic_file(path, force) as temporary, progress_bar("training DQN", steps) as progress:
            log = build_uniform(name, "uniform", TUPLES, np.random.default_rng(seed), gamma)
            train_dqn(log, gamma, steps, seed, temporary, progress)
    click.echo(f"{path}: a policy for {env}")
