"""The chat page, in a real browser."""

from __future__ import annotations

import re
import shutil
import threading

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from serve_app.config import ApiKey, IngressLimits
from serve_app.ingress.access import new_key
from serve_app.ingress.chat_page import FILES
from tests.api.server import MODEL, serving
from tests.fakes import EOS, ScriptedRunner, ids

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (make debian installs it)")

HOSTILE = """# A *title* with <b>tags</b>

<script>window.attacked = 1</script><img src=x onerror="window.attacked = 2">

[run](javascript:window.attacked=3) [data](data:text/html,<script>1</script>) [fine](https://example.com/a) **bold** `a<b>`

- one
- two
  1. inner
  2. inner too

| a | b |
|---|--:|
| 1 | `2` |

> quoted

```html
<script>window.attacked = 4</script>
```"""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """The page in a tab, and whatever the browser complained about."""

    def __init__(self, browser: Browser, url: str, **context) -> None:
        self.context = browser.new_context(**context)
        self.complaints: list[str] = []
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def say(self, text: str) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.keyboard.press("Enter")

    @property
    def answer(self):
        return self.page.locator("article.assistant").last


def scripted(text: str, **options) -> ScriptedRunner:
    return ScriptedRunner(lambda prompt: [*ids(text), EOS], **options)


def test_type_stream_and_read_the_figures(browser):
    with serving(scripted("Hello, *you*.", step_s=0.01)) as server, Opened(browser, server.url) as tab:
        expect(tab.page.get_by_label("Model", exact=True)).to_have_value(MODEL)
        tab.say("Hi there")
        expect(tab.page.locator("article.user .body")).to_have_text("Hi there")
        expect(tab.answer.locator(".body")).to_have_text("Hello, you.")
        expect(tab.answer.locator(".body em")).to_have_text("you")
        expect(tab.answer.locator(".figures")).to_contain_text(
            re.compile(r"first token after \d+ ms, \d+ tokens, [\d.]+ tokens/s")
        )
        expect(tab.page.get_by_role("status")).to_have_text("Answer complete.")
        expect(tab.page.get_by_label("Message")).to_have_value("")
        tab.say("And more")
        expect(tab.page.locator("article")).to_have_count(4)
        expect(tab.answer.locator(".figures")).to_contain_text("tokens/s")
        prompt = server.client.requests[-1].prompt_token_ids
        assert len(prompt) > len(server.client.requests[0].prompt_token_ids)  # the conversation, not the last message
        assert tab.complaints == []


def test_stop_ends_the_work_and_keeps_what_came(browser):
    with serving(scripted("word " * 150, step_s=0.02)) as server, Opened(browser, server.url) as tab:
        for stop in (
            lambda: tab.page.get_by_role("button", name="Stop").click(),
            lambda: tab.page.keyboard.press("Escape"),
        ):
            tab.say("go on")
            expect(tab.answer.locator(".body")).to_contain_text("word word")
            stop()
            expect(tab.answer.locator(".figures")).to_contain_text("stopped")
            expect(tab.page.get_by_role("button", name="Send")).to_be_visible()
            server.wait_until_idle()
        assert server.engine.stats().num_drawn_tokens < 1400


def test_settings_are_sent_and_only_those_that_were_moved(browser):
    with serving(scripted("x")) as server, Opened(browser, server.url) as tab:
        tab.say("as you like")
        expect(tab.page.get_by_role("status")).to_have_text("Answer complete.")
        tab.page.get_by_label("Temperature").fill("0.5")
        tab.page.get_by_label("Most tokens of an answer").fill("7")
        tab.page.get_by_label("Seed").fill("42")
        tab.page.get_by_label("System prompt").fill("Be brief.")
        tab.say("as I like")
        expect(tab.page.locator("article")).to_have_count(4)
        expect(tab.page.get_by_role("status")).to_have_text("Answer complete.")
        untouched, touched = server.client.requests
        assert (touched.sampling.temperature, touched.sampling.seed, touched.sampling.max_tokens) == (0.5, 42, 7)
        assert untouched.sampling.temperature != 0.5
        tab.page.reload()
        expect(tab.page.get_by_label("System prompt")).to_have_value("Be brief.")
        tab.page.get_by_role("button", name="own settings").click()
        expect(tab.page.get_by_label("System prompt")).to_have_value("")


def test_an_error_is_told_in_the_servers_words_and_tried_again(browser):
    runner = scripted("fine")
    with serving(runner, max_waiting_tokens=4000) as server, Opened(browser, server.url) as tab:
        tab.page.get_by_label("Message").fill("x" * 9000)
        tab.page.keyboard.press("Enter")
        alert = tab.page.get_by_role("alert")
        expect(alert).to_contain_text("context")
        expect(tab.page.locator("article.assistant")).to_have_count(0)
        tab.page.get_by_role("button", name="New conversation").click()
        expect(alert).to_be_hidden()
        fails = threading.Event()
        fails.set()

        def fail(plan):
            if fails.is_set():
                raise RuntimeError("the step is broken")

        runner.before_step = fail
        tab.say("now")
        expect(alert).to_be_visible()
        fails.clear()
        tab.page.get_by_role("button", name="Try again").click()
        expect(tab.answer.locator(".body")).to_have_text("fine")
        expect(alert).to_be_hidden()


