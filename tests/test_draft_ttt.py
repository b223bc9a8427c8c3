"""The fast unroll against a slow one that follows the serving engine's draft, document by document and row by row."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from eagle3.draft.attention import LayerMemory
from eagle3.draft.data import Batch, build_batch
from eagle3.draft.latent import LatentSizes
from eagle3.draft.loss import Objective
from eagle3.draft.model import DraftModel, DraftSizes, initialise
from eagle3.draft.ttt import Teacher, empty_score, full_choices, reachable, score_batch, unroll
from eagle3.shards import Sample

KL = Objective("forward_kl", 0.0, 0.0, "renormalise")
HIDDEN, AUX, VOCAB, STEPS, EPS = 16, 3, 29, 3, 1e-5
TOKEN_IDS = torch.tensor([0, 2, 3, 5, 8, 9, 11, 12, 17, 20, 21, 25, 28])
SIZES = DraftSizes(
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_aux_layers=AUX,
    vocab_size=VOCAB,
    draft_vocab_size=len(TOKEN_IDS),
    max_position_embeddings=64,
    rms_norm_eps=EPS,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    norm_before_residual=True,
    norm_before_fc=False,
    fc_norm=False,
    norm_output=False,
)
FORMS = {
    "default": SIZES,
    "residual before norm": replace(SIZES, norm_before_residual=False),
    "norm before fc": replace(SIZES, norm_before_fc=True),
    "fc norm": replace(SIZES, fc_norm=True),
    "normed output": replace(SIZES, norm_output=True),
    "two layers": replace(SIZES, num_layers=2),
    "three layers, all flags": replace(
        SIZES, num_layers=3, norm_before_residual=False, norm_before_fc=True, fc_norm=True, norm_output=True
    ),
    "no grouped heads": replace(SIZES, num_kv_heads=4),
    "sliding window": replace(SIZES, sliding_window=3),
    "sliding window, two layers": replace(SIZES, num_layers=2, sliding_window=5),
    "latent": replace(SIZES, num_kv_heads=4, head_dim=10, latent=LatentSizes(6, 12, 6, 4, 5)),
    "latent, two layers, straight queries": replace(
        SIZES, num_layers=2, num_kv_heads=4, head_dim=8, fc_norm=True, latent=LatentSizes(None, 12, 2, 6, 11)
    ),
}


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_teacher(dtype: torch.dtype) -> Teacher:
    lm_head = normal(VOCAB, HIDDEN, seed=1, dtype=dtype)
    draft_ids = torch.full((VOCAB,), -1)
    draft_ids[TOKEN_IDS] = torch.arange(len(TOKEN_IDS))
    embed = normal(VOCAB, HIDDEN, seed=2, dtype=torch.float32)
    norm = 1 + normal(HIDDEN, seed=3, dtype=dtype) / 10
    return Teacher(embed, norm, lm_head, lm_head[TOKEN_IDS], draft_ids, EPS)


def make_draft(sizes: DraftSizes, teacher: Teacher, dtype: torch.dtype) -> DraftModel:
    draft = DraftModel(sizes, dtype)
    initialise(draft, teacher.draft_head, teacher.norm, seed=5, spread=0.3)
    for number, (name, parameter) in enumerate(draft.named_parameters()):
        if parameter.dim() == 1:
            parameter.data += normal(*parameter.shape, seed=100 + number, dtype=torch.float32) / 10
        assert name
    return draft.to(dtype)


def make_samples(masks: list[str], dtype: torch.dtype) -> list[tuple[str, Sample]]:
    """One sample per mask: g = generated, p = prompt."""
    samples = []
    for number, mask in enumerate(masks):
        ids = torch.randint(0, VOCAB, (len(mask),), generator=torch.Generator().manual_seed(number), dtype=torch.int32)
        aux = normal(len(mask), AUX * HIDDEN, seed=10 + number, dtype=dtype)
        last = normal(len(mask), HIDDEN, seed=50 + number, dtype=dtype)
        samples.append((f"s{number}", Sample(ids, torch.tensor([letter == "g" for letter in mask]), aux, last)))
    return samples


MASKS = ["pppppgggggggg", "ppgggppggggpp", "gggg", "pppppppppppppggg"]


KL_SKIP = replace(KL, out_of_vocabulary="skip")


@dataclass
class Reference:
    """What the slow form found, step by step: KL per counted (sample, row), and whether draft and verifier agree."""

    kl: list[dict[tuple[int, int], torch.Tensor]]
    agreed: list[dict[tuple[int, int], bool]]

    def loss(self, decay: float) -> torch.Tensor:
        terms = [decay**k * torch.stack([*kl.values()]).sum() / len(kl) for k, kl in enumerate(self.kl) if kl]
        return torch.stack(terms).sum()


def slow_reference(
    draft: DraftModel, teacher: Teacher, samples: list[tuple[str, Sample]], skip: bool = False
) -> Reference:
    """Every row of every document at every step, one query at a time, with plain tensor arithmetic.

    skip: what a draft must say from its first token outside the vocabulary on is no loss.
    """
    weights = dict(draft.named_parameters())
    reference = Reference([{} for _ in range(STEPS)], [{} for _ in range(STEPS)])
    for number, (_, sample) in enumerate(samples):
        ids, mask, length = sample.input_ids.long(), sample.loss_mask, len(sample.input_ids)
        rows = range(length - 2)
        states = [combine(draft.sizes, weights, sample.aux_hidden_states[row]) for row in rows]
        caches: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = []  # [step][layer][row]: key and value
        for step in range(STEPS):
            caches.append([[] for _ in range(draft.sizes.num_layers)])
            live = [row for row in rows if row + 1 + step < length]
            hidden = [(states[row], None) for row in live]
            for layer in range(draft.sizes.num_layers):
                embeds = [teacher.embed_tokens[ids[row + 1 + step]].to(states[0].dtype) for row in live]
                hidden = slow_layer(draft.sizes, weights, layer, embeds, hidden, live, step, caches)
            for place, row in enumerate(live):
                state, residual = hidden[place]
                prenorm = state + residual
                normed = norm(prenorm, weights["norm.weight"])
                states[row] = normed if draft.sizes.norm_output else prenorm
                if row + 2 + step < length and mask[row + 1] and mask[row + 2 + step]:
                    target = teacher.lm_head @ norm(sample.last_hidden_states[row + 1 + step], teacher.norm)
                    wanted = target[TOKEN_IDS].log_softmax(0)
                    got = (weights["lm_head.weight"] @ normed).log_softmax(0)
                    said = ids[row + 2 : row + 3 + step]
                    taught = not skip or bool(torch.isin(said, TOKEN_IDS).all())
                    reference.kl[step][number, row] = (wanted.exp() * (wanted - got)).sum() * taught
                    reference.agreed[step][number, row] = bool(TOKEN_IDS[got.argmax()] == target.argmax())
    return reference


def combine(sizes: DraftSizes, weights: dict[str, torch.Tensor], aux: torch.Tensor) -> torch.Tensor:
    if sizes.norm_before_fc:
        aux = norm(aux, weights["input_norm.weight"])
    if sizes.fc_norm:
        aux = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(aux.chunk(AUX))])
    return weights["fc.weight"] @ aux


def slow_layer(
    sizes: DraftSizes,
    weights: dict[str, torch.Tensor],
    layer: int,
    embeds: list[torch.Tensor],
    hidden: list[tuple[torch.Tensor, torch.Tensor | None]],
    live: list[int],
    step: int,
    caches: list[list[list[tuple[torch.Tensor, torch.Tensor]]]],
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """vLLM's LlamaDecoderLayer of llama_eagle3.py on each row."""

    def weight(name: str) -> torch.Tensor:
        return weights[f"layers.{layer}.{name}.weight"]

    inputs, residuals = [], []
    for embed, (state, residual) in zip(embeds, hidden, strict=True):
        if layer == 0:
            normed = norm(state, weight("hidden_norm"))
            residuals.append(normed if sizes.norm_before_residual else state)
            inputs.append(torch.cat([norm(embed, weight("input_layernorm")), normed]))
        else:
            residuals.append(state + residual)
            inputs.append(norm(residuals[-1], weight("input_layernorm")))
    for row, given in zip(live, inputs, strict=True):
        caches[step][layer].append(key_and_value(sizes, weight, given, row + step))
    results: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for place, row in enumerate(live):
        query = query_of(sizes, weight, inputs[place], row + step)
        oldest = max(0, row + step + 1 - (sizes.sliding_window or row + step + 1))
        seen = caches[0][layer][oldest : row + 1] + [caches[later][layer][row] for later in range(1, step + 1)]
        attended = attend(query, seen, sizes.num_heads // sizes.num_kv_heads)
        residual = residuals[place] + weight("self_attn.o_proj") @ attended
        inner = norm(residual, weight("post_attention_layernorm"))
        gate = torch.nn.functional.silu(weight("mlp.gate_proj") @ inner)
        results.append((weight("mlp.down_proj") @ (gate * (weight("mlp.up_proj") @ inner)), residual))
    return results


Weight = Callable[[str], torch.Tensor]


def key_and_value(
    sizes: DraftSizes, weight: Weight, given: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    latent = sizes.latent
    if latent is None:
        key, value = ((weight(f"self_attn.{name}_proj") @ given).view(sizes.num_kv_heads, -1) for name in "kv")
        return rotated(key, position), value
    whole = weight("self_attn.kv_a_proj_with_mqa") @ given
    narrow, shared = whole[: latent.kv_lora_rank], whole[latent.kv_lora_rank :]
    wide = (weight("self_attn.kv_b_proj") @ norm(narrow, weight("self_attn.kv_a_layernorm"))).view(sizes.num_heads, -1)
    keys = [torch.cat([head[: latent.qk_nope_head_dim], turned(shared, position)]) for head in wide]
    return torch.stack(keys), wide[:, latent.qk_nope_head_dim :]


def query_of(sizes: DraftSizes, weight: Weight, given: torch.Tensor, position: int) -> torch.Tensor:
    latent = sizes.latent
    if latent is not None and latent.q_lora_rank is not None:
        narrow = norm(weight("self_attn.q_a_proj") @ given, weight("self_attn.q_a_layernorm"))
        flat = weight("self_attn.q_b_proj") @ narrow
    else:
        flat = weight("self_attn.q_proj") @ given
    heads = flat.view(sizes.num_heads, -1)
    if latent is None:
        return rotated(heads, position)
    at = latent.qk_nope_head_dim
    return torch.stack([torch.cat([head[:at], turned(head[at:], position)]) for head in heads])


def turned(part: torch.Tensor, position: int) -> torch.Tensor:
    """Neighbours as complex numbers, turned by their angles."""
    angles = position * 100.0 ** -(torch.arange(len(part) // 2, dtype=torch.float32) * 2 / len(part))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(part.view(-1, 2)) * turns).flatten().to(part.dtype)


def attend(query: torch.Tensor, seen: list[tuple[torch.Tensor, torch.Tensor]], groups: int) -> torch.Tensor:
    keys = torch.stack([key for key, _ in seen]).repeat_interleave(groups, 1)
    values = torch.stack([value for _, value in seen]).repeat_interleave(groups, 1)
    scores = torch.einsum("hd,nhd->hn", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values).flatten()


def norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states / (states.square().mean() + EPS).sqrt() * weight


def rotated(heads: torch.Tensor, position: int) -> torch.Tensor:
    half = heads.shape[-1] // 2
    angles = position * 100.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    left, right = heads[..., :half], heads[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 2e-4)])
def test_loss_agreement_and_gradients_equal_the_slow_form(form: str, dtype: torch.dtype, tolerance: float) -> None:
    teacher = make_teacher(dtype)
    draft, samples = make_draft(FORMS[form], teacher, dtype), make_samples(MASKS, dtype)
    batch = build_batch(samples, STEPS)
    weights = torch.tensor([0.8**k for k in range(STEPS)], dtype=dtype) / batch.counted.sum(1)
    loss, score = score_batch(draft, batch, teacher, weights, full_choices(batch, teacher), KL)
    reference = slow_reference(draft, teacher, samples)
    assert score.counted == [len(kl) for kl in reference.kl]
    assert score.agreed == [sum(agreed.values()) for agreed in reference.agreed]
    torch.testing.assert_close(loss, reference.loss(0.8), atol=tolerance, rtol=tolerance)
    assert score.loss(0.8) == pytest.approx(reference.loss(0.8).item(), rel=1e-4)
    found = torch.autograd.grad(loss, [*draft.parameters()])
    expected = torch.autograd.grad(reference.loss(0.8), [*draft.parameters()])
    for (name, _), gradient, wanted in zip(draft.named_parameters(), found, expected, strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(
            gradient, wanted, atol=tolerance * scale, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_tokens_outside_the_vocabulary_end_what_a_row_teaches() -> None:
    """out_of_vocabulary: skip changes the loss and its gradients alone."""
    teacher = make_teacher(torch.float64)
    draft, samples = make_draft(SIZES, teacher, torch.float64), make_samples(MASKS, torch.float64)
    batch = build_batch(samples, STEPS)
    weights = torch.tensor([0.8**k for k in range(STEPS)], dtype=torch.float64) / batch.counted.sum(1)
    choices = full_choices(batch, teacher)
    loss, score = score_batch(draft, batch, teacher, weights, choices, KL_SKIP)
    expected = slow_reference(draft, teacher, samples, skip=True).loss(0.8)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(loss, [*draft.parameters()])
    for gradient, wanted in zip(found, torch.autograd.grad(expected, [*draft.parameters()]), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=0)
    all_loss, all_score = score_batch(draft, batch, teacher, weights, choices, KL)
    assert 0 < loss < all_loss
    assert replace(score, losses=[]) == replace(all_score, losses=[])


def test_a_row_is_reachable_up_to_its_first_token_outside() -> None:
    """Answer tokens in (i) and out (o) of the vocabulary; row r predicts the tokens r + 2, r + 3, r + 4."""
    inside, outside = int(TOKEN_IDS[3]), 1
    assert outside not in TOKEN_IDS
    (name, sample) = make_samples(["pgggggg"], torch.float64)[0]
    ids = torch.tensor([0, *(inside if letter == "i" else outside for letter in "oiioii")], dtype=torch.int32)
    batch = build_batch([(name, replace(sample, input_ids=ids))], STEPS)
    taught = reachable(batch, make_teacher(torch.float64).draft_ids)
    rows = [sorted(batch.rows[batch.source[step, taught[step]]].tolist()) for step in range(STEPS)]
    assert rows == [[0, 1, 3, 4], [0, 3], []]


def test_prefix_agreement_needs_every_step_before() -> None:
    teacher = make_teacher(torch.float64)
    draft, samples = make_draft(SIZES, teacher, torch.float64), make_samples(MASKS, torch.float64)
    batch = build_batch(samples, STEPS)
    _, score = score_batch(draft, batch, teacher, torch.ones(STEPS), full_choices(batch, teacher), KL)
    reference = slow_reference(draft, teacher, samples)
    for step in range(STEPS):
        rows = [key for key in reference.agreed[step] if all(key in reference.agreed[k] for k in range(step))]
        hits = [all(reference.agreed[k][key] for k in range(step + 1)) for key in rows]
        assert (score.prefix_agreed[step], score.prefix_counted[step]) == (sum(hits), len(hits))
    assert score.expected_acceptance_length() == 1 + sum(score.prefix_agreement())


def test_packing_changes_nothing() -> None:
    """Documents do not see each other: a packed batch gives the sum of its samples."""
    teacher = make_teacher(torch.float64)
    draft, samples = make_draft(SIZES, teacher, torch.float64), make_samples(MASKS, torch.float64)
    packed = score_batch(draft, build_batch(samples, STEPS), teacher, torch.ones(STEPS), None, KL)[1]
    alone = empty_score(STEPS)
    for sample in samples:
        alone.add(score_batch(draft, build_batch([sample], STEPS), teacher, torch.ones(STEPS), None, KL)[1])
    assert packed.losses == pytest.approx(alone.losses, rel=1e-9)
    assert (packed.counted, packed.agreed, packed.prefix_agreed) == (alone.counted, alone.agreed, alone.prefix_agreed)


def test_bfloat16_is_close_to_float32() -> None:
    teacher = make_teacher(torch.float32)
    batch = build_batch(make_samples(MASKS, torch.float32), STEPS)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        draft = make_draft(SIZES, teacher, torch.float32)
        draft.compute_dtype = dtype
        losses.append(score_batch(draft, batch, teacher, torch.ones(STEPS), None, KL)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=0.03)


def gradient_rows(batch: Batch) -> list[list[int]]:
    """For each step the positions i (of the only sample) whose draft output has a gradient."""
    teacher = make_teacher(torch.float64)
    draft = make_draft(SIZES, teacher, torch.float64)
    found = []
    for step in range(STEPS):
        outputs: list[torch.Tensor] = []
        handle = draft.norm.register_forward_hook(lambda _m, _i, output: outputs.append(output))  # noqa: B023
        weights = torch.zeros(STEPS).index_fill_(0, torch.tensor([step]), 1.0)
        loss, _ = score_batch(draft, batch, teacher, weights, None, KL)
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, [outputs[step]])
        found.append((batch.rows[gradient.abs().sum(1) > 0]).tolist())
    return found


def test_m01_a_row_has_a_gradient_if_and_only_if_what_it_predicts_was_generated() -> None:
    """Five prompt tokens, then an answer of three, of four, of two."""
    assert gradient_rows(build_batch(make_samples(["pppppggg"], torch.float64), STEPS)) == [[4, 5], [4], []]
    assert gradient_rows(build_batch(make_samples(["pppppgggg"], torch.float64), STEPS)) == [[4, 5, 6], [4, 5], [4]]
    assert gradient_rows(build_batch(make_samples(["pppppgg"], torch.float64), STEPS)) == [[4], [], []]


@pytest.mark.parametrize("mask", ["pgggpppggg", "pppppggg", "gggpppp", "pgpggpgggp"])
def test_m02_no_step_trains_a_row_that_predicts_a_prompt_token(mask: str) -> None:
    """Short answers, where being off by one shows most. Step k reads the mask at the predicted token, k + 2 ahead."""
    for step, found in enumerate(gradient_rows(build_batch(make_samples([mask], torch.float64), STEPS))):
        rows = range(len(mask) - 2 - step)
        assert found == [i for i in rows if mask[i + 1] == "g" and mask[i + 2 + step] == "g"]


def test_m05_a_batch_without_a_supervised_token_is_a_loss_of_zero() -> None:
    """Answers of no token and of one: nothing to learn, no NaN in loss or gradients."""
    teacher = make_teacher(torch.float64)
    draft = make_draft(SIZES, teacher, torch.float64)
    batch = build_batch(make_samples(["pppp", "ppppg"], torch.float64), STEPS)
    loss, score = score_batch(draft, batch, teacher, torch.ones(STEPS), None, KL)
    assert (loss.item(), score.counted, score.losses) == (0, [0] * STEPS, [0] * STEPS)


def test_later_steps_read_the_true_tokens_whatever_the_draft_says() -> None:
    """The embedding of step k is that of x_{i+1+k}, for a draft that is wrong everywhere."""
    samples = make_samples(["ppppgggggg"], torch.float64)
    batch, ids = build_batch(samples, STEPS), samples[0][1].input_ids.tolist()
    for step in range(STEPS):
        for row, token in zip(batch.rows.tolist(), batch.step_ids[step].tolist(), strict=True):
            if row + 2 + step < len(ids):
                assert token == ids[row + 1 + step]
    seen: list[torch.Tensor] = []
    teacher = make_teacher(torch.float64)
    draft = make_draft(SIZES, teacher, torch.float64)
    draft.layers[0].input_layernorm.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    unroll(draft, batch, teacher.embed_tokens)
    assert torch.equal(seen[0][batch.rows], teacher.embed_tokens[batch.step_ids[0]])
    for step in range(1, STEPS):
        assert torch.equal(seen[step], teacher.embed_tokens[batch.step_ids[step]])


def test_steps_are_rotated_as_the_server_rotates_them() -> None:
    """Row i is at position i at step 0 and one further at each later step."""
    positions: list[list[int]] = []
    teacher = make_teacher(torch.float64)
    draft = make_draft(SIZES, teacher, torch.float64)
    original = draft.rotation
    draft.rotation = lambda given: positions.append(given.tolist()) or original(given)  # type: ignore[method-assign,func-returns-value]
    batch = build_batch(make_samples(["ppgggg", "pggg"], torch.float64), 2)
    unroll(draft, batch, teacher.embed_tokens)
    assert positions == [[0, 1, 2, 3, 0, 1], [2, 3, 4, 1, 2]]


def test_memory_starts_empty() -> None:
    assert LayerMemory(1.0, None).context is None and LayerMemory(1.0, None).own == ()
