"""The digests of installed code: every file that a stage runs, and a change of one changes the stages that run it."""

import json
import shutil
from pathlib import Path

import pytest

from eagle3.library import SKELETON, code_digests, code_of_stages, digest_path
from stages.library import library
from tests.test_pipeline import ROOT, STAGES, own_modules, stage_file


def test_the_files_of_a_stage_are_those_that_it_imports() -> None:
    found = {stage: {file for file in files if file.endswith(".py")} for stage, files in code_of_stages().items()}
    assert found == {stage: {stage_file(stage)} | own_modules(stage_file(stage)) for stage in STAGES}
    others = {file for files in code_of_stages().values() for file in files if not file.endswith(".py")}
    assert others == {f"eagle3/report/page.{kind}" for kind in ("html", "css", "js")}


@pytest.mark.parametrize("name", ["dvc.yaml", "params.yaml", "data/prompts/starter.jsonl", ".dvc/config"])
def test_what_projects_start_from_is_the_checkouts_own_file(name: str) -> None:
    packed = {".dvc/config": "dvc_config"}.get(name, Path(name).name)
    assert (SKELETON / packed).resolve() == (ROOT / name).resolve()


def test_the_stage_writes_a_file_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    library(Path("data/library"))
    for stage in STAGES:
        assert list(json.loads(Path(digest_path(stage)).read_text())) == code_of_stages()[stage]
    before = {path: path.read_bytes() for path in Path("data/library").iterdir()}
    library(Path("data/library"))
    assert {path: path.read_bytes() for path in Path("data/library").iterdir()} == before


@pytest.mark.parametrize(
    ("file", "stages"),
    [
        ("eagle3/gates.py", {"extract", "evaluate"}),
        ("eagle3/acceptance.py", {"evaluate"}),
        ("eagle3/draft/ttt.py", {"train", "evaluate"}),
        ("eagle3/params.py", set(STAGES)),
        ("eagle3/cli.py", set()),
    ],
)
def test_a_changed_file_changes_the_stages_that_run_it(tmp_path: Path, file: str, stages: set[str]) -> None:
    for package in ("eagle3", "stages"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digests(tmp_path)
    with (tmp_path / file).open("a") as changed:
        changed.write("# another version\n")
    after = code_digests(tmp_path)
    assert {stage for stage in before if before[stage] != after[stage]} == stages


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not installed whole: .*stages/check\.py"):
        code_digests(tmp_path)
