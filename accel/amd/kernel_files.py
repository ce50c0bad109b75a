"""Names and folders of the kernels that are compiled ahead of time."""

from __future__ import annotations

from pathlib import Path

from accel.amd.generation import GFX12, Generation
from accel.kernels.source import Module

FOLDER = Path(__file__).with_name("modules")


def file_name(module: Module, native: bool) -> str:
    """The file name of a module, without its ending."""
    return str(module) if native else f"{module}.integer"


def folder_of(gpu: Generation) -> Path:
    """The folder with the kernels of a GPU."""
    return FOLDER if gpu is GFX12 else FOLDER.with_name(f"{FOLDER.name}_{gpu.cpu}")
