"""Drafts on their way out and in: exported with their lineage and a full model card, imported from either format."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from eagle3.card import CARD, base_of, model_card, usual_tokens
from eagle3.digests import digest_file
from eagle3.draft.export import CONFIG, WEIGHTS
from eagle3.draft.interchange import speculators_config, write_ours
from eagle3.draft.vocab import DraftVocabulary
from eagle3.draft.warm_start import Checkpoint, read_checkpoint
from eagle3.lineage import (
    DRAFT,
    FORMAT,
    LINEAGE,
    Imported,
    Lineage,
    draft_digests,
    public_name,
    read_lineage,
    vocabulary_facts,
    write_lineage,
)
from eagle3.origin import LOCK, lock_entries, read_lock
from eagle3.params import VerifierParams, load_params
from eagle3.verifier import VerifierIdentity, locate_verifier, read_identity
from eagle3.verifier_head import load_head
from eagle3.workstore import write_file, write_in_pieces

Form = Literal["plain", "speculators"]
EVALUATION = Path("data/metrics/evaluate.json")


def evaluation_of(draft: Path) -> dict[str, Any] | None:
    """The metrics of `evaluate` for the draft of this project, if dvc.lock says that they are of the draft it has."""
    if not LOCK.is_file() or not EVALUATION.is_file() or draft.absolute() != DRAFT.absolute():
        return None
    stages = read_lock(LOCK.read_text())
    read = lock_entries(stages.get("evaluate", {}), "deps").get(str(DRAFT))
    if read is None or read != lock_entries(stages.get("train", {}), "outs").get(str(DRAFT)):
        return None
    found: dict[str, Any] = json.loads(EVALUATION.read_text())
    return found


def full_card(draft: Path, num_speculative_tokens: int) -> str:
    """The model card of a draft, with its evaluation where that is known."""
    return model_card(read_lineage(draft), evaluation_of(draft), num_speculative_tokens)


def export_shared(draft: Path, out: Path, form: Form, num_speculative_tokens: int) -> None:
    """Write a draft, its lineage and its card into the new folder `out`.

    Raises ValueError when the draft is not what its lineage says, or does not exist in this form.
    """
    lineage = read_lineage(draft)
    _check_files(draft, lineage)
    config = json.loads((draft / CONFIG).read_text())
    if form == "speculators":
        place = lineage.base_model or lineage.verifier.name
        config = speculators_config(config, lineage.verifier, place, num_speculative_tokens)
    card = full_card(draft, num_speculative_tokens)
    with _fresh(out, draft) as folder:
        write_in_pieces(draft / WEIGHTS, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_lineage(folder, replace(lineage, draft=draft_digests(folder)))
        write_file(folder / CARD, card.encode())


def import_checkpoint(source: Path, out: Path, params_path: Path, identity_path: Path) -> Lineage:
    """Write a checkpoint of either format into the new folder `out`, as `train` would export it.

    One with a lineage of ours keeps it. Another is taken for a draft of the verifier in params.yaml and verifier.json:
    nothing in it says what it was trained for, but its sizes must fit. Raises ValueError that names what does not.
    """
    checkpoint = read_checkpoint(source, "import")
    ours = read_lineage(source) if (source / LINEAGE).is_file() else None
    if ours is not None:
        _check_files(source, ours)
    identity = ours.verifier if ours is not None else read_identity(identity_path)
    if checkpoint.embed_tokens is not None:
        _check_embedding(checkpoint, load_head(locate_verifier(load_params(params_path).verifier)).embed_tokens)
    with _fresh(out, source) as folder:
        vocabulary = write_ours(folder, checkpoint, identity)
        if ours is not None:
            lineage = replace(ours, draft=draft_digests(folder))
        else:
            lineage = _foreign_lineage(folder, checkpoint, identity, vocabulary, load_params(params_path).verifier)
        write_lineage(folder, lineage)
        write_file(folder / CARD, model_card(lineage, None, usual_tokens(lineage)).encode())
    return lineage


def _foreign_lineage(
    folder: Path,
    checkpoint: Checkpoint,
    identity: VerifierIdentity,
    vocabulary: DraftVocabulary,
    params: VerifierParams,
) -> Lineage:
    base_model, license_name = base_of(params, Path(params.model))
    coverage = vocabulary.coverage or None
    return Lineage(
        format=FORMAT,
        draft=draft_digests(folder),
        vocabulary=vocabulary_facts(vocabulary.token_ids.tolist(), vocabulary.verifier_size, coverage),
        verifier=replace(identity, name=public_name(identity.name)),
        base_model=base_model,
        license=license_name,
        hidden_states=None,
        tokens=None,
        prompts=None,
        train=None,
        training=None,
        origin=None,
        imported=Imported(checkpoint.form, {path.name: digest_file(path) for path in checkpoint.files}),
    )


def _check_files(draft: Path, lineage: Lineage) -> None:
    """Raises ValueError when the draft's files are not those of its lineage."""
    try:
        found = draft_digests(draft)
    except OSError as error:
        raise ValueError(f"{draft}: {error.filename} is not readable ({error.strerror})") from None
    changed = [name for name, sha256 in found.items() if lineage.draft.get(name) != sha256]
    if changed:
        raise ValueError(f"{draft}: {', '.join(changed)} differs from {LINEAGE}; `eagle3 lineage --check` says more")


def _check_embedding(checkpoint: Checkpoint, expected: torch.Tensor) -> None:
    own = checkpoint.embed_tokens
    assert own is not None
    if own.shape != expected.shape or not torch.equal(own, expected.to(own.dtype)):
        raise ValueError(
            f"import: {checkpoint.folder} has an embedding of its own, other than the verifier's; drafts of this "
            "pipeline share the verifier's. vLLM serves the checkpoint as it is"
        )


@contextmanager
def _fresh(out: Path, source: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `out` when the block ends well. Raises ValueError when `out` is there already, or
    lies in `source`."""
    if os.path.lexists(out):
        raise ValueError(f"{out} is there already; name a folder that is not")
    if out.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{out} lies in {source}; name a folder elsewhere")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield aside
        aside.chmod(0o777 & ~_umask())
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
