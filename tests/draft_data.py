"""Hidden-state folders for the draft's tests, with a small verifier's real states, as `extract` writes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eagle3.digests import digest_file, digest_tokens
from eagle3.params import ReasoningParams, VerifierParams
from eagle3.schemas import SCHEMA_VERSION, STATES
from eagle3.shards import Sample, write_shard
from eagle3.tables import INDEX, write_table
from eagle3.verifier import VerifierIdentity, identify_verifier, write_identity

REASONING = ReasoningParams(format="auto", start=None, end=None, also_ended_by=[])


@dataclass(frozen=True)
class Text:
    """One sample before the verifier read it."""

    sample_id: str
    split: str
    input_ids: list[int]
    loss_mask: list[bool]


def verifier_params(folder: Path, aux_layer_ids: list[int] | None = None) -> VerifierParams:
    return VerifierParams(
        model=str(folder),
        revision=None,
        trust_remote_code=False,
        chat_template=None,
        dtype="float32",
        max_model_len=256,
        aux_layer_ids=aux_layer_ids,
    )


@torch.no_grad()
def generate_texts(folder: Path, count: int, validation: int = 4, seed: int = 0, answer: int = 24) -> list[Text]:
    """Greedy answers of the verifier to random prompts; the last `validation` ones are for validation."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for number in range(count):
        prompt = torch.randint(3, 500, (6 + number % 9,), generator=generator)
        length = answer - number % 7
        ids = model.generate(prompt[None], max_new_tokens=length, do_sample=False)[0].tolist()
        split = "validation" if number >= count - validation else "train"
        mask = [place >= len(prompt) for place in range(len(ids))]
        texts.append(Text(f"sample-{number:04d}", split, ids, mask))
    return texts


def random_texts(count: int) -> list[Text]:
    """Samples of any tokens; the last four are for validation."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for number in range(count):
        prompt, length = 6 + number % 9, 24 + number % 11
        ids = torch.randint(3, 500, (length,), generator=generator).tolist()
        split = "validation" if number >= count - 4 else "train"
        texts.append(Text(f"sample-{number:04d}", split, ids, [place >= prompt for place in range(length)]))
    return texts


@torch.no_grad()
def read_states(folder: Path, texts: Sequence[Text], aux_layer_ids: Sequence[int]) -> list[Sample]:
    """States entering the auxiliary layers, and after the last layer before the final norm."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0][0].clone()))
    samples = []
    for text in texts:
        states = model(torch.tensor([text.input_ids]), output_hidden_states=True).hidden_states
        aux = torch.cat([states[layer][0] for layer in aux_layer_ids], dim=-1)
        ids = torch.tensor(text.input_ids, dtype=torch.int32)
        samples.append(Sample(ids, torch.tensor(text.loss_mask), aux, last.pop()))
    return samples


def write_states(
    out: Path, texts: Sequence[Text], samples: Sequence[Sample], verifier: VerifierIdentity, per_shard: int = 8
) -> None:
    """Shards of `per_shard` samples and index.parquet."""
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for at in range(0, len(texts), per_shard):
        part, states = texts[at : at + per_shard], samples[at : at + per_shard]
        key = f"states-{at:04d}"
        name = f"{key}.safetensors"
        write_shard(out / name, states, shard_metadata(verifier, states[0].last_hidden_states.dtype, key))
        start = 0
        for position, text in enumerate(part):
            rows.append(
                {
                    "sample_id": text.sample_id,
                    "sample_digest": digest_tokens(text.input_ids, text.loss_mask),
                    "category": "test",
                    "split": text.split,
                    "shard": name,
                    "position": position,
                    "row_start": start,
                    "length": len(text.input_ids),
                    "loss_tokens": sum(text.loss_mask),
                    "shard_bytes": (out / name).stat().st_size,
                    "shard_sha256": digest_file(out / name),
                }
            )
            start += len(text.input_ids)
    write_table(out / INDEX, rows, STATES)


def shard_metadata(verifier: VerifierIdentity, dtype: torch.dtype, key: str) -> dict[str, str]:
    return {
        "schema_version": str(SCHEMA_VERSION),
        "key": key,
        "verifier_digest": verifier.digest,
        "aux_layer_ids": json.dumps(list(verifier.aux_layer_ids)),
        "hidden_size": str(verifier.hidden_size),
        "dtype": str(dtype).removeprefix("torch."),
        "prenorm": "true",
        "engine": "test",
    }


def make_states(verifier_folder: Path, root: Path, texts: Sequence[Text]) -> VerifierIdentity:
    """root/hidden_states and root/verifier.json, with the verifier's own states."""
    verifier = identify_verifier(verifier_params(verifier_folder), REASONING)
    write_identity(verifier, root / "verifier.json")
    write_states(root / "hidden_states", texts, read_states(verifier_folder, texts, verifier.aux_layer_ids), verifier)
    return verifier
