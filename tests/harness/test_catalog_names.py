"""Names of the hub: how they are written, and which files of a repository they mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import CatalogError
from harness.catalog.names import HubName, choose, models_among, parse_hub_name, quant_of
from harness.catalog.store import checked_path

SPLIT = [f"BF16/Model-BF16-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
FILES = [
    *(".gitattributes", "README.md", "Model-Q8_0.gguf", "Model-Q4_K_M.gguf"),
    *("Model-UD-Q4_K_XL.gguf", "Model-IQ4_XS.gguf", "Model-MXFP4_MOE.gguf"),
    *("mmproj-Model-F16.gguf", "Model.imatrix.gguf"),
    *reversed(SPLIT),
]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf.co/Qwen/Qwen3-8B-GGUF", HubName("Qwen/Qwen3-8B-GGUF")),
        ("huggingface.co/a/b:q4_k_m", HubName("a/b", "q4_k_m")),
        ("hf.co/a/b/sub/c.gguf", HubName("a/b", None, "sub/c.gguf")),
    ],
)
def test_names_are_read(text, name):
    assert parse_hub_name(text) == name
    assert parse_hub_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "hf.co/", "hf.co/a", "hf.co/a/b/", "hf.co/a/b:", "hf.co/a/b:x/y", "hf.co/a/b/c.bin",
        "hf.co/../b", "hf.co/a/..", "hf.co/a/b/../c.gguf", "hf.co/a/b/.c.gguf", "hf.co/a/b//c.gguf",
        "hf.co/a/b:../x", "hf.co/a\\b/c", "hf.co/a/b\n", "hf.co/a b/c", "https://hf.co/a/b", "a/b",
        "hf.co/a/b@main", "hf.co/-a/b", "hf.co/a/b?x", "hf.co/ü/b", "hf.co/a/" + "b" * 129,
    ],
)  # fmt: skip
def test_other_names_say_how_to_write_them(text):
    with pytest.raises(CatalogError, match=r"write hf.co/ORG/REPO, hf.co/ORG/REPO:QUANT or"):
        parse_hub_name(text)


@given(st.lists(st.text()), st.text())
def test_hostile_files_are_never_chosen(paths, ending):
    """Whatever a repository lists, what a name can mean is safe below a folder."""
    for parts in models_among([*paths, f"../{ending}.gguf", f"/{ending}.gguf"]).values():
        for path in parts:
            assert checked_path(path) == path


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("hf.co/a/b", ["Model-Q4_K_M.gguf"]),
        ("hf.co/a/b:Q4_K_M", ["Model-Q4_K_M.gguf"]),
        ("hf.co/a/b:q8_0", ["Model-Q8_0.gguf"]),
        ("hf.co/a/b:ud-q4_k_xl", ["Model-UD-Q4_K_XL.gguf"]),
        ("hf.co/a/b:IQ4_XS", ["Model-IQ4_XS.gguf"]),
        ("hf.co/a/b:mxfp4_moe", ["Model-MXFP4_MOE.gguf"]),
        ("hf.co/a/b:BF16", SPLIT),
        ("hf.co/a/b/Model-Q8_0.gguf", ["Model-Q8_0.gguf"]),
        (f"hf.co/a/b/{SPLIT[0]}", SPLIT),
    ],
)
def test_quant_or_file_means(text, paths):
    """Case does not matter, a split model is all its parts in order, a projector is no model."""
    _, found = choose(parse_hub_name(text), FILES)
    assert list(found) == paths


@pytest.mark.parametrize(
    ("files", "path"),
    [
        (["m-Q8_0.gguf", "m-Q4_0.gguf", "m-Q2_K.gguf"], "m-Q4_0.gguf"),
        (["m-Q8_0.gguf", "m-UD-Q4_K_M.gguf"], "m-UD-Q4_K_M.gguf"),
        (["m-BF16.gguf", "m-Q8_0.gguf"], "m-Q8_0.gguf"),
        (["only.gguf", "mmproj-F16.gguf"], "only.gguf"),
    ],
)
def test_without_a_quant_the_preferred_one(files, path):
    assert choose(HubName("a/b"), files)[1] == (path,)


@pytest.mark.parametrize(("text", "files", "message"), [
    ("hf.co/a/b:Q5_K_M", FILES, r"no Q5_K_M there; name one of hf.co/a/b:BF16, :IQ4_XS"),
    ("hf.co/a/b/x.gguf", FILES, r"no such model file there; name one of hf.co/a/b:BF16"),
    ("hf.co/a/b", ["README.md"], "holds no GGUF model; look for"),
    ("hf.co/a/b", ["x-Q2_K.gguf", "x-Q3_K.gguf"], "no Q4_K_M there; name one of hf.co/a/b:Q2"),
    ("hf.co/a/b:BF16", SPLIT[:2], "has 2 of the 3 parts"),
    ("hf.co/a/b", ["x-Q4_K_M.gguf", "y-Q4_K_M.gguf"],
     r"2 models are Q4_K_M; name the file: hf.co/a/b/x-Q4_K_M.gguf or hf.co/a/b/y-Q4_K_M"),
])  # fmt: skip
def test_unclear_names_say_what_there_is(text, files, message):
    with pytest.raises(CatalogError, match=message):
        choose(parse_hub_name(text), files)


def test_quant_may_be_the_folder():
    assert quant_of("Q4_K_M/model") == "Q4_K_M"
    assert quant_of("model") == "model"
