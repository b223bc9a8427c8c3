"""Thinking at the server: how a server of ours is told to find and to bound it, and whether what it told fits the ids.

The ids are the truth and every later stage reads them alone, so a wrong parser changes no draft. It does spoil the
informational columns `reasoning` and `content`, and it is a sign that params.yaml and the model do not fit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3.params import ReasoningParams
from eagle3.reasoning import Markers, ThinkingFinder, parser_name
from eagle3.serving.answers import Answer

LOOKED_AT = 200  # answers, the first of a run
FEW = 4  # tokens between the markers that may be blanks, which parsers strip


def thinking_arguments(reasoning: ReasoningParams, markers: Markers, bounded: bool) -> dict[str, Any]:
    """Engine arguments that make a server tell thinking apart and, if `bounded`, obey a thinking budget.

    Raises ValueError when the thinking is to be bounded and has no markers.
    """
    arguments: dict[str, Any] = {}
    parser = parser_name(reasoning)
    if parser is not None:
        arguments["reasoning_parser"] = parser
    if bounded:
        if markers.start is None or markers.end is None:
            raise ValueError(
                "generate.thinking_token_budget is set, but the verifier has no think markers; set it to null, or name "
                "the markers: reasoning.format custom with reasoning.start and reasoning.end"
            )
        arguments["reasoning_config"] = {
            "reasoning_start_str": markers.start.text,
            "reasoning_end_str": markers.end.text,
        }
    return arguments


def parser_remedy(reasoning: ReasoningParams, local: bool) -> str:
    """How to give the server the parser of params.yaml's format."""
    name = parser_name(reasoning) or "NAME"
    asked = f"engine.extra_args: {{reasoning_parser: {name}}}" if local else f"start it with --reasoning-parser {name}"
    return asked if name != "NAME" else f"{asked} (the one that vLLM has for this model)"


def budget_remedy(markers: Markers, local: bool) -> str:
    """How to make the server obey generate.thinking_token_budget."""
    start = markers.start.text if markers.start else "<think>"
    end = markers.end.text if markers.end else "</think>"
    config = f'{{"reasoning_start_str": "{start}", "reasoning_end_str": "{end}"}}'
    if local:
        return f"set engine.extra_args: {{reasoning_config: {config}}}, or generate.thinking_token_budget: null"
    return f"start it with --reasoning-config '{config}', or set generate.thinking_token_budget: null"


@dataclass
class ParserCheck:
    """Compares what the server's reasoning parser told with the ids, until one answer settles it."""

    finder: ThinkingFinder
    remedy: str  # of parser_remedy
    looked_at: int = 0
    settled: bool = False

    def look(self, answer: Answer) -> str | None:
        """A warning, once, if parser and ids disagree; else None."""
        if self.settled or self.looked_at >= LOOKED_AT or not answer.prompt_token_ids or not answer.output_token_ids:
            return None
        self.looked_at += 1
        prompt, output = (np.asarray(ids, np.int32) for ids in (answer.prompt_token_ids, answer.output_token_ids))
        thinking = self.finder.find(prompt, output, truncated=answer.finish_reason == "length")
        if thinking.opened_by is None:
            self.settled = bool(answer.reasoning)
            return self._warning("reports reasoning where the ids hold no think marker") if self.settled else None
        if thinking.ended_by == "budget" or thinking.end - thinking.start <= FEW:
            return None  # parsers differ on what is cut or empty
        end = self.finder.markers.end
        left_in = end is not None and end.text in (answer.content or "")
        self.settled = True
        if answer.reasoning and not left_in:
            return None
        return self._warning("leaves the thinking inside the content" if answer.content else "drops the thinking")

    def _warning(self, what: str) -> str:
        return (
            f"warning: the server's reasoning parser {what}. Ids are the truth, so the training data is the same; "
            f"to have the columns reasoning and content right: {self.remedy}, and check reasoning.format"
        )
