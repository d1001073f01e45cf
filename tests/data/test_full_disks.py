"""HDF5 on a disk that takes only so much: one line, nothing under the final name, the process goes on.

The limit is that of a file's size, which the system lets anybody set; writing beyond it fails as on a full
disk, and only then. Closing a file that HDF5 could not write used to end the process.
"""

import subprocess
import sys

import pytest

from koffline.data.sources import write_transitions
from tests.data.logs import roll_out

SCRIPT = """
import resource, signal, sys
from koffline.data.sources import convert_to_shards
from koffline.data.sources import open_transitions, write_transitions
from koffline.errors import DataError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = open_transitions("log.npz")
for limit in map(int, sys.argv[1:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for write in (
        lambda: convert_to_shards("log.npz", "target", 10_000),
        lambda: write_transitions(log, "target", "hdf5"),
        lambda: write_transitions(log, "target", "d3rlpy"),
    ):
        try:
            write()
            print("written")
        except DataError as error:
            print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of files")
def test_whatever_fits_the_process_goes_on(tmp_path):
    log = roll_out(["truncated"] * 20, [40] * 20, shape=(20,), seed=3).transitions()
    write_transitions(log, tmp_path / "log.npz")
    limits = ["100", "5000", "30000", "90000"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *limits], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = "target cannot be written (File too large); check the folder and the disk"
    assert done.stdout.splitlines() == [expected] * (3 * len(limits))
    assert list(tmp_path.iterdir()) == [tmp_path / "log.npz"]
