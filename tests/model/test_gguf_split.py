"""Split models: all shards open as one file, and nothing foreign is taken for a shard."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from contract.dtypes import F32
from contract.errors import ModelFileError
from reference.model.gguf import limits
from reference.model.gguf.file import open_gguf
from reference.model.gguf.types import GgufType
from reference.model.gguf.writer import Typed, write_gguf


def shard_path(folder: Path, number: int, count: int, stem: str = "model") -> Path:
    return folder / f"{stem}-{number + 1:05}-of-{count:05}.gguf"


def write_shard(
    path: Path, number: int, count: int, tensors: list[str], total: int, **more
) -> Path:
    """One shard; each tensor holds the number of its shard."""
    keys = {
        "split.no": Typed(GgufType.UINT16, number),
        "split.count": Typed(GgufType.UINT16, count),
        "split.tensors.count": Typed(GgufType.INT32, total),
    }
    data = np.full(4, number, "<f4")
    write_gguf(path, keys | more, dict.fromkeys(tensors, (F32, (4,), data)))
    return path


def write_model(folder: Path, count: int = 3) -> Path:
    for number in range(count):
        names = [f"w{number}.{index}" for index in range(2)]
        more = {"general.architecture": "llama"} if number == 0 else {}
        write_shard(shard_path(folder, number, count), number, count, names, 2 * count, **more)
    return shard_path(folder, 0, count)


def refusal(path: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    assert str(caught.value).isprintable()
    return caught.value


def test_first_shard_opens_all(tmp_path):
    with open_gguf(write_model(tmp_path)) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert [info.shard for info in file.tensors.values()] == [0, 0, 1, 1, 2, 2]
        for name, info in file.tensors.items():
            assert file.tensor_array(name).tolist() == [info.shard] * 4
        assert file.size == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_single_file_may_say_it_is_one_of_one(tmp_path):
    with open_gguf(write_model(tmp_path, 1)) as file:
        assert len(file.tensors) == 2


def test_links_to_the_shards(tmp_path):
    """Shards are found beside the name given, or beside the file it leads to."""
    first = write_model(tmp_path)
    cache = tmp_path / "cache"
    cache.mkdir()
    for number in range(3):
        shard_path(cache, number, 3).symlink_to(shard_path(tmp_path, number, 3))
    (tmp_path / "latest.gguf").symlink_to(first)
    for path in (shard_path(cache, 0, 3), tmp_path / "latest.gguf"):
        with open_gguf(path) as file:
            assert len(file.tensors) == 6


def test_other_shard_names_the_first(tmp_path):
    write_model(tmp_path)
    error = refusal(shard_path(tmp_path, 1, 3))
    assert error.problem == "this is shard 2 of 3"
    assert error.remedy == "open the first one, model-00001-of-00003.gguf"


def test_other_shard_by_another_name(tmp_path):
    write_model(tmp_path)
    shutil.copy(shard_path(tmp_path, 2, 3), tmp_path / "a.gguf")
    assert refusal(tmp_path / "a.gguf").remedy == "open the first one, ...-00001-of-00003.gguf"


def test_missing_shard_is_named(tmp_path):
    first = write_model(tmp_path)
    shard_path(tmp_path, 1, 3).unlink()
    error = refusal(first)
    assert error.path.endswith("model-00002-of-00003.gguf")
    assert error.problem == "does not exist"


def test_first_shard_by_another_name(tmp_path):
    os.rename(write_model(tmp_path), tmp_path / "a.gguf")
    assert "does not end in -00001-of-00003.gguf" in refusal(tmp_path / "a.gguf").problem


def test_duplicate_shard(tmp_path):
    first = write_model(tmp_path)
    shutil.copy(shard_path(tmp_path, 1, 3), shard_path(tmp_path, 2, 3))
    error = refusal(first)
    assert (error.where, error.problem) == ("key 'split.no'", "is 1, not 2: not this shard")


def test_cycle_back_to_the_first(tmp_path):
    first = write_model(tmp_path)
    shard_path(tmp_path, 1, 3).unlink()
    shard_path(tmp_path, 1, 3).symlink_to(first)
    assert refusal(first).problem == "is 0, not 1: not this shard"


@pytest.mark.parametrize(
    ("number", "count", "total", "architecture", "where"),
    [
        (2, 3, 6, "llama", "split.no"),
        (1, 4, 6, "llama", "split.count"),
        (1, 3, 7, "llama", "split.tensors.count"),
        (1, 3, 6, "gemma3", "general.architecture"),
    ],
)
def test_foreign_shard(number, count, total, architecture, where, tmp_path):
    first = write_model(tmp_path)
    path = shard_path(tmp_path, 1, 3)
    more = {"general.architecture": architecture}
    write_shard(path, number, count, ["w1.0", "w1.1"], total, **more)
    error = refusal(first)
    assert (error.path, error.where) == (str(path), f"key '{where}'")


def test_shard_that_is_a_whole_model(tmp_path):
    first = write_model(tmp_path)
    write_gguf(shard_path(tmp_path, 1, 3), {}, {})
    assert refusal(first).problem.startswith("is missing")


def test_tensor_in_two_shards(tmp_path):
    first = write_model(tmp_path)
    write_shard(shard_path(tmp_path, 1, 3), 1, 3, ["w0.0", "w1.1"], 6)
    error = refusal(first)
    assert (error.where, error.problem) == ("tensor 'w0.0'", "is also in model-00001-of-00003.gguf")


def test_tensor_missing_from_a_shard(tmp_path):
    first = write_model(tmp_path)
    write_shard(shard_path(tmp_path, 1, 3), 1, 3, ["w1.0"], 6)
    assert refusal(first).problem == "is 6, but the files hold 5 tensors"


@pytest.mark.parametrize("count", [0, limits.MAX_SHARDS + 1, 65535])
def test_impossible_shard_count(count, tmp_path):
    path = write_shard(tmp_path / "a.gguf", 0, count, [], 0)
    assert refusal(path).where == "key 'split.count'"


@pytest.mark.parametrize("key", ["split.no", "split.tensors.count"])
def test_split_key_missing(key, tmp_path):
    write_model(tmp_path)
    keys = {"split.no": 0, "split.count": 3, "split.tensors.count": 6}
    del keys[key]
    write_gguf(shard_path(tmp_path, 0, 3), keys, {})
    assert refusal(shard_path(tmp_path, 0, 3)).where == f"key '{key}'"


def test_named_as_a_shard_but_not_one(tmp_path):
    path = shard_path(tmp_path, 0, 2)
    write_gguf(path, {}, {})
    assert refusal(path).where == "key 'split.count'"


def test_truncated_shard_is_noticed_while_open(tmp_path):
    with open_gguf(write_model(tmp_path)) as file:
        os.truncate(shard_path(tmp_path, 2, 3), 24)
        file.tensor_array("w0.0")
        for use in (file.check_unchanged, lambda: file.tensor_array("w2.0")):
            with pytest.raises(ModelFileError, match=r"model-00003-of-00003\.gguf"):
                use()
