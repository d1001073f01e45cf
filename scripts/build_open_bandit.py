"""Build datasets/open_bandit from the sample of the Open Bandit Dataset that ships in
the package obp.

    pip download --no-deps obp==0.4.1 && python scripts/build_open_bandit.py
    obp-0.4.1-py3-none-any.whl

A fashion shop showed three items to each visitor, drawn at random or by Bernoulli
Thompson sampling, in the same week; two campaigns are taken, men and women. Writes for
each OUT/<campaign>_random.parquet and _bts.parquet (10,000 rows each: item, position,
click, and four user features as codes of their hashes) and OUT/<campaign>_thompson.csv,
the probabilities of items at the three positions under Thompson sampling with the
priors of the first day. These are computed as obp does: by 100,000 draws of all items'
Beta distributions, from the seed of its examples. (Saito et al. 2021, Open Bandit
Dataset and Pipeline; BernoulliTS.compute_batch_action_dist)
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import yaml
from jaxtyping import Float

DATASETS = Path(__file__).resolve().parents[1] / "datasets"
CAMPAIGNS = ("men", "women")
POSITIONS = 3
_DRAWS = 100_000
_TOGETHER = 10_000
_SEED = 12345
_FEATURES = tuple(f"user_feature_{number}" for number in range(4))


def read_log(archive: zipfile.ZipFile, logger: str, campaign: str) -> pl.DataFrame:
    """Rows of a log in the order of time: item_id, position, click, and user features
    as text.
    """
    text = archive.read(f"obp/dataset/obd/{logger}/{campaign}/{campaign}.csv")
    frame = pl.read_csv(io.BytesIO(text)).sort("timestamp", maintain_order=True)
    return frame.select("item_id", "position", "click", *_FEATURES)


def with_codes(logs: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """The logs with small integers in place of hashes, the same for both logs of a
    campaign.
    """
    columns = [pl.col("item_id", "position", "click").cast(pl.Int8)]
    for name in _FEATURES:
        hashes = sorted(set().union(*(frame[name].unique() for frame in logs.values())))
        codes = dict(zip(hashes, range(len(hashes)), strict=True))
        columns.append(pl.col(name).replace_strict(codes, return_dtype=pl.Int8))
    return {logger: frame.select(columns) for logger, frame in logs.items()}


def thompson_shares(
    prior: dict[str, list[float]],
) -> Float[np.ndarray, "item position"]:
    """How often an item has the highest, second, third highest draw of its Beta
    distribution.
    """
    random = np.random.RandomState(_SEED)
    counts = np.zeros((len(prior["alpha"]), POSITIONS))
    for _ in range(_DRAWS // _TOGETHER):
        drawn = random.beta(
            prior["alpha"], prior["beta"], size=(_TOGETHER, len(counts))
        )
        best = drawn.argsort(axis=1)[:, ::-1][:, :POSITIONS]
        for position in range(POSITIONS):
            counts[:, position] += np.bincount(best[:, position], minlength=len(counts))
    return counts / _DRAWS


def main() -> None:
    """Three files for each campaign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="obp-0.4.1-py3-none-any.whl")
    parser.add_argument("--out", type=Path, default=DATASETS / "open_bandit")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(options.wheel) as archive:
        priors = yaml.safe_load(archive.read("obp/policy/conf/prior_bts.yaml"))
        for campaign in CAMPAIGNS:
            logs = {
                logger: read_log(archive, logger, campaign)
                for logger in ("random", "bts")
            }
            for logger, frame in with_codes(logs).items():
                frame.write_parquet(options.out / f"{campaign}_{logger}.parquet")
            shares = thompson_shares(priors[campaign])
            names = [f"position_{position + 1}" for position in range(POSITIONS)]
            table = pl.DataFrame(
                {
                    "item_id": np.arange(len(shares)),
                    **dict(zip(names, shares.T, strict=True)),
                }
            )
            table.write_csv(options.out / f"{campaign}_thompson.csv")


if __name__ == "__main__":
    main()
