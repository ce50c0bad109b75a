"""A library that is not installed is named, with a command that installs it."""

import json
import os
import subprocess
import tomllib
import venv
from collections.abc import Callable

import pytest

from contract import extras
from harness.extras import EXTRA_OF
from tests.cli.conftest import Result, command, environment
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS

MISSING = """
import os, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["MISSING"].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


class TestLibraries:
    """Commands without the library of an extra."""

    @pytest.fixture
    def without(self, tmp_path) -> Callable[..., Result]:
        (tmp_path / "sitecustomize.py").write_text(MISSING)

        def run(missing: str, *words: object) -> Result:
            path = os.pathsep.join((str(tmp_path), str(ROOT)))
            done = subprocess.run(
                command(*words),
                capture_output=True,
                stdin=subprocess.DEVNULL,
                env=environment(MISSING=missing, PYTHONPATH=path),
                timeout=PROCESS_SECONDS,
            )
            return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

        return run

    @pytest.mark.parametrize("name", ["bench", "conformance"])
    def test_help_needs_none(self, without, name):
        result = without(",".join(EXTRA_OF), name, "--help")
        assert (result.code, result.err) == (0, "")

    @pytest.mark.parametrize(
        ("missing", "words"),
        [
            ("msgspec", ("serve",)),
            ("waitress", ("verify", "a", "b")),
            ("tomlkit", ("tenants", "add", "me", "--tenants", "t.toml")),
            ("matplotlib", ("bench", "--plot", "p.svg")),
        ],
    )
    def test_the_error_is_a_command_for_this_copy(self, without, tiny_model, missing, words):
        named = () if words[0] == "tenants" else ("--model", tiny_model)
        result = without(missing, *words, *named)
        assert result.code == 2, result.err
        assert result.err.count("\n") == 1
        extra = EXTRA_OF[missing]
        assert " install " in result.err
        assert f"{ROOT}[{extra}]" in result.err or f"'.[{extra}]'" in result.err

    def test_every_extra_of_a_module_brings_it(self):
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        named = {"prometheus_client": "prometheus_client", "llama_cpp": "llama-cpp-python"}
        for module, extra in EXTRA_OF.items():
            packages = known["optional-dependencies"][extra]
            assert any(package.startswith(named.get(module, module)) for package in packages)

    def test_pip_understands_what_it_is_asked_for(self, tmp_path, monkeypatch):
        """Of a checkout, a wheel file, and a copy whose origin is gone."""
        folder = tmp_path / "with space"
        folder.mkdir()
        (folder / "pyproject.toml").write_text("")
        monkeypatch.setattr(extras, "SOURCE_TREE", folder)
        assert extras.requirements("server") == [f"{folder}[server]"]
        monkeypatch.chdir(folder)
        assert extras.install_command("server").endswith("install '.[server]'")
        monkeypatch.setattr(extras, "SOURCE_TREE", tmp_path)
        wheel = folder / "zinc_rt-1-py3-none-any.whl"
        wheel.write_bytes(b"")
        site = tmp_path / "site" / "zinc_rt-1.dist-info"
        site.mkdir(parents=True)
        (site / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: zinc-rt\nVersion: 1\nProvides-Extra: vulkan\n"
            'Requires-Dist: cffi>=1.16; extra == "vulkan"\nRequires-Dist: numpy\n'
        )
        (site / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri()}))
        monkeypatch.syspath_prepend(site.parent)
        assert extras.requirements("vulkan") == [f"zinc-rt[vulkan] @ {wheel.as_uri()}"]
        wheel.unlink()
        assert extras.requirements("vulkan") == ["cffi>=1.16"]


def test_an_environment_without_pip_is_told_of_uv(tmp_path, monkeypatch):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    script = "from contract.extras import pip_command; print(pip_command())"
    done = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, env=environment(PATH="/usr/bin")
    )
    assert done.stdout == f"uv pip install --python {python}\n"
