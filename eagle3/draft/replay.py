"""What a draft would have proposed after every token of an answer that is there already, from recorded states."""

import torch

from eagle3.draft.data import build_batch
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import unroll
from eagle3.draft.vocab import DraftVocabulary
from eagle3.reconciliation import Replayed
from eagle3.shards import Sample

ROWS = 1024  # of logits in memory at a time


@torch.no_grad()
def replay(
    draft: DraftModel, vocabulary: DraftVocabulary, embed_tokens: torch.Tensor, sample: Sample, steps: int
) -> Replayed:
    """Proposals of K = `steps` tokens after each token of one greedy answer, against what the verifier wrote.

    embed_tokens [V, H] on the draft's device. Accepted are a proposal's first tokens that equal the verifier's.
    """
    device = draft.fc.weight.device
    batch = build_batch([("", sample)], steps).to(device)
    normed = unroll(draft, batch, embed_tokens)
    token_ids = vocabulary.token_ids.to(device)
    ids = sample.input_ids.long().to(device)
    generated = int(sample.loss_mask.sum())
    rows = batch.context_positions[batch.rows]  # row i proposes x_{i+2} and on
    accepted = torch.zeros(generated - 1, dtype=torch.int64, device=device)
    judged = torch.zeros_like(accepted)
    going = torch.ones(len(rows), dtype=torch.bool, device=device)
    places = rows + 1 - (len(ids) - generated)  # tokens of the answer before it, less one
    for step in range(steps):
        proposed = torch.cat([(part @ draft.lm_head.weight.T).argmax(-1) for part in normed[step].split(ROWS)])
        there = rows + 2 + step < len(ids)
        right = there & (token_ids[proposed] == ids[(rows + 2 + step).clamp(max=len(ids) - 1)])
        going &= right
        accepted[places] += going
        judged[places] += there
    return accepted.cpu().numpy(), judged.cpu().numpy()
