import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from koffline.builders.resumable import add_to_manifest, read_manifest
from koffline.builders.uniform import build_chain
from koffline.errors import DataError

LOG = build_chain(5, np.random.default_rng(0))


def test_entries_are_added_or_replaced_and_others_stay(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text('{"mine": {"anything": [1]}}')
    data = tmp_path / "deep" / "log.hdf5"
    data.parent.mkdir()
    data.write_bytes(b"bytes")
    for seed in (1, 2):
        add_to_manifest(path, data, LOG, "koffline build …", seed)
    entries = json.loads(path.read_text())
    assert set(entries) == {"mine", "deep/log.hdf5"}
    entry = entries["deep/log.hdf5"]
    assert (entry["seed"], entry["rows"], entry["episodes"]) == (2, 5, 0)
    assert entry["content_sha256"] == LOG.sha256
    assert entry["files"] == {"log.hdf5": {"sha256": hashlib.sha256(b"bytes").hexdigest()}}
    assert set(entry["made_with"]) == {"koffline", "numpy", "h5py", "gymnasium"}
    add_to_manifest(path, data.parent, LOG, "koffline build …", 0)
    assert "files" not in read_manifest(path)["deep"]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["deep", "manifest.json"]


def test_builds_that_end_together_lose_no_entry(tmp_path):
    path = tmp_path / "manifest.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: add_to_manifest(path, tmp_path / f"{i}.hdf5", LOG, "", i), range(24)))
    assert {entry["seed"] for entry in read_manifest(path).values()} == set(range(24))


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "{", "\xff"])
def test_a_broken_manifest_is_one_line(tmp_path, content):
    path = tmp_path / "manifest.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="is not a manifest") as caught:
        add_to_manifest(path, tmp_path / "x", LOG, "", 0)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content.encode("latin-1")
    assert read_manifest(tmp_path / "none.json") == {}
