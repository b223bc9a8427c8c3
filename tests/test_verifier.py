"""The identity is read from the model, changes when anything that matters changes, and mistakes are named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3.params import VerifierParams
from eagle3.verifier import (
    choose_aux_layers,
    identify_verifier,
    kept_identity,
    locate_verifier,
    prompt_ids,
    read_identity,
    write_identity,
)
from eagle3.verifier_head import load_head
from tests.draft_data import REASONING
from tests.tiny_verifiers import build_tiny_verifier
from tests.token_tables import PROJECT, write_params


def params(folder: Path | str, **changes: object) -> VerifierParams:
    fields = {
        "model": str(folder), "revision": None, "trust_remote_code": False, "chat_template": None, "dtype": "float32",
        "max_model_len": 256, "aux_layer_ids": None,
    }  # fmt: skip
    return VerifierParams.model_validate(fields | changes)


@pytest.fixture
def folder(tiny_verifier: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_verifier, tmp_path / "verifier"))


def test_sizes_and_tokens_come_from_the_model(folder: Path, tmp_path: Path) -> None:
    identity = identify_verifier(params(folder), REASONING)
    assert (identity.hidden_size, identity.num_layers, identity.vocab_size) == (128, 8, 640)
    assert identity.aux_layer_ids == (2, 4, 5)
    assert identity.stop_token_ids == (AutoTokenizer.from_pretrained(folder).eos_token_id,)
    assert str(folder) not in json.dumps(identity.digest)
    write_identity(identity, tmp_path / "identity.json")
    assert read_identity(tmp_path / "identity.json") == identity


def test_the_digest_does_not_depend_on_the_place(folder: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert identify_verifier(params(folder), REASONING).digest == identify_verifier(params(elsewhere), REASONING).digest


def test_an_identity_is_read_once_and_kept_while_nothing_changes(folder: Path, tmp_path: Path) -> None:
    own = params(folder)
    first = kept_identity(own, REASONING)
    assert first == identify_verifier(own, REASONING)
    (kept,) = (tmp_path / "work/identities").iterdir()
    kept.write_text(kept.read_text().replace('"hidden_size": 128', '"hidden_size": 129'))
    assert kept_identity(own, REASONING).hidden_size == 129  # so it was read
    kept.write_text("{")
    assert kept_identity(own, REASONING) == first  # damaged: made again
    (folder / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text() + " ")
    assert kept_identity(own, REASONING).digest != first.digest
    assert kept_identity(params(folder, aux_layer_ids=[1, 2, 3]), REASONING).aux_layer_ids == (1, 2, 3)
    assert kept_identity(own, REASONING.model_copy(update={"format": "none"})).markers == first.markers


def test_the_stage_needs_no_torch_while_nothing_changes(folder: Path, tmp_path: Path) -> None:
    """It runs at every `dvc repro`."""
    own = write_params(tmp_path / "params.yaml", folder)
    kept_identity(own.verifier, own.reasoning)
    program = (
        "import runpy, sys\n"
        "try: runpy.run_module('stages.verifier', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "verifier.json"), str(tmp_path / "params.yaml")]
    subprocess.run(command, cwd=PROJECT, check=True)
    assert read_identity(tmp_path / "verifier.json") == identify_verifier(own.verifier, own.reasoning)


@pytest.mark.parametrize(
    "what", ["template", "tokenizer", "weights", "config", "generation", "dtype", "length", "own template"]
)
def test_s04_the_digest_changes_with_everything_that_decides_the_output(
    folder: Path, tmp_path: Path, what: str
) -> None:
    before = identify_verifier(params(folder), REASONING).digest
    changes: dict[str, object] = {}
    if what == "template":
        (folder / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text() + " ")
    elif what == "tokenizer":
        (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    elif what == "weights":
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][0] += 1e-3
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    elif what == "config":
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 20000.0
        (folder / "config.json").write_text(json.dumps(config))
    elif what == "generation":
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    elif what == "dtype":
        changes = {"dtype": "bfloat16"}
    elif what == "length":
        changes = {"max_model_len": 128}
    else:
        (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
        changes = {"chat_template": str(tmp_path / "own.jinja")}
    assert identify_verifier(params(folder, **changes), REASONING).digest != before


@pytest.mark.parametrize(("tied", "sharded"), [(True, False), (False, False), (False, True)])
def test_the_head_is_found_tied_or_not_in_one_file_or_several(tmp_path: Path, tied: bool, sharded: bool) -> None:
    folder = build_tiny_verifier(tmp_path / "v", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if sharded:
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="300KB")
        assert (folder / "model.safetensors.index.json").exists()
        identify_verifier(params(folder), REASONING)
    head = load_head(folder)
    assert torch.equal(head.lm_head, model.lm_head.weight)
    assert torch.equal(head.embed_tokens, model.model.embed_tokens.weight)
    ids = torch.arange(5, 20)[None]
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, inputs: states.append(inputs[0][0]))
    with torch.no_grad():
        expected = model(ids).logits[0]
        assert torch.allclose(head.logits(states[0]), expected, atol=1e-4)


def test_unusual_weight_names_are_listed(folder: Path) -> None:
    weights = {f"transformer.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    weights["transformer.wte"] = weights.pop("transformer.model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"embed_tokens.*there are transformer"):
        load_head(folder)


@pytest.mark.parametrize(
    ("layers", "fits"), [(2, False), (4, False), (5, False), (6, False), (7, True), (8, True), (61, True)]
)
def test_default_layers_on_shallow_models_are_refused(layers: int, fits: bool) -> None:
    if fits:
        assert choose_aux_layers(None, layers) == (2, layers // 2, layers - 3)
    else:
        with pytest.raises(ValueError, match=r"verifier\.aux_layer_ids"):
            choose_aux_layers(None, layers)


def test_explicit_layers() -> None:
    assert choose_aux_layers([3, 1], 4) == (1, 3)
    assert choose_aux_layers([2, 30, 58], 61) == (2, 30, 58)
    for wanted in ([1, 1], [4], [9]):
        with pytest.raises(ValueError, match="between 1 and 3"):
            choose_aux_layers(wanted, 4)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("./nowhere", "neither a directory here nor a hub id"),
        ("owner/name", "pin it with verifier.revision"),
        ("bundled:gpt-5", "is not bundled; there is bundled:smollm2"),
    ],
)
def test_a_wrong_model_is_named(model: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        locate_verifier(params(model))


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a model directory"):
        identify_verifier(params(tmp_path), REASONING)


def test_missing_weight_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        identify_verifier(params(folder), REASONING)


def test_a_context_longer_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"verifier\.max_model_len is 1024, but .* has 512"):
        identify_verifier(params(folder, max_model_len=1024), REASONING)


def test_a_foreign_identity_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text('{"name": 1}')
    with pytest.raises(ValueError, match=r"v\.json"):
        read_identity(tmp_path / "v.json")


def test_prompt_ids_end_where_the_verifier_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "How many apples?"}], {})
    assert tokenizer.decode(ids) == "<|im_start|>user\nHow many apples?<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
