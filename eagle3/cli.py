"""The `eagle3` command: what the pipeline made, in a few lines, and the command that serves it."""

import json
import shlex
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from eagle3.console import guarded
from eagle3.pager import Color, print_paged, wants_color
from eagle3.params import Params, load_params
from eagle3.sample_view import View, Words, matching_samples, one_sample, show_sample
from eagle3.serving.engine import GIB, runs_on_cpu
from eagle3.tables import count_parts
from eagle3.verifier import load_tokenizer, locate_verifier

METRICS = Path("data/metrics")
DRAFT = Path("data/draft")
TOKENS = Path("data/tokens")

ParamsPath = Annotated[Path, typer.Option("--params", help="The settings of the run.")]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="EAGLE-3 draft models trained on what the verifier itself writes. The pipeline itself is run by `dvc repro`.",
)


@app.command()
@guarded
def summary(params_path: ParamsPath = Path("params.yaml")) -> None:
    """Show what the last `dvc repro` made: rows, tokens, acceptance length, speed-up, and how to serve the draft."""
    params = load_params(params_path)
    made = {
        name: _metrics(name) for name in ("prompts", "generate", "reconstruct_tokens", "extract", "train", "evaluate")
    }
    typer.echo("\n".join(summary_lines(made, params)))
    typer.echo("\nServe the verifier with this draft:\n\n  " + serve_command(params, locate_verifier(params.verifier)))


@app.command()
@guarded
def inspect(
    folder: Annotated[str | None, typer.Argument(help=f"{TOKENS} unless given.", show_default=False)] = None,
    row: Annotated[
        str | None, typer.Argument(help="A number from 1, a sample id or its beginning; without it all.")
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="At most so many samples.")] = None,
    source: Annotated[str | None, typer.Option(help="Only samples of this source.")] = None,
    category: Annotated[str | None, typer.Option(help="Only samples of this category.")] = None,
    truncated: Annotated[
        Literal["thinking", "answer"] | None, typer.Option(help="Only samples that the token budget cut off there.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="A line for each token: place, id, text.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Long samples whole.")] = False,
    color: Annotated[Color, typer.Option(help="auto: on a terminal, unless NO_COLOR is set.")] = "auto",
    params_path: ParamsPath = Path("params.yaml"),
) -> None:
    """Read samples of data/tokens: what is masked, the thinking, the answer, special tokens, what ended each part."""
    tokens, row = folder_and_row(folder, row)
    asked = {"source": source, "category": category, "truncated_in": truncated}
    wanted = {name: value for name, value in asked.items() if value is not None}
    if row is not None and (wanted or first):
        raise ValueError(
            f"row {row} is one sample; leave it out to choose by --first, --source, --category, --truncated"
        )
    total = count_parts(tokens)
    samples = iter([one_sample(tokens, row)]) if row is not None else matching_samples(tokens, wanted)
    view = View(Words(load_tokenizer(load_params(params_path).verifier)), wants_color(color), ids, whole)
    print_paged(show_sample(number, total, sample, view) for number, sample in islice(samples, first))


def folder_and_row(folder: str | None, row: str | None) -> tuple[Path, str | None]:
    """The arguments of `eagle3 inspect`, where a row may stand alone."""
    if folder is not None and row is None and "/" not in folder and not Path(folder).is_dir():
        return TOKENS, folder
    return TOKENS if folder is None else Path(folder), row


def summary_lines(made: dict[str, Any], params: Params) -> list[str]:
    """The summary as lines; numbers come from the metric files alone."""
    tokens, states, train, evaluate = made["reconstruct_tokens"], made["extract"], made["train"], made["evaluate"]
    speed = f"{evaluate['tokens_per_second_draft']:.0f} against {evaluate['tokens_per_second_plain']:.0f} tokens/s"
    rows = {
        "verifier": params.verifier.model,
        "prompts": f"{made['prompts']['rows_out']:,}, of which {made['generate']['rows_out']:,} answered for training",
        "tokens": f"{tokens['tokens']:,}, of which {tokens['loss_tokens']:,} written by the verifier",
        "hidden states": f"{states['bytes'] / 2**20:,.0f} MiB, verifier-head agreement {states['head_agreement']:.4f}",
        "training": f"{train['steps']:,} steps, draft vocabulary {train['draft_vocab_size']:,}, "
        f"promised acceptance length {train['expected_acceptance_length']:.2f}",
        "acceptance length": f"{evaluate['acceptance_length']:.2f} at "
        f"{params.evaluate.num_speculative_tokens} speculative tokens, on {evaluate['num_prompts']} held-out prompts",
        "speed-up": f"{evaluate['speedup']:.2f}x at batch size {params.evaluate.batch_size} ({speed})",
        "draft": str(DRAFT),
    }
    return [f"{name + ':':20}{text}" for name, text in rows.items()]


def serve_command(params: Params, verifier: Path) -> str:
    """A shell command that serves the verifier with the draft on this machine, as it was evaluated."""
    near = verifier.relative_to(Path.cwd()) if verifier.is_relative_to(Path.cwd()) else verifier
    python = Path(sys.executable)
    speculative = {
        "method": "eagle3",
        "model": str(DRAFT),
        "num_speculative_tokens": params.evaluate.num_speculative_tokens,
    }
    words = [str(python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python)]
    words += ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "8000"]
    words += ["--model", str(near), "--served-model-name", params.verifier.model.rpartition("/")[2]]
    words += ["--dtype", params.verifier.dtype, "--max-model-len", str(params.verifier.max_model_len)]
    if params.verifier.chat_template:
        words += ["--chat-template", params.verifier.chat_template]
    words += ["--enforce-eager"] if params.engine.enforce_eager else []
    if runs_on_cpu():  # else vLLM wants nearly all of the machine's memory for itself
        words += ["--kv-cache-memory-bytes", str(int(params.engine.cpu_kv_cache_gib * GIB))]
    return shlex.join([*words, "--speculative-config", json.dumps(speculative)])


def _metrics(stage: str) -> dict[str, Any]:
    path = METRICS / f"{stage}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is not there yet; `dvc repro` makes it") from None
    return found


def main() -> None:
    """Entry point of the `eagle3` command."""
    app()


if __name__ == "__main__":
    main()
