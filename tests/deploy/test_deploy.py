"""The deployment files name what there is: directives, settings, metrics, paths."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.settings import ENV_PREFIX, SETTINGS
from tests.needs import machine_lacks
from tests.paths import ROOT
from tests.serve.conftest import serve, server
from tests.serve.http import Http

__all__ = ["serve", "server"]
DEPLOY = ROOT / "harness" / "deploy"
UNIT = (DEPLOY / "zinc-rt.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
INSTALL = (DEPLOY / "install.sh").read_text()
KEPT = [
    line[1:]
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    if line.startswith("!")
]


def complaints(unit: str, folder: Path) -> str:
    """What systemd says of a unit; it names directives it does not know and ignores them."""
    if shutil.which("systemd-analyze") is None:
        machine_lacks("systemd-analyze")
    path = folder / "zinc-rt.service"
    path.write_text(unit.replace("/opt/zinc-rt/bin/zinc-rt", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    return "".join(line for line in done.stderr.splitlines(True) if str(path) in line)


def test_systemd_takes_the_unit(tmp_path):
    assert complaints(UNIT, tmp_path) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("Type=notify", "Type=notified"), ("ProtectHome=", "ProtectHomes="), ("=45s", "=soon")],
)
def test_systemd_complains_of_what_is_wrong(tmp_path, right, wrong):
    """Negative control: one word changed."""
    assert right in UNIT
    assert complaints(UNIT.replace(right, wrong, 1), tmp_path) != ""


def test_a_server_gets_longer_to_end_than_its_answers():
    seconds = re.search(r"TimeoutStopSec=(\d+)s", UNIT)
    assert seconds is not None
    assert int(seconds[1]) > SETTINGS["drain_seconds"].default_value()


def test_every_setting_that_is_named_is_one():
    named = set(re.findall(rf"{ENV_PREFIX}[A-Z_]+", UNIT + DOCKERFILE + OPERATIONS))
    named -= {f"{ENV_PREFIX}EXTRAS", f"{ENV_PREFIX}NO_APT", f"{ENV_PREFIX}KEY"}
    assert named
    assert named <= {setting.env for setting in SETTINGS.values()}


def test_the_image_has_what_it_installs_from():
    """What the ignore file keeps is there, and all that the script copies and reads."""
    assert all((ROOT / path).exists() for path in KEPT)
    copied = re.search(r"for part in ([^;]+);", INSTALL)
    assert copied is not None
    assert {*copied[1].split(), "ci/constraints.txt"} == set(KEPT)
    assert "harness/deploy/install.sh" in DOCKERFILE


def test_the_script_is_a_shell_script(tmp_path):
    subprocess.run(["sh", "-n", str(DEPLOY / "install.sh")], check=True)
    done = subprocess.run(["sh", str(DEPLOY / "install.sh")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "install.sh PREFIX" in done.stderr


def metric_names(text: str) -> set[str]:
    """Every metric a text names, histograms and counters as Prometheus stores them."""
    return set(re.findall(r"zinc_rt:[a-z_]+[a-z]", text))


def test_alerts_and_page_name_metrics_that_there_are(server):
    http = Http(server.url)
    assert http.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
    text = http.get("/metrics").body.decode()
    there = metric_names(text)
    for name in re.findall(r"# TYPE (\S+) counter", text):
        there.add(f"{name.removesuffix('_total')}_total")
    alerts = (DEPLOY / "alerts.yml").read_text()
    assert len(metric_names(alerts)) >= 5
    assert metric_names(alerts) <= there
    assert metric_names(OPERATIONS) <= there
    assert not metric_names("zinc_rt:no_such_metric") <= there


def test_alerts_are_rules():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "annotations"}
        assert rule["expr"].count("(") == rule["expr"].count(")")


OPERATIONS = (ROOT / "docs" / "serving.md").read_text()
