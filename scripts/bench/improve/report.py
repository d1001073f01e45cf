"""The benchmark's results as numbers: of the published protocol, and of the logs.

A *false improvement* is a recommendation whose true value is not above the behavior
policy's. Where values are by rollouts, it may be within their errors; these are counted
as false, and how many they are is said beside. *Realised* is the true uplift of what is
recommended as a share of that of the best candidate, summed over the logs with a
recommendation after each log's uplifts are divided by the best candidate's; of the best
policy likewise where that is known. *Owed*: logs on which a candidate is truly better
by two half-widths of its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.coverage import clopper_pearson
from scripts.bench.improve import cells, ours, peers, spibb
from scripts.bench.improve.logs import ENTRIES, TEST, TUNING, Entry
from scripts.bench.improve.tabular import tail_mean
from scripts.bench.improve.worlds import Value

TAILS = {"mean": 1.0, "worst 10 %": 0.1, "worst 1 %": 0.01}
_SAME = 1e-9  # values are equal up to rounding


def protocol(folder: Path) -> list[dict[str, Any]]:
    """A row for each family, size and method: draws, mean and CVaRs of the normalised
    performance, share of draws below the behavior policy.

    folder: the cells of `spibb` and, if there are any, of `spibb-ours`. Tabular methods
    have a second row named ``… (ours' draws)`` on the draws that ours has.
    """
    scores: dict[tuple[str, int, str], dict[int, float]] = {}
    for block in cells.results(folder / "spibb"):
        for record in block:
            for method, score in record["scores"].items():
                key = (record["family"], record["size"], method)
                scores.setdefault(key, {})[record["seed"]] = score
    for record in cells.results(folder / "spibb-ours"):
        key = (record["family"], record["size"], "ours")
        scores.setdefault(key, {})[record["seed"]] = record["scores"]["ours"]
    rows = []
    for family in spibb.FAMILIES:
        for size in spibb.SIZES:
            shared = set(scores.get((family, size, "ours"), {}))
            for method in (*spibb.METHODS, "ours"):
                draws = scores.get((family, size, method))
                if draws is None:
                    continue
                row = {"family": family, "size": size, "method": method}
                rows.append(row | _summary(list(draws.values())))
                both = [draws[seed] for seed in sorted(shared & set(draws))]
                if method != "ours" and both:
                    row = row | {"method": f"{method} (ours' draws)"}
                    rows.append(row | _summary(both))
    return rows


def _summary(numbers: list[float]) -> dict[str, Any]:
    scores = np.asarray(numbers)
    answer: dict[str, Any] = {"draws": len(scores)}
    for title, share in TAILS.items():
        answer[title] = None
        if share * len(scores) >= 1.0:
            answer[title] = round(tail_mean(scores, share), 4)
    answer["worse"] = round(float(np.mean(scores < -_SAME)), 4)
    return answer


def certificate_rows(folder: Path) -> list[dict[str, Any]]:
    """For each kind of `certificates`: logs, lower ends above the truth with the
    interval of their share, logs with a certificate, the true uplift and the mean lower
    end.
    """
    blocks = cells.results(folder / "certificates")
    records = [record for block in blocks for record in block]
    rows = []
    for kind in dict.fromkeys(record["kind"] for record in records):
        of_kind = [record for record in records if record["kind"] == kind]
        bounded = [record for record in of_kind if record["low"] is not None]
        missed = sum(record["low"] > record["truth"] + _SAME for record in bounded)
        interval = clopper_pearson(missed, len(of_kind))
        rows.append(
            {
                "kind": kind,
                "logs": len(of_kind),
                "above_truth": missed,
                "above_truth_interval": [round(end, 4) for end in interval],
                "certified": sum(record["certified"] for record in of_kind),
                "truth": of_kind[0]["truth"],
                "mean_low": float(np.mean([record["low"] for record in bounded])),
            }
        )
    return rows


def log_rows(folder: Path) -> list[dict[str, Any]]:
    """A row for each log that ours has answered."""
    rows = []
    for entry in ENTRIES.values():
        answer = cells.read(ours_cell_path(entry, folder))
        if answer is None:
            continue
        peer = cells.read(peers_cell_path(entry, folder))
        rows.append(log_row(entry, answer, peer))
    return rows


def ours_cell_path(entry: Entry, folder: Path) -> Path:
    """File of what ours says of a log."""
    return cells.Cell(f"ours {entry.name}", int).path(folder / "logs")


def peers_cell_path(entry: Entry, folder: Path) -> Path:
    """File of what d3rlpy's algorithms and HCPI are worth on a log."""
    return cells.Cell(f"peers {entry.name}", int).path(folder / "logs")


def log_row(
    entry: Entry, answer: dict[str, Any], peer: dict[str, Any] | None
) -> dict[str, Any]:
    """One log: what ours recommends and what is true; uplifts of the others.

    ``owed``: a candidate is truly better by two half-widths of its interval, and
    ``owed_finalist``: that it is one of those that were certified on.
    """
    behavior = Value(*answer["behavior"])
    candidates = [
        (candidate, ours.difference(Value(*candidate["value"]), behavior))
        for candidate in answer["candidates"]
        if candidate["value"] is not None
    ]
    precise = [pair for pair in candidates if pair[0]["precise"]]
    best = None
    if precise:
        best = max(precise, key=lambda pair: pair[1].value)
    uplift = ours.uplift(answer)
    best_uplift = None
    best_name = None
    if best is not None:
        best_name = best[0]["name"]
        best_uplift = best[1].value
    if answer["recommended"] and best_uplift is not None:
        best_uplift = max(best_uplift, uplift.value)
    optimal = None
    if answer["best"] is not None:
        optimal = answer["best"] - behavior.value
    row = {
        "log": entry.name,
        "kind": entry.kind,
        "half": entry.half,
        "rows": answer["rows"],
        "episodes": answer["episodes"],
        "recommended": answer["recommended"],
        "claimed": answer["uplift"],
        "interval": answer["interval"],
        "uplift": uplift.value,
        "uplift_error": uplift.error,
        "best_candidate": best_name,
        "best_uplift": best_uplift,
        "optimal_uplift": optimal,
        "owed": any(_is_owed(candidate, gain) for candidate, gain in candidates),
        "owed_finalist": any(
            _is_owed(candidate, gain)
            for candidate, gain in candidates
            if candidate["stage"] == "certify"
        ),
        "reason": answer["reason"],
        "peers": {},
    }
    if peer is not None:
        of_peer = Value(*peer["behavior"])
        for title, value in peers.chosen(peer).items():
            row["peers"][title] = list(ours.difference(value, of_peer))
        if peer["hcpi"] is not None:
            tested = ours.difference(Value(*peer["hcpi"]["value"]), of_peer)
            row["peers"]["HCPI"] = [*tested, peer["hcpi"]["share"] > 0.0]
    return row


def _is_owed(candidate: dict[str, Any], uplift: Value) -> bool:
    if candidate["interval"] is None:
        return False
    low, high = candidate["interval"]
    return uplift.value - 2.0 * uplift.error >= high - low > 0.0


def is_false(uplift: float) -> bool:
    """Whether a recommendation of this true uplift is a false improvement."""
    return uplift <= _SAME


def counts(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of ours on several logs: recommendations, false ones with an interval, realised
    shares, and how many of the owed ones are recommended.

    ``false_share``: of all logs, as the guarantee is of all logs.
    """
    rows = list(rows)
    recommended = [row for row in rows if row["recommended"]]
    false = [row for row in recommended if is_false(row["uplift"])]
    near = [row for row in false if row["uplift"] > -2.0 * row["uplift_error"]]
    interval = None
    if rows:
        interval = [round(end, 4) for end in clopper_pearson(len(false), len(rows))]
    owed = [row for row in rows if row["owed"]]
    finalists = [row for row in rows if row["owed_finalist"]]
    return {
        "logs": len(rows),
        "recommended": len(recommended),
        "false": len(false),
        "false_within_error": len(near),
        "false_share_interval": interval,
        "realised_of_best_candidate": realised(recommended, "best_uplift"),
        "realised_of_optimal": realised(recommended, "optimal_uplift"),
        "owed": len(owed),
        "owed_recommended": sum(row["recommended"] for row in owed),
        "owed_finalists": len(finalists),
        "owed_finalists_recommended": sum(row["recommended"] for row in finalists),
    }


def realised(rows: Iterable[dict[str, Any]], key: str) -> float | None:
    """Mean over logs of the true uplift as a share of ``row[key]``, where that is
    positive; None without such logs.
    """
    shares = [
        row["uplift"] / row[key]
        for row in rows
        if row[key] is not None and row[key] > _SAME
    ]
    if not shares:
        return None
    return round(float(np.mean(shares)), 4)


@dataclass(frozen=True)
class PeerUplift:
    """What another method gains on a log.

    runs: whether it runs another policy than today's. share: of the best candidate's
    uplift; None where it keeps today's, or no candidate is better.
    """

    value: float
    runs: bool
    share: float | None


def _peer_uplift(title: str, answer: list[Any], best: float | None) -> PeerUplift:
    runs = True
    if title == "HCPI":
        runs = answer[2]
    share = None
    if runs and best is not None and best > _SAME:
        share = answer[0] / best
    return PeerUplift(answer[0], runs, share)


def peer_counts(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of every other method: logs, policies it runs instead of today's, those that are
    not better, and its median uplift as a share of the best candidate of ours.
    """
    answers: dict[str, list[PeerUplift]] = {}
    for row in rows:
        for title, answer in row["peers"].items():
            uplift = _peer_uplift(title, answer, row["best_uplift"])
            answers.setdefault(title, []).append(uplift)
    table = {}
    for title, uplifts in answers.items():
        running = [uplift for uplift in uplifts if uplift.runs]
        false = sum(is_false(uplift.value) for uplift in running)
        interval = clopper_pearson(false, len(uplifts))
        table[title] = {
            "logs": len(uplifts),
            "runs": len(running),
            "false": false,
            "false_share_interval": [round(end, 4) for end in interval],
            "median_share_of_best": _median(
                [uplift.share for uplift in running if uplift.share is not None]
            ),
        }
    return table


def _median(numbers: list[float]) -> float | None:
    if not numbers:
        return None
    return round(float(np.median(numbers)), 4)


def summary(folder: Path) -> dict[str, Any]:
    """Everything about the logs: rows, and counts of each half and of both."""
    rows = log_rows(folder)
    halves: dict[str, Callable[[dict[str, Any]], bool]] = {
        TEST: lambda row: row["half"] == TEST,
        TUNING: lambda row: row["half"] == TUNING,
        "both": lambda row: True,
    }
    answer: dict[str, Any] = {"logs": len(ENTRIES), "halves": {}, "rows": rows}
    answer["certificates"] = certificate_rows(folder)
    for half, belongs in halves.items():
        chosen = [row for row in rows if belongs(row)]
        with_peers = [row for row in chosen if row["peers"]]
        answer["halves"][half] = {
            "ours": counts(chosen),
            "peers": peer_counts(with_peers),
        }
    return answer
