"""What training leaves: ``koffline export | d3rlpy``."""

from __future__ import annotations

import click

from koffline.cli.targets import claim
from koffline.store.files import check_target


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

    It knows koffline's algorithms and Gymnasium's environments, and reads models without running what is in
    them. Its options: koffline d3rlpy COMMAND --help. Films need pip install 'koffline[video]'.

    \b
    Examples:
      koffline d3rlpy plot-all runs/a --save a.png
      koffline d3rlpy stats runs/a/critic_loss.csv
      koffline d3rlpy record runs/a/model_1000.d3 --env-id CartPole-v1
    """
    from koffline.algos.model_files import run_d3rlpy

    run_d3rlpy([command, *arguments])
