"""A pull that is given up while it ends."""

from harness import catalog
from harness.serve import pulls
from tests.patience import PATIENCE_SECONDS


class GivenUpAtItsEnd(pulls.Pull):
    """A pull that somebody gives up when its files are there, just before others see that."""

    def _note(self, status: str, completed: int, total: int | None) -> None:
        if status == "done":
            self.give_up()
        super()._note(status, completed, total)


def test_who_follows_a_pull_hears_of_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "find_model", lambda name: name)
    monkeypatch.setattr(catalog, "pull", lambda *arguments: None)
    pull = GivenUpAtItsEnd("a model", tmp_path)
    pull.thread.start()
    pull.thread.join(PATIENCE_SECONDS)
    assert pull.ended
    assert [state and state["status"] for state in pull.states(0.0)][-1] == "done"
