"""Token tables for tests: what `reconstruct-tokens` writes, made of a small verifier's own greedy answers."""

import random
from pathlib import Path

import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM

from eagle3.digests import digest, digest_tokens
from eagle3.params import Params, load_params
from eagle3.schemas import TOKENS
from eagle3.tables import Account, Row, write_parts
from eagle3.verifier import identify_verifier, write_identity

PROJECT = Path(__file__).parents[1]


def greedy_samples(
    verifier: Path, lengths: list[tuple[int, int]], seed: int = 0, vocabulary: int = 600, temperature: float = 0.0
) -> list[list[int]]:
    """Prompts of random ids, continued by the verifier; lengths: (prompt, answer) of each sample."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype="auto")
    choice = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the models are tiny; threads that wait for each other on a busy machine take minutes
    samples = []
    for prompt, answer in lengths:
        ids = [choice.randrange(3, vocabulary) for _ in range(prompt)]
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([ids]),
                min_new_tokens=answer,
                max_new_tokens=answer,
                do_sample=temperature > 0,
                **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}),
                eos_token_id=None,
            )
        samples.append(made[0].tolist())
    return samples


def token_row(
    input_ids: list[int], prompt_length: int, *, split: str = "train", greedy: bool = True, rebuilt: bool = False
) -> Row:
    """A row of schemas.TOKENS."""
    mask = [position >= prompt_length for position in range(len(input_ids))]
    return {
        "sample_id": digest(input_ids),
        "sample_digest": digest_tokens(input_ids, mask),
        "source": "test",
        "category": "test",
        "split": split,
        "input_ids": input_ids,
        "loss_mask": mask,
        "prompt_length": prompt_length,
        "thinking_start": prompt_length,
        "thinking_end": prompt_length,
        "thinking_opened_by": None,
        "thinking_ended_by": None,
        "stray_markers": 0,
        "answer_start": prompt_length,
        "length": len(input_ids),
        "truncated_in": None,
        "greedy": greedy,
        "rebuilt": rebuilt,
    }


def write_tokens(folder: Path, rows: list[Row]) -> Path:
    """data/tokens of these rows."""
    account = Account("test", 0)
    account.rows_in = account.rows_out = len(rows)
    write_parts(folder, rows, TOKENS, "sample_digest", account)
    return folder


def write_params(path: Path, verifier: Path, **changes: object) -> Params:
    """params.yaml of a run on a small float32 verifier. changes: section__key=value."""
    yaml = YAML()
    values = yaml.load((PROJECT / "params.yaml").read_text())
    small: dict[str, object] = {
        "verifier__model": str(verifier),
        "verifier__dtype": "float32",
        "verifier__max_model_len": 256,
        "verifier__aux_layer_ids": [2, 4, 5],
        "engine__cpu_kv_cache_gib": 0.25,
        "engine__max_num_seqs": 16,
        "engine__max_num_batched_tokens": 512,
        "engine__start_timeout_s": 300,
        "extract__shard_min_mib": 0.5,
        "extract__shard_max_mib": 2.0,
        "extract__stall_timeout_s": 60.0,
    }
    for name, value in (small | changes).items():
        section, key = name.split("__", 1)
        assert key in values[section], name
        values[section][key] = value
    with path.open("w") as file:
        yaml.dump(values, file)
    return load_params(path)


def write_verifier_json(path: Path, params: Params) -> Path:
    """data/verifier.json."""
    write_identity(identify_verifier(params.verifier, params.reasoning), path)
    return path
