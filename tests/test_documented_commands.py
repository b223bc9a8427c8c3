"""Every command that README and the pages show is run here in a finished project, or parsed by the program's own parser
and named in NOT_RUN with the reason."""

import argparse
import importlib
import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
import typer
from dvc.cli import DvcParserError
from dvc.cli.parser import get_main_parser
from packaging.requirements import Requirement
from pip._internal.commands import create_command
from ruamel.yaml import YAML
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.params import load_params
from eagle3.serving.engine import engine_arguments
from tests.documented_commands import PAGES, ROOT, commands, commands_of, defined_tests, inline_commands
from tests.lineage_project import commit, dvc, make_chain
from tests.test_comparison import evaluated

METRICS = Path("data/metrics/evaluate.json")

BY_HAND = "of the shell"
DOWNLOADS = "downloads"
RUNS_ALL = "runs all stages with an engine: `test_all_code_is_that_of_the_wheel`"
SERVES = "an engine until Ctrl-C: `test_the_draft_is_served_until_ctrl_c`"
RETRAINS = "trains: `test_an_experiment_reruns_only_what_reads_the_setting`"
MINUTES = "takes minutes to hours; its arithmetic is tested in tests/test_benchmarks.py"
GPUS = "needs GPUs"
CLUSTER = "needs a cluster"

#: What is not run here, and why.
NOT_RUN = {
    "git clone <this repository> && cd <its folder>": DOWNLOADS,
    "make demo": RUNS_ALL,
    "make docs": "`test_the_site_builds_without_a_warning`",
    "make test": "all tests, this one among them",
    "make test-all": "all tests, this one among them",
    "make check": "these tests and the linters",
    "source .venv/bin/activate": BY_HAND,
    "cd drafts": BY_HAND,
    "cd kimi": BY_HAND,
    "cd /shared/my-drafts && source .venv/bin/activate": BY_HAND,
    "export EAGLE3_WORK_DIR=/shared/my-drafts/.work HF_HOME=/shared/hf": BY_HAND,
    "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)": BY_HAND,
    "export RAY_ADDRESS=$head:6379": BY_HAND,
    "head=$(hostname --ip-address | cut -d' ' -f1)": BY_HAND,
    "sleep 20": BY_HAND,
    "pip install -e '.[ray]'": DOWNLOADS,
    "pip install 'eagle3[gpu]'": DOWNLOADS,
    "dvc exp run -S train.learning_rate=5e-4": RETRAINS,
    "dvc exp run -S train.epochs=3": RETRAINS,
    "dvc exp run -S train.nproc=4 -S train.gradient_accumulation=4": "`test_two_processes_train_what_one_does`",
    "dvc exp run -S train.nproc=4 -S train.gradient_accumulation=4 -S train.sharding=fsdp": (
        "`test_sharded_or_not_they_train_what_one_does`"
    ),
    "eagle3 serve": SERVES,
    "eagle3 serve --port 8000": SERVES,
    "eagle3 serve --draft back --port 8000 --num-speculative-tokens 4": SERVES,
    "eagle3 serve -- --reasoning-parser qwen3": SERVES,
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '"
    '{"max_tokens": 64, "model": "bundled:smollm2-135m-think", "messages": [{"role": "user", '
    '"content": "Name two rivers of France."}]}\'': SERVES,
    "eagle3 estimate --probe 64": "two engine starts: `test_a_probe_measures_all_three_rates_and_leaves_nothing`",
    "eagle3 init kimi --verifier moonshotai/Kimi-K2.5 --revision 54383e83fa343a1331754112fb9e3410c55efa2f "
    "--prompts open-perfectblend.parquet -S verifier.trust_remote_code=true": (
        "downloads; `test_a_hub_model_is_pinned_to_its_commit_and_no_weights_are_downloaded`"
    ),
    "python -m benchmarks.gsm8k --train TRAIN.jsonl --test TEST.jsonl": MINUTES,
    "python -m benchmarks.gsm8k --train gsm8k-train.jsonl --test gsm8k-test.jsonl": MINUTES,
    "python -m benchmarks.train_step": MINUTES,
    "python -m benchmarks.draft_quality --train TRAIN.jsonl --test TEST.jsonl": MINUTES,
    "python -m benchmarks.generate": MINUTES,
    "python -m benchmarks.reconstruct": MINUTES,
    "python -m benchmarks.record": MINUTES,
    "python -m benchmarks.store": MINUTES,
    "python -m benchmarks.increment": MINUTES,
    "python -m benchmarks.scale": MINUTES,
    "python -m benchmarks.compression": MINUTES,
    "python -m benchmarks.evaluate PROJECT": MINUTES,
    "python -m experiments.pivot --train ... --test ... --folder DIR": MINUTES,
    "python -m experiments.pivot --train gsm8k-train.jsonl --test gsm8k-test.jsonl --folder DIR": MINUTES,
    'srun --nodes=1 --ntasks=1 -w "$SLURMD_NODENAME" env -u RAY_ADDRESS ray start --head --node-ip-address="$head" '
    "--port=6379 --include-dashboard=false --block &": CLUSTER,
    'srun --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 --exclude="$SLURMD_NODENAME" env -u RAY_ADDRESS ray start '
    '--address="$head:6379" --block &': CLUSTER,
    "ray status": CLUSTER,
    "srun --nodes=4 --ntasks-per-node=1 bash -c 'VLLM_API_KEY=$EAGLE3_API_KEY python -m "
    "vllm.entrypoints.openai.api_server --model /shared/models/my-verifier --served-model-name my-verifier "
    '--generation-config vllm --host "$(hostname)" --port 8000 --tensor-parallel-size 8\' &': CLUSTER,
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 --rdzv-id draft-1 "
    "--shutdown-timeout 300 -m stages.train data/hidden_states data/verifier.json data/draft data/metrics/train.json "
    "data/plots/train params.yaml": "needs two machines: `test_two_machines_join_by_torchrun`",
}

