"""Schemathesis reads the server's own document: bodies it allows and bodies it does not.

Never an answer of 5xx; what is answered is as documented; what the document forbids is refused."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from harness.serve.answer_schemas import answer_schemas
from harness.serve.keys import new_key
from harness.serve.openapi import openapi_document
from harness.serve.routes import ROUTES
from harness.serve.run import Running
from tests.serve.tenants import write_tenants

KEY = new_key()
EXAMPLES = 3
SOAK_EXAMPLES = 2000
MAX_TOKENS = 4
TOKEN_LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
"""What says how long an answer may be, by path."""
DOCUMENT = openapi_document(ROUTES, "0")
# Every case has the key: what happens without it is tested by itself.
SCHEMA = schemathesis.openapi.from_dict({**DOCUMENT, "security": []})
MODES = {"allowed": GenerationMode.POSITIVE, "forbidden": GenerationMode.NEGATIVE}
CASES = [
    (mode, method.upper(), path)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for mode in MODES
    if mode == "allowed" or "requestBody" in operation
]
CHECKED = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "negative_data_rejection"),
)
load_all_checks()
CHOSEN = [CHECKS.get_one(name) for name in CHECKED]


@pytest.fixture(scope="module")
def keyed(serve, tmp_path_factory) -> Iterator[Running]:
    """A server on which the one tenant may do what anybody may, and changes nothing."""
    path = write_tenants(tmp_path_factory.mktemp("fuzz"), {"one": KEY})
    with serve(tenants=path) as server:
        yield server


def ask(server: Running, case: Case, kept: list[int]) -> None:
    """Send a case, with a key and for few tokens, and check the answer."""
    case.headers["Authorization"] = f"Bearer {KEY}"
    limit = TOKEN_LIMITS.get(case.path)
    if limit and isinstance(case.body, dict) and isinstance(case.body.get(limit), int | None):
        case.body[limit] = min(case.body.get(limit) or MAX_TOKENS, MAX_TOKENS)
    response = case.call(base_url=server.url)
    kept.append(response.status_code)
    case.validate_response(response, checks=CHOSEN)


def fuzz(server: Running, method: str, path: str, mode: str, examples: int) -> list[int]:
    """The statuses of so many cases of an operation."""
    statuses: list[int] = []
    strategy = SCHEMA[path][method].as_strategy(generation_mode=MODES[mode])

    @settings(
        max_examples=examples,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=examples == EXAMPLES,
        database=None,
    )
    @given(case=strategy)
    def ask_all(case: Case) -> None:
        ask(server, case, statuses)

    ask_all()
    return statuses


def check_statuses(mode: str, statuses: list[int]) -> None:
    """Answers and refusals of what is allowed, refusals alone of what is forbidden."""
    assert statuses
    kinds = {status // 100 for status in statuses}
    assert kinds <= ({4} if mode == "forbidden" else {2, 4})


@pytest.mark.parametrize(("mode", "method", "path"), CASES)
def test_it_answers_as_documented(keyed, mode, method, path):
    check_statuses(mode, fuzz(keyed, method, path, mode, EXAMPLES))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("mode", "method", "path"), CASES)
def test_it_answers_as_documented_for_long(keyed, mode, method, path):
    statuses = fuzz(keyed, method, path, mode, SOAK_EXAMPLES)
    check_statuses(mode, statuses)
    # Whoever is refused for all that is allowed, 200 is seen of what may be asked without rights.
    if mode == "allowed" and path in TOKEN_LIMITS:
        assert 200 in statuses


def test_both_kinds_of_bodies_are_told_apart(keyed):
    """Negative control: of what is allowed most is answered, of what is forbidden nothing."""
    chat = ("POST", "/v1/chat/completions")
    assert 200 in fuzz(keyed, *chat, "allowed", EXAMPLES)
    assert 200 not in fuzz(keyed, *chat, "forbidden", EXAMPLES)
    assert answer_schemas()[1].keys() <= {route.name for route in ROUTES}
