"""Stage `evaluate`: held-out prompts decoded in vLLM with and without the draft."""

import json
from pathlib import Path

from eagle3.acceptance import Answer, Prompt, identical, spread, summarise
from eagle3.console import Progress, say
from eagle3.lineage import check_draft
from eagle3.params import Params, load_params
from eagle3.schemas import ANSWERS, PROMPTS, STEPS
from eagle3.serving.speculative import Decoder, decode_pairs
from eagle3.stage import run_stage
from eagle3.tables import Row, new_folder, read_table, write_metrics, write_table
from eagle3.verifier import load_tokenizer, locate_verifier, prompt_ids, read_identity
from eagle3.workstore import write_file


def evaluate(
    prompts: Path, verifier: Path, draft: Path, evaluation: Path, metrics: Path, plots: Path, params_path: Path
) -> None:
    """Decode held-out PROMPTS with and without DRAFT; write steps and answers to EVALUATION, and METRICS and PLOTS."""
    params = load_params(params_path)
    check_draft(draft, read_identity(verifier))
    folder = locate_verifier(params.verifier)
    chosen = choose(prompts, params)
    answers = decode(chosen, folder, draft, params, "evaluate")
    exact = decode(chosen[: params.evaluate.lossless_prompts], folder, draft, in_float32(params), "lossless check")
    with new_folder(evaluation) as out:
        write_table(out / "steps.parquet", (row for answer in answers for row in step_rows(answer)), STEPS)
        write_table(out / "answers.parquet", map(answer_row, answers), ANSWERS)
    summary = summarise(answers, params.evaluate.num_speculative_tokens)
    write_plots(plots, summary)
    lossless = {"lossless_float32": identical(exact)} if exact else {}
    write_metrics(metrics, {**summary, "identical": identical(answers), **lossless})
    if lossless and lossless["lossless_float32"]["share"] < 1:
        raise ValueError(f"in float32 an answer with the draft differs from the plain one: {metrics} has the counts")


def choose(prompts: Path, params: Params) -> list[Prompt]:
    """The prompts to decode: spread over the categories, those that fit the context with room for an answer."""
    tokenizer = load_tokenizer(params.verifier)
    kwargs = params.generate.chat_template_kwargs
    chosen = []
    for row in spread(read_table(prompts, PROMPTS), params.evaluate.num_prompts):
        ids = prompt_ids(tokenizer, row["messages"], kwargs)
        if len(ids) + params.generate.min_room_tokens <= params.verifier.max_model_len:
            chosen.append(Prompt(row["prompt_id"], row["category"], ids))
    if not chosen:
        raise ValueError(f"{prompts}: no prompt to evaluate on; raise prompts.evaluation_share or add a source for it")
    return chosen


def decode(chosen: list[Prompt], folder: Path, draft: Path, params: Params, label: str) -> list[Answer]:
    """Answers of both arms to every chosen prompt."""

    def make(arm: str) -> Decoder:
        used = draft if arm == "draft" else None
        return Decoder(params.verifier, params.engine, folder, used, params.evaluate.num_speculative_tokens)

    answers: list[Answer] = []
    if not chosen:
        return answers
    say(f"{label}: starting vLLM with and without the draft ({params.verifier.dtype})")
    with Progress(label, 2 * len(chosen), "answers") as progress:
        for batch in decode_pairs(chosen, make, params.evaluate, params.verifier.max_model_len):
            answers.extend(batch)
            progress.advance(len(batch))
    return answers


def write_plots(folder: Path, summary: Row) -> None:
    """What `dvc plots show` draws: acceptance rate by draft position, acceptance length by category."""
    rates = sorted(key for key in summary if key.startswith("acceptance_rate_"))
    by_position = [{"position": place + 1, "acceptance_rate": summary[key]} for place, key in enumerate(rates)]
    by_category = [
        {"category": name, "acceptance_length": group["acceptance_length"]}
        for name, group in summary["by_category"].items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("by_position", by_position), ("by_category", by_category)):
        write_file(folder / f"acceptance_{name}.json", json.dumps(rows, indent=1).encode())


def in_float32(params: Params) -> Params:
    """The same, computed in float32, greedy: where speculation must not change a single token."""
    verifier = params.verifier.model_copy(update={"dtype": "float32"})
    own = params.evaluate.model_copy(update={"temperature": 0.0, "batch_size": 1})
    return params.model_copy(update={"verifier": verifier, "evaluate": own})


def step_rows(answer: Answer) -> list[Row]:
    """One row of schemas.STEPS per judged draft."""
    return [{"prompt_id": answer.prompt.prompt_id, "category": answer.prompt.category, **vars(s)} for s in answer.steps]


def answer_row(answer: Answer) -> Row:
    """One row of schemas.ANSWERS."""
    return {
        "prompt_id": answer.prompt.prompt_id,
        "category": answer.prompt.category,
        "arm": answer.arm,
        "prompt_tokens": len(answer.prompt.ids),
        "output_token_ids": answer.output_ids,
        "seconds": answer.seconds,
        "batch": answer.batch,
    }


if __name__ == "__main__":
    run_stage(evaluate)
