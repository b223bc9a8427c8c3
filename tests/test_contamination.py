"""Training prompts that repeat evaluation prompts are found whatever their spelling, counted and listed."""

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from eagle3 import schemas
from eagle3.contamination import Contamination, runs_of_words
from eagle3.tables import Row, read_table
from stages.prompts import prompts

PROJECT = Path(__file__).parent.parent
TEST = "A farmer has 17 sheep and buys 5 more at the market on Monday. How many sheep does the farmer have now?"


def row(text: str, name: str = "a", **fields: Any) -> Row:
    messages = [{"role": "system", "content": TEST}, {"role": "user", "content": text}]
    return {"prompt_id": name, "split": "train", "source": "s", "messages": messages, **fields}


def shares(evaluation: str, *training: str) -> list[float]:
    search = Contamination(words=8, share=0.5)
    search.learn([row(evaluation, "e")])
    return [found["share"] for found in search.overlaps(row(text) for text in training)]


@pytest.mark.parametrize(
    "text",
    [
        TEST,
        TEST.upper().replace(",", " ,").replace(".", " ."),
        "Please solve this:\n\n" + TEST.replace(" ", "  ") + "\nThink step by step.",
    ],
)
def test_case_spacing_and_frames_hide_nothing(text: str) -> None:
    assert shares(TEST, text) == [1.0]


def test_half_of_it_is_enough_and_less_is_not() -> None:
    words = TEST.split()
    assert shares(TEST, " ".join(words[:15])) == [pytest.approx(8 / 15)]
    assert shares(TEST, " ".join(words[:14])) == []


def test_what_many_prompts_begin_with_is_no_repetition() -> None:
    frame = "Answer the following question as briefly and as precisely as you possibly can: "
    assert shares(frame + "what is the tallest mountain on the continent of Africa and who climbed it first?",
                  frame + "how do I bake a loaf of bread without any yeast in a small oven at home?") == []  # fmt: skip


def test_short_prompts_must_be_there_whole() -> None:
    assert shares("What is love?", "what is  LOVE") == [1.0]
    assert shares("What is love?", "What is love and what is it good for, in your opinion?") == []
    assert shares("?!", "?!") == []
    assert runs_of_words("", 8) == set()


def test_the_stage_counts_and_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = [f"Name {n} things that one takes along on a hike of {n} days, and why." for n in range(30)]
    files = {"train": [*fresh, TEST + " Explain."], "test": [TEST, "Who wrote the oldest cookbook that is still kept?"]}
    settings = YAML(typ="safe").load(PROJECT / "params.yaml")
    (template,) = settings["prompts"]["sources"]
    settings["prompts"]["sources"] = []
    for name, texts in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        split = "evaluation" if name == "test" else "train"
        settings["prompts"]["sources"].append(template | {"path": f"{name}.jsonl", "name": name, "split": split})
    YAML().dump(settings, Path("params.yaml"))
    prompts(Path("out"), Path("metrics.json"), Path("params.yaml"))
    counted = json.loads(Path("metrics.json").read_text())["contamination"]
    assert counted == {"training_prompts": 1, "evaluation_prompts": 1}
    (listed,) = read_table(Path("out/contamination.parquet"), schemas.CONTAMINATION)
    assert (listed["text"], listed["evaluation_text"], listed["share"]) == (TEST + " Explain.", TEST, 1.0)
    assert "1 training prompts repeat 1 evaluation prompts" in capfd.readouterr().err
