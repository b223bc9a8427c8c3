"""What 10 % more prompts cost: recording time, new bytes, and what `dvc push` uploads, against the first run.

    python -m benchmarks.increment [--prompts 580] [--more 58] [--folder DIR] [--set generate.max_new_tokens=32]

The pipeline up to `extract` in a project of its own, on the first starter prompts and the bundled verifier; then the
next prompts are appended to the same file and it runs again. Shards are small here, so that there are as many of them
as a large project has: appended prompts disturb the last shard of each split, whatever their number. The last line of
output is one JSON object:

    time_share       seconds of recording, the engine's start left out; at most 0.12
    byte_share       bytes of shards that the first run had not; at most 0.12
    token_share      tokens of those shards
    sample_share     samples in them that the first run had not: what could not be avoided
    pushed           objects and bytes that the second `dvc push data/hidden_states` uploads
    new_shards       how many shards are new; `pushed` holds them, the index and DVC's list of the folder
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.project import ROOT, Project
from eagle3.schemas import STATES
from eagle3.tables import INDEX, Row, read_table

STAGES = ["check", "verifier", "prompts", "generate", "reconstruct-tokens", "extract"]
SOURCE = {"path": "data/prompts/mine.jsonl", "name": "mine"}
SETTINGS: dict[str, Any] = {
    "generate.max_new_tokens": 32,
    "extract.shard_min_mib": 1.0,
    "extract.shard_max_mib": 4.0,
}
MOST_SHARE = 0.12


@dataclass(frozen=True)
class State:
    """The project after a run: the index of its shards, metrics of extract, seconds of its stages, its remote."""

    index: list[Row]
    metrics: dict[str, Any]
    seconds: dict[str, float]
    remote: dict[str, int]  # bytes of each object, by path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=580)
    parser.add_argument("--more", type=int, default=58)
    parser.add_argument("--folder", type=Path, help="an existing folder to work in; else a temporary one")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings")
    given = parser.parse_args()
    yaml = YAML(typ="safe", pure=True)
    settings = SETTINGS | {
        name: yaml.load(value) for name, _, value in (each.partition("=") for each in given.settings)
    }
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        project = Project(Path(temporary) / "project")
        first = run(project, settings, given.prompts)
        second = run(project, settings, given.prompts + given.more)
    found = numbers(first, second)
    print(json.dumps(found))
    if not found["holds"]:
        raise SystemExit(1)


def run(project: Project, settings: dict[str, Any], prompts: int) -> State:
    """The pipeline on so many starter prompts, then a push of the hidden states."""
    lines = (ROOT / "data/prompts/starter.jsonl").read_text().splitlines(keepends=True)
    if len(lines) < prompts:
        raise SystemExit(f"there are only {len(lines)} starter prompts")
    path = project.folder / SOURCE["path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines[:prompts]))
    project.edit([SOURCE], settings)
    seconds = project.repro(STAGES)
    project.run("dvc", "push", "--quiet", "data/hidden_states")
    objects = remote_objects(project.folder.parent / "eagle3-dvc-remote")
    index = list(read_table(project.folder / "data/hidden_states" / INDEX, STATES))
    state = State(index, project.metrics("extract"), seconds, objects)
    print(f"{prompts} prompts: {seconds}, {len(shard_bytes(index))} shards, {len(objects)} objects", flush=True)
    return state


def numbers(first: State, second: State) -> dict[str, Any]:
    """The result."""
    known, now = shard_bytes(first.index), shard_bytes(second.index)
    new = {name: size for name, size in now.items() if name not in known}
    samples = {row["sample_id"] for row in first.index}
    redone = [row for row in second.index if row["shard"] in new]
    tokens = sum(row["length"] for row in redone)
    time_share = (tokens / second.metrics["tokens_per_second"]) / (
        first.metrics["tokens"] / first.metrics["tokens_per_second"]
    )
    byte_share = sum(new.values()) / sum(known.values())
    pushed = {path: size for path, size in second.remote.items() if path not in first.remote}
    return {
        "holds": time_share <= MOST_SHARE and byte_share <= MOST_SHARE and 0 < len(pushed) <= len(new) + 2,
        "time_share": round(time_share, 4),
        "byte_share": round(byte_share, 4),
        "token_share": round(tokens / first.metrics["tokens"], 4),
        "sample_share": round(sum(row["sample_id"] not in samples for row in redone) / len(samples), 4),
        "pushed": {"objects": len(pushed), "bytes": sum(pushed.values())},
        "new_shards": {"count": len(new), "bytes": sum(new.values())},
        "first": {"shards": len(known), "bytes": sum(known.values()), "objects": len(first.remote)},
        "stage_seconds": [first.seconds, second.seconds],
    }


def remote_objects(remote: Path) -> dict[str, int]:
    """Bytes of each file of a local DVC remote."""
    return {str(path): path.stat().st_size for path in remote.rglob("*") if path.is_file()}


def shard_bytes(index: list[Row]) -> dict[str, int]:
    """Bytes of each shard."""
    return {row["shard"]: row["shard_bytes"] for row in index}


if __name__ == "__main__":
    main()