#: Pages whose commands are all run by a test of their own, which reads them there.
RUN_ELSEWHERE = {ROOT / "docs/experiments.md": "tests/test_experiments.py"}

#: What is run in the project, in this order: the command as it is shown, and a word that it must print.
RUN = {
    "dvc push": "",
    "dvc repro": "up to date",
    "dvc repro prompts": "up to date",
    "dvc repro extract": "up to date",
    "dvc dag": "reconstruct-tokens",
    "dvc metrics show": "evaluate.json",
    "dvc plots show": "index.html",
    "dvc exp show": "workspace",
    "eagle3 report": "report.html",
    "eagle3 report --against my-experiment": "report.html",
    "eagle3 inspect": "sample 1 of 24",
    "eagle3 inspect --first 3": "sample 3 of 24",
    "eagle3 compare main my-experiment": "all prompts",
    "eagle3 compare HEAD <its name>": "all prompts",
    "eagle3 summary": "speed-up",
    "eagle3 doctor": "packages",
    "eagle3 lineage": "prompt file",
    "eagle3 lineage --check": "proven",
    "eagle3 lineage --remote": "agrees",
    "eagle3 lineage main": "hidden states",
    "eagle3 lineage received/": "hidden states",
    "eagle3 lineage --json": '"verifier"',
    "eagle3 lineage [DRAFT | PROJECT | REVISION | EXPERIMENT]": "hidden states",
    "eagle3 card": "acceptance_length",
    "eagle3 export data/draft OUT --format plain": "model.safetensors",
    "eagle3 export data/draft kimi-k2.5-eagle3 --format plain": "model.safetensors",
    "eagle3 export data/draft shared --format plain": "config.json",
    "eagle3 export data/draft shared --format speculators": "config.json",
    "eagle3 import shared back": "its own lineage",
    "eagle3 serve --print": "--speculative-config",
    "eagle3 verify": "all whole",
    "eagle3 verify data/hidden_states": "all whole",
    "eagle3 verify --remote": "all whole",
    "eagle3 verify --remote --read": "all whole",
    "eagle3 verify --remote --repair": "all whole",
    "eagle3 estimate": "states",
    "eagle3 estimate --rows 10000 --prompt-tokens 500 --answer-tokens 2500 --hidden-size 7168 --aux-layers 3 --gpus 8 "
    "--price-per-hour 3 --generate-rate 6000 --record-rate 20000 --train-rate 20000": "as asked",
    "eagle3 work du": "why it stays",
    "eagle3 work gc": "would be freed",
    "eagle3 init DIR --verifier Qwen/Qwen3-8B --prompts questions.jsonl": "dvc repro",
    "eagle3 init drafts --verifier Qwen/Qwen3-8B --prompts questions.jsonl": "dvc repro",
}
#: Exit codes other than 0, where the machine decides: room on its disk.
MAY_FAIL = {command: {0, 1} for command in RUN if command.startswith("eagle3 estimate")}


