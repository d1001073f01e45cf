"""The command line: commands are imported when they run; errors are one line, with exit
code 2.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import click

from koffline import __version__
from koffline.cli.output import print_what_is_possible, say, unwritten
from koffline.errors import KofflineError, is_control, nearest_name, printable
from koffline.store.run_record import command_line
from koffline.untrusted.user_code import current_folder, separate_process_state

_INSTALLED = Path(__file__).parents[1]
_OF_HELP = frozenset(("--help", "-h", "--version"))


class KofflineGroup(click.Group):
    """Group of commands that are imported on demand; their errors are one line on
    stderr, exit code 2.
    """

    # Module and short help of each command; listing the commands imports none of them.
    lazy: ClassVar = {
        "build": ("build", "Make logs, and policies to evaluate."),
        "d3rlpy": (
            "models",
            "Run d3rlpy's own commands: stats, plot, plot-all, record, play.",
        ),
        "data": ("data", "Show, check, convert and split logs."),
        "demo": ("evaluate", "Evaluate a bundled policy from a bundled log."),
        "diagnose": ("diagnose", "Test a value function, and show where it is wrong."),
        "evaluate": ("evaluate", "Estimate what a policy is worth, from a log."),
        "export": ("models", "Write a trained policy as a TorchScript or ONNX file."),
        "improve": (
            "improve",
            "Find a policy that is certified to be better, from a log.",
        ),
        "online": ("learn", "Train a policy by playing in a Gymnasium environment."),
        "reproduce": (
            "learn",
            "Reproduce a figure of the paper, or the table of its claims.",
        ),
        "select": ("evaluate", "Compare several policies, and find the best."),
        "sweep": ("learn", "Train with several settings and seeds, and compare."),
        "train": ("learn", "Train a policy from a log."),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in self.lazy:
            return None
        module = import_module(f"koffline.cli.{self.lazy[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, about) for name, (_, about) in self.lazy.items()]
            )

    def main(
        self,
        args: Any = None,
        *arguments: Any,
        standalone_mode: bool = True,
        **options: Any,
    ) -> Any:
        """Run click's `main`, record the command line, and print usage errors in one
        line.
        """
        words: Sequence[str] = sys.argv[1:]
        if args is not None:
            words = args
        try:
            for word in words:
                # terminals would execute it in the error message
                if any(map(is_control, word)):
                    raise click.UsageError(
                        f"'{word}' holds control characters; rename the file or drop"
                        " them"
                    )
            with command_line(words), separate_process_state():
                is_help = not _OF_HELP.isdisjoint(words)
                if current_folder() is None and not is_help:
                    raise click.UsageError(
                        "the current folder was deleted; change into another one (cd)"
                    )
                code = super().main(  # type: ignore[call-overload]
                    args, *arguments, standalone_mode=False, **options
                )
        except (click.ClickException, click.Abort) as error:
            if not standalone_mode:
                raise
            raise _ended(error) from None
        except BrokenPipeError:
            raise
        except OSError as error:  # a help text on a full disk
            if not standalone_mode:
                raise
            raise _failed(_not_written(error)) from None
        if not standalone_mode:
            return code
        if not isinstance(code, int):
            code = 0
        raise SystemExit(code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command; errors that a user can fix are printed in one line,
        without a traceback.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `koffline … | head` is not the user's mistake
            raise
        except KofflineError as error:
            message = " ".join(str(error).split())
        except (MemoryError, RuntimeError) as error:
            # torch raises RuntimeError when memory is short
            reason = " ".join(str(error).split()) or "out of memory"
            if isinstance(error, RuntimeError):
                if "allocate memory" not in reason and "out of memory" not in reason:
                    raise
                reason = "an array is too large for this machine"
            message = f"not enough memory ({reason}); ask for less at a time"
        except EOFError as error:  # click would call it an interrupt
            reason = " ".join(str(error).split()) or "no reason given"
            message = (
                f"a file ended too early ({reason}); if this happens with every log,"
                f" compiled files are damaged: remove __pycache__ in {_INSTALLED}"
            )
        except OSError as error:
            place = error.filename or "the system"
            message = f"{place}: {error.strerror or error}; check the path and the disk"
        except UnicodeEncodeError as error:
            name = error.object[:80].encode("ascii", "backslashreplace").decode("ascii")
            message = (
                f"'{name}' has no form in this locale's encoding {error.encoding}; set"
                " PYTHONUTF8=1"
            )
        raise _failed(message)


def _ended(error: click.ClickException | click.Abort) -> SystemExit:
    """Print in one line why a command line failed before its command ran; return the
    SystemExit to raise.
    """
    if isinstance(error, click.Abort):
        say("interrupted; nothing was written", err=True)
        return SystemExit(130)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return SystemExit(2)
    context = getattr(error, "ctx", None)
    message = _with_remedy(error, context)
    if not message.endswith("?"):
        message += ";"
    command = "koffline"
    if context:
        command = context.command_path
    return _failed(f"{message} see '{command} --help'")


# Records of what --set of a command takes.
_SETTINGS = {"online": ("koffline.online.config", "OnlineConfig")} | dict.fromkeys(
    ("evaluate", "select", "diagnose"), ("koffline.config", "EvaluationSettings")
)
_SETTINGS["improve"] = ("koffline.improvement.settings", "ImproveSettings")
# Commands of groups, which are not imported to be suggested.
_INSIDE = (
    "data info",
    "data inspect",
    "data validate",
    "data convert",
    "build rollouts",
    "build uniform",
)


def _with_remedy(error: click.ClickException, context: click.Context | None) -> str:
    """click's message; for an unknown name with a synonym or the nearest known name."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if context is None:
        return message
    if isinstance(error, click.NoSuchOption):
        known = [
            name
            for option in context.command.params
            for name in option.opts
            if name.startswith("--")
        ]
        module, record = _SETTINGS.get(
            context.command.name or "", ("koffline.config", "Section")
        )
        setting = error.option_name.lstrip("-").replace("-", "_")
        if setting in getattr(import_module(module), record).model_fields:
            return (
                f"there is no option '{error.option_name}'; it is a setting: --set"
                f" {setting}=VALUE"
            )
        return (
            f"there is no option '{error.option_name}';"
            f" {nearest_name(error.option_name, known)}"
        )
    if message.startswith("No such command") and isinstance(
        context.command, click.Group
    ):
        name = message.split("'")[1]
        known = [*context.command.list_commands(context)]
        if isinstance(context.command, KofflineGroup):  # and not d3rlpy's group
            known += _INSIDE
        return f"there is no command '{name}'; {nearest_name(name, known)}"
    return message


