"""The settings of a server."""

from __future__ import annotations

from accel.user_folders import user_folder
from harness.setting_kinds import (
    DIR,
    FILE,
    QUEUE_DEPTH,
    UTF_8,
    Setting,
    integer,
    names,
    number,
    switch,
    text,
)

HOST = r"[^\s/:*]+|\[?[0-9A-Fa-f:]+\]?"
ORIGIN = r"\*|null|[A-Za-z][\w+.-]*://[^\s/]+/?"

SERVER = (
    Setting(
        "host",
        text("ADDRESS"),
        "127.0.0.1",
        "address to listen on; 0.0.0.0 is every address and needs --tenants",
        common=True,
    ),
    Setting("port", integer(0, 65535), 8080, "port to listen on; 0 takes a free one", common=True),
    Setting(
        "slots",
        integer(1, 1 << 12),
        None,
        "requests that are answered at once; each has memory for a whole context",
        "4 for a server, else 1",
        common=True,
        aliases=("-np", "--parallel", "--max-num-seqs"),
    ),
    Setting(
        "queue_depth",
        integer(1, 4096),
        QUEUE_DEPTH,
        "requests that may wait for a slot; further ones are refused",
    ),
    Setting(
        "alias",
        names("NAME", "names in UTF-8", UTF_8),
        "",
        "further name by which requests may call the model; '*' accepts every name. May be "
        "given several times",
        "none",
        repeats=True,
        common=True,
        aliases=("-a", "--served-model-name"),
        field="aliases",
    ),
    Setting(
        "beside",
        names("NAME[,NAME]"),
        "",
        "further models that requests may name, separated by commas; each is loaded when a "
        "request first names it, and unloaded when it is unused and memory is short",
        "none",
    ),
    Setting(
        "tenants",
        FILE,
        None,
        "file of the users and of digests of their API keys, see `zinc-rt tenants`",
        "one local user without a key",
        common=True,
    ),
    Setting(
        "ledger",
        FILE,
        lambda: user_folder("state") / "ledger.sqlite",
        "SQLite file that counts the tokens of every tenant",
    ),
    Setting(
        "allowed_hosts",
        names("HOST[,HOST]", "names of hosts without scheme and port", HOST),
        "",
        "host names, separated by commas, that requests may use for this server, besides its "
        "addresses, localhost and the machine's name",
        "none",
    ),
    Setting(
        "cors",
        names("ORIGIN", "origins such as https://chat.example.org, or '*'", ORIGIN),
        "",
        "web site whose pages may use this server, such as https://chat.example.org; '*' is "
        "every site. May be given several times",
        "none",
        repeats=True,
    ),
    Setting(
        "unknown_fields",
        switch("ignore", "reject"),
        "ignore",
        "requests with a field that the server does not know: answer and name the ignored "
        "field, or refuse; a misspelt field is always refused",
        field="reject_unknown",
    ),
    Setting(
        "drain_seconds",
        number(0, 3600, "SECONDS"),
        30.0,
        "seconds that running answers get when the server is asked to stop",
    ),
    Setting(
        "record",
        DIR,
        None,
        "folder for traces to replay (zinc-rt replay); they contain every prompt and answer",
        "nothing is recorded",
    ),
    Setting(
        "slot_save_path",
        DIR,
        None,
        "folder for the slots that clients of llama.cpp's server save; they contain prompts and "
        "answers",
        "slots are not saved",
    ),
    Setting(
        "state",
        DIR,
        None,
        "folder for the answers that /v1/responses stores; they contain prompts and answers",
        "they stay in memory",
    ),
    Setting(
        "receipts",
        DIR,
        None,
        "folder for signed receipts of all answers (docs/receipts.md); they contain every prompt "
        "and answer",
        "no receipts are made",
    ),
    Setting(
        "read_experts",
        switch("off", "on"),
        "off",
        "requests may ask which experts of a mixture every token used; more kinds of steps are "
        "prepared at the start",
        field="experts",
    ),
    Setting(
        "engine_process",
        switch("off", "on"),
        "off",
        "compute in a child process, so that reading and writing HTTP takes no time from it; for "
        "many requests at once on a fast device",
    ),
    Setting(
        "ray",
        integer(0, 64),
        0,
        "processes under Ray Serve that answer instead of this one; when one dies its answers "
        "go on in another",
        "none",
        field="replicas",
    ),
)
