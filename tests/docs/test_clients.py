"""docs/serving.md names the versions of the clients that the tests run."""

from tests.paths import ROOT


def test_versions_are_those_of_the_constraints():
    """Of every client that is among them; others were tried by hand."""
    lines = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    pinned = {name: version for name, _, version in (line.partition("==") for line in lines)}
    _, clients = (ROOT / "docs" / "serving.md").read_text().split("## Tested clients\n\n")
    named: dict[str, str] = {}
    for line in clients.partition("\n\n")[0].splitlines():
        packages, versions, _ = line.strip("| ").split(" | ")
        named |= zip(packages.split(", "), versions.split(", "), strict=False)
    found = {name: named[name] for name in named.keys() & pinned.keys()}
    assert found == {name: pinned[name] for name in found}
    assert {"anthropic", "ollama", "openai", "pydantic-ai-slim", "langchain-openai"} <= found.keys()
