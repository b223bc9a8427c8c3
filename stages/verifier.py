"""Stage `verifier`: which model the draft is for. Runs at every `dvc repro`, so a model changed in place is noticed."""

from pathlib import Path

from eagle3.params import load_params
from eagle3.stage import run_stage
from eagle3.verifier import kept_identity, write_identity


def verifier(identity: Path, params_path: Path) -> None:
    """Write the verifier's identity (digest, sizes, layer ids, stop tokens, think markers, engine) to IDENTITY."""
    params = load_params(params_path)
    write_identity(kept_identity(params.verifier, params.reasoning), identity)


if __name__ == "__main__":
    run_stage(verifier)
