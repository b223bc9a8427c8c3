"""Does a lineage tell the truth? Each link of the chain against what lies on the disk, as far as it lies there.

Links are compared by content: the samples of the hidden states are looked up in the token table, these in the answers,
and the prompts of those in the prompt tables, with every digest computed again. So a table that was written anew with
the same samples in it is the same, and one that differs in a single id is not.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open

from eagle3.console import Progress, visible
from eagle3.digests import digest, digest_file, digest_tokens
from eagle3.lineage import DRAFT_FILES, Lineage, prompt_of, samples_digest, vocabulary_facts
from eagle3.origin import git, lock_entries, recorded_settings, sample_facts
from eagle3.params import Params, load_params
from eagle3.schemas import PARTS, PROMPTS, RESPONSES, STATES, TOKENS, sample_name
from eagle3.tables import INDEX, Row, read_columns, read_table
from eagle3.verification import digest_files
from eagle3.verifier import read_identity

STATES_OUT, TOKENS_OUT, RESPONSES_OUT = "data/hidden_states", "data/tokens", "data/responses"
PROMPT_TABLES = ("data/prompts/train.parquet", "data/prompts/validation.parquet")
IDENTITY = "data/verifier.json"
PROVEN, AGREES, UNKNOWN, BROKEN = "proven", "agrees", "unknown", "BROKEN"
#: Sections of params.yaml, each with the stage that reads it and the link that holds what it decided.
DECIDED = {
    "prompts": ("prompts", "prompts"),
    "generate": ("generate", "answers"),
    "reconstruct_tokens": ("reconstruct-tokens", "tokens"),
    "extract": ("extract", "hidden states"),
    "verifier": ("verifier", "verifier"),
    "reasoning": ("verifier", "tokens"),
}
SAMPLE_COLUMNS = ("sample_id", "sample_digest", "split", "input_ids", "loss_mask")
ANSWER_COLUMNS = ("prompt_id", "sample", "prompt_token_ids", "output_token_ids", "verifier_digest")
SHARD_COLUMNS = ("sample_id", "sample_digest", "split", "length", "loss_tokens", "shard", "shard_bytes", "shard_sha256")


@dataclass(frozen=True)
class Link:
    """A link of the chain. status: proven = read and computed again; agrees = dvc.lock or git names the same, not read
    here; unknown = not here; BROKEN = something else is here."""

    name: str
    status: str
    told: str


@dataclass(frozen=True)
class Place:
    """Where the draft and the data are looked for; each function gives a file, or None where it is not.

    root: of the project, or the draft's folder. data: by its path in the project; None = there is no project.
    stages: of dvc.lock.
    """

    root: Path
    draft: Callable[[str], Path | None]
    data: Callable[[str], Path | None] | None
    stages: Mapping[str, Any]
    params: Path | None


class Broken(ValueError):
    """A link does not hold. The message says what is there instead and what to do."""


class Absent(ValueError):
    """What would prove a link is not here."""


def check_links(lineage: Lineage, place: Place) -> list[Link]:
    """Every link, from the draft back to the prompts."""
    links = [
        _judge("draft", partial(_draft_files, lineage, place)),
        _judge("vocabulary", partial(_vocabulary, lineage, place)),
    ]
    if place.data is None or lineage.hidden_states is None:
        why = "this folder is in no project" if place.data is None else "the draft was imported, not trained here"
        return [*links, Link("the rest", UNKNOWN, f"{why}: it can be told, and not be checked here")]
    chain = _Chain(lineage, place.data, place.stages)
    links += [
        _judge("verifier", chain.verifier),
        _judge("hidden states", chain.states),
        _judge("tokens", chain.tokens),
        _judge("answers", chain.answers),
        _judge("prompts", chain.prompts),
    ]
    links.append(_judge("params", partial(_params, lineage, place, {link.name: link.status for link in links})))
    links.append(_judge("commit", partial(_commit, lineage, place.root)))
    return links


def _judge(name: str, check: Callable[[], tuple[str, str]]) -> Link:
    try:
        status, told = check()
    except Broken as error:
        status, told = BROKEN, str(error)
    except Absent as error:
        status, told = UNKNOWN, str(error)
    except ValueError as error:  # a file that is damaged
        status, told = BROKEN, str(error)
    return Link(name, status, told)


def _draft_files(lineage: Lineage, place: Place) -> tuple[str, str]:
    absent = []
    for name in DRAFT_FILES:
        path, sha256 = place.draft(name), lineage.draft.get(name)
        if sha256 is None:
            raise Broken(f"lineage.json has no digest of {name}, as every lineage has")
        if path is None:
            absent.append(name)
        elif digest_file(path) != sha256:
            raise Broken(
                f"{name} was changed after training: its bytes differ from lineage.json; `dvc checkout --force` brings "
                "a tracked one back, `dvc repro train` makes it again"
            )
    if absent:
        raise Absent(f"{', '.join(absent)}: not here")
    return PROVEN, ", ".join(f"{name} {lineage.draft[name][:16]}" for name in DRAFT_FILES)


def _vocabulary(lineage: Lineage, place: Place) -> tuple[str, str]:
    facts, path = lineage.vocabulary, place.draft(DRAFT_FILES[1])
    if path is None:
        raise Absent(f"{DRAFT_FILES[1]}: not here")
    try:
        with safe_open(path, framework="pt") as file:
            ids = torch.arange(file.get_slice("lm_head.weight").get_shape()[0])
            if "d2t" in file.keys():  # noqa: SIM118 - no mapping
                ids = ids + file.get_tensor("d2t").reshape(-1)
    except (SafetensorError, OSError, RuntimeError, IndexError) as error:
        raise Broken(f"{path.name} is not readable as a draft: {error}") from None
    found = vocabulary_facts(ids.tolist(), facts.verifier_size, None)
    if found.digest != facts.digest:
        raise Broken(f"d2t names {found.size:,} tokens, and not those that the draft was trained with")
    return PROVEN, f"{facts.size:,} of {facts.verifier_size:,} tokens, {facts.digest[:16]}"


class _Chain:
    """The links that lie outside the draft. Later ones need the samples that earlier ones have proven."""

    def __init__(self, lineage: Lineage, data: Callable[[str], Path | None], stages: Mapping[str, Any]):
        self.lineage, self._data, self._stages = lineage, data, stages
        self._samples: dict[str, tuple[str, str]] | None = None  # by id: digest, split

    def verifier(self) -> tuple[str, str]:
        wanted = self.lineage.verifier.digest
        path = self._data(IDENTITY)
        if path is None:
            return self._recorded("verifier", IDENTITY)
        found = read_identity(path)
        if found.digest != wanted:
            raise Broken(
                f"{IDENTITY} is of {visible(found.name)} ({found.digest[:16]}), the draft was trained for "
                f"{wanted[:16]}; `dvc repro` trains one for the verifier of params.yaml"
            )
        return PROVEN, f"{wanted[:16]}, {visible(found.engine)}"

    def states(self) -> tuple[str, str]:
        facts, tokens = self.lineage.hidden_states, self.lineage.tokens
        assert facts is not None and tokens is not None
        path = self._data(f"{STATES_OUT}/{INDEX}")
        if path is None:
            return self._recorded("extract", STATES_OUT)
        if digest_file(path) != facts.index_sha256:
            raise Broken(
                f"{STATES_OUT}/{INDEX} names other states than those that the draft was trained on "
                f"({facts.index_sha256[:16]}); `dvc repro` trains a draft on these"
            )
        table = read_columns(path, pa.schema([STATES.field(name) for name in SHARD_COLUMNS]))
        if sample_facts(table)[0] != tokens:
            raise Broken(f"the samples that {STATES_OUT}/{INDEX} names are not those of lineage.json")
        columns = (table[name].to_pylist() for name in SHARD_COLUMNS[:3])
        self._samples = {name: (sample, split) for name, sample, split in zip(*columns, strict=True)}
        size = self._shards(table)
        return PROVEN, f"{facts.shards:,} shards, {size:,} bytes read, index {facts.index_sha256[:16]}"

    def _shards(self, table: pa.Table) -> int:
        """Read every shard; its bytes in all."""
        names = SHARD_COLUMNS[5:]
        rows = table.select(names).group_by(names).aggregate([]).to_pylist()
        places = [self._inside(STATES_OUT, row["shard"]) for row in rows]
        absent = [row["shard"] for row, path in zip(rows, places, strict=True) if path is None]
        if absent:
            raise Absent(f"{len(absent):,} of {len(rows):,} shards are not here; `dvc pull {STATES_OUT}` brings them")
        with closing(digest_files([(path, "sha256") for path in places if path], "hidden states")) as digests:
            for number, found in digests:
                if found != rows[number]["shard_sha256"]:
                    raise Broken(
                        f"{STATES_OUT}/{visible(rows[number]['shard'])} differs from its digest; `eagle3 verify "
                        f"{STATES_OUT}` says what brings it back"
                    )
        return sum(row["shard_bytes"] for row in rows)

    def tokens(self) -> tuple[str, str]:
        facts = self.lineage.tokens
        assert facts is not None
        if self._data(f"{TOKENS_OUT}/{INDEX}") is None:
            return self._recorded("reconstruct-tokens", TOKENS_OUT)
        found: dict[str, tuple[str, str]] = {}
        for row in self._rows(TOKENS_OUT, pa.schema([TOKENS.field(name) for name in SAMPLE_COLUMNS])):
            if self._samples is not None and row["sample_id"] not in self._samples:
                continue
            if digest_tokens(row["input_ids"], row["loss_mask"]) != row["sample_digest"]:
                raise Broken(f"{TOKENS_OUT}: sample {visible(row['sample_id'])} differs from its own digest")
            found[row["sample_id"]] = row["sample_digest"], row["split"]
        self._compare(TOKENS_OUT, {name: value == (self._samples or found)[name] for name, value in found.items()})
        if samples_digest((name, *value) for name, value in found.items()) != facts.digest:
            if self._samples is None and len(found) > facts.samples:
                raise Absent(
                    f"{TOKENS_OUT} has more samples, and no {STATES_OUT} of this draft is here to name its own"
                )
            raise Broken(f"{TOKENS_OUT} has not the samples that the draft was trained on; `dvc repro`")
        self._samples = found
        return PROVEN, f"{facts.samples:,} samples, {facts.tokens:,} tokens, {facts.digest[:16]}"

    def answers(self) -> tuple[str, str]:
        if self._data(f"{RESPONSES_OUT}/{INDEX}") is None:
            return self._recorded("generate", RESPONSES_OUT)
        wanted = self._wanted()
        same: dict[str, bool] = {}
        rebuilt = 0
        for row in self._rows(RESPONSES_OUT, pa.schema([RESPONSES.field(name) for name in ANSWER_COLUMNS])):
            name = sample_name(row["prompt_id"], row["sample"])
            if name not in wanted:
                continue
            if row["verifier_digest"] != self.lineage.verifier.digest:
                raise Broken(f"{RESPONSES_OUT}: answer {visible(name)} is of verifier {row['verifier_digest'][:16]}")
            prompt, output = row["prompt_token_ids"], row["output_token_ids"]
            rebuilt += prompt is None or output is None
            same[name] = prompt is None or output is None or _sample_digest(prompt, output) == wanted[name][0]
        self._compare(RESPONSES_OUT, same)
        if rebuilt == len(same):
            raise Absent(f"{RESPONSES_OUT}: its answers have text alone, from which the ids of the samples were made")
        told = f"{len(same) - rebuilt:,} answers have the ids and masks of the samples"
        return PROVEN, told + (f"; {rebuilt:,} more have text alone, from which the ids were made" if rebuilt else "")

    def prompts(self) -> tuple[str, str]:
        facts = self.lineage.prompts
        assert facts is not None
        tables = [self._data(name) for name in PROMPT_TABLES]
        if None in tables:
            return self._recorded("prompts", PROMPT_TABLES[0])
        wanted = {prompt_of(name) for name in self._wanted()}
        same: dict[str, bool] = {}
        for path in tables:
            assert path is not None
            for row in read_table(path, pa.schema([PROMPTS.field(name) for name in ("prompt_id", "messages")])):
                name = prompt_of(row["prompt_id"])
                if name in wanted:
                    told = digest([[turn["role"], turn["content"]] for turn in row["messages"]])
                    same[name] = same.get(name, True) and told == name
        missing = len(wanted) - len(same)
        if missing:
            raise Broken(f"data/prompts lacks {missing:,} of the {len(wanted):,} prompts of the samples; `dvc repro`")
        self._compare("data/prompts", same)
        return PROVEN, f"{facts.prompts:,} prompts, {facts.digest[:16]}"

    def _wanted(self) -> dict[str, tuple[str, str]]:
        if self._samples is None:
            raise Absent(f"neither {STATES_OUT} nor {TOKENS_OUT} is here to name the samples; `dvc pull` brings them")
        return self._samples

    def _compare(self, place: str, same: dict[str, bool]) -> None:
        """Raises Broken when a sample is another or, where it is known which there must be, is absent."""
        wrong = sorted(name for name, equal in same.items() if not equal)
        absent = sorted((self._samples or {}).keys() - same.keys()) if place != "data/prompts" else []
        for names, what in ((wrong, "other than those that the draft was trained on"), (absent, "missing")):
            if names:
                raise Broken(f"{place}: {len(names):,} samples are {what}, first {visible(names[0][:80])}; `dvc repro`")

    def _rows(self, folder: str, schema: pa.Schema) -> Iterator[Row]:
        """Rows of a folder of parts, each checked against its index."""
        index = self._data(f"{folder}/{INDEX}")
        assert index is not None
        parts = list(read_table(index, PARTS))
        with Progress(folder, sum(part["rows"] for part in parts), "rows") as progress:
            for part in parts:
                path = self._inside(folder, part["file"])
                if path is None:
                    raise Absent(f"{folder}/{visible(part['file'])}: not here; `dvc pull {folder}` brings it")
                if digest_file(path) != part["sha256"]:
                    raise Broken(f"{folder}/{part['file']} differs from its digest; `dvc checkout --force {folder}`")
                yield from read_table(path, schema, arrays=True)
                progress.advance(part["rows"])

    def _inside(self, folder: str, name: str) -> Path | None:
        if Path(name).name != name:
            raise Broken(f"{folder}/{INDEX} names {visible(name)}, which is no file of this folder")
        return self._data(f"{folder}/{name}")

    def _recorded(self, stage: str, path: str) -> tuple[str, str]:
        """The data is not here: does dvc.lock name what the lineage names?"""
        origin = self.lineage.origin
        told = origin.stages[stage].outs.get(path) if origin and stage in origin.stages else None
        now = lock_entries(self._stages.get(stage, {}), "outs").get(path)
        if told is None or now is None:
            raise Absent(f"{path}: not here; `dvc pull {path}` brings it")
        if told != now and path == STATES_OUT:
            raise Broken(f"{path}: dvc.lock records {now[:16]}, the draft was trained on {told[:16]}; `dvc repro`")
        if told != now:
            raise Absent(
                f"{path}: dvc.lock records {now[:16]}, at training it was {told[:16]}; `dvc pull {path}` brings it "
                "here, and reading it tells whether the samples are the same"
            )
        return AGREES, f"dvc.lock records the same {path} ({now[:16]}); `dvc pull {path}` brings it here to be read"


def _sample_digest(prompt: Any, output: Any) -> str:
    ids = np.concatenate([prompt, output])
    return digest_tokens(ids, np.arange(len(ids)) >= len(prompt))


def _params(lineage: Lineage, place: Place, statuses: Mapping[str, str]) -> tuple[str, str]:
    """Settings of params.yaml. One of an earlier stage may be another, if that stage ran with it and made the same."""
    if place.params is None:
        raise Absent("params.yaml: not here")
    now, assumed = load_params(place.params), lineage.train or {}
    recorded = {**(lineage.origin.params if lineage.origin else {}), "train": assumed}
    changed: list[str] = []
    tolerated: list[str] = []
    for section, before in recorded.items():
        if section not in Params.model_fields:
            continue
        present = recorded_settings(getattr(now, section).model_dump())
        for key in sorted(before.keys() | present.keys()):
            if not _same(before.get(key), present.get(key)):
                difference = f"{section}.{key} is {_shown(present, key)}, was {_shown(before, key)}"
                stage, link = DECIDED.get(section, ("", ""))
                ran = recorded_settings(_locked(place.stages, stage, section))
                harmless = statuses.get(link) == PROVEN and key in ran and _same(ran[key], present.get(key))
                (tolerated if harmless else changed).append(difference)
    if changed:
        raise Broken(f"params.yaml: {'; '.join(changed)}; `dvc repro` makes a draft with these settings")
    told = f"sections {', '.join(sorted(recorded))} are as recorded"
    if tolerated:
        told += f", but for {'; '.join(tolerated)}, which made the same data"
    if "generate" not in recorded:
        return PROVEN, told + "; those of earlier stages were not recorded, as DVC did not run them"
    return PROVEN, told


def _locked(stages: Mapping[str, Any], stage: str, section: str) -> dict[str, Any]:
    found: dict[str, Any] = stages.get(stage, {}).get("params", {}).get("params.yaml", {}).get(section, {})
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two settings are the same, whichever of YAML's spellings DVC chose for a number."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (type(one) is not bool and str(one) == str(other))


def _shown(section: Mapping[str, Any], key: str) -> str:
    return visible(repr(section[key]), 80) if key in section else "not there"


def _commit(lineage: Lineage, root: Path) -> tuple[str, str]:
    state = lineage.origin.git if lineage.origin else None
    if state is None:
        raise Absent("none was recorded: the draft was trained outside git")
    changed = f"; uncommitted then: {visible(', '.join(state.uncommitted))}" if state.uncommitted else ""
    if not state.commit.isalnum() or git(root, "cat-file", "-e", f"{state.commit}^{{commit}}") is None:
        raise Absent(f"{visible(state.commit[:16])} is not in this repository{changed}")
    return AGREES, f"{state.commit[:16]} is in this repository{changed}"
