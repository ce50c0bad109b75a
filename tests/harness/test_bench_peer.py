"""The peer of the benchmark computes on a graphics card with the whole model, or not at all."""

import sys
from types import SimpleNamespace

import pytest

from contract.errors import ConfigError
from harness.bench.__main__ import main
from harness.bench.engines import PeerEngine, Setup


class ForeignPeer:
    """Stands for the peer's module: keeps what a model is opened with."""

    def __init__(self, has_gpu: bool) -> None:
        self.opened: list[dict] = []
        self.llama_supports_gpu_offload = lambda: has_gpu
        self.llama_batch_init = lambda *sizes: None

    def Llama(self, path: str, **options):
        self.opened.append(options)
        return SimpleNamespace(n_vocab=lambda: 32, ctx=object())


@pytest.mark.parametrize("gpu", [False, True])
def test_the_peer_has_the_whole_model_on_a_graphics_card_or_nothing(monkeypatch, gpu):
    """A build for graphics cards would also take a prompt's products there by itself."""
    module = ForeignPeer(has_gpu=True)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr("harness.bench.engines.check_peer", lambda: None)
    PeerEngine(Setup("m.gguf", 1, 64, "f16", peer_gpu=gpu))
    (options,) = module.opened
    assert options["n_gpu_layers"] == (-1 if gpu else 0)
    assert options["op_offload"] is options["offload_kqv"] is gpu


def test_a_peer_without_a_graphics_card_is_refused_with_its_remedy(monkeypatch):
    module = ForeignPeer(has_gpu=False)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr("harness.bench.engines.check_peer", lambda: None)
    with pytest.raises(ConfigError, match=r"--peer-gpu: .* CMAKE_ARGS=-DGGML_CUDA=on pip install"):
        PeerEngine(Setup("m.gguf", 1, 64, "f16", peer_gpu=True))
    assert not module.opened


def test_a_graphics_card_of_no_peer_is_refused(capsys):
    assert main(["--peer-gpu"]) == 2
    assert "error: --peer-gpu: which peer? Add --peer llama.cpp" in capsys.readouterr().err
