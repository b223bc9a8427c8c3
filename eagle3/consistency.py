"""Whether params.yaml fits itself, dvc.yaml and the files that it names; params.py knows single values only."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eagle3.params import Params


def read_stages(pipeline: Path) -> dict[str, Any]:
    """The stages of dvc.yaml by name. Raises ValueError where there is none with the stages of this pipeline."""
    try:
        stages: dict[str, Any] = YAML(typ="safe", pure=True).load(pipeline.read_text())["stages"]
    except FileNotFoundError:
        raise ValueError(f"{pipeline}: no such file; run from the project's top folder") from None
    except (YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{pipeline}: no stages can be read from it ({' '.join(str(error).split())})") from None
    if absent := [name for name in ("prompts", "train") if not stages.get(name, {}).get("deps")]:
        raise ValueError(f"{pipeline}: the stage {absent[0]} is missing, or has no deps")
    return stages


def check_project(params: Params, pipeline: Path) -> None:
    """Raise ValueError when params.yaml contradicts itself, PIPELINE (dvc.yaml) or what lies beside that file."""
    declared = read_stages(pipeline)
    check_sources(params, pipeline, declared["prompts"]["deps"])
    check_warm_start(params, pipeline, declared["train"]["deps"])
    check_together(params)


def check_sources(params: Params, pipeline: Path, declared: list[str]) -> None:
    """Every prompt file exists and is a dependency of `prompts`, or DVC would not notice its changes."""
    for source in params.prompts.sources:
        if not (pipeline.parent / source.path).is_file():
            raise ValueError(
                f"prompts.sources: {source.path} (named {source.name}) is not a file here; if it is new, `git add` it: "
                "`dvc exp run --queue` and `--temp` start from what git tracks"
            )
        if source.path not in declared:
            raise ValueError(
                f"prompts.sources: {source.path} is not under deps of the stage `prompts` in {pipeline}; "
                "add it there, so that a change of the file reruns the stage"
            )


def check_warm_start(params: Params, pipeline: Path, declared: list[str]) -> None:
    """The same of the checkpoint to go on from."""
    folder = params.train.warm_start
    if folder is not None and not (pipeline.parent / folder).is_dir():
        raise ValueError(f"train.warm_start: {folder} is not a folder here")
    if folder is not None and folder not in declared:
        raise ValueError(
            f"train.warm_start: {folder} is not under deps of the stage `train` in {pipeline}; add it there"
        )


def check_together(params: Params) -> None:
    """Settings that are each valid but do not fit together."""
    if params.prompts.validation_share + params.prompts.evaluation_share >= 1:
        raise ValueError("prompts.validation_share and prompts.evaluation_share leave nothing to train on")
    if params.extract.shard_min_mib > params.extract.shard_max_mib:
        raise ValueError("extract.shard_min_mib is above extract.shard_max_mib")
    if params.prompts.min_characters > params.prompts.max_characters:
        raise ValueError("prompts.min_characters is above prompts.max_characters")
    if params.generate.reference_share > 0 and params.generate.samples_per_prompt > 1:
        raise ValueError("generate.samples_per_prompt must be 1 with generate.reference_share; a prompt has one answer")
    if params.train.nproc > params.train.gradient_accumulation:
        raise ValueError(
            "train.nproc is above train.gradient_accumulation, the batches of one optimiser step over all processes: "
            "one process would have none; raise the latter"
        )
    room = params.verifier.max_model_len - params.generate.min_room_tokens
    if room < 1:
        raise ValueError("generate.min_room_tokens leaves no room for a prompt within verifier.max_model_len")
