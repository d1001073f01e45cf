"""Builders of files made to do harm, each a few kilobytes."""

import io
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from koffline.data.disk.log import Column, LazyTransitions, ShardInfo
from koffline.data.disk.writer import write_manifest
from koffline.data.raw import describe_columns
from koffline.data.spaces import Discrete
from koffline.data.transitions import Metadata

SECRET = 777_000.0
FLAT = {
    "observations": np.ones((4, 2), np.float32),
    "next_observations": np.ones((4, 2), np.float32),
    "actions": np.array([0, 1, 0, 1]),
    "rewards": np.ones(4),
    "terminals": np.ones(4, bool),
    "timeouts": np.zeros(4, bool),
}


def flat(path: Path, lacking: str = "") -> h5py.File:
    """An open flat file of four rows, to be spoilt."""
    file = h5py.File(path, "w")
    file.attrs["koffline"] = np.bytes_(describe_columns(Discrete(2), False, Metadata()))
    for name in FLAT.keys() - {lacking}:
        file[name] = FLAT[name]
    return file


def in_a_folder(path: Path) -> Path:
    """A folder of shards whose only one is the file, said to be what ``flat`` makes."""
    folder = path.with_name("shards")
    folder.mkdir()
    path.rename(folder / path.name)
    roles = {"terminals": "terminated", "timeouts": "truncated"}
    columns = {
        roles.get(key, key): Column(key, str(a.dtype), a.shape[1:])
        for key, a in FLAT.items()
    }
    shard = ShardInfo(str(folder / path.name), 4, 0)
    write_manifest(folder, LazyTransitions((shard,), Discrete(2), columns, Metadata()))
    return folder


def other_file(path: Path) -> Path:
    """Another HDF5 file of the reader, which holds what is none of the log's
    business.
    """
    other = path.with_name("private.hdf5")
    with h5py.File(other, "w") as file:
        file["rewards"] = np.full(4, SECRET)
    return other


def external_link(path: Path) -> None:
    other = other_file(path)
    with flat(path, lacking="rewards") as file:
        file["rewards"] = h5py.ExternalLink(other.name, "/rewards")


def soft_link_through_an_external_one(path: Path) -> None:
    other = other_file(path)
    with flat(path, lacking="rewards") as file:
        file["out"] = h5py.ExternalLink(other.name, "/")
        file["rewards"] = h5py.SoftLink("/out/rewards")


def external_storage(path: Path) -> None:
    private = path.with_name("private.bin")
    private.write_bytes(np.full(4, SECRET).tobytes())
    with flat(path, lacking="rewards") as file:
        file.create_dataset("rewards", (4,), "f8", external=[(str(private), 0, 32)])


def virtual_dataset(path: Path) -> None:
    other = other_file(path)
    with flat(path, lacking="rewards") as file:
        layout = h5py.VirtualLayout((4,), "f8")
        layout[:] = h5py.VirtualSource(str(other), "rewards", (4,))
        file.create_virtual_dataset("rewards", layout)


def hard_link_loop(path: Path) -> None:
    with flat(path, lacking="rewards") as file:
        group = file.create_group("infos")
        group["infos"] = file["/"]
        file["loop"] = group


def one_huge_column(path: Path) -> None:
    with flat(path, lacking="rewards") as file:
        file.create_dataset("rewards", (2**36,), "f8")


def gzip_twice(path: Path) -> None:
    rows = 2**26
    with flat(path) as file:
        for name in list(file):
            del file[name]
            if name != "observations":
                file.create_dataset(name, (rows,), "i1", chunks=(2**20,))
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((2**20,))
        plan.set_deflate(9)
        plan.set_deflate(9)
        space = h5py.h5s.create_simple((rows,))
        h5py.h5d.create(file.id, b"observations", h5py.h5t.NATIVE_DOUBLE, space, plan)
        block = zlib.compress(zlib.compress(bytes(2**23), 9), 9)
        for start in range(0, rows, 2**20):
            file["observations"].id.write_direct_chunk((start,), block)


def one_huge_chunk(path: Path) -> None:
    with flat(path, lacking="rewards") as file:
        file.create_dataset(
            "rewards", (4,), "f8", maxshape=(None,), chunks=(2**28,), compression="gzip"
        )


