"""Is one draft better than another: differences on the same prompts, with intervals, and what else differs.

Both sides answered the same prompts, so each prompt is drawn together with its other half (paired bootstrap): what is
hard about a prompt cancels out, and small differences show.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml import YAML

from eagle3.acceptance import Answer, Row, Setting, emitted_and_steps
from eagle3.evaluation import read_answers
from eagle3.intervals import Interval, ratio_interval
from eagle3.origin import LOCK, PARAMS, lock_entries, read_lock
from eagle3.revisions import Revision
from eagle3.tracked import open_tracked

EVALUATION, METRICS = Path("data/evaluation"), Path("data/metrics/evaluate.json")
ALL = "all prompts"
TABLES = ("steps.parquet", "answers.parquet")
KEPT_BY_GIT = (PARAMS, str(LOCK), str(METRICS))


@dataclass(frozen=True)
class Side:
    """One evaluation. params: flat; data: DVC's digest of each out; speed: what the metrics say of it."""

    name: str
    setting: Setting
    answers: Mapping[str, Answer]
    params: Mapping[str, Any]
    data: Mapping[str, str]
    speed: Mapping[str, float]


@dataclass(frozen=True)
class Difference:
    """Acceptance lengths of one group of prompts. difference: theirs - ours, where `ours` is the first side."""

    against: str
    group: str
    ours: float
    theirs: float
    interval: Interval | None
    prompts: int

    @property
    def difference(self) -> float:
        return self.theirs - self.ours

    @property
    def verdict(self) -> str:
        """better | worse | not distinguishable | too few prompts: of the other side, against the first one."""
        if self.interval is None:
            return "too few prompts"
        if self.interval.low > 0:
            return "better"
        return "worse" if self.interval.high < 0 else "not distinguishable"

    def row(self) -> Row:
        """As a flat row, for JSON and the page."""
        return {
            "against": self.against,
            "group": self.group,
            "ours": self.ours,
            "theirs": self.theirs,
            "difference": self.difference,
            "low": None if self.interval is None else self.interval.low,
            "high": None if self.interval is None else self.interval.high,
            "prompts": self.prompts,
            "verdict": self.verdict,
        }


def read_side(name: str, project: Path) -> Side:
    """The evaluation of a project's folder, or in a folder that is an evaluation itself.

    Raises ValueError where there is none.
    """
    folder = project / EVALUATION if (project / EVALUATION).is_dir() else project
    setting, answers = read_answers(folder)
    lock = project / LOCK
    stages = read_lock(lock.read_text()) if lock.is_file() else {}
    data = {path: md5 for stage in stages.values() for path, md5 in lock_entries(stage, "outs").items() if md5}
    metrics = project / METRICS
    told = json.loads(metrics.read_text()) if metrics.is_file() else {}
    speed = {key: told[key] for key in ("speedup", "speedup_median") if key in told}
    params = dict(_flat(_yaml(project / PARAMS)))
    return Side(name, setting, {answer.prompt.prompt_id: answer for answer in answers}, params, data, speed)


def find_side(name: str) -> Side:
    """The evaluation that a user means: a folder (a project or an evaluation), a Git revision, or a DVC experiment.

    Raises ValueError where there is none.
    """
    if Path(name).is_dir():
        return read_side(name, Path(name))
    with TemporaryDirectory(prefix="eagle3-compare-") as folder:
        try:
            _copy_revision(name, Path(folder))
        except ValueError as error:
            raise ValueError(f"{error}; {name} is neither a folder nor a revision that was evaluated") from None
        return read_side(name, Path(folder))


