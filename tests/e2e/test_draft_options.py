"""Every form that a draft can have, as vLLM loads it: it drafts what our own draft proposes, in float32."""

from pathlib import Path
from typing import Any

import pytest

from eagle3.acceptance import Setting
from eagle3.serving.speculative import Decoder, sampling_fields
from eagle3.verifier import identify_verifier
from tests.draft_data import verifier_params
from tests.draft_parity import equal_drafts
from tests.e2e.test_speculative import DEFAULT, ENGINE, STEPS, make_draft, prompts

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

FORMS: dict[str, tuple[dict[str, Any], list[int] | None, int]] = {
    "latent": ({"num_layers": 2, "fc_norm": True, "norm_output": True}, None, 5),
    "norms": ({"norm_before_residual": False, "fc_norm": True, "norm_output": True, "num_layers": 2}, None, 5),
    "sizes": (
        {"norm_before_fc": True, "intermediate_size": 96, "num_heads": 8, "num_kv_heads": 4, "freeze_lm_head": False},
        [1, 2, 3, 4, 5],
        0,
    ),
    "one_layer_read": ({"num_layers": 4, "head_dim": 64, "sliding_window": 6}, [4], 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_vllm_drafts_what_our_own_draft_proposes(request: pytest.FixtureRequest, tmp_path: Path, form: str) -> None:
    changes, aux_layer_ids, every = FORMS[form]
    folder: Path = request.getfixturevalue("tiny_kimi" if form == "latent" else "tiny_verifier")
    train = DEFAULT.train.model_copy(update=changes)
    draft = make_draft(folder, tmp_path / "draft", train, aux_layer_ids, every)
    asked, own = prompts(folder, 8), DEFAULT.evaluate.model_copy(update={"max_new_tokens": 24})
    verifier = verifier_params(folder, aux_layer_ids)
    with Decoder(verifier, ENGINE, folder, draft, STEPS) as decoder:
        decoder.wait_until_ready()
        sampling = [sampling_fields(own, prompt, 100) for prompt in asked]
        answers = decoder.decode(asked, sampling, Setting(STEPS, len(asked)), 0).answers
    layers = identify_verifier(verifier, DEFAULT.reasoning).aux_layer_ids
    same = equal_drafts(folder, draft, answers, layers, STEPS)
    assert same[0][1] > 50
    for place, (equal, compared) in enumerate(same):
        assert equal / compared >= 0.99, f"position {place + 1}: {equal} of {compared}"
