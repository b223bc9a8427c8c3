"""Train an EAGLE-3 draft on recorded hidden states and export it as vLLM loads it.

python -m stages.train data/hidden_states data/verifier.json data/draft data/metrics/train.json data/plots/train \
    params.yaml
"""

import json
from pathlib import Path

from eagle3.console import say
from eagle3.draft.checkpoint import CheckpointStore
from eagle3.draft.data import count_generated, read_corpus
from eagle3.draft.export import export_draft
from eagle3.draft.model import choose_sizes
from eagle3.draft.training import Trainer, choose_device, run_key, run_metrics
from eagle3.draft.vocab import choose_vocabulary
from eagle3.draft.warm_start import read_checkpoint
from eagle3.lineage import write_lineage
from eagle3.params import load_params
from eagle3.stage import run_stage
from eagle3.tables import INDEX, write_metrics
from eagle3.verifier import load_head, locate_verifier, read_identity, verifier_digest
from eagle3.workstore import work_folder


def train(hidden_states: Path, verifier_path: Path, draft: Path, metrics: Path, plots: Path, params_path: Path) -> None:
    """Train, keep the best draft by validation, export it."""
    params = load_params(params_path)
    settings, verifier = params.train, read_identity(verifier_path)
    present = verifier_digest(params.verifier)
    if present != verifier.digest:
        raise ValueError(
            f"verifier.model {params.verifier.model} has digest {present[:12]}, {verifier_path} says "
            f"{verifier.digest[:12]}: the model changed since; run `dvc repro`"
        )
    folder = locate_verifier(params.verifier)
    corpus = read_corpus(hidden_states, verifier)
    counts = count_generated(corpus, verifier.vocab_size)
    vocabulary = choose_vocabulary(
        counts, verifier.stop_token_ids, settings.draft_vocab_size, settings.draft_vocab_coverage
    )
    config = json.loads((folder / "config.json").read_text())
    sizes = choose_sizes(
        config, len(verifier.aux_layer_ids), len(vocabulary), verifier.max_position_embeddings, settings
    )
    checkpoint = read_checkpoint(Path(settings.warm_start)) if settings.warm_start else None
    if checkpoint is not None:
        sizes = checkpoint.fit(sizes, verifier.aux_layer_ids)
    say(
        f"train: {len(corpus.train):,} train and {len(corpus.validation):,} validation samples; {len(vocabulary):,} "
        f"draft tokens cover {vocabulary.coverage:.2%} of what was generated; verifier {verifier.digest[:12]}"
    )
    if not corpus.validation:
        say("train: the validation split is empty: the last weights are exported and no agreement is measured")
    key = run_key(corpus, verifier, settings, choose_device(), checkpoint)
    with work_folder("train") as work:
        trainer = Trainer(
            corpus, sizes, vocabulary, load_head(folder), settings, CheckpointStore(work / key), checkpoint
        )
        trainer.train(plots)
    export_draft(draft, trainer.draft, vocabulary, verifier, settings.export_dtype)
    numbers = run_metrics(trainer, vocabulary)
    write_lineage(draft, verifier, hidden_states / INDEX, settings, numbers)
    write_metrics(metrics, numbers)


if __name__ == "__main__":
    run_stage(train)