def same_data_many_times(path: Path) -> None:
    from koffline.data.d3rlpy_dump import write_d3rlpy_dump
    from scripts.fuzz.seeds import log

    write_d3rlpy_dump(log(), path)
    with h5py.File(path, "a") as file:
        big = np.random.default_rng(0).random((2**17, 2)).astype(np.float32)
        file["big"] = big
        file["num_episodes"][()] = 200
        for i in range(200):
            for name in ("observations", "actions", "rewards", "terminated"):
                if f"{name}_{i}" in file:
                    del file[f"{name}_{i}"]
            file[f"observations_{i}"], file[f"actions_{i}"] = file["big"], file["big"]
            file[f"rewards_{i}"] = np.zeros((2**17, 1), np.int8)
            file[f"terminated_{i}"] = False


def a_missing_filter(path: Path) -> None:
    with flat(path, lacking="rewards") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((4,))
        plan.set_shuffle()
        plan.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, ())
        h5py.h5d.create(
            file.id,
            b"rewards",
            h5py.h5t.NATIVE_DOUBLE,
            h5py.h5s.create_simple((4,)),
            plan,
        )
        file["rewards"].id.write_direct_chunk((0,), b"packed")


def a_description_without_end(path: Path) -> None:
    with flat(path) as file:
        file.attrs["koffline"] = "[" * 100_000


def a_chunk_without_its_checksum(path: Path) -> None:
    """Found by fuzzing: HDF5 subtracts the checksum's 4 bytes from 2, and reads on."""
    with flat(path, lacking="rewards") as file:
        rewards = file.create_dataset(
            "rewards", (4,), "f8", chunks=(4,), fletcher32=True
        )
        rewards.id.write_direct_chunk((0,), b"\0\0")


HDF5: dict[Callable[[Path], None], str] = {
    a_chunk_without_its_checksum: "rewards: a chunk of 2 bytes with a checksum of 4",
    external_link: "rewards is a link to another file",
    soft_link_through_an_external_one: "out is a link to another file",
    external_storage: "rewards keeps its numbers in another file",
    virtual_dataset: "rewards is a virtual dataset",
    hard_link_loop: "lacks rewards",
    one_huge_column: "rewards has 68719476736 rows, observations 4; re-export",
    gzip_twice: "declares 872 MB and has",
    one_huge_chunk: "takes 2.15 GB in memory, 20 MB are allowed",
    same_data_many_times: "in memory, 20 MB are allowed",
    a_missing_filter: (
        "rewards uses HDF5 filter 32001, which this library lacks; rewrite it with gzip"
    ),
    a_description_without_end: "description is damaged",
}
# The same as shards of a folder, where the reader says something else.
SHARDS = HDF5 | {
    one_huge_column: "declares 550 GB and has",
    one_huge_chunk: (
        "rewards can only be read 2.15 GB at a time; write it again with chunks of at"
        " most"
    ),
    same_data_many_times: "observations is missing",
    hard_link_loop: "rewards is missing",
}
del SHARDS[a_description_without_end]  # a manifest describes shards


def npy(header: str, content: bytes = b"") -> bytes:
    """An .npy with any header."""
    head = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + content


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip of these members."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method, compresslevel=1) as target:
        for name, content in members.items():
            target.writestr(name, content)
    return written.getvalue()


def flat_members(**spoilt: bytes) -> dict[str, bytes]:
    """The members of a readable log, some replaced."""
    columns = {
        "observations": np.ones((4, 2)),
        "actions": np.zeros(4, int),
        "rewards": np.ones(4),
        "terminals": np.ones(4, bool),
    }
    members = {}
    for name, values in columns.items():
        content = io.BytesIO()
        np.save(content, values)
        members[f"{name}.npy"] = content.getvalue()
    return members | {f"{name}.npy": content for name, content in spoilt.items()}


def bomb(declared: int) -> bytes:
    """Four rows of zeros in a thousandth of the bytes."""
    header = (
        f"{{'descr': '|u1', 'fortran_order': False, 'shape': (4, {declared // 4})}}"
    )
    return archive(
        flat_members(observations=npy(header, bytes(declared))), zipfile.ZIP_DEFLATED
    )
