"""Models split over several files, named ``<stem>-00001-of-000NN.gguf`` by GGUF's convention."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from contract.errors import ModelFileError
from reference.model.gguf.cursor import shown
from reference.model.gguf.limits import MAX_SHARDS, MAX_TENSORS
from reference.model.gguf.metadata import typed_value
from reference.model.gguf.shard import Shard, open_shard

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NUMBER_KEY = "split.no"
_COUNT_KEY = "split.count"
_TENSORS_KEY = "split.tensors.count"
_ARCHITECTURE_KEY = "general.architecture"
_FETCH = "fetch all files of the model again"


def open_shards(path: Path) -> tuple[Shard, ...]:
    """Every file of the model whose first file is ``path``, in order. Raises ModelFileError when
    ``path`` is not the first file, or another one is missing, is not the shard its name says, or
    belongs to another model."""
    with ExitStack() as opened:
        shards = [open_shard(path, 0)]
        opened.callback(shards[0].close)
        count = _shard_count(shards[0])
        for number in range(1, count):
            sibling = _sibling(path, number, count)
            shard = open_shard(sibling, number)
            opened.callback(shard.close)
            _check_sibling(shard, shards[0], number, count)
            shards.append(shard)
        _check_tensors(shards)
        opened.pop_all()
    return tuple(shards)


def _integer(shard: Shard, key: str) -> int:
    return typed_value(shard.path, shard.header.metadata, key, int)


def _shard_count(first: Shard) -> int:
    """The number of files of the model; raises ModelFileError unless ``first`` is the first of
    them."""
    path = first.path
    named = _NAME.fullmatch(path.name)
    if _COUNT_KEY not in first.header.metadata:
        if named and int(named["count"]) > 1:
            raise ModelFileError(
                path, f"key {shown(_COUNT_KEY)}", "is missing in a file named as a shard", _FETCH
            )
        return 1
    count = _integer(first, _COUNT_KEY)
    if not 1 <= count <= MAX_SHARDS:
        raise ModelFileError(
            path, f"key {shown(_COUNT_KEY)}", f"{count} is not from 1 to {MAX_SHARDS}", _FETCH
        )
    number = _integer(first, _NUMBER_KEY) if count > 1 else 0
    if number != 0:
        name = _sibling(path, 0, count).name if named else f"...-00001-of-{count:05}.gguf"
        raise ModelFileError(
            path,
            f"key {shown(_NUMBER_KEY)}",
            f"this is shard {number + 1} of {count}",
            f"open the first one, {name}",
        )
    return count


def _sibling(path: Path, number: int, count: int) -> Path:
    """The path of shard ``number`` (from 0) in the folder of ``path``, which may be any link."""
    for candidate in (path, path.resolve()):
        named = _NAME.fullmatch(candidate.name)
        if named and int(named["count"]) == count:
            return candidate.with_name(f"{named['stem']}-{number + 1:05}-of-{count:05}.gguf")
    raise ModelFileError(
        path,
        "the file name",
        f"does not end in -00001-of-{count:05}.gguf, so its other shards cannot be found",
        "give the files the names they were made with",
    )


def _check_sibling(shard: Shard, first: Shard, number: int, count: int) -> None:
    expected = {_NUMBER_KEY: number, _COUNT_KEY: count, _TENSORS_KEY: _integer(first, _TENSORS_KEY)}
    for key, value in expected.items():
        found = _integer(shard, key)
        if found != value:
            raise ModelFileError(
                shard.path, f"key {shown(key)}", f"is {found}, not {value}: not this shard", _FETCH
            )
    architecture = shard.header.metadata.get(_ARCHITECTURE_KEY)
    if architecture is not None and architecture != first.header.metadata.get(_ARCHITECTURE_KEY):
        raise ModelFileError(
            shard.path,
            f"key {shown(_ARCHITECTURE_KEY)}",
            f"differs from that of {first.path.name}: a shard of another model",
            _FETCH,
        )


def _check_tensors(shards: list[Shard]) -> None:
    """Check that names are unique over all shards and as many as the first file says."""
    first = shards[0]
    homes: dict[str, Shard] = {}
    for shard in shards:
        for tensor in shard.header.tensors:
            if tensor.name in homes:
                raise ModelFileError(
                    shard.path,
                    f"tensor {shown(tensor.name)}",
                    f"is also in {homes[tensor.name].path.name}",
                    _FETCH,
                )
            homes[tensor.name] = shard
        if len(homes) > MAX_TENSORS:
            raise ModelFileError(
                shard.path, "the tensor list", f"brings more than {MAX_TENSORS} tensors", _FETCH
            )
    if _TENSORS_KEY in first.header.metadata and _integer(first, _TENSORS_KEY) != len(homes):
        raise ModelFileError(
            first.path,
            f"key {shown(_TENSORS_KEY)}",
            f"is {_integer(first, _TENSORS_KEY)}, but the files hold {len(homes)} tensors",
            _FETCH,
        )
