"""The draft vocabulary: which verifier tokens the draft can propose, and the tables that translate.

`d2t` is an offset (verifier_id = draft_id + d2t[draft_id]) and `t2d` marks the verifier ids that are in; both are what
vLLM reads. Letters: V verifier vocabulary, D draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROUND_TO = 64


@dataclass(frozen=True)
class DraftVocabulary:
    """token_ids int64 [D]: the verifier id of each draft id, ascending; coverage: its share of the generated tokens."""

    token_ids: torch.Tensor
    verifier_size: int
    coverage: float

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [D], offsets."""
        return self.token_ids - torch.arange(len(self.token_ids))

    @property
    def t2d(self) -> torch.Tensor:
        """bool [V]."""
        return torch.zeros(self.verifier_size, dtype=torch.bool).index_fill_(0, self.token_ids, True)

    @property
    def draft_ids(self) -> torch.Tensor:
        """int64 [V]: the draft id of each verifier id, -1 where there is none."""
        table = torch.full((self.verifier_size,), -1)
        table[self.token_ids] = torch.arange(len(self.token_ids))
        return table


def choose_vocabulary(
    counts: torch.Tensor, required: Sequence[int], size: int | None, coverage: float
) -> DraftVocabulary:
    """The most frequent generated tokens and every required one (the stop ids).

    counts: int64 [V], how often the verifier generated each token. size: a fixed D, filled up with tokens that never
    occurred; None = the smallest set that covers `coverage` of the generated tokens, rounded up to a multiple of 64.
    Raises ValueError when D cannot be: larger than V, or smaller than the required ids.
    """
    vocab = len(counts)
    outside = [token for token in required if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"stop ids {outside} are outside the verifier's vocabulary of {vocab}")
    if size is not None and size > vocab:
        raise ValueError(
            f"train.draft_vocab_size is {size}, but the verifier has {vocab} tokens; give at most {vocab}, or null"
        )
    needed = torch.tensor(sorted(set(required)), dtype=torch.int64)
    if size is not None and size < len(needed):
        raise ValueError(f"train.draft_vocab_size is {size}, fewer than the verifier's {len(needed)} stop ids")
    order = torch.argsort(counts, descending=True, stable=True)
    if size is None:
        size = min(vocab, _size_for_coverage(counts[order], order, needed, coverage))
    others = order[~torch.isin(order, needed)]
    token_ids = torch.cat([needed, others[: size - len(needed)]]).sort().values
    return DraftVocabulary(token_ids, vocab, covered_share(counts, token_ids))


def covered_share(counts: torch.Tensor, token_ids: torch.Tensor) -> float:
    """The share of tokens that are among token_ids; counts int64 [V]: how often each occurs. 1 where none does."""
    total = int(counts.sum())
    return int(counts[token_ids].sum()) / total if total else 1.0


def _size_for_coverage(ranked: torch.Tensor, order: torch.Tensor, needed: torch.Tensor, coverage: float) -> int:
    """Tokens needed, most frequent first, plus the required ones outside them; a multiple of 64."""
    wanted = coverage * int(ranked.sum())
    count = int((ranked.cumsum(0) < wanted).sum()) + 1 if wanted else 0
    count = min(count, int((ranked > 0).sum()))
    count += int((~torch.isin(needed, order[:count])).sum())
    return max(1, -(-count // ROUND_TO)) * ROUND_TO


def validate_mapping(d2t: torch.Tensor, t2d: torch.Tensor, verifier_size: int) -> None:
    """Check the tables against each other. Raises ValueError that says what is wrong."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise ValueError(f"d2t must be int64 and t2d bool; they are {d2t.dtype} and {t2d.dtype}")
    if d2t.dim() != 1 or t2d.shape != (verifier_size,) or len(d2t) > verifier_size:
        raise ValueError(f"d2t {list(d2t.shape)} and t2d {list(t2d.shape)} do not fit a vocabulary of {verifier_size}")
    token_ids = d2t + torch.arange(len(d2t))
    hint = "d2t holds offsets (verifier id = draft id + d2t[draft id]), not ids"
    wrong = (token_ids < 0) | (token_ids >= verifier_size)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"d2t sends draft id {first} to {int(token_ids[first])}, outside {verifier_size} tokens; {hint}"
        )
    if len(set(token_ids.tolist())) != len(token_ids):
        raise ValueError(f"d2t sends two draft ids to one verifier id; {hint}")
    marked = torch.zeros_like(t2d).index_fill_(0, token_ids, True)
    if not torch.equal(marked, t2d):
        raise ValueError(f"t2d marks {int(t2d.sum())} ids, d2t reaches {len(token_ids)}, and they differ; {hint}")
