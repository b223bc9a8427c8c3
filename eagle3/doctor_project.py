"""`eagle3 doctor`: the project in the current folder, its disks, its remote, its files."""

import importlib.util
import json
import os
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from eagle3.consistency import check_project, read_stages
from eagle3.console import visible
from eagle3.doctor_verifier import look_at_verifier
from eagle3.estimate import estimate_run, size
from eagle3.findings import Finding
from eagle3.library import SKELETON
from eagle3.machine import links_between, nearest_folder
from eagle3.params import Params, load_params
from eagle3.serving.endpoints import API_KEY_VARIABLE, endpoint_url
from eagle3.serving.engine import GIB
from eagle3.stage import PIPELINE, check_commit
from eagle3.tracked import Tracked, open_tracked
from eagle3.workload import Asked
from eagle3.workstore import work_root

DATA = Path("data")
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
    yield look_at_pipeline()
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


def look_at_pipeline() -> Finding:
    """Whether dvc.yaml runs the stages as the installed eagle3 does: that of an older project may not."""
    ours, here = read_stages(SKELETON / PIPELINE.name), read_stages(PIPELINE)
    other = [name for name, stage in ours.items() if here.get(name, {}).get("cmd") != stage["cmd"]]
    if not other:
        return Finding("ok", "pipeline", f"{PIPELINE} runs the stages as eagle3 {version('eagle3')} does")
    told = f"{PIPELINE} runs {', '.join(other)} otherwise than eagle3 {version('eagle3')} does"
    return Finding("warning", "pipeline", told, "unless that is meant, take the dvc.yaml of a new `eagle3 init`")


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
    """Whether the servers of generate.endpoints answer, and what they serve."""
    for url in params.generate.endpoints:
        try:
            names = _models_of(endpoint_url(url))
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = f"start it, or take it out of generate.endpoints; a key belongs in {API_KEY_VARIABLE}"
            yield Finding("stops", "endpoint", f"{url} does not answer ({error})", remedy)
        else:
            yield Finding("ok", "endpoint", f"{url} serves {', '.join(names)}")


def _models_of(url: str) -> list[str]:
    """Names of the models that a server has, asked without a proxy. url: ends in /v1."""
    key = os.environ.get(API_KEY_VARIABLE)
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_WITHIN_S) as answer:
        return [visible(str(model["id"])) for model in json.load(answer)["data"]]


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
