"""Run the benchmark of `koffline.improve`; see `scripts.bench.improve`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from scripts.bench.improve import __doc__ as overview
from scripts.bench.improve import cells, certificates, ours, peers, report, spibb
from scripts.bench.improve.logs import ENTRIES, Entry

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("spibb", "spibb-ours", "peers", "ours", "certificates")
_BLOCK = 20  # draws in a tabular cell
_OUR_SIZES = (20, 100, 500, 2000)
_RESULTS = ROOT / "docs" / "results"


def blocks_of_draws(
    kinds: Sequence[str], measure: Callable[[str, range], Any], draws: int
) -> list[cells.Cell]:
    """Blocks of draws of every kind, in turn."""
    return [
        cells.Cell(
            f"{kind} {first:05}",
            partial(measure, kind, range(first, first + _BLOCK)),
        )
        for first in range(0, draws, _BLOCK)
        for kind in kinds
    ]


def our_protocol_cells(draws: int, improve: Callable[..., Any]) -> list[cells.Cell]:
    """Ours on the first draws, all families and sizes of a draw before the next."""
    return [
        cells.Cell(
            f"{family} {size} {seed:05}",
            partial(spibb.measure_ours, family, seed, size, improve),
        )
        for seed in range(draws)
        for size in _OUR_SIZES
        for family in spibb.FAMILIES
    ]


def _measure_peers(entry: Entry) -> dict[str, Any]:
    return peers.measure(entry.make())


def _measure_ours(
    entry: Entry, improve: Callable[..., Any], work: Path | None
) -> dict[str, Any]:
    return ours.measure(entry.make(), improve, work)


def peer_cells(entries: list[Entry]) -> list[cells.Cell]:
    """d3rlpy's algorithms and HCPI, a cell a log."""
    return [
        cells.Cell(f"peers {entry.name}", partial(_measure_peers, entry))
        for entry in entries
    ]


def our_cells(
    entries: list[Entry], improve: Callable[..., Any], work: Path | None = None
) -> list[cells.Cell]:
    """`koffline.improve`, a cell a log.

    work: folder for searches that are cut; None: they begin anew.
    """
    plan = []
    for entry in entries:
        place = None
        if work is not None:
            place = work / f"{entry.name} {ours.code_digest()}".replace(" ", "-")
        name = f"ours {entry.name}"
        measure = partial(_measure_ours, entry, improve, place)
        plan.append(cells.Cell(name, measure))
    return plan


def planned(
    part: str, options: argparse.Namespace, improve: Callable[..., Any] | None = None
) -> tuple[list[cells.Cell], str]:
    """The cells of a part and the name of their folder.

    improve: tested in the place of `koffline.improve`.
    """
    entries = [
        entry
        for entry in ENTRIES.values()
        if options.only is None or options.only in f"{entry.half} {entry.name}"
    ]
    if part == "spibb":
        plan = blocks_of_draws(spibb.FAMILIES, spibb.measure_tabular, options.draws)
        return plan, "spibb"
    if part == "certificates":
        plan = blocks_of_draws(
            certificates.KINDS, certificates.measure, options.certificates
        )
        return plan, "certificates"
    if part == "peers":
        return peer_cells(entries), "logs"
    if improve is None:
        import koffline

        improve = koffline.improve
    if part == "ours":
        return our_cells(entries, improve, options.out / "work"), "logs"
    plan = our_protocol_cells(options.our_draws, improve)
    if options.only is not None:
        plan = [cell for cell in plan if options.only in cell.name]
    return plan, "spibb-ours"


def write_summary(folder: Path, results: Path = _RESULTS) -> None:
    """docs/results/improve.json and improve_spibb.json, from the cells that are
    there.
    """
    command = "python -m scripts.bench.improve summary"
    content = {"command": command, **report.summary(folder)}
    _write(results / "improve.json", content)
    rows = report.protocol(folder)
    _write(results / "improve_spibb.json", {"command": command, "rows": rows})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Make what is missing of a part, or write the summary."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.improve",
        description=overview,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("part", choices=[*PARTS, "summary"])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "improve")
    parser.add_argument("--only", help="cells whose log has this in half or name")
    parser.add_argument("--draws", type=int, default=2000, help="of spibb")
    parser.add_argument("--our-draws", type=int, default=20, help="of spibb-ours")
    parser.add_argument("--certificates", type=int, default=200, help="draws of each")
    parser.add_argument("--list", action="store_true", help="print what is missing")
    options = parser.parse_args(arguments)
    if options.part == "summary":
        write_summary(options.out)
        return
    plan, folder = planned(options.part, options)
    if options.list:
        for cell in cells.missing(plan, options.out / folder):
            print(cell.name)
        return
    cells.run(plan, options.out / folder)


if __name__ == "__main__":
    main()
