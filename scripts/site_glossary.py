"""Words of the glossary explained where they stand: MkDocs calls `on_page_markdown`
for every page of the site (mkdocs.yml, hooks).

The texts are those of docs/glossary.md. Markdown's extension `abbr` shows them when
the pointer rests on a word; common words (value, episode) are left out, because every
line would be underlined.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"
# How pages write a term, if not as the glossary's heading does.
SPELLINGS = {
    "Behavior policy": ("behavior policy",),
    "Target policy": ("target policy",),
    "Importance ratio": ("importance ratio", "importance ratios"),
    "Per-decision IS": ("per-decision IS",),
    "Self-normalised": ("self-normalised",),
    "Occupancy": ("occupancy", "marginal weights"),
    "Effective sample size": ("effective sample size",),
    "Bellman equation": ("Bellman equation",),
    "K-loss": ("K-loss", "kernel loss"),
    "FQE": ("FQE", "fitted Q evaluation"),
    "LSTD": ("LSTD",),
    "Doubly robust": ("doubly robust",),
    "Out of bag": ("out of bag",),
    "Slow copy": ("slow copy",),
}


@cache
def definitions() -> dict[str, str]:
    """Every term of the glossary with its plain text."""
    text = GLOSSARY.read_text(encoding="utf-8")
    terms = re.findall(r"^## (.+)\n\n((?:.+\n)+)", text, flags=re.MULTILINE)
    return {term: " ".join(re.sub(r"[*`]", "", body).split()) for term, body in terms}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with the abbreviations that it uses."""
    if page.file.src_uri == GLOSSARY.name or not page.file.src_uri.endswith(".md"):
        return markdown
    known = definitions()
    lines = [
        f"*[{spelling}]: {known[term]}"
        for term, spellings in SPELLINGS.items()
        for spelling in spellings
        if spelling in markdown
    ]
    return "\n".join([markdown, "", *lines, ""])