def test_a_conversation_survives_a_reload_also_in_the_middle_of_an_answer(browser):
    with serving(scripted("word " * 150, step_s=0.02)) as server, Opened(browser, server.url) as tab:
        tab.say("go on")
        expect(tab.answer.locator(".body")).to_contain_text("word word")
        tab.page.reload()
        expect(tab.page.locator("article.user .body")).to_have_text("go on")
        expect(tab.answer.locator(".body")).to_contain_text("word word")
        expect(tab.answer.locator(".figures")).to_contain_text("broken off")
        server.wait_until_idle()  # who left is not computed for


def test_what_a_model_writes_can_do_nothing(browser):
    with serving(scripted(HOSTILE)) as server, Opened(browser, server.url) as tab:
        tab.say("attack")
        expect(tab.page.get_by_role("status")).to_have_text("Answer complete.")
        body = tab.answer.locator(".body")
        expect(body.locator("h3")).to_have_text("A title with <b>tags</b>")
        expect(body).to_contain_text('<img src=x onerror="window.attacked = 2">')
        assert [link.get_attribute("href") for link in body.locator("a").all()] == ["https://example.com/a"]
        expect(body.locator("pre code")).to_have_text("<script>window.attacked = 4</script>")
        expect(body.locator("ul > li")).to_have_count(2)
        expect(body.locator("ul > li > ol > li")).to_have_count(2)
        expect(body.locator("tbody td")).to_have_text(["1", "2"])
        expect(body.locator("blockquote")).to_have_text("quoted")
        assert body.locator("img, script, b").count() == 0
        assert tab.page.evaluate("window.attacked") is None
        # and what would get past the rendering is held by the page's policy
        inserted = (
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.attacked=5'}))"
        )
        tab.page.evaluate(inserted)
        assert tab.page.evaluate("window.attacked") is None


def test_it_asks_for_a_key_where_one_is_needed(browser):
    secret, digest = new_key()
    keys = [ApiKey(name="alice", sha256=digest)]
    with (
        serving(scripted("let in"), limits=IngressLimits(api_keys=keys)) as server,
        Opened(browser, server.url) as tab,
    ):
        expect(tab.page.get_by_role("alert")).to_contain_text("API key is required")
        for key in ("wrong", secret):
            tab.page.get_by_label("API key").fill(key)
            tab.page.keyboard.press("Enter")
        expect(tab.page.get_by_label("Model", exact=True)).to_have_value(MODEL)
        tab.say("hello")
        expect(tab.answer.locator(".body")).to_have_text("let in")
        tab.page.reload()
        expect(tab.page.get_by_label("Model", exact=True)).to_have_value(MODEL)  # the tab remembers
        assert tab.page.evaluate("JSON.stringify(localStorage)").count(secret) == 0


def test_it_is_usable_by_keyboard_and_screen_reader(browser):
    with serving(scripted("x")) as server, Opened(browser, server.url) as tab:
        expect(tab.page.get_by_label("Message")).to_be_focused()
        names = tab.page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea")]
                .map(e => [e.id, e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.textContent.trim()])"""
        )
        assert all(name for _, name in names), names
        for role in ("main", "banner", "complementary", "log", "status"):
            assert tab.page.get_by_role(role).count() == 1, role
        tab.page.keyboard.press("Tab")
        expect(tab.page.get_by_role("button", name="Send")).to_be_focused()
        tab.page.get_by_role("button", name="Settings", exact=True).focus()
        tab.page.keyboard.press("Enter")
        expect(tab.page.get_by_role("complementary")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_colours_have_contrast_in_light_and_dark(browser, scheme):
    with serving(scripted("x")) as server, Opened(browser, server.url, color_scheme=scheme) as tab:
        colours = tab.page.evaluate(
            """() => { const made = getComputedStyle(document.body); return [made.color, made.backgroundColor] }"""
        )
        ink, paper = (luminance([int(part) for part in re.findall(r"\d+", colour)[:3]]) for colour in colours)
        assert (ink < paper) == (scheme == "light")
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7  # WCAG's AAA
        tab.page.get_by_role("button", name="Colours").click()  # light, whatever the system has
        assert tab.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"


def luminance(colour):
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_pages_files_are_all_served_and_forbid_what_is_not_theirs():
    with serving(scripted("x")) as server:
        for path in FILES:
            answer = server.http.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
