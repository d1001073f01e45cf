"""``koffline stats | plot | plot-all | export | record | play``: d3rlpy's commands, with its options."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from koffline.cli.targets import claim
from koffline.errors import ConfigError, DataError
from koffline.store.files import check_target
from koffline.store.targets import check_name
from koffline.untrusted.limits import read_json

_ONE_OR_MORE = click.IntRange(1)


_SHOW_DEFAULTS = {"show_default": True}


@click.command()
@click.argument("path")
def stats(path: str) -> None:
    """Statistics of a metric of a run. PATH: its CSV file.

    \b
    Examples:
      koffline stats runs/a/critic_loss.csv
      koffline stats runs/a/environment.csv
    """
    from koffline.figures import describe, read_metric

    click.echo("\n".join(describe(read_metric(path))))


@click.command(context_settings=_SHOW_DEFAULTS)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--window", type=_ONE_OR_MORE, default=1, help="Moving average over this many values.")
@click.option("--show-steps", is_flag=True, help="Steps on the x-axis instead of epochs.")
@click.option("--label", "labels", multiple=True, help="Label in the legend, one for each PATH.")
@click.option("--title", help="Title of the plot.")
@click.option("--save", "target", required=True, metavar="FILE", help="The picture: .png, .svg, .pdf …")
def plot(paths: tuple[str, ...], target: str, **options: Any) -> None:
    """Draw metrics of runs in one plot and print their statistics. PATH: CSV files.

    \b
    Examples:
      koffline plot runs/*/environment.csv --save returns.png
      koffline plot runs/a/critic_loss.csv runs/b/critic_loss.csv --label kloss --label td --save ab.png
      koffline plot runs/a/critic_loss.csv --window 10 --show-steps --save loss.svg
    """
    from koffline.figures import describe, draw_metrics, read_metric, save

    labels = options["labels"]
    if labels and len(labels) != len(paths):
        raise ConfigError(
            f"there are {len(labels)} --label and {len(paths)} files; give one for each, or none"
        )
    out = _claim_picture(target, paths)
    metrics = [read_metric(path) for path in paths]
    for metric in metrics:
        click.echo("\n".join(describe(metric)) + "\n")
    save(lambda figure: draw_metrics(figure, metrics, **options), (7.0, 4.2), out)
    click.echo(f"wrote {target}")


@click.command("plot-all")
@click.argument("path")
@click.option("--title", help="Title of the plot.")
@click.option("--save", "target", required=True, metavar="FILE", help="The picture: .png, .svg, .pdf …")
def plot_all(path: str, title: str | None, target: str) -> None:
    """Draw all metrics of a run in a grid and print its parameters. PATH: the folder of the run.

    \b
    Examples:
      koffline plot-all runs/a --save a.png
      koffline plot-all d3rlpy_logs/DQN_20240101000000 --title "DQN on CartPole" --save dqn.png
    """
    from koffline.figures import draw_grid, grid_size, metric_files, read_metric, save

    files, metrics = metric_files(path), []
    out = _claim_picture(target, [*files, Path(path) / "params.json"])
    for file in files:
        try:
            metrics.append(read_metric(file))
        except DataError as error:
            click.echo(f"left out: {error}", err=True)
    if not metrics:
        raise DataError(f"none of the {len(files)} CSV files in {path} can be drawn; see above")
    _print_parameters(Path(path) / "params.json")
    save(lambda figure: draw_grid(figure, metrics, title), grid_size(len(metrics)), out)
    click.echo(f"wrote {target}")


@click.command()
@click.argument("model_path")
@click.argument("output_path")
@click.option("--force", is_flag=True, help="Replace OUTPUT_PATH if it exists.")
def export(model_path: str, output_path: str, force: bool) -> None:
    """Export the greedy policy of a .d3 model as TorchScript (.pt) or ONNX (.onnx), scalers included.

    The file takes any number of observations at once and needs neither koffline nor d3rlpy.

    \b
    Examples:
      koffline export runs/a/model_1000.d3 policy.onnx
      koffline export runs/a/model_1000.d3 policy.pt --force
    """
    claim(output_path, "OUTPUT_PATH", lambda path: check_target(path, force))
    from koffline.algos.model_files import export_policy, load

    algo = load(model_path)
    export_policy(algo, output_path)
    click.echo(f"{output_path}: the policy of the {type(algo).__name__} in {model_path}")


def _episode_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What record and play share."""
    for option in (
        click.option("--seed", type=click.IntRange(0), default=0, help="Episode i's is SEED + i."),
        click.option("--max-steps", type=_ONE_OR_MORE, help="Cut episodes after this many steps."),
        click.option("--use-gymnasium", is_flag=True, hidden=True, help="As always; for d3rlpy's scripts."),
        click.option("--target-return", type=float, help="The return a Decision Transformer aims at."),
        click.option("--n-episodes", type=_ONE_OR_MORE, default=3, help="Episodes."),
        click.option("--env-id", required=True, help="A Gymnasium id, or package:id to import it first."),
    ):
        command = option(command)
    return command


@click.command(context_settings=_SHOW_DEFAULTS)
@click.argument("model_path")
@_episode_options
@click.option("--out", default="videos", metavar="DIR", help="Folder of the videos.")
@click.option("--force", is_flag=True, help="Replace older videos of the same names.")
def record(model_path: str, out: str, force: bool, **options: Any) -> None:
    """Record episodes of a saved model as GIFs.

    \b
    Examples:
      koffline record runs/a/model_1000.d3 --env-id CartPole-v1
      koffline record model.d3 --env-id Hopper-v5 --n-episodes 1 --out videos/hopper
    """
    from koffline.playing import film

    folder = check_name(out, is_whole=False)  # files are named as Gymnasium's RecordVideo names them
    targets = [folder / f"rl-video-episode-{index}.gif" for index in range(options["n_episodes"])]
    for target in targets:
        claim(target)
        check_target(target, force)
    with _player(model_path, "rgb_array", options) as (player, env):
        fps = float(env.metadata.get("render_fps") or 30.0)

        def play(index: int, seed: int) -> tuple[Any, str]:
            with film(targets[index], fps, force) as add:
                return player.play(seed, options["max_steps"], add), str(targets[index])

        _play_all(play, options)


@click.command(context_settings=_SHOW_DEFAULTS)
@click.argument("model_path")
@_episode_options
@click.option("--no-render", is_flag=True, help="Play without pictures, for the score alone.")
def play(model_path: str, no_render: bool, **options: Any) -> None:
    """Play episodes of a saved model on the screen and print its mean return.

    \b
    Examples:
      koffline play runs/a/model_1000.d3 --env-id CartPole-v1
      koffline play runs/a/model_1000.d3 --env-id Pendulum-v1 --no-render --n-episodes 20
    """
    if not no_render and not _has_display():
        raise ConfigError(
            "there is no display; give --no-render for the score alone, or use koffline record for videos"
        )
    with _player(model_path, None if no_render else "human", options) as (player, _):
        _play_all(lambda _, seed: (player.play(seed, options["max_steps"]), ""), options)


@contextlib.contextmanager
def _player(model_path: str, render_mode: str | None, options: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The model in the environment of the options; stdout belongs to the results alone."""
    import koffline.envs  # noqa: F401  (registers our worlds)
    from koffline.algos.model_files import load
    from koffline.envs.make import make_env
    from koffline.playing import Player

    with contextlib.redirect_stdout(sys.stderr):
        env = make_env(options["env_id"], render_mode=render_mode)
    try:
        yield Player(load(model_path), env, options["env_id"], options["target_return"]), env
    finally:
        with contextlib.suppress(Exception):  # nothing is left to lose
            env.close()


def _play_all(play: Callable[[int, int], tuple[Any, str]], options: dict[str, Any]) -> None:
    """Play, print a line for each episode and then the mean return, with its standard error."""
    values = []
    for index in range(options["n_episodes"]):
        with contextlib.redirect_stdout(sys.stderr):
            episode, target = play(index, options["seed"] + index)
        values.append(episode.value)
        cut = ", cut by --max-steps" if episode.is_cut else ""
        where = f" -> {target}" if target else ""
        click.echo(f"episode {index}: return {episode.value:.6g}, {episode.steps} steps{cut}{where}")
    spread = ""
    if len(values) > 1:
        error = statistics.stdev(values) / len(values) ** 0.5
        spread = f" ± {error:.3g} (standard error of {len(values)} episodes)"
    click.echo(f"Score: {statistics.fmean(values):.6g}{spread}")


def _print_parameters(path: Path) -> None:
    try:
        parameters = read_json(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        click.echo(f"left out: {path} cannot be read ({' '.join(str(error).split())})", err=True)
        return
    for key, value in parameters.items() if isinstance(parameters, dict) else ():
        click.echo(f"{key}={value}")


def _claim_picture(target: str, reads: Iterable[str | Path]) -> Path:
    """Where a figure goes; ConfigError or DataError before any work where it could not be saved."""
    from koffline.figures import check_picture

    return claim(target, "--save", check=check_picture, reads=reads)


def _has_display() -> bool:
    known = sys.platform in ("win32", "darwin") or os.environ.get("SDL_VIDEODRIVER") == "dummy"
    return known or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
