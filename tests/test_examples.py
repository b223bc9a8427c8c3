"""The example params fit the models that they are for; facts are those of the models' config.json."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from eagle3.consistency import check_together
from eagle3.estimate import ID_BYTES
from eagle3.model_facts import read_facts
from eagle3.params import Params, load_params
from eagle3.reasoning import PRESETS
from eagle3.serving.engine import GIB, has_latent_attention
from eagle3.verifier import choose_aux_layers
from examples.write import FOLDER, SHIPPED, examples

CONFIGS = Path(__file__).parent / "model_configs.json"  # of each model, what its config.json says of sizes
NAMES = ("kimi-k2.5", "llama-3.1-8b-instruct", "qwen3-8b")
GPU_BYTES = {"kimi-k2.5": 141 * 10**9, "llama-3.1-8b-instruct": 80 * 10**9, "qwen3-8b": 80 * 10**9}


def loaded(name: str) -> Params:
    return load_params(FOLDER / f"{name}.yaml")


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the config.json of the example's model."""
    name = request.node.callspec.params["name"]
    (tmp_path / "config.json").write_text(json.dumps(json.loads(CONFIGS.read_text())[name]))
    return tmp_path


def test_the_files_are_those_that_the_settings_make() -> None:
    """`python -m examples.write` after every change of params.yaml or of the settings."""
    written = {path.stem: path.read_text() for path in FOLDER.glob("*.yaml") if path.name != "settings.yaml"}
    assert written == examples()
    assert set(written) == set(NAMES)


def test_settings_name_only_what_differs() -> None:
    shipped = load_params(SHIPPED).model_dump()
    found: dict[str, dict[str, object]] = YAML(typ="safe", pure=True).load((FOLDER / "settings.yaml").read_text())
    for settings in found.values():
        keys = {key: key.split(".") for key in settings}
        assert not [key for key, (section, name) in keys.items() if shipped[section][name] == settings[key]]


@pytest.mark.parametrize("name", NAMES)
def test_they_load_strictly_and_fit_together(name: str) -> None:
    params = loaded(name)
    check_together(params)
    assert len(str(params.verifier.revision)) == 40
    assert params.reasoning.format in {*PRESETS, "none"}


@pytest.mark.parametrize("name", NAMES)
def test_they_fit_the_model(name: str, folder: Path) -> None:
    params, facts = loaded(name), read_facts(folder)
    assert params.verifier.max_model_len <= facts.positions
    assert params.verifier.dtype == facts.dtype
    assert len(choose_aux_layers(params.verifier.aux_layer_ids, facts.num_layers)) == 3
    assert facts.num_heads % params.engine.tensor_parallel_size == 0
    assert params.generate.max_new_tokens < params.verifier.max_model_len
    latent = has_latent_attention(folder)
    assert params.train.attention in (None, "latent" if latent else "heads")


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_request_fits_beside_the_weights(name: str, folder: Path) -> None:
    """On the GPUs that the settings say: weights, and the request with its states."""
    params, facts = loaded(name), read_facts(folder)
    weights = json.loads(CONFIGS.read_text())[name]["weight_bytes"]
    room = GPU_BYTES[name] * params.engine.tensor_parallel_size * params.engine.gpu_memory_utilization - weights
    assert params.verifier.max_model_len * facts.recorded_bytes(3, params.verifier.dtype) < room


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_sample_fits_a_shard_and_what_may_be_pending(name: str, folder: Path) -> None:
    params, facts = loaded(name), read_facts(folder)
    sample = params.verifier.max_model_len * (4 * facts.hidden_size * 2 + ID_BYTES)
    assert sample < params.extract.shard_max_mib * 2**20
    assert sample < params.extract.max_pending_mib * 2**20
    assert params.extract.max_pending_mib * 2**20 < 16 * GIB


def test_kimi_is_what_was_asked_for() -> None:
    params = loaded("kimi-k2.5")
    assert params.engine.tensor_parallel_size == params.train.nproc == 8
    assert (params.generate.max_new_tokens, params.generate.concurrency) == (8192, 200)
    assert params.prompts.sources[0].name == "open-perfectblend"
    assert params.train.attention == "latent"
    assert params.reasoning.format == "kimi-k2.5"
