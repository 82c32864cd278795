"""The page of `flowgrpo taste` in a headless Chromium, by the keyboard alone."""

import threading

import pytest
from playwright.sync_api import expect

from flowgrpo.contrib.taste.votes import SKIP, TIE, Vote, VoteLog
from flowgrpo.tools.vote import server
from flowgrpo.tools.vote.live import LiveBallot
from tests.browser.opened import DESK, PHONE, opened, overflow
from tests.tools.vote.test_live import never, questions


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_keys_vote_and_new_images_come_while_it_serves(browser, size, tmp_path):
    live = LiveBallot(VoteLog(tmp_path / "votes.jsonl"), seconds=600)
    live.ask(questions(tmp_path, 0, 4))
    with server.server(live, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            with opened(browser, server.address(serving), size) as page:
                prompt, sides = page.locator("#prompt"), page.locator(".side img")
                expect(prompt).to_have_text("prompt 0 0")
                expect(sides).to_have_count(4)
                assert overflow(page) <= 0 and page.evaluate("document.body.scrollHeight - innerHeight") <= 0
                page.keyboard.press("3")
                expect(prompt).to_have_text("prompt 0 1")
                page.keyboard.press("u")
                expect(prompt).to_have_text("prompt 0 0")
                for key, then in (("4", "prompt 0 1"), ("0", "prompt 0 2")):
                    page.keyboard.press(key)
                    expect(prompt).to_have_text(then)
                page.keyboard.press("p")
                expect(sides).to_have_count(2)
                page.keyboard.press("4")  # not shown
                page.keyboard.press("2")
                expect(prompt).to_have_text("prompt 0 3")
                page.keyboard.press("s")
                expect(prompt).to_have_text("The next images are being drawn")
                assert live.wait(0, never) == {0: Vote((0, 1, 2, 3), 3), 1: Vote((0, 1, 2, 3), TIE),
                                               2: Vote((0, 1), 1), 3: Vote((0, 1), SKIP)}
                live.tell(updates=1, foretold={"right": 2, "of": 3})
                live.ask(questions(tmp_path, 1, 1, check=True) + questions(tmp_path, 1, 1))
                expect(prompt).to_have_text("prompt 1 0")
                expect(page.locator("#facts")).to_contain_text("the head foretold 2 of the last 3 clicks")
                page.keyboard.press("1")
                expect(page.locator("#facts")).to_contain_text("now against the base: ")
                assert overflow(page) <= 0
                for _ in range(20):
                    page.keyboard.press("Tab")
                    if page.evaluate("document.activeElement.id") == "finish":
                        break
                page.keyboard.press("Enter")
                expect(prompt).to_contain_text("The session has ended")
        finally:
            serving.shutdown()
            thread.join()
    assert live.ended and list(live.log.votes) == ["0.q0", "0.q1", "0.q2", "0.q3", "1.c0"]
