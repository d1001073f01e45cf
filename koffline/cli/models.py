"""Commands for trained models: ``koffline export | d3rlpy``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import click

from koffline.cli.output import say
from koffline.cli.targets import claim
from koffline.errors import ConfigError, KofflineError, install_command
from koffline.store.files import check_target
from koffline.untrusted.limits import one_line

_OF_MODELS = (
    "d3rlpy.algos",
    "d3rlpy.base",
    "d3rlpy.metrics.utility",
    "gymnasium",
    "gym",
    "gym.wrappers",
)


@click.command()
@click.argument("model_path")
@click.argument("output_path")
@click.option("--force", is_flag=True, help="Replace OUTPUT_PATH if it exists.")
def export(model_path: str, output_path: str, force: bool) -> None:
    """Write the policy of a .d3 model as a TorchScript (.pt) or ONNX (.onnx) file.

    The file turns any number of observations into the policy's best actions (for BCQ,
    BEAR and CRR into random ones; a line says so). It includes scalers, and needs
    neither koffline nor d3rlpy.

    \b
    Examples:
      koffline export runs/a/model_1000.d3 policy.onnx
      koffline export runs/a/model_1000.d3 policy.pt --force
    """
    check_target(claim(output_path, "OUTPUT_PATH"), force)
    from koffline.algos.model_files import export_policy, load

    algo = load(model_path)
    export_policy(algo, output_path)
    say(f"{output_path}: the policy of the {type(algo).__name__} in {model_path}")


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("command", metavar="COMMAND")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def d3rlpy(command: str, arguments: tuple[str, ...]) -> None:
    """Run d3rlpy's own command: stats, plot, plot-all, record, play.

    It knows koffline's algorithms and Gymnasium's environments, and reads models
    without running code from them. Its options: koffline d3rlpy COMMAND --help. Videos
    need pip install "koffline[video]".

    \b
    Examples:
      koffline d3rlpy plot-all runs/a --save a.png
      koffline d3rlpy stats runs/a/critic_loss.csv
      koffline d3rlpy record runs/a/model_1000.d3 --env-id CartPole-v1
    """
    import numpy as np

    if command == "export":
        raise ConfigError(
            "d3rlpy export fails with this torch; use koffline export MODEL OUTPUT"
        )
    need_models = command in ("record", "play") and "--help" not in arguments
    if need_models and command == "record" and find_spec("moviepy") is None:
        raise ConfigError(
            f"d3rlpy record needs the package moviepy; {install_command('video')}"
        )
    commands = _commands_of_d3rlpy(need_models)
    # d3rlpy's gradient CSVs have a header line that its own plot-all cannot read.
    read_csv = functools.partial(np.loadtxt, comments=["#", "epoch"])
    with mock.patch.object(np, "loadtxt", read_csv):
        try:
            context: AbstractContextManager[None] = contextlib.nullcontext()
            if command in ("plot", "plot-all") and "--help" not in arguments:
                context = _plotting(arguments)
            with context:
                commands.cli.main(
                    [command, *arguments],
                    prog_name="koffline d3rlpy",
                    standalone_mode=False,
                )
        except (click.ClickException, click.Abort, KofflineError):
            raise
        except Exception as error:  # errors of any kind: d3rlpy's commands check little
            reason = one_line(error)
            if isinstance(error, ZeroDivisionError):
                # plot-all divides by their number
                reason = f"there is no *.csv in {' '.join(arguments)}"
            raise ConfigError(
                f"d3rlpy {command}: {reason}; see 'koffline d3rlpy {command} --help'"
            ) from error


@contextlib.contextmanager
def _plotting(arguments: tuple[str, ...]) -> Iterator[None]:
    """Context of d3rlpy's plots: our settings, names as plain text; no window if the
    plot goes to a file.
    """
    from koffline.figures import drawing, load_matplotlib

    matplotlib: Any = load_matplotlib()
    if any(word.partition("=")[0] == "--save" for word in arguments):
        matplotlib.use("agg")
    elif os.environ.get("MPLBACKEND"):
        matplotlib.use(os.environ["MPLBACKEND"])
    with drawing({"text.parse_math": False}):
        yield


def _commands_of_d3rlpy(need_models: bool) -> Any:
    """Module d3rlpy.cli; for help and plots without the rest of d3rlpy, which is slow
    to import.
    """
    if not need_models:
        package = ModuleType("d3rlpy")
        package.__path__ = list(find_spec("d3rlpy").submodule_search_locations)  # type: ignore[union-attr,arg-type]
        stand_ins = {"d3rlpy": package, **dict.fromkeys(_OF_MODELS, mock.MagicMock())}
        with mock.patch.dict("sys.modules", stand_ins):
            return importlib.import_module("d3rlpy.cli")
    from koffline.algos.model_files import load
    from koffline.envs.make import make_env
    from koffline.untrusted.user_code import modules_in, user_code, user_modules

    commands: Any = importlib.import_module("d3rlpy.cli")
    commands.load_learnable = load
    commands.gym = commands.gymnasium = SimpleNamespace(make=make_env)
    run_header = commands._exec_to_create_env

    def make_by_header(code: str) -> Any:
        remedy = "give Python that sets env"
        with (
            user_code("--env-header", "it failed", remedy, ConfigError),
            user_modules.named(*modules_in(code)),
        ):
            return run_header(code)

    commands._exec_to_create_env = make_by_header
    return commands