def shown() -> set[str]:
    return {command for page in PAGES if page not in RUN_ELSEWHERE for command in commands(page)}


def test_every_command_is_run_or_named_with_a_reason() -> None:
    assert len(shown()) > 80
    assert shown() - RUN.keys() - NOT_RUN.keys() == set(), "run these, or say in NOT_RUN why not"
    assert RUN.keys() - shown() == NOT_RUN.keys() - shown() == set(), "no page has these any more"
    assert RUN.keys().isdisjoint(NOT_RUN)


@pytest.mark.parametrize("page", RUN_ELSEWHERE, ids=lambda page: page.stem)
def test_a_page_of_its_own_is_read_by_its_test(page: Path) -> None:
    assert page.name in (ROOT / RUN_ELSEWHERE[page]).read_text()


def test_reasons_name_tests_that_are_there() -> None:
    named = {name for reason in NOT_RUN.values() for name in re.findall(r"`(test_\w+)`", reason)}
    assert named <= defined_tests()


@pytest.mark.parametrize(
    ("paragraph", "found"),
    [
        ("eagle3 verify   # reads\n# a comment\ndvc push", ["eagle3 verify", "dvc push"]),
        ("eagle3 estimate --rows 3 \\\n    --gpus 8", ["eagle3 estimate --rows 3 --gpus 8"]),
        ('curl -d \'{"a": 1,\n  "b": 2}\'', ['curl -d \'{"a": 1, "b": 2}\'']),
        ("$ eagle3 work du\nwhat it prints", ["eagle3 work du"]),
        ("rows    569\ntokens  109,198", []),
        ("nproc --all", ["nproc --all"]),
    ],
)
def test_commands_are_found(paragraph: str, found: list[str]) -> None:
    assert commands_of(paragraph) == found


def test_a_command_among_other_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="in one paragraph, first: rows 569"):
        commands_of("eagle3 estimate\nrows 569")


