"""The peer's side of benchmarks.train_step: speculators 0.9.0's EAGLE-3 draft, run by an interpreter that has it.

Arguments: VERIFIER_FOLDER ATTENTION PRECISION TOKENS TTT_STEPS DRAFT_VOCAB DOCUMENT PROMPT REPETITIONS
Last line: {"seconds": [...], "peak_bytes": n}. Random inputs: speed and memory only.
"""

import json
import resource
import sys
import time

import torch
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import AutoConfig

folder, attention, precision = sys.argv[1:4]
tokens, ttt_steps, draft_vocab, document, prompt, repetitions = map(int, sys.argv[4:10])

torch.manual_seed(0)
config = AutoConfig.from_pretrained(folder)
aux_layer_ids = [2, config.num_hidden_layers // 2, config.num_hidden_layers - 3]
config.num_hidden_layers = 1
config.tie_word_embeddings = False
draft = Eagle3DraftModel.from_training_args(
    config,
    t2d=torch.arange(config.vocab_size) < draft_vocab,
    d2t=torch.zeros(draft_vocab, dtype=torch.long),
    draft_vocab_size=draft_vocab,
    norm_before_residual=True,
    norm_before_fc=False,
    ttt_steps=ttt_steps,
    verifier_name_or_path=folder,
    draft_attn_impl=attention,
    target_layer_ids=aux_layer_ids,
    num_layers=1,
).float()
dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
if precision == "bfloat16":
    draft = draft.to(dtype)
optimiser = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-4)
settings, _ = Eagle3DraftModel.get_trainer_kwargs(
    loss_fn="kl_div", loss_implementation="eager", ttt_steps=ttt_steps, ttt_step_loss_decay=1.0
)
positions = torch.arange(tokens) % document
batch = {
    "hidden_states": torch.randn(1, tokens, 3 * config.hidden_size, dtype=dtype),
    "input_ids": torch.randint(0, draft_vocab, (1, tokens)),
    "document_ids": (torch.arange(tokens) // document)[None],
    "loss_mask": (positions >= prompt)[None],
    "position_ids": positions[None],
    "verifier_last_hidden_states": torch.randn(1, tokens, config.hidden_size, dtype=dtype),
}
seconds = []
for _ in range(repetitions + 1):  # the first one warms up
    start = time.perf_counter()
    _, loss, _ = draft(**batch, **settings)
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    seconds.append(time.perf_counter() - start)
print(json.dumps({"seconds": seconds[1:], "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
