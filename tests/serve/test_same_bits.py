"""The same load gives the same bytes, however its requests meet in the engine."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.types import LOCAL_TENANT
from harness.serve.engine_requests import DRAWN_SEED_BITS
from harness.serve.receipts.check import model_problems
from harness.serve.receipts.document import parse_receipt
from harness.serve.receipts.store import ReceiptStore
from harness.serve.run import Running
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from tests.serve.engine_child import statistics_of
from tests.serve.http import Http

ROUNDS = 3
SOAK_ROUNDS = 10
CLIENTS = 32


def load(number: int) -> dict[str, object]:
    """What client ``number`` asks: all lengths, sampled and greedy, penalized, streamed or not."""
    return {
        "prompt": "the quick brown fox jumps over the lazy dog "[: 3 + number],
        "max_tokens": 3 + number % 5, "temperature": 0 if number % 3 == 0 else 0.9,
        "repetition_penalty": 1.3 if number % 4 == 0 else 1.0, "logprobs": number % 3,
        "seed": number, "stream": number % 2 == 0,
    }  # fmt: skip


def told(http: Http, body: dict[str, object]) -> str:
    """What an answer says, without its id, its time and how it was computed."""
    reply = http.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    if not body["stream"]:
        return json.dumps([reply.json["choices"][0]["text"], reply.json["choices"][0]["logprobs"]])
    lines = [line for line in reply.body.split(b"\n\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
    tokens = [token for chunk in chunks for token in chunk["logprobs"]["tokens"]]
    values = [value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]]
    text = "".join(chunk["text"] for chunk in chunks)
    return json.dumps([text, tokens, values])


def answers(server: Running) -> list[str]:
    """The answers of all clients at once."""
    http = Http(server.url)
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda number: told(http, load(number)), range(CLIENTS)))


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(SOAK_ROUNDS, marks=pytest.mark.soak)])
def test_rounds_of_the_same_load_give_the_same_bytes(serve, rounds):
    """And they are what each client gets when it is alone."""
    with serve() as server:
        http = Http(server.url)
        alone = [told(http, load(number)) for number in range(CLIENTS)]
        for _ in range(rounds):
            assert answers(server) == alone
        steps = server.service.model.driver.call(statistics_of).steps
        tokens = server.service.ledger.total(LOCAL_TENANT).completion_tokens
        assert steps < tokens, "nobody ever shared a step"


def test_another_seed_gives_other_bytes(server):
    """Negative control: what is compared does depend on what is sampled."""
    http = Http(server.url)
    one = load(1)
    assert told(http, one) != told(http, {**one, "seed": 2})


def test_a_prompt_of_whole_pages_is_copied_where_it_ends(serve):
    """Asked again, all of it but its last token comes from the cache, and the answer is the same;
    one with penalties has to compute what these look at."""
    with serve() as server:
        http = Http(server.url)
        prompt = [3 + token % 200 for token in range(48)]
        first, again = (
            http.post("/v1/completions", {"prompt": prompt, "max_tokens": 20, "seed": 1}).json
            for _ in range(2)
        )
        assert first["choices"] == again["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 47
        statistics = server.service.model.driver.call(statistics_of)
        assert statistics.prefix.copied == 1


def drawn_and_expected(server: Running, request: pytest.FixtureRequest) -> tuple[int, int]:
    """The seed of an answer whose request names none, and what ``request``'s scope draws first."""
    answer = Http(server.url).post("/v1/completions", {"prompt": "abc", "max_tokens": 2}).json
    expected = random.Random(request.node.nodeid).getrandbits(DRAWN_SEED_BITS)
    return answer["x_zinc"]["seed"], expected


@pytest.fixture(scope="module")
def of_the_module(server, request) -> tuple[int, int]:
    return drawn_and_expected(server, request)


def test_a_request_without_a_seed_draws_the_one_of_its_test(of_the_module, server, request):
    """``the_same_seeds_in_every_run`` reaches the server: no answer of a test, or of the fixtures
    of its module, is of chance."""
    drawn = [of_the_module, drawn_and_expected(server, request)]
    assert drawn == [(expected, expected) for _, expected in drawn]


def test_penalties_look_back_as_far_whatever_is_guessed_ahead(serve):
    """More tokens are stored where there may be drafts, and nobody's answer is another by it."""
    body = {"prompt": "to be or not to be, " * 6, "max_tokens": 100, "temperature": 0}
    body |= {"presence_penalty": 1.5, "ignore_eos": True, "logprobs": 1, "stream": False}
    found = set()
    for draft in (0, 3, 11):
        with serve(draft=draft) as server:
            http = Http(server.url)
            found.add(told(http, body))
            assert told(http, {**body, "repeat_last_n": 64}) in found
            assert told(http, {**body, "repeat_last_n": 60}) not in found
            for far in (65, 75, 76):
                reply = http.post("/v1/completions", {**body, "repeat_last_n": far})
                assert (reply.status, reply.error["param"]) == (400, "repeat_last_n")
            unused = {**body, "presence_penalty": 0, "repeat_last_n": 4096, "max_tokens": 1}
            assert http.post("/v1/completions", unused).status == 200
    assert len(found) == 1


def test_a_context_that_chooses_other_frequencies_is_another_function(serve, tmp_path):
    """Phi-3 has divisors for long contexts. An honest answer of the other server is no lie: its
    receipt says what the context chose."""
    path, body = tmp_path / "phi3.gguf", {"prompt": "To be or not", "max_tokens": 8, "seed": 1}
    sizes = {"architecture": "phi3", "long_rope": True, "rope_original_context": 64}
    write_synthetic(path, sized_spec("tiny", **sizes))
    found: dict[str, set[str]] = {}
    receipts = []
    for context in (64, 128, 160):
        folder = tmp_path / str(context)
        with serve(path=path, context=context, receipts=folder) as server:
            answer = Http(server.url).post("/v1/completions", {**body, "logprobs": 1}).json
            found.setdefault(answer["system_fingerprint"], set()).add(json.dumps(answer["choices"]))
            with ReceiptStore(folder) as store:
                (text,) = store.exported(0)
            receipts.append(parse_receipt(text.encode(), "r"))
            differing = [model_problems(receipt, server.service.model) for receipt in receipts]
    assert [len(answers) for answers in found.values()] == [1, 1]
    assert len(set().union(*found.values())) == 2
    (problem,) = differing[0]
    assert problem.startswith("context: rope_factors_short.weight answered")
    assert differing[1:] == [[], []]
