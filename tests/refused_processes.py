"""Processes that the system refuses to start."""

import pytest

from reference.worker_process import WorkerProcess, WorkerRefused

REFUSAL = "its process cannot be started (Too many open files)"


def refuse_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system start no process that compiles grammars."""
    refuse_processes(monkeypatch, "grammar_worker.py")


def refuse_processes(monkeypatch: pytest.MonkeyPatch, script: str) -> list[str]:
    """Let the system start no process of ``script``; returns what it was asked to start."""
    running, asked = WorkerProcess._running_child, list[str]()

    def refused(worker: WorkerProcess) -> object:
        if worker._script.name == script:
            asked.append(script)
            raise WorkerRefused(REFUSAL)
        return running(worker)

    monkeypatch.setattr(WorkerProcess, "_running_child", refused)
    return asked
