"""Which draft is better, on the same prompts: between folders, Git revisions and DVC experiments, with verdicts."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from eagle3.acceptance import Answer, Decoded, Prompt, Setting, Step
from eagle3.cli import app
from eagle3.comparison import ALL, Difference, compare, find_side, read_side
from eagle3.evaluation import write_evaluation

PROMPTS = 40


def evaluated(folder: Path, better: float, seed: int, prompts: range = range(PROMPTS), ids: int = 5) -> Path:
    """An evaluation in which two tokens are drafted; prompts of category `easy` gain by `better`."""
    generator = np.random.default_rng(seed)
    answers = []
    for number in prompts:
        category = "easy" if number % 2 else "hard"
        rate = 0.3 + 0.4 * (number % 5) / 5 + (better if category == "easy" else 0)
        steps = [Step(1 + 3 * n, [7, 8], int(k), int(k) + 1) for n, k in enumerate(generator.binomial(2, rate, 60))]
        prompt = Prompt(f"p{number:03}", category, "s", [ids, number])
        answers.append(Answer(prompt, Setting(2, 1), "draft", number, [1] * 200, "length", 1.0, steps))
    (folder / "data/evaluation").mkdir(parents=True)
    write_evaluation(folder / "data/evaluation", [Decoded(Setting(2, 1), "draft", answers, [], {})], [])
    return folder


def verdicts(found: list[Difference]) -> dict[str, str]:
    return {difference.group: difference.verdict for difference in found}


def test_a_difference_is_called_one_where_it_is(tmp_path: Path) -> None:
    sides = [read_side(name, evaluated(tmp_path / name, gain, seed)) for seed, (name, gain) in enumerate(
        [("base", 0.0), ("better", 0.15), ("same", 0.0), ("worse", -0.15)]
    )]  # fmt: skip
    found = compare(sides)
    by_side = {name: verdicts([d for d in found if d.against == name]) for name in ("better", "same", "worse")}
    assert by_side["better"] == {ALL: "better", "easy": "better", "hard": "not distinguishable"}
    assert set(by_side["same"].values()) == {"not distinguishable"}
    assert by_side["worse"] == {ALL: "worse", "easy": "worse", "hard": "not distinguishable"}
    assert all(difference.prompts == (40 if difference.group == ALL else 20) for difference in found)


def test_only_prompts_that_both_answered_count(tmp_path: Path) -> None:
    one = read_side("one", evaluated(tmp_path / "one", 0, 1, range(30)))
    other = read_side("other", evaluated(tmp_path / "other", 0, 2, range(20, 50)))
    assert compare([one, other])[0].prompts == 10
    strange = read_side("strange", evaluated(tmp_path / "strange", 0, 2, range(100, 120)))
    with pytest.raises(ValueError, match="one and strange share no prompt; evaluate both on the same ones"):
        compare([one, strange])
    templated = read_side("templated", evaluated(tmp_path / "templated", 0, 2, range(30), ids=6))
    with pytest.raises(ValueError, match="asked the same prompts with other tokens"):
        compare([one, templated])


def run(folder: Path, *words: str) -> str:
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_revisions_and_experiments_are_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real project: the evaluation of a commit and that of an experiment, both gone from the workspace."""
    project = tmp_path / "project"
    for rate, gain in (("1", 0.0), ("2", 0.2)):
        evaluated(tmp_path / rate, gain, 3)
    project.mkdir()
    (project / "params.yaml").write_text("train:\n  rate: 1\n  seed: 0\n")
    (project / "copy.sh").write_text(
        f"mkdir -p data\ncp -r {tmp_path}/$(sed -n 's/.*rate: //p' params.yaml)/data/evaluation data/\n"
    )
    (project / "dvc.yaml").write_text(
        "stages:\n  evaluate:\n    cmd: sh copy.sh\n    params: [train]\n    outs: [data/evaluation]\n"
    )
    (project / ".gitignore").write_text("/data\n")
    for command in (
        "git init -q -b main .",
        "git config user.email a@b",
        "git config user.name a",
        "dvc init -q",
        "dvc config core.analytics false",
        "git add -A",
    ):
        run(project, *command.split())
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    run(project, "dvc", "repro", "-q")
    run(project, "git", "add", "-A")
    run(project, "git", "commit", "-qm", "base")
    run(project, "dvc", "exp", "run", "-q", "--name", "tuned", "-S", "train.rate=2")
    run(project, "git", "checkout", "-q", "--force", "main")
    run(project, "dvc", "checkout", "-q", "--force")
    monkeypatch.chdir(project)
    assert find_side("tuned").params == {"train.rate": 2, "train.seed": 0}
    told = CliRunner().invoke(app, ["compare", "main", "tuned"])
    assert told.exit_code == 0, told.output
    assert "tuned against main, acceptance length on the same prompts" in told.output
    assert [line.split()[-1] for line in told.output.splitlines() if line.startswith("  easy")] == ["better"]
    assert "train.rate: 1 | 2" in told.output
    assert "data/evaluation: " in told.output
    assert "train.seed" not in told.output
    data = json.loads(CliRunner().invoke(app, ["compare", ".", "tuned", "--json"]).output)
    assert data["differences"][0]["verdict"] == "better"
    assert data["params"] == {"train.rate": [1, 2]}
    unknown = run_failing("compare", "main", "nothing-of-that-name")
    assert "nothing-of-that-name is neither a folder nor a revision that was evaluated" in unknown


def run_failing(*words: str) -> str:
    told = CliRunner().invoke(app, list(words))
    assert told.exit_code == 1
    return told.output
