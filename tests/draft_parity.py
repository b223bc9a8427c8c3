"""What our own draft proposes, one position at a time, against what vLLM drafted for the same answers."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eagle3.acceptance import Answer
from eagle3.draft.attention import Document
from eagle3.draft.export import load_draft
from eagle3.draft.model import DraftModel
from eagle3.verifier_head import HeadWeights, load_head


@torch.no_grad()
def equal_drafts(
    verifier: Path, draft: Path, answers: Iterable[Answer], aux_layer_ids: tuple[int, ...], steps: int
) -> list[tuple[int, int]]:
    """(equal, compared) proposals for each draft position; everything on our side in float32."""
    model, vocabulary = load_draft(draft)
    head = load_head(verifier)
    reference = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    same = [[0, 0] for _ in range(steps)]
    for answer in (answer for answer in answers if answer.arm == "draft"):
        whole = answer.prompt.ids + answer.output_ids
        states = reference(torch.tensor([whole]), output_hidden_states=True).hidden_states
        aux = torch.cat([states[layer][0] for layer in aux_layer_ids], dim=-1)
        for step in answer.steps:
            ids = whole[: len(answer.prompt.ids) + step.position]
            mine = own_drafts(model, head, ids, aux, vocabulary.token_ids, steps)
            for place, drafted in enumerate(step.drafted):
                same[place][0] += mine[place] == drafted
                same[place][1] += 1
    return [(equal, compared) for equal, compared in same]


def own_drafts(
    model: DraftModel, head: HeadWeights, ids: list[int], aux: torch.Tensor, token_ids: torch.Tensor, steps: int
) -> list[int]:
    """What our draft proposes after `ids`; aux [T, A*H] of the positions before the last id."""
    rows = len(ids) - 1
    memories = model.memories()
    documents = [Document(0, rows - 1, rows)]
    state = model.combine(aux[:rows])
    embeds = head.embed_tokens[torch.tensor(ids[1:])].float()
    normed, state = model(embeds, state, torch.arange(rows), memories, documents, torch.tensor([rows - 1]))
    drafted: list[int] = []
    for step in range(steps):
        if step:
            embeds = head.embed_tokens[torch.tensor(drafted[-1:])].float()
            normed, state = model(embeds, state, torch.tensor([rows - 1 + step]), memories, documents, None)
        drafted.append(int(token_ids[int((normed @ model.lm_head.weight.T).argmax())]))
    return drafted
