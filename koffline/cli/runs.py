"""``koffline stats | plot | plot-all | export | record | play``: d3rlpy's commands, with its options."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from koffline.cli.targets import claim
from koffline.errors import ConfigError, DataError
from koffline.store.files import check_target
from koffline.store.targets import check_name
from koffline.untrusted.limits import read_json

_ONE_OR_MORE = click.IntRange(1)


def _check_limits(
    context: click.Context, parameter: click.Parameter, limits: tuple[float, float] | None
) -> tuple[float, float] | None:
    if limits and not -math.inf < limits[0] < limits[1] < math.inf:
        raise ConfigError(f"--{parameter.name} is {limits[0]:g} {limits[1]:g}; give the lower end first")
    return limits


@click.command()
@click.argument("path")
def stats(path: str) -> None:
    """Statistics of a metric of a run. PATH: its CSV file.

    \b
    Examples:
      koffline stats runs/a/critic_loss.csv
      koffline stats runs/a/environment.csv
    """
    from koffline.runs.figures import describe, read_metric

    click.echo("\n".join(describe(read_metric(path))))


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--window", type=_ONE_OR_MORE, default=1, show_default=True, help="Moving average over this many values."
)
@click.option("--show-steps", is_flag=True, help="Steps on the x-axis instead of epochs.")
@click.option("--show-max", is_flag=True, help="A line at the largest value.")
@click.option("--label", "labels", multiple=True, help="Label in the legend, one for each PATH.")
@click.option(
    "--xlim", nargs=2, type=float, metavar="LOW HIGH", callback=_check_limits, help="Limits of the x-axis."
)
@click.option(
    "--ylim", nargs=2, type=float, metavar="LOW HIGH", callback=_check_limits, help="Limits of the y-axis."
)
@click.option("--title", help="Title of the plot.")
@click.option("--ylabel", help="Label of the y-axis; default: the metric's name.")
@click.option("--save", metavar="FILE", help="Save the plot (.png, .svg, .pdf …) instead of showing it.")
def plot(paths: tuple[str, ...], save: str | None, **options: Any) -> None:
    """Draw metrics of runs in one plot and print their statistics. PATH: CSV files.

    \b
    Examples:
      koffline plot runs/*/environment.csv --save returns.png
      koffline plot runs/a/critic_loss.csv runs/b/critic_loss.csv --label kloss --label td
      koffline plot runs/a/critic_loss.csv --window 10 --show-steps --save loss.svg
    """
    from koffline.cli.figures import check_where, save_or_show
    from koffline.runs.figures import describe, draw_metrics, read_metric

    labels = options["labels"]
    if labels and len(labels) != len(paths):
        raise ConfigError(
            f"there are {len(labels)} --label and {len(paths)} files; give one for each, or none"
        )
    check_where(save, paths)
    metrics = [read_metric(path) for path in paths]
    for metric in metrics:
        click.echo("\n".join(describe(metric)) + "\n")
    _say(save_or_show(lambda figure: draw_metrics(figure, metrics, **options), (7.0, 4.2), save))


@click.command("plot-all")
@click.argument("path")
@click.option("--title", help="Title of the plot.")
@click.option("--save", metavar="FILE", help="Save the plot (.png, .svg, .pdf …) instead of showing it.")
def plot_all(path: str, title: str | None, save: str | None) -> None:
    """Draw all metrics of a run in a grid and print its parameters. PATH: the folder of the run.

    \b
    Examples:
      koffline plot-all runs/a --save a.png
      koffline plot-all d3rlpy_logs/DQN_20240101000000 --title "DQN on CartPole"
    """
    from koffline.cli.figures import check_where, save_or_show
    from koffline.runs.figures import draw_grid, grid_size, metric_files, read_metric

    files, metrics = metric_files(path), []
    check_where(save, [*files, Path(path) / "params.json"])
    for file in files:
        try:
            metrics.append(read_metric(file))
        except DataError as error:
            click.echo(f"left out: {error}", err=True)
    if not metrics:
        raise DataError(f"none of the {len(files)} CSV files in {path} can be drawn; see above")
    _print_parameters(Path(path) / "params.json")
    _say(save_or_show(lambda figure: draw_grid(figure, metrics, title), grid_size(len(metrics)), save))


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
    from koffline.algos.export import export_policy
    from koffline.algos.loading import load

    algo = load(model_path)
    export_policy(algo, output_path)
    click.echo(f"{output_path}: the policy of the {type(algo).__name__} in {model_path}")


def _episode_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What record and play share."""
    for option in (
        click.option(
            "--seed", type=click.IntRange(0), default=0, show_default=True, help="Episode i's is SEED + i."
        ),
        click.option("--max-steps", type=_ONE_OR_MORE, help="Cut episodes after this many steps."),
        click.option("--use-gymnasium", is_flag=True, hidden=True, help="As always; for d3rlpy's scripts."),
        click.option("--target-return", type=float, help="The return a Decision Transformer aims at."),
        click.option("--n-episodes", type=_ONE_OR_MORE, default=3, show_default=True, help="Episodes."),
        click.option("--env-header", help="A line of Python that is run and makes the environment `env`."),
        click.option("--env-id", help="A Gymnasium id, or package:id to import its package first."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("model_path")
@_episode_options
@click.option("--out", default="videos", show_default=True, metavar="DIR", help="Folder of the videos.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["gif", "mp4", "png"]),
    default="gif",
    show_default=True,
    help="mp4 needs imageio-ffmpeg; png is a folder of frames.",
)
@click.option("--force", is_flag=True, help="Replace older videos of the same names.")
def record(model_path: str, out: str, format_: str, force: bool, **options: Any) -> None:
    """Record episodes of a saved model as videos.

    \b
    Examples:
      koffline record runs/a/model_1000.d3 --env-id CartPole-v1
      koffline record model.d3 --env-id Hopper-v5 --n-episodes 1 --out videos/hopper --format mp4
      koffline record model.d3 --env-header "env = gymnasium.make('CartPole-v1', render_mode='rgb_array')"
    """
    from koffline.runs.playing import mp4_writer, video, video_target

    if format_ == "mp4":
        mp4_writer()  # raises ConfigError where its package is missing
    folder = check_name(out, is_whole=False)
    targets = [video_target(folder, i, format_) for i in range(options["n_episodes"])]
    for target in targets:
        claim(target)
        check_target(target, force)
    with _player(model_path, "rgb_array", options) as (player, env):
        fps = float(env.metadata.get("render_fps") or 30.0)

        def play(index: int, seed: int) -> tuple[Any, str]:
            with video(targets[index], format_, fps, force) as add:
                return player.play(seed, options["max_steps"], add), str(targets[index])

        _play_all(play, options)


@click.command()
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
    if not no_render and options["env_id"] is not None and not _has_display():
        raise ConfigError(
            "there is no display; give --no-render for the score alone, or use koffline record for videos"
        )
    with _player(model_path, None if no_render else "human", options) as (player, _):
        _play_all(lambda _, seed: (player.play(seed, options["max_steps"]), ""), options)


@contextlib.contextmanager
def _player(model_path: str, render_mode: str | None, options: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The model in the environment of the options; stdout belongs to the results alone."""
    from koffline.algos.loading import load
    from koffline.runs.playing import Player, open_environment

    with contextlib.redirect_stdout(sys.stderr):
        env = open_environment(options["env_id"], options["env_header"], render_mode)
    try:
        mode = getattr(env, "render_mode", None)
        if render_mode == "rgb_array" and mode != "rgb_array":
            raise ConfigError(
                f"the environment's render_mode is {mode!r}; make it with render_mode='rgb_array'"
            )
        name = options["env_id"] or "the environment"
        yield Player(load(model_path), env, name, options["target_return"]), env
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


def _say(path: Path | None) -> None:
    if path is not None:
        click.echo(f"wrote {path}")


def _has_display() -> bool:
    known = sys.platform in ("win32", "darwin") or os.environ.get("SDL_VIDEODRIVER") == "dummy"
    return known or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
