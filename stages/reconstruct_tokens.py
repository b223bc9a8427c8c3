"""Stage `reconstruct-tokens`: the exact ids that the verifier read and wrote, with loss mask and spans."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

from eagle3.console import Progress, run_stage, visible
from eagle3.params import load_params
from eagle3.schemas import RESPONSES, TOKENS
from eagle3.tables import Account, Row, count_parts, read_parts, write_metrics, write_parts
from eagle3.tokens import Unusable, reconstruct
from eagle3.verifier import locate_verifier, read_identity

PREVIEW_ROWS = 20


def reconstruct_tokens(responses: Path, verifier: Path, tokens: Path, metrics: Path, params_path: Path) -> None:
    """Turn RESPONSES into TOKENS (ids, loss mask, spans) and write METRICS."""
    params = load_params(params_path)
    identity = read_identity(verifier)
    own = params.reconstruct_tokens
    account = Account("reconstruct-tokens", own.max_rejected_share)
    tally = Tally()

    def samples() -> Iterator[Row]:
        with Progress("reconstruct-tokens", count_parts(responses), "rows") as progress:
            for response in read_parts(responses, RESPONSES):
                account.rows_in += 1
                progress.advance()
                try:
                    sample = reconstruct(response, identity, params.verifier.max_model_len)
                    tally.check_use(sample, own.min_loss_tokens, own.drop_truncated)
                except Unusable as unusable:
                    account.reject(response["prompt_id"], unusable.reason, unusable.detail)
                    continue
                account.rows_out += 1
                tally.count(sample)
                yield sample

    write_parts(tokens, samples(), TOKENS, "sample_digest", account)
    tokenizer = AutoTokenizer.from_pretrained(
        locate_verifier(params.verifier), trust_remote_code=params.verifier.trust_remote_code
    )
    (tokens / "preview.txt").write_text("".join(preview(sample, tokenizer) for sample in tally.first))
    write_metrics(metrics, {**account.settle(), **tally.metrics()})


class Tally:
    """Sums over samples, a list of lengths, and the first few samples for the preview."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.prompt_tokens = self.loss_tokens = self.thinking_tokens = 0
        self.truncated = {"thinking": 0, "answer": 0}
        self.first: list[Row] = []

    @staticmethod
    def check_use(sample: Row, min_loss_tokens: int, drop_truncated: bool) -> None:
        """Raises Unusable for a sample that the parameters keep out."""
        if sum(sample["loss_mask"]) < min_loss_tokens:
            raise Unusable("too few generated tokens", f"{sum(sample['loss_mask'])}, wanted {min_loss_tokens}")
        if drop_truncated and sample["truncated_in"]:
            raise Unusable("truncated", f"in {sample['truncated_in']}")

    def count(self, sample: Row) -> None:
        self.lengths.append(sample["length"])
        self.prompt_tokens += sample["prompt_length"]
        self.loss_tokens += sample["length"] - sample["prompt_length"]
        self.thinking_tokens += sample["thinking_end"] - sample["thinking_start"]
        if sample["truncated_in"]:
            self.truncated[sample["truncated_in"]] += 1
        if len(self.first) < PREVIEW_ROWS:
            self.first.append(sample)

    def metrics(self) -> Row:
        """Finite numbers; lengths in tokens."""
        cuts = statistics.quantiles(self.lengths, n=100) if len(self.lengths) > 1 else self.lengths * 99
        return {
            "tokens": sum(self.lengths),
            "prompt_tokens": self.prompt_tokens,
            "loss_tokens": self.loss_tokens,
            "thinking_share": self.thinking_tokens / max(self.loss_tokens, 1),
            "truncated_in_thinking": self.truncated["thinking"],
            "truncated_in_answer": self.truncated["answer"],
            "length": {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(self.lengths)},
        }


def preview(sample: Row, tokenizer: AutoTokenizer) -> str:
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