def _failed(message: str) -> SystemExit:
    """Print an error in one line and return the SystemExit to raise."""
    with contextlib.suppress(OSError):  # nobody can be told
        say(f"error: {printable(message)}", err=True)
    return SystemExit(2)


def _not_written(error: OSError) -> str:
    return (
        f"the output cannot be written ({error.strerror or error}); check where it goes"
    )


@click.group(
    cls=KofflineGroup, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="koffline")
def cli() -> None:
    """What is a policy worth? Answers from logged transitions, with an interval.

    \b
    Examples:
      koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99
      koffline evaluate log.npz --policy uniform --gamma 0.95 --out runs/uniform
      koffline data info minari:cartpole/mixed-v0

    \b
    The Tab key completes commands, options and names after
      eval "$(_KOFFLINE_COMPLETE=bash_source koffline)"
    """


def main() -> None:
    """Entry point of the ``koffline`` command."""
    print_what_is_possible()
    # A SIGTERM counts as Ctrl-C: unfinished output is
    # removed, and the user learns how to resume.
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminate)
    end: Any = 0
    try:
        cli(prog_name="koffline")
    except SystemExit as error:
        end = error.code
    problem = unwritten()
    if problem is not None and not isinstance(problem, BrokenPipeError) and not end:
        end = _failed(_not_written(problem)).code
        unwritten()
    raise SystemExit(end)


def _terminate(number: int, frame: object) -> None:
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:  # a shell lets background commands ignore Ctrl-C; SIGTERM must still end them
        raise KeyboardInterrupt
