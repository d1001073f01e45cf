"""Files of torch.save from strangers, read as tensors and plain values.

torch.load(weights_only=True) imports nothing but what rebuilds tensors. Before it sees an archive, the
archive is checked here and written anew in memory, so that both read the same entries: stored without
compression, each once, with a checksum that is right, and a description of bounded size.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from koffline.untrusted import pickles
from koffline.untrusted.limits import Refused, check_memory, check_regular

_ENCRYPTED = 0x1
_MOST_OPCODES = 5_000_000


def load_tensors(source: Path | bytes) -> Any:
    """The content of a file of torch.save, on the CPU.

    Raises Refused, OSError, zipfile.BadZipFile, and what torch raises for a broken or a forbidden pickle.
    """
    import torch

    if isinstance(source, Path):
        check_regular(source)
        with source.open("rb") as file:
            content = _rewritten(file, source.stat().st_size)
    else:
        content = _rewritten(io.BytesIO(source), len(source))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on its own formats are not the user's
        return torch.load(content, map_location="cpu", weights_only=True)


def _rewritten(file: BinaryIO, size: int) -> io.BytesIO:
    written = io.BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as target:
        entries = archive.infolist()
        if len({entry.filename for entry in entries}) != len(entries):
            raise Refused("two entries of the archive have the same name; save it again")
        check_memory(sum(entry.file_size for entry in entries))
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED:
                raise Refused(f"{entry.filename[:40]} is compressed or encrypted, as torch never writes it")
            if entry.file_size > size:
                raise Refused(f"{entry.filename[:40]} declares more bytes than the file has; copy it again")
            content = archive.read(entry)  # wrong checksums are errors here; torch does not look at them
            if entry.filename.endswith("data.pkl"):
                pickles.scan(content, _MOST_OPCODES, pickles.TORCH)
            target.writestr(zipfile.ZipInfo(entry.filename), content)
    written.seek(0)
    return written
