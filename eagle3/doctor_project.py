"""`eagle3 doctor`: the project in the current folder, its verifier, its disks, its remote."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from eagle3.consistency import check_project, read_stages
from eagle3.estimate import estimate_run, size
from eagle3.findings import Finding
from eagle3.machine import Gpu, links_between, nearest_folder, visible_gpus
from eagle3.model_facts import ModelFacts, read_facts
from eagle3.params import Params, load_params
from eagle3.serving.engine import GIB, runs_on_cpu
from eagle3.stage import PIPELINE, check_commit
from eagle3.tracked import Tracked, open_tracked
from eagle3.verification import IDENTITY
from eagle3.verifier import (
    BUNDLED,
    bundled_folder,
    choose_aux_layers,
    is_hub_id,
    kept_identity,
    locate_verifier,
    read_identity,
)
from eagle3.workload import Asked
from eagle3.workstore import work_root

DATA = Path("data")
KEY_VARIABLE = "EAGLE3_API_KEY"
ANSWER_WITHIN_S = 5  # an endpoint or a remote
NO_OBJECT = "0" * 32  # a name that no object has: asking for it shows whether the remote answers
LITTLE_FREE = 5 * GIB


def look_at_project(params_path: Path) -> Iterator[Finding]:
    """Settings, DVC, disks, remote, verifier, KV cache, work store, files that git does not know."""
    if not params_path.exists() and not PIPELINE.exists():
        yield Finding("warning", "project", f"none here ({params_path} is not there)", "`eagle3 init DIR` starts one")
        return
    try:
        params = load_params(params_path)
        check_project(params, PIPELINE)
    except (ValueError, OSError) as error:
        yield Finding("stops", "params", str(error), f"edit {params_path}; its comments say what each key takes")
        return
    yield Finding("ok", "params", f"{params_path} is valid")
    yield from look_at_extras(params)
    try:
        check_commit()
        tracked = open_tracked()
        by_dvc = [] if tracked is None else [str(out.path) for out in tracked.outs()]
    except ValueError as error:
        yield Finding("stops", "dvc", str(error), "do what it says; `dvc doctor` and `git status` tell more")
        return
    if tracked is None:
        yield Finding(
            "stops", "dvc", "this folder lies in no DVC repository", "`dvc init`, or `eagle3 init DIR` for a new one"
        )
        return
    yield from look_at_disks(params, tracked)
    yield look_at_remote(tracked)
    yield from look_at_endpoints(params)
    yield from look_at_devices(params)
    yield from look_at_verifier(params)
    yield look_at_files(params, params_path, by_dvc)


def look_at_extras(params: Params) -> Iterator[Finding]:
    """Packages that only some settings need."""
    wanted = {"ray": params.extract.executor == "ray", "tensorboard": params.train.tensorboard}
    for name, needed in wanted.items():
        if needed and importlib.util.find_spec(name) is None:
            yield Finding(
                "stops", name, "params.yaml asks for it, and it is not installed", f"pip install 'eagle3[{name}]'"
            )


def look_at_disks(params: Params, tracked: Tracked) -> Iterator[Finding]:
    """Whether the places can be written, how files are linked between them, and whether a run fits."""
    work, cache = work_root(), tracked.cache_folder
    for name, path in {"work store": work, "data": DATA, "cache": cache}.items():
        near = nearest_folder(path)
        if not os.access(near, os.W_OK):
            remedy = "give this user access to it" + (", or set EAGLE3_WORK_DIR" if name == "work store" else "")
            yield Finding("stops", name, f"{near} is read-only", remedy)
            return
    yield look_at_links(
        "work store to data", links_between(work, DATA), "set EAGLE3_WORK_DIR to a folder on the same disk"
    )
    types = tracked.cache_types
    if types[:1] == ("hardlink",):
        remedy = "put DVC's cache on the same disk (`dvc cache dir`)"
    else:
        remedy = "let cache.type in .dvc/config begin with hardlink: `dvc config cache.type hardlink,symlink,copy`"
    ways = links_between(DATA, cache)
    yield look_at_links(
        "data to cache", ways if types[:1] == ("hardlink",) else [w for w in ways if w in types], remedy
    )
    yield look_at_room(params, work)
    held = sum(path.lstat().st_size for path in work.rglob("*") if path.is_file())
    yield Finding("ok", "work store", f"{work} holds {size(held)}; `eagle3 work du` says what, `eagle3 work gc` frees")


def look_at_links(places: str, ways: Sequence[str], remedy: str) -> Finding:
    """Hard links and reflinks keep one copy of hidden states, anything else several."""
    if {"hardlink", "reflink"} & set(ways):
        return Finding("ok", "links", f"{places}: {', '.join(ways)}")
    return Finding(
        "warning", "links", f"{places}: {', '.join(ways) or 'copies'}; hidden states take their room twice", remedy
    )


def look_at_room(params: Params, work: Path) -> Finding:
    """What a run still needs of each disk, where the tables are there to tell."""
    free = shutil.disk_usage(nearest_folder(work)).free
    try:
        shortages = estimate_run(params, Asked(None, None, None, None, None, None, {}, None)).shortages
    except ValueError:
        told = f"{size(free)} free; what a run takes is known after `dvc repro prompts`: `eagle3 estimate`"
        return _little(told) if free < LITTLE_FREE else Finding("ok", "disk", told)
    if shortages:
        what, _, remedy = shortages[0].partition(". ")
        return Finding("stops", "disk", what, remedy)
    return Finding("ok", "disk", f"{size(free)} free; a run fits (`eagle3 estimate`)")


def _little(told: str) -> Finding:
    return Finding("warning", "disk", told, "free some room, or set EAGLE3_WORK_DIR to a folder on a larger disk")


def look_at_remote(tracked: Tracked) -> Finding:
    """Whether the default remote answers. No stage needs it, so it stops no run."""
    found: list[str] = []

    def ask() -> None:
        try:
            remote = tracked.remote(None)
            remote.sizes([NO_OBJECT])
            found.append("")
        except ValueError as error:
            found.append(str(error))

    _within(ANSWER_WITHIN_S, ask)
    if found == [""]:
        return Finding("ok", "remote", "the default remote answers; `eagle3 verify --remote` says whether all is on it")
    told = found[0] if found else f"the default remote does not answer within {ANSWER_WITHIN_S} s"
    return Finding(
        "warning", "remote", told, "`dvc push` and `dvc pull` need it: see `dvc remote list` and .dvc/config"
    )


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Do it, and do not wait longer for it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def look_at_endpoints(params: Params) -> Iterator[Finding]:
    """Whether the servers of generate.endpoints answer, and serve this verifier."""
    for url in params.generate.endpoints:
        base = url.rstrip("/").removesuffix("/v1").rstrip("/")
        key = os.environ.get(KEY_VARIABLE)
        request = urllib.request.Request(f"{base}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=ANSWER_WITHIN_S
            ) as answer:
                names = [str(model["id"]) for model in json.load(answer)["data"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = f"start it, or take it out of generate.endpoints; a key belongs in {KEY_VARIABLE}"
            yield Finding("stops", "endpoint", f"{base} does not answer ({error})", remedy)
        else:
            yield Finding("ok", "endpoint", f"{base} serves {', '.join(names)}")


def look_at_devices(params: Params) -> Iterator[Finding]:
    """Whether there are as many GPUs as the engines want, with enough memory that nobody else has."""
    if runs_on_cpu():
        return
    gpus, ranks = visible_gpus(), params.engine.tensor_parallel_size
    wanted = {
        "engine.tensor_parallel_size": ranks,
        "generate.servers x engine.tensor_parallel_size": params.generate.servers * ranks,
        "train.nproc": params.train.nproc,
    }
    if params.extract.executor == "local":
        wanted["extract.workers x engine.tensor_parallel_size"] = params.extract.workers * ranks
    for setting, count in wanted.items():
        if count > len(gpus):
            yield Finding("stops", "gpus", f"{setting} = {count}, and there are {len(gpus)}", f"lower {setting}")
    share = params.engine.gpu_memory_utilization
    for gpu in gpus:
        if gpu.memory - gpu.used < share * gpu.memory:
            told = (
                f"GPU {gpu.index}: {size(gpu.used)} of {size(gpu.memory)} are taken, an engine wants {share:.0%} of it"
            )
            yield Finding(
                "stops", "gpus", told, "end what runs there (nvidia-smi), or lower engine.gpu_memory_utilization"
            )


def look_at_verifier(params: Params) -> Iterator[Finding]:
    """Whether the verifier can be loaded, is still the one of the last run, and its longest request fits the cache."""
    model = params.verifier.model
    if model in BUNDLED:
        try:
            folder = bundled_folder(model)
        except ValueError as error:
            what, _, remedy = str(error).partition("; ")
            yield Finding("stops", "verifier", what, remedy)
            return
        if not folder.is_dir():
            yield Finding("ok", "verifier", f"{model}; the first run converts it, in about 20 s")
            return
    elif is_hub_id(model) and not _is_downloaded(params):
        remedy = "see that there is room for its weights and HF_HOME points there; `dvc repro` downloads it"
        yield Finding(
            "warning", "verifier", f"{model} at {params.verifier.revision} is not on this machine yet", remedy
        )
        return
    try:
        identity = kept_identity(params.verifier, params.reasoning)
        facts = read_facts(locate_verifier(params.verifier))
    except (ValueError, OSError) as error:
        yield Finding("stops", "verifier", str(error), "see the section verifier of params.yaml")
        return
    told = f"{model}, {identity.architecture}, digest {identity.digest[:12]}"
    before = read_identity(IDENTITY).digest if IDENTITY.is_file() else identity.digest
    if before != identity.digest:
        remedy = "intended? then `dvc repro` runs everything from generate on; else bring the old model or engine back"
        yield Finding("warning", "verifier", f"{told}, is not the one of the last run ({before[:12]})", remedy)
    else:
        yield Finding("ok", "verifier", told)
    yield from look_at_memory(params, facts, visible_gpus())


def _is_downloaded(params: Params) -> bool:
    """Is a hub model in the cache of the hub's client. Asks nobody."""
    try:
        snapshot_download(params.verifier.model, revision=params.verifier.revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return False
    return True


def look_at_memory(params: Params, facts: ModelFacts, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Whether the KV cache holds the longest request while its states are recorded, and memory holds the cache."""
    dtype, context = params.verifier.dtype, params.verifier.max_model_len
    aux_layers = len(choose_aux_layers(params.verifier.aux_layer_ids, facts.num_layers))
    longest = context * facts.recorded_bytes(aux_layers, dtype)
    told = f"the longest request ({context:,} tokens) takes {size(longest)}, the states that extract records included"
    if runs_on_cpu():
        room = int(params.engine.cpu_kv_cache_gib * GIB)
        source, remedy = (
            "engine.cpu_kv_cache_gib",
            f"set it to {math.ceil(100 * longest / GIB) / 100} or more, or lower verifier.max_model_len",
        )
        whole = facts.weight_bytes + room
        memory = psutil.virtual_memory().total
        if whole > memory:
            told_whole = f"weights and KV cache take {size(whole)}, this machine has {size(memory)}"
            yield Finding("stops", "memory", told_whole, "lower engine.cpu_kv_cache_gib, or take a smaller verifier")
    else:
        ranks = params.engine.tensor_parallel_size
        one = min(gpu.memory for gpu in gpus) if gpus else 0
        room = int(ranks * one * params.engine.gpu_memory_utilization) - facts.weight_bytes
        source = "what the weights leave of the GPUs"
        remedy = "raise engine.tensor_parallel_size or engine.gpu_memory_utilization, or lower verifier.max_model_len"
    if longest > room:
        yield Finding("stops", "KV cache", f"{told}; {source} has {size(max(0, room))}", remedy)
    else:
        yield Finding("ok", "KV cache", f"{told}; {source} has {size(room)}")


def look_at_files(params: Params, params_path: Path, by_dvc: Sequence[str]) -> Finding:
    """Whether git or DVC knows every file that a stage reads: `dvc exp run --queue` and `--temp` start from those."""
    stages = read_stages(PIPELINE).values()
    outs = {
        name for stage in stages for kind in ("outs", "metrics", "plots") for name in map(_name, stage.get(kind, []))
    }
    read = {str(dep) for stage in stages for dep in stage.get("deps", [])} - outs
    read |= {str(params_path), str(PIPELINE), ".dvc/config"}
    own = [params.verifier.chat_template, params.verifier.model]
    read |= {name for name in own if name is not None and not Path(name).is_absolute() and Path(name).exists()}
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=False).stdout.split("\0")
    known = {*listed, *by_dvc, *(str(parent) for name in listed for parent in Path(name).parents)}
    unknown = sorted(name for name in read if str(Path(name)) not in known and Path(name).exists())
    if unknown:
        remedy = f"git add {' '.join(unknown)}" + " (`dvc add` for what is large), and commit"
        told = f"git does not know {', '.join(unknown)}: `dvc exp run --queue` and `--temp` run without"
        return Finding("warning", "files", told, remedy)
    return Finding("ok", "files", f"git or DVC knows all {len(read):,} files that the stages read")


def _name(out: object) -> str:
    return next(iter(out)) if isinstance(out, dict) else str(out)
