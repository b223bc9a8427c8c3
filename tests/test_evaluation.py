"""What an evaluation leaves behind can be read back, and its metrics follow from its steps."""

import json
from pathlib import Path

import pytest

from eagle3.acceptance import Answer, Decoded, Forward, Prompt, Row, Setting, Step
from eagle3.evaluation import evaluation_metrics, read_answers, write_evaluation, write_plots, write_run
from eagle3.params import load_params
from eagle3.serving.speculative import sampling_fields
from eagle3.tables import write_metrics
from eagle3.verifier import identify_verifier
from tests.draft_data import REASONING, verifier_params

PARAMS = load_params(Path(__file__).parent.parent / "params.yaml")
ASKED = [Setting(2, 1), Setting(2, 2), Setting(1, 1), Setting(1, 2)]


def decoded(setting: Setting, arm: str, number: int, seconds: float) -> Decoded:
    """A batch of 9 tokens for each prompt; with the draft in steps that accept all, none and all."""
    tokens = setting.num_speculative_tokens
    steps = []
    position = 1
    for accepted in (tokens, 0, tokens):
        steps.append(Step(position, [5] * tokens, accepted, accepted + 1))
        position += accepted + 1
    prompts = [Prompt(f"p{number}-{place}", "c", "s", [1, 2]) for place in range(setting.batch_size)]
    own = steps if arm == "draft" else []
    answers = [Answer(prompt, setting, arm, number, [5] * 9, "stop", seconds, own) for prompt in prompts]
    size = setting.batch_size
    forward = Forward(seconds / 9, size, size * (1 + (tokens if arm == "draft" else 0)))
    drafts = 3 * size if own else 0
    counters = {"drafts": drafts, "draft_tokens": drafts * tokens, "accepted_tokens": 2 * tokens * size if own else 0}
    counters |= {f"accepted_tokens_per_pos_{k + 1}": 2 * size if own else 0 for k in range(tokens)}
    return Decoded(setting, arm, answers, [forward] * 9, counters)


def whole_run(*, plain_once: bool = False) -> list[Decoded]:
    found = []
    for setting in ASKED:
        for number in range(4):
            if not plain_once or setting.num_speculative_tokens == 2:
                found.append(decoded(setting, "plain", number, 2.0))
            found.append(decoded(setting, "draft", number, 1.0))
    return found


@pytest.mark.parametrize("plain_once", [False, True])
def test_the_first_setting_is_on_top_and_all_are_there(tmp_path: Path, plain_once: bool) -> None:
    numbers = evaluation_metrics(whole_run(plain_once=plain_once), ASKED, [])
    assert numbers["acceptance_length"] == pytest.approx(7 / 3)
    assert (numbers["acceptance_rate_1"], numbers["acceptance_rate_2"]) == pytest.approx((2 / 3, 2 / 3))
    assert (numbers["num_prompts"], numbers["speedup"], numbers["speedup_median"]) == (4, 2.0, 2.0)
    assert set(numbers["settings"]) == {
        "2_tokens_batch_1",
        "2_tokens_batch_2",
        "1_tokens_batch_1",
        "1_tokens_batch_2",
    }
    assert all(found["speedup"] == 2.0 for found in numbers["settings"].values())
    assert numbers["settings"]["1_tokens_batch_2"]["acceptance_length"] == pytest.approx(5 / 3)
    assert numbers["best_num_speculative_tokens"] == 2
    assert numbers["speedup_by_batch_size"]["2"] == pytest.approx({"1": 2 * 5 / 3, "2": 2 * 7 / 3})
    assert numbers["vllm_counters"]["drafts"] == 3 * 4 * (1 + 2) * 2
    write_metrics(tmp_path / "metrics.json", numbers)  # finite numbers alone
    write_plots(tmp_path / "plots", numbers)
    drawn = json.loads((tmp_path / "plots/speedup_by_tokens.json").read_text())
    assert {row["batch_size"] for row in drawn} == {"batch 1", "batch 2"}


def test_answers_and_steps_come_back(tmp_path: Path) -> None:
    run = whole_run()
    write_evaluation(tmp_path, run, [])
    setting, answers = read_answers(tmp_path)
    assert setting == ASKED[0]
    wanted = [a for batch in run if batch.setting == setting and batch.arm == "draft" for a in batch.answers]
    assert answers == wanted


def test_a_folder_of_an_older_version_is_an_error_that_names_the_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"steps.parquet: no such file"):
        read_answers(tmp_path)


def test_the_run_says_what_decoded_and_how(tmp_path: Path, tiny_verifier: Path) -> None:
    identity = identify_verifier(verifier_params(tiny_verifier), REASONING)
    write_run(tmp_path / "run.json", identity, PARAMS.engine, PARAMS.evaluate)
    told: Row = json.loads((tmp_path / "run.json").read_text())
    assert told["engine"] == identity.engine
    assert told["engine_params"]["enforce_eager"] == PARAMS.engine.enforce_eager
    sent = sampling_fields(PARAMS.evaluate, Prompt("p", "c", "s", [1]), 100)
    assert told["sampling"].items() <= sent.items()
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} <= told["sampling"].keys()
    assert sent.keys() - told["sampling"].keys() == {"seed", "max_tokens", "detokenize"}
