"""The model card: README.md of a draft, with Hugging Face's metadata, from its lineage and, once there, its evaluation.

`train` writes it with the numbers of training. Those of `evaluate` come later, and a file of the draft's directory that
changed then would be another draft to DVC; `eagle3 card` prints the card with them, `eagle3 export` writes that one.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eagle3.console import visible
from eagle3.lineage import Lineage
from eagle3.params import VerifierParams

CARD = "README.md"
COMMON_TOKENS = 3  # what most EAGLE-3 drafts are trained for
#: Hub id and licence of the weights behind the bundled verifiers.
BUNDLED_BASE = ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\s", re.DOTALL)
OUTSIDE_A_NAME = re.compile(r"[^\w.-]", re.ASCII)
PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
MEASURED = (
    "acceptance_length",
    "speedup",
    "tokens_per_second_plain",
    "tokens_per_second_draft",
    "num_prompts",
    "num_drafts",
    "best_num_speculative_tokens",
)


def base_of(params: VerifierParams, folder: Path) -> tuple[str | None, str | None]:
    """Hub id and licence of the verifier in `folder`, each None where it is not known."""
    if params.model.startswith("bundled:"):
        return BUNDLED_BASE
    on_hub = params.revision is not None and not Path(params.model).is_dir() and HUB_ID.fullmatch(params.model)
    return params.model if on_hub else None, _license(folder / CARD)


def _license(card: Path) -> str | None:
    """The licence in a model card's metadata."""
    try:
        found = FRONT_MATTER.match(card.read_text(encoding="utf-8"))
        told = YAML(typ="safe", pure=True).load(found[1])["license"] if found else None
    except (OSError, UnicodeDecodeError, YAMLError, KeyError, TypeError):
        return None
    return told if isinstance(told, str) and LICENSE.fullmatch(told) else None


def usual_tokens(lineage: Lineage) -> int:
    """How many tokens to draft at a time where nothing was measured: as many as the draft learnt to, if it says so."""
    learnt = (lineage.train or {}).get("ttt_steps")
    return learnt if isinstance(learnt, int) and learnt > 0 else COMMON_TOKENS


def model_card(lineage: Lineage, evaluation: dict[str, Any] | None, num_speculative_tokens: int) -> str:
    """The card in Markdown. evaluation: the metrics of `evaluate` for this draft; None = not measured yet."""
    verifier, vocabulary = lineage.verifier, lineage.vocabulary
    asked = {"method": "eagle3", "model": "<this directory>", "num_speculative_tokens": num_speculative_tokens}
    name = lineage.base_model or verifier.name
    lines = [
        *_metadata(lineage),
        "",
        f"# EAGLE-3 draft for {markdown(verifier.name)}",
        "",
        _taught_by(lineage),
        f"It drafts for exactly this verifier: digest `{_code(verifier.digest)}`, in {markdown(verifier.engine)}, "
        f"{markdown(verifier.dtype)}.",
        "",
        "Serve it with vLLM:",
        "",
        f"    vllm serve {shlex.quote(visible(name))} --speculative-config {shlex.quote(json.dumps(asked))}",
        "",
        "## Evaluation",
        "",
        *(_evaluation(evaluation) if evaluation is not None else [NOT_MEASURED]),
        "",
        "## What it was made of",
        "",
        *_table(_made_of(lineage)),
        "",
        f"Its vocabulary has {vocabulary.size:,} of the verifier's {vocabulary.verifier_size:,} tokens. "
        "`lineage.json` holds the whole chain; `eagle3 lineage --check <this directory>` proves or refutes it.",
    ]
    if lineage.training:
        rows = [(f"`{_code(name)}`", _number(value)) for name, value in lineage.training.items()]
        lines += ["", "## Training", "", *_table(rows)]
    return "\n".join(lines) + "\n"


NOT_MEASURED = (
    "Not measured when this card was written. In the project that made it, `dvc repro evaluate` decodes held-out "
    "prompts in vLLM with and without the draft, and `eagle3 card` prints this card with the numbers."
)


def markdown(text: str) -> str:
    """Foreign text as Markdown shows it literally: no markup, no HTML, no links, on one line."""
    return PUNCTUATION.sub(r"\\\1", visible(text))


def _code(text: str) -> str:
    """A digest or a metric's name between backticks; whatever does not belong into one becomes a question mark."""
    return OUTSIDE_A_NAME.sub("?", text)


def _metadata(lineage: Lineage) -> list[str]:
    base, license_name = lineage.base_model, lineage.license
    lines = ["---"]
    if base is not None and HUB_ID.fullmatch(base):
        lines.append(f"base_model: {base}")
    if license_name is not None and LICENSE.fullmatch(license_name):
        lines.append(f'license: "{license_name}"')  # in quotes, or "no" is no text
    return [*lines, "library_name: vllm", "pipeline_tag: text-generation", *TAGS, "---"]


TAGS = ("tags:", "- eagle3", "- speculative-decoding")


def _taught_by(lineage: Lineage) -> str:
    if lineage.imported is not None:
        return "Imported from a checkpoint that was trained elsewhere."
    asked = (lineage.origin.params if lineage.origin else {}).get("generate", {})
    share = asked.get("reference_share") or 0
    if share == 1:
        return "Trained on the answers of people, not on the verifier's own."
    people = f", and on the answers of people to {share:.0%} of the prompts that have one" if share else ""
    return f"Trained on what the verifier itself writes, thinking and answers{people}, by training-time test."


def _made_of(lineage: Lineage) -> list[tuple[str, str]]:
    rows = [("weights", f"`{_code(sha256)}` ({markdown(name)})") for name, sha256 in lineage.draft.items()]
    if lineage.hidden_states is not None:
        states = lineage.hidden_states
        told = f"{states.bytes:,} bytes in {states.shards:,} shards, {markdown(states.dtype)}"
        rows.append(("hidden states", f"`{_code(states.index_sha256)}`, {told}"))
    if lineage.tokens is not None:
        tokens = lineage.tokens
        told = f"{tokens.samples:,} samples, {tokens.tokens:,} tokens, {tokens.loss_tokens:,} of them generated"
        rows.append(("samples", f"`{_code(tokens.digest)}`, {told}"))
    if lineage.prompts is not None:
        rows.append(("prompts", f"`{_code(lineage.prompts.digest)}`, {lineage.prompts.prompts:,}"))
    if lineage.origin is not None and lineage.origin.git is not None:
        git = lineage.origin.git
        changed = f", with {len(git.uncommitted)} uncommitted files" if git.uncommitted else ""
        rows.append(("commit", f"`{_code(git.commit)}`{changed}"))
    if lineage.origin is not None:
        rows.append(("packages", markdown(", ".join(f"{k} {v}" for k, v in lineage.origin.packages.items()))))
    if lineage.imported is not None:
        rows += [
            ("imported", f"`{_code(sha256)}` ({markdown(name)})") for name, sha256 in lineage.imported.files.items()
        ]
    return rows


def _evaluation(metrics: dict[str, Any]) -> list[str]:
    rates = sorted(name for name in metrics if re.fullmatch(r"acceptance_rate_\d+", name))
    rows = [(f"`{name}`", _number(metrics[name])) for name in (*MEASURED, *rates) if name in metrics]
    lines = ["Held-out prompts, decoded in vLLM with and without the draft:", "", *_table(rows)]
    groups = metrics.get("by_category")
    if groups:
        own = [(markdown(name), _number(group["acceptance_length"])) for name, group in groups.items()]
        lines += ["", "Acceptance length by category:", "", *_table(own)]
    return lines


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return markdown(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
