"""What a draft was made of, in lineage.json beside it: the chain of digests from its weights back to the prompts.

    draft files, vocabulary, settings of train <- hidden states <- samples (token ids, masks) <- prompts, verifier

Digests of samples and prompts are those of their contents, whatever files hold them; so is the verifier's. What git and
DVC knew when the weights were trained is in `origin` (see origin.py). The file travels with the draft: it holds no path
of a machine, no address and no key.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from eagle3.console import visible
from eagle3.digests import digest, digest_file
from eagle3.verifier import VerifierIdentity
from eagle3.workstore import write_file

DRAFT = Path("data/draft")
LINEAGE = "lineage.json"
FORMAT = 1
MAX_BYTES = 1 << 24
DRAFT_FILES = ("config.json", "model.safetensors")
#: Settings whose value is a place on a machine, by section; of these only the last part of an absolute path is told.
PATHS = {"model", "chat_template", "warm_start", "path"}


@dataclass(frozen=True)
class VocabularyFacts:
    """The draft vocabulary. digest: of its verifier ids; coverage: of the generated tokens, None where nobody knows."""

    size: int
    verifier_size: int
    coverage: float | None
    digest: str


@dataclass(frozen=True)
class StatesFacts:
    """data/hidden_states: index_sha256 names every shard by its SHA-256 and every sample by its digest."""

    index_sha256: str
    shards: int
    bytes: int
    dtype: str
    engine: str


@dataclass(frozen=True)
class SamplesFacts:
    """The samples of the states. digest: of `samples_digest`; loss_tokens: those that were generated."""

    samples: int
    tokens: int
    loss_tokens: int
    digest: str


@dataclass(frozen=True)
class PromptsFacts:
    """The prompts of the samples. digest: of `prompts_digest`."""

    prompts: int
    digest: str


@dataclass(frozen=True)
class GitState:
    """Where the tree stood. uncommitted: tracked files outside data/ that differed from the commit."""

    commit: str
    uncommitted: tuple[str, ...]


@dataclass(frozen=True)
class StageRecord:
    """A stage as dvc.lock had it. deps and outs: MD5 by path, of data; code: digest of the MD5s of its Python files."""

    code: str
    deps: dict[str, str]
    outs: dict[str, str]


@dataclass(frozen=True)
class Origin:
    """What was around when the weights were trained. params: sections of params.yaml, as DVC recorded them with the
    stages that made the data; stages: from the states back to the prompt files. Both empty outside DVC."""

    packages: dict[str, str]
    git: GitState | None
    params: dict[str, dict[str, Any]]
    stages: dict[str, StageRecord]


@dataclass(frozen=True)
class Imported:
    """A checkpoint that somebody else trained. files: SHA-256 by name, as they were imported."""

    form: str
    files: dict[str, str]


@dataclass(frozen=True)
class Lineage:
    """lineage.json. draft: SHA-256 of the draft's files by name. verifier: of an imported draft, the one that it was
    imported for. base_model: hub id of the verifier, if it has one. The rest is None in an imported draft."""

    format: int
    draft: dict[str, str]
    vocabulary: VocabularyFacts
    verifier: VerifierIdentity
    base_model: str | None
    license: str | None
    hidden_states: StatesFacts | None
    tokens: SamplesFacts | None
    prompts: PromptsFacts | None
    train: dict[str, Any] | None
    training: dict[str, int | float] | None
    origin: Origin | None
    imported: Imported | None


def read_lineage(draft: Path) -> Lineage:
    """The lineage in a draft's directory. Raises ValueError that names the file and what is wrong with it."""
    path = draft / LINEAGE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path}: {path.stat().st_size:,} bytes; a lineage has at most {MAX_BYTES:,}")
        text = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a draft that this pipeline trained or imported has one") from None
    return parse_lineage(text, str(path))


def parse_lineage(text: bytes, name: str) -> Lineage:
    """The lineage in the bytes of a file of this name. Raises ValueError as `read_lineage`."""
    try:
        found = TypeAdapter(Lineage).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = visible(".".join(map(str, first["loc"])))
        raise ValueError(
            f"{name}: not a draft's lineage of format {FORMAT} ({place}: {visible(first['msg'])}); "
            "`dvc repro --force --single-item train` makes one, of finished work"
        ) from None
    if found.format != FORMAT:
        raise ValueError(f"{name}: a lineage of format {found.format}; this version reads format {FORMAT}")
    trained = (found.hidden_states, found.tokens, found.prompts, found.train, found.training, found.origin)
    if found.imported is None and None in trained:
        raise ValueError(f"{name}: the lineage of a draft that was neither trained nor imported; it is damaged")
    if found.imported is not None and any(part is not None for part in trained):
        raise ValueError(f"{name}: the lineage of a draft that was both trained and imported; it is damaged")
    return found


def write_lineage(draft: Path, lineage: Lineage) -> None:
    """Write lineage.json into the draft's directory, aside and renamed."""
    write_file(draft / LINEAGE, (json.dumps(asdict(lineage), indent=2) + "\n").encode())


def draft_digests(draft: Path) -> dict[str, str]:
    """SHA-256 of the files that are the draft, by name."""
    return {name: digest_file(draft / name) for name in DRAFT_FILES}


def vocabulary_facts(token_ids: Sequence[int], verifier_size: int, coverage: float | None) -> VocabularyFacts:
    """What a lineage says of a draft vocabulary."""
    return VocabularyFacts(len(token_ids), verifier_size, coverage, digest([int(token) for token in token_ids]))


def samples_digest(samples: Iterable[tuple[str, str, str]]) -> str:
    """Digest of a set of samples, in any order: (sample_id, sample_digest, split) of each."""
    return digest(sorted(map(list, samples)))


def prompt_of(sample_id: str) -> str:
    """SHA-256 of the prompt's messages: what a sample id begins with."""
    return sample_id[:64]


def prompts_digest(sample_ids: Iterable[str]) -> str:
    """Digest of the set of prompts that these samples answer."""
    return digest(sorted({prompt_of(name) for name in sample_ids}))


def public_name(place: str) -> str:
    """A model's or a file's name without the folders that it lies in on this machine; hub ids stay whole."""
    path = PurePath(place)
    return path.name if path.is_absolute() or place.startswith("~") or ".." in path.parts else place


def public_settings(value: Any, key: str = "") -> Any:
    """Settings with places of this machine made public, at any depth."""
    if isinstance(value, dict):
        return {name: public_settings(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [public_settings(inner, key) for inner in value]
    return public_name(value) if isinstance(value, str) and key in PATHS else value


def check_draft(draft: Path, identity: VerifierIdentity) -> None:
    """Raises ValueError when the draft in this directory is damaged or belongs to another verifier."""
    try:
        lineage = json.loads((draft / LINEAGE).read_text())
        trained_for, weights = lineage["verifier"]["digest"], lineage["draft"]["model.safetensors"]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{draft / LINEAGE}: not a draft's lineage ({error!r}); `dvc repro train` makes it, `eagle3 import` for a "
            "checkpoint from elsewhere"
        ) from None
    if trained_for != identity.digest:
        raise ValueError(
            f"{draft} was trained for verifier {visible(str(trained_for)[:12])}, not for {identity.digest[:12]}"
        )
    if digest_file(draft / "model.safetensors") != weights:
        raise ValueError(f"{draft / 'model.safetensors'} differs from its lineage; `dvc checkout --force` restores it")
