"""Conformance packages: a fixed list of cases run on one device, and the archive of its results."""

from harness.conformance.cases import known_cases
from harness.conformance.must_pass import load_must_pass, must_pass_ids
from harness.conformance.package import pack, unpack
from harness.conformance.run import CaseResult, conformance_package, run_cases
from harness.conformance.verify import Verdict, verify_package
from harness.conformance.waivers import Waiver, parse_waivers

__all__ = [
    "CaseResult",
    "Verdict",
    "Waiver",
    "conformance_package",
    "known_cases",
    "load_must_pass",
    "must_pass_ids",
    "pack",
    "parse_waivers",
    "run_cases",
    "unpack",
    "verify_package",
]
