"""The page of `flowgrpo vote` in a headless Chromium."""

import json
import threading

import pytest
from playwright.sync_api import expect

from flowgrpo.tools.vote import server
from flowgrpo.tools.vote.ballot import Ballot
from flowgrpo.tools.vote.sources import pairs
from tests.browser.opened import DESK, PHONE, opened, overflow
from tests.tools.vote.test_vote import folders


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_keys_vote_and_the_last_page_sums_up(browser, size, tmp_path):
    ballot = Ballot(*pairs(folders(tmp_path, 3)), tmp_path / "pairs.jsonl", 0)
    with server.server(ballot, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            with opened(browser, server.address(serving), size) as page:
                expect(page.locator("#progress")).to_contain_text("0 of 3")
                assert overflow(page) <= 0 and page.locator("#prompt").inner_text().startswith("prompt ")
                first = page.locator("#prompt").inner_text()
                page.keyboard.press("ArrowLeft")
                expect(page.locator("#prompt")).not_to_have_text(first)
                page.keyboard.press("u")
                expect(page.locator("#prompt")).to_have_text(first)
                seen = first
                for key in ("ArrowLeft", "ArrowRight"):
                    page.keyboard.press(key)
                    expect(page.locator("#prompt")).not_to_have_text(seen)
                    seen = page.locator("#prompt").inner_text()
                page.keyboard.press("t")
                expect(page.locator("#summary")).to_contain_text("all prompts")
                assert overflow(page) <= 0
        finally:
            serving.shutdown()
            thread.join()
    written = [json.loads(line) for line in ballot.output.read_text().splitlines()]
    assert [row.get("aspects") for row in written].count({"overall": "tie"}) == 1 and len(written) == 3
