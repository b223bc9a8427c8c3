"""Writes the examples: params.yaml with the settings of settings.yaml. Run: python -m examples.write"""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from eagle3.params_text import edited

FOLDER = Path(__file__).parent
SHIPPED = FOLDER.parent / "params.yaml"


def examples() -> dict[str, str]:
    """Name of each example -> the text of its params.yaml."""
    yaml, shipped = YAML(typ="safe", pure=True), SHIPPED.read_text()
    template = yaml.load(shipped)["prompts"]["sources"][0]
    wanted: dict[str, dict[str, Any]] = yaml.load((FOLDER / "settings.yaml").read_text())
    texts = {}
    for name, settings in wanted.items():
        sources = settings.get("prompts.sources", [{"path": "prompts/mine.jsonl", "name": "mine"}])
        texts[name] = edited(shipped, settings | {"prompts.sources": [template | source for source in sources]})
    return texts


if __name__ == "__main__":
    for name, text in examples().items():
        (FOLDER / f"{name}.yaml").write_text(text)
