"""params.yaml is read strictly, as DVC writes it, and errors name the key."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from dvc.utils.hydra import apply_overrides

from eagle3.params import load_params

ROOT = Path(__file__).parent.parent
DEFAULT = (ROOT / "params.yaml").read_text()
EPOCHS = next(line for line in DEFAULT.splitlines() if line.startswith("  epochs:"))


def edited(tmp_path: Path, old: str, new: str) -> Path:
    assert old in DEFAULT
    path = tmp_path / "params.yaml"
    path.write_text(DEFAULT.replace(old, new, 1))
    return path


def test_the_default_file_is_valid() -> None:
    assert load_params(ROOT / "params.yaml").train.ttt_steps == 3


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (EPOCHS, f"{EPOCHS}\n  lrr: 1", "unknown key train.lrr"),
        ("generate:", "generatte:", "unknown key generatte"),
        (f"{EPOCHS}\n", "", "missing key train.epochs"),
        (EPOCHS, "  epochs: four", "train.epochs"),
        (EPOCHS, "  epochs: 4.5", "train.epochs"),
        (EPOCHS, '  epochs: "4"', "train.epochs"),
        (EPOCHS, "  epochs: 0", "train.epochs"),
        ("deduplicate: true", "deduplicate: yes", "prompts.deduplicate"),
        ("precision: bfloat16", "precision: bf16", "train.precision"),
        ("aux_layer_ids: null", "aux_layer_ids: low-mid-high", "verifier.aux_layer_ids"),
        ("aux_layer_ids: null", 'aux_layer_ids: "[2, 4, 5]"', "verifier.aux_layer_ids"),
        ("aux_layer_ids: null", 'aux_layer_ids: ["2", "4", "5"]', "verifier.aux_layer_ids"),
        ("multi_turn: first", "multi_turn: middle", "prompts.multi_turn"),
        ("verifier:", "verifier: [", "not readable as YAML"),
        (EPOCHS, "  epochs: &n 4", "anchors"),
        ("  learning_rate: 0.003", "  learning_rate: .nan", "train.learning_rate"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_key(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace(".", r"\.")) as caught:
        load_params(edited(tmp_path, old, new))
    assert "params.yaml" in str(caught.value)


@pytest.mark.parametrize("name", ["no", "on", "1.10", "007", "1e5", "2026-11-29", "0x1f"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_text_stays_text_with_or_without_quotes(tmp_path: Path, name: str, quote: str) -> None:
    params = load_params(edited(tmp_path, "name: starter", f"name: {quote}{name}{quote}"))
    assert params.prompts.sources[0].name == name


def test_d07_e18_settings_that_dvc_rewrites_keep_their_types(tmp_path: Path) -> None:
    """`dvc exp run -S` writes the whole file anew and drops quotes; text stays text, and a list of ids is one."""
    for name in ("no", "on", "1.10", "007", "null", "1e5"):
        path = edited(tmp_path, "name: starter", f'name: "{name}"')
        apply_overrides(str(path), ["verifier.aux_layer_ids=[2,4,5]", "train.learning_rate=1e-5", "train.epochs=7"])
        params = load_params(path)
        assert params.prompts.sources[0].name == name, path.read_text()
        assert params.verifier.aux_layer_ids == [2, 4, 5]
        assert (params.train.learning_rate, params.train.epochs) == (1e-5, 7)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.learning_rate=0.00001", 1e-5),
        ("train.learning_rate=1E-5", 1e-5),
        ("train.learning_rate=1", 1.0),
        ("train.freeze_lm_head=false", False),
        ("train.freeze_lm_head=True", True),
        ("train.loss=hard_labels", "hard_labels"),
        ("train.loss='hard_labels'", "hard_labels"),
        ('verifier.chat_template="my template.jinja"', "my template.jinja"),
        ("verifier.revision='1e5'", "1e5"),
        ("verifier.revision='007'", "007"),
        ("verifier.aux_layer_ids=null", None),
        ("verifier.aux_layer_ids=[1,2,4]", [1, 2, 4]),
        ("generate.temperature=[0.6,1e-1]", [0.6, 0.1]),
        ("evaluate.num_speculative_tokens=[3,5]", [3, 5]),
        ("reasoning.also_ended_by=['<end of it>',no]", ["<end of it>", "no"]),
        ("+generate.chat_template_kwargs.enable_thinking=true", {"enable_thinking": True}),
    ],
)
def test_what_experiments_set_arrives_with_its_type(tmp_path: Path, setting: str, value: object) -> None:
    path = edited(tmp_path, EPOCHS, EPOCHS)
    apply_overrides(str(path), [setting])
    section, key = setting.lstrip("+").partition("=")[0].split(".")[:2]
    found = getattr(getattr(load_params(path), section), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "setting",
    [
        "train.learning_rate=true",
        "train.learning_rate='1e-5'",
        "train.learning_rate=[1e-5]",
        "train.epochs=1.5",
        "train.epochs=1e0",
        "train.freeze_lm_head=no",
        "train.freeze_lm_head=1",
        "train.loss=null",
        "verifier.aux_layer_ids=1",
        "generate.temperature=[hot]",
    ],
)
def test_what_experiments_set_of_another_type_is_refused_by_name(tmp_path: Path, setting: str) -> None:
    path = edited(tmp_path, EPOCHS, EPOCHS)
    apply_overrides(str(path), [setting])
    with pytest.raises(ValueError, match=re.escape(setting.partition("=")[0])):
        load_params(path)


@pytest.mark.parametrize(("text", "value"), [("0.00001", 1e-5), ("1e-5", 1e-5), ("1.0e-05", 1e-5), ("1", 1.0)])
def test_floats_arrive_in_every_spelling(tmp_path: Path, text: str, value: float) -> None:
    assert load_params(edited(tmp_path, "learning_rate: 0.003", f"learning_rate: {text}")).train.learning_rate == value


def test_lists_and_null(tmp_path: Path) -> None:
    assert load_params(edited(tmp_path, "aux_layer_ids: null", "aux_layer_ids: [1, 2, 3]")).verifier.aux_layer_ids == [
        1,
        2,
        3,
    ]
    assert load_params(ROOT / "params.yaml").verifier.revision is None


def test_a_check_takes_less_than_a_second_of_processor_time(tmp_path: Path) -> None:
    """From the start of Python to its end, as DVC runs it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "stages.check", "params.yaml", "dvc.yaml", str(tmp_path / "check.txt")]
    subprocess.run(command, cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_a_missing_file_says_where_to_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="project's top folder"):
        load_params(tmp_path / "params.yaml")


def test_params_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_params(ROOT / "params.yaml").train.epochs = 7  # type: ignore[misc]
