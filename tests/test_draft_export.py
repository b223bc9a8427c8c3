"""The export, as the serving engine reads it, and back."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.draft.export import CONFIG, WEIGHTS, export_draft, load_draft
from eagle3.draft.latent import LatentSizes
from eagle3.draft.model import DraftModel, DraftSizes, initialise
from eagle3.draft.vocab import DraftVocabulary
from eagle3.verifier import VerifierIdentity
from eagle3.verifier_head import load_head
from tests.test_draft_data import VERIFIER as IDENTITY

TOKEN_IDS = torch.arange(0, 640, 5)
LAYER = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{n}_proj" for n in "qkvo"))
LAYER = (*LAYER, *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
NAMES = {"fc.weight", "norm.weight", "lm_head.weight", "layers.0.hidden_norm.weight"}
NAMES |= {f"layers.0.{name}.weight" for name in LAYER}


def verifier_of(folder: Path) -> VerifierIdentity:
    assert folder.is_dir()
    return replace(IDENTITY, hidden_size=128, vocab_size=640)


def sizes_of(vocab: int) -> DraftSizes:
    return DraftSizes(
        hidden_size=128,
        intermediate_size=256,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_aux_layers=3,
        vocab_size=640,
        draft_vocab_size=vocab,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        norm_before_residual=True,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )


def export(
    out: Path,
    verifier: Path,
    token_ids: torch.Tensor = TOKEN_IDS,
    dtype: str = "float32",
    sizes: DraftSizes | None = None,
) -> DraftModel:
    vocabulary = DraftVocabulary(token_ids, 640, 0.9)
    model = DraftModel(sizes or sizes_of(len(token_ids)))
    head = load_head(verifier)
    initialise(model, head.lm_head[token_ids], head.norm, seed=0)
    export_draft(out, model, vocabulary, verifier_of(verifier), dtype)
    return model


def test_tensors_of_a_reduced_vocabulary(tmp_path: Path, tiny_verifier: Path) -> None:
    export(tmp_path / "draft", tiny_verifier)
    tensors = load_file(tmp_path / "draft" / WEIGHTS)
    assert tensors.keys() == NAMES | {"d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(128) + tensors["d2t"], TOKEN_IDS)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (128, 256)
    assert tensors["fc.weight"].shape == (128, 384)


def test_tensors_of_the_full_vocabulary(tmp_path: Path, tiny_verifier: Path) -> None:
    export(tmp_path / "draft", tiny_verifier, torch.arange(640))
    assert load_file(tmp_path / "draft" / WEIGHTS).keys() == NAMES
    model, vocabulary = load_draft(tmp_path / "draft")
    assert len(vocabulary) == 640 and model.sizes.draft_vocab_size == 640


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_frozen_head_is_the_verifiers_bit_by_bit(tmp_path: Path, tiny_verifier: Path, dtype: str) -> None:
    export(tmp_path / "draft", tiny_verifier, dtype=dtype)
    tensors = load_file(tmp_path / "draft" / WEIGHTS)
    kind = getattr(torch, dtype)
    assert torch.equal(tensors["lm_head.weight"], load_head(tiny_verifier).lm_head[TOKEN_IDS].to(kind))
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {kind}


def test_the_config_says_everything(tmp_path: Path, tiny_verifier: Path) -> None:
    export(tmp_path / "draft", tiny_verifier)
    config = json.loads((tmp_path / "draft" / CONFIG).read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["num_aux_hidden_states"] == 3
    assert (config["vocab_size"], config["draft_vocab_size"]) == (640, 128)
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    assert config["max_position_embeddings"] == 512
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert isinstance(config[flag], bool)
    assert config["eagle_config"]["norm_before_fc"] == config["norm_before_fc"]
    assert config["eagle3_pipeline"]["verifier_digest"] == "d" * 64


LATENT = replace(
    sizes_of(128),
    num_kv_heads=4,
    head_dim=48,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    latent=LatentSizes(24, 40, 32, 16, 20),
)


def test_a_sliding_window_is_told_layer_by_layer(tmp_path: Path, tiny_verifier: Path) -> None:
    for window, told in ((None, None), (100, ["sliding_attention"] * 2)):
        sizes = replace(sizes_of(128), num_layers=2, sliding_window=window)
        export(tmp_path / str(window), tiny_verifier, sizes=sizes)
        config = json.loads((tmp_path / str(window) / CONFIG).read_text())
        assert (config.get("sliding_window"), config.get("layer_types")) == (window, told)
        assert load_draft(tmp_path / str(window))[0].sizes == sizes


def test_latent_attention_is_told_as_the_server_reads_it(tmp_path: Path, tiny_verifier: Path) -> None:
    export(tmp_path / "draft", tiny_verifier, sizes=replace(LATENT, num_layers=2))
    config = json.loads((tmp_path / "draft" / CONFIG).read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and config["model_type"] == "deepseek_v2"
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 2 and "head_dim" not in config
    assert {name: config[name] for name in asdict(LATENT.latent)} == asdict(LATENT.latent)
    names = {name for name in load_file(tmp_path / "draft" / WEIGHTS) if ".self_attn." in name}
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    assert names == {f"layers.{layer}.self_attn.{part}.weight" for layer in (0, 1) for part in parts}


@pytest.mark.parametrize(
    "sizes",
    [
        replace(sizes_of(128), num_layers=2, norm_before_fc=True, fc_norm=True, norm_output=True),
        LATENT,
    ],
    ids=["heads", "latent"],
)
def test_a_draft_comes_back_equal(tmp_path: Path, tiny_verifier: Path, sizes: DraftSizes) -> None:
    model = export(tmp_path / "draft", tiny_verifier, sizes=sizes)
    loaded, vocabulary = load_draft(tmp_path / "draft")
    assert loaded.sizes == sizes and torch.equal(vocabulary.token_ids, TOKEN_IDS)
    for (name, value), (other, expected) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other and torch.equal(value, expected)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(folder / WEIGHTS), **change}
    save_file({name: value.contiguous() for name, value in tensors.items() if value is not None}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "missing fc.weight"),
        ({"extra.weight": torch.zeros(2)}, "unexpected extra.weight"),
        ({"norm.weight": torch.zeros(2)}, "of another shape norm.weight"),
        ({"d2t": None}, "d2t and t2d for 128 draft tokens"),
        ({"d2t": TOKEN_IDS}, "offsets"),
        ({"t2d": torch.ones(640, dtype=torch.bool)}, "differ"),
    ],
)
def test_a_damaged_draft_is_refused(
    tmp_path: Path, tiny_verifier: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    export(tmp_path / "draft", tiny_verifier)
    rewrite(tmp_path / "draft", change)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path / "draft")


def test_a_foreign_folder_is_refused(tmp_path: Path, tiny_verifier: Path) -> None:
    with pytest.raises(ValueError, match="not a draft that this pipeline exported"):
        load_draft(tiny_verifier)
    with pytest.raises(ValueError, match="not a draft"):
        load_draft(tmp_path / "absent")


def test_values_too_large_for_the_dtype_are_refused(tmp_path: Path, tiny_verifier: Path) -> None:
    model = DraftModel(sizes_of(128))
    head = load_head(tiny_verifier)
    initialise(model, head.lm_head[TOKEN_IDS] * 1e6, head.norm, seed=0)
    with pytest.raises(ValueError, match=r"lm_head.weight is not finite in float16"):
        export_draft(
            tmp_path / "draft", model, DraftVocabulary(TOKEN_IDS, 640, 1.0), verifier_of(tiny_verifier), "float16"
        )
    assert not (tmp_path / "draft").exists()