@pytest.fixture(scope="module")
def project(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder: a project with a whole chain and an evaluation, and a branch with another one."""
    folder = tmp_path_factory.mktemp("documented")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the draft is tiny
    with pytest.MonkeyPatch.context() as patch:
        made = make_chain(folder / "project", tiny_verifier, patch)
        text = Path("params.yaml").read_text().replace("data/prompts/starter.jsonl", "mine.jsonl")
        Path("params.yaml").write_text(re.sub(r"endpoints:.*\n  - http.*\n", "endpoints: []\n", text))
        yaml = YAML(typ="safe", pure=True)
        pipeline = yaml.load(Path("dvc.yaml"))
        pipeline["stages"]["evaluate"] |= {"outs": ["data/evaluation"], "metrics": [{str(METRICS): {"cache": False}}]}
        curve = "data/plots/plots/metrics/train/loss.tsv"
        yaml.dump(pipeline | {"plots": [{"loss": {"x": "step", "y": {curve: "loss"}}}]}, Path("dvc.yaml"))
        add_evaluation(folder / "first", 0.0)
        subprocess.run(["git", "branch", "--quiet", "-M", "main"], check=True)
        subprocess.run(["git", "checkout", "--quiet", "-b", "my-experiment"], check=True)
        add_evaluation(folder / "second", 0.2)
        subprocess.run(["git", "checkout", "--quiet", "main"], check=True)
        dvc("checkout", "--force")
        shutil.copytree("data/draft", "received")
        Path("questions.jsonl").write_text("".join(f'{{"prompt": "question {n}?"}}\n' for n in range(40)))
        yield made
    torch.set_num_threads(threads)


@pytest.fixture
def store_of_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(project / ".work"))


def add_evaluation(folder: Path, better: float) -> None:
    """Evaluate the draft, in a simulation, and commit what is there then."""
    shutil.rmtree("data/evaluation", ignore_errors=True)
    shutil.copytree(evaluated(folder, better, 3) / "data/evaluation", "data/evaluation")
    length, speed = 1.5 + better, {"tokens_per_second_plain": 40.0, "tokens_per_second_draft": 48.0, "speedup": 1.2}
    counts = {"acceptance_length": length, "acceptance_length_counted": length, "num_prompts": 40, "num_drafts": 2400}
    best = {
        "best_num_speculative_tokens": 2,
        "best_by_batch_size": {"1": 2},
        "speedup_by_batch_size": {"1": {"2": 1.2}},
    }
    interval = {"acceptance_length_low": length - 0.1, "acceptance_length_high": length + 0.1}
    setting = {"acceptance_length": length, "num_drafts": 2400} | speed
    metrics = {
        "prompts": {"rows_out": 24},
        "generate": {"rows_out": 24},
        "reconstruct_tokens": {"rows_out": 24, "tokens": 900, "loss_tokens": 400, "thinking_share": 0.0, "length": {}}
        | {"truncated_in_thinking": 0, "truncated_in_answer": 0},
        "extract": {"bytes": 1e6, "head_agreement": 1.0},
        "evaluate": counts | speed | best | interval | {"settings": {"2_tokens_batch_1": setting}},
    }
    for stage, numbers in metrics.items():
        METRICS.with_stem(stage).write_text(json.dumps(numbers))
    dvc("commit", "--force", "prompts", "generate", "evaluate")
    subprocess.run(["git", "add", "--force", METRICS], check=True)
    commit(f"evaluated {better}")


@pytest.mark.usefixtures("store_of_the_project")
@pytest.mark.parametrize("command", RUN)
def test_it_runs(command: str, tiny_verifier: Path) -> None:
    words = shlex.split(real(command, tiny_verifier))
    if "export" in words:
        shutil.rmtree(words[words.index("export") + 2], ignore_errors=True)
    if words[0] == "eagle3":
        done = CliRunner().invoke(app, words[1:])
        code, printed = done.exit_code, f"{done.output}{done.exception or ''}"
    else:
        ran = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        code, printed = ran.returncode, ran.stdout
    assert code in MAY_FAIL.get(command, {0}), printed
    assert RUN[command] in printed, printed


def real(command: str, verifier: Path) -> str:
    """The command with a folder, a model and a name in place of what stands for them."""
    command = re.sub(r" \[[^]]*\]", "", command)
    command = command.replace("Qwen/Qwen3-8B", str(verifier))
    return re.sub(r"<its name>", "my-experiment", command)


@pytest.mark.parametrize(
    "command", [*NOT_RUN, *sorted({line for page in RUN_ELSEWHERE for line in commands(page)} - NOT_RUN.keys())]
)
def test_its_options_exist(command: str) -> None:
    for part in re.split(r"&&|&$", re.sub(r"<[^>]+>|\$\(+[^)]*\)+", "something", command)):
        check_words(shlex.split(part))


@pytest.mark.parametrize("command", sorted({span for page in PAGES for span in inline_commands(page)}))
def test_what_a_sentence_names_exists(command: str) -> None:
    """Programs, subcommands and options; arguments may be left out there."""
    words = shlex.split(re.sub(r"<[^>]+>|'(?=s )", "something", command))
    if words[0] in ("make", "python"):
        check_words(words)
    else:
        options = [word for word in words if word.startswith("-") and word != "--"]
        told = help_of(tuple(word for word in words if not word.startswith("-")))
        assert all(re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", told) for option in options), told


def check_words(words: list[str]) -> None:
    """Raise where the program's own parser does not take the words. Programs that are the shell's own pass."""
    while words and (re.match(r"\w+=", words[0]) or words[0] in ("env", "srun")):
        words = words[1:] if words[0] not in ("env", "srun") else after_options(words[1:])
    if words:
        CHECKS[words[0]](words[1:])


def after_options(words: list[str]) -> list[str]:
    """What follows the options of `env` and `srun`: the command that they start."""
    start = next(place for place, word in enumerate(words) if word in CHECKS)
    skipped = zip(words[:start], ["", *words], strict=False)
    assert all(word.startswith("-") or word == "env" or before in ("-u", "-w") for word, before in skipped)
    return words[start:]


def check_eagle3(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("eagle3", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        assert command is not None
        context = command.make_context(name, list(words), parent=context)


def check_dvc(words: list[str]) -> None:
    get_main_parser().parse_args(words)


def check_make(words: list[str]) -> None:
    done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_git(words: list[str]) -> None:
    told = subprocess.run(["git", words[0], "-h"], capture_output=True, text=True, check=False)
    assert f"usage: git {words[0]}" in told.stdout + told.stderr


def check_python(words: list[str]) -> None:
    assert words[0] == "-m"
    if words[1] == "vllm.entrypoints.openai.api_server":
        params = load_params(ROOT / "params.yaml")
        ours = engine_arguments(params.verifier, params.engine, Path("model")).keys()
        known = {f"--{name.replace('_', '-')}" for name in ours} | {"--served-model-name", "--generation-config"}
        assert {word for word in words if word.startswith("--")} <= known | {"--host", "--port"}
        return
    arguments = [re.sub(r"^\.\.\.$", "file.jsonl", word) for word in words[2:]]
    parsed = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *_: object) -> None:
        parsed(parser, arguments)
        raise Parsed

    module = importlib.import_module(words[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        with pytest.raises(Parsed):
            module.main()


class Parsed(Exception):
    """The words are understood; nothing else is wanted."""


def check_pip(words: list[str]) -> None:
    _, (wanted,) = create_command(words[0]).parse_args([word for word in words[1:] if word != "-e"])
    extras = Requirement(wanted.replace(".[", "eagle3[")).extras
    assert extras <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def check_ray(words: list[str]) -> None:
    group = importlib.import_module("ray.scripts.scripts").cli
    group.commands[words[0]].make_context(words[0], words[1:])


def check_torchrun(words: list[str]) -> None:
    torch.distributed.run.get_args_parser().parse_args(words)


def check_curl(words: list[str]) -> None:
    assert json.loads(words[words.index("-d") + 1])["messages"]


def check_bash(words: list[str]) -> None:
    assert words[0] == "-c"
    check_words(shlex.split(words[1]))


def check_nothing(_: list[str]) -> None:
    """The shell's own."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "eagle3": check_eagle3,
    "dvc": check_dvc,
    "make": check_make,
    "git": check_git,
    "python": check_python,
    "pip": check_pip,
    "ray": check_ray,
    "torchrun": check_torchrun,
    "curl": check_curl,
    "bash": check_bash,
    **dict.fromkeys(("cd", "source", "export", "sleep"), check_nothing),
}


@cache
def help_of(words: tuple[str, ...]) -> str:
    """What `words --help` prints; fails where there is no such command."""
    if words[0] == "eagle3":
        done = CliRunner().invoke(app, [*words[1:], "--help"])
        assert done.exit_code == 0, done.output
        return done.output
    with redirect_stdout(io.StringIO()) as told, redirect_stderr(told), pytest.raises(SystemExit) as ended:
        get_main_parser().parse_args([*words[1:], "--help"])
    assert not ended.value.code
    return told.getvalue()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("eagle3 verify --no-such-option", Exception),
        ("eagle3 no-such-command", Exception),
        ("eagle3 export data/draft OUT --format other", Exception),
        ("dvc exp run --no-such-option", DvcParserError),
        ("make no-such-target", AssertionError),
        ("python -m benchmarks.gsm8k --no-such-option", SystemExit),
        ("pip install 'eagle3[no-such-extra]'", AssertionError),
        ("no-such-program", KeyError),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command: str, error: type[BaseException]) -> None:
    with redirect_stderr(io.StringIO()), pytest.raises(error):
        check_words(shlex.split(command))
