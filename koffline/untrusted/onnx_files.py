"""ONNX models from strangers: a model that names other files is refused before any runtime sees it.

An ONNX tensor may say that its numbers lie in another file, by a path of the model's choice. The fields of
the file (protocol buffers) are walked along the few messages that can hold tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from koffline.untrusted.limits import Refused

_DEEPEST = 64
_MOST_FIELDS = 5_000_000
_BYTES = 2
# Where messages that can hold a tensor are (onnx.proto): message -> field number -> message in it.
_HOLDERS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a tensor


def check_onnx(content: bytes) -> None:
    """Raise Refused where a model keeps numbers in other files, or is no model at all."""
    waiting = [("model", memoryview(content), 0)]
    count = 0
    while waiting:
        message, part, depth = waiting.pop()
        for number, kind, value in _fields(part):
            count += 1
            if count > _MOST_FIELDS or depth > _DEEPEST:
                raise Refused("it is nested or cut up beyond any model; export it again")
            external = number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value not in (0, b""))
            if message == "tensor" and external:
                raise Refused(
                    "it keeps numbers in another file, which koffline never follows; export one file "
                    "(onnx.save with save_as_external_data=False)"
                )
            if kind == _BYTES and number in _HOLDERS[message]:
                assert isinstance(value, memoryview)
                waiting.append((_HOLDERS[message][number], value, depth + 1))


def _fields(part: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Number, wire type and value of each field of a message. Raises Refused where it is no message."""
    place = 0
    while place < len(part):
        tag, place = _varint(part, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = _varint(part, place)
            yield number, kind, value
            continue
        if kind == _BYTES:
            size, place = _varint(part, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise Refused("it is no ONNX model, or damaged; export it again")
        if size > len(part) - place:
            raise Refused("it is truncated; export it again")
        yield number, kind, part[place : place + size]
        place += size


def _varint(part: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(part):
            raise Refused("it is truncated; export it again")
        byte = part[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise Refused("it is no ONNX model, or damaged; export it again")
