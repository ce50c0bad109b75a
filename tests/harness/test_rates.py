"""Rates of several sizes in one process."""

from hashlib import sha256

from harness.bench.__main__ import main
from tests.harness.test_bench import SIZES, run_json


def test_rates_of_several_lengths_and_numbers_of_sequences(tiny_model_path, capsys):
    """The same tokens on every tier, and on a device by its name."""
    found = run_json(tiny_model_path, "--tiers", "cpu,native", "--rates", "5,9", "--sequences", "2")
    cpu, native = found["engines"]["cpu"], found["engines"]["native"]
    rates = {f"{what}, tok/s" for at in (5, 9) for what in (f"prompt of {at}", f"decode at {at}")}
    opened = {"seconds to open 1 slots", "seconds to open 2 slots"}
    assert set(cpu["rates"]) == rates | opened | {"2 sequences, tok/s"}
    assert all(len(cpu["rates"][one]["samples"]) == 2 for one in rates)
    assert cpu["tokens"] == native["tokens"] != sha256().hexdigest()[:16]
    assert (
        main(["--model", str(tiny_model_path), *SIZES, "--tiers", "cpu", "--sequences", "3"]) == 0
    )
    said = capsys.readouterr().out
    assert said.startswith(f"{tiny_model_path.name}, cpu, {cpu['device']}")
    assert "3 sequences, tok/s: " in said
