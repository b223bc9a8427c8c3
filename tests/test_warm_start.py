"""Going on from an EAGLE-3 checkpoint: ours, one as speculators saves it, one with older names; what does not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.draft.export import CONFIG, WEIGHTS
from eagle3.draft.model import DraftModel, initialise
from eagle3.draft.training import run_key
from eagle3.draft.vocab import DraftVocabulary
from eagle3.draft.warm_start import read_checkpoint
from eagle3.verifier import read_identity
from eagle3.verifier_head import load_head
from tests.draft_runs import Run
from tests.test_draft_export import LATENT, TOKEN_IDS, export, sizes_of
from tests.test_draft_training import run  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("one_thread")
AUX = (2, 4, 5)
OTHER_IDS = torch.arange(0, 640, 4)


@pytest.fixture
def plain(tmp_path: Path, tiny_verifier: Path) -> tuple[Path, DraftModel]:
    """A draft that this pipeline exported, all weights random."""
    model = DraftModel(sizes_of(len(TOKEN_IDS)))
    initialise(model, torch.randn(len(TOKEN_IDS), 128), torch.randn(128), seed=5, spread=0.5)
    export(tmp_path / "plain", tiny_verifier)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    told = load_file(tmp_path / "plain" / WEIGHTS)
    save_file(tensors | {name: told[name] for name in ("d2t", "t2d")}, tmp_path / "plain" / WEIGHTS)
    return tmp_path / "plain", model


def as_speculators(plain: Path, out: Path) -> Path:
    """The same as speculators 0.9.0 saves it: the layer's form in a section of its own, the embedding with it."""
    own = json.loads((plain / CONFIG).read_text())
    layer = {name: own[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "rope_parameters")}
    out.mkdir()
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": own["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(AUX),
    }
    (out / CONFIG).write_text(json.dumps(config))
    save_file(load_file(plain / WEIGHTS) | {"embed_tokens.weight": torch.zeros(640, 128)}, out / WEIGHTS)
    return out


def as_midlayer(plain: Path, out: Path) -> Path:
    """The same with the names that the first EAGLE-3 checkpoints have, and the older rotary fields."""
    own = json.loads((plain / CONFIG).read_text())
    rope = own.pop("rope_parameters")
    own |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": rope["rope_type"], "factor": rope["factor"]}}
    out.mkdir()
    (out / CONFIG).write_text(json.dumps(own))
    tensors = {name.replace("layers.0.", "midlayer."): value for name, value in load_file(plain / WEIGHTS).items()}
    save_file(tensors, out / WEIGHTS)
    return out


def fresh(verifier: Path, token_ids: torch.Tensor) -> tuple[DraftModel, DraftVocabulary]:
    draft = DraftModel(sizes_of(len(token_ids)))
    head = load_head(verifier)
    initialise(draft, head.lm_head[token_ids], head.norm, seed=0)
    return draft, DraftVocabulary(token_ids, 640, 1.0)


@pytest.mark.parametrize("form", ["plain", "speculators", "midlayer"])
def test_all_weights_arrive_whatever_the_form(
    plain: tuple[Path, DraftModel], tmp_path: Path, tiny_verifier: Path, form: str
) -> None:
    folder, model = plain
    if form != "plain":
        folder = (as_speculators if form == "speculators" else as_midlayer)(folder, tmp_path / form)
    checkpoint = read_checkpoint(folder)
    sizes = checkpoint.fit(replace(sizes_of(128), rope_parameters={"rope_type": "default", "rope_theta": 1e4}), AUX)
    assert sizes == sizes_of(128)  # the rotary parameters of the checkpoint
    draft, vocabulary = fresh(tiny_verifier, TOKEN_IDS)
    assert checkpoint.load_into(draft, vocabulary) == len(TOKEN_IDS)
    for name, value in model.state_dict().items():
        assert torch.equal(draft.state_dict()[name], value), name