def _copy_revision(name: str, folder: Path) -> None:
    """What `read_side` reads, as it was in a revision. Raises ValueError for an unknown one, or one not evaluated."""
    tracked = open_tracked()
    if tracked is None:
        raise ValueError("this folder lies in no DVC repository of revisions")
    revision = Revision(tracked, name)
    texts = {path: revision.text(path) for path in KEPT_BY_GIT}
    data = {path: text.encode() for path, text in texts.items() if text is not None}
    data |= {f"{EVALUATION}/{table}": revision.read(f"{EVALUATION}/{table}") for table in TABLES}
    for path, content in data.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def compare(sides: Sequence[Side]) -> list[Difference]:
    """Every side against the first: over all prompts that both answered, and by category.

    Raises ValueError when two sides share no prompt or were asked otherwise.
    """
    first, *others = sides
    found = []
    for other in others:
        shared = [name for name in first.answers if name in other.answers]
        if not shared:
            raise ValueError(
                f"{first.name} and {other.name} share no prompt; evaluate both on the same ones (prompts.* and "
                "evaluate.num_prompts), e.g. with a source of `split: evaluation`"
            )
        differing = [n for n in shared if first.answers[n].prompt.ids != other.answers[n].prompt.ids]
        if differing:
            raise ValueError(
                f"{first.name} and {other.name} asked the same prompts with other tokens (first: {differing[0][:12]}): "
                "their verifiers or chat templates differ, so their acceptance cannot be compared"
            )
        groups: dict[str, list[str]] = defaultdict(list)
        for name in shared:
            groups[ALL].append(name)
            groups[first.answers[name].prompt.category].append(name)
        listed = [ALL, *sorted(group for group in groups if group != ALL)]
        found += [_difference(first, other, group, groups[group]) for group in listed]
    return found


def _difference(first: Side, other: Side, group: str, names: Sequence[str]) -> Difference:
    (ours, our_steps), (theirs, their_steps) = (
        emitted_and_steps([side.answers[name] for name in names]) for side in (first, other)
    )
    interval = ratio_interval(theirs, their_steps, (ours, our_steps))
    before, after = (float(a.sum() / max(b.sum(), 1)) for a, b in ((ours, our_steps), (theirs, their_steps)))
    return Difference(other.name, group, before, after, interval, len(names))


def settings_that_differ(sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Params whose values are not the same on all sides; null where a side has none."""
    keys = dict.fromkeys(key for side in sides for key in side.params)
    values = {key: [side.params.get(key) for side in sides] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def data_that_differ(sides: Sequence[Side]) -> dict[str, list[str | None]]:
    """Outs whose contents are not the same on all sides, with the beginning of DVC's digests."""
    paths = dict.fromkeys(path for side in sides for path in side.data)
    digests = {path: [side.data.get(path) for side in sides] for path in paths}
    return {
        path: [None if value is None else value[:12] for value in found]
        for path, found in digests.items()
        if any(value != found[0] for value in found)
    }


def as_lines(sides: Sequence[Side], differences: Iterable[Difference]) -> Iterator[str]:
    """The comparison for a terminal."""
    first = sides[0]
    for other in sides[1:]:
        yield f"{other.name} against {first.name}, acceptance length on the same prompts"
        if other.setting != first.setting:
            told = (f"{side.setting.num_speculative_tokens} tokens, batch {side.setting.batch_size}" for side in sides)
            yield f"  note: decoded differently ({' and '.join(told)}); lengths grow with the tokens drafted"
        yield f"  {'':24} {first.name[:12]:>12} {other.name[:12]:>12} {'difference':>11}  {'95 % interval':17} prompts"
        for found in (found for found in differences if found.against == other.name):
            interval = found.interval
            ends = "" if interval is None else f"{interval.low:+.3f} to {interval.high:+.3f}"
            yield (
                f"  {found.group[:24]:24} {found.ours:12.3f} {found.theirs:12.3f} {found.difference:+11.3f}  {ends:17} "
                f"{found.prompts:7}  {found.verdict}"
            )
        if "speedup" in first.speed and "speedup" in other.speed:
            yield f"  {'speed-up':24} {first.speed['speedup']:11.2f}x {other.speed['speedup']:11.2f}x"
        yield ""
    for title, differing in (("params", settings_that_differ(sides)), ("data", data_that_differ(sides))):
        if differing:
            yield f"{title} that differ ({', '.join(side.name for side in sides)}):"
            yield from (f"  {key}: {' | '.join(map(str, values))}" for key, values in differing.items())


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = YAML(typ="safe", pure=True).load(path.read_text())
    return found if isinstance(found, dict) else {}
