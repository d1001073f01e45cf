"""Tables read the slow way: rows as dicts, one after the other."""

from typing import Any


def rows_to_transitions(
    rows: list[dict[str, Any]], state: list[str], has_truncated: bool, has_next: bool = False
) -> list[dict[str, Any]]:
    """Transitions in the order of their episode's first step in the table, then of time.

    Rows have the keys of ``state``, a, r, id, t, done and, where asked for, cut and next_<state>.
    """
    episodes: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        episodes.setdefault(row["id"], []).append(row)
    found = []
    for steps in sorted(episodes.values(), key=lambda steps: rows.index(min(steps, key=lambda r: r["t"]))):
        steps.sort(key=lambda r: r["t"])
        kept = []
        for i, row in enumerate(steps):
            last = i == len(steps) - 1
            here = [row[name] for name in state]
            if has_next:
                following = [row[f"next_{name}"] for name in state]
            elif not last:
                following = [steps[i + 1][name] for name in state]
            elif row["done"]:
                following = here
            else:
                continue
            cut = bool(row["cut"]) if has_truncated else False
            kept.append(
                {
                    "observation": here,
                    "action": row["a"],
                    "reward": row["r"],
                    "next_observation": following,
                    "terminated": bool(row["done"]),
                    "truncated": cut,
                    "step": len(kept),
                }
            )
        if kept and not steps[-1]["done"] and (not has_truncated or steps[-1]["cut"]):
            kept[-1]["truncated"] = True
        found += kept
    return found
