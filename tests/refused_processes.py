"""Processes that the system refuses to start."""

import pytest

from reference.worker_process import WorkerProcess, WorkerRefused

REFUSAL = "its process cannot be started (Too many open files)"


def refuse_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system start no process that compiles grammars."""
    running = WorkerProcess._running_child

    def refused(worker: WorkerProcess) -> object:
        if worker._script.name == "grammar_worker.py":
            raise WorkerRefused(REFUSAL)
        return running(worker)

    monkeypatch.setattr(WorkerProcess, "_running_child", refused)
