"""Latent attention of a draft against transformers' DeepSeek-V3, and what its sizes and positions come from."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle3.draft.attention import Document
from eagle3.draft.export import load_draft
from eagle3.draft.latent import LatentSizes, latent_rope_parameters, latent_scale
from eagle3.draft.model import DraftModel, DraftSizes, choose_sizes
from eagle3.params import TrainParams, load_params
from eagle3.serving.engine import engine_arguments
from tests.draft_data import generate_texts, make_states, verifier_params
from tests.draft_runs import Run
from tests.test_draft_training import run  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("one_thread")
DEFAULT = load_params(Path(__file__).parent.parent / "params.yaml")
PARAMS: TrainParams = DEFAULT.train
YARN = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 1.0, "beta_slow": 1.0}
KIMI: dict[str, Any] = {  # as Kimi-K2.5's config.json has it
    "model_type": "kimi_k25",
    "text_config": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
        "rms_norm_eps": 1e-5,
    },
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 2048,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
}


def sizes_of(config: dict[str, Any], **changes: Any) -> DraftSizes:
    return choose_sizes(config, 3, 64, 128, PARAMS.model_copy(update=changes))


def test_a_draft_for_kimi_has_its_attention_without_any_setting() -> None:
    sizes = sizes_of(KIMI)
    assert sizes.latent == LatentSizes(1536, 512, 128, 64, 128)
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.hidden_size) == (64, 64, 192, 7168)
    rope = sizes.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["mscale_all_dim"]) == ("yarn", 50000.0, 1.0)
    heads = sizes_of(KIMI, attention="heads")
    assert heads.latent is None
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (56, 7, 128)


def test_sizes_may_be_others() -> None:
    sizes = sizes_of(SMALL, q_lora_rank=0, kv_lora_rank=20, v_head_dim=6, num_heads=2)
    assert sizes.latent == LatentSizes(None, 20, 8, 12, 6)
    attention = DraftModel(sizes).layers[0].self_attn
    assert attention.q_proj.weight.shape == (2 * 20, 128) and attention.o_proj.weight.shape == (64, 2 * 6)
    plain = {key: value for key, value in SMALL.items() if "lora" not in key and "head_dim" not in key}
    assert sizes_of(plain).latent is None
    asked = {"attention": "latent", **asdict(LatentSizes(None, 16, 8, 12, 10))}
    assert sizes_of(plain, **asked).latent == LatentSizes(None, 16, 8, 12, 10)


@pytest.mark.parametrize(
    ("config", "changes", "told"),
    [
        (SMALL, {"num_kv_heads": 2}, r"train\.num_kv_heads is for train\.attention: heads"),
        (SMALL, {"sliding_window": 8}, r"train\.sliding_window is for train\.attention: heads"),
        (SMALL, {"norm_before_fc": True}, r"set train\.norm_before_fc: false"),
        (SMALL, {"num_heads": 5}, r"width of 64 is no multiple of its 5 heads; set train\.num_heads"),
        ({**SMALL, "v_head_dim": None}, {}, r"has no v_head_dim; set train\.v_head_dim"),
        ({**SMALL, "qk_rope_head_dim": 7}, {}, r"qk_rope_head_dim is 7; .* an even number"),
    ],
)
def test_what_cannot_be_is_told(config: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sizes_of(config, **changes)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}], ids=["kind", "incomplete"]
)
def test_positions_that_are_not_served_are_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"plain rotary positions or with yarn .* Set train\.attention: heads"):
        latent_rope_parameters({"rope_theta": 1e4, **rope})


SCALINGS = {
    "plain": None,
    "yarn": YARN,
    "yarn, scores too": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rank", [24, None])
def test_attention_is_that_of_transformers(scaling: str, rank: int | None) -> None:
    """One document, all rows wanted: the same output from the same weights."""
    verifier = {**SMALL, "rope_scaling": SCALINGS[scaling], "q_lora_rank": rank}
    sizes = sizes_of(verifier, num_layers=2)
    draft, config = DraftModel(sizes), DeepseekV3Config(**verifier, attn_implementation="eager")
    reference, rotary = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)
    attention = draft.layers[1].self_attn
    generator = torch.Generator().manual_seed(0)
    for parameter in attention.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 5
    reference.load_state_dict(attention.state_dict())
    inputs, positions = torch.randn((40, 64), generator=generator), torch.arange(40)
    found = attention(inputs, draft.rotation(positions), draft.memories()[1], [Document(0, 0, 40)], None, torch.float32)
    mask = torch.full((1, 1, 40, 40), -torch.inf).triu(1)
    expected = reference(inputs[None], rotary(inputs, positions[None]), mask)[0][0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert expected.abs().max() > 0.2


def test_scores_of_deepseek_that_are_stretched() -> None:
    """Without mscale_all_dim vLLM does not stretch the scores; with attention_factor 1 (as Mistral's) neither."""
    sizes = LatentSizes(None, 16, 8, 8, 8)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    assert latent_scale(sizes, yarn) == latent_scale(sizes, {"rope_type": "default", "rope_theta": 1e4}) == 0.25
    assert latent_scale(sizes, {**yarn, "mscale_all_dim": 1.0}) == pytest.approx(0.25 * 1.138629**2)
    assert latent_scale(sizes, {**yarn, "mscale_all_dim": 1.0, "attention_factor": 1.0}) == 0.25
    assert latent_rope_parameters({**yarn, "mscale_all_dim": 1.0})["attention_factor"] == pytest.approx(1)
    assert latent_rope_parameters(yarn)["attention_factor"] == pytest.approx(1.138629)


def test_the_rotary_kernel_is_off_where_the_verifier_or_the_draft_has_latent_attention(
    tiny_verifier: Path, tiny_kimi: Path
) -> None:
    for verifier, draft, off in (
        (tiny_verifier, None, False),
        (tiny_verifier, tiny_verifier, False),
        (tiny_verifier, tiny_kimi, True),
        (tiny_kimi, None, True),
        (tiny_kimi, tiny_verifier, True),
    ):
        arguments = engine_arguments(verifier_params(verifier), DEFAULT.engine, verifier, draft)
        assert ("compilation_config" in arguments) == off


def test_a_draft_with_latent_attention_learns(run: Run) -> None:  # noqa: F811
    widths = asdict(LatentSizes(48, 32, 16, 8, 16))
    metrics = run.stage(attention="latent", precision="bfloat16", optimiser="adamw", feature_loss_weight=0.0, **widths)
    lines = (run.root / "plots/plots/metrics/train/loss.tsv").read_text().splitlines()[1:]
    losses = [float(line.split("\t")[1]) for line in lines]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]) and metrics["train_loss"] < losses[0]
    latent = load_draft(run.root / "draft")[0].sizes.latent
    assert latent is not None and asdict(latent) == widths


def test_train_makes_one_for_a_verifier_of_kimis_kind_without_any_setting(tiny_kimi: Path, tmp_path: Path) -> None:
    """From its config.json as it lies on the disk, and its own states."""
    make_states(tiny_kimi, tmp_path, generate_texts(tiny_kimi, 6, validation=2, answer=12))
    metrics = Run(tmp_path, tmp_path, tiny_kimi).stage(epochs=1)
    assert metrics["validation_samples"] == 2 and metrics["validation_loss"] > 0
    sizes = load_draft(tmp_path / "draft")[0].sizes
    assert sizes.latent == LatentSizes(32, 512, 32, 64, 32)
    assert (sizes.num_heads, sizes.rope_parameters["rope_type"]) == (2, "yarn")
