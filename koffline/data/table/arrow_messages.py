"""What the messages of an Arrow stream become in memory, told before any of them is decompressed.

Arrow allocates what a compressed buffer declares in its first eight bytes, and offers no way to ask for it:
the message is a flatbuffer, of which the few fields that matter are looked up here (Arrow's Message.fbs).
"""

from __future__ import annotations

import struct
from typing import Any

from koffline.untrusted.limits import Refused

MAGIC_BYTES = 8  # before the stream in a file
# Places of fields in the tables of Message.fbs.
_HEADER, _DICTIONARY, _BUFFERS, _COMPRESSION = 2, 1, 2, 3


def bytes_at_once(source: Any) -> int:
    """Bytes of the largest record batch and all dictionaries of the stream that begins here.

    Raises Refused.
    """
    import pyarrow as pa

    dictionaries = largest = 0
    for message in pa.ipc.MessageReader.open_stream(source):
        if message.type == "schema":
            continue
        try:
            declared = _declared(message)
        except (struct.error, TypeError):
            raise Refused("a message of it is damaged; copy or export it again") from None
        if message.type == "dictionary":
            dictionaries += declared
        else:
            largest = max(largest, declared)
    return dictionaries + largest


def _declared(message: Any) -> int:
    content, body = memoryview(message.metadata), message.body
    batch = _follow(content, _field(content, _follow(content, 0), _HEADER))
    if message.type == "dictionary":
        batch = _follow(content, _field(content, batch, _DICTIONARY))
    if _field(content, batch, _COMPRESSION) is None:
        return len(body)
    buffers = _follow(content, _field(content, batch, _BUFFERS))
    total = 0
    for i in range(struct.unpack_from("<I", content, buffers)[0]):
        offset, length = struct.unpack_from("<qq", content, buffers + 4 + 16 * i)
        if length:
            # -1 says that this buffer is not compressed
            total += max(length, struct.unpack_from("<q", body, offset)[0])
    return total


def _follow(content: memoryview, place: Any) -> int:
    """Where an offset leads."""
    return int(place + struct.unpack_from("<I", content, place)[0])


def _field(content: memoryview, table: int, index: int) -> int | None:
    """Where a table has its field, if it has it."""
    described = table - struct.unpack_from("<i", content, table)[0]
    if 4 + 2 * index >= struct.unpack_from("<H", content, described)[0]:
        return None
    offset = struct.unpack_from("<H", content, described + 4 + 2 * index)[0]
    return table + offset if offset else None
