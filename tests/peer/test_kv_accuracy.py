"""The table of what storing keys and values costs, of one model and a short prompt."""

from itertools import pairwise

import pytest

from tests.peer.kv_accuracy import accuracies, synthetic

pytestmark = pytest.mark.peer


def test_fewer_bits_cost_more(tmp_path):
    """I4R costs less than llama.cpp's q4_0, and I3R, a sixth smaller than that, a few times as
    much."""
    (found,) = accuracies([synthetic(tmp_path, "qwen3")], [64])
    by_bits = [found.ours[kv] for kv in ("i12", "q8_0", "i4r", "i3r")]
    assert all(less < more for less, more in pairwise(by_bits))
    assert found.ours["i4r"] < found.theirs["q4_0"]
    assert found.ours["i3r"] < 6 * found.theirs["q4_0"]
    assert found.theirs["q8_0"] < found.theirs["q4_0"]
