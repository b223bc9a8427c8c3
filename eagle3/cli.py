"""The `eagle3` command: what the pipeline made, in a few lines, and the command that serves it."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3.console import guarded
from eagle3.params import Params, load_params
from eagle3.serving.engine import GIB, runs_on_cpu
from eagle3.verifier import locate_verifier

METRICS = Path("data/metrics")
DRAFT = Path("data/draft")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="EAGLE-3 draft models trained on what the verifier itself writes. The pipeline itself is run by `dvc repro`.",
)


@app.callback()
def eagle3() -> None:
    """Keeps `eagle3 summary` a sub-command while it is the only one."""


@app.command()
@guarded
def summary(
    params_path: Annotated[Path, typer.Option("--params", help="The settings of the run.")] = Path("params.yaml"),
) -> None:
    """Show what the last `dvc repro` made: rows, tokens, acceptance length, speed-up, and how to serve the draft."""
    params = load_params(params_path)
    made = {
        name: _metrics(name) for name in ("prompts", "generate", "reconstruct_tokens", "extract", "train", "evaluate")
    }
    typer.echo("\n".join(summary_lines(made, params)))
    typer.echo("\nServe the verifier with this draft:\n\n  " + serve_command(params, locate_verifier(params.verifier)))


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