def test_head_rows_go_to_the_same_tokens(plain: tuple[Path, DraftModel], tiny_verifier: Path) -> None:
    folder, model = plain
    draft, vocabulary = fresh(tiny_verifier, OTHER_IDS)
    common = sorted({*TOKEN_IDS.tolist()} & {*OTHER_IDS.tolist()})
    assert read_checkpoint(folder).load_into(draft, vocabulary) == len(common) > 10
    verifiers = load_head(tiny_verifier).lm_head.float()
    for place, token in enumerate(OTHER_IDS.tolist()):
        known = token in common
        expected = model.lm_head.weight[TOKEN_IDS.tolist().index(token)] if known else verifiers[token]
        assert torch.equal(draft.lm_head.weight[place], expected)


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norm_before_residual": False}, "norm_before_residual: false; set train.norm_before_residual so"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, r"set train\.sliding_window: 64"),
        ({"norm_output": True}, "norm_output: true; set train.norm_output so"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"set verifier\.aux_layer_ids: \[1, 2, 3\]"),
    ],
)
def test_what_computes_otherwise_is_refused(plain: tuple[Path, DraftModel], changes: dict[str, Any], told: str) -> None:
    edit(plain[0], **changes)
    with pytest.raises(ValueError, match=told):
        read_checkpoint(plain[0]).fit(sizes_of(128), AUX)


def test_latent_attention_goes_on_from_latent_attention(
    plain: tuple[Path, DraftModel], tmp_path: Path, tiny_verifier: Path
) -> None:
    before = export(tmp_path / "latent", tiny_verifier, sizes=LATENT)
    checkpoint = read_checkpoint(tmp_path / "latent")
    assert checkpoint.fit(replace(LATENT, rope_parameters={}), AUX) == LATENT
    draft = DraftModel(LATENT)
    initialise(draft, torch.randn(len(TOKEN_IDS), 128), torch.randn(128), seed=3)
    assert checkpoint.load_into(draft, DraftVocabulary(TOKEN_IDS, 640, 1.0)) == len(TOKEN_IDS)
    for name, value in before.state_dict().items():
        assert torch.equal(draft.state_dict()[name], value), name
    with pytest.raises(ValueError, match=r"has latent attention; set train\.attention: latent"):
        checkpoint.fit(sizes_of(128), AUX)
    with pytest.raises(ValueError, match=r"has no latent attention; set train\.attention: heads"):
        read_checkpoint(plain[0]).fit(LATENT, AUX)


def test_another_form_is_refused_by_tensor(plain: tuple[Path, DraftModel], tiny_verifier: Path) -> None:
    vocabulary = DraftVocabulary(TOKEN_IDS, 640, 1.0)
    for sizes, told in (
        (replace(sizes_of(128), num_layers=2), r"layers\.1\.input_layernorm\.weight missing"),
        (replace(sizes_of(128), intermediate_size=64), r"gate_proj\.weight of shape \[256, 128\] where .* \[64, 128\]"),
    ):
        with pytest.raises(ValueError, match=told):
            read_checkpoint(plain[0]).load_into(DraftModel(sizes), vocabulary)


def test_what_is_no_checkpoint_is_told(plain: tuple[Path, DraftModel], tmp_path: Path) -> None:
    folder = plain[0]
    with pytest.raises(ValueError, match="no EAGLE-3 checkpoint"):
        read_checkpoint(tmp_path / "nowhere")
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"d2t": tensors["d2t"].flip(0).contiguous()}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="d2t does not fit"):
        read_checkpoint(folder)
    (folder / WEIGHTS).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not readable"):
        read_checkpoint(folder)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights are not read"):
        read_checkpoint(folder)
    edit(folder, speculators_model_type="mtp")
    with pytest.raises(ValueError, match="a mtp model of speculators"):
        read_checkpoint(folder)


def test_training_goes_on_from_where_the_other_run_ended(run: Run, tmp_path: Path) -> None:  # noqa: F811
    cold = run.stage(epochs=2)
    (run.root / "draft").rename(tmp_path / "before")
    warm = run.stage(epochs=1, warm_start=str(tmp_path / "before"), learning_rate=1e-9)
    assert warm["validation_loss"] == pytest.approx(cold["validation_loss"], rel=1e-4)
    trainer = run.trainer()
    verifier = read_identity(run.recorded / "verifier.json")
    keys = [run_key(trainer.corpus, verifier, trainer.params, trainer.device)]
    for text in ("", "\n"):  # other bytes of the checkpoint: another run
        with (tmp_path / "before" / CONFIG).open("a") as file:
            file.write(text)
        keys.append(
            run_key(trainer.corpus, verifier, trainer.params, trainer.device, read_checkpoint(tmp_path / "before"))
        )
    assert len({*keys}) == 3
