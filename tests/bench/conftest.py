"""The option that stores what is measured instead of judging it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--store-ratios", metavar="REASON", default="",
        help="store the ratios of speeds of this kind of machine instead of judging them",
    )  # fmt: skip
