"""What the recording engine is started with."""

from pathlib import Path

import pytest

from eagle3.serving.recorder import recording_arguments
from tests.test_extract import IDENTITY
from tests.token_tables import write_params


@pytest.mark.parametrize("wanted", [{}, {"enable_prefix_caching": True, "speculative_config": {"method": "ngram"}}])
def test_e01_e17_the_engine_computes_every_token_whatever_the_settings_ask_for(
    tmp_path: Path, wanted: dict[str, object]
) -> None:
    """No prefix cache, no other speculation: states would be missing or those of another row."""
    params = write_params(tmp_path / "params.yaml", tmp_path, engine__extra_args=wanted)
    arguments = recording_arguments(params.verifier, params.engine, IDENTITY, tmp_path, {})
    assert arguments["enable_prefix_caching"] is False
    assert arguments["speculative_config"]["method"] == "extract_hidden_states"
    config = arguments["speculative_config"]["draft_model_config"]["hf_config"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5, 8]
    assert arguments["max_model_len"] == params.verifier.max_model_len + 1
