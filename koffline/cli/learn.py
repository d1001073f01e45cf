"""Training and what it leaves: ``koffline train``, ``sweep``, ``online``, ``export`` and ``d3rlpy``."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from koffline.cli.options import QUIET, Option, set_option, whole, worker_options
from koffline.cli.targets import claim
from koffline.errors import ConfigError, printable
from koffline.store.files import check_target
from koffline.store.run_record import shown_command

if TYPE_CHECKING:
    from koffline.online.run import OnlineResult, Score

_DATA: Option = click.option("--data", metavar="SOURCE", help="The log, instead of data.source.")
_DEVICE: Option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")


@click.command(no_args_is_help=True)
@click.argument("config")
@set_option("One setting, e.g. algo.params.gamma=0.98; wins over the file.")
@_DATA
@click.option("--out", metavar="DIR", help="Folder of the run; default runs/ and the name of CONFIG.")
@_DEVICE
@click.option("--resume", is_flag=True, help="Go on with the run in --out where its last epoch ended.")
@QUIET
def train(
    config: str,
    assignments: tuple[str, ...],
    data: str | None,
    out: str | None,
    device: str,
    resume: bool,
    quiet: bool,
) -> None:
    """Train the algorithm of CONFIG, d3rlpy's or koffline's, over a log.

    CONFIG is a YAML file: data (source, split), algo ({type, params} with only the differences from d3rlpy's
    defaults), train, evaluators, logger; configs/ has one per algorithm. The folder of the run is d3rlpy's
    (params.json, a CSV per metric, model_*.d3) plus config.yaml, run.json and checkpoint.pt.

    \b
    Examples:
      koffline train configs/kloss_dqn.yaml --out runs/a
      koffline train configs/cql.yaml --set algo.params.gamma=0.98 --set train.n_steps=5000
      koffline train configs/kloss_sac.yaml --data minari:pendulum/medium-v0 --out runs/b
      koffline train configs/kloss_sac.yaml --out runs/b --resume
    """
    from koffline.train.config import load_config

    settings = load_config(config, assignments, data)
    # After the settings: what is misspelt is said before torch is loaded.
    from koffline.train.run import train as run

    folder = claim(Path("runs") / Path(config).stem if out is None else out, is_whole=False)
    try:
        # Environments and loggers may print: stdout belongs to the result alone.
        with contextlib.redirect_stdout(sys.stderr):
            result = run(settings, folder, device=device, resume=resume, show_progress=not quiet)
    except KeyboardInterrupt:
        hint = "; go on with --resume" if (folder / "checkpoint.pt").exists() else ""
        click.echo(f"interrupted; the epochs that had ended are in {folder}{hint}", err=True)
        raise SystemExit(130) from None
    from koffline.report import make_console, print_table

    metrics = {name: value for name, value in result.metrics.items() if not name.startswith("time_")}
    rows, right = [(printable(name), f"{value:.5g}") for name, value in metrics.items()], ("last epoch",)
    console, title = make_console(), f"{result.steps} steps in {result.seconds:.1f} s"
    print_table(console, title, ("metric", "last epoch"), rows, right=right)
    console.print(f"model: {result.model}", soft_wrap=True, highlight=False)


@click.command(no_args_is_help=True)
@click.argument("config")
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY=A,B,…",
    help="Values of one setting, e.g. algo.params.gamma=0.98,0.99; may be given several times.",
)
@click.option("--seeds", type=int, default=5, show_default=True, help="How many, from train.seed on.")
@set_option("One setting of all runs, e.g. train.n_steps=5000; wins over the file.")
@_DATA
@click.option("--out", metavar="DIR", help="Folder of the sweep; default sweeps/ and the name of CONFIG.")
@click.option("--metric", help="What counts: an evaluator or a loss; default the return in an environment.")
@click.option(
    "--maximize/--minimize", default=None, help="Default: errors, losses and distances are minimised."
)
@worker_options
@_DEVICE
@click.option(
    "--resume/--force", "resume", default=True, help="Go on in --out (default), or delete its runs."
)
def sweep(
    config: str, out: str | None, workers: int, ray: str | None, device: str, resume: bool, **asked: Any
) -> None:
    """Train CONFIG with every combination of the --grid values and several seeds.

    Writes DIR/runs/NAME (a run directory each), summary.json, summary.md (interquartile mean over seeds with
    a bootstrap interval, the best setting first) and best.yaml. The same command goes on with a killed sweep,
    runs in the middle too; any other grid, seeds or settings in the same DIR train only what is not there
    yet. A run that fails does not stop the others; errors.txt says why. The summary's metric is that of the
    last epoch: changing --metric trains nothing again.

    \b
    Examples:
      koffline sweep configs/kloss_dqn.yaml --grid algo.params.learning_rate=1e-3,3e-4 --seeds 5 --workers 2
      koffline sweep configs/iql.yaml --grid algo.params.expectile=0.7,0.9 --metric td_error --minimize
      koffline sweep configs/cql.yaml --grid data.source=a.hdf5,b.hdf5 --seeds 5 --ray auto --out sweeps/cql
    """
    from koffline.train.config import make_plan
    from koffline.train.sweep import print_summary, run_sweep

    plan = make_plan(config, **asked)
    folder = Path("sweeps") / Path(config).stem if out is None else out
    folder = claim(folder, is_whole=False, inputs=None if resume else [config, *plan.inputs])
    try:
        summary = run_sweep(plan, folder, workers, ray, device, not resume, shown_command())
    except KeyboardInterrupt:
        click.echo(f"interrupted; what is trained is in {folder}/runs: the same command goes on", err=True)
        raise SystemExit(130) from None
    print_summary(summary)
    runs = len(plan.settings) * len(plan.seeds)
    click.echo(f"{runs} runs in {folder}/runs; summary {folder}/summary.json")
    if summary.failures:
        first = summary.failures[0]
        click.echo(
            f"error: {len(summary.failures)} of {runs} runs failed, {first.name} first: {first.reason}; see "
            f"{folder}/errors.txt, the same command runs them again",
            err=True,
        )
        raise SystemExit(2)


@click.command(no_args_is_help=True)
@click.argument("config", required=False)
@set_option("One setting, e.g. critic=fvi; wins over the file.")
@whole("--seed-count", help="How many seeds; default 6.")
@whole("--seed", 0, help="The first one; default 0.")
@click.option("--streaming", is_flag=True, help="Learn from each step once, without a replay.")
@click.option("--out", metavar="DIR", help="Folder of the run; default runs/ENVIRONMENT-CRITIC.")
@click.option("--resume", metavar="DIR", help="Go on with the run in DIR; CONFIG may be left out.")
@whole("--workers", default=1, show_default=True, help="Processes, one core each.")
@QUIET
def online(
    config: str | None,
    assignments: tuple[str, ...],
    streaming: bool,
    out: str | None,
    resume: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Train Trust-PCL in a Gymnasium environment with a growing replay and several seeds.

    CONFIG is a YAML file that states only what differs from the defaults; configs/online/ has one for each of
    the paper's environments, and paper.yaml with the paper's own settings. Without it, --set env=NAME says
    what is needed. The critic is kloss, kloss_slow, memory, fvi, td0 or rg. All seeds learn in one stack.

    The folder of the run gets seed_<k>/evaluation.csv (return of the mean action, of sampled actions),
    metrics.csv, model.d3 and replay.hdf5 (a log for koffline evaluate and koffline train), summary.json over
    the seeds, config.yaml, learning_curve.png and checkpoints. A killed run goes on to the bit with --resume.

    \b
    Examples:
      koffline online configs/online/inverted_pendulum.yaml --out runs/pendulum
      koffline online configs/online/swimmer.yaml --set critic=td0 --set steps=500000 --workers 2
      koffline online configs/online/ant.yaml --set env_options.ctrl_cost_weight=0.1 --seed-count 3
      koffline online --set env=Pendulum-v1 --set critic=kloss_slow --set steps=50000
      koffline online --resume runs/pendulum
    """
    from koffline.online.config import load_config
    from koffline.store import CONFIG

    if config is None and resume is None and not assignments:
        raise click.UsageError("give CONFIG, --set env=NAME, or --resume DIR")
    source: Any = config
    if config is None:
        source = {} if resume is None else Path(resume) / CONFIG
    if resume is not None and not Path(resume).is_dir():
        raise click.UsageError(f"--resume {resume}: there is no such folder")
    settings = load_config(source, (*assignments, *["streaming=true"] * streaming))
    from koffline.online import run  # after the config's errors: it imports torch

    folder = resume if resume is not None else run.default_folder(settings) if out is None else out
    folder = claim(folder, "--out" if resume is None else "--resume", is_whole=False)
    try:
        # Environments may print: stdout belongs to the result alone.
        with contextlib.redirect_stdout(sys.stderr):
            result = run.train(settings, out, resume=resume, show_progress=not quiet, **options)
    except KeyboardInterrupt:
        hint = f"; go on with koffline online --resume {folder}" if (folder / CONFIG).exists() else ""
        click.echo(f"interrupted{hint}", err=True)
        raise SystemExit(130) from None
    _print_scores(result)
    if diverged := result.summary.diverged:  # existing files are kept
        names = ", ".join(f"{seed} (by step {step})" for seed, step in diverged.items())
        raise ConfigError(
            f"training diverged with seed {names}: the gradient is not finite; lower learning_rate or "
            "max_grad_norm, or scale the rewards with reward_scale"
        )


