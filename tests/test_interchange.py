"""Drafts out to both formats and back in: every bit, every flag; and checkpoints of others, whole or hostile."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.card import CARD, model_card, usual_tokens
from eagle3.digests import digest_file
from eagle3.draft.export import CONFIG, WEIGHTS, load_draft
from eagle3.draft.model import DraftSizes
from eagle3.lineage import LINEAGE as LINEAGE_FILE
from eagle3.lineage import check_draft, draft_digests, read_lineage, vocabulary_facts, write_lineage
from eagle3.sharing import Form
from eagle3.verifier import read_identity
from eagle3.verifier_head import load_head
from tests.dvc_project import eagle3
from tests.test_draft_export import LATENT, TOKEN_IDS, export, sizes_of, verifier_of
from tests.test_lineage import LINEAGE
from tests.token_tables import write_params, write_verifier_json

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS: dict[str, tuple[DraftSizes, str]] = {
    "llama": (sizes_of(128), "bfloat16"),
    "flags": (
        replace(sizes_of(128), num_layers=2, norm_before_fc=True, fc_norm=True, norm_output=True),
        "float32",
    ),
    "window": (replace(sizes_of(128), num_layers=3, sliding_window=64, norm_before_residual=False), "float16"),
    "whole_vocabulary": (replace(sizes_of(640), head_dim=16), "float32"),
    "latent": (LATENT, "bfloat16"),
    "latent_without_query_rank": (
        replace(LATENT, latent=replace(LATENT.latent, q_lora_rank=None), num_layers=2),  # type: ignore[type-var]
        "float32",
    ),
}


@pytest.fixture
def project(tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """params.yaml and data/verifier.json of the tiny verifier; the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_verifier_json(tmp_path / "data/verifier.json", write_params(tmp_path / "params.yaml", tiny_verifier))
    return tmp_path


def make_draft(out: Path, verifier: Path, form: str = "llama") -> Path:
    """A draft with random weights, its lineage and card, as `train` leaves it."""
    sizes, dtype = FORMS[form]
    ids = TOKEN_IDS if sizes.draft_vocab_size == len(TOKEN_IDS) else torch.arange(sizes.vocab_size)
    export(out, verifier, ids, dtype, sizes)
    facts = vocabulary_facts(ids.tolist(), sizes.vocab_size, 0.9)
    lineage = replace(LINEAGE, draft=draft_digests(out), vocabulary=facts, verifier=verifier_of(verifier))
    write_lineage(out, lineage)
    (out / CARD).write_text(model_card(lineage, None, usual_tokens(lineage)))
    return out


def contents(folder: Path) -> dict[str, str]:
    """Digest of each file by name."""
    return {path.name: digest_file(path) for path in folder.iterdir()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("written_as", ["plain", "speculators"])
def test_there_and_back_every_bit_is_the_same(project: Path, tiny_verifier: Path, form: str, written_as: Form) -> None:
    draft = make_draft(project / "draft", tiny_verifier, form)
    done = eagle3("export", "draft", "out", "--format", written_as)
    if written_as == "speculators" and FORMS[form][0].latent:
        assert done.exit_code == 1 and "use --format plain" in done.stderr
        return
    assert done.exit_code == 0, done.output
    assert contents(Path("out"))[WEIGHTS] == contents(draft)[WEIGHTS]
    assert read_lineage(Path("out")).draft == draft_digests(Path("out"))
    back = eagle3("import", "out", "back")
    assert back.exit_code == 0, back.output
    assert contents(Path("back")) == contents(draft)
    assert eagle3("lineage", "back", "--check").exit_code == 0


def test_the_speculators_config_has_every_flag_where_vllm_reads_it(project: Path, tiny_verifier: Path) -> None:
    make_draft(project / "draft", tiny_verifier, "window")
    assert eagle3("export", "draft", "out", "--format", "speculators", "--num-speculative-tokens", "4").exit_code == 0
    config = json.loads(Path("out/config.json").read_text())
    assert "model_type" not in config and config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == "Qwen/Qwen3-8B"
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["num_aux_hidden_states"] == 3
    assert layer["layer_types"] == ["sliding_attention"] * 3 and layer["sliding_window"] == 64
    assert layer["rope_parameters"] == sizes_of(128).rope_parameters
    flags = {name: config[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    assert flags == dict.fromkeys(flags, False)
    assert config["draft_vocab_size"] == 128 and config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def foreign(out: Path, verifier: Path, form: str = "speculators") -> Path:
    """A checkpoint as others write them: speculators 0.9.0, or the plain one of older trainers."""
    own = json.loads((make_draft(out.with_name(f"{out.name}-ours"), verifier) / CONFIG).read_text())
    tensors = load_file(out.with_name(f"{out.name}-ours") / WEIGHTS)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    layer = {name: own[name] for name in (*names, "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps")}
    layer |= {"hidden_act": "silu", "attention_bias": False, "rope_parameters": own["rope_parameters"]}
    out.mkdir()
    if form == "speculators":
        config: dict[str, Any] = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"verifier": {"name_or_path": "x"}},
            "transformer_layer_config": layer | {"model_type": "llama"},
            "draft_vocab_size": 128,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        }
        tensors["embed_tokens.weight"] = load_head(verifier).embed_tokens.to(torch.bfloat16)
    else:
        config = layer | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 128}
        tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    (out / CONFIG).write_text(json.dumps(config))
    save_file(tensors, out / WEIGHTS)
    return out


