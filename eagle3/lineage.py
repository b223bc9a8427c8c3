"""The chain of digests from a draft back to what it was made of, kept inside the draft's directory."""

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eagle3.digests import digest_file
from eagle3.params import TrainParams
from eagle3.tables import Row
from eagle3.verifier import VerifierIdentity
from eagle3.workstore import write_file

LINEAGE = "lineage.json"
CARD_METRICS = (
    "train_samples",
    "loss_tokens",
    "epochs",
    "steps",
    "draft_vocab_size",
    "expected_acceptance_length",
)
PACKAGES = ("torch", "transformers", "safetensors")


def write_lineage(
    draft: Path, identity: VerifierIdentity, states: Path, params: TrainParams, metrics: dict[str, Any]
) -> None:
    """Write lineage.json and the model card README.md into the draft's directory.

    states: index.parquet of the hidden states, which names every shard by its sha256 and every sample by its digest.
    """
    lineage = {
        "draft": {"model.safetensors": digest_file(draft / "model.safetensors")},
        "verifier": asdict(identity),
        "hidden_states": {"index.parquet": digest_file(states)},
        "train": params.model_dump(),
        "packages": {name: version(name) for name in PACKAGES},
    }
    write_file(draft / LINEAGE, (json.dumps(lineage, indent=2) + "\n").encode())
    write_file(draft / "README.md", model_card(identity, metrics).encode())


def model_card(identity: VerifierIdentity, metrics: Row) -> str:
    """A short model card with Hugging Face metadata; numbers are those of the training run."""
    rows = "".join(f"| {name} | {metrics[name]:,.4g} |\n" for name in CARD_METRICS if name in metrics)
    return (
        "---\nlibrary_name: vllm\ntags: [eagle3, speculative-decoding]\n---\n\n"
        f"# EAGLE-3 draft for {identity.name}\n\n"
        "Trained on the verifier's own answers. It works with exactly this verifier: "
        f"digest `{identity.digest}`. `lineage.json` names what it was made of.\n\n"
        f"| training run | |\n| --- | --- |\n{rows}\n"
        "Serve it with vLLM: `--speculative-config "
        '\'{"method": "eagle3", "model": "<this directory>", "num_speculative_tokens": 3}\'`\n'
    )


def check_draft(draft: Path, identity: VerifierIdentity) -> None:
    """Raises ValueError when the draft in this directory is damaged or belongs to another verifier."""
    try:
        lineage = json.loads((draft / LINEAGE).read_text())
        trained_for, weights = lineage["verifier"]["digest"], lineage["draft"]["model.safetensors"]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{draft / LINEAGE}: not a draft's lineage ({error!r}); `dvc repro train` makes it") from None
    if trained_for != identity.digest:
        raise ValueError(f"{draft} was trained for verifier {trained_for[:12]}, not for {identity.digest[:12]}")
    if digest_file(draft / "model.safetensors") != weights:
        raise ValueError(f"{draft / 'model.safetensors'} differs from its lineage; `dvc checkout --force` restores it")
