"""The first real log: clicks in a fashion shop, on a policy whose own clicks are known
(Open Bandit Dataset).

    python -m scripts.bench.open_bandit          # prints a table; --set steps=400 for a quick look

From 10,000 rows with items drawn at random, what is Thompson sampling's click rate? The
shop ran it in the same week; its own 10,000 rows say. Data and their licence:
datasets/open_bandit.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

import koffline
from koffline.config import parse_assignments
from koffline.ope.evaluation import estimate_all
from koffline.policies import DiscretePolicy
from scripts.build_open_bandit import CAMPAIGNS, DATASETS, POSITIONS

FOLDER = DATASETS / "open_bandit"
NAMES = ("dr", "is", "wis", "wdr", "drl", "kloss", "fqe")


def _observations(frame: pl.DataFrame) -> np.ndarray:
    """One-hot position, then one-hot features of the visitor, (N, d)."""
    columns = [frame["position"].to_numpy() - 1]
    columns += [
        frame[name].to_numpy()
        for name in frame.columns
        if name.startswith("user_feature_")
    ]
    return np.concatenate(
        [np.eye(int(codes.max()) + 1)[codes] for codes in columns], axis=1
    )


def random_log(campaign: str, folder: Path = FOLDER) -> koffline.Transitions:
    """Rows with items drawn at random: episodes of one step."""
    frame = pl.read_parquet(folder / f"{campaign}_random.parquet")
    rows = len(frame)
    items = int(frame["item_id"].max()) + 1  # type: ignore[arg-type]
    seen = _observations(frame)
    return koffline.Transitions(
        observations=seen,
        actions=frame["item_id"].to_numpy().astype(np.int64),
        rewards=frame["click"].to_numpy().astype(np.float64),
        next_observations=seen,
        terminated=np.ones(rows, dtype=bool),
        truncated=np.zeros(rows, dtype=bool),
        action_space=koffline.Discrete(items),
        episode_ids=np.arange(rows),
        behavior_log_probabilities=np.full(rows, -math.log(items)),
    )


def thompson(campaign: str, folder: Path = FOLDER) -> DiscretePolicy:
    """The policy to evaluate: probabilities of items by position."""
    # (n, 3)
    shares = pl.read_csv(folder / f"{campaign}_thompson.csv").drop("item_id").to_numpy()

    def probabilities(observations: np.ndarray) -> np.ndarray:
        return shares.T[observations[:, :POSITIONS].argmax(axis=1)]

    return DiscretePolicy(len(shares), probabilities, "Thompson sampling")


def own_rate(campaign: str, folder: Path = FOLDER) -> tuple[float, float]:
    """Click rate in Thompson sampling's own log, and its standard error."""
    clicks = pl.read_parquet(folder / f"{campaign}_bts.parquet")["click"].to_numpy()
    return float(clicks.mean()), float(clicks.std(ddof=1) / math.sqrt(len(clicks)))


def estimates(
    campaign: str, names: tuple[str, ...] = NAMES, **options: Any
) -> koffline.EstimateTable:
    """Estimates of Thompson sampling's click rate from the random log."""
    return estimate_all(
        random_log(campaign), thompson(campaign), names=names, bounds=False, **options
    )


def main() -> None:
    """One row for each campaign and estimator."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting"
    )
    options = parse_assignments(parser.parse_args().set)
    torch.set_num_threads(1)
    print(
        "| campaign | own clicks per 1,000 | estimator | from the random log | 95 %"
        " interval |"
    )
    print("|---|---|---|---|---|")
    for campaign in CAMPAIGNS:
        rate, error = own_rate(campaign)
        for row in estimates(campaign, **options).rows:
            estimate = row.estimate
            if estimate is None:
                print(f"| {campaign} | | `{row.name}` | {row.reason} | |")
                continue
            ends = "–"
            if estimate.interval is not None:
                ends = f"{1e3 * estimate.interval.low:.1f} to {1e3 * estimate.interval.high:.1f}"
            own_rate_text = f"{1e3 * rate:.1f} ± {1e3 * error:.1f}"
            print(
                f"| {campaign} | {own_rate_text} | `{row.name}` | {1e3 * estimate.value:.1f} |"
                f" {ends} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
