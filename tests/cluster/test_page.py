"""The chat page at / in headless Chromium: streams, folds the reasoning, tells the time it took. Skipped where there is no
Chromium; the picture of the page stays in BUILD/chat-page.png."""
import json

import httpx
import pytest

from browser import PROGRAM, Browser
from conftest import BUILD, IS_SANITIZED

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (the distribution may have none)")
LAST = "document.querySelector('.turn.assistant:last-child')"
IS_OVER = f"!!{LAST}?.querySelector('.timing') && document.getElementById('send').textContent === 'Send'"


@pytest.fixture
def page(fleet, tmp_path):
    b = Browser(tmp_path, patience=60 if not IS_SANITIZED else 300)
    try:
        b.open(f"http://{fleet.router.http}/")
        b.js("document.getElementById('temperature').value = 0")
        yield b
    finally:
        b.close()


def ask(page, text):
    page.js("document.getElementById('input').focus()")
    page.type(text)
    page.key("Enter", 13)
    page.wait("the question is on the page", f"[...document.querySelectorAll('.user .text')].at(-1)?.textContent === {json.dumps(text)}")


def answer(page):
    page.wait("the answer is over", IS_OVER)
    return page.js(f"[...{LAST}.children].find(e => e.className === 'text')?.textContent")


def test_it_is_one_file_that_asks_for_no_other(fleet):
    reply = httpx.get(f"http://{fleet.router.http}/")
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "http://" not in reply.text and "https://" not in reply.text and "src=" not in reply.text
    assert httpx.head(f"http://{fleet.router.http}/").status_code == 200
    assert httpx.post(f"http://{fleet.router.http}/").status_code == 405


@needs_browser
def test_a_question_is_answered_with_folded_reasoning_and_timing(page, fleet):
    ask(page, "What is 47 + 38?")
    assert answer(page) == "47 + 38 = 85."
    assert page.js(f"{LAST}.querySelector('details').open") is False
    assert page.js(f"{LAST}.querySelector('summary').textContent").startswith("Thought for ")
    page.js(f"{LAST}.querySelector('summary').click()")
    assert page.js(f"{LAST}.querySelector('details').open") is True
    assert page.js(f"{LAST}.querySelector('details .text').textContent").startswith("Ones: 7 + 8 = 15")
    timing = page.js(f"{LAST}.querySelector('.timing').textContent")
    for word in ("first token after", "tokens/s", "reasoning", "prompt", "in all"):
        assert word in timing
    assert page.js("document.getElementById('model').textContent") == "tiny-model"
    ask(page, "What is the capital of France?")
    assert "Paris" in answer(page)
    page.screenshot(BUILD / "chat-page.png")
    assert (BUILD / "chat-page.png").stat().st_size > 10000
    assert page.complaints() == [] and page.hosts() == {fleet.router.http}


@needs_browser
def test_the_conversation_goes_on_and_begins_anew(page):
    ask(page, "My name is Alice.")
    answer(page)
    ask(page, "What is my name?")
    assert "Alice" in answer(page)
    page.js("document.getElementById('clear').click()")
    assert page.js("document.querySelectorAll('.turn').length") == 0
    ask(page, "What is 12 + 30?")
    assert answer(page) == "12 + 30 = 42."
    assert page.js("document.querySelectorAll('.turn').length") == 2


@needs_browser
def test_text_appears_while_it_is_written_and_can_be_stopped(page):
    page.js("""window.seen = []
               new MutationObserver(() => { const t = document.querySelector('.assistant .text'); if (t) seen.push(t.textContent.length) })
                 .observe(document.getElementById('turns'), { childList: true, subtree: true, characterData: true })""")
    ask(page, "Tell a short story about a fox and a lake.")
    page.wait("some of it is there", f"({LAST}?.querySelector('details, .text')?.textContent.length ?? 0) > 20")
    assert page.js("document.getElementById('send').textContent") in ("Stop", "Send")
    page.js("if (document.getElementById('send').textContent === 'Stop') document.getElementById('send').click()")
    page.wait("it is over", IS_OVER)
    assert len(page.js("[...new Set(seen)]")) > 1


@needs_browser
def test_instructions_effort_and_errors_are_shown(page):
    page.js("document.getElementById('system').value = 'Answer with the result only.'; document.getElementById('effort').value = 'low'")
    ask(page, "What is 47 + 38?")
    assert answer(page) == "85"
    assert page.js(f"{LAST}.querySelector('details')") is None
    page.js("document.getElementById('temperature').value = 99")
    ask(page, "What is 47 + 38?")
    page.wait("the error is told", IS_OVER)
    assert page.js(f"{LAST}.querySelector('.error').textContent").startswith("temperature: ")
    page.js("document.getElementById('temperature').value = 0")
    ask(page, "<b>What</b> is 12 + 30?")
    answer(page)
    assert page.js("document.querySelectorAll('#turns b').length") == 0
