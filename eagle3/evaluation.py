"""data/evaluation: which prompts, what was decoded, and everything that is computed from it."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.acceptance import (
    Answer,
    Decoded,
    Prompt,
    Row,
    Setting,
    Step,
    count_steps,
    finishes,
    identical,
    require_counters,
    spread,
    summarise,
    totals,
)
from eagle3.breakdown import Breakdown, Words, nested
from eagle3.params import EngineParams, EvaluateParams, GenerateParams, VerifierParams
from eagle3.reasoning import Pieces, ThinkingFinder
from eagle3.schemas import ANSWERS, BREAKDOWN, FORWARDS, PROMPTS, STEPS
from eagle3.serving.speculative import sampling_of
from eagle3.speed import best_tokens, pair_speeds, step_seconds, worth_of_tokens
from eagle3.tables import read_table, write_table
from eagle3.verifier import VerifierIdentity, load_tokenizer, prompt_ids
from eagle3.workstore import write_file

IN_METRICS = ("category", "source", "segment", "output position", "prompt tokens", "token class", "draft vocabulary")


def choose_prompts(
    prompts: Path, verifier: VerifierParams, generate: GenerateParams, own: EvaluateParams
) -> list[Prompt]:
    """The prompts to decode: spread over the categories, those that fit the context with room for an answer."""
    tokenizer = load_tokenizer(verifier)
    chosen = []
    for row in spread(read_table(prompts, PROMPTS), own.num_prompts):
        ids = prompt_ids(tokenizer, row["messages"], generate.chat_template_kwargs)
        if len(ids) + generate.min_room_tokens <= verifier.max_model_len:
            chosen.append(Prompt(row["prompt_id"], row["category"], row["source"], ids))
    if not chosen:
        raise ValueError(f"{prompts}: no prompt to evaluate on; raise prompts.evaluation_share or add a source for it")
    return chosen


def break_down(
    answers: Iterable[Answer], identity: VerifierIdentity, tokenizer: Any, in_vocabulary: Sequence[bool]
) -> list[Row]:
    """Rows of schemas.BREAKDOWN. in_vocabulary: by verifier id, whether the draft can propose it."""
    pieces = Pieces(tokenizer)
    found = Breakdown(
        ThinkingFinder(identity.markers, pieces), Words(pieces, frozenset(tokenizer.all_special_ids)), in_vocabulary
    )
    for answer in answers:
        if answer.arm == "draft":
            found.add(answer)
    return list(found.rows())


def write_run(path: Path, identity: VerifierIdentity, engine: EngineParams, own: EvaluateParams) -> None:
    """What decoded, and how: a draft that is evaluated again under another version can be told apart by it."""
    run = {
        "engine": identity.engine,
        "verifier_digest": identity.digest,
        "dtype": identity.dtype,
        "engine_params": engine.model_dump(),
        "evaluate": own.model_dump(),
        "sampling": sampling_of(own),
    }
    write_file(path, (json.dumps(run, indent=2) + "\n").encode())


def write_evaluation(folder: Path, decoded: Sequence[Decoded], breakdown: list[Row]) -> None:
    """Write the tables of data/evaluation; the setting that is reported comes first in each."""
    answers = [answer for batch in decoded for answer in batch.answers]
    write_table(folder / "steps.parquet", (row for answer in answers for row in _step_rows(answer)), STEPS)
    write_table(folder / "answers.parquet", map(_answer_row, answers), ANSWERS)
    write_table(folder / "forwards.parquet", (row for batch in decoded for row in _forward_rows(batch)), FORWARDS)
    write_table(folder / "breakdown.parquet", breakdown, BREAKDOWN)


def evaluation_metrics(decoded: Sequence[Decoded], asked: Sequence[Setting], breakdown: list[Row]) -> Row:
    """The metrics: the first setting at the top, all of them under `settings`. Raises ValueError where the recorded
    steps and vLLM's own counters differ."""
    counters = require_counters(decoded)
    by_setting = {setting: _answers_of(decoded, setting) for setting in asked}
    first = asked[0]
    summary = summarise(by_setting[first])
    details = nested(row for row in breakdown if row["dimension"] in IN_METRICS)
    speeds = summary.pop("by_category")
    by_category = details.pop("by_category", {})
    summary["by_category"] = {name: {**speeds[name], **by_category.get(name, {})} for name in speeds}
    most = max(asked, key=lambda setting: setting.num_speculative_tokens).num_speculative_tokens
    widest = count_steps(by_setting[next(s for s in asked if s.num_speculative_tokens == most)], most)
    worth = worth_of_tokens(decoded, widest, dict.fromkeys(setting.batch_size for setting in asked))
    best = {str(size): best_tokens(found) for size, found in worth.items()}
    return {
        **summary,
        **pair_speeds(by_setting[first]),
        **({"best_num_speculative_tokens": best[str(first.batch_size)]} if str(first.batch_size) in best else {}),
        "best_by_batch_size": best,
        "speedup_by_batch_size": {
            str(size): {str(tokens): ratio for tokens, ratio in found.items()} for size, found in worth.items()
        },
        "settings": {_name(setting): _setting_metrics(decoded, setting, by_setting[setting]) for setting in asked},
        **details,
        "identical": identical(by_setting[first]),
        "answers": finishes(by_setting[first]),
        "vllm_counters": counters,
    }


