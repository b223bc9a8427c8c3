"""A recording engine whose model takes no time, for benchmarks/store.py: all that is left is the writing.

States come out of a paged cache in memory through the plug-in's own StateWriter; they are random numbers, the same
blocks over and over.
"""

import json
from pathlib import Path
from typing import Any

import torch

from eagle3.serving.connector import FinishedRequest, StateWriter
from eagle3.serving.process import ParentPipe
from eagle3.serving.recorder import Placement
from eagle3.shards import DTYPES

BLOCK_TOKENS, CACHE_TOKENS = 128, 8192


def run_engine(pipe: ParentPipe, arguments: dict[str, Any]) -> None:
    """As connector.run_engine. The folder of the model holds nothing but its config.json."""
    transfer = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    draft = arguments["speculative_config"]["draft_model_config"]["hf_config"]
    layers = len(draft["eagle_aux_hidden_state_layer_ids"])
    hidden = json.loads((Path(arguments["model"]) / "config.json").read_text())["hidden_size"]
    blocks = CACHE_TOKENS // BLOCK_TOKENS
    cache = torch.randn(blocks, layers, BLOCK_TOKENS, hidden).to(DTYPES[arguments["dtype"]])
    writer = StateWriter(cache, transfer["completions"], transfer["max_pending_bytes"])
    pipe.send({"cache_tokens": CACHE_TOKENS})
    while True:
        if pipe.waits(0.0005):
            message = pipe.receive()
            if message is None:
                return
            writer.accept([_finished(Placement(**placement), blocks) for _, placement in message])
        writer.advance()


def _finished(placement: Placement, blocks: int) -> FinishedRequest:
    needed = -(-placement.length // BLOCK_TOKENS)
    return FinishedRequest("", placement, [(placement.ordinal + i) % blocks for i in range(needed)], None)
