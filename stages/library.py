"""Stage `library` of projects that `eagle3 init` made: the code of each stage. Run: python -m stages.library FOLDER

It runs at every `dvc repro`, so that an upgrade of eagle3 is noticed. The checkout has no such stage: there the code of
each stage stands among its deps."""

import json
from pathlib import Path

from eagle3.library import code_digests
from eagle3.stage import run_stage
from eagle3.workstore import write_file


def library(folder: Path) -> None:
    """Write FOLDER/<stage>.json for every stage: the SHA-256 of each file of its code."""
    folder.mkdir(parents=True, exist_ok=True)
    for stage, files in code_digests().items():
        write_file(folder / f"{stage}.json", (json.dumps(files, indent=1) + "\n").encode())


if __name__ == "__main__":
    run_stage(library)
