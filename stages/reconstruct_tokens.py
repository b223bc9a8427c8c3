"""Stage `reconstruct-tokens`: the exact ids that the verifier read and wrote, with loss mask and spans."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.audit import audit, audit_metrics, audit_text
from eagle3.console import Progress, visible
from eagle3.params import ReconstructTokensParams, load_params
from eagle3.reasoning import Pieces, ThinkingFinder
from eagle3.rebuild import Rebuilder
from eagle3.responses import Picked, read_responses
from eagle3.schemas import AUDIT, TOKENS, sample_name
from eagle3.stage import run_stage
from eagle3.tables import Account, Row, count_parts, write_metrics, write_parts, write_table
from eagle3.tokens import Unusable, reconstruct
from eagle3.verifier import load_tokenizer, read_identity

PREVIEW_ROWS = 20


def reconstruct_tokens(responses: Path, verifier: Path, tokens: Path, metrics: Path, params_path: Path) -> None:
    """Turn RESPONSES into TOKENS (ids, loss mask, spans) and write METRICS.

    Rows without ids get them from their text; some rows with ids too, to compare (audit.txt and audit.parquet).
    """
    params = load_params(params_path)
    identity = read_identity(verifier)
    own = params.reconstruct_tokens
    tokenizer = load_tokenizer(params.verifier)
    finder = ThinkingFinder(identity.markers, Pieces(tokenizer))
    rebuilder = Rebuilder(tokenizer, identity, finder)
    account = Account("reconstruct-tokens", own.max_rejected_share)
    tally, picked = Tally(), Picked(own.audit_rows)

    def samples() -> Iterator[Row]:
        with Progress("reconstruct-tokens", count_parts(responses), "rows") as progress:
            for response in read_responses(responses):
                account.rows_in += 1
                progress.advance()
                rebuilt = response["prompt_token_ids"] is None and response["output_token_ids"] is None
                try:
                    row = rebuilder.rebuild(response) if rebuilt else response
                    sample = reconstruct(row, identity, finder, params.verifier.max_model_len, rebuilt=rebuilt)
                    tally.see(sample)
                    check_use(sample, own)
                except Unusable as unusable:
                    account.reject(
                        sample_name(response["prompt_id"], response["sample"]), unusable.reason, unusable.detail
                    )
                    continue
                account.rows_out += 1
                tally.count(sample)
                if not rebuilt:
                    picked.offer(response["prompt_id"], response["sample"])
                yield sample

    write_parts(tokens, samples(), TOKENS, "sample_digest", account)
    (tokens / "preview.txt").write_text("".join(preview(sample, tokenizer) for sample in tally.first))
    audited = list(audit(picked.read(responses), rebuilder))
    write_table(tokens / "audit.parquet", audited, AUDIT)
    (tokens / "audit.txt").write_text(audit_text(audited))
    write_metrics(metrics, {**account.settle(), **tally.metrics(), "audit": audit_metrics(audited)})


def check_use(sample: Row, own: ReconstructTokensParams) -> None:
    """Raises Unusable for a sample that the parameters keep out."""
    loss_tokens = sample["length"] - sample["prompt_length"]
    if loss_tokens < own.min_loss_tokens:
        raise Unusable("too few generated tokens", f"{loss_tokens}, wanted {own.min_loss_tokens}")
    cut = sample["truncated_in"]
    if cut is not None and (own.truncated == "drop" or (own.truncated == "drop_thinking_cut" and cut == "thinking")):
        raise Unusable(f"truncated in the {cut}", f"after {loss_tokens} tokens")


class Tally:
    """Sums over samples, how often each length occurs, and the first few samples for the preview."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.thinking: Counter[str] = Counter()
        self.sources: dict[str, Counter[str]] = {}
        self.first: list[Row] = []

    def see(self, sample: Row) -> None:
        """Count what the verifier did, whether the parameters keep the sample or not."""
        source = self.sources.setdefault(sample["source"], Counter())
        source["rows"] += 1
        if sample["truncated_in"]:
            source[f"truncated_in_{sample['truncated_in']}"] += 1

    def count(self, sample: Row) -> None:
        """Count a sample that is kept."""
        self.lengths[sample["length"]] += 1
        self.counts["prompt_tokens"] += sample["prompt_length"]
        self.counts["loss_tokens"] += sample["length"] - sample["prompt_length"]
        self.counts["thinking_tokens"] += sample["thinking_end"] - sample["thinking_start"]
        self.counts["rebuilt"] += sample["rebuilt"]
        self.thinking[f"opened_by_{sample['thinking_opened_by']}" if sample["thinking_opened_by"] else "none"] += 1
        if sample["thinking_ended_by"]:
            self.thinking[f"ended_by_{sample['thinking_ended_by']}"] += 1
        self.thinking["rows_with_stray_markers"] += bool(sample["stray_markers"])
        if sample["truncated_in"]:
            self.counts[f"truncated_in_{sample['truncated_in']}"] += 1
        if len(self.first) < PREVIEW_ROWS:
            self.first.append(sample)

    def metrics(self) -> Row:
        """Finite numbers; lengths in tokens. `sources` counts rows as they came, the rest rows that are kept."""
        counts = self.counts
        return {
            "tokens": counts["prompt_tokens"] + counts["loss_tokens"],
            "prompt_tokens": counts["prompt_tokens"],
            "loss_tokens": counts["loss_tokens"],
            "thinking_share": counts["thinking_tokens"] / max(counts["loss_tokens"], 1),
            "truncated_in_thinking": counts["truncated_in_thinking"],
            "truncated_in_answer": counts["truncated_in_answer"],
            "rebuilt": counts["rebuilt"],
            "thinking": {name: self.thinking[name] for name in sorted(self.thinking)},
            "sources": {
                name: {key: source[key] for key in ("rows", "truncated_in_thinking", "truncated_in_answer")}
                for name, source in sorted(self.sources.items())
            },
            "length": {f"p{percent}": self._length(percent) for percent in (50, 90, 99)} | {"max": max(self.lengths)},
        }

    def _length(self, percent: int) -> int:
        """The smallest length that `percent` of the samples do not exceed."""
        wanted, seen = percent * self.lengths.total() / 100, 0
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen >= wanted:
                return length
        raise AssertionError("no sample was counted")


def preview(sample: Row, tokenizer: Any) -> str:
    """One sample for a person to read: what is masked, what is learnt. Control characters are spelled out."""
    spans = [
        ("prompt, masked", 0, sample["prompt_length"]),
        ("thinking, learnt", sample["thinking_start"], sample["thinking_end"]),
        ("answer, learnt", sample["answer_start"], sample["length"]),
    ]
    lines = [f"## {sample['sample_id'][:16]} {visible(sample['category'])}, {sample['length']} tokens\n"]
    for label, start, end in spans:
        if end > start:
            text = tokenizer.decode(sample["input_ids"][start:end])
            lines.append(f"[{label}] {visible(text, 2000)}\n")
    return "".join(lines) + "\n"


if __name__ == "__main__":
    run_stage(reconstruct_tokens)
