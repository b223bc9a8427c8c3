"""Stage `evaluate`: held-out prompts decoded in vLLM with and without the draft.

python -m stages.evaluate data/prompts/evaluation.parquet data/verifier.json data/draft data/evaluation \
    data/metrics/evaluate.json data/plots/evaluate params.yaml
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3.acceptance import Answer, Decoded, Prompt, Row, identical
from eagle3.answer_states import answer_states
from eagle3.console import Progress, say, timed
from eagle3.draft.export import load_draft
from eagle3.draft.model import DraftModel
from eagle3.draft.replay import replay
from eagle3.draft.vocab import DraftVocabulary
from eagle3.evaluation import (
    break_down,
    choose_prompts,
    evaluation_metrics,
    write_evaluation,
    write_plots,
    write_run,
)
from eagle3.lineage import check_draft
from eagle3.params import Params, load_params
from eagle3.reconciliation import Reconciliation, explain, is_large
from eagle3.recording import Recording
from eagle3.report.build import evaluation_report
from eagle3.report.page import render
from eagle3.serving.decoded_store import DecodedStore, evaluation_rows
from eagle3.serving.speculative import Decoder, decode_turns, settings, turns
from eagle3.stage import run_stage
from eagle3.tables import new_folder, write_metrics
from eagle3.verifier import load_tokenizer, locate_verifier, read_identity
from eagle3.verifier_head import load_head
from eagle3.workstore import RowStore, write_file


def evaluate(
    prompts: Path, verifier: Path, draft: Path, evaluation: Path, metrics: Path, plots: Path, params_path: Path
) -> None:
    """Decode held-out PROMPTS with and without DRAFT; write tables and a page to EVALUATION, and METRICS and PLOTS."""
    params = load_params(params_path)
    own, asked = params.evaluate, settings(params.evaluate)
    identity = read_identity(verifier)
    check_draft(draft, identity)
    chosen = choose_prompts(prompts, params.verifier, params.generate, own)
    with evaluation_rows(identity, draft, params) as kept:
        seconds: dict[str, float] = {}
        with timed(seconds, "decoding"):
            decoded = decode(chosen, draft, params, kept, "evaluate")
        with timed(seconds, "lossless_check"):
            exact = decode(chosen[: own.lossless_prompts], draft, in_float32(params), kept, "lossless check")
        answers = [a for batch in decoded if batch.setting == asked[0] and batch.arm == "draft" for a in batch.answers]
        model, vocabulary = load_draft(draft)
        tokenizer = load_tokenizer(params.verifier)
        breakdown = break_down(answers, identity, tokenizer, vocabulary.t2d.tolist())
        numbers = evaluation_metrics(decoded, asked, breakdown)
        if own.estimate_prompts and own.temperature == 0:
            recording = Recording(identity, params.verifier, params.engine, params.extract)
            with timed(seconds, "estimate"):
                replayed = answers[: own.estimate_prompts]
                numbers["estimate"] = reconcile(replayed, model, vocabulary, recording, asked[0].num_speculative_tokens)
        if exact:
            numbers["lossless_float32"] = identical(answer for batch in exact for answer in batch.answers)
        numbers["seconds"] = seconds
        with new_folder(evaluation) as out:
            write_evaluation(out, decoded, breakdown)
            write_run(out / "run.json", identity, params.engine, own)
            shown = tokenizer, own.viewer_answers
            page = evaluation_report(answers, asked[0], numbers, breakdown, draft, identity, *shown)
            write_file(out / "report.html", render(page).encode())
        write_plots(plots, numbers)
        write_metrics(metrics, numbers)
    if exact and numbers["lossless_float32"]["share"] < 1:
        raise ValueError(f"in float32 an answer with the draft differs from the plain one: {metrics} has the counts")


def decode(chosen: list[Prompt], draft: Path, params: Params, kept: RowStore, label: str) -> list[Decoded]:
    """What both arms make of every chosen prompt in every setting."""
    folder = locate_verifier(params.verifier)

    def make(tokens: int) -> Decoder:
        return Decoder(params.verifier, params.engine, folder, draft if tokens else None, tokens)

    store = DecodedStore(kept, params.verifier.dtype, params.evaluate.temperature)
    todo = list(turns(chosen, params.evaluate))
    missing = [turn for turn in todo if store.get(turn) is None]
    total, left = (sum(turn.answers for turn in part) for part in (todo, missing))
    if left < total:
        say(f"{label}: {total - left:,} of {total:,} answers are kept from a run that was interrupted")
    if missing:
        say(f"{label}: starting vLLM with and without the draft ({params.verifier.dtype})")
        with Progress(label, total, "answers", total - left) as progress:
            for turn, decoded in decode_turns(missing, make, params.evaluate, params.verifier.max_model_len):
                store.put(turn, decoded)
                progress.advance(turn.answers)
    return [batch for turn in todo for batch in store.take(turn)]


def reconcile(
    answers: Sequence[Answer], model: DraftModel, vocabulary: DraftVocabulary, recording: Recording, steps: int
) -> Row:
    """What the draft would have proposed everywhere in these answers, from their recorded states, against what vLLM
    accepted of it; says how they differ and warns where they may not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    embed_tokens = load_head(locate_verifier(recording.verifier)).embed_tokens.to(device)
    found = Reconciliation(steps)
    usable = [answer for answer in answers if len(answer.output_ids) >= 3]
    if usable:
        with answer_states(usable, recording) as recorded:
            for answer, sample in recorded:
                found.add(replay(model, vocabulary, embed_tokens, sample, steps), answer.steps)
    numbers = found.metrics()
    say(f"evaluate: {explain(numbers)}")
    if is_large(numbers):
        say("evaluate: warning: the served draft proposes otherwise than the trained one; please report this")
    return numbers


def in_float32(params: Params) -> Params:
    """The same, computed in float32, greedy, one prompt at a time: where speculation must not change a token."""
    verifier = params.verifier.model_copy(update={"dtype": "float32"})
    first = settings(params.evaluate)[0].num_speculative_tokens
    own = params.evaluate.model_copy(update={"temperature": 0.0, "batch_size": 1, "num_speculative_tokens": first})
    return params.model_copy(update={"verifier": verifier, "evaluate": own})


if __name__ == "__main__":
    run_stage(evaluate)