def _print_scores(result: OnlineResult) -> None:
    """Print the last evaluation of every seed and over the seeds, the speed and the folder."""
    from koffline.report import make_console, print_table
    from koffline.spread import LEVEL

    summary, scores, console = result.summary, result.summary.last, make_console()
    numbers = zip(*(score.per_seed for score in scores), strict=True)
    each = [[str(seed), *map(_number, own)] for seed, own in zip(summary.seeds, numbers, strict=True)]
    together = [
        ["IQM", *(_number(score.spread.iqm) for score in scores)],
        [f"{LEVEL:.0%} interval", *map(_interval, scores)],
        [summary.best_name.replace("_", " "), *(_number(score.best) for score in scores)],
    ]
    title = f"{summary.env}, {summary.critic}: {summary.steps} steps per seed"
    names = ("return", "sampled return", "length")
    print_table(console, title, ("seed", *names), each, together, right=names)
    speed = f"{summary.seconds:.1f} s, {summary.steps_per_second:.0f} environment steps per second"
    for line in (speed, f"run: {result.out}"):
        console.print(line, soft_wrap=True, highlight=False)


def _number(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "–"


def _interval(score: Score) -> str:
    low, high = score.spread.low, score.spread.high
    return "–" if math.isnan(low) else f"{_number(low)} … {_number(high)}"


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
    check_target(claim(output_path, "OUTPUT_PATH"), force)
    from koffline.algos.model_files import export_policy, load

    algo = load(model_path)
    export_policy(algo, output_path)
    click.echo(f"{output_path}: the policy of the {type(algo).__name__} in {model_path}")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", metavar="COMMAND")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def d3rlpy(command: str, arguments: tuple[str, ...]) -> None:
    """Run d3rlpy's own command: stats, plot, plot-all, record, play.

    It knows koffline's algorithms, reads models without running what is in them, and finds environments in
    Gymnasium. Its options: koffline d3rlpy COMMAND --help. Films need pip install 'koffline[video]'.

    \b
    Examples:
      koffline d3rlpy plot-all runs/a --save a.png
      koffline d3rlpy stats runs/a/critic_loss.csv
      koffline d3rlpy record runs/a/model_1000.d3 --env-id CartPole-v1
    """
    from koffline.algos.model_files import run_d3rlpy

    run_d3rlpy([command, *arguments])