@pytest.mark.parametrize("form", ["speculators", "plain"])
def test_a_checkpoint_of_others_becomes_a_draft_of_this_projects_verifier(
    project: Path, tiny_verifier: Path, form: str
) -> None:
    theirs = foreign(project / "theirs", tiny_verifier, form)
    done = eagle3("import", "theirs", "mine")
    assert done.exit_code == 0, done.output
    assert "taken for a draft of tiny-llama" in done.stdout
    model, vocabulary = load_draft(Path("mine"))
    assert torch.equal(vocabulary.token_ids, TOKEN_IDS)
    ours = sizes_of(128)
    flags = {"norm_before_residual": form == "speculators"}  # what the format means where a config is silent
    assert model.sizes == replace(ours, **flags)
    for name, value in load_file(Path("theirs-ours") / WEIGHTS).items():
        assert torch.equal(load_file(Path("mine") / WEIGHTS)[name], value), name
    lineage = read_lineage(Path("mine"))
    assert lineage.imported is not None and lineage.imported.form == form and lineage.tokens is None
    assert lineage.imported.files.keys() == {CONFIG, WEIGHTS} and str(theirs) not in json.dumps(lineage.imported.files)
    check_draft(Path("mine"), read_identity(Path("data/verifier.json")))
    told = eagle3("lineage", "mine", "--check")
    assert told.exit_code == 0
    assert f"{form}: config.json" in told.stdout and "this folder is in no project" in told.stdout
    assert "Imported from a checkpoint" in Path("mine/README.md").read_text()
    assert eagle3("export", "mine", "again", "--format", "speculators").exit_code == 0
    again, before = load_file(Path("again") / WEIGHTS), load_file(Path("mine") / WEIGHTS)
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in again)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        for name, value in changes.items():
            (config if name in config else config["transformer_layer_config"])[name] = value
        (folder / CONFIG).write_text(json.dumps(config))

    return edit


def edit_tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS) | {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: value for name, value in tensors.items() if value is not None}, folder / WEIGHTS)

    return edit


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def index_of(name: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))

    return write


