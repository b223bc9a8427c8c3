"""Stage `check`: validate params.yaml before anything expensive runs. Its output never changes, so a good edit reruns
only the stages that read what was edited."""

from pathlib import Path

from eagle3.consistency import check_project
from eagle3.params import load_params
from eagle3.stage import check_commit, run_stage
from eagle3.workstore import write_file


def check(params_path: Path, pipeline: Path, passed: Path) -> None:
    """Validate PARAMS_PATH and its agreement with the PIPELINE file (dvc.yaml); write the constant file PASSED."""
    check_project(load_params(params_path), pipeline)
    check_commit()
    passed.parent.mkdir(parents=True, exist_ok=True)
    write_file(passed, b"params.yaml is valid\n")


if __name__ == "__main__":
    run_stage(check)
