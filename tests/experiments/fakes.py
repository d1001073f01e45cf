"""Results by the schema with made-up numbers, for tests of what is drawn and written from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from koffline.experiments.results import Claim, Correlation, Curves, Results, Row

METHODS = ("td0", "fvi", "rg", "gtd2", "sbeed", "kloss")
RATES = (0.003, 0.001, 0.0003)
_LEVELS = {"td0": 0.6, "fvi": 0.3, "rg": 0.5, "gtd2": 0.45, "sbeed": 0.35, "kloss": 0.12}


def make_results(name: str, rows: Sequence[Row] = (), **parts: Any) -> Results:
    return Results(
        name=name,
        seconds=12.5,
        command=f"koffline reproduce {name} --quick",
        versions={"koffline": "0.1.0", "torch": "2.13.0"},
        settings={"quick": True, "seed": 0},
        rows=tuple(rows),
        **parts,
    )


def make_evaluation(
    name: str, worlds: Sequence[str], seeds: int = 10, times: int = 100, scale: float = 100.0
) -> tuple[Results, Curves]:
    """All methods on all worlds; TD(0) diverges in two seeds at its best rate, FVI at its largest."""
    generator = np.random.default_rng(0)
    curves = {
        f"{world}/{method}": _curves(method, generator, seeds, times, scale)
        for world in worlds
        for method in METHODS
    }
    rows = [row for group, parts in curves.items() for row in _rows(group, parts, scale)]
    correlations = [
        Correlation(world, loss, error, networks, value - shift, value - shift - 0.05, value + 0.04, 6000)
        for world in worlds
        for loss, error, value in (
            ("kloss", "mse", 0.93),
            ("kloss", "bellman_error", 0.9),
            ("l2", "mse", 0.42),
            ("l2", "bellman_error", 0.55),
        )
        for networks, shift in (("own", 0.0), ("both", 0.2))
    ]
    return make_results(name, rows, correlations=tuple(correlations)), curves


def _curves(
    method: str, generator: np.random.Generator, seeds: int, times: int, scale: float
) -> dict[str, np.ndarray]:
    time = np.linspace(0.0, 1.0, times + 1)[1:, None, None]
    shape = (times, len(RATES), seeds)
    floor = _LEVELS[method] * np.array([1.5, 1.0, 1.3])[None, :, None]
    noise = np.exp((0.5 if method in ("td0", "fvi") else 0.15) * generator.standard_normal(shape))
    fall = 8.0 * np.exp(-12.0 * time * np.array([2.0, 1.0, 0.4])[None, :, None])
    mse = scale * (fall + floor * noise * np.exp(0.2 * generator.standard_normal((1, 1, seeds))))
    diverged = np.full((len(RATES), seeds), -1)
    if method == "td0":
        diverged[1, :2] = (33 * 9 * times, 33 * 15 * times)  # before a half and three quarters
    if method == "fvi":
        diverged[0] = 33 * 4 * times
    epochs = np.arange(1, times + 1) * 20
    gone = epochs[:, None, None] * 33 >= np.where(diverged < 0, np.iinfo(np.int64).max, diverged)[None]
    mse[gone] = np.nan
    curves = {
        "mse_monte_carlo": mse,
        "mse_paper": mse + 0.03 * scale,
        "bellman_error": 0.05 * mse**0.8,
        "kernel_loss": 1e-3 * mse * np.exp(0.2 * generator.standard_normal(shape)),
        "l2_loss": 0.4
        + 0.02 * mse ** (0.3 if method == "rg" else 0.6) * np.exp(0.4 * generator.standard_normal(shape)),
        "objective": 1e-3 * mse,
    }
    return {
        "epochs": epochs,
        "learning_rates": np.array(RATES),
        "seeds": np.arange(seeds),
        "diverged_at": diverged,
        **{key: curve.astype(np.float32) for key, curve in curves.items()},
    }


def _rows(group: str, curves: dict[str, np.ndarray], scale: float) -> list[Row]:
    world, method = group.split("/")
    rows = []
    for truth in ("paper", "monte_carlo"):
        final = curves[f"mse_{truth}"][-5:].mean(axis=0)
        bellman = curves["bellman_error"][-5:].mean(axis=0)
        for index, rate in enumerate(RATES):
            mean, half = float(final[index].mean()), float(final[index].std())
            steps = tuple(None if step < 0 else int(step) for step in curves["diverged_at"][index])
            rows.append(
                Row(
                    world=world,
                    method=method,
                    learning_rate=rate,
                    seeds=final.shape[1],
                    truth=truth,
                    mse=mean if np.isfinite(mean) else None,
                    mse_low=mean - half if np.isfinite(mean) else None,
                    mse_high=mean + half if np.isfinite(mean) else None,
                    bellman_error=float(bellman[index].mean()) if np.isfinite(mean) else None,
                    diverged=sum(step is not None for step in steps),
                    diverged_at=steps,
                    best_by_truth=index == 1,
                    best_without_truth=index == 2,
                    held_out_loss=0.01,
                    value_variance=scale,
                    epochs=2000,
                )
            )
    return rows


def make_ablation() -> Results:
    """Two worlds, some groups; one variant diverges."""
    generator = np.random.default_rng(1)
    groups = {
        "bandwidth": ["0.05", "0.1", "0.25", "0.5", "1.0", "median"],
        "kernel": ["gaussian", "laplacian", "inverse_multiquadric"],
        "statistic": ["U", "mixture 0.5", "L_KV", "V of 150 rows", "0.05", "0.25", "residual gradient"],
        "batch_size": ["50", "150", "500"],
        "reward_scale": ["unscaled", "scaled", "scaled_by_10_more"],
        "offset": ["none", "learned"],
        "noise": [
            f"{factor}x {method}" for factor in ("0", "0.5", "1", "2", "4") for method in ("kloss", "rg")
        ],
        "reward": [f"{kind} {method}" for kind in ("fall", "balance") for method in ("kloss", "rg", "fvi")],
    }
    rows = []
    for world in ("puddle_world", "cart_pole", "mountain_car"):
        for group, variants in groups.items():
            if group == "reward" and world != "cart_pole":
                continue
            for variant in variants:
                share = float(np.exp(generator.normal(-2.0, 1.0)))
                share = 40.0 if variant == "1.0" else share
                lost = variant == "unscaled"
                method = variant.rsplit(" ", 1)[-1]
                for rate, best in ((0.003, True), (0.001, False)):
                    rows.append(
                        Row(
                            world=world,
                            method=method if method in METHODS else "kloss",
                            learning_rate=rate,
                            seeds=3,
                            truth="monte_carlo",
                            mse=None if lost else 5.0 * share,
                            mse_low=None if lost else 3.0 * share,
                            mse_high=None if lost else 7.0 * share,
                            bellman_error=0.1,
                            diverged=2 if lost else 0,
                            best_by_truth=best,
                            best_without_truth=best,
                            value_variance=5.0,
                            group=group,
                            variant=variant,
                        )
                    )
    return make_results("ablation", rows)


def make_claims() -> Results:
    worlds = ("puddle_world", "cart_pole", "mountain_car")
    ratios = [
        Claim(
            sentence="our method performs better than other methods in general",
            where="Section 5.2, fig:pol_bench",
            world=world,
            measured=f"MSE of {other} / MSE of K-loss",
            value=value,
            low=value / 1.4,
            high=value * 1.5,
            verdict="holds" if value > 1.4 else "does not hold" if value < 0.67 else "undecided",
            reason="the bandwidth smooths too much" if value < 0.67 else "",
        )
        for world in worlds
        for other, value in (("TD(0)", 8.0), ("FVI", 0.5), ("RG", 1.1), ("GTD2", np.inf), ("SBEED", 1.7))
    ]
    weights = ("our method converges to the true weight w*", "Section 5.1", "chain", "‖w − w*‖ at the end")
    diverges = ("FVI diverges", "Section 5.1", "chain", "share of seeds whose weights pass 1e7")
    proxy = (
        "our kernel loss is a good proxy for MSE",
        "Section 5.2",
        "puddle_world",
        "Spearman | good: ≥ 0.7",
    )
    control = ("K-loss outperforms FVI inside Trust-PCL", "Section 5.3", "MuJoCo", "not measured")
    others = (
        Claim(*weights, 0.0168, 0.0066, 0.027, "holds", "the rest is sampling error"),
        Claim(*diverges, 1.0, None, None, "holds"),
        Claim(*proxy, 0.64, 0.6, 0.75, "undecided"),
        Claim(*control, None, None, None, "undecided"),
    )
    rows = make_evaluation("figure-puddle", ["puddle_world"], times=10)[0].rows
    return make_results("claims", rows, claims=(*ratios, *others))