def damaged(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (pickled, "pickled weights are not read"),
        (damaged, "is not readable"),
        (index_of("../../secret.safetensors"), "names ../../secret.safetensors, which is no .safetensors file"),
        (index_of("/etc/passwd"), "names /etc/passwd, which is no .safetensors file of this folder"),
        (index_of("absent.safetensors"), "absent.safetensors is not readable"),
        (index_of(3), "is no EAGLE-3 checkpoint"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "is no EAGLE-3 checkpoint"),
        (lambda folder: (folder / CONFIG).unlink(), "is no EAGLE-3 checkpoint"),
        (edit_config(speculators_model_type="\x1b[2J"), "is no EAGLE-3 checkpoint"),
        (edit_config(hidden_act="gelu"), "hidden_act is gelu"),
        (edit_config(attention_bias=True), "attention_bias is True"),
        (edit_config(rope_parameters=None), "neither rope_parameters nor rope_theta"),
        (edit_config(eagle_aux_hidden_state_layer_ids=[5, 4, 2]), "do not ascend"),
        (edit_config(eagle_aux_hidden_state_layer_ids=[2, 4, 99]), "for a verifier of"),
        (edit_config(eagle_aux_hidden_state_layer_ids=[2, 4]), "of another shape fc.weight"),
        (edit_config(target_hidden_size=64), "target_hidden_size is 64"),
        (edit_config(hidden_size=64), "drafts for states of 64"),
        (edit_config(vocab_size=32_000), "drafts for states of 128 and 32,000 tokens"),
        (edit_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, its weights are of 1"),
        (edit_config(intermediate_size=10**12), "of another shape layers.0.mlp"),
        (edit_config(num_attention_heads=0, head_dim=None), "does not say what the draft's form is"),
        (edit_config(num_attention_heads="many"), "import: "),
        (edit_config(layer_types=["sliding_attention"]), "is no EAGLE-3 checkpoint"),
        (edit_tensors(fc__weight=None), "missing fc.weight"),
        (edit_tensors(layers__0__self_attn__q_norm__weight=torch.zeros(32).bfloat16()), "unexpected layers.0"),
        (edit_tensors(fc__weight=torch.zeros(128, 384)), "several dtypes: bfloat16, float32"),
        (edit_tensors(d2t=torch.arange(128) * 1000, t2d=None), "d2t leads to id"),
        (edit_tensors(d2t=torch.zeros(2, 64, dtype=torch.int64)), "d2t has shape [2, 64]"),
        (edit_tensors(lm_head__weight=torch.zeros((), dtype=torch.bfloat16)), "lm_head.weight has shape []"),
        (edit_tensors(embed_tokens__weight=torch.zeros(640, 128)), "has an embedding of its own"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(
    project: Path, tiny_verifier: Path, change: Callable[[Path], None], told: str
) -> None:
    change(foreign(project / "theirs", tiny_verifier))
    done = eagle3("import", "theirs", "mine")
    assert done.exit_code == 1
    assert "Traceback" not in done.output and "\x1b" not in done.output
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told in line
    assert sorted(path.name for path in project.iterdir()) == ["data", "params.yaml", "theirs", "theirs-ours"]


@pytest.mark.parametrize("command", [["export", "--format", "plain"], ["import"]])
def test_nothing_is_overwritten_and_nothing_is_written_into_the_source(
    project: Path, tiny_verifier: Path, command: list[str]
) -> None:
    draft = make_draft(project / "draft", tiny_verifier)
    before = contents(draft)
    Path("full").mkdir()
    Path("full/note").write_text("mine")
    Path("full.tmp").mkdir()
    Path("link").symlink_to("nowhere")
    for out in ("full", "link", "draft", "draft/inside"):
        done = eagle3(*command, "draft", out)
        assert done.exit_code == 1 and ("is there already" in done.stderr or "lies in" in done.stderr)
    assert contents(draft) == before and Path("full/note").read_text() == "mine" and Path("full.tmp").is_dir()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_draft_that_was_changed_after_training_goes_nowhere(project: Path, tiny_verifier: Path, name: str) -> None:
    draft = make_draft(project / "draft", tiny_verifier)
    data = bytearray((draft / name).read_bytes())
    data[-3] ^= 1
    (draft / name).write_bytes(data)
    for words in (["export", "draft", "out", "--format", "plain"], ["import", "draft", "out"]):
        done = eagle3(*words)
        assert done.exit_code == 1 and "Traceback" not in done.output
        assert not Path("out").exists()
    (draft / name).unlink()
    assert "not readable" in eagle3("export", "draft", "out", "--format", "plain").stderr


def test_a_link_that_leads_elsewhere_brings_nothing_along(project: Path, tiny_verifier: Path) -> None:
    """A lineage that is a link to somebody's secret is read as a lineage or not at all."""
    theirs = foreign(project / "theirs", tiny_verifier)
    Path("secret").write_text("password")
    (theirs / LINEAGE_FILE).symlink_to(project / "secret")
    done = eagle3("import", "theirs", "mine")
    assert done.exit_code == 1 and "password" not in done.output and not Path("mine").exists()


def test_outside_a_project(tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that somebody sent is exported and imported without a project; a foreign checkpoint needs one."""
    monkeypatch.chdir(tmp_path)
    write_params(Path("params.yaml"), tiny_verifier)
    make_draft(tmp_path / "draft", tiny_verifier)
    theirs = foreign(tmp_path / "theirs", tiny_verifier, "plain")
    Path("params.yaml").unlink()
    assert eagle3("export", "draft", "out", "--format", "speculators").exit_code == 0
    proposal = json.loads(Path("out/config.json").read_text())["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == LINEAGE.train["ttt_steps"]  # type: ignore[index]
    assert eagle3("import", "out", "back").exit_code == 0
    done = eagle3("import", str(theirs), "mine")
    assert done.exit_code == 1 and "data/verifier.json: not a verifier identity" in done.stderr


def test_the_files_have_the_rights_of_any_other(project: Path, tiny_verifier: Path) -> None:
    make_draft(project / "draft", tiny_verifier)
    assert eagle3("export", "draft", "out", "--format", "plain").exit_code == 0
    Path("plain").mkdir()
    assert Path("out").stat().st_mode == Path("plain").stat().st_mode
