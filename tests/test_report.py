"""The page: in a real browser, without network, with hostile text, by mouse and by keyboard."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from eagle3.acceptance import Answer, Prompt, Setting, Step
from eagle3.breakdown import Breakdown, Words
from eagle3.reasoning import Marker, Markers, ThinkingFinder
from eagle3.report.curves import line_chart
from eagle3.report.page import Report, render
from eagle3.report.tokens import MOST_TOKENS, spell, viewer_answers

TEXTS = [
    b"<think>",
    b"</think>",
    b" one",
    b"2",
    b"</script><b onmouseover=alert(1)>",
    b"\xc3",
    b"\xa4",
    b"\n",
    b"<end>",
]
PIECES = dict(enumerate(TEXTS))
THINK, CLOSE, ONE, DIGIT, HOSTILE, HALF, OTHER_HALF, LINE, END = range(len(TEXTS))
FINDER = ThinkingFinder(Markers(Marker("<think>", (THINK,)), Marker("</think>", (CLOSE,)), ()), PIECES)
CATEGORIES = ["mathematics", "writing", "<i>code</i>"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


def answered(number: int, length: int) -> Answer:
    """Answers of even numbers have every second draft refused, those of odd numbers none."""
    beginning = [ONE, HOSTILE, CLOSE, HALF, OTHER_HALF, *([ONE, DIGIT, LINE] * length)]
    ids = [*beginning[:length], END]
    steps = []
    place = 1
    while place < len(ids) - 3:
        accepted = 2 if number % 2 or len(steps) % 2 else 1
        drafted = [*ids[place : place + accepted], *[HOSTILE] * (2 - accepted)]
        steps.append(Step(place, drafted, accepted, accepted + 1))
        place += accepted + 1
    prompt = Prompt(f"p{number}", CATEGORIES[number % 3], "s", [ONE, HOSTILE, THINK])
    return Answer(prompt, Setting(2, 1), "draft", number, ids, "stop", 1.0, steps)


def page_of(answers: list[Answer]) -> str:
    breakdown = Breakdown(FINDER, Words(PIECES, frozenset({THINK, CLOSE, END})), [True] * len(TEXTS))
    for answer in answers:
        breakdown.add(answer)
    metrics = {
        "acceptance_length": 2.6,
        "acceptance_length_low": 2.5,
        "acceptance_length_high": 2.7,
        "speedup": 1.5,
        "tokens_per_second_plain": 100.0,
        "tokens_per_second_draft": 150.0,
        "num_prompts": len(answers),
        "num_drafts": 1234,
        "best_num_speculative_tokens": 2,
        "speedup_by_batch_size": {"1": {"1": 1.2, "2": 1.5}, "16": {"1": 0.9, "2": 0.8}},
        "best_by_batch_size": {"1": 2, "16": 0},
        "settings": {
            "2_tokens_batch_1": {
                "acceptance_length": 2.6,
                "speedup": 1.5,
                "num_drafts": 1234,
                "tokens_per_second_plain": 100.0,
                "tokens_per_second_draft": 150.0,
            }
        },
    }
    curve = line_chart("Loss <b>", "step", {"train": [(0, 3.0), (10, 2.0)], "validation": [(10, 2.5)]})
    return render(
        Report(
            title="EAGLE-3 draft for <verifier>",
            tokens_drafted=2,
            batch_size=1,
            metrics=metrics,
            breakdown=list(breakdown.rows()),
            answers=viewer_answers(answers, PIECES, FINDER, 200),
            num_answers=len(answers),
            lineage={"verifier": "</pre><script>alert(1)</script>"},
            curves=[curve],
            notes=["A note."],
        )
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = os.environ.get("BROWSER") or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine; install it (Debian: chromium), or name one in BROWSER")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=FLAGS, chromium_sandbox=os.getuid() != 0)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """A page with 200 answers of 300 tokens, whose console and requests are watched."""
    (tmp_path / "report.html").write_text(page_of([answered(number, 300) for number in range(200)]))
    opened = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    opened.goto((tmp_path / "report.html").as_uri())
    yield opened
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == 1  # itself
    opened.close()


def first_answer(page: Page) -> Locator:
    """The answer on top of the list, in sight."""
    page.locator("article").first.scroll_into_view_if_needed()
    page.locator("article .t").first.wait_for()
    return page.locator("article .answer").first


def test_it_opens_in_under_a_second_and_shows_what_is_in_sight(page: Page) -> None:
    ready_ms = page.evaluate("performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart")
    assert ready_ms < 1000
    assert page.locator("article").count() == 200
    assert page.locator("#status").inner_text() == "200 of 200 answers"
    assert page.locator("article .t").count() == 0  # nothing is in sight yet
    first_answer(page)
    assert 0 < page.locator("article .t").count() < 200 * 300 / 4


def test_hostile_text_stays_text(page: Page) -> None:
    assert page.title() == "EAGLE-3 draft for <verifier>"
    assert page.locator("b, i, script:not([id])").count() == 1  # our own script
    first = first_answer(page)
    assert "</script><b onmouseover=alert(1)>" in first.inner_text()
    assert "ä" in first.inner_text()  # of two tokens
    assert "</pre><script>" in page.locator("pre").inner_text()


def test_filter_order_and_search(page: Page) -> None:
    page.select_option("#category", "mathematics")
    assert page.locator("#status").inner_text() == "67 of 200 answers"
    assert {text.split(" · ")[0] for text in page.locator("article h3").all_text_contents()} == {"mathematics"}
    lengths = [
        float(re.findall(r"length ([\d.]+)", text)[0]) for text in page.locator("article h3").all_text_contents()
    ]
    assert lengths == sorted(lengths)
    page.select_option("#order", "best")
    lengths = [
        float(re.findall(r"length ([\d.]+)", text)[0]) for text in page.locator("article h3").all_text_contents()
    ]
    assert lengths == sorted(lengths, reverse=True)
    page.fill("#contains", "nowhere to be found")
    assert page.locator("#status").inner_text() == "0 of 200 answers"
    page.fill("#contains", "")
    page.select_option("#category", "")
    assert page.locator("article").count() == 200


def shown_lengths(page: Page) -> list[float]:
    headings = page.locator("article h3").all_text_contents()
    return [float(re.findall(r"length ([\d.]+)", heading)[0]) for heading in headings]


def test_what_was_refused_is_shown_on_hover(page: Page) -> None:
    token = first_answer(page).locator(".r").first
    token.scroll_into_view_if_needed()
    token.hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert tip.inner_text().startswith("refused: </script><b onmouseover=alert(1)>")
    page.mouse.move(0, 0)
    page.locator("h1").hover()
    assert not tip.is_visible()


def test_keys_walk_through_answers_and_refused_drafts(page: Page) -> None:
    def focused() -> Any:
        return page.evaluate("document.activeElement.dataset.number")

    shown = page.locator("article").evaluate_all("cards => cards.map((card) => card.dataset.number)")
    page.keyboard.press("j")
    assert focused() == shown[0]
    page.keyboard.press("j")
    assert focused() == shown[1]
    page.keyboard.press("k")
    assert focused() == shown[0]
    page.keyboard.press("ArrowRight")
    first = page.locator("article .at").get_attribute("data-place")
    assert "refused:" in page.locator("#spoken").inner_text()  # for screen readers
    page.keyboard.press("ArrowRight")
    assert page.locator("article .at").get_attribute("data-place") != first
    page.keyboard.press("ArrowLeft")
    assert page.locator("article .at").get_attribute("data-place") == first
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    page.locator("#contains").focus()
    page.keyboard.type("j")
    assert page.locator("#contains").input_value() == "j"  # a letter, not a command


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_can_be_read_light_and_dark_wide_and_narrow(page: Page, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    first_answer(page)
    for selector in ("body", "small", "article .t", ".p1", ".p2", "article h3"):
        assert contrast(page, selector) >= 4.5, selector


def contrast(page: Page, selector: str) -> float:
    """WCAG contrast of an element's text and the background that it stands on."""
    ink, back = page.locator(selector).first.evaluate(
        """(element) => {
            const clear = (colour) => colour === "transparent" || colour.endsWith(", 0)");
            let behind = element;
            while (clear(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
            return [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
        }"""
    )
    lights = sorted(luminance(re.findall(r"[\d.]+", colour)[:3]) for colour in (ink, back))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(channels: list[str]) -> float:
    shares = [float(channel) / 255 for channel in channels]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_number_stands_in_a_table_that_can_be_read_without_the_script() -> None:
    text = page_of([answered(number, 40) for number in range(6)])
    assert text.count("<caption>") == 8
    assert "too few prompts" in text or re.search(r"\d to \d", text)
    assert "<noscript>" in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)


def test_tokens_are_by_who_wrote_them() -> None:
    answer = answered(0, 30)
    (shown,) = viewer_answers([answer], PIECES, FINDER, 5)
    assert shown["by"][:6] == [0, 1, 0, 1, 2, 0]  # verifier; one accepted, then its own; two accepted, then its own
    assert shown["rejected"]["2"] == ["</script><b onmouseover=alert(1)>"]
    assert shown["parts"] == [["thinking", 0, 3], ["answer", 3, 31]]
    assert shown["length"] == sum(step.emitted for step in answer.steps) / len(answer.steps)


def test_long_answers_are_cut_and_counted() -> None:
    (shown,) = viewer_answers([answered(1, MOST_TOKENS + 50)], PIECES, FINDER, 5)
    assert len(shown["texts"]) == len(shown["by"]) == MOST_TOKENS
    assert shown["tokens"] == MOST_TOKENS + 51
    assert max(map(int, shown["rejected"]), default=0) < MOST_TOKENS


def test_a_character_of_two_tokens_stands_at_the_second() -> None:
    assert spell([HALF, OTHER_HALF, HALF], PIECES) == ["", "ä", "\ufffd"]
    json.dumps(spell([HALF], PIECES))