def _answers_of(decoded: Sequence[Decoded], setting: Setting) -> list[Answer]:
    """Both arms' answers in one setting; the plain ones of another number of tokens where none were made for it."""
    own = [answer for batch in decoded if batch.setting == setting for answer in batch.answers]
    if not any(answer.arm == "plain" for answer in own):
        own += [
            answer
            for batch in decoded
            if batch.arm == "plain" and batch.setting.batch_size == setting.batch_size
            for answer in batch.answers
        ]
    return sorted(own, key=lambda answer: answer.arm != "draft")


def _setting_metrics(decoded: Sequence[Decoded], setting: Setting, answers: list[Answer]) -> Row:
    summary = totals(answers)
    own = [batch for batch in decoded if batch.setting == setting]
    times = {
        arm: step_seconds([batch for batch in own if batch.arm == arm], setting.batch_size, tokens)
        for arm, tokens in (("plain", 0), ("draft", setting.num_speculative_tokens))
    }
    return {
        **{name: summary[name] for name in ("acceptance_length", "speedup", "num_drafts")},
        **{name: summary[name] for name in ("tokens_per_second_plain", "tokens_per_second_draft")},
        **pair_speeds(answers),
        **{f"step_ms_{arm}": 1000 * seconds for arm, seconds in times.items() if seconds is not None},
    }


def _name(setting: Setting) -> str:
    return f"{setting.num_speculative_tokens}_tokens_batch_{setting.batch_size}"


def write_plots(folder: Path, metrics: Row) -> None:
    """What `dvc plots show` draws: acceptance by draft position and category, speed-up by drafted tokens."""
    rates = sorted(key for key in metrics if key.startswith("acceptance_rate_"))
    plots = {
        "acceptance_by_position": [
            {"position": place + 1, "acceptance_rate": metrics[key]} for place, key in enumerate(rates)
        ],
        "acceptance_by_category": [
            {"category": name, "acceptance_length": group["acceptance_length"]}
            for name, group in metrics["by_category"].items()
        ],
        "speedup_by_tokens": [
            {"batch_size": f"batch {size}", "tokens": int(tokens), "speedup": speedup}
            for size, found in metrics["speedup_by_batch_size"].items()
            for tokens, speedup in found.items()
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in plots.items():
        write_file(folder / f"{name}.json", json.dumps(rows, indent=1).encode())


def _setting_row(setting: Setting) -> Row:
    return {"num_speculative_tokens": setting.num_speculative_tokens, "batch_size": setting.batch_size}


def _step_rows(answer: Answer) -> list[Row]:
    own = {"prompt_id": answer.prompt.prompt_id, "category": answer.prompt.category, **_setting_row(answer.setting)}
    return [{**own, **vars(step)} for step in answer.steps]


def _answer_row(answer: Answer) -> Row:
    return {
        "prompt_id": answer.prompt.prompt_id,
        "category": answer.prompt.category,
        "source": answer.prompt.source,
        **_setting_row(answer.setting),
        "arm": answer.arm,
        "prompt_token_ids": np.asarray(answer.prompt.ids, np.int32),
        "output_token_ids": np.asarray(answer.output_ids, np.int32),
        "finish_reason": answer.finish_reason,
        "seconds": answer.seconds,
        "batch": answer.batch,
    }


def _forward_rows(batch: Decoded) -> list[Row]:
    return [{**_setting_row(batch.setting), "arm": batch.arm, **vars(forward)} for forward in batch.forwards]


def read_answers(folder: Path) -> tuple[Setting, list[Answer]]:
    """The setting that is reported and the draft's answers in it, with their steps, from data/evaluation.

    Raises ValueError for a folder that is none, or that an older version wrote.
    """
    steps: dict[str, list[Step]] = defaultdict(list)
    setting: Setting | None = None
    for row in read_table(folder / "steps.parquet", STEPS):
        setting = setting or Setting(row["num_speculative_tokens"], row["batch_size"])
        if _is_of(row, setting):
            step = Step(row["position"], row["drafted"], row["accepted"], row["emitted"])
            steps[row["prompt_id"]].append(step)
    answers = []
    for row in read_table(folder / "answers.parquet", ANSWERS):
        setting = setting or Setting(row["num_speculative_tokens"], row["batch_size"])
        if row["arm"] == "draft" and _is_of(row, setting):
            prompt = Prompt(row["prompt_id"], row["category"], row["source"], row["prompt_token_ids"])
            own = (row["batch"], row["output_token_ids"], row["finish_reason"], row["seconds"])
            answers.append(Answer(prompt, setting, "draft", *own, steps[row["prompt_id"]]))
    if setting is None:
        raise ValueError(f"{folder}: no answer in it; `dvc repro evaluate` makes them")
    return setting, answers


def read_breakdown(folder: Path) -> list[Row]:
    """Rows of schemas.BREAKDOWN. Raises ValueError as `read_answers`."""
    return list(read_table(folder / "breakdown.parquet", BREAKDOWN))


def _is_of(row: Row, setting: Setting) -> bool:
    return (row["num_speculative_tokens"], row["batch_size"]) == (setting.num_speculative_tokens, setting.batch_size)
