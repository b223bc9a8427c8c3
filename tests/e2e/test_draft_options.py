"""Every form that a draft can have, as vLLM loads it: it drafts what our own draft proposes, in float32."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle3.acceptance import Setting
from eagle3.draft.export import CONFIG, WEIGHTS
from eagle3.draft.interchange import speculators_config
from eagle3.serving.speculative import Decoder, sampling_fields
from eagle3.sharing import Form
from eagle3.verifier import VerifierIdentity, identify_verifier
from tests.draft_data import verifier_params
from tests.draft_parity import equal_drafts
from tests.e2e.test_speculative import DEFAULT, ENGINE, STEPS, make_draft, prompts

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

#: Changes of `train`, auxiliary layers, the ids left out of the vocabulary (see make_draft), the format that is served.
FORMS: dict[str, tuple[dict[str, Any], list[int] | None, int, Form]] = {
    "latent": ({"num_layers": 2, "fc_norm": True, "norm_output": True}, None, 5, "plain"),
    "norms": (
        {"norm_before_residual": False, "fc_norm": True, "norm_output": True, "num_layers": 2},
        None,
        5,
        "plain",
    ),
    "one_layer_read": (
        {"num_layers": 4, "head_dim": 64, "sliding_window": 6, "norm_before_fc": True, "intermediate_size": 96},
        [4],
        0,
        "plain",
    ),
    "five_layers_read": (
        {
            "norm_before_residual": False, "norm_before_fc": True, "fc_norm": True, "norm_output": True,
            "intermediate_size": 96, "num_heads": 8, "num_kv_heads": 4, "num_layers": 2, "sliding_window": 6,
            "freeze_lm_head": False,
        },
        [1, 2, 3, 4, 5],
        3,
        "speculators",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_vllm_drafts_what_our_own_draft_proposes(request: pytest.FixtureRequest, tmp_path: Path, form: str) -> None:
    changes, aux_layer_ids, every, served_as = FORMS[form]
    folder: Path = request.getfixturevalue("tiny_kimi" if form == "latent" else "tiny_verifier")
    train = DEFAULT.train.model_copy(update=changes)
    draft = make_draft(folder, tmp_path / "draft", train, aux_layer_ids, every)
    asked, own = prompts(folder, 8), DEFAULT.evaluate.model_copy(update={"max_new_tokens": 24})
    verifier = verifier_params(folder, aux_layer_ids)
    identity = identify_verifier(verifier, DEFAULT.reasoning)
    served = as_speculators(draft, tmp_path / "served", identity) if served_as == "speculators" else draft
    with Decoder(verifier, ENGINE, folder, served, STEPS) as decoder:
        decoder.wait_until_ready()
        sampling = [sampling_fields(own, prompt, 100) for prompt in asked]
        answers = decoder.decode(asked, sampling, Setting(STEPS, len(asked)), 0).answers
    same = equal_drafts(folder, draft, answers, identity.aux_layer_ids, STEPS)
    assert same[0][1] > 50
    for place, (equal, compared) in enumerate(same):
        assert equal / compared >= 0.99, f"position {place + 1}: {equal} of {compared}"


def as_speculators(draft: Path, out: Path, verifier: VerifierIdentity) -> Path:
    """The draft as `eagle3 export --format speculators` writes it."""
    out.mkdir()
    config = speculators_config(json.loads((draft / CONFIG).read_text()), verifier, "nowhere/at-all", STEPS)
    (out / CONFIG).write_text(json.dumps(config))
    shutil.copyfile(draft / WEIGHTS, out / WEIGHTS)
    return out
