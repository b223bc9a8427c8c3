"""What the machine has: links are tried, GPUs are what nvidia-smi says."""

import os
from pathlib import Path

import pytest

from eagle3.machine import links_between, nearest_folder, processor_flags, visible_gpus

LISTED = "0, NVIDIA H200, 143771, 0\n1, NVIDIA H200, 143771, 70000\n"


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    """A program of this name that prints what the real one prints."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{listed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_read_with_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, LISTED)
    gpus = visible_gpus()
    assert [(gpu.index, gpu.name, gpu.memory >> 20, gpu.used >> 20) for gpu in gpus] == [
        ("0", "NVIDIA H200", 143771, 0),
        ("1", "NVIDIA H200", 143771, 70000),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in visible_gpus()] == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_driver_that_does_not_answer_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA-SMI has failed because it could not communicate with the driver.")
    assert visible_gpus() == []


def test_links_are_tried_and_nothing_is_left(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b" / "c"
    here.mkdir()
    assert {"hardlink", "symlink"} <= set(links_between(here, there))  # the second is not there yet
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a"]


def test_no_hard_link_leads_to_another_filesystem(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    assert other.stat().st_dev != tmp_path.stat().st_dev
    assert links_between(tmp_path, other) == ["symlink"]


def test_the_nearest_folder_is_one_that_exists(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path


def test_the_processor_names_what_it_can() -> None:
    assert processor_flags()
