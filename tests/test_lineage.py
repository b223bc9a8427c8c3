"""A draft knows its verifier; damage and a wrong verifier are refused; what is written is what is read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.lineage import (
    FORMAT,
    GitState,
    Lineage,
    Origin,
    PromptsFacts,
    SamplesFacts,
    StageRecord,
    StatesFacts,
    check_draft,
    draft_digests,
    prompts_digest,
    public_name,
    public_settings,
    read_lineage,
    samples_digest,
    vocabulary_facts,
    write_lineage,
)
from eagle3.origin import collect_origin, read_lock, recorded_settings
from eagle3.params import load_params
from tests.test_tokens import IDENTITY

PARAMS = load_params(Path(__file__).parent.parent / "params.yaml")
LINEAGE = Lineage(
    format=FORMAT,
    draft={"config.json": "a" * 64, "model.safetensors": "b" * 64},
    vocabulary=vocabulary_facts([0, 2, 5], 100, 0.9),
    verifier=IDENTITY,
    base_model="Qwen/Qwen3-8B",
    license="apache-2.0",
    hidden_states=StatesFacts("c" * 64, 2, 1000, "bfloat16", "vllm 0"),
    tokens=SamplesFacts(3, 40, 20, samples_digest([("p", "d", "train")])),
    prompts=PromptsFacts(3, prompts_digest(["p"])),
    train=recorded_settings(PARAMS.train.model_dump()),
    training={"train_samples": 3, "expected_acceptance_length": 1.5},
    origin=Origin(
        {"torch": "2"},
        GitState("f" * 40, ("params.yaml",)),
        {"generate": recorded_settings(PARAMS.generate.model_dump())},
        {"generate": StageRecord("1" * 64, {"data/prompts/train.parquet": "2" * 32}, {"data/responses": "3" * 32})},
    ),
    imported=None,
)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    write_lineage(folder, replace(LINEAGE, draft=draft_digests(folder)))
    return folder


def test_a_draft_fits_its_own_verifier(draft: Path) -> None:
    check_draft(draft, IDENTITY)


def test_what_is_written_is_what_is_read(draft: Path) -> None:
    assert read_lineage(draft) == replace(LINEAGE, draft=draft_digests(draft))


def test_another_verifier_is_refused(draft: Path) -> None:
    with pytest.raises(ValueError, match="was trained for verifier dddddd"):
        check_draft(draft, replace(IDENTITY, digest="f" * 64))


def test_changed_weights_are_refused(draft: Path) -> None:
    (draft / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(ValueError, match="differs from its lineage"):
        check_draft(draft, IDENTITY)


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"verifier": 3}'])
def test_a_missing_or_foreign_lineage_is_named(draft: Path, content: str | None) -> None:
    (draft / "lineage.json").unlink()
    if content is not None:
        (draft / "lineage.json").write_text(content)
    for read in (lambda: check_draft(draft, IDENTITY), lambda: read_lineage(draft)):
        with pytest.raises(ValueError, match=r"lineage\.json"):
            read()


def test_digests_of_sets_do_not_depend_on_the_order_and_see_every_part() -> None:
    samples = [("a" * 64, "1", "train"), ("b" * 64 + "-1", "2", "validation")]
    assert samples_digest(samples) == samples_digest(samples[::-1])
    for other in (samples[:1], [(*samples[0][:2], "validation"), samples[1]], [("a" * 64, "3", "train"), samples[1]]):
        assert samples_digest(other) != samples_digest(samples)
    assert prompts_digest(["a" * 64, "a" * 64 + "-1"]) == prompts_digest(["a" * 64 + "-2"])
    assert prompts_digest(["a" * 64]) != prompts_digest(["b" * 64])


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("bundled:smollm2-135m-think", "bundled:smollm2-135m-think"),
        ("models/mine", "models/mine"),
        ("/home/somebody/models/mine", "mine"),
        ("~/models/mine", "mine"),
        ("../models/mine", "mine"),
    ],
)
def test_names_lose_the_folders_of_this_machine(place: str, told: str) -> None:
    assert public_name(place) == told


def test_settings_lose_places_and_addresses_and_nothing_else() -> None:
    sources = {"sources": [{"path": "/home/me/a.jsonl", "name": "a"}], "seed": 0}
    assert public_settings(sources) == {"sources": [{"path": "a.jsonl", "name": "a"}], "seed": 0}
    told = recorded_settings(
        {"endpoints": ["http://10.0.0.1"], "chat_template_kwargs": {"mode": "/think"}, "top_p": 1.0}
    )
    assert told == {"chat_template_kwargs": {"mode": "/think"}, "top_p": 1.0}


def test_a_damaged_lock_is_told(tmp_path: Path) -> None:
    for text in ("<<<<<<< HEAD\nstages:\n=======\n", "[]", "stages: 3", "a: [", ""):
        with pytest.raises(ValueError, match=r"^dvc\.lock: not readable"):
            read_lock(text)


def test_the_origin_goes_back_as_far_as_the_lock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lock = {
        "stages": {
            "prompts": {"outs": [{"path": "data/prompts/train.parquet", "md5": "1"}]},
            "extract": {
                "deps": [
                    {"path": "data/tokens", "md5": "2.dir"},
                    {"path": "eagle3/a.py", "md5": "3"},
                    {"path": "data/check.txt", "md5": "4"},
                ],
                "params": {"params.yaml": {"extract": {"ray_address": "10.0.0.1:1"}, "engine": {"extra_args": {}}}},
                "outs": [{"path": "data/hidden_states", "md5": "5.dir"}, {"path": "data/metrics/x.json", "md5": "6"}],
            },
        }
    }
    Path("dvc.lock").write_text(json.dumps(lock))
    found = collect_origin(Path("data/hidden_states"))
    assert found.stages["extract"].deps == {"data/tokens": "2.dir"}
    assert found.stages["extract"].outs == {"data/hidden_states": "5.dir"}
    assert found.stages.keys() == {"extract"} and found.params == {"extract": {}}
    assert found.packages.keys() >= {"python", "torch", "eagle3"}
    assert collect_origin(tmp_path / "elsewhere").stages == {}
