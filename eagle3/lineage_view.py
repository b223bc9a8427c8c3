"""`eagle3 lineage`: where a draft comes from, as text or JSON, checked against this machine or a remote if asked to.

A draft is named by its directory, by its project's directory, or by a git revision or experiment of this project.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.console import visible
from eagle3.lineage import DRAFT, LINEAGE, Lineage, parse_lineage, read_lineage
from eagle3.lineage_check import AGREES, BROKEN, Link, Place, check_links
from eagle3.origin import LOCK, PARAMS, lock_entries, read_lock
from eagle3.remote_check import verify_outs
from eagle3.revisions import OBJECT, Revision
from eagle3.tracked import Out, open_tracked

WIDTH = 16


@dataclass(frozen=True)
class Found:
    """A draft that was asked for. title: what it is called."""

    title: str
    lineage: Lineage
    place: Place
    made: Out | None  # the out that it is, where DVC tracks it


@contextmanager
def find_draft(asked: str) -> Iterator[Found]:
    """The draft in a directory, of a project's directory, or of a revision. Raises ValueError when there is none."""
    path = Path(asked)
    if path.exists():
        yield _on_disk(path)
        return
    tracked = open_tracked()
    if tracked is None:
        raise ValueError(f"{visible(asked)}: no such directory, and this folder lies in no DVC repository of revisions")
    revision = Revision(tracked, asked)
    with tempfile.TemporaryDirectory() as aside:
        params = Path(aside) / PARAMS
        text = revision.text(PARAMS)
        if text is not None:
            params.write_text(text)
        lineage = parse_lineage(revision.read(f"{DRAFT}/{LINEAGE}"), f"{DRAFT}/{LINEAGE} of {asked}")
        place = Place(
            root=Path(),
            draft=lambda name: revision.file(f"{DRAFT}/{name}"),
            data=revision.file,
            stages=revision.stages,
            params=params if text is not None else None,
        )
        yield Found(f"{asked} ({revision.commit[:12]})", lineage, place, revision.out(str(DRAFT)))


def _on_disk(path: Path) -> Found:
    """A project is known by its params.yaml, and a draft in data/draft of one belongs to it."""
    draft = path / DRAFT if (path / PARAMS).is_file() or (path / DRAFT).is_dir() else path
    root = Path(os.path.relpath(draft.absolute().parent.parent))
    inside = draft.absolute().parts[-2:] == DRAFT.parts and (root / PARAMS).is_file()
    lock = root / LOCK
    stages = read_lock(lock.read_text()) if inside and lock.is_file() else {}

    def there(place: Path) -> Path | None:
        return place if place.is_file() else None

    place = Place(
        root=root if inside else draft,
        draft=lambda name: there(draft / name),
        data=(lambda name: there(root / name)) if inside else None,
        stages=stages,
        params=there(root / PARAMS) if inside else None,
    )
    md5 = lock_entries(stages.get("train", {}), "outs").get(str(DRAFT), "")
    made = Out(DRAFT, "train", md5, None, None, True) if OBJECT.fullmatch(md5) else None
    return Found(str(draft), read_lineage(draft), place, made)


def ask_lineage(asked: str, check: bool, remote: bool, as_data: bool) -> tuple[str, bool]:
    """What `eagle3 lineage` prints, and whether every link that could be checked holds."""
    with find_draft(asked) as found:
        links = check_links(found.lineage, found.place) if check else []
        links += _on_remote(found) if remote else []
    if as_data:
        told: dict[str, Any] = {"draft": found.title, "lineage": asdict(found.lineage)}
        if check or remote:
            told["links"] = [asdict(link) for link in links]
        text = json.dumps(told, indent=2)
    else:
        text = "\n".join([visible(found.title, 500), *as_lines(found.lineage), *_verdict(links)])
    return text, not any(link.status == BROKEN for link in links)


