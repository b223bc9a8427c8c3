"""Where training data came from: facts of the states, and what DVC and git knew when the weights were trained.

The facts of the states follow from their index. What dvc.lock, git and the installed packages said is no function of
the stage's inputs: it is noted once for each training run, beside its checkpoints. A stage that only exports a finished
run again (after an edit elsewhere, say) therefore writes the same lineage, and nothing behind it runs again.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eagle3.digests import digest, digest_file
from eagle3.lineage import (
    FORMAT,
    GitState,
    Lineage,
    Origin,
    PromptsFacts,
    SamplesFacts,
    StageRecord,
    StatesFacts,
    VocabularyFacts,
    draft_digests,
    prompt_of,
    prompts_digest,
    public_name,
    public_settings,
    samples_digest,
)
from eagle3.params import TrainParams
from eagle3.schemas import STATES
from eagle3.shards import open_shard
from eagle3.tables import INDEX, read_columns
from eagle3.verifier import VerifierIdentity
from eagle3.workstore import write_file

LOCK, PARAMS = Path("dvc.lock"), "params.yaml"
NOTE = "origin.json"
#: Of the metrics of `train`, what stays with the draft.
TRAINING = (
    "train_samples",
    "loss_tokens",
    "epochs",
    "steps",
    "draft_vocab_size",
    "draft_vocab_coverage",
    "train_loss",
    "validation_loss",
    "expected_acceptance_length",
)
PACKAGES = ("eagle3", "safetensors", "torch", "transformers")
ENGINE = "engine"  # how vLLM runs decides nothing of the data, and may hold what is nobody else's business
WITHHELD = {"endpoints", "ray_address"}  # addresses
CONSTANT = "data/check.txt"
NAMES = ("sample_id", "sample_digest", "split", "shard", "length", "loss_tokens", "shard_bytes")


def trained_lineage(
    draft: Path,
    states: Path,
    verifier: VerifierIdentity,
    base: tuple[str | None, str | None],
    vocabulary: VocabularyFacts,
    settings: TrainParams,
    metrics: dict[str, Any],
    origin: Origin,
) -> Lineage:
    """The lineage of a draft that was just exported. base: hub id and licence of the verifier, as far as known."""
    base_model, license_name = base
    hidden_states, tokens, prompts = states_facts(states)
    return Lineage(
        format=FORMAT,
        draft=draft_digests(draft),
        vocabulary=vocabulary,
        verifier=replace(verifier, name=public_name(verifier.name)),
        base_model=base_model,
        license=license_name,
        hidden_states=hidden_states,
        tokens=tokens,
        prompts=prompts,
        train=recorded_settings(settings.model_dump()),
        training={name: metrics[name] for name in TRAINING if name in metrics},
        origin=origin,
        imported=None,
    )


def states_facts(states: Path) -> tuple[StatesFacts, SamplesFacts, PromptsFacts]:
    """What the folder data/hidden_states says of itself, of its samples and of their prompts."""
    index = states / INDEX
    table = read_columns(index, pa.schema([STATES.field(name) for name in NAMES]))
    shards = dict(zip(table["shard"].to_pylist(), table["shard_bytes"].to_pylist(), strict=True))
    told = open_shard(states / min(shards)).metadata
    samples, prompts = sample_facts(table)
    return (
        StatesFacts(digest_file(index), len(shards), sum(shards.values()), told["dtype"], told["engine"]),
        samples,
        prompts,
    )


def sample_facts(table: pa.Table) -> tuple[SamplesFacts, PromptsFacts]:
    """Of the index of the states: its samples, and their prompts."""
    ids = table["sample_id"].to_pylist()
    samples = zip(ids, table["sample_digest"].to_pylist(), table["split"].to_pylist(), strict=True)
    tokens, generated = (sum(table[name].to_pylist()) for name in ("length", "loss_tokens"))
    return (
        SamplesFacts(len(ids), tokens, generated, samples_digest(samples)),
        PromptsFacts(len({prompt_of(name) for name in ids}), prompts_digest(ids)),
    )


def origin_once(note: Path, states: Path) -> Origin:
    """The origin that the file `note` holds; else what it is now, which the file holds from then on."""
    try:
        return TypeAdapter(Origin).validate_json(note.read_bytes())
    except (OSError, ValidationError):
        found = collect_origin(states)
        write_file(note, json.dumps(asdict(found)).encode())
        return found


def collect_origin(states: Path) -> Origin:
    """What packages, git and dvc.lock say now. states: the folder, as the stage was given it."""
    packages = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    stages = read_lock(LOCK.read_text()) if LOCK.is_file() else {}
    chain = dict(_upstream(stages, Path(os.path.relpath(states)).as_posix()))
    params: dict[str, dict[str, Any]] = {}
    for name in chain:
        for section, values in stages[name].get("params", {}).get(PARAMS, {}).items():
            if section != ENGINE:
                params.setdefault(section, recorded_settings(values))
    return Origin(packages, git_state(), params, chain)


def recorded_settings(section: dict[str, Any]) -> dict[str, Any]:
    """A section of params.yaml as a lineage holds it: without addresses and without folders of this machine."""
    kept = {name: value for name, value in section.items() if name not in WITHHELD}
    found: dict[str, Any] = public_settings(kept)
    return found


def read_lock(text: str) -> dict[str, Any]:
    """The stages of a dvc.lock. Raises ValueError for one that is damaged."""
    try:
        stages = YAML(typ="safe", pure=True).load(text)["stages"]
        found: dict[str, Any] = {str(name): dict(stage) for name, stage in stages.items()}
    except (YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(f"{LOCK}: not readable ({told}); README says what to do after a merge") from None
    return found


def lock_entries(stage: dict[str, Any], kind: str) -> dict[str, str]:
    """MD5 of the deps or outs of a stage of dvc.lock, by path."""
    return {str(entry["path"]): str(entry.get("md5", "")) for entry in stage.get(kind, [])}


def _upstream(stages: dict[str, Any], path: str) -> Iterator[tuple[str, StageRecord]]:
    """The stages that a path comes from, nearest first, each with those of its outs that lead there."""
    wanted: dict[str, set[str]] = {}
    queue = [path]
    while queue:
        place = PurePosixPath(queue.pop(0))
        for name, stage in stages.items():
            leading = [out for out in lock_entries(stage, "outs") if place.is_relative_to(out)]
            if leading and name not in wanted:
                queue += _data(stage)
            if leading:
                wanted.setdefault(name, set()).update(leading)
    for name, outs in wanted.items():
        made = lock_entries(stages[name], "outs")
        code = {path: md5 for path, md5 in lock_entries(stages[name], "deps").items() if path.endswith(".py")}
        yield name, StageRecord(digest(code), _data(stages[name]), {out: made[out] for out in sorted(outs)})


def _data(stage: dict[str, Any]) -> dict[str, str]:
    """The deps of a stage that are data."""
    deps = lock_entries(stage, "deps")
    return {path: md5 for path, md5 in deps.items() if not path.endswith(".py") and path not in (CONSTANT, PARAMS)}


def git_state() -> GitState | None:
    """Commit and changed files of the repository around the current folder; None where there is none."""
    here = Path()
    head = git(here, "rev-parse", "--verify", "--quiet", "HEAD")
    if head is None:
        return None
    besides = (".", ":(exclude)data", f":(exclude){LOCK}")  # what the stages themselves write
    changed = git(here, "diff", "--name-only", "--relative", "-z", "HEAD", "--", *besides)
    return GitState(head.strip(), tuple(name for name in (changed or "").split("\0") if name))


def git(folder: Path, *words: str) -> str | None:
    """What git prints in a folder; None where there is no git, or it fails."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout if done.returncode == 0 else None
