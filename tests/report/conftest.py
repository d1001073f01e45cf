"""Here the figures of pages are rendered, as users get them."""

from collections.abc import Iterator

import pytest

from koffline import report

_RENDER = report._images


@pytest.fixture(scope="module", autouse=True)
def _pages_with_images(_pages_without_images: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_images", _RENDER)
        yield
