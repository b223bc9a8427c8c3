"""Begin from an EAGLE-3 checkpoint that is there already, ours or anybody's, instead of from random weights.

Two formats are read: the plain one, as vLLM serves it (`midlayer.` of older checkpoints is layer 0), and that of
speculators, whose config holds the layer's form in `transformer_layer_config`. Rows of the checkpoint's head go to the
same tokens of the new draft vocabulary; tokens that the checkpoint does not know keep the verifier's rows.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eagle3.console import visible
from eagle3.digests import digest, digest_file
from eagle3.draft.model import DraftModel, DraftSizes
from eagle3.draft.vocab import DraftVocabulary
from eagle3.verifier import INDEX_FILE

CONFIG = "config.json"
FLAGS = {"norm_before_residual": (False, True), "norm_output": (False, False)}  # if not said: plain, speculators
ELSEWHERE = ("embed_tokens.", "verifier_", "rotary_emb.")  # the verifier's own, or nothing that is learnt


@dataclass(frozen=True)
class Checkpoint:
    """An EAGLE-3 checkpoint. tensors: by our names, as stored; token_ids int64 [D]: of its draft vocabulary.

    form: plain | speculators. layer: the config of its decoder layers. files: of which it is read. embed_tokens: [V, H]
    where it has an embedding of its own.
    """

    folder: Path
    form: str
    digest: str
    files: tuple[Path, ...]
    config: dict[str, Any]
    layer: dict[str, Any]
    embed_tokens: torch.Tensor | None
    flags: dict[str, bool]
    sliding_window: int | None
    rope_parameters: dict[str, Any] | None
    tensors: dict[str, torch.Tensor]
    token_ids: torch.Tensor

    def fit(self, sizes: DraftSizes, aux_layer_ids: tuple[int, ...]) -> DraftSizes:
        """The sizes of a draft that goes on from here: with the checkpoint's rotary parameters, if it says them.

        Raises ValueError when the checkpoint reads other layers, or computes otherwise than params.yaml says.
        """
        latent = any(name.endswith("kv_a_proj_with_mqa.weight") for name in self.tensors)
        if latent != (sizes.latent is not None):
            raise ValueError(
                f"train.warm_start: {self.folder} has {'latent' if latent else 'no latent'} attention; "
                f"set train.attention: {'latent' if latent else 'heads'}"
            )
        told = self.config.get("eagle_aux_hidden_state_layer_ids")
        if told is not None and tuple(told) != aux_layer_ids:
            raise ValueError(
                f"train.warm_start: {self.folder} reads the states of layers {list(told)}, the recorded ones are of "
                f"{list(aux_layer_ids)}; set verifier.aux_layer_ids: {list(told)}"
            )
        if self.sliding_window != sizes.sliding_window:
            raise ValueError(
                f"train.warm_start: {self.folder} has a sliding window of {self.sliding_window or 'any length'}; "
                f"set train.sliding_window: {self.sliding_window or 'null'}"
            )
        for name, value in self.flags.items():
            if value != getattr(sizes, name):
                raise ValueError(
                    f"train.warm_start: {self.folder} was trained with {name}: {str(value).lower()}; "
                    f"set train.{name} so"
                )
        return sizes if self.rope_parameters is None else replace(sizes, rope_parameters=self.rope_parameters)

    @torch.no_grad()
    def load_into(self, draft: DraftModel, vocabulary: DraftVocabulary) -> int:
        """Copy the weights into an initialised draft; the number of draft tokens whose head rows it knew.

        Raises ValueError that names the tensors which are missing, unknown or of another shape.
        """
        expected = draft.state_dict()
        found = {name: value for name, value in self.tensors.items() if name != "lm_head.weight"}
        wanted = {name: value for name, value in expected.items() if name != "lm_head.weight"}
        problems = [
            *(f"{name} missing" for name in sorted(wanted.keys() - found.keys())),
            *(f"{name} unknown" for name in sorted(found.keys() - wanted.keys())),
            *(
                f"{name} of shape {list(found[name].shape)} where the draft has {list(wanted[name].shape)}"
                for name in sorted(wanted.keys() & found.keys())
                if found[name].shape != wanted[name].shape
            ),
        ]
        if problems:
            raise ValueError(
                f"train.warm_start: {self.folder} has another form than this draft: {'; '.join(problems[:6])}"
                + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
                + ". The form follows from the verifier and train.*"
            )
        for name, value in found.items():
            expected[name].copy_(value.float())
        if "lm_head.weight" not in self.tensors:
            return 0
        known = torch.isin(vocabulary.token_ids, self.token_ids)
        rows = torch.searchsorted(self.token_ids, vocabulary.token_ids[known])
        draft.lm_head.weight[known.to(draft.lm_head.weight.device)] = self.tensors["lm_head.weight"][rows].to(
            draft.lm_head.weight
        )
        return int(known.sum())


def read_checkpoint(folder: Path, asked_by: str = "train.warm_start") -> Checkpoint:
    """Read a checkpoint's folder. Raises ValueError, which begins with `asked_by`, when it is none, names files outside
    the folder, or holds nothing but pickled weights."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        speculators = "speculators_model_type" in config
        if speculators and config["speculators_model_type"] != "eagle3":
            raise ValueError(f"a {visible(str(config['speculators_model_type']))} model of speculators")
        layer = config["transformer_layer_config"] if speculators else config
        own = {**config.get("eagle_config", {}), **config}
        flags = {name: bool(own.get(name, defaults[speculators])) for name, defaults in FLAGS.items()}
        rope = _rope_parameters(layer)
        window = layer["sliding_window"] if "sliding_attention" in (layer.get("layer_types") or ()) else None
        files = _weight_files(folder)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{asked_by}: {folder} is no EAGLE-3 checkpoint ({error!r})") from None
    if not files:
        raise ValueError(
            f"{asked_by}: {folder} has no .safetensors file; pickled weights are not read, convert them first"
        )
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            tensors |= {_our_name(name): value for name, value in load_file(path).items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{asked_by}: {path} is not readable: {error}") from None
    token_ids = _token_ids(f"{asked_by}: {folder}", tensors)
    learnt = {name: value for name, value in tensors.items() if not name.startswith(ELSEWHERE)}
    read = (folder / CONFIG, *files)
    return Checkpoint(
        folder=folder,
        form="speculators" if speculators else "plain",
        digest=digest([digest_file(path) for path in read]),
        files=read,
        config=own,
        layer=layer,
        embed_tokens=tensors.get("embed_tokens.weight"),
        flags=flags,
        sliding_window=window,
        rope_parameters=rope,
        tensors=learnt,
        token_ids=token_ids,
    )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files: those that the index names, if there is one; else all. Raises ValueError for others."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    foreign = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if foreign:
        raise ValueError(f"{INDEX_FILE} names {visible(foreign[0])}, which is no .safetensors file of this folder")
    return [folder / name for name in names]


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _token_ids(place: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Verifier ids of the checkpoint's draft tokens, ascending; takes d2t and t2d out of the tensors."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    for name, value, dims in (("d2t", d2t, 1), ("t2d", t2d, 1), ("lm_head.weight", tensors.get("lm_head.weight"), 2)):
        if value is not None and value.dim() != dims:
            raise ValueError(f"{place}: {name} has shape {list(value.shape)} instead of {dims} dimensions")
    rows = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else len(d2t) if d2t is not None else 0
    ids = torch.arange(rows) if d2t is None else torch.arange(len(d2t)) + d2t.long()
    if len(ids) != rows or (ids[1:] <= ids[:-1]).any() or (len(ids) and ids[0] < 0):
        raise ValueError(f"{place}: d2t does not fit its {rows} head rows, or its ids do not ascend")
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids):
        raise ValueError(f"{place}: d2t and t2d name different tokens")
    return ids


def _rope_parameters(layer: dict[str, Any]) -> dict[str, Any] | None:
    """As transformers 5 keeps them; None when the config says nothing."""
    if layer.get("rope_parameters"):
        return dict(layer["rope_parameters"])
    if "rope_theta" not in layer:
        return None
    scaling = dict(layer.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    return {"rope_type": kind, "rope_theta": layer["rope_theta"], **scaling}