def _on_remote(found: Found) -> list[Link]:
    """Are the objects that the lineage names on the remote, and the draft itself? Downloads nothing but listings."""
    tracked = open_tracked()
    if tracked is None:
        raise ValueError("--remote: this folder lies in no DVC repository, so no remote is known")
    stages = found.lineage.origin.stages if found.lineage.origin else {}
    outs = [
        Out(Path(path), stage, md5, None, None, True)
        for stage, record in stages.items()
        for path, md5 in record.outs.items()
        if OBJECT.fullmatch(md5)
    ]
    outs += [found.made] if found.made is not None else []
    if not outs:
        raise ValueError("--remote: the lineage names no objects: DVC did not run the stages before `train`")
    links = []
    for findings in verify_outs(tracked, outs, None, repair=False, read=False):
        place = f"remote {findings.remote}"
        links += [Link(place, BROKEN, str(fault)) for fault in findings.faults]
        if not findings.faults:
            links.append(Link(place, AGREES, f"all {findings.objects:,} objects are there, of {len(outs):,} outs"))
    return links


def as_lines(lineage: Lineage) -> list[str]:
    """The chain for a person to read; digests by their beginnings. Foreign text is escaped."""
    vocabulary, verifier = lineage.vocabulary, lineage.verifier
    rows = [("draft", f"{name} {_short(sha256)}") for name, sha256 in lineage.draft.items()]
    rows.append(
        ("vocabulary", f"{vocabulary.size:,} of {vocabulary.verifier_size:,} tokens, {_short(vocabulary.digest)}")
    )
    if lineage.imported is not None:
        form = lineage.imported.form
        rows += [("imported", f"{form}: {name} {_short(sha256)}") for name, sha256 in lineage.imported.files.items()]
    if lineage.train is not None:
        rows.append(("train", _settings(lineage.train)))
    if lineage.hidden_states is not None:
        states = lineage.hidden_states
        told = f"{states.shards:,} shards, {states.bytes:,} bytes, {states.dtype}, by {states.engine}"
        rows.append(("hidden states", f"{told}, index {_short(states.index_sha256)}"))
    if lineage.tokens is not None:
        tokens = lineage.tokens
        told = f"{tokens.samples:,} samples, {tokens.tokens:,} tokens, {tokens.loss_tokens:,} generated"
        rows.append(("tokens", f"{told}, {_short(tokens.digest)}"))
    params = lineage.origin.params if lineage.origin else {}
    if "generate" in params:
        rows.append(("answers", _settings(params["generate"])))
    layers = ", ".join(map(str, verifier.aux_layer_ids))
    rows.append(("verifier", f"{verifier.name}, {verifier.dtype}, layers {layers}, {_short(verifier.digest)}"))
    rows.append(("engine", verifier.engine))
    if lineage.prompts is not None:
        rows.append(("prompts", f"{lineage.prompts.prompts:,} prompts, {_short(lineage.prompts.digest)}"))
    if lineage.origin is not None:
        rows += _origin(lineage)
    return [f"  {visible(name, 40):<{WIDTH}}{visible(text, 2000)}" for name, text in rows]


def _origin(lineage: Lineage) -> list[tuple[str, str]]:
    origin = lineage.origin
    assert origin is not None
    rows = []
    for record in origin.stages.values():
        made = {path for other in origin.stages.values() for path in other.outs}
        files = {path: md5 for path, md5 in record.deps.items() if path not in made}
        rows += [("prompt file", f"{path} md5 {_short(md5)}") for path, md5 in files.items()]
    rows.append(("packages", ", ".join(f"{name} {version}" for name, version in origin.packages.items())))
    if origin.git is not None:
        changed = ", ".join(origin.git.uncommitted)
        rows.append(("commit", origin.git.commit + (f", uncommitted: {changed}" if changed else "")))
    return rows


def _settings(section: dict[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in section.items() if value not in (None, {}, []))


def _short(value: str) -> str:
    return value[:16]


def _verdict(links: Sequence[Link]) -> list[str]:
    if not links:
        return []
    broken = sum(link.status == BROKEN for link in links)
    counts = ", ".join(
        f"{number} {status}"
        for status in dict.fromkeys(link.status for link in links)
        if (number := sum(link.status == status for link in links))
    )
    lines = [f"  {link.status:<9}{link.name:<{WIDTH}}{visible(link.told, 2000)}" for link in links]
    told = f"{broken} broken: this is not what the draft was made of" if broken else "what could be checked holds"
    return ["", *lines, f"lineage: {counts}; {told}"]
