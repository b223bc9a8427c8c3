"""The architecture, as tests: dvc.yaml, params.yaml and the imports agree; layers; no second defaults."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
PIPELINE: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text())
STAGES: dict[str, dict[str, Any]] = PIPELINE["stages"]
PARAMS: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text())
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("eagle3/**/*.py") if path.stat().st_size)
SETTINGS_ONLY = {"check"}  # reads the whole of params.yaml as a file


def stage_file(stage: str) -> str:
    return f"stages/{stage.replace('-', '_')}.py"


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@cache
def imported(path: str) -> frozenset[str]:
    """Every module name that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def started(path: str) -> set[str]:
    """Every module of ours that a file starts as a child process, by its name in a string."""
    texts = [
        node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {name for text in texts for name in re.findall(r"^(eagle3\.[\w.]+)(?::\w+)?$", text)}


def own_modules(path: str, *, children: bool = True) -> set[str]:
    """Files of eagle3 that a file imports, directly or not; with `children` also what it starts as a child process."""
    found: set[str] = set()
    queue = [path]
    while queue:
        file = queue.pop()
        for name in imported(file) | (started(file) if children else set()):
            file = name.replace(".", "/") + ".py"
            if name.startswith("eagle3.") and (ROOT / file).is_file() and file not in found:
                found.add(file)
                queue.append(file)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_declared_dependencies_are_the_imported_modules(stage: str) -> None:
    declared = {dep for dep in STAGES[stage]["deps"] if dep.endswith(".py")}
    assert declared == {stage_file(stage)} | own_modules(stage_file(stage))


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in SETTINGS_ONLY])
def test_declared_params_are_the_sections_that_the_stage_reads(stage: str) -> None:
    read = {
        node.attr
        for node in ast.walk(tree(stage_file(stage)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "params"
    } | {
        node.attr  # load_params(path).section
        for node in ast.walk(tree(stage_file(stage)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "load_params"
    }
    assert set(STAGES[stage]["params"]) == read & set(PARAMS)
    assert stage.replace("-", "_") in read


@pytest.mark.parametrize("stage", STAGES)
def test_one_name_for_stage_module_function_and_command(stage: str) -> None:
    name = stage.replace("-", "_")
    assert STAGES[stage]["cmd"].startswith(f"python -m stages.{name} ")
    functions = [node.name for node in tree(stage_file(stage)).body if isinstance(node, ast.FunctionDef)]
    assert functions[0] == name
    assert stage in SETTINGS_ONLY or name in PARAMS


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_fits_on_a_page(stage: str) -> None:
    function = next(n for n in tree(stage_file(stage)).body if isinstance(n, ast.FunctionDef))
    assert (function.end_lineno or 0) - function.lineno < 60


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "check"])
def test_every_stage_waits_for_the_check(stage: str) -> None:
    assert "data/check.txt" in STAGES[stage]["deps"]


def test_every_out_is_ignored_by_a_committed_entry() -> None:
    outs = [out for stage in STAGES.values() for out in stage.get("outs", []) if isinstance(out, str)]
    for out in outs:
        # DVC's own entries in data/.gitignore vanish when a stage fails, so ours in /.gitignore must do alone.
        result = subprocess.run(
            ["git", "check-ignore", "--verbose", "--no-index", out],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.stdout.startswith(".gitignore:"), out


def test_dvc_finds_one_pipeline_here() -> None:
    """The copy of dvc.yaml that `eagle3 init` starts from is none."""
    command = ["dvc", "stage", "list", "--all", "--name-only"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert listed.split() == list(STAGES)


def test_params_hold_no_defaults_and_no_behaviour() -> None:
    for node in tree("eagle3/params.py").body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                assert not (isinstance(line, ast.AnnAssign) and line.value is not None), ast.unparse(line)
                assert not isinstance(line, ast.FunctionDef), f"{node.name}.{line.name}"


@pytest.mark.parametrize("path", MODULES)
def test_imports_point_one_way(path: str) -> None:
    names = imported(path)
    assert not any(name.split(".")[0] in {"stages", "tests", "benchmarks"} for name in names)
    if not path.startswith("eagle3/serving/"):
        assert not any(name.split(".")[0] == "vllm" for name in names)
    if path.startswith("eagle3/draft/"):
        assert not any(name.startswith("eagle3.serving") for name in names)
    if path.startswith("eagle3/serving/"):
        assert not any(name.startswith("eagle3.draft") for name in names)
    if path != "eagle3/tracked.py":
        assert not any(name.split(".")[0] in {"dvc", "dvc_data", "dvc_objects"} for name in names)
    if path in {"eagle3/params.py", "eagle3/schemas.py", "eagle3/digests.py"}:
        assert not any(name.startswith("eagle3") for name in names)


@pytest.mark.parametrize("path", MODULES)
def test_imports_stand_at_the_top(path: str) -> None:
    top = {id(node) for node in tree(path).body}
    inner = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in top]
    assert not inner, ast.unparse(inner[0])


@pytest.mark.parametrize("package", ["eagle3", "eagle3/serving", "eagle3/draft", "stages"])
def test_package_files_stay_empty(package: str) -> None:
    assert (ROOT / package / "__init__.py").read_text() == ""


def test_no_import_cycles() -> None:
    for module in MODULES:
        assert module not in own_modules(module, children=False)


def test_no_file_names_a_machine_path_or_a_package_host() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    hosts = ["py" + "pi.org", "python" + "hosted", "deb." + "debian"]
    for name in listed:
        text = (ROOT / name).read_bytes().decode(errors="replace") if (ROOT / name).is_file() else ""
        assert not any(host in text for host in hosts), name
