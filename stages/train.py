"""Train an EAGLE-3 draft on recorded hidden states and export it as vLLM loads it.

python -m stages.train data/hidden_states data/verifier.json data/draft data/metrics/train.json data/plots/train \
    params.yaml
"""

import json
from contextlib import nullcontext
from pathlib import Path

from eagle3.card import CARD, base_of, model_card, usual_tokens
from eagle3.console import say
from eagle3.draft.checkpoint import CheckpointStore
from eagle3.draft.data import Corpus, count_generated, read_corpus
from eagle3.draft.export import export_draft
from eagle3.draft.model import choose_sizes
from eagle3.draft.processes import Processes, check_work, joined, under_torchrun
from eagle3.draft.torchrun import launch
from eagle3.draft.training import Trainer, run_key, run_metrics
from eagle3.draft.vocab import DraftVocabulary, choose_vocabulary, covered_share
from eagle3.draft.warm_start import read_checkpoint
from eagle3.draft.watching import require_tensorboard, vocabulary_warning
from eagle3.lineage import vocabulary_facts, write_lineage
from eagle3.origin import NOTE, origin_once, trained_lineage
from eagle3.params import Params, load_params
from eagle3.stage import check_commit, run_stage
from eagle3.tables import write_metrics
from eagle3.verifier import VerifierIdentity, locate_verifier, read_identity, verifier_digest
from eagle3.verifier_head import load_head
from eagle3.workstore import run_folder, write_file


def train(hidden_states: Path, verifier_path: Path, draft: Path, metrics: Path, plots: Path, params_path: Path) -> None:
    """Train, keep the best draft by validation, export it: in `train.nproc` processes or those of your own torchrun."""
    params = load_params(params_path)
    if params.train.nproc > 1 and not under_torchrun():
        check_work(params.train.nproc, params.train)
        launch("stages.train", [hidden_states, verifier_path, draft, metrics, plots, params_path], params.train.nproc)
        return
    with joined(params.train) as processes:
        train_here(hidden_states, verifier_path, draft, metrics, plots, params, processes)


def train_here(
    hidden_states: Path,
    verifier_path: Path,
    draft: Path,
    metrics: Path,
    plots: Path,
    params: Params,
    processes: Processes,
) -> None:
    """The part of one process; the first one writes the files."""
    settings, verifier = params.train, read_identity(verifier_path)
    present = verifier_digest(params.verifier)
    if present != verifier.digest:
        raise ValueError(
            f"verifier.model {params.verifier.model} has digest {present[:12]}, {verifier_path} says "
            f"{verifier.digest[:12]}: the model changed since; run `dvc repro`"
        )
    if processes.leads:
        check_commit()
    if settings.tensorboard:
        require_tensorboard()
    folder = locate_verifier(params.verifier)
    corpus = read_corpus(hidden_states, verifier)
    checkpoint = read_checkpoint(Path(settings.warm_start)) if settings.warm_start else None
    key = run_key(corpus, verifier, settings, processes.device, checkpoint)
    processes.agree(key)
    counts = [
        count_generated(corpus.folder, processes.share(split), verifier.vocab_size).to(processes.device)
        for split in (corpus.train, corpus.validation)
    ]
    processes.sum(counts)
    vocabulary = choose_vocabulary(
        counts[0].cpu(), verifier.stop_token_ids, settings.draft_vocab_size, settings.draft_vocab_coverage
    )
    coverage = covered_share(counts[1].cpu(), vocabulary.token_ids)
    config = json.loads((folder / "config.json").read_text())
    sizes = choose_sizes(
        config, len(verifier.aux_layer_ids), len(vocabulary), verifier.max_position_embeddings, settings
    )
    if checkpoint is not None:
        sizes = checkpoint.fit(sizes, verifier.aux_layer_ids)
    if processes.leads:
        announce(corpus, vocabulary, coverage, verifier, processes)
    with run_folder("train", key) if processes.leads else nullcontext() as work:
        store = CheckpointStore(work) if work else None
        origin = origin_once(work / NOTE, hidden_states) if work else None
        trainer = Trainer(corpus, sizes, vocabulary, load_head(folder), settings, store, processes, checkpoint)
        trainer.train(plots)
    if origin is not None:
        export_draft(draft, trainer.draft, vocabulary, verifier, settings.export_dtype)
        numbers = run_metrics(trainer, vocabulary, coverage)
        facts = vocabulary_facts(vocabulary.token_ids.tolist(), vocabulary.verifier_size, vocabulary.coverage)
        base = base_of(params.verifier, folder)
        lineage = trained_lineage(draft, hidden_states, verifier, base, facts, settings, numbers, origin)
        write_lineage(draft, lineage)
        write_file(draft / CARD, model_card(lineage, None, usual_tokens(lineage)).encode())
        write_metrics(metrics, numbers)


def announce(
    corpus: Corpus,
    vocabulary: DraftVocabulary,
    validation_coverage: float,
    verifier: VerifierIdentity,
    processes: Processes,
) -> None:
    """Say what the draft will learn from."""
    say(
        f"train: {len(corpus.train):,} train and {len(corpus.validation):,} validation samples; {len(vocabulary):,} "
        f"draft tokens cover {vocabulary.coverage:.2%} of what was generated; verifier {verifier.digest[:12]}"
        + (f"; {processes.count} processes" if processes.count > 1 else "")
    )
    warning = vocabulary_warning(vocabulary, validation_coverage)
    if warning is not None:
        say(warning)
    if not corpus.validation:
        say("train: the validation split is empty: the last weights are exported and no agreement is measured")


if __name__ == "__main__":
    run_stage(train)
